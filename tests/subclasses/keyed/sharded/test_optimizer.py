"""Row-wise Adagrad, compared with its formula."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch.distributed.device_mesh")

from subclasses.keyed.sharded import RowWiseAdagrad, TableShard
from tests.tables import raising


def reference(table, sums, grad, lr=0.1, eps=1e-10):
    sums = sums + (grad * grad).mean(1)
    touched = grad.abs().sum(1) > 0
    step = lr * grad / (sums.sqrt() + eps).unsqueeze(1)
    return torch.where(touched.unsqueeze(1), table - step, table), sums


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_steps_are_those_of_the_formula(sparse, sharded):
    torch.manual_seed(0)
    data = torch.randn(5, 3)
    table = nn.Parameter(TableShard(data.clone(), start=2, rows=9) if sharded else data.clone())
    optimizer = RowWiseAdagrad([table], lr=0.1, initial_accumulator_value=0.5)
    sums = torch.full((5,), 0.5)
    for ids in ([0, 1, 1], [], [1, 4]):
        optimizer.zero_grad()
        local = table.unwrap("local") if sharded else table
        loss = (F.embedding(torch.tensor(ids, dtype=torch.int64), local, sparse=sparse) ** 2).sum()
        loss.backward()
        grad = (table.grad.local if sharded else table.grad).to_dense()
        data, sums = reference(data, sums, grad)
        optimizer.step()
        torch.testing.assert_close(table.rows_here() if sharded else table.detach(), data)
        state = optimizer.state[table]["sum"]
        assert state.shape == table.shape[:1] and type(state) is (TableShard if sharded else torch.Tensor)
        torch.testing.assert_close(state.local if sharded else state, sums)


def test_its_state_is_saved_and_loaded():
    def make():
        torch.manual_seed(0)
        table = nn.Parameter(TableShard(torch.randn(3, 2), start=0, rows=3))
        return table, RowWiseAdagrad([{"params": [table], "lr": 0.5}], lr=0.1)

    def step(table, optimizer):
        optimizer.zero_grad()
        table.unwrap("local").square().sum().backward()
        optimizer.step()

    (table, optimizer), (other, loaded) = make(), make()
    step(table, optimizer)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.data.copy_(table.data)
    assert loaded.param_groups[0]["lr"] == 0.5
    step(table, optimizer)
    step(other, loaded)
    assert torch.equal(other.local, table.local)


def test_a_closure_is_called_with_gradients():
    table = nn.Parameter(torch.ones(2, 2))
    optimizer = RowWiseAdagrad([table])

    def closure():
        loss = table.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4 and table.max() < 1


ONES = nn.Parameter(torch.ones(2, 2))
test_refused = raising(
    [
        (lambda: RowWiseAdagrad([nn.Parameter(ONES[0])]), ValueError, r"tables \[V, D\], got .* size \(2,\)"),
        (lambda: RowWiseAdagrad([ONES], lr=-1), ValueError, "lr: expected a number from 0"),
        (lambda: RowWiseAdagrad([ONES], eps=-1), ValueError, "eps: expected a number"),
        (lambda: RowWiseAdagrad([]), ValueError, "empty parameter list"),
    ]
)
