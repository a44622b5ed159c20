"""Rules for composite ops above autograd.

PyTorch takes a composite op (``linear``, ``matmul``, ``reshape``, ...) apart before dispatch, except in inference mode.
So that a rule for one runs in every mode, the Python-level functions that reach the op are intercepted too. One
function may reach several ops, as ``torch.max`` does; PyTorch's own overload resolution says which, and a call for
an op without a rule goes on as if nothing had been intercepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subclasses._torch import OpOverload, OpOverloadPacket, call_unruled, resolve_overload, schema_of
from subclasses.autograd.construct import close_wrappers, open_wrappers
from subclasses.autograd.python_functions import python_functions
from subclasses.errors import SpecError

FindRule = Callable[[OpOverload], Callable[..., Any] | None]


def check_interceptable(cls: type, op: OpOverload) -> None:
    """Raises where a composite op has no Python-level function to stand on."""
    if not python_functions(op):
        raise SpecError(
            f"{cls.__name__}: {op} is composite: PyTorch takes it apart before a rule is asked, and it has no "
            f"Python-level function in torch, torch.Tensor, torch.nn.functional or torch.linalg on which the "
            f"rule could stand instead; write rules for the ops that it is made of"
        )


def intercept_packet(packet: OpOverloadPacket, find: FindRule) -> Callable[..., Any]:
    """What stands on the functions of a packet: the rule for the overload that the call means.

    Args:
        packet: the packet that the functions reach.
        find: gives the rule of a class for an overload, or None.
    """

    def intercepted(func: Any, *args: Any, **kwargs: Any) -> Any:
        found = _resolve(packet, args, kwargs)
        rule = None if found is None else find(found[0])
        if found is None or rule is None:
            return call_unruled(func, (), args, kwargs)
        op, args, kwargs = found
        # Here the rule runs above autograd: reading inner tensors as they are must not lose gradients.
        opened: dict[int, Any] = {}
        args, kwargs = open_wrappers(args, opened), open_wrappers(kwargs, opened)
        return close_wrappers(rule(op, *args, **kwargs), opened)

    return intercepted


def _resolve(packet: OpOverloadPacket, args: Any, kwargs: Any) -> tuple[OpOverload, Any, Any] | None:
    """The overload that a call of a Python-level function means, and its arguments as dispatch would give them."""
    # Python-level functions name their first argument so, whatever the schema does.
    if "input" in kwargs and not args:
        args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
    op = resolve_overload(packet, args, kwargs)
    if op is None and len(args) > 1:
        # Methods take sizes one by one: x.reshape(2, 3).
        args = (args[0], args[1:])
        op = resolve_overload(packet, args, kwargs)
    return None if op is None else (op, *_place(op, args, kwargs))


def _place(op: OpOverload, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position, keyword-only ones by keyword."""
    named, placed = dict(kwargs), list(args)
    by_position = [a for a in schema_of(op).arguments if not a.kwarg_only]
    last = max((i for i, a in enumerate(by_position) if a.name in named), default=-1)
    for a in by_position[len(args) : last + 1]:
        placed.append(named.pop(a.name) if a.name in named else a.default_value)
    return tuple(placed), named
