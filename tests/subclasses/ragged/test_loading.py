"""Batches from data loaders, through queues and shared memory."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, TensorDataset

from subclasses.ragged import JaggedTensor, PaddedTensor

COLLATE = {
    "jagged": JaggedTensor.from_tensors,
    "padded": functools.partial(PaddedTensor.from_tensors, multiple=4),
}
PARTS = {
    "jagged": lambda x: (x.values, x.offsets),
    "padded": lambda x: (x.padded, x.lengths),
}
START = ["fork", "spawn"]
pytestmark = [
    pytest.mark.parametrize("kind", COLLATE),
    # What newer Pythons say of any fork beside another thread.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

ROWS = [torch.arange(n) for n in (3, 1, 4, 0, 5)]

# ---- data loaders ----------------------------------------------------------------------------------------------


def check_batches(batches: list[Any]) -> None:
    """Batches of two rows each, in order."""
    torch.testing.assert_close([row for batch in batches for row in batch.to_tensors()], ROWS)
    assert [len(batch) for batch in batches] == [2, 2, 1]


WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("options", [{}, WORKERS, WORKERS | {"multiprocessing_context": "spawn"}], ids=str)
def test_from_tensors_collates(kind, options):
    check_batches(list(DataLoader(ROWS, batch_size=2, collate_fn=COLLATE[kind], **options)))


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


def test_a_batch_as_a_data_set(kind):
    x = COLLATE[kind](ROWS)
    torch.testing.assert_close([row for (row,) in TensorDataset(x)], ROWS)
    loader = DataLoader(x, batch_size=2, collate_fn=COLLATE[kind])
    check_batches(list(loader))


# ---- processes -------------------------------------------------------------------------------------------------


def double_in_place(arrived: Any, done: Any) -> None:
    """What another process does with a batch."""
    arrived.get().mul_(2)
    done.put(True)


def make_and_send(kind: str, outgoing: Any, received: Any) -> None:
    """Sends a batch, and stays until it was received."""
    outgoing.put(COLLATE[kind](ROWS))
    received.wait(60)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("start", START)
def test_a_queue_shares_memory(kind, start):
    context = mp.get_context(start)
    arrived, done, x = context.Queue(), context.Queue(), COLLATE[kind](ROWS)
    assert x.share_memory_() is x and x.is_shared() and all(part.is_shared() for part in PARTS[kind](x))
    process = context.Process(target=double_in_place, args=(arrived, done))
    process.start()
    arrived.put(x)
    assert done.get(timeout=60)
    process.join()
    torch.testing.assert_close(x.to_tensors(), [row * 2 for row in ROWS])


@pytest.mark.sweep(4)
@pytest.mark.parametrize("start", START)
def test_a_queue_brings_batches(kind, start):
    context = mp.get_context(start)
    incoming, received = context.Queue(), context.Event()
    process = context.Process(target=make_and_send, args=(kind, incoming, received))
    process.start()
    x = incoming.get(timeout=60)
    torch.testing.assert_close((x + 1).to_tensors(), [row + 1 for row in ROWS])
    received.set()
    process.join()
