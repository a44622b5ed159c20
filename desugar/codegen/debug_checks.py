"""Optional checks of everything that a runtime wrapper assumes without a check.

``DESUGAR_RECHECK=1`` in the environment enables them for the programs that are compiled then. Their wrappers flatten
every argument, saved tensor, gradient and result, and compare it with the structure that the guards prove. A check that
fails shows that one of these proofs is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymFloat, SymInt, Tensor

from desugar.codegen.text import tuple_of
from desugar.ir.abstract_values import is_symbolic
from desugar.ir.values import Plain, Value, Wrapper, is_wrapper, slots_of, take_apart
from desugar.passes.verify import InvariantError, rechecks_enabled
from subclasses import TensorSubclass
from subclasses._torch import disabled_torch_function_impl
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
        case Plain(index) if isinstance(fake := fakes[index], Tensor):
            if type(obj) is not Tensor and (
                is_wrapper(obj) or type(obj).__torch_function__ is not disabled_torch_function_impl
            ):
                raise InvariantError("recheck", f"{name} is {one_of(type(obj))}, proved to be a plain tensor")
            _require(name, _facts_of(obj, obj, fake), _facts_of(fake, obj, fake))
        case Plain():
            _require(name, {"whether a number": isinstance(obj, _NUMBERS)}, {"whether a number": True})
        case Wrapper():
            _require(name, {"type": type(obj)}, {"type": value.cls})
            names, context = take_apart(obj)
            got = {"inner tensors": names, "metadata": context, "dtype": obj.dtype}
            inner = tuple(field for field, _ in value.inner)
            _require(name, got, {"inner tensors": inner, "metadata": value.context, "dtype": value.dtype})
            # A declared class computes its size from its inner tensors, whose sizes may be symbols.
            is_computed = issubclass(value.cls, TensorSubclass) and any(
                is_symbolic(fakes[slot]) for slot in slots_of(value)
            )
            for fact in () if is_computed else ("size", "stride"):
                pairs = zip(getattr(obj, fact)(), getattr(value, fact), strict=True)
                constant = [(extent, proved) for extent, proved in pairs if isinstance(proved, int)]
                _require(name, {fact: [n for n, _ in constant]}, {fact: [n for _, n in constant]})
            for field, part in value.inner:
                _compare(f"{name}.{field}", getattr(obj, field), part, fakes)


_NUMBERS = int | float | SymInt | SymFloat


def _facts_of(tensor: Tensor, obj: Tensor, fake: Tensor) -> dict[str, Any]:
    """Returns the facts of a tensor by name; leaves out symbols of `fake`, and strides without effect in `obj`."""
    size = [n for n, proved in zip(tensor.size(), fake.size(), strict=False) if isinstance(proved, int)]
    strides = zip(tensor.stride(), fake.stride(), obj.size() if obj.numel() else (), strict=False)
    stride = [n for n, proved, extent in strides if isinstance(proved, int) and extent != 1]
    return {
        "dtype": tensor.dtype,
        "device": tensor.device.type,
        "dimensions": tensor.dim(),
        "size": size,
        "stride": stride,
    }


def _require(name: str, got: dict[str, Any], proved: dict[str, Any]) -> None:
    for fact, value in got.items():
        if value != proved[fact]:
            raise InvariantError("recheck", f"{fact} of {name} is {value}, proved {proved[fact]}")
