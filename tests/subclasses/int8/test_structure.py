"""Transposes, slices, views, parts, joins, copies: the same as on the floats, or refused before anything changes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, strategies as st

import subclasses
from subclasses import DispatchError
from subclasses.int8 import Int8Tensor, blocks, structure
from tests.doors import by_stock
from tests.tables import raising

SIZE = (4, 6, 8)
BLOCKS = [(1, 1, 8), (4, 6, 8), (1, 1, 4), (2, 3, 8), (1, 2, 2), (1, 1, 1)]
MOVES = {
    "transpose": lambda t: t.transpose(0, 2),
    "mT": lambda t: t.mT,
    "permute": lambda t: t.permute(2, 0, 1),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t.unsqueeze(0).squeeze(),
    "squeeze of none": lambda t: t.squeeze(0),
    "first": lambda t: t[0],
    "last": lambda t: t[..., -1],
    "narrow": lambda t: t.narrow(0, 2, 2),
    "slice": lambda t: t[:, 3:],
    "empty slice": lambda t: t[2:2],
    "far slice": lambda t: t[-2:100],
    "split": lambda t: t.split(2)[1],
    "uneven split": lambda t: t.split([2, 0, 2])[2],
    "chunk": lambda t: t.chunk(2, -1)[1],
    "unbind": lambda t: t.unbind()[3],
    "cat": lambda t: torch.cat([t, t[:2]]),
    "cat along rows": lambda t: torch.cat([t, t], -1),
    "stack": lambda t: torch.stack([t, t]),
    "flatten": lambda t: t.flatten(0, 1),
    "view": lambda t: t.view(2, 2, 6, 8),
    "unflatten": lambda t: t.unflatten(-1, (2, 4)),
    "reshape": lambda t: t.transpose(0, 1).reshape(-1, 8),
    "contiguous": lambda t: t.transpose(0, 1).contiguous(),
    "clone": lambda t: t.clone(),
    "bfloat16": lambda t: t.to(torch.bfloat16),
}

# What cuts through blocks and leaves uneven ones.
CUT = {("slice", (1, 2, 2)), ("flatten", (2, 3, 8)), ("reshape", (2, 3, 8)), ("reshape", (1, 2, 2))}


def make(block_size=None, symmetric=True, size=SIZE):
    return Int8Tensor.from_float(torch.randn(size), block_size=block_size, symmetric=symmetric)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("block_size", BLOCKS, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("move", MOVES)
def test_entries_keep_their_values(block_size, symmetric, move):
    x = make(block_size, symmetric)
    if (move, block_size) in CUT:
        with pytest.raises(DispatchError, match="block"):
            MOVES[move](x)
        return
    with subclasses.strict():
        moved = MOVES[move](x)
    assert type(moved) is Int8Tensor
    torch.testing.assert_close(moved.dequantize(), MOVES[move](x.dequantize()), atol=0, rtol=0)


CUTS = {
    "slice": (lambda t: t[:, :, 3:7], (1, 1, 4)),
    "step": (lambda t: t[:, :, ::3], (1, 1, 4)),
    "flatten": (lambda t: t.flatten(), (2, 3, 8)),
    "view": (lambda t: t.view(4, 16, 3), (1, 1, 4)),
    "overlapping": (lambda t: t.as_strided((5, 5), (1, 1)), (2, 3, 8)),
    "as one row": (lambda t: t.as_strided((192,), (1,)), (2, 3, 8)),
    "as a matrix": (lambda t: t.as_strided((2, 2), (3, 1)), (2, 3, 8)),
}


test_a_cut_through_blocks_is_refused = raising(
    {name: (lambda cut=cut, size=size: cut(make(size)), "block") for name, (cut, size) in CUTS.items()}
)


@given(st.data())
def test_views_of_any_size(data):
    size = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    counts = [data.draw(st.sampled_from([n for n in range(1, s + 1) if s % n == 0])) for s in size]
    total = torch.Size(size).numel()
    new, left = [], total
    while left > 1:
        new.append(data.draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0])))
        left //= new[-1]
    new = new or [1] * len(size)
    scale = torch.rand(counts)
    entries = blocks.expand_scale(scale, size).expand(size).reshape(new)
    with contextlib.suppress(DispatchError):
        found = blocks.view_counts(size, counts, new)
        assert torch.equal(blocks.expand_scale(scale.view(found), new).expand(new), entries)


CHAINED = {
    "transpose": lambda t, dim, n: t.transpose(0, dim),
    "narrow": lambda t, dim, n: t.narrow(dim, min(n, t.shape[dim]), t.shape[dim] - min(n, t.shape[dim])),
    "strided": lambda t, dim, n: t[:: n + 1],
    "select": lambda t, dim, n: t.select(dim, n % max(t.shape[dim], 1)),
    "split": lambda t, dim, n: t.split(n + 1, dim)[-1],
    "chunk": lambda t, dim, n: t.chunk(n + 1, dim)[0],
    "flatten": lambda t, dim, n: t.flatten(),
    "rows": lambda t, dim, n: t.view(-1, *t.shape[2:]) if t.dim() > 1 and t.numel() else t.view(t.shape),
    "reversed sizes": lambda t, dim, n: t.reshape(t.shape[::-1]),
    "unsqueeze": lambda t, dim, n: t.unsqueeze(dim),
    "squeeze": lambda t, dim, n: t.squeeze(dim),
    "cat": lambda t, dim, n: torch.cat([t, t], dim),
    "stack": lambda t, dim, n: torch.stack([t, t], dim),
}


@given(st.data())
def test_chains_of_moves(data):
    """Values, sizes and strides are those of a plain tensor after any number of moves, empty ones included."""
    size = data.draw(st.lists(st.sampled_from([0, 1, 2, 4, 6]), min_size=1, max_size=3))
    block_size = [data.draw(st.sampled_from([n for n in range(1, s + 1) if s % n == 0] or [1])) for s in size]
    x = Int8Tensor.from_float(torch.randn(size), block_size=block_size, symmetric=data.draw(st.booleans()))
    plain = x.dequantize()
    for _ in range(4):
        move = CHAINED[data.draw(st.sampled_from(list(CHAINED)))]
        dim, n = data.draw(st.integers(0, x.dim() - 1)), data.draw(st.integers(0, 3))
        try:
            moved = move(x, dim, n)
        except (DispatchError, IndexError):  # cuts through a block, or selects from nothing
            return
        except RuntimeError:  # a view of what is transposed
            with pytest.raises(RuntimeError):
                move(plain, dim, n)
            return
        if not isinstance(moved, Int8Tensor):
            return
        x, plain = moved, move(plain, dim, n)
        assert torch.equal(x.dequantize(), plain)
        assert 0 in x.shape or 1 in x.shape or x.stride() == plain.stride()
        if x.dim() == 0:
            return


# ---- storage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["transpose", "slice", "narrow", "first", "flatten", "split"])
def test_views_share_storage(view):
    x = make((1, 1, 8))
    v = MOVES[view](x)
    assert v._is_view()
    source = Int8Tensor.from_float(torch.randn(v.shape), block_size=v.block_size)
    v.copy_(source)
    assert torch.equal(MOVES[view](x).dequantize(), source.dequantize())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("begin", [0, 1, 2])
@pytest.mark.parametrize("name", ["rows", "t", "unsqueeze"])
def test_views_of_a_slice_that_torch_compile_remakes(begin, name):
    """Some releases add the beginning of an argument twice: what may be either of two views is refused."""
    view = {"rows": lambda t: t[1:3], "t": lambda t: t.t(), "unsqueeze": lambda t: t[None]}[name]
    x, compiled = make(size=(8, 4))[begin : 8 - begin], by_stock(view, fullgraph=True)
    if structure.COUNTS_TWICE and (begin, name) == (1, "rows"):
        with pytest.raises(DispatchError, match="either of two views"):
            compiled(x)
    else:
        assert torch.equal(compiled(x).dequantize(), view(x).dequantize())


@pytest.mark.parametrize(
    "view",
    ["transpose", "permute", "first", "last", "narrow", "slice", "unsqueeze", "unbind", "flatten", "view"],
)
def test_as_strided_finds_the_view(view):
    x = make((1, 1, 4))
    v = MOVES[view](x)
    again = x.as_strided(v.size(), v.stride(), v.storage_offset())
    assert torch.equal(again.dequantize(), v.dequantize()) and again.stride() == v.stride()


# ---- writes ------------------------------------------------------------------------------------------------


def test_copies():
    """A copy of coarser blocks is exact, one to a plain tensor too, and a clone shares nothing."""
    x, source = make((1, 1, 4), symmetric=False), make((4, 6, 8))
    before = x.dequantize()
    x.clone().copy_(source)
    assert torch.equal(x.dequantize(), before)
    x.copy_(source)
    for copied in (x.dequantize(), torch.empty(SIZE).copy_(x)):
        assert torch.equal(copied, source.dequantize())


REFUSED = {
    "copy of floats": lambda x: x.copy_(torch.randn(SIZE)),
    "copy of finer blocks": lambda x: x.copy_(make((1, 1, 4))),
    "copy of a zero point": lambda x: x.copy_(make(symmetric=False)),
    "copy of another size": lambda x: x.copy_(make(size=(4, 6, 4))),
    "copy to a part of a block": lambda x: x[:, :, :4].copy_(make(size=(4, 6, 4))),
    "add_": lambda x: x.add_(1),
    "zero_": lambda x: x.zero_(),
    "mul_ of a view": lambda x: x[0].mul_(2),
    "x[0] = 1": lambda x: x.__setitem__(0, 1.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_that_would_round_is_refused_and_changes_nothing(name):
    x = make()
    before, errors = x.dequantize(), (DispatchError, RuntimeError) if "copy" in name else DispatchError
    with pytest.raises(errors, match="copy_" if "copy" in name else "Int8Tensor"):
        REFUSED[name](x)
    assert torch.equal(x.dequantize(), before)


def test_the_same_scale_may_be_written_to_a_part_of_a_block():
    x = make()
    part, kept = x[:, :, :4], x[:, :, 4:].dequantize()
    assert part.partial and not part.clone().partial
    part.copy_(part.clone())
    part.copy_(Int8Tensor(torch.zeros_like(part.qdata), part.scale.clone()))
    assert not x[:, :, :4].dequantize().any() and torch.equal(x[:, :, 4:].dequantize(), kept)


# ---- joined, converted -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "kind"), [(make((4, 8), False, (4, 8)), Int8Tensor), (torch.randn(3, 8), torch.Tensor)]
)
def test_cat_of_different_blocks_and_with_floats(other, kind):
    a = make((1, 4), size=(2, 8))
    with subclasses.strict() if kind is Int8Tensor else contextlib.nullcontext():
        joined = torch.cat([a, other])
    assert type(joined) is kind and getattr(joined, "block_size", (1, 4)) == (1, 4)
    floats = [t.dequantize() if isinstance(t, Int8Tensor) else t for t in (a, other, joined)]
    assert torch.equal(floats[2], torch.cat(floats[:2]))


def test_a_conversion_changes_the_outer_dtype_alone():
    x = make()
    y, meta = x.to(torch.bfloat16), x.to("meta")
    assert (y.dtype, y.scale.dtype, y.qdata.dtype) == (torch.bfloat16, torch.float32, torch.int8)
    assert torch.equal(y.float().dequantize(), x.dequantize())
    assert torch.equal(x.to(torch.int32), x.dequantize().to(torch.int32))
    assert type(meta) is Int8Tensor and meta.device.type == meta.scale.device.type == "meta"
