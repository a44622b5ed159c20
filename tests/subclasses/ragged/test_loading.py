"""Batches: from loaders, through queues, by the sampler for ranks and the collator; losses over the tokens of ranks."""

import functools
import itertools
import pickle
import subprocess
import sys
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from subclasses.errors import DispatchError
from subclasses.ragged import (
    JaggedTensor,
    PaddedTensor,
    TokenBatchSampler,
    mean_over_ranks,
    weighted_loss,
)
from subclasses.ragged.hugging_face import RaggedCollator, patches
from tests.subclasses.ragged.judge import numbers_of
from tests.subclasses.ragged.ranks import in_processes, on_ranks
from tests.tables import giving, raising

COLLATE = {
    "jagged": JaggedTensor.from_tensors,
    "padded": functools.partial(PaddedTensor.from_tensors, multiple=4),
}
PARTS = {
    "jagged": lambda x: (x.values, x.offsets),
    "padded": lambda x: (x.padded, x.lengths),
}
START = ["fork", "spawn"]
kinds = pytest.mark.parametrize("kind", COLLATE)
# The warning of newer Pythons for any fork beside another thread.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

ROWS = [torch.arange(n) for n in (3, 1, 4, 0, 5)]

# ---- data loaders ----------------------------------------------------------------------------------------------


def check_batches(batches):
    """Batches of two rows each, in order."""
    torch.testing.assert_close([row for batch in batches for row in batch.to_tensors()], ROWS)
    assert [len(batch) for batch in batches] == [2, 2, 1]


WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}


@kinds
@pytest.mark.sweep(12)
@pytest.mark.parametrize("options", [{}, WORKERS, WORKERS | {"multiprocessing_context": "spawn"}], ids=str)
@pytest.mark.parametrize("of_examples", [False, True], ids=["from_tensors", "RaggedCollator"])
def test_collating(kind, options, of_examples):
    examples = [{"input_ids": row, "labels": row} for row in ROWS]
    data, collate = (examples, RaggedCollator(layout=kind)) if of_examples else (ROWS, COLLATE[kind])
    batches = list(DataLoader(data, batch_size=2, collate_fn=collate, **options))
    check_batches([batch["input_ids"] if of_examples else batch for batch in batches])
    assert not of_examples or all(torch.equal(b["labels"].mask(), b["input_ids"].mask()) for b in batches)


@kinds
@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches(kind, workers):
    loader = DataLoader(ROWS, batch_size=2, collate_fn=COLLATE[kind], num_workers=workers, pin_memory=True)
    batches = list(loader)
    check_batches(batches)
    for batch in batches:
        assert batch.is_pinned() and all(part.is_pinned() for part in PARTS[kind](batch))
        assert all(part.is_cuda for part in PARTS[kind](batch.to("cuda", non_blocking=True)))
    check_batches([batch.to("cuda", non_blocking=True).cpu() for batch in batches])


@kinds
def test_a_batch_as_a_data_set(kind):
    x = COLLATE[kind](ROWS)
    torch.testing.assert_close([row for (row,) in TensorDataset(x)], ROWS)
    loader = DataLoader(x, batch_size=2, collate_fn=COLLATE[kind])
    check_batches(list(loader))


# ---- processes -------------------------------------------------------------------------------------------------


def double_in_place(arrived, done, kind, received):
    """Another process doubles a batch, sends one of its own, and stays until it was received."""
    arrived.get().mul_(2)
    done.put(COLLATE[kind](ROWS))
    received.wait(60)


@kinds
@pytest.mark.sweep(8)
@pytest.mark.parametrize("start", START)
def test_a_queue_shares_memory_and_brings_batches(kind, start):
    context = mp.get_context(start)
    arrived, done, received = context.Queue(), context.Queue(), context.Event()
    x = COLLATE[kind](ROWS)
    assert x.share_memory_() is x and x.is_shared() and all(part.is_shared() for part in PARTS[kind](x))
    process = context.Process(target=double_in_place, args=(arrived, done, kind, received))
    process.start()
    arrived.put(x)
    brought = done.get(timeout=60)
    torch.testing.assert_close((brought + 1).to_tensors(), [row + 1 for row in ROWS])
    received.set()
    process.join()
    torch.testing.assert_close(x.to_tensors(), [row * 2 for row in ROWS])


# ==== the sampler ===================================================================================================

LENGTHS = st.lists(st.integers(0, 20) | st.sampled_from([0, 1]), max_size=40)
RANKS = st.integers(1, 4)
BUDGETS = [{"tokens_per_step": 80}, {"rows_per_step": 7}, {"tokens_per_step": 80, "rows_per_rank": 3}]
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
    # A multiple of the ranks has a row for each rank in each step.
    lengths = lengths[
        : len(lengths) // (n := ranks if "rows_per_rank" in budget or len(lengths) < ranks else 1) * n
    ]
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
        fits = max(tokens) <= 80 // ranks and max(map(len, step)) <= 3
        assert fits or "rows_per_rank" not in budget


@pytest.mark.parametrize("budget", BUDGETS[:2], ids=str)
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


def rows_of_steps(*arguments, **options):
    """The rows of each step, of all ranks together."""
    return [sorted(itertools.chain(*step)) for step in steps_of(on_all(*arguments, shuffle=False, **options))]


test_a_last_step_with_too_few_rows_takes_some_of_the_step_before = giving(
    {
        "some": (lambda: rows_of_steps([5] * 7, 3, rows_per_step=6), [[0, 1, 2, 3], [4, 5, 6]]),
        "joined": (lambda: rows_of_steps([5] * 4, 3, tokens_per_step=15), [[0, 1, 2, 3]]),
        "dropped": (
            lambda: steps_of(on_all([5] * 4, 3, tokens_per_step=15, shuffle=False, drop_last=True)),
            [([0], [1], [2])],
        ),
    }
)


# ---- epochs --------------------------------------------------------------------------------------------------


def test_epochs_differ_in_order_and_repeat():
    sampler, epochs = TokenBatchSampler(range(1, 30), tokens_per_step=60), []
    for epoch in (None, None, 1, 0):
        if epoch is not None:
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


# ---- with a data loader and a group --------------------------------------------------------------------------


def test_as_a_batch_sampler():
    sampler = TokenBatchSampler([len(row) for row in TOKENS], tokens_per_step=5, shuffle=False)
    loader = DataLoader(examples(), batch_sampler=sampler, collate_fn=RaggedCollator())
    assert len(loader) == len(sampler) == 2
    assert [numbers_of(batch["input_ids"]) for batch in loader] == [TOKENS[:2], TOKENS[2:]]


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


def steps_and_counts(*arguments, **options):
    sampler = TokenBatchSampler(*arguments, num_replicas=2, rank=1, **options)
    return list(sampler), len(sampler), sampler.tokens_per_rank().shape


test_lengths = giving(
    {
        **{
            f"none, {lengths}, {budget}": (
                lambda lengths=lengths, budget=budget: steps_and_counts(lengths, **budget),
                ([], 0, (0, 2)),
            )
            for lengths in ([], torch.zeros(0))
            for budget in BUDGETS
        },
        **{
            str(dtype): (
                lambda dtype=dtype: list(TokenBatchSampler(torch.tensor([4, 0, 1, 7], dtype=dtype), **ALONE)),
                list(TokenBatchSampler([4, 0, 1, 7], **ALONE)),
            )
            for dtype in (torch.int32, torch.int64)
        },
    }
)


REFUSED = [
    ([1.5], {"tokens_per_step": 4}, TypeError, r"integers, got torch.float32 \(1,\)"),
    ([True], {"tokens_per_step": 4}, TypeError, "torch.bool"),
    (torch.ones(1, 1, dtype=torch.int64), {"tokens_per_step": 4}, TypeError, r"\(1, 1\)"),
    ([1, -2], {"tokens_per_step": 4}, ValueError, "at least 0, got -2"),
    ([1], {}, ValueError, "tokens_per_step or rows_per_step"),
    ([1], {"tokens_per_step": 1, "rows_per_step": 1}, ValueError, "tokens_per_step or rows_per_step"),
    ([1], {"rows_per_step": 1, "rows_per_rank": 1}, ValueError, "rows_per_rank of at least 1 beside tokens"),
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
    (
        [9] * 4,
        {"tokens_per_step": 30, "rows_per_rank": 1, "num_replicas": 3, "rank": 0},
        ValueError,
        "each of 3 ranks.*got 1 rows in the first step; use fewer ranks, or drop_last=True",
    ),
    ([1], {"rows_per_step": 1, "rank": 0}, ValueError, "num_replicas=None"),
    ([1], {"rows_per_step": 2, "num_replicas": 2, "rank": 2}, ValueError, "rank=2 and num_replicas=2"),
]
STEPS = TokenBatchSampler([5] * 7, rows_per_step=1)
test_what_is_refused = raising(
    [
        *(
            (
                lambda lengths=lengths, options=options: list(TokenBatchSampler(lengths, **options)),
                error,
                said,
            )
            for lengths, options, error, said in REFUSED
        ),
        (lambda: STEPS.set_epoch(3, start=-1), ValueError, "start from 0 to 7.*got -1"),
        (lambda: STEPS.set_epoch(3, start=8), ValueError, "start from 0 to 7.*got 8"),
        (lambda: STEPS.set_epoch(-1), ValueError, "epoch of at least 0, got -1"),
    ]
)


# ==== the collator ==================================================================================================

COLLATORS = {
    "jagged": RaggedCollator(),
    "padded": RaggedCollator(layout="padded"),
    "multiple": RaggedCollator(layout="padded", multiple=4),
    "buckets": RaggedCollator(layout="padded", buckets="powers"),
}
KINDS = [(collator, padded) for collator in COLLATORS for padded in ("not", "left", "right")]
TOKENS = [[5, 6, 7], [8], [9, 5, 6, 7, 8]]


def pad(row, fill, padded):
    spare = [fill] * (0 if padded == "not" else 3)
    return spare + row if padded == "left" else row + spare


def examples(padded="not"):
    """Examples of `TOKENS` with labels and token types, and three tokens of padding."""
    return [
        {
            "input_ids": pad(row, 0, padded),
            "labels": pad([-100, *row[1:]], -100, padded),
            "token_type_ids": pad([n % 2 for n in row], 0, padded),
            "attention_mask": pad([1] * len(row), 0, padded),
        }
        for row in TOKENS
    ]


def columns_of(batch):
    """The numbers of each column."""
    return {name: numbers_of(x) for name, x in batch.items()}


# ---- batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "padded"), KINDS)
def test_a_batch_has_the_tokens_that_exist(kind, padded):
    batch = COLLATORS[kind](examples(padded))
    width = {"multiple": 8, "buckets": 8}.get(kind, 5)
    cls = JaggedTensor if kind == "jagged" else PaddedTensor
    assert {(type(x), x.dtype, tuple(x.shape)) for x in batch.values()} == {(cls, torch.int64, (3, width))}
    assert list(columns_of(batch).items()) == [
        ("input_ids", TOKENS),
        ("labels", [[-100, *row[1:]] for row in TOKENS]),
        ("token_type_ids", [[n % 2 for n in row] for row in TOKENS]),
    ]


SHORT = [
    {"input_ids": [], "labels": []},
    {"input_ids": [5, 6], "labels": [5, 6], "attention_mask": [0, 0]},
    {"input_ids": [5], "labels": [5], "position_ids": [0]},
]
SOME_LABELS = [
    {"input_ids": TOKENS[0]},
    {"input_ids": TOKENS[1], "labels": [-100]},
    {"input_ids": TOKENS[2], "attention_mask": [0, 1, 1, 1, 1]},
]
test_columns = giving(
    {
        **{
            f"of {name}": (
                lambda make=make: columns_of(
                    RaggedCollator()([UserDict({"input_ids": make(row)}) for row in TOKENS])
                ),
                {"input_ids": TOKENS},
            )
            for name, make in {
                "lists": list,
                "tensors": torch.tensor,
                "arrays": np.array,
                "int32": lambda row: torch.tensor(row, dtype=torch.int32),
            }.items()
        },
        "labels that are not given are the tokens": (
            lambda: columns_of(RaggedCollator(labels="input_ids")(SOME_LABELS)),
            {
                "input_ids": [*TOKENS[:2], TOKENS[2][1:]],
                "labels": [TOKENS[0], [-100], TOKENS[2][1:]],
            },
        ),
        **{
            f"empty rows among others, {kind}": (
                lambda kind=kind: columns_of(COLLATORS[kind](SHORT)),
                {"input_ids": [[], [], [5]], "labels": [[], [], [5]]},
            )
            for kind in COLLATORS
        },
        "tokens share no memory with labels that are made of them": (
            lambda: (lambda batch: (batch["labels"].values.zero_(), numbers_of(batch["input_ids"]))[1])(
                RaggedCollator(labels="input_ids")(SOME_LABELS)
            ),
            [*TOKENS[:2], TOKENS[2][1:]],
        ),
        "positions that count from 0 are left to the model": (
            lambda: list(
                RaggedCollator()(
                    [{"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1], "position_ids": [1, 0, 1]}]
                )
            ),
            ["input_ids"],
        ),
        **{
            f"{kind}, pickled": (lambda each=each: pickle.loads(pickle.dumps(each)) == each, True)
            for kind, each in COLLATORS.items()
        },
    }
)


@pytest.mark.parametrize("count", [1, 3])
def test_examples_are_left_as_they_are(count):
    given, want = (
        [{key: torch.tensor(row) for key, row in example.items()} for example in examples("left")]
        for _ in range(2)
    )
    for x in RaggedCollator()(given[:count]).values():
        x.values.zero_()
    torch.testing.assert_close(given, want)


def test_nothing_of_hugging_face_is_imported():
    code = "import sys, subclasses.ragged, desugar; print({'transformers', 'accelerate'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- refused rows ----------------------------------------------------------------------------------------------

GOOD = {"input_ids": [5, 6, 7]}
BAD = {
    "no mapping": ([5, 6], TypeError, "expected a mapping with 'input_ids', got list; tokenize"),
    "text": ({"text": "a"}, ValueError, r"expected 'input_ids', got the columns \['text'\]; tokenize it"),
    "unknown": (GOOD | {"length": 3}, ValueError, "got 'length'; remove the column"),
    "labels": (
        GOOD | {"labels": [5, 6]},
        ValueError,
        "expected 'labels' to have a value for each of the 3 input_ids, got 2; pad or cut both alike",
    ),
    "label": (GOOD | {"labels": 1}, ValueError, "expected a label for each token, got the label 1 for"),
    "mask": (GOOD | {"attention_mask": [1, 1]}, ValueError, "expected 'attention_mask' .* got 2"),
    "hole": (
        GOOD | {"attention_mask": [1, 0, 1]},
        ValueError,
        r"zeros to the left or to the right, got \[1, 0, 1\]; remove tokens",
    ),
    "weights": (GOOD | {"attention_mask": [1, 2, 0]}, ValueError, "expected an attention_mask of ones"),
    "two dims": (
        {"input_ids": torch.tensor([[5, 6]])},
        ValueError,
        r"got the shape \(1, 2\); pass one row in each example",
    ),
    "floats": ({"input_ids": [5.0]}, TypeError, "'input_ids' as integers, got torch.float32; convert"),
    "strings": ({"input_ids": ["a"]}, TypeError, "expected 'input_ids' as a list or tensor of integers"),
    "none": ({"input_ids": None}, TypeError, "expected 'input_ids' as a list or tensor of integers"),
    "packed": (
        GOOD | {"position_ids": [0, 1, 0]},
        ValueError,
        r"position_ids that count from 0, .*got \[0, 1, 0\]; pass each document",
    ),
}


test_a_bad_example_is_named = raising(
    {
        name: (
            lambda example=example: RaggedCollator()([GOOD, GOOD, example]),
            error,
            f"^RaggedCollator: example 2: .*{message}",
        )
        for name, (example, error, message) in BAD.items()
    }
)


test_columns_that_only_some_examples_have = raising(
    {
        f"{column}, {order}": (
            lambda column=column, order=order: RaggedCollator()(
                [GOOD if n == 0 else GOOD | {column: [1, 2, 3]} for n in order]
            ),
            ValueError,
            f"example {order.index(0)} has no '{column}', which other examples of the batch have; give all{advice}",
        )
        for order in itertools.permutations(range(3))
        for column, advice in {"labels": r'.*or labels="input_ids"', "token_type_ids": ""}.items()
    }
)


MISSING = r"in at least one of the 2 examples, got none; remove empty examples"
NEITHER = 'expected neither multiple nor buckets; pass layout="padded"'
EMPTY = [{"input_ids": []}, {"input_ids": [5], "attention_mask": [0]}]
test_what_collators_refuse = raising(
    {
        "no example": (lambda: RaggedCollator()([]), ValueError, "at least one example, got an empty batch"),
        "no token": (lambda: RaggedCollator()(EMPTY), ValueError, MISSING),
        "a padded target": (
            lambda: RaggedCollator(decoder_start=0)([GOOD | {"labels": [5, -100]}]),
            ValueError,
            r"example 0: expected labels that are tokens, .*got \[5, -100\]",
        ),
        "beyond the buckets": (
            lambda: RaggedCollator(layout="padded", buckets=[2])([GOOD]),
            ValueError,
            "bucket",
        ),
        "layout": (
            lambda: RaggedCollator(layout="dense"),
            ValueError,
            r"expected layout as one of \['jagged', 'padded'\], got 'dense'",
        ),
        "labels": (
            lambda: RaggedCollator(labels="none"),
            ValueError,
            r"expected labels as one of \['given', 'input_ids'\], got 'none'",
        ),
        "multiple": (lambda: RaggedCollator(multiple=8), ValueError, NEITHER),
        "buckets": (lambda: RaggedCollator(buckets=[8]), ValueError, NEITHER),
    }
)


# ---- patches ---------------------------------------------------------------------------------------------------


def patched(patch, name, **methods):
    """A class of this name that is patched here alone."""
    cls = type(name, (), methods)
    patch(SimpleNamespace(**{name: cls}))
    return cls()


@pytest.mark.parametrize("kind", COLLATORS)
def test_results_are_padded_before_they_are_gathered(kind):
    batch, plain = COLLATORS[kind](examples()), torch.ones(2)
    as_it_is = {"pad_across_processes": lambda self, tensor, dim=0, pad_index=0, pad_first=False: tensor}
    pad = patched(patches._pad_ragged_results, "Accelerator", **as_it_is).pad_across_processes
    first, (same,), last = pad((batch, [plain], batch["labels"]), dim=1, pad_index=-100)
    assert same is plain and type(first) is dict and pad(plain, pad_first=True) is plain
    for x, want in ((first["input_ids"], batch["input_ids"]), (last, batch["labels"])):
        assert type(x) is torch.Tensor and torch.equal(x, want.to_dense(-100))
    with pytest.raises(DispatchError, match="expected pad_first=False"):
        pad(batch, dim=1, pad_first=True)


@pytest.mark.parametrize("kind", COLLATORS)
def test_label_smoothing_counts_labels(kind):
    methods = {
        "__call__": lambda self, output, labels, shift_labels=False, num_items_in_batch=None: (
            num_items_in_batch
        )
    }
    smoother = patched(patches._count_labels, "LabelSmoother", ignore_index=-100, **methods)
    labels = COLLATORS[kind](examples())["labels"]
    assert smoother(None, labels, True) == smoother(None, labels) == 6
    assert smoother(None, labels, True, 3) == smoother(None, labels, num_items_in_batch=3) == 3
    assert smoother(None, labels.to_dense(-100)) is None


# ==== losses over the tokens of all ranks ===========================================================================

WEIGHED = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (9, 1, 2, 5, 3, 1)]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_sum_of(model, numbers):
    """The sum of the losses of some rows, and how many entries they have."""
    x = JaggedTensor.from_tensors([WEIGHED[i] for i in numbers])
    targets = (x.values.sum(1) > 0).long()
    return F.cross_entropy(model(x).values, targets, reduction="sum"), x.values.shape[0]


def joint():
    """Model, loss and gradients of one process with all rows."""
    model = make_model()
    loss_sum, tokens = loss_sum_of(model, range(len(WEIGHED)))
    (loss_sum / tokens).backward()
    return model, loss_sum.detach() / tokens


# ---- ranks -----------------------------------------------------------------------------------------------------


@on_ranks
def check_rank(mesh, folder):
    """Each rank computes the gradients and means of one process, by DDP, FSDP2 and with accumulation."""
    (own,) = TokenBatchSampler([len(row) for row in WEIGHED], rows_per_step=6)
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
    """Each row is a batch of its own; the loss is divided by the number of tokens in the whole step."""
    reference, _ = joint()
    tokens = sum(len(WEIGHED[i]) for i in own)
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


WRONG = [
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
test_sums_and_counts_that_are_refused = raising(
    [
        (lambda f=f, given=given: f(*given), error, f"{f.__name__}.*{words}")
        for f in (weighted_loss, mean_over_ranks)
        for given, error, words in WRONG
    ]
)
