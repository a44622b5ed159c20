"""Eager mode as the judge: finds the first difference between two outcomes of one call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from desugar.compare.outcome import Entry, Outcome
from desugar.compare.records import Verdict

# A float may differ by `rtol` of its value plus `atol`, as in `torch.testing.assert_close`.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}
_COMPLEX = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
# Beyond that, sums in another order explain a difference of so many rounding errors of the largest value.
_ROUNDINGS, _MOST = 512, 0.05

_FACTS = {
    "kind": "the type",
    "size": "the size",
    "dtype": "the dtype",
    "layout": "the layout",
    "device": "the device",
    "requires_grad": "requires_grad",
    "metadata": "the metadata",
    "dynamic": "the dynamic fields",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs, and whether the order of sums explains it."""

    text: str
    is_rounding: bool = False


def judge(outcomes: list[tuple[Outcome, Outcome]]) -> Verdict:
    """Compares the calls of a way with those of eager mode.

    Args:
        outcomes: For each call what eager mode did, and what the way did.
    """
    rounded = ""
    for number, (want, got) in enumerate(outcomes, 1):
        for difference in find_differences(want, got):
            text = f"call {number} of {len(outcomes)}: {difference.text}"
            if not difference.is_rounding:
                return Verdict("wrong", text)
            rounded = rounded or text
    return Verdict("rounding", rounded) if rounded else Verdict("right")


def find_differences(want: Outcome, got: Outcome) -> Iterator[Difference]:
    """Yields the differences between two outcomes."""
    if want["container"] != got["container"]:
        yield Difference(f"the result is {_quoted(got['container'])}, expected {_quoted(want['container'])}")
    yield from _differences_of_entries(want["entries"], got["entries"])
    yield from _differences_of_pairs(want["memory"], got["memory"], "shares memory with")
    yield from _differences_of_pairs(want["same"], got["same"], "is the same object as")


def _quoted(container: str) -> str:
    return "no container" if container == "." else container


def _differences_of_entries(want: Mapping[str, Entry], got: Mapping[str, Entry]) -> Iterator[Difference]:
    for path, entry in want.items():
        if path in got:
            yield from _differences_of_leaves(path, entry, got[path])
        else:
            yield Difference(f"{path}: {_not_recorded(path)} in eager mode alone")
    for path in got:
        if path not in want:
            yield Difference(f"{path}: {_not_recorded(path)} in this way alone")


def _not_recorded(path: str) -> str:
    return "it was changed" if path.endswith(" after the call") else "it is there"


def _differences_of_pairs(want: Mapping[str, str], got: Mapping[str, str], does: str) -> Iterator[Difference]:
    for path in {**want, **got}:
        if want.get(path) != got.get(path):
            yield Difference(
                f"{path} {does} {got.get(path, 'nothing')}, expected {want.get(path, 'nothing')}"
            )


def _differences_of_leaves(path: str, want: Entry, got: Entry) -> Iterator[Difference]:
    for fact, name in _FACTS.items():
        if want.get(fact) != got.get(fact):
            yield Difference(f"{path}: {name} is {got.get(fact)}, expected {want.get(fact)}")
            return
    if "value" in want:
        yield from _differences_of_constants(path, want["value"], got["value"])
    for inner, part in want.get("parts", {}).items():
        if inner not in got["parts"]:
            yield Difference(f"{path}: the inner tensor {inner} is missing")
        else:
            yield from differences_of_values(path + inner, part, got["parts"][inner])


def _differences_of_constants(path: str, want: Any, got: Any) -> Iterator[Difference]:
    """A Python float usually comes from a float32 tensor."""
    if isinstance(want, float):
        if not (
            math.isclose(want, got, rel_tol=1e-5, abs_tol=1e-5) or (math.isnan(want) and math.isnan(got))
        ):
            yield Difference(f"{path}: {got!r}, expected {want!r}")
    elif want != got:
        yield Difference(f"{path}: {got!r}, expected {want!r}")


def differences_of_values(path: str, want: Tensor, got: Tensor) -> Iterator[Difference]:
    """Yields the largest difference of two plain tensors, if there is one beyond the tolerance."""
    if want.shape != got.shape or want.dtype != got.dtype:
        yield Difference(f"{path}: {_type_of(got)}, expected {_type_of(want)}")
        return
    dtype = _COMPLEX.get(want.dtype, want.dtype)
    if dtype not in TOLERANCES:
        if not torch.equal(*_bits(want, got)):
            yield Difference(f"{path}: {_count_different(want, got)} differ")
        return
    rtol, atol = TOLERANCES[dtype]
    wide = torch.complex128 if want.is_complex() else torch.float64
    want, got = want.to(wide), got.to(wide)
    if torch.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True):
        return
    yield _describe_difference(path, want, got, min(_ROUNDINGS * torch.finfo(dtype).eps, _MOST))


def _describe_difference(path: str, want: Tensor, got: Tensor, share: float) -> Difference:
    finite = want.isfinite()
    if not torch.equal(finite, got.isfinite()) or not torch.equal(want.isnan(), got.isnan()):
        place = _index(((want.isnan() != got.isnan()) | (finite != got.isfinite())).int())
        return Difference(f"{path}{place}: {_item(got, place)}, expected {_item(want, place)}")
    apart = torch.where(finite, (got - want).abs(), torch.where(got == want, 0.0, math.inf))
    apart = torch.where(want.isnan(), 0.0, apart)
    most = float(apart.max())
    largest = float(torch.where(finite, want.abs(), 0.0).max())
    place = _index(apart)
    text = f"{path}{place}: {_item(got, place)}, expected {_item(want, place)} (off by {most:.2g}"
    return Difference(f"{text}; the largest value is {largest:.3g})", most <= share * largest)


def _index(values: Tensor) -> str:
    """Returns the place of the largest value, as an index."""
    if not values.dim():
        return ""
    place = torch.unravel_index(values.argmax(), values.shape)
    return f"[{', '.join(str(int(number)) for number in place)}]"


def _item(values: Tensor, place: str) -> str:
    index = tuple(int(number) for number in place.strip("[]").split(", ")) if place else ()
    return f"{values[index].item():.6g}"


def _bits(*tensors: Tensor) -> list[Tensor]:
    """Returns tensors that `torch.equal` can compare: small floats have no kernel for it."""
    return [t.view(torch.uint8) if t.is_floating_point() else t for t in tensors]


def _count_different(want: Tensor, got: Tensor) -> str:
    a, b = _bits(want, got)
    return f"{int((a != b).sum())} of {want.numel()} values"


def _type_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
