"""Optional checks of everything that a generated wrapper assumes without a check.

``DESUGAR_RECHECK=1`` in the environment enables them for the programs that are compiled then. Their wrappers flatten
every argument, saved tensor, gradient and result, and compare it with the structure that the guards prove. A check that
fails shows that one of these proofs is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymFloat, SymInt, Tensor, nn

from desugar.codegen.text import tuple_of
from desugar.ir.abstract_values import is_symbolic
from desugar.ir.values import Plain, Value, Wrapper, slots_of, take_apart
from desugar.passes.verify import InvariantError, rechecks_enabled
from subclasses import TensorSubclass
from subclasses.errors import one_of
from subclasses.source_text.emitter import Emitter


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected structure of some objects.

    Attributes:
        what: The name of the objects, for messages and for the generated text.
        values: One value per object.
        fakes: Fake tensors and symbolic ints, by slot of the values.
    """

    what: str
    values: tuple[Value, ...]
    fakes: Mapping[int, Any]


# ------------------------------------------------------------------------------------------------------ text


def emit_recheck(out: Emitter, names: Sequence[str], expected: Expected) -> None:
    """Emits a call that compares the named objects with their expected structure, if rechecks are enabled."""
    if rechecks_enabled() and names:
        call, bound = out.bind(recheck, "recheck"), out.bind(expected, expected.what)
        out.writeline(f"{call}({tuple_of(names)}, {bound})")


def expect_plain(what: str, fakes: Iterable[Any]) -> Expected:
    """Returns the expected structure of plain tensors and ints, one slot each."""
    by_slot = dict(enumerate(fakes))
    return Expected(what, tuple(map(Plain, by_slot)), by_slot)


# ----------------------------------------------------------------------------------------------- at run time


def recheck(objects: Sequence[Any], expected: Expected) -> None:
    """Compares objects with their expected structure.

    Raises:
        InvariantError: An object differs.
    """
    for number, (obj, value) in enumerate(zip(objects, expected.values, strict=True)):
        _compare(f"{expected.what}[{number}]", obj, value, expected.fakes)


def _compare(name: str, obj: Any, value: Value, fakes: Mapping[int, Any]) -> None:
    match value:
        case Plain(index):
            _compare_plain(name, obj, fakes[index])
        case Wrapper():
            _require(f"type of {name}", type(obj), value.cls)
            names, context = take_apart(obj)
            _require(f"inner tensors of {name}", names, tuple(n for n, _ in value.inner))
            _require(f"metadata of {name}", context, value.context)
            # A declared class computes its size from its inner tensors, whose sizes may be symbols.
            has_symbolic_size = issubclass(value.cls, TensorSubclass) and any(
                is_symbolic(fakes[n]) for n in slots_of(value)
            )
            for field in () if has_symbolic_size else ("size", "stride"):
                for got, proved in zip(getattr(obj, field)(), getattr(value, field), strict=True):
                    if isinstance(proved, int):
                        _require(f"{field} of {name}", got, proved)
            _require(f"dtype of {name}", obj.dtype, value.dtype)
            for field, part in value.inner:
                _compare(f"{name}.{field}", getattr(obj, field), part, fakes)
        case _:
            return


def _compare_plain(name: str, obj: Any, fake: Any) -> None:
    if not isinstance(fake, Tensor):
        _require(f"whether {name} is a number", isinstance(obj, int | float | SymInt | SymFloat), True)
        return
    if type(obj) not in (Tensor, nn.Parameter, nn.Buffer):
        raise InvariantError("recheck", f"{name} is {one_of(type(obj))}, proved to be a plain tensor")
    _require(f"dtype of {name}", obj.dtype, fake.dtype)
    _require(f"device of {name}", obj.device.type, fake.device.type)
    _require(f"dimensions of {name}", obj.dim(), fake.dim())
    for got, proved in zip(obj.size(), fake.size(), strict=True):
        if isinstance(proved, int):
            _require(f"size of {name}", got, proved)
    if obj.numel() > 0:
        for extent, got, proved in zip(obj.size(), obj.stride(), fake.stride(), strict=True):
            if isinstance(proved, int) and extent != 1:
                _require(f"stride of {name}", got, proved)


def _require(what: str, got: Any, proved: Any) -> None:
    if got != proved:
        raise InvariantError("recheck", f"{what} is {got}, proved {proved}")
