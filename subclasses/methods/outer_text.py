"""Emits the construction of a wrapper whose outer properties the class's own ``outer`` computes."""

from __future__ import annotations

from torch import Tensor

from subclasses.methods.outer_sizes import with_given_sizes
from subclasses.source_text.emitter import Emitter
from subclasses.spec import construction
from subclasses.spec.collect import SubclassSpec
from subclasses.spec.fields import Outer


def emit_make_outer(e: Emitter, spec: SubclassSpec, make: str, strided: str) -> None:
    """Emits the call of ``outer``, and the construction of the wrapper that it describes."""
    statics = {f.name: f"_layout.statics[{i}]" for i, f in enumerate(spec.statics)}
    args = ", ".join(f"{a}={statics.get(a, a)}" for a in spec.outer_args or ())
    e.writeline("try:")
    e.writeline(f"    _outer = _outer_of({args})")
    e.writeline("except RuntimeError as _error:")
    failed = e.bind(construction.raise_failed_outer, "raise_failed_outer")
    e.writeline(f"    {failed}({spec.name!r}, _error)")
    e.writeline(f"if not isinstance(_outer, {e.bind(Outer, 'Outer')}):")
    not_an_outer = e.bind(construction.raise_not_an_outer, "raise_not_an_outer")
    e.writeline(f"    {not_an_outer}({spec.name!r}, _outer)")
    # Only a trace has sizes that are symbols, and inner tensors that are not plain.
    first = min(spec.inners, key=lambda f: f.optional)
    e.writeline(f"if _given is not None or {first.name}.__class__ is not {e.bind(Tensor, 'Tensor')}:")
    e.writeline(f"    _outer = {e.bind(with_given_sizes, 'with_given_sizes')}(_outer, _given)")
    e.writeline("try:")
    with e.indent():
        e.writeline(f"_self = {make}(")
        e.writeline("    _Cls, _outer.size, _outer.stride, _outer.storage_offset,")
        e.writeline(
            f"    None, _outer.dtype or {spec.dtype_from}.dtype, {strided}, "
            f"_outer.device or {spec.size_from}.device,"
        )
        e.writeline(")")
    e.writeline("except (TypeError, RuntimeError) as _error:")
    bad_outer = e.bind(construction.raise_bad_outer, "raise_bad_outer")
    e.writeline(f"    {bad_outer}({spec.name!r}, _outer, _error)")
