"""Cotangents: their sums, plain ones that meet those of a class, the check for anomalies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import TensorSubclass, inner
from tests.subclasses.subjects import MODES, LowRank

aten = torch.ops.aten

# ---- sums that PyTorch's formulas ask for ------------------------------------------------------------------


class Polar(TensorSubclass, fallback="views"):
    """Complex numbers, whose sum is not linear in length and angle."""

    length: Tensor = inner(differentiable=True)
    angle: Tensor = inner(differentiable=True)


@Polar.implements(torch.mul)
def _(func, x, y):
    (m, p), (n, q) = x.unwrap(), y.unwrap()
    return Polar(m * n, p + q)


@Polar.implements(aten.sum.dim_IntList, aten.sum.default)
def _(func, x, *args, **kwargs):
    real, imaginary = (func(x.length * part(x.angle), *args, **kwargs) for part in (torch.cos, torch.sin))
    return Polar((real**2 + imaginary**2).sqrt(), torch.atan2(imaginary, real))


WEIGHT = torch.arange(1.0, 7.0).reshape(2, 3)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("mode", MODES)
def test_a_formula_sums_cotangents_by_inner_tensors(mode):
    def loss(m, p):
        z = Polar(m, p).expand(2, 3)
        y = z * z
        return (y.length * WEIGHT).sum() + (y.angle**2).sum()

    def expected(m, p):
        m, p = m.expand(2, 3), p.expand(2, 3)
        return (m * m * WEIGHT).sum() + ((2 * p) ** 2).sum()

    leaves = [torch.tensor(v, requires_grad=True) for v in ([1.0, 2.0, 3.0], [0.1, 0.2, 0.3])]
    got = torch.autograd.grad(MODES[mode](loss)(*leaves), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(expected(*leaves), leaves))


def test_the_rule_for_a_sum_is_that_of_values():
    z = Polar(torch.tensor([3.0, 4.0]), torch.tensor([0.0, torch.pi / 2]))
    torch.testing.assert_close(z.sum().length, torch.tensor(5.0))


# ---- a plain cotangent and one of the class ----------------------------------------------------------------


class Doubled(TensorSubclass, fallback="map"):
    """Twice its first tensor; the second one is beside it."""

    v: Tensor = inner(differentiable=True)
    w: Tensor = inner(differentiable=True)

    def wrap_cotangent(self, cotangent):
        return Doubled(2 * cotangent, torch.zeros_like(cotangent))


@Doubled.implements(aten.sum)
def _(func, x, *args, **kwargs):
    return func(2 * x.v, *args, **kwargs)


LOSSES = {
    "plain first": lambda x: x.sum() + (x.v * x.w).sum(),
    "plain last": lambda x: (x.v * x.w).sum() + x.sum(),
    "between": lambda x: x.v.sum() * 0 + x.sum() + (x.v * x.w).sum(),
}


@pytest.mark.sweep(17)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("made", ["leaf", "result"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_mapped_class_asks_its_author_what_a_plain_one_means(loss, made, mode):
    v, w = (torch.tensor(t, requires_grad=True) for t in ([1.0, 2.0], [3.0, 4.0]))

    def run(v, w):
        x = Doubled(v, w)
        return LOSSES[loss](x if made == "leaf" else x * 1.0)

    got = torch.autograd.grad(MODES[mode](run)(v, w), (v, w))
    torch.testing.assert_close(got, (torch.tensor([5.0, 6.0]), torch.tensor([1.0, 2.0])))


class Indexed(TensorSubclass, fallback="map"):
    """Has integers beside its numbers."""

    v: Tensor = inner(differentiable=True)
    index: Tensor = inner(dtype=torch.int64)

    def wrap_cotangent(self, cotangent):
        return Indexed(cotangent, self.index)


@Indexed.implements(aten.sigmoid)
def _(func, x):
    return func(x.v)


def test_integers_take_no_part_in_a_sum_of_cotangents():
    v, p = (torch.tensor([1.0, 2.0], requires_grad=True) for _ in range(2))
    x = Indexed(v, torch.arange(2))
    (x.sigmoid() * x.v).sum().backward()
    (p.sigmoid() * p).sum().backward()
    torch.testing.assert_close(v.grad, p.grad)


def test_a_plain_result_of_a_rule_beside_a_view_that_is_read():
    v, w = (torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True) for _ in range(2))
    x = Doubled(v, w)
    (x.sum() + (x.T.v * x.T.w).sum()).backward()
    torch.testing.assert_close((v.grad, w.grad), (w.detach() + 2, v.detach()))


# ---- detect_anomaly ----------------------------------------------------------------------------------------


def declare(fallback: str, *, ruled: bool, trainable: bool) -> type:
    class Number(TensorSubclass, fallback=fallback, trainable=trainable, kind="structure" if ruled else None):
        a: Tensor = inner(differentiable=True)
        n: Tensor = inner(dtype=torch.int64)

        if fallback == "materialize":

            def materialize(self):
                return self.a * 2

    if ruled:

        @Number.implements(aten.neg.default)
        def _(func, x):
            return Number(func(x.a), x.n)

    return Number


CLASSES = [
    ("map", False, False),
    ("map", True, True),
    ("views", True, False),
    ("materialize", False, True),
    ("materialize", True, False),
    ("error", True, False),
]


@pytest.mark.sweep(10)
@pytest.mark.parametrize("mode", ["eager", "desugar", "inside"])
@pytest.mark.parametrize(("fallback", "ruled", "trainable"), CLASSES)
def test_detect_anomaly_finds_a_nan_in_a_cotangent(fallback, ruled, trainable, mode):
    cls: type = declare(fallback, ruled=ruled, trainable=trainable)
    run = MODES[mode](lambda a, f: ((-cls(a * 1, torch.arange(3))).unwrap("a") * f).sum() if ruled else
                      (cls(a * 1, torch.arange(3)).unwrap("a") * f).sum())  # fmt: skip
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
