"""What ragged tensors print: rows, and not too many."""

from __future__ import annotations

import pytest
import torch

from subclasses import _torch
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import classes


@classes
def test_few_rows_are_shown_whole(cls):
    x = cls.from_tensors([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    assert repr(x) == f"{cls.__name__}([\n  tensor([1., 2.]),\n  tensor([3.]),\n], size=(2, 2))"
    assert str(x) == f"{x}" == repr(x)
    assert "tensor([1, 2]),\n" in repr(x.long()) and "dtype=torch.float16" in repr(x.half())


@classes
def test_many_rows_are_shown_from_both_ends(cls):
    rows = [torch.full((i % 3,), i) for i in range(500)]
    assert repr(cls.from_tensors(rows)).splitlines() == [
        f"{cls.__name__}([",
        "  tensor([], dtype=torch.int64),",
        "  tensor([1]),",
        "  tensor([2, 2]),",
        "  ... (494 rows)",
        "  tensor([497, 497]),",
        "  tensor([], dtype=torch.int64),",
        "  tensor([499]),",
        "], size=(500, 2))",
    ]
    assert repr(cls.from_tensors(rows[:20])).count("tensor(") == 20
    with _torch.printing_with(edgeitems=1):
        assert repr(cls.from_tensors(rows)).count("tensor(") == 2


@classes
def test_long_rows_are_shown_from_both_ends(cls):
    x = cls.from_tensors([torch.arange(n) for n in (900, 400, 2)])
    long = "  tensor([  0,   1,   2,  ..., {}, {}, {}]),\n"
    expected = long.format(897, 898, 899) + long.format(397, 398, 399) + "  tensor([0, 1]),\n"
    assert repr(x) == f"{cls.__name__}([\n{expected}], size=(3, 900))"
    assert "..." not in repr(x[:, :300])
    assert str(torch.arange(900)).count(",") == 899, "the options are put back"


@classes
def test_how_it_hangs_in_the_graph(cls):
    x = cls.from_tensors([torch.ones(2), torch.ones(1)])
    leaf = x.clone().requires_grad_()
    assert repr(leaf).endswith("], size=(2, 2), requires_grad=True)")
    assert repr(leaf * 2).endswith("], size=(2, 2), grad_fn=<MulBackward0>)")
    with torch.inference_mode():
        assert repr(x * 2).endswith("  tensor([2.]),\n], size=(2, 2))")


@classes
def test_where_the_rows_are(cls):
    x = cls.from_tensors([torch.ones(2, 3), torch.ones(1, 3)])
    assert repr(x.transpose(1, 2)).endswith("size=(2, 3, 2), ragged_dim=2)")
    assert "ragged_dim=0" in repr(x.flatten(0, 1)) and repr(x.flatten(0, 1)).count("tensor(") == 2
    if cls is PaddedTensor:
        assert repr(x.transpose(0, 1)).endswith("size=(2, 2, 3), ragged_dim=0, batch_dim=1)")


NOTHING, ONE = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
SPECIAL = {
    "JaggedTensor([], size=(0, 0, 4))": lambda: JaggedTensor(torch.ones(0, 4), ONE),
    "PaddedTensor([], size=(0, 3))": lambda: PaddedTensor(torch.ones(0, 3), NOTHING),
    "PaddedTensor([], size=(0, 1), dtype=torch.int64)": lambda: PaddedTensor(NOTHING[:, None], NOTHING),
    # lengths beyond the table
    "PaddedTensor([\n  tensor([1., 1.]),\n  tensor([1.]),\n], size=(2, 2))": lambda: PaddedTensor(
        torch.ones(2, 2), torch.tensor([5, 1])
    ),
}


@pytest.mark.parametrize("text", SPECIAL)
def test_no_rows_and_lengths_beyond_the_table(text):
    assert repr(SPECIAL[text]()) == text


@classes
def test_under_a_mode(cls):
    x = cls.from_tensors([torch.ones(2), torch.ones(1)])
    text = repr(x)

    class Refusing(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was seen")

    with Refusing():
        assert repr(x) == text
    mode = _torch.fake_mode()
    fake = repr(mode.from_tensor(x))
    with mode:
        assert repr(x) == text
    first = cls.__spec__.inner_names[0]
    assert fake.startswith(f"{cls.__name__}({first}=FakeTensor(...") and "ragged_dim=1" in fake
    assert repr(x.to("meta")).startswith(f"{cls.__name__}({first}=tensor(..., device='meta'")
