"""Cotangents: their sums, plain cotangents that meet cotangents of a class, the check for anomalies."""

from __future__ import annotations

import pytest
import torch

import subclasses
from subclasses import inner
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agreeing, numbers
from tests.subclasses.subjects import LowRank, declare

aten = torch.ops.aten

# ---- sums that PyTorch's formulas ask for ------------------------------------------------------------------


def product(func, x, y):
    (m, p), (n, q) = x.unwrap(), y.unwrap()
    return Polar(m * n, p + q)


def total(func, x, *args, **kwargs):
    real, imaginary = (func(x.length * part(x.angle), *args, **kwargs) for part in (torch.cos, torch.sin))
    return Polar((real**2 + imaginary**2).sqrt(), torch.atan2(imaginary, real))


# Complex numbers, whose sum is not linear in length and angle.
Polar = declare(
    keywords={"fallback": "views"},
    length=inner(differentiable=True),
    angle=inner(differentiable=True),
    rules={torch.mul: product, aten.sum.dim_IntList: total, aten.sum.default: total},
)


def squared(m, p):
    z = Polar(m, p).expand(2, 3)
    return (z * z).unwrap()


test_a_formula_sums_cotangents_by_inner_tensors = agreeing(
    {"squares": (squared, lambda m, p: ((m * m).expand(2, 3), (2 * p).expand(2, 3)), [3, 3])}
)


def test_the_rule_for_a_sum_is_that_of_values():
    z = Polar(torch.tensor([3.0, 4.0]), torch.tensor([0.0, torch.pi / 2]))
    torch.testing.assert_close(z.sum().length, torch.tensor(5.0))


# ---- a plain cotangent and one of the class ----------------------------------------------------------------

# Twice its first tensor; the second one is beside it.
Doubled = declare(
    keywords={"fallback": "map"},
    v=inner(differentiable=True),
    w=inner(differentiable=True),
    wrap_cotangent=lambda self, cotangent: Doubled(2 * cotangent, torch.zeros_like(cotangent)),
    rules={aten.sum: lambda func, x, *args, **kwargs: func(2 * x.v, *args, **kwargs)},
)
LOSSES = {
    "plain first": lambda x: x.sum() + (x.v * x.w).sum(),
    "plain last": lambda x: (x.v * x.w).sum() + x.sum(),
    "between": lambda x: x.v.sum() * 0 + x.sum() + (x.v * x.w).sum(),
}


def of_view(v, w):
    x = Doubled(v, w)
    return x.sum() + (x.T.v * x.T.w).sum()


Indexed = declare(
    keywords={"fallback": "map"},
    v=inner(differentiable=True),
    index=inner(dtype=torch.int64),
    wrap_cotangent=lambda self, cotangent: Indexed(cotangent, self.index),
    rules={aten.sigmoid: lambda func, x: func(x.v)},
)


def beside_integers(v):
    x = Indexed(v, torch.arange(2))
    return x.sigmoid() * x.v


test_a_mapped_class_asks_its_author_what_a_plain_one_means = agreeing(
    {
        **{
            f"{name}, {made}": (
                lambda v, w, loss=loss, f=f: loss(f(Doubled(v, w))),
                lambda v, w: (2 * v + v * w).sum(),
                [2, 2],
            )
            for name, loss in LOSSES.items()
            for made, f in {"leaf": lambda x: x, "result": lambda x: x * 1.0}.items()
        },
        "beside a view that is read": (of_view, lambda v, w: (2 * v + v * w).sum(), [(2, 2), (2, 2)]),
        # Integers take no part in a sum of cotangents.
        "beside integers": (beside_integers, lambda v: v.sigmoid() * v, [2]),
    }
)


# ---- detect_anomaly ----------------------------------------------------------------------------------------


def number_class(fallback: str, *, ruled: bool, trainable: bool) -> type:
    materialize = {"materialize": lambda self: self.a * 2} if fallback == "materialize" else {}
    Number: type = declare(
        keywords={"fallback": fallback, "trainable": trainable, "kind": "structure" if ruled else None},
        rules={aten.neg.default: lambda func, x: Number(func(x.a), x.n)} if ruled else {},
        a=inner(differentiable=True),
        n=inner(dtype=torch.int64),
        **materialize,
    )
    return Number


CLASSES = [
    ("map", False, False),
    ("map", True, True),
    ("views", True, False),
    ("materialize", False, True),
    ("materialize", True, False),
    ("error", True, False),
]


@pytest.mark.sweep(20)
@pytest.mark.parametrize("door", ["eager", "desugar", "inside"])
@pytest.mark.parametrize(("fallback", "ruled", "trainable"), CLASSES)
def test_detect_anomaly_finds_a_nan_in_a_cotangent(fallback, ruled, trainable, door):
    cls: type = number_class(fallback, ruled=ruled, trainable=trainable)

    def read(a, f):
        x = cls(a * 1, torch.arange(3))
        return ((-x if ruled else x).unwrap("a") * f).sum()

    run = DOORS[door](read)
    with torch.autograd.set_detect_anomaly(True):
        a = torch.ones(3, requires_grad=True)
        run(a, torch.ones(3)).backward()
        assert torch.equal(a.grad, torch.full((3,), -1.0 if ruled else 1.0))
        with (
            pytest.raises(RuntimeError, match="returned nan values"),
            pytest.warns(UserWarning, match="Error detected"),
        ):
            run(torch.ones(3, requires_grad=True), torch.full((3,), torch.nan)).backward()


def test_detect_anomaly_with_a_parameter():
    p = torch.nn.Parameter(LowRank(torch.randn(3, 2), torch.randn(2, 3)))
    with torch.autograd.set_detect_anomaly(True):
        (torch.ones(1, 3) @ p).sum().backward()
    assert type(p.grad) is LowRank.Cotangent


# ---- backward() in a compiled function ends the graph, and the engine calls the library's own functions there --------

Ruled = declare(
    keywords={"fallback": "views"},
    number=inner(differentiable=True),
    rules={
        subclasses.arithmetic: lambda func, x, y: Ruled(
            func(*(t.number if isinstance(t, Ruled) else t for t in (x, y)))
        )
    },
)
USES = {
    "a formula": lambda left, right, x: x @ LowRank(left, right),
    "materialize": lambda left, right, x: x @ LowRank(left, right).materialize(),
    "rules": lambda left, right, x: (Ruled(left) * 2 + Ruled(right.sum())).number.square() * x.sum(),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backward_inside_of_a_compiled_function(use, backend):
    def step(left, right, x):
        loss = USES[use](left, right, x).sum()
        loss.backward()
        return loss.detach()

    def run(call):
        left, right = (torch.nn.Parameter(t) for t in numbers((4, 1), (1, 3)))
        x = torch.ones(2, 4, dtype=torch.float64)
        return [call(left, right, x) for _ in range(2)], left.grad, right.grad

    torch.testing.assert_close(run(torch.compile(step, backend=backend)), run(step))
