"""PyTorch's sparse tensors inside the function: a graph ends there, and values and gradients are eager's."""

from __future__ import annotations

import contextlib

import pytest
import torch

from desugar import DesugarError
from tests.desugar.classes import TwoTensor
from tests.desugar.judge import judge
from tests.desugar.refusing import EVERY_DOOR, assert_refused, assert_wrong_everywhere, strictly, unlooked_at

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
]

PLACES = torch.tensor([[0, 1, 2], [1, 0, 2]])
ROWS, COLUMNS = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2])
KEEPS_GRADIENTS = torch.__version__ >= "2.14"  # of what a trace makes dense again


def coo(values):
    return torch.sparse_coo_tensor(PLACES, values, (3, 3))


# From numbers, a dense matrix of 3 x 3, and one of 3 x 4.
INSIDE = {
    "a product": lambda v, d, x: torch.sparse.mm(coo(v.detach()), x),
    "a part of a dense one": lambda v, d, x: d.to_sparse() @ x,
    "its values": lambda v, d, x: d.to_sparse().coalesce().values() * 2,
    "read": lambda v, d, x: coo(v.detach()).to_dense() * d,
    "made of numbers": lambda v, d, x: torch.sparse.mm(coo(v), x),
    "made of numbers, by name": lambda v, d, x: torch.sparse_coo_tensor(
        indices=PLACES, values=v, size=(3, 3)
    ).to_dense(),
    "masked": lambda v, d, x: d.sparse_mask(coo(torch.ones(3)).coalesce()).to_dense(),
    "rows, compressed": lambda v, d, x: d.to_sparse_csr() @ x,
    "rows, by layout": lambda v, d, x: d.to_sparse(layout=torch.sparse_csr) @ x,
    "made of rows": lambda v, d, x: torch.sparse_csr_tensor(ROWS, COLUMNS, v, (3, 3)) @ x,
    "dense again": lambda v, d, x: d.to_sparse().to_dense() * 2,
    "dense again, later": lambda v, d, x: torch.sparse.softmax(d.to_sparse(), 1).to_dense(),
    "a size that is in the numbers": lambda v, d, x: torch.sparse_coo_tensor(PLACES, v).to_dense() * 2,
}


def arguments(grad=True):
    return tuple(torch.randn(size, requires_grad=grad) for size in ((3,), (3, 3), (3, 4)))


@pytest.mark.sweep(12)
@EVERY_DOOR
@pytest.mark.parametrize("name", INSIDE)
def test_sparse_tensors_inside(name, door):
    compiled = judge(INSIDE[name], arguments, way=door, calls=2)
    judge(INSIDE[name], lambda: arguments(grad=False), compiled, around=torch.no_grad, calls=2)


@pytest.mark.parametrize("grad", [False, True])
@EVERY_DOOR
def test_a_sparse_result_and_its_gradient(door, grad):
    compiled = door(lambda d: (d * 2).to_sparse())
    for _ in range(2):
        d = torch.randn(3, 3, requires_grad=grad)
        result = compiled(d)
        assert result.layout is torch.sparse_coo and torch.equal(result.to_dense(), d * 2)
        assert result.requires_grad is grad
        if grad:
            (gradient,) = torch.autograd.grad((result.to_dense() * 3).sum(), d)
            assert torch.equal(gradient, torch.full((3, 3), 6.0))


@EVERY_DOOR
def test_a_sparse_gradient(door):
    fn = lambda w, indices: torch.nn.functional.embedding(indices, w, sparse=True) * 2  # noqa: E731
    weight, indices = torch.randn(4, 3, requires_grad=True), torch.tensor([1, 3, 1])
    compiled = door(fn)
    for _ in range(2):
        gradients = [torch.autograd.grad(f(weight, indices).sum(), weight)[0] for f in (fn, compiled)]
        assert {gradient.layout for gradient in gradients} == {torch.sparse_coo}
        assert torch.equal(*(gradient.to_dense() for gradient in gradients))


SPARSE = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "coo that requires grad": lambda: torch.eye(3).to_sparse().requires_grad_(),
}


@EVERY_DOOR
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_arguments(name, door):
    fn = lambda x, y: (x * 2, x @ y)  # noqa: E731
    compiled = door(fn)
    for _ in range(2):
        calls, y = [], torch.randn(3, 2)
        for function in (fn, compiled):
            x, z = SPARSE[name](), y.clone().requires_grad_()
            doubled, product = function(x, z)
            product.sum().backward()
            kinds = doubled.layout, doubled.requires_grad, product.requires_grad
            grad = None if x.grad is None else x.grad.to_dense().tolist()
            calls.append((kinds, doubled.to_dense().tolist(), product.tolist(), grad, z.grad.tolist()))
        assert calls[0] == calls[1]


@EVERY_DOOR
def test_sparse_tensors_in_a_wrapper(door):
    compiled = door(lambda x: x * 3)
    for _ in range(2):
        tripled = compiled(TwoTensor(torch.eye(3).to_sparse(), torch.eye(3).to_sparse() * 2))
        assert type(tripled) is TwoTensor and tripled.a.layout is torch.sparse_coo
        for part, factor in ((tripled.a, 3), (tripled.b, 6)):
            assert torch.equal(part.to_dense(), torch.eye(3) * factor)


# ---- where Dynamo does not look ------------------------------------------------------------------------------

LOST = {name: INSIDE[name] for name in ("made of numbers", "masked", "dense again", "dense again, later")}
LOST["read"] = lambda v, d, x: coo(v).to_dense()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", LOST)
def test_gradients_through_sparse_tensors_that_a_trace_loses(name):
    """Newer releases keep some of them; on others it is an error, never a lost gradient."""
    inside = unlooked_at(LOST[name])
    fn = lambda v, d, x: inside(v, d, x) * 1  # noqa: E731
    if not KEEPS_GRADIENTS:
        error = assert_wrong_everywhere(fn, arguments, "sparse tensor is made or read inside the function")
        assert error.where is not None and "test_sparse.py" in error.where
    elif "dense again" in name:
        judge(fn, arguments, way=strictly, calls=2)
    else:
        assert_refused(fn, arguments, "sparse tensor is made or read inside the function")
    torch.compiler.reset()
    judge(fn, lambda: arguments(grad=False), around=torch.no_grad)


# ---- mkldnn's layout -----------------------------------------------------------------------------------------


@EVERY_DOOR
def test_tensors_in_mkldnns_layout(door):
    """Right or refused; in PyTorch's own compiler, a result may have the layout of the argument instead."""
    compiled, x = door(lambda x: (x * 2).to_mkldnn()), torch.randn(3, 3)
    for _ in range(2):
        with contextlib.suppress(DesugarError, torch._dynamo.exc.BackendCompilerFailed):
            result = compiled(x)
            assert result.layout is x.to_mkldnn().layout and torch.equal(result.to_dense(), x * 2)
