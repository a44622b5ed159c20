"""PyTorch's own op database for `torch.nested`, run on both ragged layouts; see database.py."""

import pytest
import torch

from tests.subclasses.ragged.database import (
    LAYOUTS,
    OPS,
    RANDOM,
    REFERENCE_ERRORS,
    alike,
    biased,
    check_values,
    converted,
    count,
    grads_of,
    parts_of,
    run_compiled,
    run_eager,
    samples_of,
)

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
    "masked.mean": "without a ragged mask it would count the padding",
    "masked.std": "without a ragged mask it would count the padding",
    "masked.var": "without a ragged mask it would count the padding",
    "bmm": "the reference takes arguments out of the sample",
    "split": "a row cut in pieces of a given length gives another number of pieces for each row",
    "nn.functional.prelu": "the channels of a row are those of the outer dimension 1, ragged or not",
}

# Refused in a graph besides: how many entries a result has depends on the data.
DATA_DEPENDENT = dict.fromkeys(("jagged", "counted"), ("masked_select", "select")) | {"padded": ("select",)}


layouts = pytest.mark.parametrize("layout", LAYOUTS)
ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op.full_name)


def check(op, layout, run, stride=1):
    """All samples are right, and their gradients."""
    if op.full_name in REFUSED:
        pytest.skip(REFUSED[op.full_name])
    for errors in count(op, layout, run, stride):
        wrong = [error for error in errors if error and "with a count" not in error]
        assert not wrong, wrong[0]


@layouts
@ops
def test_eager(op, layout):
    check(op, layout, run_eager)


@layouts
@ops
def test_compiled(op, layout):
    if op.full_name in DATA_DEPENDENT[layout]:
        pytest.skip("the size of a result depends on the data")
    check(op, layout, run_compiled, max(1, len(samples_of(op)) // 4))


def grad_of(bias, results):
    """The gradient of a bias, where results have one."""
    recorded = any(isinstance(t, torch.Tensor) and t.requires_grad for t in results)
    return grads_of([bias], results, materialize_grads=True) if recorded else None


@pytest.mark.parametrize("layout", ["jagged", "padded"])
@pytest.mark.parametrize("op", [op for op in OPS if op.supports_autograd], ids=lambda op: op.full_name)
def test_a_broadcast_bias(op, layout):
    """Its gradient comes from existing entries alone, whatever op the biased rows go through."""
    if op.full_name in REFUSED or any(name in op.name for name in RANDOM):
        pytest.skip("refused, or random")
    for sample, found in ((sample, biased(sample)) for sample, _ in samples_of(op)[::3]):
        if found is None:
            continue
        reference, bias = found
        try:
            expected = parts_of(op.ref(op, reference))
            theirs = grad_of(bias, expected)
        except REFERENCE_ERRORS:
            continue
        ours = converted(sample, LAYOUTS[layout])
        ours.input = ours.input + bias
        got = alike(parts_of(run_eager(op, ours)), expected)
        check_values(op, got, expected)
        torch.testing.assert_close(grad_of(bias, got), theirs, equal_nan=True, atol=1e-3, rtol=1e-3)
