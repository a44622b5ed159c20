"""Views by a rule with the size and stride of what they are views of, and results that alias what a program made."""

from __future__ import annotations

import pytest
import torch

from subclasses import DispatchError, Outer, inner, static
from tests.doors import COMPILED, by_desugar, by_stock
from tests.subclasses.autograd.judge import agree, numbers
from tests.subclasses.subjects import declare

aten = torch.ops.aten

LowRank = declare(
    keywords={"fallback": "materialize"},
    left=inner(differentiable=True),
    right=inner(differentiable=True),
    outer=staticmethod(lambda left, right: Outer((*left.shape[:-1], right.shape[-1]), dtype=left.dtype)),
    materialize=lambda self: self.left @ self.right,
)


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
    x = declare(LowRank, rules={key: turned})(torch.rand(size[0], 2), torch.rand(2, size[1]))
    assert torch.equal(by_desugar(transpose)(x).materialize(), x.materialize().mT)
    if size[0] != 1:
        with pytest.raises(DispatchError, match=r"as_strided.* with which torch.compile remakes views"):
            by_stock(transpose)(x)
    if size == (3, 3):
        told = f"what the rule for aten.{name}.* returns has the same size and stride.* Outer\\(size, stride="
        with pytest.raises(DispatchError, match=told):
            aten.as_strided(x, x.size(), x.stride(), 0)


def test_a_batch_of_which_two_dims_are_equal():
    cls = declare(LowRank, rules={aten.transpose.int: turned})
    x = cls(torch.rand(2, 3, 1), torch.rand(2, 1, 3))
    with pytest.raises(DispatchError, match=r"what the rule for aten.transpose.int returns"):
        by_stock(lambda x: x.transpose(1, 2))(x)
    x = cls(torch.rand(2, 3, 1), torch.rand(2, 1, 4))
    assert aten.as_strided(x, x.size(), x.stride(), 0).left.data_ptr() == x.left.data_ptr()


def by_rows_or_columns(rows, by_columns):
    n = rows.shape[0]
    return Outer((n, n), stride=(1, n) if by_columns else (n, 1), dtype=rows.dtype)


# A matrix by rows or by columns; its strides tell which.
Square = declare(
    keywords={"fallback": "materialize"},
    rows=inner(differentiable=True),
    by_columns=static(default=False),
    outer=staticmethod(by_rows_or_columns),
    materialize=lambda self: self.rows.t() if self.by_columns else self.rows,
    rules={aten.t: lambda func, x: Square(x.rows, by_columns=not x.by_columns)},
)
Symmetric = declare(
    keywords={"fallback": "materialize"},
    rows=inner(differentiable=True),
    materialize=lambda self: self.rows + self.rows.t(),
    rules={aten.t: lambda func, x: Symmetric(x.rows)},
)


@pytest.mark.parametrize("fn", [lambda x: x.detach(), lambda x: x.view_as(x)])
@pytest.mark.parametrize("cls", [Square, Symmetric])
def test_a_value_whose_transpose_has_other_strides_or_is_the_value_is_returned(cls, fn):
    x = cls(torch.rand(3, 3))
    out = by_stock(fn, fullgraph=True)(x)
    assert type(out) is cls and out.rows.data_ptr() == x.rows.data_ptr()
    assert torch.equal(out.materialize(), x.materialize())


# ---- results that alias what a program made ------------------------------------------------------------------


Scaled = declare(
    keywords={"fallback": "materialize", "dtype_from": "scale"},
    codes=inner(dtype=torch.int8),
    scale=inner(differentiable=True),
    materialize=lambda self: self.codes * self.scale,
    rules={aten.t: lambda func, x: Scaled(func(x.codes), func(x.scale))},
)
# A mapped class with a field of fewer dims.
Moved = declare(
    keywords={"fallback": "map"}, places=inner(differentiable=True), mass=inner(differentiable=True)
)


def scaled(scale):
    return Scaled(torch.ones(4, 3, dtype=torch.int8), scale)


# What a program returns, what is read of it, the same of plain tensors, and the size of the leaf.
VIEWS = {
    "materialize": (
        lambda s: scaled(s).t(),
        lambda x: x.materialize(),
        lambda s: s.t().expand(3, 4) * 1,
        (4, 1),
    ),
    "map": (
        lambda p: (Moved(p, p * 3) * 2).mT,
        lambda x: x.unwrap("places"),
        lambda p: (p * 2).mT,
        (3, 3),
    ),
}


@pytest.mark.parametrize("door", [*COMPILED, "graphs"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_what_a_program_makes_keeps_its_class(name, door):
    fn, read, plain, size = VIEWS[name]
    if door == "graphs":
        compiled = torch.compile(fn, backend="eager", fullgraph=True)
    else:
        compiled = COMPILED[door](fn, fullgraph=True)
    if door == "stock" and name == "materialize":
        with pytest.raises(
            Exception, match=r"return x\.materialize\(\), or compile the function with desugar"
        ):
            compiled(torch.rand(size, requires_grad=True))
        return

    def call(t):
        out = compiled(t)
        assert type(out) is type(fn(t))
        return read(out)

    agree(call, plain, numbers(size))


@pytest.mark.parametrize(
    "make", [lambda: scaled(torch.rand(4, 1)), lambda: Moved(torch.rand(3, 3), torch.rand(3))]
)
def test_an_unsafe_view_of_the_own_size_keeps_the_class(make):
    x = make()
    out = aten._unsafe_view(x, x.shape)
    assert type(out) is type(x) and out.shape == x.shape
