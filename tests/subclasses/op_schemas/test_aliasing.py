"""Views and mutation, as a plain tensor has them."""

import pytest
import torch
from hypothesis import given, strategies as st

from subclasses import DispatchError, dynamic, inner
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agreeing
from tests.subclasses.subjects import Nested, Pair, assert_same, declare, make_pair
from tests.tables import raising

aten = torch.ops.aten

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]
modes = pytest.mark.parametrize("mode", MODES)


def twins():
    """A wrapper and a plain tensor of the same values."""
    t = torch.randn(3, 4)
    return Pair(t.clone(), t.clone() + 1), t


def fact_of(x, *names):
    return [getattr(x, name)() if callable(getattr(x, name)) else getattr(x, name) for name in names]


# ---- views -------------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("make", [twins, lambda: (Nested(make_pair(), torch.ones(3, 4)), torch.ones(3, 4))])
def test_a_view_of_a_wrapper_aliases_it(mode, make):
    with mode():
        for x in make():
            v = x.view(12)[2:5]
            before = x.clone()
            v.add_(1)
            assert torch.equal(x.view(12)[2:5], before.view(12)[2:5] + 1)
            assert torch.equal(x.view(12)[5:], before.view(12)[5:])
            if not x.is_inference():
                assert v._is_view() and v._base is x and v._version == x._version == 1


@modes
def test_views_made_in_another_mode_than_their_base(mode):
    p, t = twins()
    with mode():
        v, w = (x[1:].t().mul_(2) for x in (p, t))
    assert p.a.equal(t) and v._base is p
    facts = "_is_view", "_version", "is_inference"
    assert [fact_of(x, *facts) for x in (v, p)] == [fact_of(x, *facts) for x in (w, t)]


VIEW_OPS = {
    "view": lambda x: x.view(2, 6),
    "index": lambda x: x[1],
    "slice": lambda x: x[:, 1:3],
    "t": lambda x: x.t(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "expand": lambda x: x[:1].expand(3, 4),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "unbind": lambda x: x.unbind(1)[1],
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1)),
    "detach": lambda x: x.detach(),
    "movedim": lambda x: x.movedim(0, 1),
    "flatten": lambda x: x.flatten(),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "view_as": lambda x: x.view_as(x),
    "alias": torch.ops.aten.alias.default,
}


@pytest.mark.parametrize("case", VIEW_OPS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_facts_about_views(case, mode):
    p, t = twins()
    with mode():
        v, w = VIEW_OPS[case](p), VIEW_OPS[case](t)
        facts = "shape", "stride", "storage_offset", "_is_view"
        assert fact_of(v, *facts) == fact_of(w, *facts) and (v._base is p) == (w._base is t)
        for view in (v, w):
            (view[0] if case == "expand" else view).add_(1)
    assert p.a.equal(t) and v.a.equal(w) and p.b.equal(t + 1)
    assert (p._version, v._version) == (t._version, w._version)


VIEW_CHAIN = [
    lambda x: x.t(),
    lambda x: x[1:] if x.size(0) > 1 else x,
    lambda x: x.unsqueeze(0).squeeze(0),
    lambda x: x.reshape(-1, 1),
    lambda x: x.flip(0),
    lambda x: x.mul_(2),
    lambda x: x[:1].add_(1),
]


@given(st.lists(st.integers(0, len(VIEW_CHAIN) - 1), max_size=6))
def test_any_chain_of_views_and_writes(chain):
    p, t = twins()
    x, y = p, t
    for i in chain:
        x, y = VIEW_CHAIN[i](x), VIEW_CHAIN[i](y)
    assert x.a.equal(y) and p.a.equal(t)
    assert p._version == t._version


# ---- autograd through in-place ops -------------------------------------------------------------------------


WRITTEN = {
    "a view": lambda y: y.view(12)[2:5].mul_(3),
    "itself": lambda y: y.mul_(2),
    "a row": lambda y: y[1].add_(y[0]),
    "a transpose": lambda y: y.t().exp_(),
    "a copy": lambda y: y.copy_(y * 5),
    "a column": lambda y: y.__setitem__((slice(None), 1), 0.0),
    "a detached row": lambda y: y.unbind(0)[0].detach().add_(1),
    "relu": lambda y: y.relu_(),
}


def squared_after(write):
    def fn(x):
        y = x * 2
        write(y)
        return y * y

    return fn


test_gradients_through_writes = agreeing(
    {
        name: (
            lambda a, b, fn=fn: fn(Pair(a, b)).unwrap(),
            lambda a, b, fn=fn: (fn(a), fn(b)),
            [(3, 4), (3, 4)],
        )
        for name, fn in ((name, squared_after(write)) for name, write in WRITTEN.items())
    },
    {name: DOORS[name] for name in ("eager", "stock")},
)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.add_(1),
        lambda x: x.view(-1).add_(1),
        lambda x: (x * 2).unbind(0)[0].add_(1),
        lambda x: ((y := x * 2), (z := y.sin()), y.add_(1), z.sum().backward()),
        lambda x: x.view(7),
        lambda x: (x * 2).expand(2, 3, 4).add_(1),
        lambda x: torch.no_grad()(lambda y: y[0])(x * 1).zero_(),
    ],
)
def test_errors_are_those_of_a_plain_tensor(wrong):
    for x in twins():
        with pytest.raises(RuntimeError) as caught:
            wrong(x.requires_grad_())
        assert type(caught.value) is RuntimeError


def test_inner_versions_rise_with_the_outer():
    """So what was unwrapped notices a later write."""
    p = make_pair().requires_grad_() * 1
    before, out = (p.a._version, p.b._version), p.unwrap("a").sin().sum()
    p.mul_(2)
    p[0].add_(1)
    assert (p.a._version, p.b._version) > before and p._version == 2
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        out.backward()


# ---- writes ------------------------------------------------------------------------------------------------


@modes
def test_in_place_returns_the_very_argument(mode):
    with mode():
        p, t = twins()
        a = p.a
        assert p.add_(1) is p and p.a is a
        assert torch.add(p, p, out=p) is p
        assert p.a.equal((t + 1) * 2)
        low, high = make_pair(3), make_pair(3)
        got = torch.aminmax(p, dim=1, out=(low, high))
        assert got[0] is low and got[1] is high and low.a.equal(p.a.amin(1))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@modes
def test_out_is_resized_inside_and_outside(mode):
    with mode():
        p, out = make_pair(3, 4), make_pair(0)
        assert torch.cat([p, p], out=out) is out
        assert out.shape == out.a.shape == (6, 4) and out.stride() == (4, 1)
        assert_same(out, torch.cat([p, p]))
        low, high = make_pair(0), make_pair(0)
        torch.aminmax(p, dim=1, out=(low, high))
        assert_same(low * 1, p.amin(1))
        r = make_pair(2)
        r.resize_(3, 3)
        assert r.shape == r.a.shape == r.b.shape == (3, 3)


INTO_PLAIN = {
    "add_": lambda t, p: t.add_(p),
    "out": lambda t, p: torch.add(p, 1, out=t),
    "copy_": lambda t, p: t.copy_(p),
    "foreach": lambda t, p: torch._foreach_add_([t], [p]),
    "index_copy_": lambda t, p: t.index_copy_(0, torch.tensor([0, 1, 2]), p),
}


@pytest.mark.parametrize("write", INTO_PLAIN)
def test_a_wrapper_is_never_written_into_a_plain_tensor(write):
    zeros = torch.zeros(3, 4)
    with pytest.raises(DispatchError, match="would write a Pair into a plain tensor"):
        INTO_PLAIN[write](zeros, make_pair())
    assert not zeros.any()


def test_copying_onto_each_other():
    p, q = make_pair(), make_pair()
    for source, expected in ((q, q), (torch.ones(3, 4), Pair(torch.ones(3, 4), torch.ones(3, 4)))):
        a = p.a
        assert p.copy_(source) is p and p.a is a
        assert_same(p, expected)


@modes
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.transpose_(0, 1),
        lambda x: x.unsqueeze_(1).squeeze_(1),
    ],
)
def test_metadata_mutation(change, mode):
    with mode():
        p, t = twins()
        assert change(p) is p
        expected = change(t)
        assert fact_of(p, "shape", "stride") == fact_of(t, "shape", "stride")
        torch.testing.assert_close((p.a, (p * 2).a), (expected, t * 2))


def test_data_and_set():
    p, q = make_pair(), make_pair()
    d = p.data
    assert d.a.data_ptr() == p.a.data_ptr() and not d.requires_grad
    p.data = q
    assert p.a is q.a and p.b is q.b
    p.data = make_pair(2, 5)
    assert p.shape == p.a.shape == (2, 5)
    with pytest.raises(TypeError, match=r"Pair.data: expected a Pair, got a tensor of torch.float32"):
        p.data = torch.ones(2, 5)
    assert p.shape == (2, 5)


def test_randomness_is_drawn_once_per_inner_tensor():
    p, drop = make_pair(), torch.nn.functional.dropout
    start = torch.get_rng_state()
    out = drop(p)
    torch.set_rng_state(start)
    assert_same(out, Pair(drop(p.a), drop(p.b)))
    p.normal_(generator=torch.Generator().manual_seed(1))
    assert p.a.std() > 0.2


# ---- rules -------------------------------------------------------------------------------------------------


Ruled = declare(
    rules=dict.fromkeys(
        [aten.view.default, aten.mul_.Tensor, aten.t_.default],
        lambda func, x, *args: Ruled(func(x.held, *args)),
    )
)


@modes
def test_an_author_never_writes_aliasing(mode):
    with mode():
        x = Ruled(torch.ones(2, 3))
        v = x.view(6)
        assert v.mul_(2) is v
        assert x.held.equal(torch.full((2, 3), 2.0))
        if not x.is_inference():
            assert v._base is x and x._version == 1
        assert x.t_() is x and x.shape == (3, 2)


# ---- plain operands that are written to ------------------------------------------------------------------------


def added(func, x, y, alpha=1):
    if isinstance(x, Doubled) and isinstance(y, Doubled):
        return Doubled(func(x.held, y.held, alpha=alpha))
    return func(*(t.materialize() if isinstance(t, Doubled) else t for t in (x, y)), alpha=alpha)


# Its sum with a plain tensor is plain, by a rule.
Doubled = declare(
    keywords={"fallback": "materialize"},
    materialize=lambda self: self.held * 2,
    rules={aten.add.Tensor: added},
)


@pytest.mark.parametrize("door", ["eager", "desugar"])
def test_a_plain_operand_takes_the_plain_result_of_a_rule(door):
    def accumulate(total, x):
        total += x
        return total * 1

    total, run = torch.zeros(3), DOORS[door](accumulate, fullgraph=True)
    assert run(total, Doubled(torch.ones(3))).tolist() == total.tolist() == [2, 2, 2]


REFUSED = [
    (torch.int64, Doubled(torch.ones(3)), r"torch.float32 can't be cast to the torch.int64 of the operand"),
    (
        torch.float32,
        Doubled(torch.ones(2, 3)),
        r"the result has the shape \(2, 3\), and the operand .* has 3",
    ),
    (
        torch.float32,
        Pair(torch.ones(3), torch.ones(3)),
        r"holds only one value; write .* there, or use the functional op",
    ),
]


@pytest.mark.parametrize(("dtype", "x", "words"), REFUSED)
def test_a_plain_operand_that_cannot_take_it(dtype, x, words):
    total = torch.zeros(3, dtype=dtype)
    with pytest.raises((RuntimeError, DispatchError), match=words):
        total.add_(x)
    assert total.tolist() == [0, 0, 0]


# ---- integers beside what is written -----------------------------------------------------------------------


# Its rule copies the integers, so that no result shares memory with an operand.
Indexed = declare(
    v=inner(differentiable=True),
    index=inner(dtype=torch.int64),
    wrap_cotangent=lambda self, cotangent: Indexed(cotangent, self.index),
    rules={aten.mul: lambda func, x, y: Indexed(func(x.v, y), x.index.clone())},
)


@pytest.mark.parametrize(
    "made", [lambda s: Indexed(s * 1, torch.arange(3)), lambda s: Indexed(s, torch.arange(3)) * 1.0]
)
def test_equal_integers_are_not_written(made):
    """A write would make the index, which a backward has saved, stale."""
    s = torch.ones(3, requires_grad=True)
    x = made(s)
    index = x.index
    y = torch.rand(3)[index] * x.v
    before = index._version
    x.mul_(2.0)
    assert x.index is index and index._version == before
    (x.v.sum() + y.sum() * 0).backward()
    assert torch.equal(s.grad, torch.full((3,), 2.0))


# ---- messages ----------------------------------------------------------------------------------------------


UNEVEN = Pair(torch.rand(3, 4), torch.rand(4, 3).t())
test_a_reshape_that_an_inner_tensor_cannot_view = raising(
    [(lambda: UNEVEN.reshape(-1), RuntimeError, r"of one of its inner tensors.*x\.clone\(memory_format")]
)


def test_a_contiguous_copy_can_be_viewed():
    flat = UNEVEN.clone(memory_format=torch.contiguous_format).reshape(-1)
    assert torch.equal(flat.b, UNEVEN.b.reshape(-1))


def test_a_state_that_does_not_fit_says_how_to_load_it():
    Counted = declare(held=inner(), count=dynamic())
    module, other = torch.nn.Module(), {"held": Counted(torch.ones(3), count=3)}
    module.register_buffer("held", Counted(torch.ones(3), count=2))
    with pytest.raises(RuntimeError, match=r"another count: expected 2, got 3; .*assign=True"):
        module.load_state_dict(other)
    module.load_state_dict(other, assign=True)
    assert module.held.count == 3
