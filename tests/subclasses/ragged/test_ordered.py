"""Medians, quantiles and the k-th of what exists, with a loop over the rows (or the positions) as judge."""

from __future__ import annotations

import pytest
import torch

from tests.subclasses.ragged.both import LAYOUTS, judge_rows, make
from tests.subclasses.ragged.judge import desugared, eager

LENGTHS = [3, 2, 5, 1]
layouts = pytest.mark.parametrize("layout", LAYOUTS)
ways = pytest.mark.parametrize("way", [eager, desugared], ids=lambda w: w.__name__)

STATISTICS = {
    "median": lambda t, d: t.median(d).values,
    "nanmedian": lambda t, d: t.nanmedian(d).values,
    "kthvalue": lambda t, d: t.kthvalue(1, d).values,
    "quantile": lambda t, d: t.quantile(0.3, d),
    "nanquantile": lambda t, d: t.nanquantile(0.7, d, interpolation="lower"),
    "midpoint": lambda t, d: t.quantile(0.4, d, interpolation="midpoint"),
    "nearest": lambda t, d: t.quantile(0.5, d, interpolation="nearest"),
    "higher": lambda t, d: t.quantile(torch.tensor(0.2, dtype=torch.float64), d, interpolation="higher"),
    "masked.median": torch.masked.median,
}


@pytest.mark.sweep(72)
@ways
@layouts
@pytest.mark.parametrize("name", STATISTICS)
def test_of_rows(name, layout, way):
    f = STATISTICS[name]
    judge_rows(layout, lambda x: f(x, 1), lambda row, _: f(row, 0), lengths=LENGTHS, way=way)


@layouts
@pytest.mark.parametrize("name", STATISTICS)
def test_of_entries(name, layout):
    f = STATISTICS[name]
    judge_rows(layout, lambda x: f(x, -1), lambda row, _: f(row, -1), lengths=LENGTHS)


@layouts
@pytest.mark.parametrize("name", STATISTICS)
def test_of_positions(name, layout):
    f, batch = STATISTICS[name], make(layout, [5, 5, 2])
    expected = [f(torch.stack([row[t] for row in batch.rows if len(row) > t]), 0) for t in range(5)]
    x = batch.x if layout != "padded" else batch.x.to_jagged().to_padded()
    torch.testing.assert_close(f(x, 0), torch.stack(expected))


@layouts
@pytest.mark.parametrize("name", ["median", "nanmedian", "kthvalue", "quantile", "nanquantile"])
def test_nans_that_exist(name, layout):
    f, batch = STATISTICS[name], make(layout, LENGTHS)
    with torch.no_grad():
        for row in batch.rows:
            row[0, :2] = torch.nan
    torch.testing.assert_close(f(batch.x, 1), torch.stack([f(row, 0) for row in batch.rows]), equal_nan=True)


@pytest.mark.sweep(6)
@ways
@layouts
@pytest.mark.parametrize("f", [torch.median, torch.nanmedian], ids=lambda f: f.__name__)
@pytest.mark.parametrize("some_nan", [False, True], ids=["numbers", "a NaN"])
def test_of_all(f, layout, way, some_nan):
    batch = make(layout)  # a row is empty
    with torch.no_grad():
        batch.rows[0][0, :2] = torch.nan if some_nan else 0
    got, wanted = way(f)(batch.x), f(torch.cat(batch.rows))
    torch.testing.assert_close(got, wanted, equal_nan=True)
    if not wanted.isnan():
        torch.testing.assert_close(*(torch.autograd.grad(t, batch.leaf)[0] for t in (got, wanted)))


@layouts
def test_of_all_integers(layout):
    x = make(layout).x.detach().mul(10).nan_to_num(1000).long()
    assert x.median() == torch.cat(x.to_tensors()).median() == x.nanmedian()


@layouts
def test_indices_and_keepdim(layout):
    batch = make(layout, LENGTHS)
    for found in (batch.x.median(1, keepdim=True), batch.x.kthvalue(1, 1, True)):
        assert found.values.shape == (4, 1, 4)
        taken = [row.gather(0, i) for row, i in zip(batch.rows, found.indices, strict=True)]
        torch.testing.assert_close(torch.stack(taken), found.values)
    assert batch.x.quantile(0.5, 1, keepdim=True).shape == (4, 1, 4)


REFUSED = {  # of rows of which one is empty
    "a median of nothing": (lambda x, layout: x.median(1), (IndexError, RuntimeError), "no entries"),
    "k beyond a row": (
        lambda x, layout: make(layout, LENGTHS).x.kthvalue(2, 1),
        RuntimeError,
        "fewer than k=2",
    ),
    "k of 0": (lambda x, layout: x.kthvalue(0, 1), IndexError, "k of at least 1"),
    "several quantiles": (
        lambda x, layout: x.quantile(torch.tensor([0.1, 0.2], dtype=torch.float64), 1),
        NotImplementedError,
        "expected one q and a dim",
    ),
    "no quantile": (lambda x, layout: x.quantile(2.0, 1), RuntimeError, "between 0 and 1"),
}


@layouts
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, layout):
    f, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        f(make(layout).x, layout)
