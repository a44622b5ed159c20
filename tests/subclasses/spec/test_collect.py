"""From a class statement to a spec: the parts that are read, and the errors for wrong ones."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional as MaybeNone

import pytest
import torch
from torch import Tensor

from subclasses import Outer, SpecError, TensorSubclass, dynamic, inner, static
from subclasses.spec.fields import MISSING
from subclasses.spec.names import CALLED_BY_TORCH, OF_PROXIES
from tests.subclasses.subjects import Int8Weight, Nested, Pair, Rows, declare as make
from tests.tables import giving, raising

aten = torch.ops.aten


def declare(
    body: dict[str, Any], annotations: dict[str, Any], base: Any = TensorSubclass, **keywords: Any
) -> Any:
    """A class statement, from data."""
    namespace = {"__annotations__": annotations, "__module__": __name__, **body}
    return type(TensorSubclass)("Bad", (base,), namespace, **keywords)


def one(name: str = "a", marker: Any = None, annotation: Any = Tensor, **rest: Any) -> Any:
    """A class with one inner tensor, and further members."""
    return declare({name: marker or inner(), **rest}, {name: annotation})


# ---- members that are read ---------------------------------------------------------------------------------


INT8, PAIR = Int8Weight.__spec__, Pair.__spec__
CHILD = make(Int8Weight, extra=inner(optional=True), note=static(default="n"))
X = CHILD(torch.ones(2, 2, dtype=torch.int8), torch.full((2, 1), 3.0), axis=1)
OTHER = make(Pair, keywords={"fallback": "error", "size_from": "b"}).__spec__

test_the_spec_says_what_was_declared = giving(
    {
        "the name": (lambda: INT8.name, "Int8Weight"),
        "inner tensors": (lambda: INT8.inner_names, ("qdata", "scale", "zero")),
        "fields": (lambda: INT8.names, ("qdata", "scale", "zero", "axis")),
        "dtypes of inner tensors": (lambda: [f.dtype for f in INT8.inners], [torch.int8, None, None]),
        "optional inner tensors": (lambda: [f.optional for f in INT8.inners], [False, False, True]),
        "static metadata": (lambda: [(f.name, f.default) for f in INT8.statics], [("axis", 0)]),
        "keywords": (
            lambda: (INT8.size_from, INT8.dtype_from, INT8.fallback, INT8.decompose),
            ("qdata", "scale", "materialize", False),
        ),
        "the kind": (lambda: (INT8.kind, INT8.has_outer), ("representation", False)),
        "keywords by default": (lambda: (PAIR.size_from, PAIR.dtype_from, PAIR.decompose), ("a", "a", False)),
        "no default": (lambda: make(n=static(), held=inner()).__spec__.statics[0].default, MISSING),
        "classes of inner tensors": (lambda: [f.subclass for f in Nested.__spec__.inners], [Pair, Tensor]),
        "parameters of outer, by name": (lambda: Rows.__spec__.outer_args, ("row", "count")),
        "a marker is taken out": (lambda: "a" in vars(Pair), False),
        "inherited fields": (
            lambda: CHILD.__spec__.names,
            ("qdata", "scale", "zero", "extra", "axis", "note"),
        ),
        "inherited keywords": (
            lambda: (CHILD.__spec__.dtype_from, CHILD.__spec__.fallback),
            ("scale", "materialize"),
        ),
        "inherited methods": (lambda: (X * 1).tolist(), [[3.0, 3.0], [3.0, 3.0]]),
        "values of a child": (lambda: (X.axis, X.note, X.extra), (1, "n", None)),
        "a child may say otherwise": (lambda: (OTHER.fallback, OTHER.size_from), ("error", "b")),
        "its base stays": (lambda: PAIR.fallback, "map"),
        "ops and packets": (
            lambda: make(keywords={"decompose": [aten.silu, aten.addcmul.default]}).__spec__.decompose,
            {aten.silu.default, aten.silu.out, aten.addcmul.default},
        ),
        "a shadowed method": (lambda: make(values=inner())(torch.ones(2)).values.tolist(), [1, 1]),
    }
)


SPELLINGS = [Tensor | None, MaybeNone[Tensor], "Tensor | None", "MaybeNone[Tensor]"]  # noqa: UP045 - both


def test_annotations_as_strings_see_local_names_and_the_class_itself():
    class Local(TensorSubclass):
        held: Tensor = inner()

    class Chain(TensorSubclass):
        local: Local = inner()
        next: Chain | None = inner(optional=True)

    assert [f.subclass for f in Chain.__spec__.inners] == [Local, Chain]
    x = Local(torch.ones(2))
    assert Chain(x, Chain(x)).next.next is None


# ---- refused members ---------------------------------------------------------------------------------------


Counted = make(
    name="Counted",
    raw=inner(),
    first=static(default=1),
    second=static(default=2),
    third=dynamic(default=7),
    keywords={"fallback": "map"},
)
DATA = "data grad shape dtype device layout is_leaf T".split()
HIDDEN = "device shape dtype requires_grad T".split()


def with_dynamic(annotation: Any) -> Any:
    return declare({"a": inner(), "n": dynamic()}, {"a": Tensor, "n": annotation})


def with_static(annotation: Any, default: Any) -> Any:
    return declare({"a": inner(), "n": static(default=default)}, {"a": Tensor, "n": annotation})


REFUSED = {
    **{f"{n} as a field": (lambda n=n: one(n), f"Bad.{n} is a data attribute of Tensor") for n in DATA},
    **{
        f"{n} as a field": (lambda n=n: one(n), f"Bad.{n} is a method that torch itself calls")
        for n in sorted(CALLED_BY_TORCH)
    },
    "names as metadata": (
        lambda: one(names=static(default=1)),  # a former attribute of tensors
        "Bad.names is a data attribute of Tensor",
    ),
    "shape as metadata": (lambda: one(shape=static(default=1)), "is a data attribute of Tensor"),
    **{
        f"{n} hidden by {type(value).__name__}": (
            lambda n=n, value=value: one(**{n: value}),
            f"Bad.{n} hides a data attribute of Tensor",
        )
        for n in HIDDEN
        for value in (property(lambda self: "mine"), "mine", torch.float32)
    },
    **{
        f"a method hidden by {kind.__name__}": (
            lambda kind=kind: one(split=kind(lambda *args: args)),
            ("Bad.split hides a method of Tensor", "such as from_split"),
        )
        for kind in (classmethod, staticmethod)
    },
    **{
        f"a field replaced by {type(value).__name__}": (
            lambda value=value: declare({"raw": value}, {}, Counted),
            ("Bad.raw = ", "replaces an inherited field with a method or property"),
        )
        for value in (property(lambda self: 0), lambda self: 0)
    },
    **{
        f"{annotation} of a dynamic int": (
            lambda annotation=annotation: with_dynamic(annotation),
            "Bad.n: dynamic() declares a non-negative int",
        )
        for annotation in (str, "str", Tensor, float)
    },
    "static tensor": (
        lambda: with_static(Tensor, MISSING),
        ("holds no tensor", "Tensor; declare it with inner()"),
    ),
    "static optional tensor": (lambda: with_static(Tensor | None, None), "holds no tensor"),
    "static default": (lambda: with_static(int, "one"), "expected a default of type int, got 'one'"),
    "static None": (lambda: with_static(int, None), "expected a default of type int, got None"),
    "materialize with parameters": (
        lambda: one(materialize=lambda self, dtype: self.a),
        "Bad.materialize(self, dtype) is called without arguments",
    ),
    "unknown keyword": (
        lambda: declare({"a": inner()}, {"a": Tensor}, size="a"),
        "Bad: unknown class keyword 'size'; the keywords are size_from, dtype_from",
    ),
    "no inner tensor": (lambda: declare({}, {}), "Bad declares no inner tensor; write"),
    "metadata only": (lambda: declare({"n": static(default=1)}, {"n": int}), "declares no inner tensor"),
    "size_from": (
        lambda: declare({"a": inner()}, {"a": Tensor}, size_from="b"),
        "size_from='b' is not an inner tensor; the class has a",
    ),
    "dtype_from": (
        lambda: declare({"a": inner()}, {"a": Tensor}, dtype_from="b"),
        "dtype_from='b' is not an inner tensor",
    ),
    "size_from optional": (
        lambda: declare({"a": inner(optional=True)}, {"a": Tensor | None}),
        "size_from='a' may be None",
    ),
    "fallback": (
        lambda: declare({"a": inner()}, {"a": Tensor}, fallback="maps"),
        "expected fallback in ('error', 'views', 'materialize', 'map'), got 'maps'",
    ),
    "no materialize": (
        lambda: declare({"a": inner()}, {"a": Tensor}, fallback="materialize"),
        "needs a method `materialize(self) -> Tensor`",
    ),
    "list default": (lambda: one(n=static(default=[])), "Bad.n: static metadata is hashable"),
    "dict default": (lambda: one(n=static(default={})), "Bad.n: static metadata is hashable"),
    "tensor default": (lambda: one(n=static(default=torch.ones(1))), "a default cannot be a tensor"),
    "tensor in a default": (
        lambda: one(n=static(default=(1, (torch.ones(1),)))),
        "a default cannot be a tensor",
    ),
    "dynamic default": (lambda: one(n=dynamic(default=-1)), "a non-negative int default, got -1"),
    "dynamic bool": (lambda: one(n=dynamic(default=True)), "a non-negative int default, got True"),
    "dynamic float": (lambda: one(n=dynamic(default=1.0)), "a non-negative int default, got 1.0"),
    "optional, annotation not": (
        lambda: one(marker=inner(optional=True)),
        "inner() says that the inner tensor may be None and the annotation does not",
    ),
    "annotation optional": (
        lambda: one(annotation=Tensor | None),
        "the annotation says that the inner tensor may be None and inner() does not",
    ),
    "no annotation": (lambda: declare({"a": inner()}, {}), "Bad.a has no annotation"),
    "annotation int": (lambda: one(annotation=int), "expected the annotation Tensor, Tensor | None"),
    "annotation union": (lambda: one(annotation=Tensor | int), "expected the annotation Tensor"),
    "annotation unknown": (lambda: one(annotation="Nowhere"), "cannot resolve the annotation 'Nowhere'"),
    "annotation broken": (lambda: one(annotation="Tensor |"), "cannot resolve the annotation"),
    "device": (lambda: one(marker=inner(device="cuda")), "expected device None or 'any', got 'cuda'"),
    "tensor as default": (
        lambda: one(marker=inner(default=torch.ones(1))),
        "default= may be None beside optional=True",
    ),
    "default, not optional": (
        lambda: one(marker=inner(default=None)),
        "default= may be None beside optional=True",
    ),
    "dtype": (lambda: one(marker=inner(dtype=float)), "expected a torch.dtype or None"),
    "underscore": (
        lambda: one("_a"),
        "Bad._a starts with an underscore; choose another name, such as a_data",
    ),
    "own method": (lambda: one("unwrap"), "is a method of TensorSubclass"),
    "builtin": (lambda: one("isinstance"), "is a builtin that generated code calls"),
    "decompose": (
        lambda: declare({"a": inner()}, {"a": Tensor}, decompose=[torch.sin]),
        "decompose= takes ops such as torch.ops.aten.silu",
    ),
    "decompose an op": (
        lambda: declare({"a": inner()}, {"a": Tensor}, decompose=aten.silu),
        "decompose= takes a bool or a collection of ops",
    ),
    "decompose a word": (
        lambda: declare({"a": inner()}, {"a": Tensor}, decompose="silu"),
        "decompose= takes a bool or a collection of ops",
    ),
    "outer a method": (lambda: one(outer=lambda self: Outer((1,))), "Bad.outer must be a @staticmethod"),
    "outer of no field": (
        lambda: one(outer=staticmethod(lambda b: Outer((1,)))),
        "whose parameters are names of fields that are not derived (a)",
    ),
    "outer of a derived field": (
        lambda: declare(
            {"a": inner(), "b": inner(derived=abs), "outer": staticmethod(lambda a, b: Outer(a.shape))},
            {"a": Tensor, "b": Tensor},
        ),
        "whose parameters are names of fields that are not derived (a)",
    ),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused_at_the_class_statement(case):
    make, words = REFUSED[case]
    with pytest.raises(TypeError) as caught:
        make()
    assert type(caught.value) is SpecError
    for word in ("Bad", *((words,) if isinstance(words, str) else words)):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", sorted(OF_PROXIES))
def test_an_inner_tensor_that_compilers_would_take_for_something_else(name):
    assert hasattr(torch.fx.Proxy, name) or name in torch.fx.Proxy.__init__.__code__.co_names
    with pytest.raises(SpecError, match=f"Bad.{name} is an attribute by which torch.compile would read"):
        one(name)
    kept = declare({"held": inner(), name: static()}, {"held": Tensor})
    x = kept(torch.ones(2), **{name: 3})
    compiled = torch.compile(lambda x: x.clone(), backend="aot_eager")
    assert getattr(compiled(x), name) == 3


test_what_has_no_fields_no_rules_or_no_other_value = raising(
    [
        (lambda: setattr(INT8, "fallback", "error"), dataclasses.FrozenInstanceError, "fallback"),
        (lambda: setattr(First(torch.ones(2)), "first", 3), AttributeError, "metadata and constant"),
        (lambda: TensorSubclass(torch.ones(1)), TypeError, "TensorSubclass has no fields; declare a class"),
        (
            lambda: TensorSubclass.implements(aten.cos.default),
            SpecError,
            "register a rule on a class declared with",
        ),
    ]
)


class Named:
    def __init_subclass__(cls, *, title: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.title = title


# ---- fields declared anew ------------------------------------------------------------------------------------


First = make(Counted, first=dynamic(default=20))
Second = make(Counted, second=inner(optional=True))
Third = make(Counted, third=static(default=70))


def read(x):
    return x.first, x.second if isinstance(x.second, int) else x.second.tolist(), x.third


test_a_field_declared_anew_as_another_kind_reads_its_own_value = giving(
    {
        "a dynamic int by default": (lambda: read(First(torch.ones(2))), (20, 2, 7)),
        "a dynamic int": (lambda: read(First(torch.ones(2), first=5) + 1), (5, 2, 7)),
        "static metadata": (lambda: read(Third(torch.ones(2), third=8)), (1, 2, 8)),
        "an inner tensor": (lambda: read(Second(torch.ones(2), torch.zeros(2))), (1, [0.0, 0.0], 7)),
    }
)


@torch.no_grad()
def test_a_field_declared_anew_is_read_in_a_graph():
    compiled = torch.compile(lambda x: x * x.first, backend="aot_eager")
    assert compiled(First(torch.ones(2), first=5)).raw.tolist() == [5.0, 5.0]


test_what_is_accepted = giving(
    {
        "a method that hides a method of Tensor": (
            lambda: one(split=lambda self, *args: args)(torch.ones(2)).split(1),
            (1,),
        ),
        **{
            f"{annotation} of an optional tensor": (
                lambda annotation=annotation: (
                    declare({"a": inner(), "b": inner(optional=True)}, {"a": Tensor, "b": annotation})
                    .__spec__.inners[1]
                    .optional
                ),
                True,
            )
            for annotation in SPELLINGS
        },
        **{
            f"a keyword of another base, {[base.__name__ for base in bases]}": (
                lambda bases=bases: make(bases, a=inner(), keywords={"title": "mine"}).title,
                "mine",
            )
            for bases in ((Named, TensorSubclass), (TensorSubclass, Named))
        },
        **{
            f"{annotation} of a dynamic int": (
                lambda annotation=annotation: with_dynamic(annotation)(torch.ones(2), n=3).n,
                3,
            )
            for annotation in (int, "int", int | torch.SymInt, Any)
        },
        **{
            f"{annotation} of static metadata, {default!r} by default": (
                lambda annotation=annotation, default=default: (
                    with_static(annotation, default)(torch.ones(2)).n
                ),
                default,
            )
            for annotation, default in ((float, 1), (int | None, None), (object, 3), ("Any", 3))
        },
    }
)
