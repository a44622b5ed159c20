"""Views by a rule with the size and stride of what they are views of, and results that alias what a program made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
from subclasses import DispatchError, Outer, TensorSubclass, inner, static

aten = torch.ops.aten


class LowRank(TensorSubclass, fallback="materialize"):
    left: Tensor = inner(differentiable=True)
    right: Tensor = inner(differentiable=True)

    @staticmethod
    def outer(left, right):
        return Outer((*left.shape[:-1], right.shape[-1]), dtype=left.dtype)

    def materialize(self):
        return self.left @ self.right


def turned(func, x, *args):
    return type(x)(func(x.right, *args), func(x.left, *args))


RULES = {
    "t": (aten.t, lambda x: x.t()),
    "transpose": (aten.transpose.int, lambda x: x.transpose(-1, -2)),
    "permute": (aten.permute, lambda x: x.permute(*range(x.dim() - 2), -1, -2)),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("size", [(3, 3), (4, 3), (1, 3)])
def test_a_transpose_is_no_program_that_returns_the_value_itself(name, size):
    key, transpose = RULES[name]
    cls = type("Turned", (LowRank,), {})
    cls.implements(key)(turned)
    x = cls(torch.rand(size[0], 2), torch.rand(2, size[1]))
    assert torch.equal(desugar.compile(transpose, backend="eager")(x).materialize(), x.materialize().mT)
    if size[0] != 1:
        with pytest.raises(DispatchError, match=r"as_strided.* with which torch.compile remakes views"):
            torch.compile(transpose, backend="aot_eager")(x)
    if size == (3, 3):
        told = f"what the rule for aten.{name}.* returns has the same size and stride.* Outer\\(size, stride="
        with pytest.raises(DispatchError, match=told):
            aten.as_strided(x, x.size(), x.stride(), 0)


def test_a_batch_of_which_two_dims_are_equal():
    cls = type("Turned", (LowRank,), {})
    cls.implements(aten.transpose.int)(turned)
    x = cls(torch.rand(2, 3, 1), torch.rand(2, 1, 3))
    with pytest.raises(DispatchError, match=r"what the rule for aten.transpose.int returns"):
        torch.compile(lambda x: x.transpose(1, 2), backend="aot_eager")(x)
    x = cls(torch.rand(2, 3, 1), torch.rand(2, 1, 4))
    assert aten.as_strided(x, x.size(), x.stride(), 0).left.data_ptr() == x.left.data_ptr()


class Square(TensorSubclass, fallback="materialize"):
    """A matrix by rows or by columns; its strides tell which."""

    rows: Tensor = inner(differentiable=True)
    by_columns: bool = static(default=False)

    @staticmethod
    def outer(rows, by_columns):
        n = rows.shape[0]
        return Outer((n, n), stride=(1, n) if by_columns else (n, 1), dtype=rows.dtype)

    def materialize(self):
        return self.rows.t() if self.by_columns else self.rows


class Symmetric(TensorSubclass, fallback="materialize"):
    rows: Tensor = inner(differentiable=True)

    def materialize(self):
        return self.rows + self.rows.t()


@Square.implements(aten.t)
def _(func, x):
    return Square(x.rows, by_columns=not x.by_columns)


@Symmetric.implements(aten.t)
def _(func, x):
    return Symmetric(x.rows)


@pytest.mark.parametrize("fn", [lambda x: x.detach(), lambda x: x.view_as(x)])
@pytest.mark.parametrize("cls", [Square, Symmetric])
def test_a_value_whose_transpose_has_other_strides_or_is_the_value_is_returned(cls, fn):
    x = cls(torch.rand(3, 3))
    out = torch.compile(fn, backend="aot_eager", fullgraph=True)(x)
    assert type(out) is cls and out.rows.data_ptr() == x.rows.data_ptr()
    assert torch.equal(out.materialize(), x.materialize())


# ---- results that alias what a program made ------------------------------------------------------------------


class Scaled(TensorSubclass, fallback="materialize", dtype_from="scale"):
    codes: Tensor = inner(dtype=torch.int8)
    scale: Tensor = inner(differentiable=True)

    def materialize(self):
        return self.codes * self.scale


class Moved(TensorSubclass, fallback="map"):
    """A mapped class with a field of fewer dims."""

    places: Tensor = inner(differentiable=True)
    mass: Tensor = inner(differentiable=True)


@Scaled.implements(aten.t)
def _(func, x):
    return Scaled(func(x.codes), func(x.scale))


def scaled(scale):
    return Scaled(torch.ones(4, 3, dtype=torch.int8), scale)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "desugar"])
@pytest.mark.parametrize(
    ("fn", "make"),
    [
        (lambda s: scaled(s).t(), lambda: (torch.rand(4, 1, requires_grad=True),)),
        (lambda p, m: (Moved(p, m) * 2).mT, lambda: (torch.rand(3, 3, requires_grad=True), torch.rand(3, 3))),
    ],
    ids=["materialize", "map"],
)
def test_a_view_of_what_a_program_makes_keeps_its_class(fn, make, backend):
    args = make()
    options = {"options": {"backend": "eager"}} if backend == "desugar" else {}
    compiled = torch.compile(fn, backend=backend, fullgraph=True, **options)
    if backend == "aot_eager" and type(fn(*args)) is Scaled:
        with pytest.raises(
            Exception, match=r"return x\.materialize\(\), or compile the function with desugar"
        ):
            compiled(*args)
        return
    gradients = []
    for call in (fn, compiled):
        out = call(*args)
        read = out.materialize() if type(out) is Scaled else out.unwrap("places")
        gradients.append((type(out), *torch.autograd.grad((read**2).sum(), args[0])))
    assert gradients[0][0] is gradients[1][0]
    torch.testing.assert_close(gradients[1][1], gradients[0][1])


@pytest.mark.parametrize(
    "make", [lambda: scaled(torch.rand(4, 1)), lambda: Moved(torch.rand(3, 3), torch.rand(3))]
)
def test_an_unsafe_view_of_the_own_size_keeps_the_class(make):
    x = make()
    out = aten._unsafe_view(x, x.shape)
    assert type(out) is type(x) and out.shape == x.shape
