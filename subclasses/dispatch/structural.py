"""Structure-preserving ops: each inner tensor is copied, moved or aliased, for every class.

``clone``, ``detach``, ``_to_copy`` and similar ops need no rule. A change of dtype converts the inner tensors that have
the outer dtype and declare no dtype: a scale becomes ``bfloat16``, while quantized data and offsets stay unchanged. An
inner tensor declared ``device="any"`` stays on its device when the others move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from subclasses._torch import OpOverload, in_backward
from subclasses.autograd.detach import own_gradients
from subclasses.dispatch.per_inner import records
from subclasses.dispatch.strided import check_distinguishable
from subclasses.errors import DispatchError, one_of
from subclasses.op_schemas.aliasing import with_aliasing, write_into
from subclasses.spec.collect import InnerField
from subclasses.spec.values import OF_PARAMETER, RANKS, SHARD, is_of_parameter, map_inners

aten = torch.ops.aten

Structural = Callable[..., Any]


# ---- one function per op -----------------------------------------------------------------------------------


def _map_op(op: OpOverload) -> Structural:
    """Returns a callable that runs an op on every inner tensor."""
    return lambda x, *args, **kwargs: map_inners(x, lambda _, t: op(t, *args, **_fitting(t, kwargs)))


def _clone(x: Any, *, memory_format: Any = None) -> Any:
    """Copies each inner tensor. `outer` computes the outer stride from the copies, for every memory format."""
    return map_inners(x, lambda _, t: aten.clone.default(t, **_fitting(t, {"memory_format": memory_format})))


def resolved(x: Any) -> torch.Tensor:
    """Materializes a value and resolves the conjugate and negative bits of the result."""
    return x.materialize().resolve_conj().resolve_neg()


_RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _fitting(t: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Drops a memory format from the options of a copy if the tensor does not have its number of dims."""
    rank = _RANKS.get(options.get("memory_format"))  # type: ignore[arg-type]
    return options if rank is None or rank == t.dim() else options | {"memory_format": torch.preserve_format}


def _to_copy(x: Any, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Any:
    def change(field: InnerField, t: Any) -> Any:
        own = dtype if follows_dtype(x, field, t) else None
        if field.device == "any":
            return aten._to_copy.default(t, dtype=own)
        return aten._to_copy.default(t, dtype=own, device=device, **_fitting(t, kwargs))

    return map_inners(x, change)


def _empty_like(x: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    def change(field: InnerField, t: Any) -> Any:
        # Integers may be offsets or indices, whose values must stay valid, so they are copied.
        if not (t.is_floating_point() or t.is_complex()):
            return _copy_to_device(t, field, kwargs)
        own = dtype if follows_dtype(x, field, t) else None
        return aten.empty_like.default(t, dtype=own, **_fitting(t, kwargs))

    return map_inners(x, change)


def _new_empty_strided(
    x: Any, size: Any, stride: Any, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> Any:
    """A tensor like ``x`` with another memory order, which autograd makes to accumulate the gradient of a leaf in."""

    def change(field: InnerField, t: Any) -> Any:
        if not (t.is_floating_point() or t.is_complex()):
            return _copy_to_device(t, field, kwargs)
        own = dtype if follows_dtype(x, field, t) else None
        if t.shape != x.shape:
            return aten.empty_like.default(t, dtype=own)
        return aten.new_empty_strided.default(t, size, stride, dtype=own)

    return map_inners(x, change)


def _copy_to_device(t: Any, field: InnerField, kwargs: dict[str, Any]) -> Any:
    device = None if field.device == "any" else kwargs.get("device")
    if t.is_meta and device is not None:  # there is nothing to copy, and zeros are valid
        return aten.zeros_like.default(t, device=device)
    return aten._to_copy.default(t, device=device)


def _copy_(x: Any, source: Any, non_blocking: bool = False) -> Any:
    write_into(aten.copy_.default, x, source)
    return x


def _as_strided(x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Returns the value in its own geometry; AOTAutograd calls this for a result that aliases an argument."""
    check_distinguishable(x)
    return map_inners(x, lambda _, t: aten.alias.default(t))


def _unsafe_view(x: Any, size: Any) -> Any:
    """Returns the value in its own size; a program of AOTAutograd calls this for a result that aliases another."""
    return map_inners(x, lambda _, t: aten._unsafe_view.default(t, t.shape))


def _pin_memory(x: Any, device: Any = None) -> Any:
    return map_inners(x, lambda _, t: t.pin_memory())


def _is_pinned(x: Any, device: Any = None) -> bool:
    return all(t.is_pinned() for t in _present_inners(x))


def _record_stream(x: Any, stream: Any) -> None:
    for t in _present_inners(x):
        t.record_stream(stream)


def _present_inners(x: Any) -> list[Any]:
    return [x.__dict__[name] for name in x._layout.present]


def follows_dtype(x: Any, field: InnerField, t: Any) -> bool:
    """Whether the dtype of an inner tensor changes with the outer dtype."""
    return field.dtype is None and t.dtype == x.dtype


# ---- outer properties --------------------------------------------------------------------------------------

# Ops that read properties of the outer tensor. A trace with symbolic sizes may dispatch them.
_FACTS: dict[OpOverload, Structural] = {
    aten.size.default: lambda x: list(x.size()),
    aten.size.int: lambda x, dim: x.size(dim),
    aten.sym_size.default: lambda x: list(x.size()),
    aten.sym_size.int: lambda x, dim: x.size(dim),
    aten.stride.default: lambda x: list(x.stride()),
    aten.stride.int: lambda x, dim: x.stride(dim),
    aten.sym_stride.default: lambda x: list(x.stride()),
    aten.sym_stride.int: lambda x, dim: x.stride(dim),
    aten.dim.default: lambda x: x.dim(),
    aten.numel.default: lambda x: x.numel(),
    aten.sym_numel.default: lambda x: x.numel(),
    aten.storage_offset.default: lambda x: x.storage_offset(),
    aten.sym_storage_offset.default: lambda x: x.storage_offset(),
    aten.is_contiguous.default: lambda x: x.is_contiguous(),
}


# ---- the table ---------------------------------------------------------------------------------------------

_TABLE: dict[OpOverload, Structural] = {
    aten.detach.default: _map_op(aten.detach.default),
    aten.alias.default: _map_op(aten.alias.default),
    aten.as_strided.default: _as_strided,
    aten._unsafe_view.default: _unsafe_view,
    aten.clone.default: _clone,
    aten.lift_fresh.default: _map_op(aten.lift_fresh.default),
    aten.lift.default: _map_op(aten.lift.default),
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.new_empty_strided.default: _new_empty_strided,
    aten.copy_.default: _copy_,
    aten._pin_memory.default: _pin_memory,
    aten.is_pinned.default: _is_pinned,
    aten.record_stream.default: _record_stream,
    **_FACTS,
}


def find_structural(op: OpOverload) -> Structural | None:
    """Returns the callable of a structure-preserving op, or None for any other op."""
    run = _TABLE.get(op)
    return None if run is None else with_aliasing(op, run)


def preserves_structure(cls: type, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether these arguments allow an op to preserve the structure.

    They do not if the class cannot change to the requested dtype. Nor do they if a plain tensor and a wrapper, or two
    wrappers with different metadata, are copied onto each other. For a class that computes its outer dtype,
    :func:`has_requested_dtype` checks the result.
    """
    if op is aten.copy_.default:
        x, source = args[:2]
        return type(x) is cls and type(source) is cls and x._layout is source._layout
    if op is aten.as_strided.default:
        x, size, stride, *offset = args
        offset = offset[0] if offset else kwargs.get("storage_offset")
        if cls._traits.is_mapped:  # type: ignore[attr-defined]
            return False
        same = list(size) == list(x.size()) and list(stride) == list(x.stride())
        return same and offset in (None, x.storage_offset())
    if op is aten._unsafe_view.default:
        return list(args[1]) == list(args[0].size())
    if op is aten.new_empty_strided.default:
        x = args[0]
        like = x._layout.cotangent or not cls._traits.is_representation  # type: ignore[attr-defined]
        if not like or tuple(args[1]) != tuple(x.shape):
            return False
    dtype = kwargs.get("dtype")
    if dtype is None or dtype == args[0].dtype:
        return True
    x, spec = args[0], cls.__spec__  # type: ignore[attr-defined]
    if cls._traits.is_representation and not torch.can_cast(x.dtype, dtype):
        return False  # a product of truncated inner tensors is not the truncated product
    if spec.has_outer:
        return any(follows_dtype(x, f, t) for f in spec.inners if (t := x.__dict__[f.attribute]) is not None)
    source = next(f for f in spec.inners if f.name == spec.dtype_from)
    return follows_dtype(x, source, x.__dict__[source.attribute])


def has_requested_dtype(cls: type, out: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the result of a conversion has the requested dtype, if it is a value of the class."""
    dtype = kwargs.get("dtype")
    return dtype is None or type(out) is not cls or out.dtype == dtype


def raise_dtype_stays(cls: type, op: OpOverload, out: Any, kwargs: dict[str, Any]) -> NoReturn:
    """Raises DispatchError: the outer dtype that a class computes does not change with its inner tensors."""
    raise DispatchError(
        f"{op} of {one_of(cls)} to {kwargs['dtype']}: with its inner tensors converted, its outer dtype is "
        f"{out.dtype}, which `outer` returns",
        code="dtype-misfit",
        hint="compute it there from an inner tensor without a declared dtype, or add a rule with "
        f"@{cls.__name__}.implements(torch.ops.{op})",
    )


# ---- marks of Parameters and gradients ---------------------------------------------------------------------

# Their result refers to the same Parameter, or is a copy of it.
COPYING_OPS = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.empty_like.default,
    }
)


def with_marks(cls: Any, op: OpOverload, run: Structural) -> Structural:
    """Wraps a callable so that a copy of a Parameter has its mark, unless autograd records the copy."""
    trainable = cls._traits.trainable

    def wrapped(x: Any, *args: Any, **kwargs: Any) -> Any:
        out = run(x, *args, **kwargs)
        if type(out) is type(x):
            if op is aten.detach.default and in_backward():
                out = own_gradients(x, out)
            if trainable and is_of_parameter(x) and (op is aten.detach.default or not records((x,))):
                out.__dict__[OF_PARAMETER] = True
            if SHARD in x.__dict__:
                out.__dict__[SHARD] = True
            if RANKS in x.__dict__:
                out.__dict__[RANKS] = x.__dict__[RANKS]
        return out

    return wrapped
