"""Ragged tensors in frames that Dynamo leaves to Python, and in threads beside one that compiles."""

from __future__ import annotations

import threading

import pytest
import torch

from subclasses.keyed import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.doors import COMPILED

MAKE = {
    "jagged": lambda: JaggedTensor(torch.arange(5.0), torch.tensor([0, 2, 5]), max_length=3),
    "padded": lambda: PaddedTensor.from_tensors([torch.ones(2), torch.ones(3)]),
    "keyed": lambda: KeyedJaggedTensor(["a"], torch.arange(3.0), torch.tensor([1, 2]), max_length=2),
}


def read(x):
    return (x.padded if isinstance(x, PaddedTensor) else x.values).sum()


def after_none(x):
    return None if x is None else read(x)


def in_a_loop(x, printed):
    total = 0
    for n in range(2):
        printed(n)  # breaks the graph, where Dynamo cannot go on
        total = total + read(x)
    return total


@pytest.mark.sweep(6)
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize("kind", MAKE)
def test_inner_tensors_are_read(kind, door):
    x, seen = MAKE[kind](), []
    optional, loop = COMPILED[door](after_none), COMPILED[door](in_a_loop)
    assert optional(None) is None
    for _ in range(2):
        assert optional(x) == read(x)
        assert loop(x, torch._dynamo.disable(seen.append)) == 2 * read(x)
    assert seen == [0, 1, 0, 1]


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, of the graph that breaks
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize("kind", MAKE)
def test_a_value_is_printed(kind, door, capsys):
    def fn(x):
        print(x)
        return f"{x}"

    x = MAKE[kind]()
    assert COMPILED[door](fn)(x) == str(x)
    assert capsys.readouterr().out == f"{x}\n"


def test_a_copy_keeps_which_rows_are_real():
    x = PaddedTensor.from_tensors(
        [torch.tensor([1.0, 5.0]), torch.tensor([3.0]), torch.tensor([2.0])], batch_multiple=4
    )
    y = x.with_lengths(x.padded.clone(), x.lengths.clone())
    assert len(y.to_tensors()) == 3
    torch.testing.assert_close(y.mean(1).mean(), x.mean(1).mean())
    assert x.with_lengths(x.padded, x.lengths, None).row_count is None


BUILD = {
    "offsets": lambda: JaggedTensor(torch.arange(5.0), torch.tensor([0, 2, 5])),
    "lengths": lambda: JaggedTensor.from_lengths(torch.arange(5.0), torch.tensor([2, 3])),
    "a mask": lambda: MAKE["jagged"]()[torch.tensor([True, False])],
    "keyed": lambda: KeyedJaggedTensor(["a"], torch.arange(3.0), torch.tensor([1, 2])),
    "text": lambda: repr(MAKE["padded"]()),
}


@pytest.mark.parametrize("build", BUILD)
def test_rows_are_made_while_another_thread_compiles(build):
    compiling, go_on = threading.Event(), threading.Event()

    def backend(graph, _):
        compiling.set()
        assert go_on.wait(timeout=60)
        return graph

    thread = threading.Thread(target=lambda: torch.compile(torch.neg, backend=backend)(torch.ones(2)))
    thread.start()
    try:
        assert compiling.wait(timeout=60)
        assert torch.compiler.is_compiling()  # says torch, of the whole process
        BUILD[build]()
    finally:
        go_on.set()
        thread.join()
