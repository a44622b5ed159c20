"""Ops along a dimension of the entries or along the rows, and functions composed of ops with rules.

Along a dimension of the entries an op runs on the stored tensor. Along the rows an op reorders or pads the entries of
each row; an op that is undefined there raises with a hint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses._torch import nn_functions
from subclasses.errors import DispatchError
from subclasses.ragged.base import outer_dims, shown, without
from subclasses.ragged.checks import check_reached
from subclasses.ragged.data_sizes import size_of
from subclasses.ragged.registry import Rules

RULES = Rules()
aten = torch.ops.aten

# ---- within entries --------------------------------------------------------------------------------------------


@RULES.of(F.glu)
def _glu(func: Any, input: Any, dim: int = -1) -> Any:
    return input.with_stored(func(input.unwrap_stored(), _stored_dim("glu", input, dim)))


@RULES.of(aten.view_as_complex.default)
def _view_as_complex(op: Any, x: Any) -> Any:
    dim = x.feature_dim(op, -1)
    return without(x, op(x.stored), [dim])


@RULES.of(aten.view_as_real.default)
def _view_as_real(op: Any, x: Any) -> Any:
    return x.with_stored(op(x.stored))


@RULES.of(aten._conj.default, aten._neg_view.default)
def _carry_out(op: Any, x: Any) -> Any:
    """Computes the conjugate or the negation at once, since code below dispatch ignores their lazy bits."""
    compute = aten.conj_physical.default if op is aten._conj.default else aten.neg.default
    return x.with_stored(compute(x.stored))


# ---- along the rows as well ------------------------------------------------------------------------------------


@RULES.of(torch.flip)
def _flip(func: Any, input: Any, *dims: Any) -> Any:
    given = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    for dim in given:
        if _is_ragged(input, dim):
            input = input.rearranged(lambda position, length: length - 1 - position)
        elif _is_batch(input, dim):
            input = input.take_rows(_row_numbers(input).flip(0))
        else:
            stored_dim = _stored_dim("flip", input, dim)
            input = input.with_stored(torch.flip(input.unwrap_stored(), [stored_dim]))
    return input


@RULES.of(torch.roll)
def _roll(func: Any, input: Any, shifts: Any, dims: Any = ()) -> Any:
    given = [dims] if isinstance(dims, int) else list(dims)
    shifts = [shifts] if isinstance(shifts, int | torch.SymInt) else list(shifts)
    if not given or len(given) != len(shifts):
        raise DispatchError(
            f"roll: expected a shift for each of the dims of {shown(input)}, got shifts={shifts} and dims={given}",
            code="argument-refused",
        )
    for shift, dim in zip(shifts, given, strict=True):
        input = _rolled(input, shift, dim)
    return input


def _rolled(x: Any, shift: int, dim: int) -> Any:
    if _is_ragged(x, dim):
        return x.rearranged(lambda position, length: (position - shift) % length.clamp(min=1))
    if _is_batch(x, dim):
        return x.take_rows(_row_numbers(x).roll(shift))
    return x.with_stored(torch.roll(x.unwrap_stored(), shift, _stored_dim("roll", x, dim)))


@RULES.of(torch.repeat_interleave)
def _repeat_interleave(
    func: Any, input: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    if dim is None:
        raise DispatchError(
            f"repeat_interleave: without dim= it repeats elements of the flattened tensor, and rows of {shown(input)} "
            "do not flatten to one",
            code="row-dims",
            hint="pass dim=",
        )
    if _is_ragged(input, dim):
        if not isinstance(repeats, int):
            raise DispatchError(
                f"repeat_interleave: expected an int of repeats for the entries of {shown(input)}, got "
                f"{shown(repeats)}",
                code="argument-refused",
            )
        return input.of_lengths(input.to_dense().repeat_interleave(repeats, dim), input.counts * repeats)
    if _is_batch(input, dim):
        numbers = _row_numbers(input)
        if isinstance(repeats, Tensor):
            return input.repeat_rows(repeats.to(numbers.device).expand(numbers.shape[0]))
        return input.take_rows(numbers.repeat_interleave(repeats))
    stored_dim = _stored_dim("repeat_interleave", input, dim)
    if isinstance(repeats, Tensor) and output_size is None:
        output_size = size_of(repeats.expand(input.shape[dim]).sum())
    stored = torch.repeat_interleave(input.unwrap_stored(), repeats, stored_dim, output_size=output_size)
    return input.with_stored(stored)


@RULES.of(torch.Tensor.repeat, torch.tile)
def _repeat(func: Any, x: Any, *repeats: Any) -> Any:
    name = func.__name__
    times = list(repeats[0] if len(repeats) == 1 and not isinstance(repeats[0], int) else repeats)
    times = [1] * (x.dim() - len(times) if name == "tile" else 0) + times
    if len(times) != x.dim() or x.merged:
        raise DispatchError(
            f"{name}: expected a number for each dimension of {shown(x)}, of which none are merged, got {times}",
            code="row-dims",
        )
    of_rows, of_entries = times[x.batch_dim], times[x.ragged_dim]
    if of_rows != 1:
        x = x.take_rows(_row_numbers(x).repeat(of_rows))
    if of_entries != 1:
        parts = [x] * of_entries
        x = torch.cat(parts, x.ragged_dim) if parts else x[(*[slice(None)] * x.ragged_dim, slice(0, 0))]
    stored = [0 if d in x.row_dims else n for d, n in enumerate(times)][x.dim() - x.stored.dim() :]
    return x.with_stored(x.unwrap_stored().repeat([n or 1 for n in stored]))


@RULES.of(torch.Tensor.unfold)
def _unfold(func: Any, x: Any, dimension: int, size: int, step: int) -> Any:
    """Returns windows along a dimension, in a new last dimension; a row that is shorter than a window has none."""
    if not _is_ragged(x, dimension):
        return x.with_stored(x.unwrap_stored().unfold(_stored_dim("unfold", x, dimension), size, step))
    windows = ((x.counts - size) // step + 1).clamp(min=0)
    return x.of_lengths(x.to_dense().unfold(x.ragged_dim, size, step), windows)


def _row_numbers(x: Any) -> Tensor:
    return torch.arange(x.counts.shape[0], device=x.counts.device)


def _is_batch(x: Any, dim: int) -> bool:
    return not x.merged and -x.dim() <= dim < x.dim() and dim % x.dim() == x.batch_dim


@RULES.of(F.pad, nn_functions.pad)  # Dynamo may trace into the first one
def _pad(func: Any, input: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    of_tensors = any(isinstance(n, Tensor) for n in pad)
    if mode != "constant" or of_tensors or len(pad) % 2 or len(pad) > 2 * input.dim():
        raise DispatchError(
            f"pad: expected a constant in pairs of ints for {shown(input)}, got {list(pad)} and mode={mode!r}",
            code="argument-refused",
            hint="pad each of x.to_tensors(), where a number depends on the length of a row"
            if of_tensors
            else None,
        )
    stored, of_rows = input.unwrap_stored(), (0, 0)
    wanted = [0, 0] * stored.dim()
    for back, pair in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = input.dim() - 1 - back
        if any(pair) and _is_ragged(input, dim):
            of_rows = pair
        elif any(pair):
            at = 2 * (stored.dim() - 1 - _stored_dim("pad", input, dim))
            wanted[at : at + 2] = pair
    padded = input.with_stored(F.pad(stored, wanted, mode, value))
    return _pad_rows(padded, input.ragged_dim, of_rows, value or 0) if any(of_rows) else padded


def _pad_rows(x: Any, dim: Any, pair: tuple[int, int], value: float | int | bool) -> Any:
    """Adds entries of a value before and after each row; a negative number cuts entries off."""
    whole, cut = [slice(None)] * dim, [max(-n, 0) for n in pair]
    if any(cut):
        message = f"pad: a row has fewer than the {sum(cut)} entries that are cut off by {tuple(pair)}"
        check_reached(x, sum(cut), message)
        x = x[(*whole, slice(cut[0], -cut[1] or None))]
    before, behind = (
        [x.new_full([n if d == dim else size for d, size in enumerate(x.shape)], value)] if n > 0 else []
        for n in pair
    )
    return torch.cat([*before, x, *behind], dim) if before or behind else x


def _is_ragged(x: Any, dim: int) -> bool:
    return not x.merged and -x.dim() <= dim < x.dim() and dim % x.dim() == x.ragged_dim


def _stored_dim(name: str, x: Any, dim: int) -> int:
    """Returns the dimension of the stored tensor for a dimension of the entries."""
    return x.stored_dim(x.feature_dim(name, dim))


# ---- composed of ops with rules ---------------------------------------------------------------------------------
#
# Their own kernels would sum below autograd, where a derivative counts the padding.


@RULES.of(torch.Tensor.sum_to_size)
def _sum_to_size(func: Any, x: Any, *size: Any) -> Any:
    wanted = list(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    before = x.dim() - len(wanted)
    dims = [d for d in range(x.dim()) if d < before or (wanted[d - before] == 1 and x.shape[d] != 1)]
    if before < 0 or any(d not in dims and n != wanted[d - before] for d, n in enumerate(x.shape)):
        raise ValueError(f"sum_to_size: {shown(x)} is not an expansion of a tensor of size {tuple(wanted)}")
    result = x.sum(dims, keepdim=True) if dims else x
    return result.squeeze(tuple(range(before))) if before else result


@RULES.of(torch.hstack, torch.vstack)
def _stack_along(func: Any, tensors: Any, *, out: Any = None) -> Any:
    return torch.cat(tensors, 1 if func.__name__ == "hstack" else 0, out=out)


@RULES.of(torch.pairwise_distance)
def _pairwise_distance(
    func: Any, x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@RULES.of(torch.cosine_similarity)
def _cosine_similarity(func: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    x1, x2 = torch.broadcast_tensors(x1, x2) if x1.dim() != x2.dim() else (x1, x2)
    norms = [torch.linalg.vector_norm(x, 2, dim).clamp_min(eps) for x in (x1, x2)]
    return (x1 * x2).sum(dim) / (norms[0] * norms[1])


@RULES.of(torch.linalg.vecdot)
def _vecdot(func: Any, x: Any, y: Any, *, dim: int = -1) -> Any:
    return (x.conj() * y).sum(dim)


@RULES.of(torch.addmm, torch.baddbmm)
def _add_product(func: Any, input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = torch.matmul(a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (input if beta == 1 else input * beta)


@RULES.of(torch.diff)
def _diff(func: Any, input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    (dim,) = outer_dims(func, input, dim)
    given = [t for t in (prepend, input, append) if t is not None]
    x, before = torch.cat(given, dim) if len(given) > 1 else input, [slice(None)] * dim
    for _ in range(n):
        later, earlier = x[(*before, slice(1, None))], x[(*before, slice(None, -1))]
        x = later != earlier if x.dtype == torch.bool else later - earlier
    return x
