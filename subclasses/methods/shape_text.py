"""Emits the comparison of sizes in the constructor of a class that declares shapes.

For ``qdata: Tensor = inner(shape="out in")`` and ``scale: Tensor = inner(shape="out 1")`` the text is::

    shape_qdata = qdata.shape
    shape_scale = scale.shape
    if (
        qdata.ndim != 2
        or scale.ndim != 2
        or (shape_scale[0] != shape_qdata[0]) is not False
        or (shape_scale[1] != 1) is not False
    ):
        check_shapes(spec, (qdata, scale), {})

The comparison of equal ints is ``False`` itself. For a symbolic size it is not, so that ``check_shapes`` compares it,
without guards on other sizes.
"""

from __future__ import annotations

import functools

from subclasses.source_text.emitter import Emitter
from subclasses.spec.collect import InnerField, SubclassSpec
from subclasses.spec.shapes import Comparison, InnerDim, check_shapes, comparisons


def emit_shape_checks(e: Emitter, spec: SubclassSpec) -> None:
    """Emits the checks of all declared shapes."""
    declared = {f.name: f for f in spec.inners if f.shape is not None}
    names = {name: e.fresh_name(f"shape_{name}") for name in declared}
    for name, field in declared.items():
        maybe = f"None if {name} is None else " if field.optional else ""
        e.writeline(f"{names[name]} = {maybe}{name}.shape")
    conditions = [
        _wrong_ndim(field)
        for field in declared.values()
        if field.shape and (field.shape.dims or not field.shape.leading)
    ]
    conditions += [_differs(c, declared, names) for c in comparisons(spec)]
    if not conditions:
        return
    check = e.bind(functools.partial(check_shapes, spec), "check_shapes")
    metadata = ", ".join(f"{f.name!r}: {f.name}" for f in (*spec.statics, *spec.dynamics))
    e.writeline("if (")
    with e.indent():
        for i, condition in enumerate(conditions):
            e.writeline("or " * bool(i) + condition)
    e.writeline("):")
    e.writeline(f"    {check}(({', '.join(spec.inner_names)},), {{{metadata}}})")


def _wrong_ndim(field: InnerField) -> str:
    assert field.shape is not None, "only fields with a shape are checked"
    condition = f"{field.name}.ndim {'<' if field.shape.leading else '!='} {len(field.shape.dims)}"
    return f"({field.name} is not None and {condition})" if field.optional else condition


def _differs(comparison: Comparison, declared: dict[str, InnerField], names: dict[str, str]) -> str:
    inner_dim, expected = comparison.inner_dim, comparison.expected
    other = _size(expected, names) if isinstance(expected, InnerDim) else expected
    condition = f"({_size(inner_dim, names)} != {other}) is not False"
    fields = [inner_dim.field, *([expected.field] if isinstance(expected, InnerDim) else [])]
    absent = [f"{name} is not None" for name in dict.fromkeys(fields) if declared[name].optional]
    return f"({' and '.join((*absent, condition))})" if absent else condition


def _size(inner_dim: InnerDim, names: dict[str, str]) -> str:
    return f"{names[inner_dim.field]}[{inner_dim.index}]"
