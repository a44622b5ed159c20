"""PyTorch's sparse tensors inside the function: a graph ends there, and values and gradients are eager's."""

import contextlib

import pytest
import torch

from desugar import DesugarError
from tests.desugar.classes import TwoTensor
from tests.desugar.judge import (
    EVERY_DOOR,
    assert_refused,
    assert_wrong_everywhere,
    judge,
    unlooked_at,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
]

PLACES = torch.tensor([[0, 1, 2], [1, 0, 2]])
ROWS, COLUMNS = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2])
KEEPS_GRADIENTS = torch.__version__ >= "2.14"  # of a value that a trace makes dense again


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


@pytest.mark.sweep(24)
@EVERY_DOOR
@pytest.mark.parametrize("name", INSIDE)
def test_sparse_tensors_inside(name, door):
    compiled = judge(INSIDE[name], arguments, way=door, calls=2)
    judge(INSIDE[name], lambda: arguments(grad=False), compiled, around=torch.no_grad, calls=2)


def dense(value):
    """Layout, whether it requires grad, and numbers."""
    if isinstance(value, TwoTensor):
        return type(value), dense(value.a), dense(value.b)
    return value.layout, value.requires_grad, value.to_dense().tolist()


def seen(fn, args):
    """The results of a call and the gradients of their sum, with their layouts."""
    results = fn(*args)
    results = results if isinstance(results, tuple) else (results,)
    if results[-1].requires_grad:
        (results[-1].to_dense() * 3).sum().backward()
    return list(map(dense, [*results, *(x.grad for x in args if x.grad is not None)]))


def eye(grad=False):
    return torch.eye(3).requires_grad_(grad)


doubled_and_multiplied = lambda x, y: (x * 2, x @ y)  # noqa: E731
# Functions of sparse tensors, or that give some, and their arguments.
OUTSIDE = {
    "a result": (lambda d: (d * 2).to_sparse(), lambda: (eye(),)),
    "a result and its gradient": (lambda d: (d * 2).to_sparse(), lambda: (eye(grad=True),)),
    "a gradient": (
        lambda w: torch.nn.functional.embedding(torch.tensor([1, 2, 1]), w, sparse=True) * 2,
        lambda: (eye(grad=True),),
    ),
    "coo": (doubled_and_multiplied, lambda: (eye().to_sparse(), eye(grad=True))),
    "csr": (doubled_and_multiplied, lambda: (eye().to_sparse_csr(), eye(grad=True))),
    "coo that requires grad": (
        doubled_and_multiplied,
        lambda: (eye().to_sparse().requires_grad_(), eye(grad=True)),
    ),
    "in a wrapper": (lambda x: x * 3, lambda: (TwoTensor(eye().to_sparse(), eye().to_sparse() * 2),)),
}


@pytest.mark.sweep(3)
@EVERY_DOOR
@pytest.mark.parametrize("name", OUTSIDE)
def test_sparse_arguments_results_and_gradients(name, door):
    fn, make_args = OUTSIDE[name]
    compiled = door(fn)
    for _ in range(2):
        assert seen(compiled, make_args()) == seen(fn, make_args())


# ---- where Dynamo does not look ------------------------------------------------------------------------------

LOST = {name: INSIDE[name] for name in ("made of numbers", "masked", "dense again", "dense again, later")}
LOST["read"] = lambda v, d, x: coo(v).to_dense()


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", LOST)
def test_gradients_through_sparse_tensors_that_a_trace_loses(name):
    """Where stock keeps them, stock compiles the function; on others it is an error, never a lost gradient."""
    inside = unlooked_at(LOST[name])
    fn = lambda v, d, x: inside(v, d, x) * 1  # noqa: E731
    if not KEEPS_GRADIENTS:
        error = assert_wrong_everywhere(fn, arguments, "sparse tensor is made or read inside the function")
        assert error.where is not None and "test_sparse.py" in error.where
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
