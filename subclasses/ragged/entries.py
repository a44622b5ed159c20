"""Rules for both layouts of what works within entries, and of what is a few ruled ops.

A dimension of an entry is a dimension of what is stored, so an op along one runs there. Along the rows the entries of
each are put in another order or get company; what would mean nothing there is refused with a hint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError


class Entries(NamedTuple):
    """How a layout stores entries.

    Attributes:
        place: ``(func, x, dim)``: the dimension of what is stored that an outer one is; raises along the rows.
        stored: ``(x)``: what is stored, as a differentiable function of ``x``.
        wrap: ``(x, stored, gone)``: other entries of the same rows, without some dimensions of what is stored.
        ragged: ``(x)``: the dimension along which rows differ; None where it is merged with the batch.
        rearrange: ``(x, source)``: the entries of each row in another order; ``source(place, length)`` says from which
            place of a row the entry at a place comes.
        shown: a value in the words of an error.
    """

    place: Callable[[Any, Any, int], int]
    stored: Callable[[Any], Tensor]
    wrap: Callable[[Any, Tensor, Sequence[int]], Any]
    ragged: Callable[[Any], int | None]
    rearrange: Callable[[Any, Callable[[Tensor, Tensor], Tensor]], Any]
    shown: Callable[[Any], str]


aten = torch.ops.aten

# ---- within entries --------------------------------------------------------------------------------------------


def implement_entries(cls: Any, ways: Entries) -> None:
    """The rules of ops along dimensions of an entry."""
    for function, rule in (
        (F.glu, _glu),
        (F.pad, _pad),
        (torch.flip, _flip),
        (torch.roll, _roll),
        (aten.view_as_complex.default, _view_as_complex),
        (aten.view_as_real.default, _view_as_real),
        (aten._conj.default, _carried_out(aten.conj_physical.default)),
        (aten._neg_view.default, _carried_out(aten.neg.default)),
    ):
        cls.implements(function)(functools.partial(rule, ways))


def _glu(ways: Entries, func: Any, input: Any, dim: int = -1) -> Any:
    return ways.wrap(input, func(ways.stored(input), ways.place("glu", input, dim)), ())


def _view_as_complex(ways: Entries, op: Any, x: Any) -> Any:
    place = ways.place(op, x, -1)
    return ways.wrap(x, op(_raw(x)), [place])


def _view_as_real(ways: Entries, op: Any, x: Any) -> Any:
    return ways.wrap(x, op(_raw(x)), ())


def _carried_out(op: Any) -> Any:
    """Ops that set a lazy bit, which nobody looks at below dispatch: the values are computed at once."""
    return lambda ways, _, x: ways.wrap(x, op(_raw(x)), ())


def _raw(x: Any) -> Tensor:
    """What is stored, for rules below autograd."""
    return x.__dict__[type(x).__spec__.inner_names[0]]


# ---- along the rows as well ------------------------------------------------------------------------------------


def _flip(ways: Entries, func: Any, input: Any, *dims: Any) -> Any:
    given = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    for dim in given:
        if _is_ragged(ways, input, dim):
            input = ways.rearrange(input, lambda place, length: length - 1 - place)
        else:
            place = ways.place("flip", input, dim)
            input = ways.wrap(input, torch.flip(ways.stored(input), [place]), ())
    return input


def _roll(ways: Entries, func: Any, input: Any, shifts: Any, dims: Any = ()) -> Any:
    given = [dims] if isinstance(dims, int) else list(dims)
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    if not given or len(given) != len(shifts):
        raise DispatchError(
            f"roll: expected a shift for each of the dims of {ways.shown(input)}, got shifts={shifts} and dims={given}"
        )
    for shift, dim in zip(shifts, given, strict=True):
        input = _rolled(ways, input, shift, dim)
    return input


def _rolled(ways: Entries, x: Any, shift: int, dim: int) -> Any:
    if _is_ragged(ways, x, dim):
        return ways.rearrange(x, lambda place, length: (place - shift) % length.clamp(min=1))
    return ways.wrap(x, torch.roll(ways.stored(x), shift, ways.place("roll", x, dim)), ())


def _pad(
    ways: Entries, func: Any, input: Any, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Any:
    if mode != "constant" or len(pad) % 2 or len(pad) > 2 * input.dim():
        raise DispatchError(
            f"pad: expected a constant in pairs for {ways.shown(input)}, got {list(pad)} and mode={mode!r}"
        )
    stored, of_rows = ways.stored(input), (0, 0)
    wanted = [0, 0] * stored.dim()
    for back, pair in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = input.dim() - 1 - back
        if any(pair) and _is_ragged(ways, input, dim):
            of_rows = pair
        elif any(pair):
            at = 2 * (stored.dim() - 1 - ways.place("pad", input, dim))
            wanted[at : at + 2] = pair
    padded = ways.wrap(input, F.pad(stored, wanted, mode, value), ())
    return _pad_rows(padded, ways.ragged(input), of_rows, value or 0) if any(of_rows) else padded


def _pad_rows(x: Any, dim: Any, pair: tuple[int, int], value: float | int | bool) -> Any:
    """Every row with entries of a value before and behind its own; a negative number of them cuts some off."""
    whole, cut = [slice(None)] * dim, [max(-n, 0) for n in pair]
    if any(cut):
        _check_left(x, sum(cut), pair)
        x = x[(*whole, slice(cut[0], -cut[1] or None))]
    before, behind = (
        [x.new_full([n if d == dim else size for d, size in enumerate(x.shape)], value)] if n > 0 else []
        for n in pair
    )
    return torch.cat([*before, x, *behind], dim) if before or behind else x


def _check_left(x: Any, cut: int, pair: tuple[int, int]) -> None:
    """Raises where a row of the batch has fewer entries than are cut off; nothing waits for a GPU."""
    reached, count = x.row_lengths() >= cut, getattr(x, "row_count", None)
    if count is not None:
        reached = reached | (torch.arange(reached.shape[0], device=reached.device) >= count)
    message = f"pad: a row has fewer than the {cut} entries that are cut off by {tuple(pair)}"
    torch.ops.aten._assert_async.msg(reached.all(), message)


def _is_ragged(ways: Entries, x: Any, dim: int) -> bool:
    return -x.dim() <= dim < x.dim() and dim % x.dim() == ways.ragged(x)


# ---- a few ruled ops -------------------------------------------------------------------------------------------


def implement_composites(cls: Any, shown: Callable[[Any], str]) -> None:
    """The rules of functions whose kernels would sum below autograd, where a derivative counts the padding."""
    cls.implements(torch.Tensor.sum_to_size)(functools.partial(_sum_to_size, shown))
    for function, rule in (
        (torch.pairwise_distance, _pairwise_distance),
        (torch.cosine_similarity, _cosine_similarity),
        (torch.addmm, _add_product),
        (torch.baddbmm, _add_product),
        (torch.diff, _diff),
        (torch.linalg.vecdot, _vecdot),
        (torch.hstack, lambda func, tensors, *, out=None: torch.cat(tensors, 1, out=out)),
        (torch.vstack, lambda func, tensors, *, out=None: torch.cat(tensors, 0, out=out)),
    ):
        cls.implements(function)(rule)


def _sum_to_size(shown: Callable[[Any], str], func: Any, x: Any, *size: Any) -> Any:
    wanted = list(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    before = x.dim() - len(wanted)
    dims = [d for d in range(x.dim()) if d < before or (wanted[d - before] == 1 and x.shape[d] != 1)]
    if before < 0 or any(d not in dims and n != wanted[d - before] for d, n in enumerate(x.shape)):
        raise ValueError(f"sum_to_size: {shown(x)} is no expansion of a tensor of size {tuple(wanted)}")
    result = x.sum(dims, keepdim=True) if dims else x
    return result.squeeze(tuple(range(before))) if before else result


def _pairwise_distance(
    func: Any, x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


def _cosine_similarity(func: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    x1, x2 = torch.broadcast_tensors(x1, x2) if x1.dim() != x2.dim() else (x1, x2)
    norms = [torch.linalg.vector_norm(x, 2, dim).clamp_min(eps) for x in (x1, x2)]
    return (x1 * x2).sum(dim) / (norms[0] * norms[1])


def _vecdot(func: Any, x: Any, y: Any, *, dim: int = -1) -> Any:
    return (x.conj() * y).sum(dim)


def _add_product(func: Any, input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = torch.matmul(a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (input if beta == 1 else input * beta)


def _diff(func: Any, input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    given = [t for t in (prepend, input, append) if t is not None]
    x, before = torch.cat(given, dim) if len(given) > 1 else input, [slice(None)] * (dim % input.dim())
    for _ in range(n):
        later, earlier = x[(*before, slice(1, None))], x[(*before, slice(None, -1))]
        x = later != earlier if x.dtype == torch.bool else later - earlier
    return x
