"""The text of a spec: the class statement that declares it, with what the class inherits and every keyword."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from subclasses.spec.fields import MISSING


def show_spec(spec: Any) -> str:
    """Returns a class statement that declares the same fields, keywords and methods."""
    decompose = spec.decompose
    keywords = {
        "size_from": repr(spec.size_from),
        "dtype_from": repr(spec.dtype_from),
        "fallback": repr(spec.fallback),
        "decompose": str(decompose)
        if isinstance(decompose, bool)
        else f"[{', '.join(sorted(map(str, decompose)))}]",
    }
    if spec.trainable and spec.fallback != "map":
        keywords["trainable"] = "True"
    head = ", ".join(f"{key}={value}" for key, value in keywords.items())
    lines = [f"class {spec.name}(TensorSubclass, {head}):", *(f"    {line}" for line in _lines(spec))]
    return "\n".join(lines)


def _lines(spec: Any) -> Iterator[str]:
    for f in spec.inners:
        kind = "Tensor" if f.subclass is Tensor else f.subclass.__name__
        shown = {
            "dtype": f.dtype,
            "shape": None if f.shape is None else repr(str(f.shape)),
            "device": None if f.device is None else repr(f.device),
            "optional": f.optional or None,
            "differentiable": f.differentiable or None,
        }
        arguments = ", ".join(f"{key}={value}" for key, value in shown.items() if value is not None)
        yield f"{f.name}: {kind}{' | None' * f.optional} = inner({arguments})"
    for kind, fields in (("static", spec.statics), ("dynamic", spec.dynamics)):
        for f in fields:
            yield f"{f.name} = {kind}({'' if f.default is MISSING else f'default={f.default!r}'})"
    if spec.outer_args is not None:
        yield f"def outer({', '.join(spec.outer_args)}): ..."
    if spec.has_materialize:
        yield "def materialize(self): ..."
