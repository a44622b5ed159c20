"""What rules return: a value at the end of each way through them, as many tensors as the op has, of its size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
import subclasses
from subclasses import DispatchError, Outer, TensorSubclass, dynamic, inner, static

aten = torch.ops.aten


class Sometimes(TensorSubclass, fallback="views"):
    """Each rule has an answer for double precision alone."""

    held: Tensor = inner()


@Sometimes.implements(torch.sin)
def of_a_function(func, x):
    if x.dtype == torch.float64:
        return Sometimes(func(x.unwrap("held")))


@Sometimes.implements(aten.cos.default)
def of_an_op(func, x):
    if x.dtype == torch.float64:
        return Sometimes(func(x.held))


@Sometimes.implements(subclasses.comparisons)
def of_a_family(func, x, y):
    return Sometimes(func(x.held, y)) if x.dtype == torch.float64 else None


@Sometimes.implements(torch.Tag.pointwise)
def of_a_tag(func, x):
    if x.dtype == torch.float64:
        return Sometimes(func(x.held))


CALLS = {
    "of_a_function": lambda x: torch.sin(x),
    "of_an_op": lambda x: x.cos(),
    "of_a_family": lambda x: x == 1,
    "of_a_tag": lambda x: x.exp(),
}
DOORS = {"eager": lambda f: f, "desugar": lambda f: desugar.compile(f, backend="eager", fullgraph=True)}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CALLS)
def test_a_result_that_is_missing(name, door):
    call = DOORS[door](CALLS[name])
    x = torch.ones(2, dtype=torch.float64)
    assert torch.equal(call(Sometimes(x)).held, CALLS[name](x))
    with pytest.raises(Exception, match=rf"the rule {name} .*returned None for these arguments") as caught:
        call(Sometimes(x.float()))
    assert door != "eager" or isinstance(caught.value, DispatchError)


def test_functions_that_return_none_may():
    class Quiet(TensorSubclass, fallback="map"):
        held: Tensor = inner()

    seen = []

    @Quiet.implements(Tensor.__setitem__)
    def rule(func, x, index, value):
        if len(seen) > 3:
            return NotImplemented
        seen.append(index)

    x = Quiet(torch.zeros(3))
    x[0] = 1
    assert seen == [0] and x.held.tolist() == [0, 0, 0]


# ---- something else than a tensor ------------------------------------------------------------------------------


class Listed(TensorSubclass):
    """A class whose rules return what is no tensor."""

    held: Tensor = inner()


@Listed.implements(aten.sin.default)
def listed(func, x):
    return [Listed(func(x.held))]


@Listed.implements(aten.abs.default)
def a_number(func, x):
    return 3.0


@Listed.implements(torch.Tag.pointwise)
def wrapped(func, *args):
    return Listed(func(*(a.held if isinstance(a, Listed) else a for a in args)))


@pytest.mark.parametrize(
    ("call", "words"),
    [(torch.sin, "the rule listed .* returned a list"), (torch.abs, "the rule a_number .* returned a float")],
)
def test_a_result_that_is_no_tensor(call, words):
    with pytest.raises(DispatchError, match=words + ".* the op has one tensor as its result"):
        call(Listed(torch.ones(2)))


def test_a_rule_for_a_tag_is_not_asked_for_an_op_that_returns_no_tensor():
    """PyTorch counts ``equal``, which returns a bool, among the pointwise ops."""
    x = Listed(torch.ones(2))
    assert (x * 2).held.tolist() == [2, 2]
    with pytest.raises(DispatchError, match=r"no rule for aten\.equal"):
        torch.equal(x, x)


RESULTS = {
    "a generator": lambda M, t: (M(part) for part in (t, t)),
    "a tuple of 3": lambda M, t: (M(t), M(t), M(t)),
    "a tuple of 1": lambda M, t: (M(t),),
    "a Several": lambda M, t: M(t),
}


@pytest.mark.parametrize("result", RESULTS)
def test_a_rule_with_a_wrong_number_of_results(result):
    """PyTorch reads as many results as the op has, wherever they may be."""

    class Several(TensorSubclass):
        held: Tensor = inner()

    @Several.implements(aten.aminmax)
    def both(func, x, **kwargs):
        return RESULTS[result](Several, x.held)

    with pytest.raises(DispatchError, match=rf"rule .*both .*returned {result} .* 2 tensors .* in a tuple"):
        torch.aminmax(Several(torch.ones(2)))


@pytest.mark.parametrize("op", ["unbind", "split"])
@pytest.mark.parametrize("result", ["a generator", "a Several"])
def test_a_rule_for_an_op_with_a_list_of_results(op, result):
    class Several(TensorSubclass):
        held: Tensor = inner()

    @Several.implements(aten.unbind, aten.split)
    def parts(func, x, *args):
        return RESULTS[result](Several, x.held)

    with pytest.raises(DispatchError, match=rf"rule .*parts .*returned {result} .* a list of tensors"):
        getattr(Several(torch.ones(2)), op)(*([1] * (op == "split")))


@pytest.mark.parametrize("kind", [list, tuple])
def test_results_in_a_list_or_a_tuple(kind):
    class Several(TensorSubclass):
        held: Tensor = inner()

    @Several.implements(aten.aminmax, aten.split)
    def both(func, x, *args, **kwargs):
        return kind(Several(x.held + n) for n in range(2))

    low, high = torch.aminmax(Several(torch.ones(2)))
    assert low.held.tolist() == [1, 1] and high.held.tolist() == [2, 2]
    assert [part.held[0].item() for part in Several(torch.ones(2)).split(1)] == [1, 2]


# ---- the size of a result ------------------------------------------------------------------------------------


class Cut(TensorSubclass, fallback="views"):
    """Its rule for ``+`` is right only where the second operand is at most as wide as the first."""

    held: Tensor = inner()


@Cut.implements(aten.add)
def of_the_first(func, x, y):
    return Cut(func(x.held, (y.held if isinstance(y, Cut) else y)[..., : x.shape[-1]]))


@Cut.implements(aten.neg)
def first_row(func, x):
    return Cut(func(x.held[:1]))


@Cut.implements(aten.sub)
def of_one_operand(func, x, y):
    return Cut(x.held.clone())


SIZES = [
    ((2, 3), (2, 3)),
    ((2, 3), (1, 1)),
    ((2, 3), (3,)),
    ((2, 1, 3), (4, 1)),
    ((0, 3), (1, 3)),
    ((1,), (1,)),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("is_value", [True, False])
def test_a_result_of_the_size_to_which_the_operands_broadcast(sizes, is_value):
    x, y = map(torch.rand, sizes)
    torch.testing.assert_close((Cut(x) + (Cut(y) if is_value else y)).held, x + y)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x: x + torch.ones(2, 1, 3),
            r"of_the_first .* of size \(2, 4, 1\) for \(4, 1\) and \(2, 1, 3\)",
        ),
        (lambda x: -x, r"first_row .* of size \(1, 1\) for \(4, 1\)"),
    ],
)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_result_of_another_size(call, words, requires_grad):
    x = Cut(torch.ones(4, 1, requires_grad=requires_grad))
    with pytest.raises(
        DispatchError, match=f"the rule {words}; return one of the size to which the operands"
    ):
        call(x)


@pytest.mark.parametrize(("size", "other"), [((4, 3), (2,)), ((4, 3), (3, 3)), ((2, 1, 3), (4, 2))])
@pytest.mark.parametrize("name", ["sub", "sub_"])
def test_operands_that_do_not_broadcast(name, size, other):
    x = Cut(torch.ones(size))
    with pytest.raises(DispatchError) as caught:
        getattr(x, name)(torch.ones(other))
    assert f"operands of size {size} and {other} do not broadcast" in str(caught.value)
    assert torch.equal(x.held, torch.ones(size))


def test_sizes_that_change_are_not_compared():
    """A comparison would make a program for each size."""
    call = desugar.compile(lambda x, y: x + y, backend="eager", fullgraph=True, dynamic=True)
    for rows in (2, 3, 5):
        assert call(Cut(torch.ones(rows, 3)), torch.ones(rows, 1)).held.shape == (rows, 3)
    assert len(call.programs) == 1


class Wide(TensorSubclass, fallback="materialize"):
    """Its width is a dynamic int."""

    held: Tensor = inner()
    width: int = dynamic()

    @staticmethod
    def outer(held, width):
        return Outer((held.shape[0], width))

    def materialize(self):
        return self.held[:, None].expand(-1, self.width) * 1


@Wide.implements(aten.mul.Tensor)
def of_wide_values(func, x, y):
    return func(*(t.materialize() if isinstance(t, Wide) else t for t in (x, y)))


def test_a_symbolic_size_that_is_broadcast():
    call = desugar.compile(lambda x, v: x * v, backend="eager", fullgraph=True)
    for width in (8, 9):
        got = call(Wide(torch.ones(4), width=width), torch.arange(1.0, 1 + width))
        torch.testing.assert_close(got, torch.arange(1.0, 1 + width).expand(4, width))


# ---- sizes of views --------------------------------------------------------------------------------------------------


class Columns(TensorSubclass):
    """Numbers whose views a rule makes; each of these rules can be told to forget its arguments."""

    held: Tensor = inner()
    forgets: bool = static(default=False)


VIEWS = {
    "select": (aten.select.int, lambda x: x.select(-2, 1)),
    "slice": (aten.slice.Tensor, lambda x: x[:, 1:2]),
    "a slice with a step": (aten.slice.Tensor, lambda x: x[:, ::2]),
    "a slice from the end": (aten.slice.Tensor, lambda x: x[:, -2:]),
    "transpose": (aten.transpose.int, lambda x: x.transpose(-1, 0)),
    "permute": (aten.permute.default, lambda x: x.permute(1, -1, 0)),
    "unsqueeze": (aten.unsqueeze.default, lambda x: x.unsqueeze(-2)),
    "squeeze": (aten.squeeze.default, lambda x: x.squeeze()),
    "squeeze a dim": (aten.squeeze.dim, lambda x: x.squeeze(2)),
    "squeeze dims": (aten.squeeze.dims, lambda x: x.squeeze((0, -1))),
    "expand": (aten.expand.default, lambda x: x.expand(5, -1, 3, 6)),
    "view": (aten.view.default, lambda x: x.view(3, -1)),
}
for _op in {op for op, _ in VIEWS.values()}:

    @Columns.implements(_op)
    def by_op(func, x, *args):
        return Columns(x.held.view(x.shape) if x.forgets else func(x.held, *args), forgets=x.forgets)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_the_size_that_the_arguments_ask_for(view, door):
    _, call = VIEWS[view]
    plain = torch.randn(2, 3, 1)
    assert torch.equal(DOORS[door](lambda x: call(x))(Columns(plain)).held, call(plain))
    with pytest.raises(
        DispatchError if door == "eager" else Exception,
        match=r"the rule by_op .* of size .*, where the view has .*(use all arguments of the op|let what it returns)",
    ):
        DOORS[door](lambda x: call(x))(Columns(plain, forgets=True))


class Codes(TensorSubclass, fallback="materialize", size_from="codes", dtype_from="scale"):
    codes: Tensor = inner(dtype=torch.int8)
    scale: Tensor = inner()

    def materialize(self):
        return self.codes * self.scale


@Codes.implements(aten.slice.Tensor)
def codes_alone(func, x, *args):
    return func(x.codes, *args)


@Codes.implements(aten.t)
def unturned(func, x):
    return Codes(x.codes, x.scale)


def test_a_view_without_arguments_has_another_mend():
    words = r"unturned .* returned a Codes of size \(3, 2\), where the view has size \(2, 3\); let what it returns, its"
    with pytest.raises(DispatchError, match=words):
        Codes(torch.ones(3, 2, dtype=torch.int8), torch.full((3, 1), 0.5)).t()


def test_a_view_has_the_dtype_of_its_value():
    x = Codes(torch.ones(3, 2, dtype=torch.int8), torch.full((3, 1), 0.5))
    words = "the rule codes_alone .* returned a Tensor of torch.int8, where a view has the dtype .*; return a Codes"
    with pytest.raises(DispatchError, match=words):
        x[1:]
    assert torch.equal(x.codes, torch.ones(3, 2, dtype=torch.int8))


@pytest.mark.parametrize("size", [(0,), (1,), (0, 3), (1, 0, 2)])
def test_views_of_empty_values(size):
    plain = torch.randn(size)
    for call in (
        lambda x: x[:0],
        lambda x: x[-5:9],
        lambda x: x.unsqueeze(0),
        lambda x: x.squeeze(),
        lambda x: x.squeeze(0),
        lambda x: x.view(x.shape),
        lambda x: x.transpose(0, -1),
        lambda x: x.expand(2, *x.shape),
    ):
        assert torch.equal(call(Columns(plain)).held, call(plain))


def test_views_of_a_value_without_dims():
    plain = torch.tensor(2.0)
    for call in (
        lambda x: x.squeeze(),
        lambda x: x.squeeze(-1),
        lambda x: x.unsqueeze(-1),
        lambda x: x.view(1, 1),
        lambda x: x.expand(3),
        lambda x: x.permute([]),
    ):
        assert torch.equal(call(Columns(plain)).held, call(plain))


def test_views_of_changing_sizes_are_not_compared():
    step = desugar.compile(lambda x: x[:, 1:].transpose(0, 1), backend="eager", dynamic=True)
    for rows in (2, 5, 7):
        plain = torch.randn(rows, 3)
        assert torch.equal(step(Columns(plain)).held, plain[:, 1:].t())


# ---- a value inside of another -------------------------------------------------------------------------------------


class Scaled(TensorSubclass):
    held: Tensor = inner()


@Scaled.implements(aten.mul)
def any_factor(func, x, y):
    if not isinstance(x, Scaled):
        x, y = y, x
    return Scaled(func(x.held, y))


@pytest.mark.parametrize("door", DOORS)
def test_a_rule_that_takes_a_value_for_a_plain_tensor(door):
    run = DOORS[door](lambda x, y: x * y)
    x = Scaled(torch.rand(3))
    assert torch.equal(run(x, torch.full((3,), 2.0)).held, x.held * 2)
    with pytest.raises(
        DispatchError if door == "eager" else Exception,
        match=r"any_factor .* returned a Scaled whose held is a Scaled, as no operand.*isinstance\(operand, Scaled\)",
    ):
        run(x, Scaled(torch.rand(3)))


def test_values_of_values_stay():
    x = Scaled(Scaled(torch.rand(3)))
    assert torch.equal((x * 2.0).held.held, x.held.held * 2)


# ---- reductions --------------------------------------------------------------------------------------------

REDUCTIONS = {
    "x.sum(0)": lambda x: x.sum(0),
    "x.sum((0, -1), keepdim=True)": lambda x: x.sum((0, -1), keepdim=True),
    "x.mean(-1)": lambda x: x.mean(-1),
    "x.mean((), keepdim=True)": lambda x: x.mean((), keepdim=True),
    "x.amax(1, keepdim=True)": lambda x: x.amax(1, keepdim=True),
    "x.argmax(0)": lambda x: x.argmax(0),
    "x.norm(2.0, -1)": lambda x: x.norm(2.0, -1),
    "x.logsumexp(0)": lambda x: x.logsumexp(0),
    "x.any(1)": lambda x: x.any(1),
    "x.norm()": lambda x: x.norm(),
    "x.prod()": lambda x: x.prod(),
}


@pytest.mark.parametrize("size", [(2, 3), (1, 3), (2, 0)])
@pytest.mark.parametrize("call", REDUCTIONS)
def test_a_reduction_has_the_size_that_the_op_gives(call, size):
    class Right(TensorSubclass):
        held: Tensor = inner()

    class Wrong(Right):
        pass

    ops = [
        aten.sum,
        aten.mean,
        aten.amax,
        aten.argmax,
        aten.logsumexp,
        aten.any,
        aten.prod,
        aten.linalg_vector_norm,
    ]
    Right.implements(*ops)(lambda func, x, *args, **kwargs: func(x.held, *args, **kwargs))
    Wrong.implements(*ops)(lambda func, x, *args, **kwargs: x.held.new_zeros(7))
    plain = torch.rand(size)
    try:
        expected = REDUCTIONS[call](plain)
    except (RuntimeError, IndexError):
        pytest.skip("there is no element")
    torch.testing.assert_close(REDUCTIONS[call](Right(plain)), expected, equal_nan=True)
    with pytest.raises(
        DispatchError, match=r"of size \(7,\).* where the result has size .*the dim, the keepdim"
    ):
        REDUCTIONS[call](Wrong(plain))
