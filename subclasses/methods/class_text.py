"""Emits the text of a class's methods from its spec.

An ``emit_`` function writes one method to its emitter argument, or a few related methods. All methods of a class form
one file and compile once. Fields appear under their own names. A function that PyTorch calls has the parameters that
PyTorch names. Every other name starts with an underscore or comes from the emitter, which avoids the names of fields.
Global names with an underscore depend on the class itself and are supplied by :mod:`subclasses.methods.install`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from subclasses import serialize
from subclasses._torch import current_transform, in_function_mode, make_wrapper_subclass
from subclasses._torch_tracing import in_dual_level, without_lazy_bits
from subclasses.methods import fsdp
from subclasses.methods.attributes import SPECIAL_ATTRIBUTES
from subclasses.methods.outer_text import emit_make_outer
from subclasses.methods.shape_text import emit_shape_checks
from subclasses.op_schemas.tangents import check_no_tangents
from subclasses.source_text.emitter import Emitter
from subclasses.spec import construction
from subclasses.spec.collect import InnerField, SubclassSpec
from subclasses.spec.fields import MISSING
from subclasses.spec.values import carrier


def may_require_grad(field: InnerField) -> bool:
    """Whether an inner tensor of this field can ever require grad."""
    return field.dtype is None or field.dtype.is_floating_point or field.dtype.is_complex


# ---- construction ------------------------------------------------------------------------------------------


def emit_new(e: Emitter, spec: SubclassSpec) -> None:
    """Emits the constructor: every check, then a plain or a differentiable construction.

    The constructor is visible to torch function modes, like any other function that creates a tensor.
    """
    e.writeline(f"def __new__(_cls, {_parameters(e, spec)}):")
    with e.indent():
        in_mode, handle = (
            e.bind(in_function_mode, "in_function_mode"),
            e.bind(handle_torch_function, "handle"),
        )
        names = [f.name for f in (*spec.statics, *spec.dynamics)]
        metadata = "".join(f", {name}={name}" for name in names)
        if names:
            by_position = e.bind(construction.raise_metadata_by_position, "raise_metadata_by_position")
            e.writeline("if _more:")
            e.writeline(f"    {by_position}({spec.name!r}, {spec.inner_names!r}, {tuple(names)!r}, _more)")
        required = [f.name for f in (*spec.statics, *spec.dynamics) if f.default is MISSING]
        if required:
            missing = e.bind(MISSING, "missing")
            bad = e.bind(construction.raise_missing_metadata, "raise_missing_metadata")
            e.writeline(f"if {' or '.join(f'{name} is {missing}' for name in required)}:")
            e.writeline(
                f"    {bad}({spec.name!r}, {{{', '.join(f'{name!r}: {name}' for name in required)}}})"
            )
        e.writeline(f"if {in_mode}():")
        e.writeline(f"    return {handle}(__new__, (), _cls, {', '.join(spec.inner_names)}{metadata})")
        for field in spec.inners:
            _emit_inner_check(e, spec, field)
        for field in spec.dynamics:
            bad = e.bind(construction.raise_not_a_count, "raise_not_a_count")
            ints = e.bind((int, torch.SymInt), "ints")
            e.writeline(f"if not isinstance({field.name}, {ints}) or {field.name}.__class__ is bool or (")
            e.writeline(f"    {field.name}.__class__ is int and {field.name} < 0")
            e.writeline("):")
            e.writeline(f"    {bad}({spec.name!r}, {field.name!r}, {field.name})")
        if any(f.shape is not None for f in spec.inners):
            emit_shape_checks(e, spec)
        transform = e.bind(current_transform, "current_transform")
        e.writeline(f"if {transform}() is not None:")
        bad_transform = e.bind(construction.check_not_transformed, "check_not_transformed")
        e.writeline(f"    {bad_transform}({spec.name!r}, {', '.join(spec.inner_names)})")
        _emit_find_layout(e, spec)
        for field in filter(may_require_grad, spec.inners):
            _emit_detach(e, spec, field)
        e.writeline(f"return _wrap(_layout, {_wrap_arguments(spec)})")
    e.writeline()


def _parameters(e: Emitter, spec: SubclassSpec) -> str:
    """Returns the parameters: inner tensors, then keyword metadata. None is a default only after all required ones."""
    required = [i for i, f in enumerate(spec.inners) if not f.optional]
    last = max(required, default=-1)
    parameters = [f.name if i <= last else f"{f.name}=None" for i, f in enumerate(spec.inners)]
    meta = (*spec.statics, *spec.dynamics)
    parameters += ["*_more"] * bool(meta)
    for field in meta:
        hint = "missing" if field.default is MISSING else f"default_{field.name}"
        parameters.append(f"{field.name}={e.bind(field.default, hint)}")
    return ", ".join(parameters)


def _wrap_arguments(spec: SubclassSpec) -> str:
    """Returns the arguments of ``_wrap`` after the layout: inner tensors and dynamic ints."""
    return ", ".join((*spec.inner_names, *(f.name for f in spec.dynamics)))


def _emit_inner_check(e: Emitter, spec: SubclassSpec, field: InnerField) -> None:
    name, tensor_type = field.name, e.bind(field.subclass, field.subclass.__name__)
    anchor = next((f.name for f in spec.inners if f.device is None and not f.optional), None)
    maybe = f"{name} is not None and " if field.optional else ""
    e.writeline(f"if {maybe}not isinstance({name}, {tensor_type}):")
    bad_type = e.bind(construction.raise_not_a_tensor, "raise_not_a_tensor")
    e.writeline(f"    {bad_type}({spec.name!r}, {name!r}, {tensor_type}, {name})")
    if field.dtype is not None:
        dtype = e.bind(field.dtype, str(field.dtype).removeprefix("torch."))
        bad_dtype = e.bind(construction.raise_wrong_dtype, "raise_wrong_dtype")
        e.writeline(f"if {maybe}{name}.dtype is not {dtype}:")
        e.writeline(f"    {bad_dtype}({spec.name!r}, {name!r}, {dtype}, {name}.dtype)")
    if may_require_grad(field):
        solid = e.bind(without_lazy_bits, "without_lazy_bits")
        e.writeline(f"if {maybe}({name}.is_conj() or {name}.is_neg() or {name}._is_zerotensor()):")
        e.writeline(f"    {name} = {solid}({name})")
    if field.device is None and anchor not in (None, name):
        bad_device = e.bind(construction.raise_mixed_devices, "raise_mixed_devices")
        e.writeline(f"if {maybe}{name}.device != {anchor}.device:")
        e.writeline(f"    {bad_device}({spec.name!r}, {name!r}, {name}.device, {anchor!r}, {anchor}.device)")


def _emit_find_layout(e: Emitter, spec: SubclassSpec) -> None:
    """Emits the lookup of the layout in the class's own table, and ``_make_layout`` if it is missing or nested.

    Then emits the differentiable construction for inner tensors that require grad.
    """
    tensor = e.bind(Tensor, "Tensor")
    optional = [f.name for f in spec.inners if f.optional]
    plain = [
        f"({f.name} is None or {f.name}.__class__ is {tensor})"
        if f.optional
        else f"{f.name}.__class__ is {tensor}"
        for f in spec.inners
    ]
    statics = [f.name for f in spec.statics]
    key = [*statics, *(f"{n}.__class__" for n in statics), *(f"{n} is None" for n in optional)]
    e.writeline(f"_key = ({', '.join(key)}{',' * (len(key) == 1)})")
    e.writeline("try:")
    e.writeline(f"    _layout = _layouts.get(_key) if {' and '.join(plain)} else None")
    e.writeline("except TypeError:")
    e.writeline("    _layout = None")
    e.writeline("if _layout is None:")
    inners = ", ".join(spec.inner_names)
    e.writeline(f"    _layout = _make_layout(_key, ({inners},), ({', '.join(statics)}{',' * bool(statics)}))")
    grads = [
        f"{f.name} is not None and {f.name}.requires_grad" if f.optional else f"{f.name}.requires_grad"
        for f in spec.inners
        if may_require_grad(f)
    ]
    if grads:
        grad_on = e.bind(torch.is_grad_enabled, "is_grad_enabled")
        e.writeline(f"if ({' or '.join(grads)}) and {grad_on}():")
        dynamics = "".join(f"{f.name}, " for f in spec.dynamics)
        e.writeline(f"    return _construct(_layout, ({dynamics}), {inners})")


def _emit_detach(e: Emitter, spec: SubclassSpec, field: InnerField) -> None:
    maybe = f"{field.name} is not None and " if field.optional else ""
    e.writeline(f"if {maybe}{field.name}.requires_grad:")
    e.writeline(f"    {field.name} = {field.name}.detach()")


def emit_wrap(e: Emitter, spec: SubclassSpec) -> None:
    """Emits ``_wrap``, which makes a value from a layout, inner tensors and dynamic ints without any check."""
    make = e.bind(make_wrapper_subclass, "make_wrapper_subclass")
    # Positional: size, stride, storage offset, memory format, dtype, layout, device. Keywords cost a third more.
    strided = e.bind(torch.strided, "strided")
    carriers = "".join(f", {carrier(f.name)}=None" for f in spec.dynamics)
    given = "" if spec.outer_args is None else ", _given=None"
    e.writeline(f"def _wrap(_layout, {_wrap_arguments(spec)}{carriers}{given}):")
    with e.indent():
        size, dtype = spec.size_from, spec.dtype_from
        if spec.outer_args is None:
            e.writeline(f"_self = {make}(")
            e.writeline(f"    _Cls, {size}.size(), {size}.stride(), {size}.storage_offset(),")
            e.writeline(f"    None, {dtype}.dtype, {strided}, {size}.device,")
            e.writeline(")")
        else:
            emit_make_outer(e, spec, make, strided)
        e.writeline("_dict = _self.__dict__")
        for field in spec.inners:
            e.writeline(f"_dict[{field.attribute!r}] = {field.name}")
        for field in spec.dynamics:
            e.writeline(f"_dict[{field.name!r}] = {field.name}")
        e.writeline('_dict["_layout"] = _layout')
        if spec.dynamics:
            _emit_store_carriers(e, spec)
        e.writeline("return _self")
    e.writeline()


def _emit_store_carriers(e: Emitter, spec: SubclassSpec) -> None:
    """Emits the storing of carriers for a value whose inner tensors are not plain, as in a trace.

    There the carriers are passed in or created at construction, while the trace's modes are active. A value of plain
    inner tensors creates its carriers, marked as dynamic, when it is first flattened.
    """
    first = min(spec.inners, key=lambda f: f.optional)
    e.writeline(f"if {first.name}.__class__ is not {e.bind(Tensor, 'Tensor')}:")
    with e.indent():
        for field in spec.dynamics:
            name = carrier(field.name)
            e.writeline(f"_dict[{name!r}] = _make_carrier(_self, {field.name}) if {name} is None else {name}")


# ---- flatten and unflatten ---------------------------------------------------------------------------------


def emit_flatten(e: Emitter, spec: SubclassSpec) -> None:
    """Emits ``__tensor_flatten__``: the names of the inner tensors and carriers that are present, and the layout."""
    carriers = [carrier(f.name) for f in spec.dynamics]
    e.writeline("def __tensor_flatten__(_self):")
    with e.indent():
        e.writeline("_dict = _self.__dict__")
        if carriers:
            e.writeline(f"if {carriers[0]!r} not in _dict:")
            e.writeline("    _add_carriers(_self)")
        if any(f.optional for f in spec.inners):
            e.writeline('_layout = _dict["_layout"]')
            names, layout = "[" + ", ".join(("*_layout.present", *map(repr, carriers))) + "]", "_layout"
        else:
            names, layout = str([*spec.attributes, *carriers]), '_dict["_layout"]'
        e.writeline(f"return {names}, {layout}")
    e.writeline()


def emit_unflatten(e: Emitter, spec: SubclassSpec) -> None:
    """Emits ``__tensor_unflatten__``: no checks; the outer size follows from the inner tensors.

    Where ``outer`` computes a size from several symbols of a compiler, the value has the size that the compiler passes.
    """
    e.writeline("def __tensor_unflatten__(_inner_tensors, _layout, _outer_size, _outer_stride):")
    with e.indent():
        args = [
            f"_inner_tensors.get({f.attribute!r})" if f.optional else f"_inner_tensors[{f.attribute!r}]"
            for f in spec.inners
        ]
        for name in (carrier(f.name) for f in spec.dynamics):
            e.writeline(f"{name} = _inner_tensors[{name!r}]")
        carriers = [carrier(f.name) for f in spec.dynamics]
        args += [*(f"{name}.size(0)" for name in carriers), *carriers]
        if spec.outer_args is not None:
            args.append("_given=(_outer_size, _outer_stride)")
        e.writeline(f"return _wrap(_layout, {', '.join(args)})")
    e.writeline()


# ---- dispatch ----------------------------------------------------------------------------------------------


def emit_dispatch(e: Emitter, spec: SubclassSpec) -> None:
    """Emits ``__torch_dispatch__``: one table lookup, then the callable."""
    e.writeline("def __torch_dispatch__(_cls, _func, _types, _args=(), _kwargs=None):")
    with e.indent():
        e.writeline(
            "if _cls is not _Cls:  # super().__torch_dispatch__ of a class that inherits from this one"
        )
        e.writeline("    return _cls._dispatch(_cls, _func, _types, _args, _kwargs)")
        e.writeline("_run = _runs.get(_func)")
        e.writeline("if _run is None:")
        e.writeline("    _run = _resolve(_func)")
        e.writeline("if len(_types) > 1 and _is_foreign(_func, _types, _args):")
        e.writeline("    return NotImplemented")
        e.writeline(f"if {in_dual_level(e.bind(torch.autograd.forward_ad, 'forward_ad'))}:")
        e.writeline(f"    {e.bind(check_no_tangents, 'check_no_tangents')}(_cls, _func, _args, _kwargs)")
        mapped = ", RuntimeError, IndexError" if spec.fallback == "map" else ""
        _emit_call(e, "_run(*_args, **_kwargs) if _kwargs else _run(*_args)", mapped)
    e.writeline()


def emit_function(e: Emitter, spec: SubclassSpec) -> None:
    """Emits ``__torch_function__``; it is installed if the class has a rule, or a class body calls it by super()."""
    e.writeline("def __torch_function__(_cls, _func, _types, _args=(), _kwargs=None):")
    with e.indent():
        e.writeline(
            "if _cls is not _Cls:  # super().__torch_function__ of a class that inherits from this one"
        )
        e.writeline("    return _cls._function(_cls, _func, _types, _args, _kwargs)")
        e.writeline("_rule = _functions.get(_func)")
        e.writeline("if _rule is None:")
        e.writeline("    return _call_unruled(_func, _types, _args, _kwargs or {})")
        _emit_call(e, "_rule(_func, *_args, **_kwargs) if _kwargs else _rule(_func, *_args)")
    e.writeline()


def _emit_call(e: Emitter, call: str, more: str = "") -> None:
    e.writeline("try:")
    e.writeline(f"    return {call}")
    e.writeline(f"except (TypeError, AttributeError, RecursionError, AssertionError{more}) as _error:")
    operands = ", _args" if more else ""
    e.writeline(f"    _raise_from_rule(_cls, _func, _error{operands})")


# ---- attributes and printing -------------------------------------------------------------------------------


def emit_setattr(e: Emitter, spec: SubclassSpec) -> None:
    """Emits ``__setattr__``: assigning an inner tensor is checked as at construction, and metadata is constant.

    Any other attribute is kept, with a warning if it hides a constant of the class.
    """
    fields = e.bind(frozenset({*spec.names, *spec.attributes, *SPECIAL_ATTRIBUTES}), "fields")
    plain = e.bind(object.__setattr__, "set_attribute")
    e.writeline("def __setattr__(_self, _name, _value):")
    with e.indent():
        e.writeline(f"if _name in {fields}:")
        e.writeline("    _set_field(_self, _name, _value)")
        e.writeline("else:")
        e.writeline("    _check_constant(_Cls, _name)")
        e.writeline(f"    {plain}(_self, _name, _value)")
    e.writeline()


def emit_repr(e: Emitter, spec: SubclassSpec) -> None:
    """Emits ``__repr__``: the constructor call that makes this value, then ``grad_fn`` or ``requires_grad``."""
    tail = e.bind(construction.repr_tail, "repr_tail")
    attributes = {f.name: f.attribute for f in spec.inners}
    shown = ", ".join(f"{n}={{_self.{attributes.get(n, n)}!r}}" for n in spec.names)
    e.writeline("def __repr__(_self, *, tensor_contents=None):")
    e.writeline(f'    return f"{spec.name}({shown}{{{tail}(_self)}})"')
    e.writeline()


# ---- hooks of torch.compile --------------------------------------------------------------------------------


def emit_compile_hooks(e: Emitter, spec: SubclassSpec) -> None:
    """Emits the hooks for guards, cache keys and tangents; comparing metadata is an identity test."""
    e.writeline("def __metadata_guard__(_cls, _saved, _now):")
    e.writeline("    return _saved is _now")
    e.writeline()
    e.writeline("def _stable_hash_for_caching(_self):")
    e.writeline("    return _stable_hash(_self)")
    e.writeline()
    e.writeline("def __coerce_tangent_metadata__(_self):")
    e.writeline("    return _as_cotangent(_self)")
    e.writeline()
    e.writeline("def __coerce_same_metadata_as_tangent__(_self, _metadata, _type=None):")
    e.writeline("    return _coerce_tangent(_self, _metadata, _type)")
    e.writeline()


# ---- hooks of the rest of PyTorch --------------------------------------------------------------------------


def emit_storage_hooks(e: Emitter, spec: SubclassSpec) -> None:
    """Emits pickling, copying, shared memory and FSDP2 hooks, which torch implements through a tensor's storage.

    A wrapper has no storage with data, so these hooks go through its inner tensors.
    """
    for name, parameters, call in (
        ("__reduce_ex__", "_self, _protocol", f"{e.bind(serialize.reduce, 'reduce')}(_self)"),
        ("__deepcopy__", "_self, _memo", f"{e.bind(serialize.deepcopy, 'deepcopy')}(_self, _memo)"),
        ("share_memory_", "_self", f"{e.bind(serialize.share_memory, 'share_memory')}(_self)"),
        ("is_shared", "_self", f"{e.bind(serialize.is_shared, 'is_shared')}(_self)"),
        (
            "fsdp_pre_all_gather",
            "_self, mesh, outer_size, outer_stride, module, mp_policy",
            f"{e.bind(fsdp.pre_all_gather, 'pre_all_gather')}(_self, mesh, outer_size, mp_policy)",
        ),
        (
            "fsdp_post_all_gather",
            "_self, all_gather_outputs, metadata, param_dtype, *, out=None",
            f"{e.bind(fsdp.post_all_gather, 'post_all_gather')}(all_gather_outputs, metadata, out)",
        ),
    ):
        e.writeline(f"def {name}({parameters}):")
        e.writeline(f"    return {call}")
        e.writeline()


EMITTERS = (
    emit_new,
    emit_wrap,
    emit_flatten,
    emit_unflatten,
    emit_dispatch,
    emit_function,
    emit_setattr,
    emit_repr,
    emit_compile_hooks,
    emit_storage_hooks,
)


def emit_class(spec: SubclassSpec) -> Emitter:
    """Emits the complete text of a class."""
    e = Emitter()
    e.reserve(*spec.names, "is_shared", "share_memory_")
    for emit in EMITTERS:
        emit(e, spec)
    return e
