"""Members of a class body that look like fields, but are not declared as fields."""

from __future__ import annotations

import dataclasses
import re
import typing
from typing import Any, ClassVar, Final

import pytest
import torch
from torch import Tensor

from subclasses import SpecError, TensorSubclass, constant, dynamic, inner, static
from tests.subclasses.subjects import Int8Weight, Pair, declare as declare_any
from tests.tables import giving, raising


def declare(annotations: dict[str, Any], base: Any = TensorSubclass, **body: Any) -> Any:
    """A class statement with one inner tensor, from data."""
    return declare_any(base, name="Bad", annotations=annotations, **{"a": inner(), **body})


MISSING = object()


@pytest.mark.parametrize(
    ("annotation", "value", "mends"),
    [
        (Tensor, MISSING, ["`x: Tensor = inner()`", "`x = constant([...])`"]),
        (Tensor | None, MISSING, ["`x: Tensor | None = inner(optional=True)`"]),
        ("Tensor | None", None, ["`x: Tensor | None = None`", "inner(optional=True)"]),
        (Pair, MISSING, ["Pair = inner()"]),
        ("Tensor", torch.ones(2), ["`x: Tensor = inner()`"]),
        (int, MISSING, ["`x: int = static()`", "dynamic()", "`x: ClassVar[int] = ...`"]),
        (int, 3, ["`x: int = static(default=3)`", "dynamic(default=3)", "`x: ClassVar[int] = 3`"]),
        ("str | None", None, ["static(default=None)"]),
        ("list[int]", MISSING, ["hashable", "`x: tuple = static()`"]),
        (dict, {}, ["hashable", "`x: tuple = static()`"]),
        (Final[int], MISSING, ["`x: int = static()`", "ClassVar[int]"]),
        ("OnlyForTypeCheckers", MISSING, ["`x: OnlyForTypeCheckers = static()`"]),
        (Any, 1.5, ["static(default=1.5)"]),
    ],
)
def test_an_annotated_name_without_a_marker_says_which_one(annotation, value, mends):
    body = {} if value is MISSING else {"x": value}
    with pytest.raises(SpecError, match=r"Bad: `x: .*` declares no field") as caught:
        declare({"x": annotation}, **body)
    for mend in mends:
        assert mend in str(caught.value)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (ClassVar[int], 3),
        ("ClassVar[int]", 3),
        ("typing.ClassVar", 3),
        (Final, 3),
        ("Final[int]", 3),
        (typing.Callable, lambda self: 3),
        ("property", property(lambda self: 3)),
    ],
)
def test_a_constant_of_the_class_declares_no_field(annotation, value):
    cls = declare({"x": annotation}, x=value)
    assert vars(cls)["x"] is value
    assert cls.__spec__.names == ("a",)


PRIVATE = declare({"_cache": dict, "_size": "int"}, _size=3, WIDTH=4)
DETACHING = declare_any(rules={torch.ops.aten.detach.default: lambda func, x: type(x)(func(x.held) + 1)})
NARROW = declare_any(Int8Weight, annotations={"scale": Tensor, "axis": typing.Literal[0]})
test_names_that_declare_no_field = giving(
    {
        "private names": (lambda: PRIVATE.__spec__.names, ("a",)),
        "a constant without annotation": (lambda: PRIVATE.WIDTH, 4),
        "a narrower annotation of an inherited field": (
            lambda: NARROW.__spec__.names,
            Int8Weight.__spec__.names,
        ),
        "a rule in place of a detach": (lambda: DETACHING(torch.ones(2)).detach().held.tolist(), [2, 2]),
    }
)


@pytest.mark.parametrize("annotations", [{}, {"x": ClassVar[Tensor]}, {"x": "ClassVar[Tensor]"}])
@pytest.mark.parametrize("name", ["x", "_x"])
def test_a_tensor_in_the_class_body_is_to_be_a_constant(annotations, name):
    with pytest.raises(
        SpecError, match=rf"Bad\.{name} is a tensor in the class body.*`{name} = constant\(\.\.\.\)`"
    ):
        declare(annotations, **{name: torch.ones(1)})
    assert declare(annotations, **{name: constant(torch.ones(1))}).__spec__.names == ("a",)


# ---- names that are relied on ------------------------------------------------------------------------------


SHOWN = (
    "dim element_size get_device is_contiguous ndimension nelement numel size storage_offset stride".split()
)
CALLED = (
    "data_ptr detach is_conj register_hook requires_grad_ retain_grad storage _is_view _base _version".split()
)


@pytest.mark.parametrize("name", [*SHOWN, *CALLED, "unwrap", "implements", "unruled"])
@pytest.mark.parametrize("value", [lambda self, *args: None, 3])
def test_a_method_that_torch_or_the_library_relies_on_is_not_replaced(name, value):
    with pytest.raises(SpecError) as caught:
        declare({}, **{name: value})
    text = str(caught.value)
    proposed = re.search(r"choose another name, such as (\w+)", text)
    assert text.startswith(f"Bad.{name} ") and proposed
    assert ("say with `outer` what the value shows" in text) == (name in SHOWN)
    assert proposed[1] in vars(declare({}, **{proposed[1]: value}))


def test_each_name_that_installing_sets_is_refused_or_may_be_replaced():
    cls: Any = declare({})
    of_python = {"__module__", "__annotations__", "__doc__", "__qualname__", "__dict__", "__weakref__"}
    methods = set(re.findall(r"^def (\w+)", cls.__source__, re.MULTILINE)) - {"_wrap"}
    names = set(vars(cls)) - of_python - methods
    assert {"_layout", "_wrap", "_refresh", "_rulebook", "__spec__"} <= names | {"_layout"}
    for name in names:
        with pytest.raises(SpecError, match=rf"Bad\.{name} is a name that this package uses on every class"):
            declare({}, **{name: lambda self: None})


@pytest.mark.parametrize("name", "backward clone cpu item numpy to tolist view __getitem__ __repr__".split())
def test_a_method_that_users_call_may_be_replaced(name):
    cls = declare({}, **{name: lambda self, *args: 7})
    x = cls(torch.ones(2))
    assert getattr(x, name)() == 7
    assert type(x.detach()) is cls and torch.nn.Parameter(x, requires_grad=False) is not None


# ---- inheritance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("annotations", [{}, {"axis": int}])
def test_a_plain_value_does_not_replace_an_inherited_field(annotations):
    with pytest.raises(SpecError, match=r"Bad.*axis.* = 1.*static\(default="):
        declare(annotations, Int8Weight, axis=1)
    assert declare({"axis": int}, Int8Weight, axis=static(default=1)).__spec__.statics[0].default == 1


# ---- special methods ---------------------------------------------------------------------------------------


def total(self):
    return 0


MIXIN = type("Mixin", (), {"__annotations__": {"extra": Tensor}, "extra": inner()})
SPECIAL = ("__len__", "__iter__", "__getattr__")
REFUSED = {
    "a taken name, before a marker is advised": (
        lambda: declare({"data": Tensor}),
        "choose another name, such as data_data",
    ),
    "a detach": (
        lambda: declare({}, detach=lambda self: self.a),
        r"@Bad\.implements\(torch\.ops\.aten\.detach\.default\)",
    ),
    **{
        f"{marker.__name__} that is not called, {annotations}": (
            lambda marker=marker, annotations=annotations: declare(annotations, x=marker),
            re.escape(f"call it: `x = {marker.__name__}()`"),
        )
        for marker in (inner, static, dynamic)
        for annotations in ({}, {"x": int})
    },
    "no marker at all": (
        lambda: declare_any(name="Bare", annotations={"x": "Tensor"}),
        re.escape("`x: Tensor = inner()`"),
    ),
    "a marker of a base that is not declared": (
        lambda: declare({}, (MIXIN, TensorSubclass)),
        r"its base Mixin declares the field 'extra'.*TensorSubclass",
    ),
    **{
        name: (
            lambda name=name: declare({}, **{name: lambda self, *args: 3}),
            rf"Bad\.{name} is not called by compiled code, .*another name",
        )
        for name in SPECIAL
    },
    **{
        name: (
            lambda name=name: declare({}, **{name: lambda x, y: x}),
            rf"Bad\.{name} is not called by .*@Bad\.implements\(torch\.[\w.]+\)",
        )
        for name in ("__add__", "__rsub__", "__imul__", "__matmul__", "__neg__", "__lt__")
    },
    "the check of a dataclass": (
        lambda: declare({}, __post_init__=lambda self: None),
        r"Bad\.__post_init__ is never called, .*super\(\).__new__\(cls",
    ),
    **{
        f"a wrap_cotangent that autograd cannot call, {kind}": (
            lambda wrap=wrap: declare({}, wrap_cotangent=wrap),
            r"Bad\.wrap_cotangent is called on a value.*`def wrap_cotangent\(self, cot",
        )
        for kind, wrap in {
            "static": staticmethod(lambda cotangent: cotangent),
            "of the class": classmethod(lambda cls, c: c),
            "without a cotangent": lambda self: self,
            "a text": "a method",
        }.items()
    },
    "a check of files that is no class method": (
        lambda: declare({}, check_loaded=lambda self, **fields: None),
        r"Bad\.check_loaded is called before there is a value; write `@classmethod`",
    ),
    "a field of a dataclass": (
        lambda: declare({"k": int}, k=dataclasses.field(default=1)),
        re.escape("`k: int = static(default=1)`"),
    ),
    "a field of a dataclass without a default": (
        lambda: declare({"k": int}, k=dataclasses.field()),
        re.escape("`k: int = static()`"),
    ),
    **{
        f"a field and a {name} of one name": (
            lambda of=of: declare({"total": Tensor}, total=of(total)),
            r"Bad\.total is annotated, as a field is, and a method or property",
        )
        for name, of in {
            "method": lambda f: f,
            "property": property,
            "class method": classmethod,
            "static method": staticmethod,
        }.items()
    },
}


test_refused_at_the_class_statement = raising(
    {case: (make, SpecError, words) for case, (make, words) in REFUSED.items()}
)


test_dynamic_is_advised_where_its_default_is_allowed = raising(
    [
        (lambda value=value: declare({"x": int}, x=value), SpecError, "(?s)^(?!.*dynamic).*static")
        for value in (-1, True)
    ]
)


def test_what_is_declared_in_place_of_what_is_refused():
    for name in SPECIAL:
        proposed = f"{name.strip('_')}_of_mine"
        assert getattr(declare({}, **{proposed: lambda self: 3})(torch.ones(2)), proposed)() == 3
    declare({}, wrap_cotangent=lambda self, cotangent: cotangent)
    declare({}, check_loaded=classmethod(lambda cls, **fields: None))


def test_the_rule_that_is_advised_for_an_operator():
    def add(func, x, y):
        return cls(func(*(getattr(t, "held", t) for t in (x, y))))

    cls = declare_any(rules={torch.ops.aten.add: add})
    x, y = cls(torch.ones(2)), torch.ones(2)
    assert all(r.held.tolist() == [2.0, 2.0] for r in (x + y, y + x, torch.add(y, x), x + x, x + 1, 1 + x))
    x += y
    assert x.held.tolist() == [2.0, 2.0]
