"""Installs the generated methods of a class: compiles the text and sets the class attributes."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from typing import Any

import torch

from subclasses._torch import (
    disabled_torch_function_impl,
    dynamic_dims_name,
    marked_dims_name,
    skip_frames,
)
from subclasses._torch_distributed import size_inner_dtensors
from subclasses.autograd import construct, materialize
from subclasses.autograd.above import call
from subclasses.autograd.cotangent_class import call_without_rules
from subclasses.dispatch import resolution
from subclasses.dispatch.views import view_functions
from subclasses.layout import Layout, intern_layout, nested_layouts
from subclasses.methods.attributes import (
    DynamicDims,
    VaryingDims,
    check_constant,
    install_fields,
    set_field,
)
from subclasses.methods.class_text import emit_class
from subclasses.methods.compile_cache import stable_hash
from subclasses.rules.errors import raise_from_rule
from subclasses.rules.registration_checks import with_type_errors
from subclasses.rules.registry import collect_function_rules, has_formulas, has_op_rules, rules_views
from subclasses.rules.symbolic_numbers import with_ints
from subclasses.serialize import allow_loading
from subclasses.source_text.build import build_functions
from subclasses.spec.collect import SubclassSpec
from subclasses.spec.construction import checked_init, checked_new, serving_new
from subclasses.spec.fields import MISSING
from subclasses.spec.statics import check_statics, concrete
from subclasses.spec.traits import traits_of
from subclasses.spec.values import add_carriers, make_carrier

_STATIC_METHODS = frozenset({"__new__", "__tensor_unflatten__", "_wrap"})
_CLASS_METHODS = frozenset({"__torch_dispatch__", "__torch_function__", "__metadata_guard__"})

size_inner_dtensors(lambda cls: hasattr(cls, "__spec__"))


def install(cls: Any, root: type) -> None:
    """Generates the methods of a class and installs those that the class body or a base does not define."""
    spec: SubclassSpec = cls.__spec__
    e = emit_class(spec)
    run_table: dict[Any, Any] = {}
    function_table: dict[Any, Any] = {}
    made = build_functions(
        e.source,
        e.namespace | _generated_globals(cls, spec, run_table, function_table),
        filename=f"<subclasses {spec.name}>",
        owner=cls,
    )
    cls.__source__ = e.source
    cls._handwritten = frozenset(name for name in made if name in vars(cls))
    install_fields(cls)
    author = inspect.getattr_static(cls, "materialize", None)
    if isinstance(author, types.FunctionType) and not materialize.is_made_differentiable(author):
        cls.materialize = materialize.make_differentiable(author)
    if cls._varying_dims is not None:
        setattr(cls, marked_dims_name, VaryingDims())
    elif names := tuple(f.name for f in spec.dynamics if f.name in (spec.outer_args or ())):
        setattr(cls, dynamic_dims_name, DynamicDims(names))
    _check_methods(cls)
    _show_required(made["__new__"])
    cls._new = staticmethod(made["__new__"])
    cls._dispatch = staticmethod(made["__torch_dispatch__"])
    cls._function = staticmethod(made["__torch_function__"])
    for name, function in made.items():
        if not _is_overridden(cls, name, root):
            setattr(cls, name, _as_method(cls, name, function))
    if isinstance(cls.__repr__, types.FunctionType):
        skip_frames(cls.__repr__)  # print(x) breaks the graph, and then needs values of eager mode
    allow_loading(cls)
    cls._traits = traits_of(cls, wraps=cls.wrap_cotangent is not root.wrap_cotangent)  # type: ignore[attr-defined]
    cls._refresh = functools.partial(_refresh, weakref.ref(cls), run_table, function_table, made, root)
    cls._refresh()
    if _is_overridden(cls, "__torch_function__", root):
        _serve_super(cls)


def _check_methods(cls: Any) -> None:
    """Wraps methods that a class body defines in place of generated ones, so that a wrong result raises at the call."""
    new, init, dispatch = (vars(cls).get(n) for n in ("__new__", "__init__", "__torch_dispatch__"))
    if isinstance(dispatch, classmethod) and isinstance(dispatch.__func__, types.FunctionType):
        cls.__torch_dispatch__ = classmethod(with_type_errors(cls, dispatch.__func__))
    if isinstance(new, staticmethod):
        cls.__new__ = staticmethod(checked_new(new.__func__))
        for base in cls.__mro__[1:]:  # whose constructor it calls with super()
            made = vars(base).get("_new")
            if made is not None and vars(base)["__new__"].__func__ is made.__func__:
                base.__new__ = staticmethod(serving_new(base, made.__func__))
    if isinstance(init, types.FunctionType):
        cls.__init__ = checked_init(init)


def _show_required(new: Any) -> None:
    """Sets the signature of a constructor to its declaration, in which required metadata has no default."""
    shown = inspect.signature(new)
    parameters = [
        p.replace(default=p.empty) if p.default is MISSING else p for p in shown.parameters.values()
    ]
    new.__signature__ = shown.replace(parameters=parameters)


def _serve_super(cls: Any) -> None:
    """Lets the author's own ``__torch_function__`` call the generated one of each declared base with ``super()``."""
    function = getattr(cls.__torch_function__, "__func__", None)
    if isinstance(function, types.FunctionType):
        skip_frames(function)  # like the generated one: Dynamo inlines it, and compiles no call of it alone
    for base in cls.__mro__[1:]:
        if "_function" in vars(base) and "_serves_super" not in vars(base):
            base._serves_super = True
            base._refresh()


def _is_overridden(cls: Any, name: str, root: type) -> bool:
    """Whether the body of the class or of a declared base defines a method that would be generated."""
    bases = cls.__mro__[: cls.__mro__.index(root)]
    return any(name in vars(b).get("_handwritten", vars(b)) for b in bases)


def _as_method(cls: Any, name: str, function: Any) -> Any:
    function.__qualname__ = f"{cls.__qualname__}.{name}"
    if name in _STATIC_METHODS:
        return staticmethod(function)
    return classmethod(function) if name in _CLASS_METHODS else function


def _refresh(
    ref: Any,
    run_table: dict[Any, Any],
    functions: dict[Any, Any],
    made: dict[str, Any],
    root: type,
) -> None:
    """Clears resolved callables. Installs ``__torch_function__`` if a rule exists or a class that inherits calls it."""
    cls = ref()
    run_table.clear()
    functions.clear()
    if cls.__spec__.fallback == "materialize" and not cls._is_cotangent:
        functions.update(view_functions)
    functions.update(with_ints(collect_function_rules(cls)))
    cls._has_function_rules = bool(functions)
    is_of_values = cls._traits.has_cotangents and not cls._is_cotangent
    is_ruled = is_of_values and (has_op_rules(cls) or cls.__spec__.leads)
    materializes = is_of_values and cls.__spec__.fallback == "materialize"
    cls._runs_above = is_ruled or materializes
    cls._rules_views = cls._runs_above and (materializes or rules_views(cls))
    cls._has_formulas = is_ruled and (cls._traits.is_representation or has_formulas(cls))
    name = "__torch_function__"
    if cls._is_cotangent:
        cls.__torch_function__ = classmethod(made[name] if functions else call_without_rules)
    elif not _is_overridden(cls, name, root):
        is_called = cls._has_function_rules or cls._runs_above or "_serves_super" in vars(cls)
        function = classmethod(made[name]) if is_called else disabled_torch_function_impl
        setattr(cls, name, function)


# ---- globals of the generated text -------------------------------------------------------------------------


def _generated_globals(
    cls: Any, spec: SubclassSpec, run_table: dict[Any, Any], functions: dict[Any, Any]
) -> dict[str, object]:
    layouts: weakref.WeakValueDictionary[Any, Layout] = weakref.WeakValueDictionary()

    def resolve(op: Any) -> Any:
        run = run_table[op] = resolution.resolve(cls, op).run
        return run

    return {
        "_Cls": cls,
        "_add_carriers": add_carriers,
        "_as_cotangent": construct.as_cotangent,
        "_check_constant": check_constant,
        "_call_unruled": call,
        "_coerce_tangent": construct.coerce_tangent,
        "_construct": construct.construct_recorded,
        "_functions": functions,
        "_is_foreign": functools.partial(resolution.is_foreign, cls),
        "_layouts": layouts,
        "_make_carrier": make_carrier,
        "_make_layout": functools.partial(make_layout, cls, spec, layouts),
        "_outer_of": cls.outer if spec.has_outer else None,
        "_runs": run_table,
        "_raise_from_rule": raise_from_rule,
        "_resolve": resolve,
        "_set_field": set_field,
        "_stable_hash": stable_hash,
    }


# Equal values of one of these types are interchangeable in a program. A tuple may contain 1 or True, which are equal
# and not interchangeable. Layouts with values of other types are therefore not kept in the class's own table.
_ATOMS = (int, bool, str, bytes, type(None), torch.dtype, torch.device)


def make_layout(
    cls: Any, spec: SubclassSpec, layouts: Any, key: Any, inners: tuple[Any, ...], given: tuple[Any, ...]
) -> Layout:
    """Interns the layout of a construction that missed the class's own table, and adds it there if possible.

    `given` are the static values, which may be symbols; `key` holds them too.
    """
    statics = tuple(map(concrete, given))
    check_statics(spec.name, spec.statics, statics)
    pairs = [(n, t) for n, t in zip(spec.attributes, inners, strict=True) if t is not None]
    nested = nested_layouts(pairs)
    layout = intern_layout(cls, statics, tuple(n for n, _ in pairs), nested)
    if not nested and all(type(s) in _ATOMS for s in given):
        layouts[key] = layout
    return layout
