"""A switch that turns on again every check that a generated wrapper leaves out.

With ``DESUGAR_RECHECK=1`` in the environment while a program is compiled, its wrapper takes every argument, saved
tensor, gradient and result apart the slow way and compares it with what the matched signature is said to prove.
None of these checks may ever fire: where one does, a proof is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymFloat, SymInt, Tensor, nn

from desugar.codegen.text import tuple_of
from desugar.frontend.fakes import is_symbolic
from desugar.ir.values import Plain, Value, Wrapper, dynamic_names, slots_of
from desugar.passes.verify import InvariantError, rechecks_enabled
from subclasses import TensorSubclass
from subclasses.codegen.emitter import Emitter
from subclasses.spec.values import carrier


@dataclass(frozen=True, slots=True)
class Expected:
    """What objects are said to be: a value each, and fakes of their plain tensors by slot."""

    what: str
    values: tuple[Value, ...]
    fakes: Mapping[int, Any]


# ------------------------------------------------------------------------------------------------- the text


def emit_recheck(out: Emitter, names: Sequence[str], expected: Expected) -> None:
    """Writes a call that compares the named objects with what is expected, if the switch is on."""
    if rechecks_enabled() and names:
        call, bound = out.bind(recheck, "recheck"), out.bind(expected, expected.what)
        out.writeline(f"{call}({tuple_of(names)}, {bound})")


def expect_plain(what: str, fakes: Iterable[Any]) -> Expected:
    """Plain tensors and ints, in order."""
    by_slot = dict(enumerate(fakes))
    return Expected(what, tuple(map(Plain, by_slot)), by_slot)


# ----------------------------------------------------------------------------------------------- at run time


def recheck(objects: Sequence[Any], expected: Expected) -> None:
    """Compares live objects with what they are said to be.

    Raises:
        InvariantError: One is something else.
    """
    for number, (thing, value) in enumerate(zip(objects, expected.values, strict=True)):
        _compare(f"{expected.what}[{number}]", thing, value, expected.fakes)


def _compare(name: str, thing: Any, value: Value, fakes: Mapping[int, Any]) -> None:
    match value:
        case Plain(index):
            _compare_plain(name, thing, fakes[index])
        case Wrapper():
            _require(f"type of {name}", type(thing), value.cls)
            names, context = thing.__tensor_flatten__()
            carriers = {carrier(field) for field in dynamic_names(value.cls)}
            _require(
                f"inner tensors of {name}",
                [n for n in names if n not in carriers],
                [n for n, _ in value.inner],
            )
            if context != value.context:
                raise InvariantError(
                    "recheck", f"metadata of {name} is {context!r}, proved {value.context!r}"
                )
            # A declared class computes its size from its inner tensors, whose sizes may be symbols.
            follows = issubclass(value.cls, TensorSubclass) and any(
                is_symbolic(fakes[n]) for n in slots_of(value)
            )
            for field in () if follows else ("size", "stride"):
                for got, wanted in zip(getattr(thing, field)(), getattr(value, field), strict=True):
                    if isinstance(wanted, int):
                        _require(f"{field} of {name}", got, wanted)
            _require(f"dtype of {name}", thing.dtype, value.dtype)
            for field, part in value.inner:
                _compare(f"{name}.{field}", getattr(thing, field), part, fakes)
        case _:
            return


def _compare_plain(name: str, thing: Any, fake: Any) -> None:
    if not isinstance(fake, Tensor):
        _require(f"whether {name} is a number", isinstance(thing, int | float | SymInt | SymFloat), True)
        return
    if type(thing) not in (Tensor, nn.Parameter, nn.Buffer):
        raise InvariantError("recheck", f"{name} is a {type(thing).__name__}, proved to be a plain tensor")
    _require(f"dtype of {name}", thing.dtype, fake.dtype)
    _require(f"device of {name}", thing.device.type, fake.device.type)
    _require(f"dimensions of {name}", thing.dim(), fake.dim())
    for got, wanted in zip(thing.size(), fake.size(), strict=True):
        if isinstance(wanted, int):
            _require(f"size of {name}", got, wanted)
    if thing.numel() > 0:
        for extent, got, wanted in zip(thing.size(), thing.stride(), fake.stride(), strict=True):
            if isinstance(wanted, int) and extent != 1:
                _require(f"stride of {name}", got, wanted)


def _require(what: str, got: Any, wanted: Any) -> None:
    if got != wanted:
        raise InvariantError("recheck", f"{what} is {got}, proved {wanted}")
