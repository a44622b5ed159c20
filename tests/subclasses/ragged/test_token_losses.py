"""Losses over the tokens of all ranks: gradients and means are those of one process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.fsdp import fully_shard

from subclasses.ragged import JaggedTensor, TokenBatchSampler, mean_over_ranks, weighted_loss
from tests.subclasses.ragged.ranks import in_processes, on_ranks
from tests.tables import giving, raising

ROWS = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (9, 1, 2, 5, 3, 1)]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_sum_of(model, numbers):
    """The sum of the losses of some rows, and how many entries they have."""
    x = JaggedTensor.from_tensors([ROWS[i] for i in numbers])
    targets = (x.values.sum(1) > 0).long()
    return F.cross_entropy(model(x).values, targets, reduction="sum"), x.values.shape[0]


def joint():
    """Model, loss and gradients of one process with all rows."""
    model = make_model()
    loss_sum, tokens = loss_sum_of(model, range(len(ROWS)))
    (loss_sum / tokens).backward()
    return model, loss_sum.detach() / tokens


# ---- ranks -----------------------------------------------------------------------------------------------------


@on_ranks
def check_rank(mesh, folder):
    """What each rank does: the same gradients and means as one process, by DDP, FSDP2 and with accumulation."""
    (own,) = TokenBatchSampler([len(row) for row in ROWS], rows_per_step=6)
    for parallel in (nn.parallel.DistributedDataParallel, functools.partial(fully_shard, mesh=mesh)):
        check_gradients(parallel(make_model()), own)
    check_accumulation(nn.parallel.DistributedDataParallel(make_model()), own)
    check_rank_without_tokens(mesh.get_local_rank(), mesh.size())


def check_gradients(model, own):
    reference, loss = joint()
    loss_sum, tokens = loss_sum_of(model, own)
    weighted = weighted_loss(loss_sum, tokens)
    weighted.backward()
    check_same_gradients(model, reference)
    for mean in (mean_over_ranks(loss_sum, tokens), mean_over_ranks(weighted, 1)):
        assert mean.dtype == torch.float64
        torch.testing.assert_close(mean.float(), loss)


def check_accumulation(model, own):
    """Each row a batch of its own; the tokens are those of the whole step."""
    reference, _ = joint()
    tokens = sum(len(ROWS[i]) for i in own)
    with model.no_sync():
        for i in own[:-1]:
            weighted_loss(loss_sum_of(model, [i])[0], tokens).backward()
        for _ in range(len(own), 6):  # ranks have other numbers of rows, and all call it as often
            weighted_loss(torch.tensor(0.0), tokens)
    weighted_loss(loss_sum_of(model, own[-1:])[0], tokens).backward()
    check_same_gradients(model, reference)


def check_same_gradients(model, reference):
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        gradient = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(gradient, q.grad)


def check_rank_without_tokens(rank, ranks):
    x = torch.tensor(float(rank), requires_grad=True)
    weighted_loss(x * 6, torch.tensor(3 * rank)).backward()
    total = 3 * sum(range(ranks))
    assert float(x.grad) == (6 * ranks / total if total else 6 * ranks)
    assert float(mean_over_ranks(torch.tensor(6.0 * rank), 3 * rank)) == 2 or not total


@pytest.mark.filterwarnings("ignore")
def test_one_rank(tmp_path):
    check_rank(0, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks(ranks, tmp_path):
    in_processes(check_rank, tmp_path, ranks)


# ---- without a group -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [7, torch.tensor(7), torch.tensor(7, dtype=torch.int32)], ids=str)
def test_one_process_without_a_group(dtype, tokens):
    loss_sum = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    loss, mean = weighted_loss(loss_sum, tokens), mean_over_ranks(loss_sum, tokens)
    wide = torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss.detach(), torch.tensor(3 / 7, dtype=wide))
    torch.testing.assert_close(*torch.autograd.grad(loss, loss_sum), torch.tensor(1 / 7, dtype=dtype))
    torch.testing.assert_close(mean, torch.tensor(3 / 7, dtype=torch.float64))
    assert tokens == 7 and not mean.requires_grad


test_no_tokens = giving(
    {
        "a loss": (lambda: weighted_loss(torch.zeros((), requires_grad=True) * 2, 0), 0),
        "a mean": (lambda: mean_over_ranks(torch.zeros(()), 0).isnan(), True),
    }
)
ONE = torch.tensor(1.0)


REFUSED = [
    *(
        ((wrong, 1), TypeError, r': expected the sum.*reduction="sum"')
        for wrong in (ONE.expand(2), ONE.long(), 3.0)
    ),
    *(
        ((ONE, wrong), TypeError, "number of tokens as one integer, got")
        for wrong in (torch.ones(2, dtype=torch.int64), ONE, 1.0, True)
    ),
    ((ONE, -1), ValueError, "at least 0 tokens, got -1"),
]
test_what_is_refused = raising(
    [
        (lambda f=f, given=given: f(*given), error, f"{f.__name__}.*{words}")
        for f in (weighted_loss, mean_over_ranks)
        for given, error, words in REFUSED
    ]
)
