"""Compares outcomes of the same call with eager mode's, and finds the first difference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from desugar.compare.outcome import Entry, Outcome
from desugar.compare.records import Verdict
from desugar.explain.collecting.graphs import tensor_text

# A float may differ by `rtol` of its value plus `atol`, as in `torch.testing.assert_close`.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}
# Another order of summation explains a larger difference, up to `_ROUNDINGS` eps of the largest value, at most `_MOST`
# of it.
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
    """A difference as text, and whether another order of summation explains it."""

    text: str
    is_rounding: bool = False


def judge(outcomes: list[tuple[Outcome, Outcome]]) -> Verdict:
    """Compares the outcomes of a way with the outcomes of eager mode.

    Args:
        outcomes: (outcome in eager mode, outcome in the way) of each call.
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
        told = [("no container" if one["container"] == "." else one["container"]) for one in (got, want)]
        yield Difference("the result is {}, expected {}".format(*told))
    yield from _differences_of_entries(want["entries"], got["entries"])
    yield from _differences_of_pairs(want["memory"], got["memory"], "shares memory with")
    yield from _differences_of_pairs(want["same"], got["same"], "is the same object as")


def _differences_of_entries(want: Mapping[str, Entry], got: Mapping[str, Entry]) -> Iterator[Difference]:
    for path in {**want, **got}:
        if path in want and path in got:
            yield from _differences_of_leaves(path, want[path], got[path])
        else:
            what = "it was changed" if path.endswith(" after the call") else "it is there"
            where = "eager mode" if path in want else "this way"
            yield Difference(f"{path}: {what} in {where} alone")


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
    if want.get("value") != got.get("value"):
        yield Difference(f"{path}: {got['value']!r}, expected {want['value']!r}")
    for inner, part in want.get("parts", {}).items():
        if inner not in got["parts"]:
            yield Difference(f"{path}: the inner tensor {inner} is missing")
        else:
            yield from differences_of_values(path + inner, part, got["parts"][inner])


def differences_of_values(path: str, want: Tensor, got: Tensor) -> Iterator[Difference]:
    """Yields the largest difference of two plain tensors, if there is one beyond the tolerance."""
    if want.shape != got.shape or want.dtype != got.dtype:
        yield Difference(f"{path}: {tensor_text(got)}, expected {tensor_text(want)}")
        return
    dtype = want.dtype.to_real()
    if dtype not in TOLERANCES:
        a, b = _bits(want), _bits(got)
        if not torch.equal(a, b):
            yield Difference(f"{path}: {int((a != b).sum())} of {want.numel()} values differ")
        return
    rtol, atol = TOLERANCES[dtype]
    wide = torch.complex128 if want.is_complex() else torch.float64
    want, got = want.to(wide), got.to(wide)
    differs = ~torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
    if differs.any():
        share = min(_ROUNDINGS * torch.finfo(dtype).eps, _MOST)
        yield _describe_difference(path, want, got, differs, share)


def _describe_difference(path: str, want: Tensor, got: Tensor, differs: Tensor, share: float) -> Difference:
    """Describes the largest difference; it is rounding up to a share of the largest value."""
    distances = (got - want).abs().nan_to_num(nan=math.inf, posinf=math.inf).where(differs, 0.0)
    index = torch.unravel_index(distances.argmax(), want.shape)
    most, largest = float(distances.max()), float(want.abs().nan_to_num(nan=0.0, posinf=0.0).max())
    index_text = f"[{', '.join(str(int(number)) for number in index)}]" if index else ""
    text = f"{path}{index_text}: {got[index].item():.6g}, expected {want[index].item():.6g}"
    return Difference(
        f"{text} (off by {most:.2g}; the largest value is {largest:.3g})", most <= share * largest
    )


def _bits(tensor: Tensor) -> Tensor:
    """Returns a tensor that `torch.equal` can compare: small floats have no kernel for it."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() else tensor
