"""Results of rules for ops: plain tensors, whose derivative is the rule's derivative, and intermediate values."""

import pytest
import torch

import subclasses
from subclasses import inner, static
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agreeing
from tests.subclasses.subjects import declare

aten = torch.ops.aten


def rule_for_means(func, x, dim, keepdim, **kwargs):
    if func is not torch.mean:
        return NotImplemented
    return (x.value * x.weight).sum(dim, keepdim=keepdim) / x.weight.sum(dim, keepdim=keepdim)


WEIGHTED = {
    "value": inner(),
    "weight": inner(),
    "rules": {
        subclasses.reductions: rule_for_means,
        aten.mm.default: lambda func, x, y: func(x.value * x.weight, y),
        aten.frexp.Tensor: lambda func, x: (x.value * x.weight, x.weight.to(torch.int32)),
        aten.relu.default: lambda func, x: (x.value * x.weight).detach(),
        aten.mul.Tensor: lambda func, x, y: type(x)(x.value * y, x.weight),
    },
}
Weighted = declare(keywords={"fallback": "map"}, **WEIGHTED)
Refusing = declare(**WEIGHTED)
Converting = declare(
    wrap_cotangent=lambda self, cotangent: Converting(cotangent, torch.zeros_like(self.weight)), **WEIGHTED
)


def weighted_mean(x, w, dim=None):
    return (x * w).sum(dim) / w.sum(dim) if dim is not None else (x * w).sum() / w.sum()


# A function of a value and a plain tensor, and the same function of the inner tensors and the plain tensor.
CASES = {
    "mean": (lambda x, y: x.mean(), lambda v, w, y: weighted_mean(v, w)),
    "mean over a dim": (lambda x, y: x.mean(1).exp(), lambda v, w, y: weighted_mean(v, w, 1).exp()),
    "after another rule": (lambda x, y: (x * 3).mean(0), lambda v, w, y: weighted_mean(v * 3, w, 0)),
    "a matrix product": (lambda x, y: x.mm(y), lambda v, w, y: (v * w) @ y),
    "one of two results": (lambda x, y: torch.frexp(x).mantissa, lambda v, w, y: v * w),
    "twice": (
        lambda x, y: x.mm(y).sum() * x.mean(),
        lambda v, w, y: ((v * w) @ y).sum() * weighted_mean(v, w),
    ),
    "written to afterwards": (lambda x, y: x.mm(y).mul_(2).add_(1), lambda v, w, y: (v * w) @ y * 2 + 1),
}


SIZES = [(3, 4), (3, 4), (4, 2)]
CLASSES = {"mapped": Weighted, "refusing": Refusing, "converting": Converting}
test_gradients_are_those_of_what_the_rule_computes = agreeing(
    {
        f"{case}, {name}": (lambda v, w, y, fn=fn, cls=cls: fn(cls(v, w), y), plain, SIZES)
        for case, (fn, plain) in CASES.items()
        for name, cls in CLASSES.items()
    },
    zeros=False,
)
test_they_are_differentiated_again = agreeing(
    {
        "a mean": (
            lambda v, w: Refusing(v, w).mean(1),
            lambda v, w: weighted_mean(v, w, 1),
            SIZES[:2],
        )
    },
    {"eager": DOORS["eager"]},
    twice=["eager"],
)


def test_hooks_and_a_second_backward():
    value, met = torch.rand(3, requires_grad=True), []
    out = Weighted(value, torch.ones(3)).mean()
    out.register_hook(lambda g: met.append(g.item()))
    out.backward(retain_graph=True)
    out.backward()
    torch.testing.assert_close((met, value.grad), ([1.0, 1.0], torch.full((3,), 2 / 3)))
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_a_rule_without_a_derivative_gives_a_result_without_one():
    assert not torch.relu(Weighted(torch.rand(3, requires_grad=True), torch.ones(3))).requires_grad


def test_an_operand_that_was_written_to_is_noticed():
    x = Weighted(torch.rand(3), torch.ones(3)).requires_grad_() * 1
    out = x.mean()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        out.backward()


def test_a_tensor_that_a_rule_hands_on_keeps_no_trace_of_it():
    Handing = declare(
        wrap_cotangent=lambda self, cotangent: Handing(cotangent),
        rules={aten.cos.default: lambda func, x: x.held},
    )
    held = torch.rand(3, requires_grad=True)
    x = Handing(held)
    x.cos().sum().backward()
    assert x.held.__dict__ == {} and held.grad.tolist() == [1, 1, 1]


# Its rules for views return plain tensors.
Quotient = declare(above=inner(), below=inner())
Quotient.implements(
    aten.select.int,
    aten.slice.Tensor,
    aten.view.default,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.split.Tensor,
    aten.expand.default,
)(lambda func, x, *args, **kwargs: func(x.above / x.below, *args, **kwargs))

VIEWS = {
    "select": lambda x: x[0] * x[1].sin(),
    "view": lambda x: x.view(-1).cos(),
    "t": lambda x: x.t().exp(),
    "mT": lambda x: x.mT.sin(),
    "unbind": lambda x: x.unbind(0)[1].sin(),
    "all rows": lambda x: sum(row.sin() for row in x),
    "split": lambda x: torch.split(x, 1)[1].sin(),
    "a view of a view": lambda x: x[0][1:].sin(),
    "product": lambda x: torch.ones(2, 2, dtype=torch.float64) @ x[:, :2].sin(),
    "expand": lambda x: x.expand(4, 2, 3).sin(),
}


test_plain_views_have_the_derivative_of_the_rule = agreeing(
    {
        name: (
            lambda a, b, view=view: view(Quotient(a, b)),
            lambda a, b, view=view: view(a / b),
            [(2, 3)] * 2,
        )
        for name, view in VIEWS.items()
    },
    twice=["eager", "desugar", "inside"],
)


def test_a_write_to_a_plain_view_is_refused():
    Held = declare(rules={aten.select.int: lambda func, x, *args: func(x.held, *args)})
    x = Held(torch.ones(2, 3, requires_grad=True) * 3.0)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        x[0].mul_(2.0)
    with torch.no_grad():
        x[0].mul_(2.0)
    assert x.held[0, 0] == 6.0


# ---- values that a rule makes on the way: they are read raw, and lead the gradient on --------------------------


def length(func, x, y):
    if isinstance(x, Length) and isinstance(y, Length):
        return Length(func(x.number, y.to_unit(x.unit).number), unit=x.unit)
    return Length(func(x.number, y), unit=x.unit)


Length = declare(
    keywords={"fallback": "views"},
    number=inner(),
    unit=static(default=1.0),
    to_unit=lambda self, unit: Length(self.number * (self.unit / unit), unit=unit),
    rules={
        subclasses.arithmetic: length,
        # Applies ops to the converted value, and further ops to their results.
        aten.atan2.default: lambda func, x, y: Length(
            x.number + ((y.to_unit(x.unit) * 3)[:2].clone() - x).number, unit=x.unit
        ),
    },
)


def product(func, x, y):
    x, y = (t if isinstance(t, Log) else Log(torch.as_tensor(t).log()) for t in (x, y))
    return Log(x.log + y.log)


Log = declare(
    keywords={"fallback": "materialize"},
    log=inner(),
    materialize=lambda self: self.log.exp(),
    rules={aten.mul.Tensor: product},
)


def of_its_own_class(func, x, y):
    made = Compared(x.held * 2)
    fixed = (made + 1.0).detach().held + torch.zeros_like(made).held
    return Compared(torch.where((made > 1.0).held, func(x.held, y.held), x.held + fixed * 0))


def masked(func, x, y):
    return Masked(torch.where((Masked(x.held * 2) > 1.0).held, func(x.held, y.held), x.held))


Wrapped = declare(
    keywords={"fallback": "map"},
    rules={
        aten.mul.Tensor: lambda func, x, y: Wrapped(x.held * Length(y.held, unit=2.0).to_unit(1.0).number)
    },
)
Compared = declare(keywords={"fallback": "map"}, rules={aten.mul.Tensor: of_its_own_class})
Masked = declare(
    keywords={"fallback": "views"},
    rules={aten.mul.Tensor: masked, aten.gt.Scalar: lambda func, x, y: Masked(func(x.held, y))},
)


def metres(a, b):
    return Length(a, unit=2.0), Length(b, unit=4.0)


def compared(a, b):
    return torch.where(2 * a > 1.0, a * b, a)


# A function of two tensors, and the same without the classes.
ON_THE_WAY = {
    "a method of the class": (
        lambda a, b: (metres(a, b)[0] + metres(a, b)[1]).unwrap("number"),
        lambda a, b: a + 2 * b,
    ),
    "in place": (
        lambda a, b: (metres(a, b)[0] * 1).add_(metres(a, b)[1]).unwrap("number"),
        lambda a, b: a + 2 * b,
    ),
    "ops on what was made": (
        lambda a, b: torch.atan2(*metres(a, b)).unwrap("number"),
        lambda a, b: a + 6 * b - a,
    ),
    "twice": (
        lambda a, b: (metres(a, b)[0] + metres(a, b)[1] + metres(a, b)[1]).unwrap("number"),
        lambda a, b: a + 4 * b,
    ),
    "a plain operand": (lambda a, b: (Log(a) * b).materialize(), lambda a, b: a.exp() * b),
    "another class": (lambda a, b: (Wrapped(a) * Wrapped(b)).unwrap("held"), lambda a, b: 2 * a * b),
    "a comparison": (
        lambda a, b: (Compared(a - 0.5) * Compared(b)).unwrap("held"),
        lambda a, b: compared(a - 0.5, b),
    ),
    "a mask": (lambda a, b: (Masked(a - 0.5) * Masked(b)).unwrap("held"), lambda a, b: compared(a - 0.5, b)),
}


test_what_a_rule_makes_leads_the_gradient_on = agreeing(
    {name: (*fns, [2, 2]) for name, fns in ON_THE_WAY.items()}, twice=["eager"]
)


def test_outside_of_a_rule_they_are_raw():
    """As of any value: only ``unwrap``, and a field that says so, are differentiable."""
    x = Length(torch.ones(2, requires_grad=True), unit=2.0)
    (x + x).unwrap("number").sum().backward()
    assert not x.number.requires_grad and not x.to_unit(1.0).number.requires_grad
