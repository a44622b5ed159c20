"""Facts from an op's schema: which arguments are tensors, which are written, which results are views."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch

from subclasses._torch import OpOverload, OpOverloadPacket, is_dispatched, schema_of

Role = Literal["tensor", "tensors", "other"]


@dataclass(frozen=True)
class Argument:
    """One argument: its name, whether it is a tensor or a list of tensors, whether it is written.

    ``default`` is a tuple of one value, or empty if the argument is required.
    """

    name: str
    role: Role
    keyword: bool
    written: bool
    aliases: frozenset[str]
    default: tuple[Any, ...]


@dataclass(frozen=True)
class OpFacts:
    """The facts of a schema that dispatch needs.

    Attributes:
        arguments: in order, keyword-only arguments last.
        returns: the role of each result.
        written: indices of the arguments that the op writes to.
        returned: for each result, the index of the written argument that is returned, or None.
        viewed: pairs (argument, result) of indices where the result is a view of the argument.
        changes_metadata: whether the op changes sizes or strides in place, such as ``t_``.
    """

    arguments: tuple[Argument, ...]
    returns: tuple[Role, ...]
    written: tuple[int, ...]
    returned: tuple[int | None, ...]
    viewed: tuple[tuple[int, int], ...]
    changes_metadata: bool

    @property
    def functional(self) -> bool:
        """Whether the op writes to no argument and returns no view."""
        return not self.written and not self.viewed


@functools.cache
def op_facts(op: OpOverload) -> OpFacts:
    """Reads the facts of an op from its schema, once."""
    schema = schema_of(op)
    arguments = tuple(
        Argument(a.name, _role(a.type), a.kwarg_only, _is_write(a), _alias_set(a), _default(a))
        for a in schema.arguments
    )
    roles: tuple[Role, ...] = tuple(_role(r.type) for r in schema.returns)
    results = [_alias_set(r) for r in schema.returns]
    written = tuple(i for i, a in enumerate(arguments) if a.written)
    returned = tuple(next((i for i in written if arguments[i].aliases & r), None) for r in results)
    viewed = tuple(
        (i, j)
        for j, r in enumerate(results)
        for i, a in enumerate(arguments)
        if not a.written
        and returned[j] is None
        and (a.aliases & r or ("*" in a.aliases and roles[j] == "tensors"))
    )
    return OpFacts(
        arguments,
        roles,
        written,
        returned,
        viewed,
        torch.Tag.inplace_view in op.tags,
    )


def _role(type_: Any) -> Role:
    text = str(type_).replace("Optional[", "").replace("]", "")
    return {"Tensor": "tensor", "List[Tensor": "tensors"}.get(text, "other")  # type: ignore[return-value]


def _alias_set(a: Any) -> frozenset[str]:
    # An op that returns a list of views declares its argument as Tensor(a -> *), and the list without an alias set.
    info = a.alias_info
    return frozenset() if info is None else frozenset({*info.before_set, *({"*"} & info.after_set)})


def _default(a: Any) -> tuple[Any, ...]:
    return (a.default_value,) if a.has_default_value() else ()


def _is_write(a: Any) -> bool:
    return a.alias_info is not None and a.alias_info.is_write


def undeclared_writes(op: OpOverload) -> tuple[int, ...]:
    """Returns indices of arguments that a ``torch.distributed`` collective writes to; its schema omits them."""
    if op.namespace != "c10d" or not schema_of(op).name.endswith("_"):
        return ()
    arguments = enumerate(schema_of(op).arguments)
    return tuple(i for i, a in arguments if "Tensor" in str(a.type) and not a.name.startswith("input"))


# ---- counterparts ------------------------------------------------------------------------------------------


@functools.cache
def functional_counterpart(op: OpOverload) -> OpOverload | None:
    """Returns the op whose result this op writes: ``add.Tensor`` for ``add_.Tensor`` and ``add.out``."""
    facts = op_facts(op)
    if not facts.written or facts.changes_metadata:
        return None
    packet = op.overloadpacket
    name = packet.__name__
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place:
        packet = getattr(getattr(torch.ops, op.namespace), name.removesuffix("_"), None)
    wanted = [(a.name, str(a.type)) for a in schema_of(op).arguments if in_place or not _is_write(a)]
    for overload in packet.overloads() if packet is not None else ():
        candidate = getattr(packet, overload)
        same = [(a.name, str(a.type)) for a in schema_of(candidate).arguments] == wanted
        if same and not schema_of(candidate).is_mutable:
            return candidate
    return None


def ops_of_packet(packet: OpOverloadPacket) -> list[OpOverload]:
    """Returns the ops to which a rule for a packet applies.

    They are the ops that write nothing, from which other forms follow. If all ops of a packet write, as of add_, they
    are all ops.
    """
    ops = [op for name in packet.overloads() if is_dispatched(op := getattr(packet, name))]
    return [op for op in ops if not schema_of(op).is_mutable] or ops


@functools.cache
def functional_counterpart_of_view(op: OpOverload) -> OpOverload | None:
    """Returns the view op that an in-place view op applies to its own argument: ``t`` for ``t_``; else None."""
    packet = getattr(getattr(torch.ops, op.namespace), op.overloadpacket.__name__.removesuffix("_"), None)
    wanted = [(a.name, str(a.type)) for a in schema_of(op).arguments]
    for overload in packet.overloads() if packet is not None else ():
        candidate = getattr(packet, overload)
        if (
            op_facts(candidate).viewed
            and [(a.name, str(a.type)) for a in schema_of(candidate).arguments] == wanted
        ):
            return candidate
    return None
