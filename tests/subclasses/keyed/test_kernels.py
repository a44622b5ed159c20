"""The ops themselves: PyTorch's own checks of schema, sizes and gradients; the kernels for CUDA on the CPU."""

import pytest
import torch

from subclasses.keyed.kernels import (
    ENTRIES,
    LOOKUPS,
    NO_POOLING,
    Entries,
    Lookups,
    keyed_lookup,
    keyed_pool,
    parts_of,
    signature_of,
)
from tests.subclasses.ragged.judge import working
from tests.tables import giving
from tests.triton_kernels import interpret, needs_triton

OFFSETS = torch.tensor([[4, 6, 9], [1, 1, 4]])


def arguments(mode, weighted=False, lengths=None, sparse=False):
    torch.manual_seed(0)
    tables = [torch.randn(5, d, dtype=torch.float64, requires_grad=True) for d in (2, 3)]
    weights = torch.rand(9, dtype=torch.float64, requires_grad=True) if weighted else None
    entries = Entries(torch.randint(0, 5, (9,)), OFFSETS, lengths, weights)
    return (tables, *entries, *Lookups([mode] * 2, [-1, 0], [False, False], sparse, [0, 1]))


def with_weights():
    tables, values, *rest = arguments(0, weighted=True)
    return (lambda a, b, w: keyed_pool([a, b], values, rest[0], None, w, *rest[3:])[0]), (*tables, rest[2])


def entry_by_entry():
    tables = [torch.randn(5, 2, requires_grad=True) for _ in range(2)]
    how = Lookups([NO_POOLING] * 2, [-1, 1], [False, True], False, [0, 1])
    return (tables, *Entries(torch.randint(0, 5, (9,)), OFFSETS), *how)


GAPS = torch.tensor([[2, 1], [0, 3]])
test_what_pytorch_asks_of_an_op = working(
    {
        **{
            f"pool, mode {mode}, {lengths}": lambda mode=mode, lengths=lengths: torch.library.opcheck(
                keyed_pool, arguments(mode, lengths=lengths)
            )
            for mode, lengths in ((0, None), (1, GAPS), (2, GAPS))
        },
        "pool, weighted": lambda: torch.library.opcheck(keyed_pool, arguments(0, weighted=True)),
        "gradients, weighted": lambda: torch.autograd.gradcheck(*with_weights()),
        "lookup": lambda: torch.library.opcheck(keyed_lookup, entry_by_entry()),
    }
)


def described(lengths):
    """Positions and starts of both parts."""
    return [
        (p.positions if lengths is None else p.positions.tolist(), p.starts.tolist())
        for p in parts_of(OFFSETS, lengths)
    ]


test_parts = giving(
    {
        "back to back": (lambda: described(None), [(slice(4, 9), [0, 2]), (slice(1, 4), [0, 0])]),
        "gaps": (
            lambda: described(torch.tensor([[1, 2], [0, 3]])),
            [([4, 6, 7], [0, 1]), ([1, 2, 3], [0, 0])],
        ),
    }
)

# ---- the kernels for CUDA, by Triton's interpreter ---------------------------------------------------------------

# In the interpreter, `wrap_triton` does not accept a kernel; the ops call its result.
SCRIPT = """
import itertools
import torch
torch.library.wrap_triton = lambda kernel: kernel
from subclasses.keyed.cuda_ops import keyed_lookup_cuda, keyed_pool_cuda
from subclasses.keyed.kernels import MAX, MEAN, NO_POOLING, SUM, Entries, Lookups, keyed_lookup, keyed_pool

torch.manual_seed(0)
offsets = torch.tensor([[0, 3, 3, 5], [5, 6, 6, 11]])
gaps = torch.tensor([[2, 0, 1], [1, 0, 4]])


def grads_of(op, tables, entries, lookups):
    tables = [t.detach().clone().requires_grad_() for t in tables]
    weights = entries.weights if entries.weights is None else entries.weights.detach().clone().requires_grad_()
    results = op(tables, *entries._replace(weights=weights), *lookups)
    first = results if isinstance(results, torch.Tensor) else results[0]
    leaves = tables + ([] if weights is None else [weights])
    g = torch.linspace(-1, 1, first.numel(), dtype=torch.float64).view(first.shape).to(first.dtype)
    return first, torch.autograd.grad(first, leaves, g)


def compare(ops, widths, entries, lookups, dtype):
    tables = [torch.randn(7, width, dtype=torch.float64).to(dtype) for width in widths]
    if entries.weights is not None:
        entries = entries._replace(weights=entries.weights.to(dtype))
    found, expected = (grads_of(op, tables, entries, lookups) for op in ops)
    torch.testing.assert_close(found, expected)


count = 0
for dtype, ids, lengths, padding in itertools.product(
    (torch.float32, torch.float64), (torch.int64, torch.int32), (None, gaps), (-1, 2)
):
    values = torch.tensor([0, 2, 5, 2, 2, 1, 6, 3, 3, 2, 0], dtype=ids)
    entries = Entries(values, offsets, lengths)
    for modes in ([SUM, SUM], [MEAN, SUM], [MAX, MEAN], [MAX, MAX]):
        lookups = Lookups(modes, [padding, -1], [False, False], False, [0, 1])
        compare((keyed_pool_cuda, keyed_pool), (5, 3), entries, lookups, dtype)
        count += 1
    lookups = Lookups([SUM, SUM], [padding, -1], [False, False], False, [0, 1])
    compare((keyed_pool_cuda, keyed_pool), (300, 3), entries._replace(weights=torch.randn(11)), lookups, dtype)
    lookups = lookups._replace(modes=[NO_POOLING, NO_POOLING])
    compare((keyed_lookup_cuda, keyed_lookup), (5, 5), entries, lookups, dtype)
    count += 2
lookups = Lookups([SUM, MAX], [-1, -1], [False, False], False, [0, 1])
entries = Entries(torch.tensor([0, 7, 1, -5, 2, 1, 6, 3, 9, 2, 0]), offsets)
found, grads = grads_of(keyed_pool_cuda, [torch.ones(7, 2), torch.ones(7, 2)], entries, lookups)
assert found.isnan().tolist() == [[True] * 2 + [False] * 2, [False] * 4, [True] * 4], found
assert all(grad.isfinite().all() for grad in grads)
found = keyed_lookup_cuda([torch.ones(7, 2)] * 2, *entries, *lookups)
assert found.isnan()[:, 0].tolist() == [False, True, False, True] + [False] * 4 + [True, False, False]
print("all agree", count)
"""


@pytest.mark.slow
@needs_triton
def test_the_kernels_compute_what_the_ops_for_the_cpu_do():
    assert interpret(SCRIPT) == "all agree 96"


@pytest.mark.parametrize("result", ["Tensor", "Tensor[]", "(Tensor, Tensor, Tensor)"])
def test_the_signature_of_a_schema_is_inferred_as_the_schema(result):
    """PyTorch 2.13 infers the schema of a Triton op from the signature, and refuses one with ``*args``."""
    schema = f"(Tensor[] tables, int[] rows, {ENTRIES}, {LOOKUPS}) -> {result}"

    def function(*args):
        raise NotImplementedError

    function.__signature__ = signature_of(schema)
    assert torch.library.infer_schema(function, mutates_args=()).replace("SymInt", "int") == schema
