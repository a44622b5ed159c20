"""Wrong constructions, and the words of their errors."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from typing import Literal, NamedTuple

import pytest
import torch
from torch.distributed.tensor import Replicate

import desugar
from subclasses import DispatchError, Outer, SpecError, dynamic, inner, static
from tests.subclasses.subjects import MODES, Int8Weight, Nested, Pair, Tagged, declare, make_int8, make_pair
from tests.tables import giving, raising

Q, S = torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1)
META = torch.ones(2, 1, device="meta")


Holder = dataclasses.make_dataclass("Holder", ["inside"], frozen=True)
Changing = dataclasses.make_dataclass("Changing", [("scale", float, 1.0)], unsafe_hash=True)
ByIdentity = type("ByIdentity", (), {"read": lambda self: None})
Slotted = type("Slotted", (), {"__slots__": ("scale",)})
OwnHash = type("OwnHash", (), {"__hash__": lambda self: 1})
Color = enum.Enum("Color", ["RED"])


class Point(NamedTuple):
    x: int


class ByValue:
    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return isinstance(other, ByValue) and other.scale == self.scale

    def __hash__(self):
        return hash(self.scale)


def closing_over(held):
    def scaled(x):
        return x * held

    return scaled


def calling_itself():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    return even


def with_default(x, factors=[3.0]):  # noqa: B006
    return x * factors[0]


Factor = declare(name="Scale", factor=static(default=None), annotations={"factor": float | None}, a=inner())


WRONG = {
    "dtype": (
        lambda: Int8Weight(S, S),
        ValueError,
        "Int8Weight.qdata: expected dtype torch.int8, got torch.float32",
    ),
    "not a tensor": (
        lambda: Int8Weight([1], S),
        TypeError,
        "Int8Weight.qdata: expected a Tensor, got [1] of type list",
    ),
    "None": (lambda: Int8Weight(Q, None), TypeError, "Int8Weight.scale: expected a Tensor, got None"),
    "optional, not a tensor": (
        lambda: Int8Weight(Q, S, 1),
        TypeError,
        "Int8Weight.zero: expected a Tensor, got 1 of type int",
    ),
    "another class": (
        lambda: Nested(S, S),
        TypeError,
        "Nested.pair: expected a Pair, got a tensor of torch.float32 and shape (2, 1)",
    ),
    "devices": (
        lambda: Int8Weight(Q, META),
        ValueError,
        "Int8Weight.scale: expected device cpu as of 'qdata', got meta; declare it inner(device='any')",
    ),
    "optional device": (lambda: Int8Weight(Q, S, META), ValueError, "Int8Weight.zero: expected device cpu"),
    "tensor as metadata": (
        lambda: Int8Weight(Q, S, axis=S),
        TypeError,
        "Int8Weight.axis: expected static metadata, got a tensor of torch.float32",
    ),
    "tensor in metadata": (lambda: Tagged(S, tag=(1, S)), TypeError, "Tagged.tag: expected static metadata"),
    "tensor in a dataclass": (lambda: Tagged(S, tag=Holder(S)), TypeError, "Tagged.tag: expected static"),
    "unhashable metadata": (
        lambda: Int8Weight(Q, S, axis=[0]),
        TypeError,
        "Int8Weight.axis: expected hashable metadata, got [0] of type list; use a tuple",
    ),
    "an object of identity": (
        lambda: Int8Weight(Q, S, axis=ByIdentity()),
        TypeError,
        "make ByIdentity a @dataclass(frozen=True), or pass what is read from it",
    ),
    "a dataclass that changes": (
        lambda: Tagged(S, tag=(1, Changing())),
        TypeError,
        "Tagged.tag: expected metadata that is compared by value and cannot change in place",
    ),
    "an object of identity in a dataclass": (lambda: Tagged(S, tag=Holder(Slotted())), TypeError, "Slotted"),
    "a method of one": (lambda: Tagged(S, tag=(ByIdentity().read,)), TypeError, "of type ByIdentity; make"),
    "a partial of one": (
        lambda: Tagged(S, tag=(functools.partial(len, ByIdentity()),)),
        TypeError,
        "ByIdentity",
    ),
    "a module of torch": (
        lambda: Tagged(S, tag=(torch.nn.LeakyReLU(),)),
        TypeError,
        "of type LeakyReLU; declare its numbers as metadata of their own, its tensors with inner(), and call",
    ),
    "a module of several lines": (
        lambda: Tagged(S, tag=(torch.nn.Sequential(torch.nn.Linear(1, 1)),)),
        TypeError,
        "got an object of torch.nn.modules.container.Sequential; declare its numbers",
    ),
    "a method of a module": (
        lambda: Tagged(S, tag=(torch.nn.Linear(1, 1).forward,)),
        TypeError,
        "of type Linear;",
    ),
    "an optimizer": (
        lambda: Tagged(S, tag=(torch.optim.SGD([S], lr=1.0),)),
        TypeError,
        "torch.optim.sgd.SGD;",
    ),
    "a generator": (lambda: Tagged(S, tag=(torch.Generator(),)), TypeError, "of type Generator; declare"),
    "a distribution": (
        lambda: Tagged(S, tag=(torch.distributions.Normal(0.0, 1.0),)),
        TypeError,
        "of type Normal;",
    ),
    "a function with a list": (
        lambda: Tagged(S, tag=closing_over([2.0])),
        TypeError,
        "got the function closing_over.<locals>.scaled, which closes over [2.0] of type list or has it as a default; "
        "use a tuple, or numbers as metadata of their own",
    ),
    "a function with a tensor": (
        lambda: Tagged(S, tag=(closing_over(torch.ones(2)),)),
        TypeError,
        "a tensor of torch.float32 and shape (2,); declare the tensor with inner()",
    ),
    "a function with a function": (
        lambda: Tagged(S, tag=closing_over(closing_over({}))),
        TypeError,
        "type dict",
    ),
    "a function with a default": (
        lambda: Tagged(S, tag=with_default),
        TypeError,
        "[3.0] of type list or has it as",
    ),
    "a partial of a tensor": (lambda: Tagged(S, tag=functools.partial(len, S)), TypeError, "with inner()"),
    "a method of a tensor": (lambda: Tagged(S, tag=S.add), TypeError, "declare the tensor with inner()"),
    "equality by identity": (lambda: Tagged(S, tag=(OwnHash(),)), TypeError, "OwnHash"),
    "unhashable inside": (
        lambda: Tagged(S, tag=(1, [0])),
        TypeError,
        "Tagged.tag[1]: expected hashable metadata, got [0] of type list",
    ),
    "unhashable in a frozen dataclass": (
        lambda: Tagged(S, tag=(Holder([0]),)),
        TypeError,
        "Tagged.tag[0].inside: expected hashable metadata, got [0] of type list",
    ),
    "negative": (
        lambda: Tagged(S, length=-1),
        ValueError,
        "Tagged.length: expected a non-negative int, got -1",
    ),
    "float": (
        lambda: Tagged(S, length=1.5),
        TypeError,
        "Tagged.length: expected a non-negative int, got 1.5",
    ),
    "bool": (
        lambda: Tagged(S, length=True),
        TypeError,
        "Tagged.length: expected a non-negative int, got True",
    ),
    "tensor": (
        lambda: Tagged(S, length=S),
        TypeError,
        "Tagged.length: expected a non-negative int, got a tensor",
    ),
    "an int that is none": (
        lambda: Int8Weight(Q, S, axis=1.5),
        TypeError,
        "Int8Weight.axis: expected int, as its annotation says, got 1.5 of type float",
    ),
    "not a number": (
        lambda: Tagged(S, tag=float("nan")),
        ValueError,
        "Tagged.tag: expected metadata that equals itself, since compiled programs are found by it, got nan",
    ),
    "missing metadata": (lambda: declare(held=inner(), n=static(), d=dynamic())(S), TypeError, "'n' and 'd'"),
    "text for a number": (
        lambda: Factor(S, factor="2"),
        TypeError,
        "Scale.factor: expected float | None | int, as its annotation says, got '2' of type str",
    ),
    "an assigned dynamic int": (
        lambda: setattr(Tagged(S, length=3), "length", 4),
        AttributeError,
        "metadata and constant",
    ),
    "unwrap of no inner tensor": (
        lambda: make_pair().unwrap("c"),
        AttributeError,
        "Pair has no inner tensor 'c'; its inner tensors are a, b",
    ),
    "a dataclass": (
        lambda: dataclasses.dataclass(declare(name="Box"))(S),
        SpecError,
        "Box: leave out @dataclass",
    ),
    "a default that can change": (
        lambda: declare(name="Bad", a=inner(), act=static(default=torch.nn.ReLU())),
        SpecError,
        "Bad.act: expected a default that is compared by value and cannot change in place",
    ),
    "a default that the annotation does not list": (
        lambda: declare(name="Bad", a=inner(), order=static(default="first"), annotations={"order": Order}),
        SpecError,
        "Bad.order: expected a default among Order.FIRST, Order.LAST, got 'first'",
    ),
    "a materialize that moves": (
        lambda: declare(
            name="Moved",
            materialize=lambda self: self.held.to("meta"),
            keywords={"fallback": "materialize"},
        )(torch.ones(2)).sin(),
        ValueError,
        "Moved.materialize: expected a tensor on cpu, ",
    ),
    "an outer size below 0": (
        lambda: declare(name="Negative", outer=staticmethod(lambda held: Outer((-1,))))(torch.ones(2)),
        ValueError,
        ": a size is negative",
    ),
    **{
        f"made from what {name} made": (
            lambda transform=transform: transform(
                lambda v: (Pair(v, v) * 2).unwrap("a").sum(), torch.ones(3, 2)
            ),
            DispatchError,
            "Pair: cannot be made inside a transform",
        )
        for name, transform in {
            "vmap": lambda f, x: torch.vmap(f)(x),
            "grad": lambda f, x: torch.func.grad(f)(x),
            "jacrev": lambda f, x: torch.func.jacrev(f)(x),
            "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
        }.items()
    },
    "unknown keyword": (lambda: Pair(S, S, axis=1), TypeError, "unexpected keyword argument 'axis'"),
    "metadata by position": (lambda: Int8Weight(Q, S, None, 0), TypeError, "pass it by keyword: axis=0"),
    "missing": (lambda: Pair(S), TypeError, "missing 1 required positional argument: 'b'"),
}


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_wrong_construction(case):
    make, error, words = WRONG[case]
    with pytest.raises(error) as caught:
        make()
    assert type(caught.value) is error
    assert words in str(caught.value)


Order = enum.Enum("Order", {"FIRST": "first", "LAST": "last"})
Level = enum.IntEnum("Level", {"LOW": 1})

# Metadata of which the annotation lists the values.
Listed = declare(
    name="Listed",
    held=inner(),
    order=static(default=Order.FIRST),
    maybe=static(default=None),
    level=static(default=Level.LOW),
    word=static(default="a"),
    other=static(default=0),
    annotations={
        "order": Order,
        "maybe": Order | None,
        "level": Level,
        "word": Literal["a", 1],
        "other": Order | int,
    },
)


CONSTANTS = [
    *(
        ByValue(2),
        Color.RED,
        Point(1),
        Holder(3),
        torch.float32,
        torch.device("cpu"),
        torch.contiguous_format,
    ),
    *(
        torch.add,
        torch.ops.aten.add.Tensor,
        len,
        functools.partial(len),
        enum,
        Color,
        slice,
        frozenset({1}),
        ...,
        closing_over(2.0),
        closing_over(closing_over((1, "a"))),
        calling_itself(),
        torch.nn.functional.leaky_relu,
        torch.nn.functional.max_pool2d,
        torch.compile(closing_over(2.0)),
        torch.ops.aten,
        torch.ops.higher_order.cond,
        torch.strided,
        torch.Size([1]),
        Replicate(),
    ),
]


# Metadata that does not change, of a type and with a value that an annotation takes.
test_metadata_is_read_as_it_was_given = giving(
    {
        **{
            f"{number}: {type(tag).__name__}": (lambda tag=tag: Tagged(S, tag=(tag,)).tag, (tag,))
            for number, tag in enumerate(CONSTANTS)
        },
        **{
            f"a number: {number!r}": (lambda number=number: Factor(S, factor=number).factor, number)
            for number in (2, True, 2.5, torch.tensor(2.5).numpy()[()])
        },
        **{
            f"listed: {name}={value!r}": (
                lambda name=name, value=value: getattr(Listed(S, **{name: value}), name),
                value,
            )
            for name, value in [
                ("order", Order.LAST),
                ("maybe", Order.LAST),
                ("level", 1),
                ("word", 1),
                ("other", 3),
                ("other", "any"),
            ]
        },
        # The second inner tensor may live elsewhere.
        "another device": (
            lambda: declare(a=inner(), b=inner(device="any"))(S, META).b.device.type,
            "meta",
        ),
    }
)


def test_numbers_and_a_function_take_the_place_of_a_module():
    cls = declare(
        a=inner(),
        slope=static(default=0.1),
        function=static(default=torch.nn.functional.leaky_relu),
        materialize=lambda self: self.function(self.a, self.slope),
        keywords={"fallback": "materialize"},
    )
    run = desugar.compile(lambda x: x + 0, backend="eager")
    for slope in (0.5, 0.25):
        assert run(cls(-torch.ones(2), slope=slope)).tolist() == [-slope, -slope]


@pytest.mark.parametrize("mode", ["eager", "desugar", "stock"])
def test_a_negative_zero_is_not_zero(mode):
    fn = MODES[mode](lambda x: x.held / x.tag)
    positive, negative = (Tagged(torch.ones(2), tag=zero) for zero in (0.0, -0.0))
    assert fn(positive).tolist() == [torch.inf, torch.inf]
    assert fn(negative).tolist() == [-torch.inf, -torch.inf]


# ---- assigning ---------------------------------------------------------------------------------------------

BAD_ASSIGNMENT = {
    "dtype": (lambda x: setattr(x, "qdata", S), ValueError, "Int8Weight.qdata: expected dtype torch.int8"),
    "None": (lambda x: setattr(x, "scale", None), TypeError, "Int8Weight.scale: expected a Tensor, got None"),
    "size": (
        lambda x: setattr(x, "qdata", Q),
        ValueError,
        "would change the outer shape from torch.Size([4, 3]) to torch.Size([2, 2])",
    ),
    "outer dtype": (
        lambda x: setattr(x, "scale", x.scale.double()),
        ValueError,
        "would change the outer dtype from torch.float32 to torch.float64",
    ),
    "device": (lambda x: setattr(x, "scale", META), ValueError, "expected device cpu"),
    "requires grad": (
        lambda x: setattr(x, "scale", torch.ones(4, 1, requires_grad=True)),
        ValueError,
        "Otherwise assign .detach()",
    ),
    "metadata": (
        lambda x: setattr(x, "axis", 1),
        AttributeError,
        "Int8Weight.axis is metadata and constant; construct a new Int8Weight",
    ),
}


@pytest.mark.parametrize("case", BAD_ASSIGNMENT, ids=str)
def test_wrong_assignment_changes_nothing(case):
    assign, error, words = BAD_ASSIGNMENT[case]
    x = make_int8()
    before = dict(x.__dict__)
    with pytest.raises(error) as caught:
        assign(x)
    assert words in str(caught.value)
    assert x.__dict__ == before


def test_assignment():
    x = make_int8()
    x.scale = torch.full((4, 1), 2.0)
    assert (x * 1).equal(x.qdata * 2.0)
    x.zero = torch.ones(4, 1)
    assert x._layout is make_int8(zero=True)._layout
    assert (x * 1).equal((x.qdata - 1.0) * 2.0)
    x.zero = None
    assert x._layout is make_int8()._layout
    x.note = "other attributes are free"
    assert x.note


# ---- values that an annotation lists --------------------------------------------------------------------------


test_metadata_that_the_annotation_does_not_list = raising(
    [
        (lambda given=given: Listed(S, **given), ValueError, f"^{re.escape(words)}$")
        for given, words in [
            (
                {"order": "first"},
                "Listed.order: expected one of Order.FIRST, Order.LAST, got 'first' of type str",
            ),
            ({"order": None}, "Listed.order: expected one of Order.FIRST, Order.LAST, got None"),
            (
                {"maybe": "last"},
                "Listed.maybe: expected one of Order.FIRST, Order.LAST, None, got 'last' of type str",
            ),
            ({"level": 2}, "Listed.level: expected one of Level.LOW, got 2 of type int"),
            ({"word": "b"}, "Listed.word: expected one of 'a', 1, got 'b' of type str"),
            ({"word": True}, "Listed.word: expected one of 'a', 1, got True of type bool"),
        ]
    ]
)


# ---- an __init__ of the class ------------------------------------------------------------------------------


def assign_fields(self, held, unit="m"):
    self.held, self.unit = held, unit


def test_an_init_may_assign_the_fields_that_it_was_given():
    Box = declare(name="Box", held=inner(), unit=static(default="m"), __init__=assign_fields)
    assert Box(S).held is S and Box(S).unit == "m" and Box(S, unit="km").unit == "km"
    with pytest.raises(AttributeError, match=r"Box\.unit is metadata and constant"):
        Box(S).unit = "km"


def of_positive(cls, held):
    if (held < 0).any():
        raise ValueError("held: expected no negative numbers")
    return super(Positive, cls).__new__(cls, held)


Positive = declare(
    keywords={"fallback": "materialize"}, materialize=lambda self: self.held * 2, __new__=of_positive
)


@pytest.mark.parametrize("compiler", [torch.compile, pytest.param(desugar.compile, marks=pytest.mark.slow)])
def test_a_new_that_looks_at_the_data_ends_a_graph(compiler):
    fn = lambda t: Positive(t * 2) + 1  # noqa: E731
    compiled = compiler(fn, backend="eager")
    for n in (2, 3):
        assert torch.equal(compiled(torch.ones(n)), fn(torch.ones(n)))
    with pytest.raises(ValueError, match="no negative numbers"):
        compiled(-torch.ones(2))


# ---- transforms of torch.func ------------------------------------------------------------------------------


def test_inside_a_transform_one_is_made_from_other_tensors():
    weight = torch.ones(2)
    got = torch.vmap(lambda v: v * Pair(weight, weight).unwrap("a"))(torch.ones(3, 2))
    assert got.equal(torch.ones(3, 2))


# ---- static metadata under a compiler ----------------------------------------------------------------------

DOORS = {
    "desugar": lambda f: desugar.compile(f, backend="eager", fullgraph=True),
    "desugar, dynamic": lambda f: desugar.compile(f, backend="eager", fullgraph=True, dynamic=True),
    "stock": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
}


Numbered = declare(
    name="Numbered",
    held=inner(),
    count=static(default=1),
    factor=static(default=1.0),
    pair=static(default=(0, 0)),
    annotations={"count": int, "factor": float},
    keywords={"fallback": "map"},
)
# All static values are of types that the class's own table of layouts takes.
Columns = declare(held=inner(), columns=static(), annotations={"columns": int}, keywords={"fallback": "map"})


@pytest.mark.sweep(18)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: Numbered(x.held, count=x.count + 1),
        lambda x: Numbered(x.held, factor=2 * x.factor),
        lambda x: Numbered(x.held, factor=x.count / 2),
        lambda x: Numbered(x.held, count=int(x.factor)),
        lambda x: Numbered(x.held, count=x.held.shape[0]),
        lambda x: Numbered(x.held, pair=(x.count, (x.factor, x.held.shape[0] - 1))),
    ],
    ids=["int", "float", "quotient", "int of a float", "size", "tuple"],
)
def test_metadata_computed_from_numbers(make, door):
    """A compiler makes symbols of numbers that change between calls; metadata is for one value of them."""
    compiled = DOORS[door](make)
    for n in (3, 4, 5, 3, 7):
        x = Numbered(torch.ones(n + 1), count=n, factor=float(n))
        got, expected = compiled(x), make(x)
        for name in ("count", "factor", "pair"):
            one, other = getattr(got, name), getattr(expected, name)
            assert one == other and type(one) is type(other)
        assert got._layout is expected._layout and torch.equal(got.held, expected.held)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("of_plain", [False, True])
def test_metadata_that_is_a_size(of_plain, door):
    compiled = DOORS[door](lambda t: Columns(t, columns=t.shape[0]))
    for n in (3, 4, 5, 3, 7):
        t = torch.ones(n)
        y = compiled(t if of_plain else Numbered(t).held)
        assert y.columns == n and type(y.columns) is int and y._layout is Columns(t, columns=n)._layout


def test_metadata_that_only_the_running_program_knows():
    def make(x):
        return Numbered(x, count=int(x.sum().item()))

    assert make(torch.ones(3)).count == 3
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for door in DOORS.values():
            with pytest.raises(
                Exception, match=r"Numbered\.count: expected static metadata, got .*depends on data"
            ):
                door(make)(torch.ones(3))
