"""The collator for transformers, without transformers; `tests/models/test_trainer.py` trains with it."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from subclasses.errors import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor, TokenBatchSampler, hugging_face
from subclasses.ragged.hugging_face import RaggedCollator
from tests.subclasses.ragged.judge import numbers_of, raising

COLLATORS = {
    "jagged": RaggedCollator(),
    "padded": RaggedCollator(layout="padded"),
    "multiple": RaggedCollator(layout="padded", multiple=4),
    "buckets": RaggedCollator(layout="padded", buckets="powers"),
}
KINDS = [(collator, padded) for collator in COLLATORS for padded in ("not", "left", "right")]
ROWS = [[5, 6, 7], [8], [9, 5, 6, 7, 8]]


def examples(padded="not"):
    """Examples of `ROWS` with labels and token types, and three tokens of padding."""
    spare = 0 if padded == "not" else 3

    def pad(row, fill):
        return [fill] * spare + row if padded == "left" else row + [fill] * spare

    return [
        {
            "input_ids": pad(row, 0),
            "labels": pad([-100, *row[1:]], -100),
            "token_type_ids": pad([n % 2 for n in row], 0),
            "attention_mask": pad([1] * len(row), 0),
        }
        for row in ROWS
    ]


# ---- batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "padded"), KINDS)
def test_a_batch_has_the_tokens_that_exist(kind, padded):
    batch = COLLATORS[kind](examples(padded))
    assert list(batch) == ["input_ids", "labels", "token_type_ids"]
    assert {type(x) for x in batch.values()} == {JaggedTensor if kind == "jagged" else PaddedTensor}
    assert {x.dtype for x in batch.values()} == {torch.int64}
    assert numbers_of(batch["input_ids"]) == ROWS
    assert numbers_of(batch["labels"]) == [[-100, *row[1:]] for row in ROWS]
    assert numbers_of(batch["token_type_ids"]) == [[n % 2 for n in row] for row in ROWS]
    width = {"multiple": 8, "buckets": 8}.get(kind, 5)
    assert {tuple(x.shape) for x in batch.values()} == {(3, width)}


@pytest.mark.parametrize(
    "made",
    [list, torch.tensor, np.array, lambda row: torch.tensor(row, dtype=torch.int32)],
    ids=["list", "tensor", "numpy", "int32"],
)
def test_columns_are_lists_arrays_or_tensors(made):
    batch = RaggedCollator()([UserDict({"input_ids": made(row)}) for row in ROWS])
    assert list(batch) == ["input_ids"] and numbers_of(batch["input_ids"]) == ROWS
    assert batch["input_ids"].dtype == torch.int64


def test_labels_that_are_not_given_are_the_tokens():
    given = [{"input_ids": row} for row in ROWS]
    given[1]["labels"], given[2]["attention_mask"] = [-100], [0, 1, 1, 1, 1]
    batch = RaggedCollator(labels="input_ids")(given)
    assert numbers_of(batch["labels"]) == [ROWS[0], [-100], ROWS[2][1:]]
    batch["labels"].values.zero_()
    assert numbers_of(batch["input_ids"]) == [*ROWS[:2], ROWS[2][1:]], (
        "the labels share no memory with the tokens"
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


@pytest.mark.parametrize("kind", COLLATORS)
def test_empty_rows_among_others(kind):
    batch = COLLATORS[kind](
        [
            {"input_ids": [], "labels": []},
            {"input_ids": [5, 6], "labels": [5, 6], "attention_mask": [0, 0]},
            {"input_ids": [5], "labels": [5], "position_ids": [0]},
        ]
    )
    assert numbers_of(batch["input_ids"]) == numbers_of(batch["labels"]) == [[], [], [5]]


def test_positions_that_count_from_0_are_left_to_the_model():
    example = {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1], "position_ids": [1, 0, 1]}
    assert list(RaggedCollator()([example])) == ["input_ids"]


# ---- loaders ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.sweep(2)
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["jagged", "padded"])
def test_workers(kind, start):
    loader = DataLoader(
        examples("left"),
        batch_size=2,
        collate_fn=COLLATORS[kind],
        num_workers=2,
        multiprocessing_context=start,
    )
    batches = list(loader)
    assert [row for batch in batches for row in numbers_of(batch["input_ids"])] == ROWS
    assert all(torch.equal(b["labels"].mask(), b["input_ids"].mask()) for b in batches)


def test_batches_of_a_budget_of_tokens():
    sampler = TokenBatchSampler([len(row) for row in ROWS], tokens_per_step=5, shuffle=False)
    loader = DataLoader(examples(), batch_sampler=sampler, collate_fn=RaggedCollator())
    assert [numbers_of(batch["input_ids"]) for batch in loader] == [ROWS[:2], ROWS[2:]]


def test_a_collator_is_pickled():
    for collator in COLLATORS.values():
        assert pickle.loads(pickle.dumps(collator)) == collator


def test_nothing_of_hugging_face_is_imported():
    code = "import sys, subclasses.ragged, desugar; print({'transformers', 'accelerate'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- what is refused -------------------------------------------------------------------------------------------

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
    "label": (GOOD | {"labels": 1}, ValueError, r"'labels' as one row of integers.*shape \(\)"),
    "mask": (GOOD | {"attention_mask": [1, 1]}, ValueError, "expected 'attention_mask' .* got 2"),
    "hole": (
        GOOD | {"attention_mask": [1, 0, 1]},
        ValueError,
        r"zeros to the left or to the right of them, got \[1, 0, 1\]; remove the tokens",
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


@pytest.mark.parametrize("name", BAD)
def test_a_bad_example_is_named(name):
    example, kind, message = BAD[name]
    with pytest.raises(kind, match=f"^RaggedCollator: example 2: .*{message}"):
        RaggedCollator()([GOOD, GOOD, example])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("column", ["labels", "token_type_ids"])
def test_columns_that_only_some_examples_have(order, column):
    given = [GOOD, GOOD | {column: [1, 2, 3]}, GOOD | {column: [1, 2, 3]}]
    message = f"example {order.index(0)} has no '{column}', which other examples of the batch have; give all"
    message += r'.*or labels="input_ids"' if column == "labels" else ""
    with pytest.raises(ValueError, match=message):
        RaggedCollator()([given[n] for n in order])


MISSING = r"in at least one of the 2 examples, got none; remove empty examples"
NEITHER = 'expected neither multiple nor buckets; pass layout="padded"'
EMPTY = [{"input_ids": []}, {"input_ids": [5], "attention_mask": [0]}]
test_what_is_refused = raising(
    {
        "no example": (lambda: RaggedCollator()([]), ValueError, "at least one example, got an empty batch"),
        "no token": (lambda: RaggedCollator()(EMPTY), ValueError, MISSING),
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


def pad_across_processes(self, tensor, dim=0, pad_index=0, pad_first=False):
    return tensor


def smooth(self, model_output, labels, shift_labels=False, num_items_in_batch=None):
    return num_items_in_batch


@pytest.mark.parametrize("kind", COLLATORS)
def test_results_are_padded_before_they_are_gathered(kind):
    batch, plain = COLLATORS[kind](examples()), torch.ones(2)
    methods = {"pad_across_processes": pad_across_processes}
    pad = patched(hugging_face._pad_ragged_results, "Accelerator", **methods).pad_across_processes
    first, (same,), last = pad((batch, [plain], batch["labels"]), dim=1, pad_index=-100)
    assert same is plain and type(first) is dict and pad(plain, pad_first=True) is plain
    for x, want in ((first["input_ids"], batch["input_ids"]), (last, batch["labels"])):
        assert type(x) is torch.Tensor and torch.equal(x, want.to_dense(-100))
    with pytest.raises(DispatchError, match="expected pad_first=False"):
        pad(batch, dim=1, pad_first=True)


@pytest.mark.parametrize("kind", COLLATORS)
def test_label_smoothing_counts_labels(kind):
    smoother = patched(hugging_face._count_labels, "LabelSmoother", ignore_index=-100, __call__=smooth)
    labels = COLLATORS[kind](examples())["labels"]
    assert smoother(None, labels, True) == smoother(None, labels) == 6
    assert smoother(None, labels, True, 3) == smoother(None, labels, num_items_in_batch=3) == 3
    assert smoother(None, labels.to_dense(-100)) is None
