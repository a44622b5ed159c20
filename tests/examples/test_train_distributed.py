"""Distributed training in its quick form: the losses of one process, whoever has what, and a checkpoint goes on."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import train_distributed as example
from _ranks import TIMEOUT
from subclasses.int8 import Int8Tensor
from tests.examples.command import run_command

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_distributed.py"
QUICK = ["--quick", "--tokens", "1024", "--every", "1"]
LOSS = re.compile(r"^ +(\d+) +(\d+\.\d+) +\S+ +\S+ +(\d+)$", re.MULTILINE)

read_lines = functools.cache(example.read_lines)

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def losses_of(text: str) -> dict[int, float]:
    """The loss of each step of a report."""
    return {int(step): float(loss) for step, loss, _ in LOSS.findall(text)}


@pytest.fixture
def run(monkeypatch):
    """Runs the example in this process."""
    monkeypatch.setattr(example, "read_lines", read_lines)

    def invoke(*options):
        try:
            return run_command(example.main, *QUICK, *map(str, options))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return invoke


def on_two_ranks(script, *options):
    """Runs a script by torchrun."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    return subprocess.run(
        [sys.executable, *command, *QUICK, *map(str, options)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


# ---- one process -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_programs_serve_all_blocks(run, monkeypatch, tmp_path):
    jobs = []
    save = example.Job.save
    monkeypatch.setattr(example.Job, "save", lambda job, folder: (save(job, folder), jobs.append(job)))
    assert run("--steps", 6, "--save", tmp_path).exit_code == 0
    (model,) = (job.model for job in jobs)
    programs = [program for block in model.blocks for program in block.programs]
    assert len(programs) <= 3, "for the first size, for all others, and without gradients"
    weights = [p.to_local() for name, p in model.named_parameters() if name.endswith("linear.weight")]
    assert len(weights) == 9 and all(isinstance(w, Int8Tensor) for w in weights)


@pytest.mark.slow
def test_a_checkpoint_that_does_not_continue_fails(run, tmp_path, monkeypatch):
    assert run("--steps", 1, "--save", tmp_path).exit_code == 0
    evaluate = example.Job.evaluate
    monkeypatch.setattr(example.Job, "evaluate", lambda job: 1.01 * evaluate(job))
    result = run("--steps", 1, "--load", tmp_path)
    assert result.exit_code == 1 and "does not continue" in result.stderr


# ---- two processes ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "steps"), [(1, 5), (2, 13)])
def test_one_process_goes_on_where_others_were(ranks, steps, run, tmp_path):
    whole, options = losses_of(run("--steps", 16).stdout), ("--steps", steps, "--save", tmp_path)
    first = run(*options) if ranks == 1 else on_two_ranks(SCRIPT, *options)
    second = run("--steps", 16, "--load", tmp_path)
    assert second.exit_code == 0, second.output
    assert f"goes on after {steps} steps; ranks then {ranks}, now 1" in second.stdout
    assert list(whole) == list(range(1, 17)) and whole[16] < whole[1]
    assert losses_of(first.stdout) | losses_of(second.stdout) == pytest.approx(whole, rel=1e-4)
    assert max(int(spread) for *_, spread in LOSS.findall(first.stdout)) <= 64


FAILING = """
import typer
import torch.distributed as dist
import train_distributed as example

loss_of = example.Job.loss_of

def fails_on_one_rank(job, batch):
    if job.done.steps == 2 and dist.get_rank() == 1:
        raise RuntimeError("this rank has no more memory")
    return loss_of(job, batch)

example.Job.loss_of = fails_on_one_rank
typer.run(example.main)
"""


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_other(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    start = time.perf_counter()
    result = on_two_ranks(tmp_path / "failing.py", "--steps", 4)
    assert result.returncode != 0 and "this rank has no more memory" in result.stderr
    assert list(losses_of(result.stdout)) == [1]
    assert time.perf_counter() - start < TIMEOUT.total_seconds()
