"""PyTorch's sparse tensors inside the function: right without gradients, refused where a trace would lose them."""

from __future__ import annotations

import pytest
import torch

from desugar import DesugarError
from tests.desugar.judge import by_pass, judge

PLACES = torch.tensor([[0, 1, 2], [1, 0, 2]])
ROWS, COLUMNS = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2])


def coo(values):
    return torch.sparse_coo_tensor(PLACES, values, (3, 3))


# From numbers, a dense matrix of 3 x 3, and one of 3 x 4.
FINE = {
    "a product": lambda v, d, x: torch.sparse.mm(coo(v.detach()), x),
    "a part of a dense one": lambda v, d, x: d.to_sparse() @ x,
    "its values": lambda v, d, x: d.to_sparse().coalesce().values() * 2,
    "read": lambda v, d, x: coo(v.detach()).to_dense() * d,
}
LOST = {
    "made of numbers": lambda v, d, x: torch.sparse.mm(coo(v), x),
    "made of numbers, by name": lambda v, d, x: torch.sparse_coo_tensor(
        indices=PLACES, values=v, size=(3, 3)
    ).to_dense(),
    "masked": lambda v, d, x: d.sparse_mask(coo(torch.ones(3)).coalesce()).to_dense(),
    "rows, compressed": lambda v, d, x: d.to_sparse_csr() @ x,
    "rows, by layout": lambda v, d, x: d.to_sparse(layout=torch.sparse_csr) @ x,
    "made of rows": lambda v, d, x: torch.sparse_csr_tensor(ROWS, COLUMNS, v, (3, 3)) @ x,
    "the result": lambda v, d, x: d.to_sparse(),
}

READ = {
    "at once": lambda v, d, x: d.to_sparse().to_dense() * 2,
    "later": lambda v, d, x: torch.sparse.softmax(d.to_sparse(), 1).to_dense(),
}


def arguments(grad=True):
    return tuple(torch.randn(size, requires_grad=grad) for size in ((3,), (3, 3), (3, 4)))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", FINE)
def test_what_has_a_gradient(name):
    judge(FINE[name], arguments, calls=2)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", LOST)
def test_what_would_lose_its_gradient(name):
    args = arguments()
    with pytest.raises(DesugarError, match="sparse tensor") as caught:
        by_pass(LOST[name])(*args)
    assert "test_sparse.py" in caught.value.where
    if name not in ("made of rows", "the result"):
        judge(LOST[name], lambda: arguments(grad=False), around=torch.no_grad)


def refusal(fn):
    """What the pass says against a function; nothing where it does as eager mode does."""
    try:
        judge(fn, arguments)
    except DesugarError as error:
        return error.what
    return ""


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", READ)
def test_sparse_tensors_that_are_read(name):
    """Newer releases keep the gradient; on others it is refused, never lost."""
    refused = refusal(READ[name])
    assert "sparse tensor" in refused or not refused
    assert not refused or torch.__version__ < "2.15"
    judge(READ[name], lambda: arguments(grad=False), around=torch.no_grad)


def test_a_size_that_is_in_the_numbers():
    with pytest.raises(DesugarError, match="numbers in a tensor are read"):
        by_pass(lambda x: torch.sparse_coo_tensor(PLACES, x).to_dense())(torch.ones(3))


def test_tensors_in_mkldnns_layout():
    x = torch.randn(3, 3)
    with pytest.raises(DesugarError, match="to_mkldnn is called inside"):
        by_pass(lambda x: x.to_mkldnn().to_dense())(x)
    with pytest.raises(DesugarError, match=r"expected strided tensors, got a torch\._mkldnn"):
        by_pass(lambda x: x.to_dense() * 2)(x.to_mkldnn())
