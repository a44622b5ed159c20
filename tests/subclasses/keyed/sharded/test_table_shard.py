"""Rows of a table as a parameter: what optimizers do with them, what needs all ranks, and row-wise Adagrad."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch.distributed.device_mesh")

from subclasses.keyed.sharded import RowWiseAdagrad, TableShard
from subclasses.testing import suite
from tests.tables import giving, raising

ROWS, START = 9, 2


def shard(sparse=False, local=3):
    """A parameter with a gradient."""
    torch.manual_seed(0)
    p = nn.Parameter(TableShard(torch.randn(local, 2), start=START, rows=ROWS))
    ids = torch.tensor([0, 2, 2] if local else [], dtype=torch.int64)
    F.embedding(ids, p.unwrap("local"), sparse=sparse).square().sum().backward()
    return p


test_it_has_the_size_of_the_whole_table = giving(
    {
        "a shard": (lambda: shard().shape, (ROWS, 2)),
        "a gradient": (lambda: shard().grad.shape, (ROWS, 2)),
        "zeros": (lambda: torch.zeros_like(shard()).shape, (ROWS, 2)),
        "the rows here": (lambda: shard().rows_here().shape, (3, 2)),
        "the rows here, without a gradient": (lambda: shard().rows_here().requires_grad, False),
        "the rows here, shared": (
            lambda: (lambda p: p.rows_here().data_ptr() == p.local.data_ptr())(shard()),
            True,
        ),
        "a state of rows": (lambda: shard().like(torch.ones(3)).shape, (ROWS,)),
    }
)


@pytest.mark.parametrize("sparse", [False, True])
def test_states_and_gradients_know_their_rows(sparse):
    p = shard(sparse)
    assert type(p.grad) is TableShard.Cotangent and p.grad.is_sparse is p.grad.local.is_sparse is sparse
    for t in (p.grad, torch.zeros_like(p), p.detach().clone(), p.detach().to(torch.float64)):
        assert isinstance(t, TableShard) and (t.start, t.rows, t.local.shape[0]) == (START, ROWS, 3)


def test_a_coalesced_gradient_is_sparse_in_the_whole_table():
    p = shard(sparse=True)
    found = p.grad.coalesce()
    assert type(found) is torch.Tensor and found.shape == (ROWS, 2) and found.is_coalesced()
    assert found.indices().tolist() == [[START, START + 2]]
    assert torch.equal(found.to_dense()[START : START + 3], p.grad.local.to_dense())
    masked = torch.zeros_like(p).add_(p).sparse_mask(found)
    assert torch.equal(masked.to_dense()[START + 2], p.rows_here()[2])
    before, grad = p.rows_here().clone(), p.grad.local.to_dense()
    for added, alpha, factor in ((found, -0.5, -0.5), (p.grad, 0.75, 0.25)):
        with torch.no_grad():
            assert p.add_(added, alpha=alpha) is p
        torch.testing.assert_close(p.rows_here(), before + factor * grad)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_accumulate_and_are_clipped(sparse):
    p = shard(sparse)
    once = p.grad.local.to_dense().clone()
    F.embedding(torch.tensor([0, 2, 2]), p.unwrap("local"), sparse=sparse).square().sum().backward()
    torch.testing.assert_close(p.grad.local.to_dense(), 2 * once)
    if not sparse:
        torch.nn.utils.clip_grad_value_([p], 0.25)
        assert p.grad.local.abs().max() == 0.25


NORM = "would be that of this rank's rows alone"
REFUSED = {
    "norm": (lambda p: p.grad.norm(), NORM),
    "linalg.norm": (lambda p: torch.linalg.norm(p.grad), NORM),
    "vector_norm": (lambda p: torch.linalg.vector_norm(p), NORM),
    "clip_grad_norm_": (lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=False), NORM),
    "clip_grad_norm_, foreach": (lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=True), NORM),
    "sum": (lambda p: p.sum(), "TableShard"),
    "add": (lambda p: p + 1, "TableShard"),
    "a row": (lambda p: p[0], "TableShard"),
    "t": (lambda p: p.t(), "TableShard"),
    "embedding": (lambda p: F.embedding(torch.tensor([1]), p), "TableShard"),
    "equal": (lambda p: torch.equal(p, p), "TableShard"),
}
test_other_ops_are_refused = raising(
    {name: (lambda call=call: call(shard()), text) for name, (call, text) in REFUSED.items()}
)


# ---- checkpoints -----------------------------------------------------------------------------------------------


def test_what_a_checkpoint_writes_and_reads():
    p = shard()
    (item,) = p.__create_write_items__("name", p)
    assert item.index.fqn == "name" and item.tensor_data.size == (ROWS, 2)
    (chunk,) = p.__create_chunk_list__()
    assert (chunk.offsets, chunk.sizes) == ((START, 0), (3, 2)) and item.tensor_data.chunk == chunk
    assert p.__get_tensor_shard__(item.index).data_ptr() == p.local.data_ptr()


def written(local, rows):
    """How many items and chunks a rank writes."""
    p = TableShard(torch.ones(local, 2), start=0, rows=rows)
    return len(p.__create_write_items__("name", p)), len(p.__create_chunk_list__())


test_a_rank_without_rows_writes_nothing = giving(
    {
        "no rows here": (lambda: written(0, ROWS), (0, 0)),
        "no rows at all": (lambda: written(0, 0), (1, 1)),  # somebody has to write that such a table exists
    }
)


# ---- the conformance kit ---------------------------------------------------------------------------------------


def make(start=2):
    return TableShard(torch.randn(3, 2), start=start, rows=9)


def whole(x):
    """The whole table, with zeros where this rank has no rows."""
    return F.pad(x.unwrap("local"), (0, 0, x.start, x.rows - x.start - x.local.shape[0]))


TestConformance = suite(make, reference=whole, variants=[lambda: make(start=4)])

# ==== row-wise Adagrad ==============================================================================================


def after_a_step(data, sums, grad, lr=0.1, eps=1e-10):
    """The formula, for a table and its sums."""
    sums = sums + (grad * grad).mean(1)
    step = lr * grad / (sums.sqrt() + eps).unsqueeze(1)
    return torch.where(grad.abs().sum(1, keepdim=True) > 0, data - step, data), sums


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_steps_are_those_of_the_formula(sparse, sharded):
    data, sums = torch.randn(5, 3), torch.full((5,), 0.5)
    table = nn.Parameter(TableShard(data.clone(), start=2, rows=9) if sharded else data.clone())
    optimizer = RowWiseAdagrad([table], lr=0.1, initial_accumulator_value=0.5)
    for ids in ([0, 1, 1], [], [1, 4]):
        optimizer.zero_grad()
        local = table.unwrap("local") if sharded else table
        F.embedding(torch.tensor(ids, dtype=torch.int64), local, sparse=sparse).square().sum().backward()
        data, sums = after_a_step(data, sums, (table.grad.local if sharded else table.grad).to_dense())
        optimizer.step()
        state = optimizer.state[table]["sum"]
        assert state.shape == table.shape[:1] and type(state) is (TableShard if sharded else torch.Tensor)
        found = (table.rows_here(), state.local) if sharded else (table.detach(), state)
        torch.testing.assert_close(found, (data, sums))


def test_its_state_is_saved_and_loaded():
    tables = [nn.Parameter(make()) for _ in range(2)]
    optimizers = [RowWiseAdagrad([{"params": [table], "lr": 0.5}], lr=0.1) for table in tables]

    def step(number):
        tables[number].grad = None
        tables[number].unwrap("local").square().sum().backward()
        optimizers[number].step()

    step(0)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    tables[1].data.copy_(tables[0].data)
    assert optimizers[1].param_groups[0]["lr"] == 0.5
    step(0), step(1)
    assert torch.equal(*(table.local for table in tables))


def test_a_closure_is_called_with_gradients():
    table = nn.Parameter(torch.ones(2, 2))

    def closure():
        loss = table.sum()
        loss.backward()
        return loss

    assert RowWiseAdagrad([table]).step(closure).item() == 4 and table.max() < 1


ONES = nn.Parameter(torch.ones(2, 2))
test_what_the_optimizer_refuses = raising(
    [
        (lambda: RowWiseAdagrad([nn.Parameter(ONES[0])]), ValueError, r"tables \[V, D\], got .* size \(2,\)"),
        (lambda: RowWiseAdagrad([ONES], lr=-1), ValueError, "lr: expected a number from 0"),
        (lambda: RowWiseAdagrad([ONES], eps=-1), ValueError, "eps: expected a number"),
        (lambda: RowWiseAdagrad([]), ValueError, "empty parameter list"),
    ]
)
