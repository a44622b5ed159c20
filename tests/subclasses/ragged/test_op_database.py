"""PyTorch's own op database for `torch.nested`, run on `JaggedTensor`, with its loop over the rows as judge.

Each sample's nested tensors become ragged ones that share their values. A sample counts when the database's reference
itself works on it and knows of holes, which its references for reductions over the whole batch do not.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.opinfo.definitions.nested import njt_op_db
from torch.utils import _pytree as pytree

import desugar
from subclasses.ragged import JaggedTensor

pytestmark = [
    pytest.mark.slow,
    # The database builds nested tensors, which warn that they are a prototype, and its references reduce nothing.
    pytest.mark.filterwarnings("ignore"),
]

# Ops of which some samples are refused, or mean something else here, and why.
REFUSED = {
    "argmax": "an index into all entries of a batch has no meaning",
    "argmin": "an index into all entries of a batch has no meaning",
    "masked.argmax": "an index into all entries of a batch has no meaning",
    "masked.argmin": "an index into all entries of a batch has no meaning",
    "masked.mean": "torch.masked counts by the outer shape and asks no rule",
    "masked.var": "torch.masked counts by the outer shape and asks no rule",
    "masked.std": "torch.masked counts by the outer shape and asks no rule",
    "bmm": "the reference takes arguments out of the sample",
    "split": "a row cut in pieces of a given length gives another number of pieces for each row",
    "index_put": "no rule yet",
    "nn.functional.embedding_bag": "no rule yet",
    "nn.functional.prelu": "the channels of a row are those of the outer dimension 1, ragged or not",
}
OPS = [op for op in njt_op_db if op.supports_njt and torch.float32 in op.dtypes]
# Refused in a graph besides: how many entries a result has depends on the data.
DATA_DEPENDENT = ("masked_select", "select")
# Their derivatives are zeros, which PyTorch makes dense of the outer size.
DENSE_ZEROS = ("copysign", "nextafter", "sgn")
RANDOM = (
    "empty",
    "bernoulli",
    "rand",
    "normal",
    "dropout",
    "rrelu",
    "uniform",
    "exponential",
    "cauchy",
    "geometric",
)

# ---- samples ---------------------------------------------------------------------------------------------------


class Converted:
    """A sample with its nested tensors as ragged ones; equal offsets stay one tensor."""

    def __init__(self, sample: Any) -> None:
        self.known: dict[Any, Any] = {}
        self.input, self.args, self.kwargs = (
            pytree.tree_map(self._ragged, part) for part in (sample.input, sample.args, sample.kwargs)
        )

    def _ragged(self, t: Any) -> Any:
        if not (isinstance(t, Tensor) and t.is_nested):
            return t
        if id(t) not in self.known:
            place = next(d for d, n in enumerate(t.shape) if d and not isinstance(n, int))
            offsets, lengths = self._once(t.offsets()), self._once(t.lengths())
            x = JaggedTensor(t.detach().values(), offsets, lengths=lengths, ragged_dim=place)
            self.known[id(t)] = x.requires_grad_() if t.requires_grad else x
        return self.known[id(t)]

    def _once(self, t: Tensor | None) -> Tensor | None:
        return None if t is None else self.known.setdefault(t.data_ptr(), t.to(torch.int64))


def samples_of(op: Any) -> list[tuple[Any, list[Any]]]:
    """Samples with what the reference says about them."""
    found = []
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd):
        whole = any(words in sample.name for words in ("full reduction", "batch+ragged", "all dim"))
        if "holes" in sample.name and whole:
            continue
        try:
            found.append((sample, parts_of(op.ref(op, sample))))
        except (
            RuntimeError,
            ValueError,
            TypeError,
            IndexError,
            NotImplementedError,
            AssertionError,
            StopIteration,
        ):
            continue  # the reference does not work on this sample
    return found


def parts_of(result: Any) -> list[Any]:
    """Rows, dense tensors and numbers of a result."""
    parts: list[Any] = []
    for part in pytree.tree_leaves(result):
        if isinstance(part, JaggedTensor):
            parts += part.to_tensors() if part.ragged_dim else [part.entries()]
        elif isinstance(part, Tensor) and part.is_nested:
            parts += part.unbind()
        else:
            parts.append(part)
    return parts


def alike(got: list[Any], expected: list[Any]) -> list[Any]:
    """A dense result of one entry for each row in as many parts as the reference's."""
    dense = len(got) == 1 and isinstance(got[0], Tensor) and got[0].dim() > 0
    return list(got[0]) if dense and len(got[0]) == len(expected) > 1 else got


# ---- forward, backward, compiled -------------------------------------------------------------------------------


def check(op: Any, sample: Any, expected: list[Any], run: Any) -> None:
    converted = Converted(sample)
    got = alike(parts_of(run(converted)), expected)
    assert len(got) == len(expected)
    if any(name in op.name for name in RANDOM):
        return
    torch.testing.assert_close(got, expected, equal_nan=True, atol=1e-4, rtol=1e-4)
    check_gradients(op, sample, converted, got, expected)


def check_gradients(op: Any, sample: Any, converted: Converted, got: list[Any], expected: list[Any]) -> None:
    if not any(isinstance(t, Tensor) and t.requires_grad for t in expected):
        return
    grads = []
    for of, results in ((sample, expected), (converted, got)):
        leaves = [t for t in pytree.tree_leaves((of.input, of.args, of.kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
        try:
            grads.append(
                torch.autograd.grad(
                    outputs,
                    [t for t in leaves if t.requires_grad],
                    [torch.ones_like(t) for t in outputs],
                    allow_unused=True,
                )
            )
        except (RuntimeError, ValueError, NotImplementedError):
            if of is converted:
                raise
            return  # the reference has no derivative
    for theirs, ours in zip(*grads, strict=True):
        if op.name in DENSE_ZEROS and type(ours) is Tensor and theirs.is_nested:
            assert not ours.any()
        elif theirs is None or ours is None:
            assert all(g is None or not any(p.any() for p in parts_of(g)) for g in (theirs, ours))
        else:
            torch.testing.assert_close(parts_of(ours), parts_of(theirs), equal_nan=True, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.full_name)
def test_eager(op):
    if op.full_name in REFUSED:
        pytest.skip(REFUSED[op.full_name])
    for sample, expected in samples_of(op):
        check(op, sample, expected, lambda c: op.op(c.input, *c.args, **c.kwargs))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.full_name)
def test_compiled(op):
    if op.full_name in REFUSED:
        pytest.skip(REFUSED[op.full_name])
    if op.full_name in DATA_DEPENDENT:
        pytest.skip("the size of a result depends on the data")
    samples = samples_of(op)
    for sample, expected in samples[:: max(1, len(samples) // 4)]:
        torch.compiler.reset()
        with warnings.catch_warnings():
            compiled = desugar.compile(op.op, backend="eager")
            check(op, sample, expected, lambda c, f=compiled: f(c.input, *c.args, **c.kwargs))
