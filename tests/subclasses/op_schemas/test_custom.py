"""Custom ops in a process that serves: their kernels are called without Dynamo."""

import subprocess
import sys
import textwrap

import pytest


@pytest.mark.slow
def test_the_first_call_imports_no_dynamo():
    code = """
        import sys
        import torch
        import torch.nn.functional as F
        from subclasses.keyed import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
        from subclasses.ragged import JaggedTensor

        x = JaggedTensor.from_tensors([torch.randn(n, 4) for n in (3, 1)])
        keyed = KeyedJaggedTensor(["a"], torch.tensor([1, 2, 0]), torch.tensor([2, 1]))
        bags = EmbeddingBagCollection({"a": torch.nn.EmbeddingBag(4, 3, mode="sum")})
        with torch.no_grad():
            F.scaled_dot_product_attention(x, x, x)
            bags(keyed)
            EmbeddingCollection({"a": torch.nn.Embedding(4, 3)})(keyed)
        assert "torch._dynamo" not in sys.modules
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert made.returncode == 0, made.stderr
