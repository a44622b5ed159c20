"""The Inductor backend in a process that has imported nothing of Inductor yet."""

from __future__ import annotations

import subprocess
import sys

POOLED = """
import torch
import desugar

def pool(x):
    return torch.nn.functional.max_pool1d(x, 2).sin()

x = torch.randn(2, 3, 8)
desugar.save({path!r}, pool, desugar.call(x), native=False)
torch.testing.assert_close(desugar.load({path!r}, native=False)(x), pool(x))
"""


def test_max_pool_in_a_new_process(tmp_path):
    text = POOLED.format(path=str(tmp_path / "pool.pt2"))
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
