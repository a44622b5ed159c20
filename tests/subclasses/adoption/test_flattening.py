"""An adopted class flattens to the same values as before, whatever changes between two calls."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import subclasses
from subclasses.adoption.contexts import ADOPTED, ConstantDict, ConstantList, intern_context
from subclasses.adoption.flatten_purity import How
from tests.subclasses.adoption import by_hand
from tests.subclasses.adoption.by_hand import Options, Settings
from tests.tables import raising


def assign(name, value):
    return lambda x: setattr(x, name, value)


CHANGES = {
    "tagged": [
        assign("axes", [1, 0]),
        lambda x: x.axes.append(2),
        lambda x: x.axes.__setitem__(0, True),
        assign("axes", (1, 0)),
        assign("axes", None),
        assign("axes", 3),
        assign("axes", {"a": [1]}),
        lambda x: x.axes["a"].append(2),
        assign("factor", 2),
        assign("factor", 0.0),
        assign("factor", -0.0),
        assign("factor", float("nan")),
        assign("flag", 1),
        assign("flag", None),
        lambda x: x.__dict__.update(flag="text"),
        assign("flag", torch.float16),
        assign("flag", Options(1.0)),
        assign("flag", True),
        assign("names", ("flag",)),
    ],
    "optional": [
        assign("scale", torch.ones(2)),
        assign("kind", "b"),
        assign("scale", None),
        assign("scale", torch.nn.Parameter(torch.ones(2))),
        lambda x: setattr(type(x), "names", ()),
    ],
    "with_settings": [
        lambda x: setattr(x.settings, "bits", 8),
        lambda x: x.settings.names.append("b"),
        lambda x: setattr(x.settings, "note", "no field"),
        assign("settings", Settings(4, ["a"])),
        assign("settings", None),
    ],
    "with_object": [
        lambda x: setattr(x.options, "factor", 3.0),
        assign("options", Options(5.0)),
    ],
    "with_sizes": [
        assign("raw", torch.ones(4, 5)),
        lambda x: x.raw.resize_(1, 2),
    ],
}


def plain(value):
    """A context with types, to compare by."""
    match value:
        case dict():
            return "dict", [(k, plain(v)) for k, v in value.items()]
        case list():
            return "list", [plain(v) for v in value]
        case float():
            return "float", value.hex()
        case Settings():
            return value.bits, plain(value.names)
    return type(value), value


@pytest.mark.parametrize("kind", CHANGES)
def test_it_gives_what_the_class_gave_after_every_change(kind):
    cls, make = getattr(by_hand, kind)()
    own = cls.__tensor_flatten__
    values = [make(), make()]
    assert subclasses.adopt(cls) is cls
    for change in [lambda x: None, *CHANGES[kind]]:
        for x in values:  # the first teaches, the second reads
            change(x)
            for _ in range(2):
                names, context = x.__tensor_flatten__()
                own_names, own_context = own(x)
                assert names == own_names
                assert type(names) is list
                assert plain(context) == plain(own_context)


@pytest.mark.parametrize("kind", CHANGES)
def test_equal_metadata_is_one_object_and_hashable(kind):
    _, make = by_hand.adopted(kind)
    (_, one), (_, other) = make().__tensor_flatten__(), make().__tensor_flatten__()
    assert one is other and isinstance(hash(one), int) and isinstance(one, ConstantDict | ConstantList)


def context_of(x):
    """The metadata."""
    return x.__tensor_flatten__()[1]


def made(flatten, **attributes):
    """An adopted class with this method."""
    own = {"__tensor_flatten__": flatten} | attributes
    return subclasses.adopt(by_hand.written("Made", by_hand.NoContext, **own))


def test_the_names_belong_to_the_metadata():
    _, make = by_hand.adopted("optional")
    names, context = make().__tensor_flatten__()
    more, other = make(scale=torch.ones(2)).__tensor_flatten__()
    assert (names, more) == (["raw"], ["raw", "scale"])
    assert context == other and context is not other


def test_the_own_method_is_not_called_for_what_is_known():
    cls, make = by_hand.adopted("optional")
    values = [make(), make(scale=torch.ones(2)), make(kind="b")]
    for x in values * 2:
        x.__tensor_flatten__()

    getattr(cls, ADOPTED).flatten = lambda x: pytest.fail("the own method was called")
    for x in (*values, make(), make(scale=torch.zeros(9))):
        assert context_of(x) == {"kind": x.kind}
    with pytest.raises(pytest.fail.Exception, match="own method"):
        make(kind="c").__tensor_flatten__()


def test_the_text_reads_what_the_method_reads():
    cls, make = by_hand.adopted("optional")
    make().__tensor_flatten__()
    text = "_dict['scale'].__class__, _dict['kind'].__class__, _dict['kind']"
    assert text in cls.__tensor_flatten__.__source__


@pytest.mark.parametrize("kind", ["with_object", "with_sizes", "counting"])
def test_what_is_not_proved_is_asked_each_time(kind):
    cls, make = by_hand.adopted(kind)
    x = make()
    first, *_, ninth, last = [context_of(x) for _ in range(10)]
    assert not getattr(cls, ADOPTED).table
    assert kind != "counting" or (last["number"] == ninth["number"] + 1 == first["number"] + 9)


def test_many_values_of_metadata_do_not_pile_up():
    cls, make = by_hand.adopted("tagged")
    for number in range(2000):
        assert context_of(make(axes=[number]))["axes"] == [number]
    adoption = getattr(cls, ADOPTED)
    assert len(adoption.table) <= 512 and len(adoption.contexts) <= 512


def test_dtype_is_read_from_the_tensor():
    cls = made(lambda self: (["raw"], {"dtype": self.dtype, "shape": self.shape}))
    x, y = cls(torch.ones(2)), cls(torch.ones(3, dtype=torch.float16))
    assert context_of(x) == {"dtype": torch.float32, "shape": (2,)}
    assert context_of(y) == {"dtype": torch.float16, "shape": (3,)}
    assert getattr(cls, ADOPTED).reads["dtype"].how is How.PROPERTY
    torch.utils.swap_tensors(x, y)
    assert context_of(x)["dtype"] is torch.float16


LEVEL = 1
SETTINGS = {"level": 1}


def level_of(x):
    return SETTINGS["level"]


def test_state_of_a_module_is_read_each_time(monkeypatch):
    cell = [1]
    classes = [
        made(lambda self: (["raw"], {"level": LEVEL})),
        made(lambda self: (["raw"], {"level": level_of(self)})),
        made(lambda self: (["raw"], {"level": self.level}), level=property(level_of)),
        made(lambda self: (["raw"], {"level": cell[0]})),
        made(lambda self: (["raw"], {"level": self.level()}), level=classmethod(lambda cls: LEVEL)),
    ]
    values = [cls(torch.ones(2)) for cls in classes]
    for _ in range(3):
        assert [context_of(x)["level"] for x in values] == [1] * 5
    monkeypatch.setitem(globals(), "LEVEL", 2)
    monkeypatch.setitem(SETTINGS, "level", 2)
    cell[0] = 2
    assert [context_of(x)["level"] for x in values] == [2] * 5


# ---- ways of writing the method ------------------------------------------------------------------------------


def test_helpers_properties_and_super_are_followed():
    class Parent(by_hand.Base):
        def __tensor_flatten__(self):
            return ["raw"], {"kind": self.kind}

    class Child(Parent):
        def __tensor_flatten__(self):
            names, context = super().__tensor_flatten__()
            return names, context | {"more": self.more, "static": self.helper(3)}

        @property
        def more(self):
            return self._more

        @staticmethod
        def helper(number):
            return number + 1

    subclasses.adopt(Child)
    x = Child(torch.ones(2), kind="a", _more=1)
    for _ in range(2):
        assert context_of(x) == {"kind": "a", "more": 1, "static": 4}
    x._more = 2
    assert context_of(x)["more"] == 2
    assert set(getattr(Child, ADOPTED).reads) >= {"kind", "_more"}


def test_an_attribute_of_some_values_and_the_class_of_others():
    cls = made(lambda self: (["raw"], {"level": self.level}), level=1)
    plain_one, own_one = cls(torch.ones(2)), cls(torch.ones(2), level=7)
    for _ in range(2):
        assert [context_of(x)["level"] for x in (plain_one, own_one)] == [1, 7]
    plain_one.level = 3
    assert context_of(plain_one)["level"] == 3
    cls.level = 5
    assert context_of(cls(torch.ones(2)))["level"] == 5


def test_a_constant_of_the_class_may_be_replaced():
    cls = made(lambda self: (["raw"], {name: getattr(self, name) for name in self.fields}), fields=("kind",))
    x = cls(torch.ones(2), kind="a", other="b")
    assert context_of(x) == {"kind": "a"}
    cls.fields = ("other",)
    assert context_of(x) == {"other": "b"}


def test_an_error_of_the_own_method_goes_through():
    _, make = by_hand.adopted("tagged")
    x = make()
    x.__tensor_flatten__()
    del x.__dict__["flag"]
    with pytest.raises(AttributeError, match="flag"):
        x.__tensor_flatten__()


def test_a_class_that_inherits_uses_its_own_attributes():
    cls, make = by_hand.adopted("optional")

    class Child(cls):
        def __tensor_flatten__(self):
            names, context = super().__tensor_flatten__()
            return names, {**context, "child": True}

    child = Child(torch.ones(2), scale=None, kind="a")
    assert child.__tensor_flatten__() == (["raw"], {"kind": "a", "child": True})
    assert subclasses.adopt(Child) is Child
    for _ in range(2):
        assert child.__tensor_flatten__() == (["raw"], {"kind": "a", "child": True})
        assert make().__tensor_flatten__() == (["raw"], {"kind": "a"})
    assert context_of(child) is context_of(child)


def test_unflatten_makes_the_class_that_inherits():
    cls, _ = by_hand.adopted("tagged")
    child = type("Child", (cls,), {})(torch.ones(2), axes=[0], factor=1.0, flag=None)
    back = type(child).__tensor_unflatten__(
        {"raw": child.raw}, context_of(child), child.size(), child.stride()
    )
    assert type(back) is type(child)


# ---- constants ----------------------------------------------------------------------------------------------


def test_values_get_copies_of_metadata():
    cls, make = by_hand.adopted("tagged")
    x = make()
    back = cls.__tensor_unflatten__({"raw": x.raw}, context_of(x), x.size(), x.stride())
    back.axes.append(9)
    assert x.axes == context_of(x)["axes"] == [0, 1]
    assert context_of(back)["axes"] == [0, 1, 9]
    own = copy.copy(context_of(by_hand.adopted("with_object")[1]()))
    assert type(own) is list and own == [2.0]


test_metadata_is_constant = raising(
    [
        (
            lambda kind=kind, change=change: change(context_of(by_hand.adopted(kind)[1]())),
            TypeError,
            "constant",
        )
        for kind, change in [
            ("tagged", lambda context: context.__setitem__("flag", False)),
            ("tagged", lambda context: context.update(flag=False)),
            ("with_object", lambda context: context.append(1)),
            ("with_object", lambda context: context.sort()),
            ("with_object", lambda context: context.__iadd__([1])),
        ]
    ]
)


def test_copies_and_pickles_of_metadata_are_the_same_object():
    context = context_of(Picklable(torch.ones(2), level=3))
    assert copy.deepcopy(context) is context
    assert pickle.loads(pickle.dumps(context)) is context
    assert intern_context(Tensor, ("raw",), {"level": 3}) == {"level": 3}


@subclasses.adopt
class Picklable(by_hand.Base):
    names = ("level",)


def test_values_are_pickled_and_copied_as_before():
    x = Picklable(torch.ones(2), level=[3])
    x.__tensor_flatten__()
    for back in (pickle.loads(pickle.dumps(x)), copy.copy(x)):
        assert type(back) is Picklable and set(back.__dict__) == {"raw", "level"}
        assert (back.level, back.raw.tolist()) == ([3], [1.0, 1.0])


# ---- threads ------------------------------------------------------------------------------------------------


def test_threads_that_learn_at_once_agree():
    _, make = by_hand.adopted("tagged")
    start = threading.Barrier(8)

    def flatten(number):
        start.wait()
        return [context_of(make(axes=[n], flag=n if n % 2 else str(n))) for n in range(200)]

    with ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(flatten, range(8))
    assert [c["axes"] for c in first] == [[n] for n in range(200)]
    assert all(other == first for other in others)


# ---- the `__tensor_unflatten__` of an adopted class builds the same value as the class's own method --------


def run_on_both(cls, func, args):
    if func is torch.ops.prim.device.default:
        return args[0].a.device
    return cls(*(func(*(getattr(x, n) if isinstance(x, cls) else x for x in args)) for n in "ab"))


def make_class(*, extra=False, slots=False, policy=False):
    """A handwritten pair that counts how often its own method runs."""

    class Pair(Tensor):
        if slots:
            __slots__ = ("more",)
        calls = 0

        policies = staticmethod(lambda: {"dispatch_device": True} if policy else {})

        @staticmethod
        def __new__(cls, a, b, tag=None):
            return Tensor._make_wrapper_subclass(
                cls,
                a.size(),
                strides=a.stride(),
                storage_offset=a.storage_offset(),
                dtype=b.dtype if tag == "second" else a.dtype,
                device=a.device,
                requires_grad=a.requires_grad,
                **cls.policies(),
            )

        def __init__(self, a, b, tag=None):
            self.a, self.b = a, b
            if extra:
                self.sum = a.shape[0]

        def __tensor_flatten__(self):
            return ["a", "b"], None

        @classmethod
        def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
            cls.calls += 1
            return cls(inner["a"], inner["b"], "second" if context == "second" else None)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return run_on_both(cls, func, args)

    return subclasses.adopt(Pair)


def build(cls, a, b, context=None):
    return cls.__tensor_unflatten__({"a": a, "b": b}, context, a.size(), a.stride())


def check(x, a, b, dtype=None):
    assert x.a is a and x.b is b and x.shape == a.shape and x.stride() == a.stride()
    assert x.dtype == (dtype or a.dtype) and x.storage_offset() == a.storage_offset()
    assert x.requires_grad == a.requires_grad and x.is_inference() == torch.is_inference_mode_enabled()


def test_a_proved_method_runs_once_for_each_kind():
    cls = make_class()
    for size in ((2, 3), (4, 1), (0, 3)):
        for dtype in (torch.float32, torch.bfloat16):
            a, b = torch.ones(size, dtype=dtype), torch.zeros(size, dtype=dtype)
            for pair in ((a, b), (a.t(), b.t())):
                check(build(cls, *pair), *pair)
    assert cls.calls == 2
    half, full = torch.ones(2, dtype=torch.float16), torch.ones(2)
    for _ in range(2):
        check(build(cls, half, full, "second"), half, full, torch.float32)
        check(build(cls, half, full), half, full)
    assert cls.calls == 4


@pytest.mark.parametrize(
    "a", [torch.ones(6)[2:], torch.ones(4, requires_grad=True), torch.nn.Parameter(torch.ones(4))]
)
def test_what_a_bare_wrapper_would_not_be_is_left_to_the_class(a):
    cls = make_class()
    plain = torch.ones(4)
    check(build(cls, plain, plain), plain, plain)
    for _ in range(2):
        check(build(cls, a, a), a, a)
    assert cls.calls == 3


@pytest.mark.parametrize("kind", [{"extra": True}, {"slots": True}, {"policy": True}])
def test_a_class_that_holds_more_is_asked_each_time(kind):
    cls, a = make_class(**kind), torch.ones(4)
    for _ in range(3):
        x = build(cls, a, a)
        assert x.a is a and x.b is a and x.shape == (4,)
        assert "extra" not in kind or x.sum == 4
    assert cls.calls == 3


def test_in_inference_mode_and_compiled():
    cls, a, b = make_class(), torch.ones(2, 3), torch.zeros(2, 3)
    with torch.inference_mode():
        for _ in range(2):
            check(build(cls, a, b), a, b)
    compiled = torch.compile(lambda x: (x * 2, x + 1), backend="aot_eager")
    for _ in range(3):
        doubled, more = compiled(cls(a, b))
        assert (type(doubled), type(more)) == (cls, cls)
        assert doubled.a.sum() == 12 and doubled.b.sum() == 0 and more.b.sum() == 6


def test_metadata_without_a_hash():
    cls, a = make_class(), torch.ones(4)
    for _ in range(2):
        check(build(cls, a, a, ["second"]), a, a)
    assert cls.calls == 2
