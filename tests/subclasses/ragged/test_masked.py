"""``torch.masked`` on ragged tensors, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged import judge
from tests.subclasses.ragged.both import judge_rows
from tests.subclasses.ragged.judge import stock

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")

LENGTHS = [3, 5, 1]
COUNTING = ["mean", "var", "std"]
OTHERS = ["sum", "prod", "amax", "amin", "logsumexp", "argmax", "argmin"]
ALONG = ["softmax", "log_softmax", "softmin", "cumsum", "cumprod"]


def all_entries(x):
    """A mask of the entries that exist."""
    return torch.ones_like(x, dtype=torch.bool)


@pytest.mark.sweep(36)
@pytest.mark.parametrize("way", [*judge.WAYS], ids=lambda w: w.__name__)
@pytest.mark.parametrize("layout", ["back to back", "holes", "padded"])
@pytest.mark.parametrize("name", COUNTING)
def test_what_counts(name, layout, way):
    if way is stock and layout == "padded":
        pytest.skip("judged by the other ways")
    f = getattr(torch.masked, name)
    judge_rows(
        layout, lambda x: f(x, 1, mask=all_entries(x)), lambda row, _: f(row, 0), lengths=LENGTHS, way=way
    )
    judge_rows(
        layout,
        lambda x: f(x, (1, 2), keepdim=True, mask=all_entries(x))[:, 0],
        lambda row, _: f(row, (0, 1), keepdim=True)[0],
        lengths=LENGTHS,
        way=way,
    )


@pytest.mark.sweep(12)
@pytest.mark.parametrize("way", [*judge.WAYS], ids=lambda w: w.__name__)
@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor], ids=lambda c: c.__name__)
@pytest.mark.parametrize("mask", ["none", "dense", "broadcast"])
@pytest.mark.parametrize("name", COUNTING)
def test_what_would_count_the_padding_is_refused(name, mask, cls, way):
    x = cls.from_tensors([torch.ones(n, 4) for n in LENGTHS])
    masks = {"none": None, "dense": torch.ones(3, 5, 4, dtype=torch.bool), "broadcast": torch.ones(5, 1) > 0}
    f = getattr(torch.masked, name)
    with pytest.raises(Exception, match=rf"torch\.masked\.{name} of a {cls.__name__} would count") as caught:
        way(lambda x: f(x, 1, mask=masks[mask]))(x)
    assert "write x." + name in str(caught.value)
    if way is judge.eager:
        assert isinstance(caught.value, DispatchError)


@pytest.mark.parametrize("way", [*judge.WAYS], ids=lambda w: w.__name__)
@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor], ids=lambda c: c.__name__)
def test_the_layout_can_be_asked_for(cls, way):
    x = cls.from_tensors([torch.ones(n) for n in LENGTHS])
    assert way(lambda x: x * 2 if x.layout == torch.strided else x)(x).sum() == 2 * sum(LENGTHS)


@pytest.mark.parametrize("layout", ["back to back", "holes", "padded"])
@pytest.mark.parametrize("name", [*COUNTING, *OTHERS])
def test_with_a_mask(name, layout):
    f = getattr(torch.masked, name)
    given = (lambda t: t.detach()) if name.startswith("arg") else (lambda t: t)
    judge_rows(
        layout,
        lambda x: f(given(x), -2, mask=x > 0),
        lambda row, _: f(given(row), 0, mask=row > 0),
        lengths=LENGTHS,
    )


@pytest.mark.parametrize("layout", ["back to back", "holes", "padded"])
@pytest.mark.parametrize("name", COUNTING)
def test_a_dense_mask_joined_with_that_of_the_entries(name, layout):
    f, width = getattr(torch.masked, name), 7 if layout == "padded" else 5
    mask = (torch.arange(3 * width * 4).view(3, width, 4) * 7 % 5) > 0
    judge_rows(
        layout,
        lambda x: f(x, 1, mask=all_entries(x) & mask),
        lambda row, i: f(row, 0, mask=mask[i, : len(row)]),
        lengths=LENGTHS,
    )
    judge_rows(
        layout,
        lambda x: f(x, 1, mask=all_entries(x) & mask[:1, :, :1]),
        lambda row, i: f(row, 0, mask=mask[0, : len(row), :1]),
        lengths=LENGTHS,
    )


@pytest.mark.parametrize("layout", ["back to back", "holes", "padded"])
@pytest.mark.parametrize("name", ALONG)
def test_along(name, layout):
    f = getattr(torch.masked, name)
    judge_rows(layout, lambda x: f(x, 1), lambda row, _: f(row, 0), lengths=LENGTHS)


@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor], ids=lambda c: c.__name__)
def test_dtypes_and_corrections(cls):
    rows = [torch.tensor([1, 2, 6]), torch.tensor([4, 7])]
    x = cls.from_tensors(rows)
    for options in ({}, {"unbiased": False}, {"correction": 0}, {"dtype": torch.float64}):
        for f in (torch.masked.var, torch.masked.std):
            got = f(x, 1, mask=all_entries(x), **options)
            torch.testing.assert_close(got, torch.stack([f(row, 0, **options) for row in rows]))
    got = torch.masked.mean(x, 1, dtype=torch.float64, mask=all_entries(x))
    torch.testing.assert_close(got, torch.tensor([3.0, 5.5], dtype=torch.float64))
