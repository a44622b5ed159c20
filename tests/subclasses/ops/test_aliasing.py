"""Views and mutation, as a plain tensor has them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import desugar
from subclasses import DispatchError, TensorSubclass, dynamic, inner
from tests.subclasses.subjects import Nested, Pair, assert_same, make_pair

aten = torch.ops.aten

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


def twins():
    """A wrapper and a plain tensor of the same values."""
    t = torch.randn(3, 4)
    return Pair(t.clone(), t.clone() + 1), t


def outcome(fn):
    """The result, or the type and the first words of the error."""
    try:
        return fn()
    except RuntimeError as error:
        return type(error), str(error).split(" ")[:6]


# ---- views -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
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


@pytest.mark.parametrize("mode", MODES)
def test_views_made_in_another_mode_than_their_base(mode):
    p, t = twins()
    with mode():
        v, w = p[1:].t(), t[1:].t()
        v.mul_(2), w.mul_(2)
    assert p.a.equal(t)
    for a, b in ((v, w), (p, t)):
        assert (a._is_view(), a._version, a.is_inference()) == (b._is_view(), b._version, b.is_inference())
    assert v._base is p


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
        assert (v.shape, v.stride(), v.storage_offset()) == (w.shape, w.stride(), w.storage_offset())
        assert (v._is_view(), v._base is p) == (w._is_view(), w._base is t)
        if case != "expand":
            v.add_(1), w.add_(1)
        else:
            v[0].add_(1), w[0].add_(1)
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


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.view(12)[2:5].mul_(3),
        lambda y: y.mul_(2),
        lambda y: y[1].add_(y[0]),
        lambda y: y.t().exp_(),
        lambda y: y.copy_(y * 5),
        lambda y: y.__setitem__((slice(None), 1), 0.0),
        lambda y: y.unbind(0)[0].detach().add_(1),
        lambda y: y.relu_(),
        lambda y: y.squeeze(0).unsqueeze_(0).mul_(2),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_through_writes(write, compiled):
    def fn(x):
        y = x * 2
        write(y)
        return y * y

    p, t = twins()
    p, t = p.requires_grad_(), t.requires_grad_()
    run = torch.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn
    out, expected = run(p), fn(t)
    torch.testing.assert_close(out.a, expected)
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(p.grad.a, t.grad)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.add_(1),
        lambda x: x.view(-1).add_(1),
        lambda x: (x * 2).unbind(0)[0].add_(1),
        lambda x: ((y := x * 2), (z := y.sin()), y.add_(1), z.sum().backward()),
        lambda x: x.view(7),
        lambda x: (x * 2).expand(2, 3, 4).add_(1),
        lambda x: write_to_a_no_grad_view(x),
    ],
)
def test_errors_are_those_of_a_plain_tensor(wrong):
    p, t = (x.requires_grad_() for x in twins())
    expected = outcome(lambda: wrong(t))
    assert isinstance(expected, tuple) and expected[0] is RuntimeError
    assert outcome(lambda: wrong(p))[0] is RuntimeError


def write_to_a_no_grad_view(x):
    y = x * 1
    with torch.no_grad():
        v = y[0]
    v.zero_()


def test_unwrapped_tensors_notice_a_later_write():
    p = make_pair().requires_grad_()
    y = p * 1
    out = y.unwrap("a").sin()
    y.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        out.sum().backward()


def test_inner_versions_rise_with_the_outer():
    p = make_pair()
    before = p.a._version, p.b._version
    p.mul_(2)
    p[0].add_(1)
    assert (p.a._version, p.b._version) > before and p._version == 2


# ---- writes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
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
@pytest.mark.parametrize("mode", MODES)
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


def test_a_wrapper_is_never_written_into_a_plain_tensor():
    p, t = twins()
    for write in (
        lambda: t.add_(p),
        lambda: torch.add(p, 1, out=t),
        lambda: t.copy_(p),
        lambda: torch._foreach_add_([t], [p]),
        lambda: t.index_copy_(0, torch.tensor([0, 1, 2]), p),
    ):
        before = t.clone()
        with pytest.raises(DispatchError, match="would write a Pair into a plain tensor"):
            write()
        assert t.equal(before)


def test_copying_onto_each_other():
    p, q = make_pair(), make_pair()
    a = p.a
    assert p.copy_(q) is p and p.a is a
    assert_same(p, q)
    p.copy_(torch.ones(3, 4))
    assert p.a.equal(torch.ones(3, 4))


@pytest.mark.parametrize("mode", MODES)
def test_metadata_mutation(mode):
    with mode():
        for change in (
            lambda x: x.t_(),
            lambda x: x.unsqueeze_(0),
            lambda x: x.transpose_(0, 1),
            lambda x: x.unsqueeze_(1).squeeze_(1),
        ):
            p, t = twins()
            out, expected = change(p), change(t)
            assert out is p
            assert (p.shape, p.stride()) == (t.shape, t.stride())
            torch.testing.assert_close(p.a, expected)
            torch.testing.assert_close((p * 2).a, t * 2)


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
    p = make_pair()
    torch.manual_seed(3)
    out = torch.nn.functional.dropout(p)
    torch.manual_seed(3)
    expected = Pair(torch.nn.functional.dropout(p.a), torch.nn.functional.dropout(p.b))
    assert_same(out, expected)
    p.normal_(generator=torch.Generator().manual_seed(1))
    assert p.a.std() > 0.2


# ---- rules -------------------------------------------------------------------------------------------------


class Ruled(TensorSubclass):
    held: Tensor = inner()


@Ruled.implements(torch.ops.aten.view.default, torch.ops.aten.mul_.Tensor, torch.ops.aten.t_.default)
def _(func, x, *args):
    return Ruled(func(x.held, *args))


@pytest.mark.parametrize("mode", MODES)
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


class Doubled(TensorSubclass, fallback="materialize"):
    """Its sum with a plain tensor is plain, by a rule."""

    held: Tensor = inner()

    def materialize(self):
        return self.held * 2


@Doubled.implements(aten.add.Tensor)
def _(func, x, y, alpha=1):
    if isinstance(x, Doubled) and isinstance(y, Doubled):
        return Doubled(func(x.held, y.held, alpha=alpha))
    return func(*(t.materialize() if isinstance(t, Doubled) else t for t in (x, y)), alpha=alpha)


@pytest.mark.parametrize("door", [lambda f: f, lambda f: desugar.compile(f, backend="eager", fullgraph=True)])
def test_a_plain_operand_takes_the_plain_result_of_a_rule(door):
    def accumulate(total, x):
        total += x
        return total * 1

    total = torch.zeros(3)
    assert door(accumulate)(total, Doubled(torch.ones(3))).tolist() == total.tolist() == [2, 2, 2]


def test_a_plain_operand_that_cannot_take_it():
    with pytest.raises(RuntimeError, match=r"torch.float32 can't be cast to the torch.int64 of the operand"):
        torch.zeros(3, dtype=torch.int64).add_(Doubled(torch.ones(3)))
    total = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"the result has the shape \(2, 3\), and the operand .* has 3"):
        total.add_(Doubled(torch.ones(2, 3)))
    with pytest.raises(
        DispatchError, match=r"holds only one value; write .* there, or use the functional op"
    ):
        total.add_(Pair(torch.ones(3), torch.ones(3)))
    assert total.tolist() == [0, 0, 0]


# ---- integers beside what is written -----------------------------------------------------------------------


class Indexed(TensorSubclass):
    """Its rule copies the integers, so that no result shares memory with an operand."""

    v: Tensor = inner(differentiable=True)
    index: Tensor = inner(dtype=torch.int64)

    def wrap_cotangent(self, cotangent):
        return Indexed(cotangent, self.index)


@Indexed.implements(aten.mul)
def _(func, x, y):
    return Indexed(func(x.v, y), x.index.clone())


@pytest.mark.parametrize(
    "made", [lambda s: Indexed(s * 1, torch.arange(3)), lambda s: Indexed(s, torch.arange(3)) * 1.0]
)
def test_equal_integers_are_not_written(made):
    """What saved them for its backward would be an error."""
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


def test_a_reshape_that_an_inner_tensor_cannot_view():
    x = Pair(torch.rand(3, 4), torch.rand(4, 3).t())
    with pytest.raises(RuntimeError, match=r"of one of its inner tensors.*x\.clone\(memory_format"):
        x.reshape(-1)
    flat = x.clone(memory_format=torch.contiguous_format).reshape(-1)
    assert torch.equal(flat.b, x.b.reshape(-1))


class Counted(TensorSubclass):
    held: Tensor = inner()
    count: int = dynamic()


def test_a_state_that_does_not_fit_says_how_to_load_it():
    module, other = torch.nn.Module(), torch.nn.Module()
    for m, count in ((module, 2), (other, 3)):
        m.register_buffer("held", Counted(torch.ones(3), count=count))
    with pytest.raises(RuntimeError, match=r"another count: expected 2, got 3; .*assign=True"):
        module.load_state_dict(other.state_dict())
    module.load_state_dict(other.state_dict(), assign=True)
    assert module.held.count == 3
