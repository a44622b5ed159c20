"""Reading and assigning fields, and ``materialize``: no gradient is lost, eagerly or compiled."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import DispatchError, Outer, SpecError, TensorSubclass, inner, static
from subclasses.keyed import KeyedJaggedTensor
from subclasses.layout import intern_layout
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests import doors
from tests.subclasses.autograd.judge import agree, agreeing, numbers
from tests.subclasses.dispatch.training import saved
from tests.subclasses.subjects import declare
from tests.tables import giving, raising

DOORS = {
    **{name: partial(door, fullgraph=True) for name, door in doors.DOORS.items()},
    "graphs": partial(torch.compile, backend="eager", fullgraph=True),
    "desugar": partial(doors.by_desugar, fullgraph=True, strict=True),
}
every_door = pytest.mark.parametrize("door", DOORS)


# One field of each kind.
Mixed = declare(
    __module__=__name__,
    name="Mixed",
    keywords={"fallback": "map"},
    a=inner(differentiable=True),
    raw=inner(),
    index=inner(dtype=torch.int64, optional=True),
    more=inner(optional=True, differentiable=True),
    power=static(default=1),
)


# A product of two factors that are read raw, as authors write it.
Low = declare(
    name="Low",
    keywords={"fallback": "materialize"},
    left=inner(),
    right=inner(),
    times=static(default=3),
    outer=staticmethod(lambda left, right: Outer((left.shape[0], right.shape[1]))),
    materialize=lambda self: self.left @ self.right * self.times,
)


class Lower(Low):
    def materialize(self) -> Tensor:
        return super().materialize() + self.left.sum()


def mixed(grad=True, **more):
    return Mixed(*numbers(2, 2), **more).requires_grad_(grad)


# ---- reading -----------------------------------------------------------------------------------------------


def of_an_argument(x):
    with torch.no_grad():
        frozen = x.a * 2
    return ((x.a.sin() + frozen) * x.more).sum()


def whole_and_field(a, raw):
    x = Mixed(a, raw)
    return x.a.sin() * x.a + (x.a * (x * x).a).sum()


def under_no_grad(a, raw):
    x = Mixed(a, raw)
    with torch.no_grad():
        frozen = x.a * 2
    return frozen * x.a, frozen


def after_a_write(a, raw):
    x = Mixed(a, raw) * 1
    y = x * 1
    y.mul_(2)
    x.mul_(3)
    return y.a + x.a * x.a


# A function of two inner tensors, and the same without the class; the raw one gets zeros.
READ = {
    "built inside": (whole_and_field, lambda a, raw: a.sin() * a + (a**3).sum()),
    "computed": (lambda a, raw: (Mixed(a, raw) * 2).cos().a * 3, lambda a, raw: (a * 2).cos() * 3),
    "under no_grad": (under_no_grad, lambda a, raw: (2 * a.detach() * a, 2 * a.detach())),
    "after a write": (after_a_write, lambda a, raw: 2 * a + 9 * a * a),
}


test_a_reading_is_differentiable = agreeing(
    {
        **{name: (*fns, [(2, 3), (2, 3)]) for name, fns in READ.items()},
        **{
            f"of size {size}": (lambda a, raw: Mixed(a, raw).a.sum(), lambda a, raw: a.sum(), [size, size])
            for size in ((0,), (1,), (0, 3), ())
        },
    },
    DOORS,
)
test_second_derivatives = agreeing(
    {
        "of a reading": (lambda a, raw: Mixed(a, raw).a ** 3, lambda a, raw: a**3, [2, 2]),
        "of a plain tensor": (
            lambda a, raw: Low(a, raw).materialize(),
            lambda a, raw: a @ raw * 3,
            [(2, 2), (2, 2)],
        ),
    },
    twice=["eager", "desugar"],
)


@pytest.mark.sweep(4)
@every_door
def test_a_reading_of_an_argument_is_differentiable(door):
    fn, (ones,) = DOORS[door](of_an_argument), numbers((2, 3))
    agree(
        lambda a, more: fn(Mixed(a, ones, more=more)),
        lambda a, more: ((a.sin() + 2 * a.detach()) * more).sum(),
        [ones, ones],
    )
    for _ in range(2):
        leaf = Mixed(ones, ones, more=torch.ones(4, 2, 3, dtype=torch.float64)).requires_grad_()
        fn(leaf).backward()
        torch.testing.assert_close(leaf.grad.a, 4 * ones.cos())
        torch.testing.assert_close(leaf.grad.more, (ones.sin() + 2 * ones).expand(4, 2, 3))
        assert leaf.grad.raw.count_nonzero() == 0


@every_door
def test_a_write_to_an_argument_is_read(door):
    def fn(x):
        x.mul_(3)
        return (x.a * x.a).sum()

    x, (a, _) = mixed(grad=False), numbers(2, 2)
    torch.testing.assert_close(DOORS[door](fn)(x), 9 * (a * a).sum())


def test_where_autograd_does_not_record_it_is_the_inner_tensor_itself():
    a, raw = numbers(2, 2)
    x = Mixed(a, raw)
    assert x.a is a and x.raw is raw and x.more is None and x.index is None
    x.requires_grad_()
    assert x.a is not x.a and x.a.requires_grad and x.raw is raw and x.more is None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert x.a is a
    assert x.detach().a.data_ptr() == a.data_ptr() and not x.detach().a.requires_grad
    seen = []
    Recorded = declare(Mixed, rules={torch.ops.aten.tan.default: lambda func, x: (seen.append(x.a), x)[1]})
    Recorded(a, raw).requires_grad_().tan()
    assert torch.equal(seen[0], a) and seen[0].requires_grad  # a rule runs once, where autograd records


def read_of(dtype):
    x = Mixed(*torch.ones(2, 1, dtype=dtype)).requires_grad_()
    return x.a.requires_grad, x.a.dtype


test_fields_of_other_dtypes = giving(
    {
        **{
            str(t): (lambda t=t: read_of(t), (True, t))
            for t in (torch.bfloat16, torch.complex64, torch.float64)
        },
        "an index": (lambda: mixed(more=torch.arange(2)).more.requires_grad, False),
    }
)


def test_a_write_to_a_reading_is_refused():
    x = mixed()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        x.a.add_(1)
    with torch.no_grad():
        x.a.add_(1)  # the inner tensor itself, as before


def test_assigning_printing_copying():
    a, raw = numbers(2, 2)
    x = Mixed(a, raw)
    x.a = raw
    assert x.a is raw and "a=tensor" in repr(x) and "_raw_" not in repr(x)
    x = Mixed(a, raw, more=a * 2, power=2).requires_grad_()
    assert "_raw_" not in repr(x) and "requires_grad=True" in repr(x)
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), saved(x)):
        assert y.requires_grad and y.power == 2 and y._layout is x._layout
        torch.testing.assert_close((y.detach().a, y.detach().more), (a, a * 2))


WRONG = [
    (torch.ones(3, dtype=torch.float64), r"Mixed\.a: .* would|Mixed\.a: would change the outer shape"),
    (torch.ones(2, dtype=torch.float64).requires_grad_(), r"Mixed\.a: inner tensors are stored raw"),
]
test_a_wrong_assignment = raising(
    [(lambda t=t: setattr(Mixed(*numbers(2, 2)), "a", t), ValueError, words) for t, words in WRONG]
)


def test_a_layout_is_pickled_by_the_names_of_fields():
    """So files load that were written before a field became differentiable."""
    x = mixed()
    layout, (names, _) = x._layout, x.__tensor_flatten__()
    assert layout.__reduce__()[1][2] == ("a", "raw") and "_raw_" not in repr(layout)
    assert pickle.loads(pickle.dumps(layout)) is intern_layout(Mixed, (1,), ("a", "raw")) is layout
    assert names == ["_raw_a", "raw"] and not getattr(x, names[0]).requires_grad


ROWS = torch.randn(4, 3, dtype=torch.float64)


def of_each_row(a, raw):
    x = Mixed(a, raw)
    return torch.vmap(lambda row: (x.unwrap("a") * row).sum() + (x.a * row).sum())(ROWS)


test_vmap_over_a_function_that_reads = agreeing(
    {"rows": (of_each_row, lambda a, raw: 2 * ROWS @ a, [3, 3])}, {"eager": doors.eager}
)

# ---- declarations ------------------------------------------------------------------------------------------


test_declarations_that_contradict_themselves = raising(
    {
        "a dtype": (
            lambda: declare(name="Bad", a=inner(dtype=torch.int64, differentiable=True)),
            SpecError,
            r"Bad\.a: a tensor of torch\.int64 has no gradient; remove",
        ),
        "a base": (
            lambda: declare(Mixed, name="Child", a=inner()),
            SpecError,
            r"Child\.a: a base of the class declares it differentiable; write",
        ),
    }
)


def test_a_child_makes_a_field_differentiable():
    x = declare(Mixed, raw=inner(differentiable=True))(*numbers(2, 2)).requires_grad_()
    assert x.raw.requires_grad and x.a.requires_grad


# ---- materialize -------------------------------------------------------------------------------------------


def of_materialized(cls):
    def plain(left, right):
        found = left @ right * 3
        return (found + left.sum() if cls is Lower else found).sin()

    return lambda left, right: cls(left, right).materialize().sin(), plain, [(2, 3), (3, 4)]


LOWS = {"low": Low, "lower": Lower}
test_materialize_is_differentiable_for_every_caller = agreeing(
    {
        **{name: of_materialized(cls) for name, cls in LOWS.items()},
        "beside an op": (
            lambda left, right: Low(left, right).materialize().sin() * Low(left, right),
            lambda left, right: (left @ right * 3).sin() * (left @ right * 3),
            [(2, 3), (3, 4)],
        ),
    },
    DOORS,
)


@pytest.mark.sweep(12)
@every_door
@pytest.mark.parametrize("name", LOWS)
def test_materialize_of_an_argument_is_differentiable(door, name):
    _, plain, sizes = of_materialized(LOWS[name])
    fn, tensors = DOORS[door](lambda x: x.materialize().sin().sum()), numbers(*sizes)
    agree(lambda *parts: fn(LOWS[name](*parts)), lambda *parts: plain(*parts).sum(), tensors)
    leaf, parts = LOWS[name](*tensors).requires_grad_(), [t.requires_grad_() for t in tensors]
    fn(leaf).backward()
    torch.testing.assert_close(leaf.grad.unwrap(), torch.autograd.grad(plain(*parts).sum(), parts))


def test_materialize_without_gradients_records_nothing():
    x = Low(*numbers((2, 3), (3, 4)))
    assert not x.materialize().requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not x.materialize().requires_grad
    assert x.materialize().requires_grad and (x * 2).requires_grad


# ---- a part in a compiled function, the whole outside of it ------------------------------------------------


TrainedLow = declare(Low, keywords={"trainable": True})


@every_door
@pytest.mark.parametrize("read", [lambda x: x.unwrap("left").sum(), lambda x: x.materialize().sin().sum()])
def test_a_gradient_of_a_part_is_added_to_a_plain_one(door, read):
    def whole_and_part(part, left, right):
        x = Low(left, right)
        return part(x) + x.cos().sum() + part(x)

    part, tensors = DOORS[door](read), numbers((2, 3), (3, 4))
    agree(partial(whole_and_part, part), partial(whole_and_part, read), tensors)
    leaf, plain = (TrainedLow(*tensors).requires_grad_() for _ in range(2))
    (part(leaf) + leaf.cos().sum()).backward()
    (read(plain) + plain.materialize().cos().sum()).backward()
    torch.testing.assert_close(leaf.grad.unwrap(), plain.grad.unwrap())


test_not_with_inner_tensors_that_changed_meanwhile = raising(
    {
        door: (
            lambda door=door: (
                x := TrainedLow(*numbers((2, 3), (3, 4))).requires_grad_(),
                out := DOORS[door](lambda x: x.unwrap("left").sum())(x) + x.cos().sum(),
                x.left.mul_(2),
                out.backward(),
            ),
            RuntimeError,
            "modified by an inplace operation",
        )
        for door in DOORS
    }
)


# ---- the classes of the package ----------------------------------------------------------------------------

OFFSETS, TARGETS, LENGTHS = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1, 2, 0, 1]), torch.tensor([2, 0, 3])
EXISTS = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]]).unsqueeze(-1)
RAGGED = {
    "jagged": (
        lambda values: F.cross_entropy((JaggedTensor(values, OFFSETS, max_length=3) * 2).values, TARGETS),
        lambda values: F.cross_entropy(values * 2, TARGETS),
        (5, 3),
    ),
    "padded": (
        lambda table: (PaddedTensor(table, LENGTHS).padded * 2).sin().sum(),
        lambda table: (table * EXISTS * 2).sin().sum(),
        (3, 3, 2),
    ),
}


test_the_values_of_ragged_tensors = agreeing(
    {kind: (fn, plain, [size]) for kind, (fn, plain, size) in RAGGED.items()}, DOORS
)


@pytest.mark.sweep(3)
@every_door
def test_the_weights_of_keyed_tensors(door):
    def keyed(weights):
        return KeyedJaggedTensor(["k"], torch.arange(4), torch.tensor([1, 3]), weights=weights)

    fn, weights = DOORS[door](lambda x: (x.weights * x.weights).sum()), numbers(4)
    agree(lambda w: fn(keyed(w)), lambda w: (w * w).sum(), weights)
    x = keyed(weights[0].requires_grad_())
    assert x.values.dtype == torch.int64 and not x.values.requires_grad


# ---- inside transforms of torch.func -----------------------------------------------------------------------


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda v: torch.func.grad(f)(v).square().sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(f))(torch.stack([x, x + 1])),
    "grad of vmap": lambda f, x: torch.func.grad(lambda v: torch.vmap(f)(torch.stack([v, 2 * v])).sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("learned", [True, False], ids=["requires grad", "frozen"])
@pytest.mark.parametrize("grads", [True, False], ids=["grad", "no_grad"])
def test_a_value_from_outside_of_a_transform(transform, learned, grads):
    plain = [t.requires_grad_(learned) for t in numbers(2, 2)]
    pair, (x,) = Mixed(*plain), numbers(2, seed=4)

    def by_values(v):
        a, b = pair.unwrap("a"), pair.unwrap("raw")
        return (a * v.sin() + b).square().sum() + (pair.a * v).sum()

    def by_tensors(v):
        return (plain[0] * v.sin() + plain[1]).square().sum() + (plain[0] * v).sum()

    with torch.set_grad_enabled(grads):
        got, expected = transform(by_values, x), transform(by_tensors, x)
    torch.testing.assert_close(got, expected)
    assert got.requires_grad == expected.requires_grad == (learned and grads)
    if got.requires_grad:
        ours, theirs = (torch.autograd.grad(y.sum(), plain, allow_unused=True) for y in (got, expected))
        torch.testing.assert_close(ours, theirs)


# ---- assigning a field: of a leaf, and of a value without gradients --------------------------------------------


Mean = declare(
    name="Mean",
    keywords={"fallback": "materialize"},
    total=inner(differentiable=True),
    count=inner(),
    materialize=lambda self: self.total / self.count,
)
Trained = declare(Mean, keywords={"trainable": True})
Ruled = declare(Mean, rules={torch.ops.aten.mul: lambda func, x, y: Ruled(x.total * y, x.count)})
Twin = declare(
    keywords={"fallback": "map"}, total=inner(differentiable=True), count=inner(differentiable=True)
)
ONES, FIVES = torch.ones(2), torch.full((2,), 5.0)


def recorded(cls):
    return cls(torch.ones(2, requires_grad=True) * 1, torch.ones(2))


@pytest.mark.parametrize("cls", [Mean, Trained, Ruled])
@pytest.mark.parametrize("made", [lambda x: x, lambda x: x.clone(), lambda x: x[:1]])
def test_a_value_that_autograd_recorded_is_refused(made, cls):
    x = made(recorded(cls))
    if isinstance(x, cls):
        with pytest.raises(DispatchError, match=r"construct a new \w+ of its inner tensors.*x\.detach\(\)"):
            x.count = ONES
        assert x.detach().count.tolist() == [1, 1]


@pytest.mark.parametrize("cls", [Mean, Trained])
def test_a_value_without_gradients_that_a_backward_needs(cls):
    x = cls(ONES, ONES)
    before = (x * torch.ones(2, requires_grad=True)).sum()
    x.count = FIVES
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


def test_a_leaf_stays_one():
    p = torch.nn.Parameter(Trained(torch.ones(2), torch.ones(2)))
    p.count = FIVES
    assert p.is_leaf and p.grad_fn is None
    (p * 1).sum().backward()
    torch.testing.assert_close(p.grad.total, torch.full((2,), 0.2))


def parts(x):
    return list(x.unwrap()) if isinstance(x, TensorSubclass) else [x]


@pytest.mark.sweep(24)
@pytest.mark.parametrize("door", ["stock", "desugar"])
@pytest.mark.parametrize("cls", [Mean, Trained, Ruled, Twin])
@pytest.mark.parametrize("read", [lambda x: x * 1, lambda x: x.total * 1, lambda x: x.unwrap("count") * 1])
def test_an_argument_compiled(read, cls, door):
    def f(x, t):
        x.total = x.total * t
        return read(x)

    compiled = doors.DOORS[door](f)
    x, y = (cls(torch.ones(2), torch.full((2,), 2.0)) for _ in "xy")
    for _ in range(3):
        found, expected = compiled(x, 10.0), f(y, 10.0)
        torch.testing.assert_close((parts(found), x.total), (parts(expected), y.total))


def doubled(x):
    x.total = x.total * 2
    return x * 1


test_a_whole_graph_is_refused = raising(
    [
        (
            lambda door=door: doors.DOORS[door](doubled, fullgraph=True)(Mean(torch.ones(2), torch.ones(2))),
            Exception,
            r"Mean\.total = \.\.\.",
        )
        for door in ("stock", "desugar")
    ]
)


@pytest.mark.parametrize("cls", [Mean, Trained, Ruled])
def test_without_gradients_it_is_not_recorded(cls):
    """As a write to a plain tensor is not."""
    x = recorded(cls)
    node, version = x.grad_fn, x._version
    with torch.no_grad():
        x.count = FIVES
    assert x.grad_fn is node and x._version == version
    torch.testing.assert_close(x.detach().materialize(), torch.full((2,), 0.2))
