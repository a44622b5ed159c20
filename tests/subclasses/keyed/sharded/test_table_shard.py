"""Rows of a table as a parameter: what optimizers do with them, and what needs all ranks."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch.distributed.device_mesh")

from subclasses import DispatchError
from subclasses.keyed.sharded import TableShard

ROWS, START = 9, 2


def shard(sparse=False, local=3):
    """A parameter with a gradient."""
    torch.manual_seed(0)
    p = nn.Parameter(TableShard(torch.randn(local, 2), start=START, rows=ROWS))
    ids = torch.tensor([0, 2, 2] if local else [], dtype=torch.int64)
    F.embedding(ids, p.unwrap("local"), sparse=sparse).square().sum().backward()
    return p


def test_it_has_the_size_of_the_whole_table():
    p = shard()
    assert p.shape == p.grad.shape == torch.zeros_like(p).shape == (ROWS, 2)
    assert p.rows_here().shape == (3, 2) and not p.rows_here().requires_grad
    assert p.like(torch.ones(3)).shape == (ROWS,)
    p.rows_here().fill_(3)
    assert p.local.sum() == 18


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
    expected = p.rows_here() - 0.5 * p.grad.local.to_dense()
    with torch.no_grad():
        assert p.add_(found, alpha=-0.5) is p
        torch.testing.assert_close(p.rows_here(), expected)
        p.add_(p.grad, alpha=0.5)
    torch.testing.assert_close(p.rows_here(), expected + 0.5 * p.grad.local.to_dense())


def test_gradients_accumulate_and_are_scaled():
    for sparse in (False, True):
        p = shard(sparse)
        once = p.grad.local.to_dense().clone()
        F.embedding(torch.tensor([0, 2, 2]), p.unwrap("local"), sparse=sparse).square().sum().backward()
        torch.testing.assert_close(p.grad.local.to_dense(), 2 * once)
    p = shard()
    torch.nn.utils.clip_grad_value_([p], 0.25)
    assert p.grad.local.abs().max() == 0.25


@pytest.mark.parametrize("foreach", [True, False])
def test_norms_are_refused(foreach):
    p = shard()
    with pytest.raises(DispatchError, match="would be that of this rank's rows alone"):
        torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=foreach)


@pytest.mark.parametrize(
    "op",
    [
        lambda p: p.grad.norm(),
        lambda p: torch.linalg.norm(p.grad),
        lambda p: torch.linalg.vector_norm(p),
        lambda p: p.sum(),
        lambda p: p + 1,
        lambda p: p[0],
        lambda p: p.t(),
        lambda p: F.embedding(torch.tensor([1]), p),
        lambda p: torch.equal(p, p),
    ],
)
def test_other_ops_are_refused(op):
    with pytest.raises(DispatchError):
        op(shard())


def test_it_is_pickled_with_its_rows():
    file = io.BytesIO()
    torch.save(shard().detach(), file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert (found.start, found.rows) == (START, ROWS) and torch.equal(found.local, shard().local)


# ---- checkpoints -----------------------------------------------------------------------------------------------


def test_what_a_checkpoint_writes_and_reads():
    p = shard()
    (item,) = p.__create_write_items__("name", p)
    assert item.index.fqn == "name" and item.tensor_data.size == (ROWS, 2)
    (chunk,) = p.__create_chunk_list__()
    assert (chunk.offsets, chunk.sizes) == ((START, 0), (3, 2)) and item.tensor_data.chunk == chunk
    assert p.__get_tensor_shard__(item.index).data_ptr() == p.local.data_ptr()


def test_a_rank_without_rows_writes_nothing():
    p = shard(local=0)
    assert p.__create_write_items__("name", p) == p.__create_chunk_list__() == []
    empty = TableShard(
        torch.ones(0, 2), start=0, rows=0
    )  # of such a table somebody has to write that it exists
    assert len(empty.__create_write_items__("name", empty)) == len(empty.__create_chunk_list__()) == 1
