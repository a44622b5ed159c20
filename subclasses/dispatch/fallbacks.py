"""The four fallbacks, which run an op that no earlier resolution step covers.

``"map"`` runs the op once for each inner tensor: as straight-line code if the schema allows it, else in a general form,
for ops with lists of tensors. ``"views"`` does the same for ops that compute nothing, and for no other op.
``"materialize"`` runs the op on materialized values. ``"error"`` raises an error that says how to add a rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses import strict_mode
from subclasses._torch import (
    DisableTorchFunctionSubclass,
    OpOverload,
    with_lazy_bits,
)
from subclasses.autograd.engine_ops import check_no_cotangents
from subclasses.dispatch.mapping import (
    hint_for,
    is_send_or_recv,
    leading_run,
    map_run,
    maps_as_view,
    maps_leading_dims,
    run_replaced,
    send_or_recv_error,
    with_equal_sizes,
    with_outer_dims,
    wrappers_in,
)
from subclasses.dispatch.strided import STRIDED_OPS, check_strided_copy
from subclasses.dispatch.structural import resolved
from subclasses.errors import DispatchError, one_of
from subclasses.layout import describe_metadata
from subclasses.op_schemas.aliasing import argument
from subclasses.op_schemas.schema import op_facts, undeclared_writes
from subclasses.spec.values import float_fields

Call = Callable[..., Any]


def fallback_run(cls: Any, op: OpOverload) -> Call:
    """Returns the callable that runs an op by the fallback of the class."""
    if maps_leading_dims(cls.__spec__, op):
        return leading_run(cls, op)
    match cls.__spec__.fallback:
        case "map":
            return with_outer_dims(cls, op, map_run(cls, op))
        case "views" if maps_as_view(cls.__spec__, op):
            return with_equal_sizes(cls, op, map_run(cls, op))
        case "materialize":
            return _materialize(cls, op)
        case _:
            return _error(cls, op)


def decompose_run(op: OpOverload) -> Call:
    """Returns a callable that decomposes a composite op, which is dispatched in inference mode only."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # decompose() calls the kernel directly, but __torch_function__ would intercept it and call the op again.
        with DisableTorchFunctionSubclass():
            return op.decompose(*args, **kwargs)

    return with_lazy_bits(run)


def fallback_step(cls: Any, op: OpOverload) -> str:
    """Returns the name of the fallback that runs an op.

    It is ``"views"`` for an op along leading dims, whatever the fallback, unless that is ``"map"``. It is ``"error"``
    for an op that the fallback ``"views"`` does not map.
    """
    fallback = cls.__spec__.fallback
    if fallback != "map" and maps_leading_dims(cls.__spec__, op):
        return "views"
    return "error" if fallback == "views" and not maps_as_view(cls.__spec__, op) else fallback


# ---- materialize -------------------------------------------------------------------------------------------


def _strided_like(x: Any, plain: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=plain.dtype, device=plain.device)


# Views by a size. On the plain tensor these run as `reshape`, since its strides may differ from the outer ones.
_BY_SIZE = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})
# Ops whose arguments follow from the strides of the outer tensor; `reshape` calls `view` if these allow it.
_BY_STRIDES = frozenset(
    {*_BY_SIZE, torch.ops.aten.view_copy.default, torch.ops.aten._reshape_alias.default, *STRIDED_OPS}
)


def _materialize(cls: Any, op: OpOverload) -> Call:
    facts, sends_or_receives = op_facts(op), is_send_or_recv(op)
    written_indices = (*facts.written, *undeclared_writes(op))
    to_plain = _with_outer_strides if op in _BY_STRIDES else resolved
    op_to_run = torch.ops.aten.reshape.default if op in _BY_SIZE else op
    run = with_lazy_bits(functools.partial(run_replaced, cls, op_to_run, to_plain))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        strict_mode.check_materialize(cls, op)
        if sends_or_receives:
            raise send_or_recv_error(cls, op)
        for i in written_indices:
            for x in wrappers_in(cls, [argument(facts, args, kwargs, i)]):
                _check_same_metadata(cls, op, args)
                raise DispatchError(
                    f"{op} writes to {one_of(cls)}, and a write to its materialized tensor would be lost",
                    code="write-refused",
                    hint=_instead_of_writing(cls, op, x),
                )
        check_strided_copy(cls, op)
        check_no_cotangents(cls, op, wrappers_in(cls, args, kwargs))
        return run(args, kwargs)

    return wrapped


def _instead_of_writing(cls: Any, op: OpOverload, x: Any) -> str:
    name = f"{op.overloadpacket.__name__.rstrip('_')}_"
    if torch.Tag.nondeterministic_seeded not in op.tags and name not in _FILLS:
        return f"use the functional op, or {hint_for(cls, op)}"
    if name not in _FILLS:
        return (
            f"a function that draws random numbers, such as F.dropout, writes so: call it on x.materialize(), or add a "
            f"rule for it, @{cls.__name__}.implements(torch.dropout)"
        )
    call = "torch.nn.init.{1}(x.{0})" if hasattr(torch.nn.init, name) else "x.{0}.{1}(...)"
    fills = " and ".join(call.format(field, name) for field in float_fields(x))
    return (
        f"{f'fill its inner tensors under torch.no_grad(), as in {fills}, or ' if fills else ''}add a rule that fills "
        f"them and returns the value, @{cls.__name__}.implements(torch.ops.{op})"
    )


# nn.init fills a Parameter with these.
_FILLS = frozenset("cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_ eye_".split())


def _with_outer_strides(x: Any) -> Tensor:
    """Returns the tensor that a value represents, with the strides and the storage offset of the outer tensor."""
    plain = resolved(x)
    if plain.stride() == x.stride() and plain.storage_offset() == x.storage_offset():
        return plain
    if x.is_contiguous():
        return plain.clone(memory_format=torch.contiguous_format)
    return plain if any(s == 0 for s in x.stride()) else _strided_like(x, plain).copy_(plain)


def _check_same_metadata(cls: Any, op: OpOverload, args: Any) -> None:
    """Raises DispatchError if two values of the class that are copied have different metadata, and names both."""
    if op is torch.ops.aten.copy_.default and all(isinstance(x, cls) for x in args[:2]):
        x, source = args[:2]
        if x._layout is not source._layout and not (x._layout.cotangent or source._layout.cotangent):
            names = f"{describe_metadata(source._layout)} to {describe_metadata(x._layout)}"
            raise DispatchError(
                f"{op} of {names}: metadata, and which inner tensors there are, do not change",
                code="write-misfit",
                hint="put the other value in its place, as load_state_dict(..., assign=True) does, or "
                f"{hint_for(cls, op)}",
            )


# ---- error -------------------------------------------------------------------------------------------------


class _NoRuleForPartError(DispatchError):
    """There is no rule for an op (a prim, for example) of PyTorch's decomposition of another op."""


def _error(cls: Any, op: OpOverload) -> Call:
    def run(*args: Any, **kwargs: Any) -> Any:
        _check_same_metadata(cls, op, args)
        raise _no_rule(
            cls, op, args, kwargs, _NoRuleForPartError if op.namespace == "prims" else DispatchError
        )

    return run


def naming_whole(cls: Any, op: OpOverload, decomposed: Call) -> Call:
    """Wraps the decomposition of an op: if one of its ops has no rule, the error names the decomposed op."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return decomposed(*args, **kwargs)
        except _NoRuleForPartError:
            raise _no_rule(cls, op, args, kwargs) from None

    return run


def _no_rule(
    cls: Any, op: OpOverload, args: Any, kwargs: Any, error: type[DispatchError] = DispatchError
) -> DispatchError:
    shown = ", ".join(_describe(a) for a in (*args, *kwargs.values()))
    hint = hint_for(cls, op, args[:1])
    return error(f"{cls.__name__} has no rule for {op}({shown})", code="no-rule", hint=hint)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{type(value).__name__}{list(value.shape)}"
    return type(value).__name__
