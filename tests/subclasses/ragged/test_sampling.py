"""Batches for ranks: every row once, as many batches and about as many tokens on each, the same plan everywhere."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from subclasses.ragged import JaggedTensor, TokenBatchSampler

LENGTHS = st.lists(st.integers(0, 20) | st.sampled_from([0, 1]), max_size=40)
RANKS = st.integers(1, 4)
BUDGETS = [{"tokens_per_step": 80}, {"rows_per_step": 7}]
ALONE = {"tokens_per_step": 7, "num_replicas": 1, "rank": 0}
OPTIONS = st.fixed_dictionaries(
    {"seed": st.integers(0, 3), "shuffle": st.booleans(), "drop_last": st.booleans()}
)


def on_all(lengths, ranks, **options):
    """The sampler of each rank."""
    return [TokenBatchSampler(lengths, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def steps_of(samplers):
    """For each step the rows of each rank; all ranks have as many steps."""
    return list(zip(*samplers, strict=True))


# ---- the plan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@given(LENGTHS, RANKS, OPTIONS)
def test_every_row_once_and_about_as_many_tokens_on_each_rank(budget, lengths, ranks, options):
    """As many batches, and tokens that differ by less than one row."""
    lengths = lengths if len(lengths) >= ranks else []
    samplers = on_all(lengths, ranks, **budget, **options)
    steps, counts = steps_of(samplers), samplers[-1].tokens_per_rank()
    assert {len(sampler) for sampler in samplers} == {len(steps)}
    rows = sorted(row for step in steps for batch in step for row in batch)
    assert len(set(rows)) == len(rows) and (options["drop_last"] or rows == list(range(len(lengths))))
    assert counts.dtype == torch.int64 and counts.shape == (len(steps), ranks)
    for step, tokens in zip(steps, counts.tolist(), strict=True):
        assert all(step), "no batch is empty"
        assert tokens == [sum(lengths[row] for row in batch) for batch in step]
        fullest = step[tokens.index(max(tokens))]
        assert max(tokens) - min(tokens) <= min(lengths[row] for row in fullest)
        used = sum(tokens) if "tokens_per_step" in budget else sum(map(len, step))
        assert not options["drop_last"] or used <= next(iter(budget.values()))
        assert "rows_per_step" in budget or max(tokens) <= 2 * (80 // ranks)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@given(LENGTHS.filter(lambda lengths: len(lengths) > 3), st.integers(0, 3))
def test_steps_do_not_depend_on_the_number_of_ranks(budget, lengths, seed):
    plans = []
    for ranks in range(1, 5):
        steps = steps_of(on_all(lengths, ranks, **budget, seed=seed, drop_last=True))
        plans.append([sorted(itertools.chain(*step)) for step in steps])
    assert all(plan == plans[0] for plan in plans)


def test_long_steps_are_balanced_within_a_token():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (5000,), generator=generator)
    counts = TokenBatchSampler(lengths, tokens_per_step=8192, num_replicas=4, rank=0).tokens_per_rank()
    spread = counts.amax(1) - counts.amin(1)
    assert counts.sum() == lengths.sum() and spread[:-1].float().mean() < 8


def test_a_last_step_with_too_few_rows_takes_some_of_the_step_before():
    taken = steps_of(on_all([5] * 7, 3, rows_per_step=6, shuffle=False))
    assert [sorted(itertools.chain(*step)) for step in taken] == [[0, 1, 2, 3], [4, 5, 6]]
    joined = steps_of(on_all([5] * 4, 3, tokens_per_step=15, shuffle=False))
    assert [sorted(itertools.chain(*step)) for step in joined] == [[0, 1, 2, 3]]
    assert steps_of(on_all([5] * 4, 3, tokens_per_step=15, shuffle=False, drop_last=True)) == [
        ([0], [1], [2])
    ]


# ---- epochs --------------------------------------------------------------------------------------------------


def test_epochs_differ_in_order_and_repeat():
    sampler = TokenBatchSampler(range(1, 30), tokens_per_step=60)
    epochs = [list(sampler), list(sampler)]
    for epoch in (1, 0):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert epochs[0] == epochs[1] == epochs[3] != epochs[2], "without set_epoch it is the same epoch"
    assert list(TokenBatchSampler(range(1, 30), tokens_per_step=60, seed=7)) not in epochs
    other = TokenBatchSampler(range(1, 30), tokens_per_step=60, shuffle=False)
    assert next(iter(other)) == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], "longest first"


def test_an_epoch_may_begin_at_a_later_step():
    sampler = TokenBatchSampler(range(1, 30), tokens_per_step=60, num_replicas=2, rank=1)
    sampler.set_epoch(3)
    whole, counts = list(sampler), sampler.tokens_per_rank()
    for start in (0, 2, len(whole)):
        sampler.set_epoch(3, start=start)
        assert list(sampler) == whole[start:] and len(sampler) == len(whole) - start
        assert torch.equal(sampler.tokens_per_rank(), counts[start:])
    for wrong in (-1, len(whole) + 1):
        with pytest.raises(ValueError, match=rf"start from 0 to {len(whole)}.*got {wrong}"):
            sampler.set_epoch(3, start=wrong)
    with pytest.raises(ValueError, match="epoch of at least 0, got -1"):
        sampler.set_epoch(-1)


# ---- with a data loader and a group --------------------------------------------------------------------------


def test_as_a_batch_sampler():
    rows = [torch.arange(n) for n in (3, 1, 4, 0, 5)]
    sampler = TokenBatchSampler([len(row) for row in rows], tokens_per_step=8)
    loader = DataLoader(rows, batch_sampler=sampler, collate_fn=JaggedTensor.from_tensors)
    batches = list(loader)
    assert len(loader) == len(batches) == len(sampler)
    assert all(batch.values.numel() <= 8 for batch in batches)
    assert sum(batch.values.numel() for batch in batches) == 13


@pytest.mark.filterwarnings("ignore")
def test_ranks_come_from_the_default_group():
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        sampler = TokenBatchSampler([1] * 9, rows_per_step=3)
    finally:
        dist.destroy_process_group()
    assert (sampler.num_replicas, sampler.rank) == (3, 2)
    assert list(sampler) == list(TokenBatchSampler([1] * 9, rows_per_step=3, num_replicas=3, rank=2))
    alone = TokenBatchSampler([1] * 9, rows_per_step=3)
    assert (alone.num_replicas, alone.rank) == (1, 0)


# ---- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_as_a_tensor(dtype):
    lengths = torch.tensor([4, 0, 1, 7], dtype=dtype)
    assert list(TokenBatchSampler(lengths, **ALONE)) == list(TokenBatchSampler(lengths.tolist(), **ALONE))


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("lengths", [[], torch.zeros(0)])
def test_no_rows_are_no_steps(lengths, budget):
    sampler = TokenBatchSampler(lengths, num_replicas=2, rank=1, **budget)
    assert list(sampler) == [] and len(sampler) == 0 and sampler.tokens_per_rank().shape == (0, 2)


@pytest.mark.parametrize(
    ("lengths", "options", "error", "said"),
    [
        ([1.5], {"tokens_per_step": 4}, TypeError, r"integers, got torch.float32 \(1,\)"),
        ([True], {"tokens_per_step": 4}, TypeError, "torch.bool"),
        (torch.ones(1, 1, dtype=torch.int64), {"tokens_per_step": 4}, TypeError, r"\(1, 1\)"),
        ([1, -2], {"tokens_per_step": 4}, ValueError, "at least 0, got -2"),
        ([1], {}, ValueError, "tokens_per_step or rows_per_step"),
        ([1], {"tokens_per_step": 1, "rows_per_step": 1}, ValueError, "tokens_per_step or rows_per_step"),
        (
            [1, 5],
            {"tokens_per_step": 8, "num_replicas": 2, "rank": 0},
            ValueError,
            "at most 4.*row of 5.*=10",
        ),
        ([], {"tokens_per_step": 0}, ValueError, "tokens_per_step=0"),
        ([1, 1], {"rows_per_step": 1, "num_replicas": 2, "rank": 0}, ValueError, "at least 2.*got 1"),
        ([1], {"rows_per_step": 2, "num_replicas": 2, "rank": 0}, ValueError, "2 ranks, got 1 row"),
        ([1], {"rows_per_step": 1, "num_replicas": 2}, ValueError, "or neither of them.*rank=None"),
        ([1], {"rows_per_step": 1, "rank": 0}, ValueError, "num_replicas=None"),
        ([1], {"rows_per_step": 2, "num_replicas": 2, "rank": 2}, ValueError, "rank=2 and num_replicas=2"),
    ],
)
def test_what_is_refused(lengths, options, error, said):
    with pytest.raises(error, match=said):
        TokenBatchSampler(lengths, **options)
