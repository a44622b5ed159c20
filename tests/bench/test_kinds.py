"""Every kind of a family computes the same, and each family has its cells."""

from __future__ import annotations

import pytest
import torch

from bench import kinds
from bench.compare import points_of
from bench.plots import save_scaling
from bench.report import Row
from bench.timing import Timing
from subclasses.ragged import JaggedTensor

EAGER = {"eager": lambda fn: fn}


@pytest.fixture
def in_eager_mode(monkeypatch):
    monkeypatch.setattr(kinds, "WAYS", EAGER)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("family", kinds.FAMILIES)
def test_each_kind_has_a_call(in_eager_mode, family, mode):
    calls = kinds.make_calls(family, mode, 2)
    wanted = kinds.FAMILIES[family].keys() - set(kinds.PEERS)
    assert wanted <= {kind for kind, _ in calls} and "plain" in wanted
    for call in calls.values():
        results = call()
        takes_input = family == "Int8" and mode == "training"  # its input's gradient alone
        assert len(results) == (1 if takes_input else 2)


def plain(x):
    return x.values if isinstance(x, JaggedTensor) else getattr(x, "padded", x)


@pytest.mark.parametrize("family", kinds.FAMILIES)
def test_kinds_compute_the_same(family):
    found = []
    for name, kind in kinds.FAMILIES[family].items():
        if name not in kinds.PEERS:
            torch.manual_seed(0)
            args = [*kind.make_first(), *kind.make(), *kind.make()]
            found.append([plain(y) for y in kind.fn(*args)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_a_failure_of_our_own_is_no_missing_figure(in_eager_mode, monkeypatch):
    def fail(*args):
        raise NameError("no kernel")

    broken = kinds.Kind(fail, lambda: (torch.ones(2),))
    monkeypatch.setitem(kinds.FAMILIES, "broken", {"torch.nested": broken})
    assert not kinds.make_calls("broken", "inference", 1)
    monkeypatch.setitem(kinds.FAMILIES, "broken", {"JaggedTensor": broken})
    with pytest.raises(NameError):
        kinds.make_calls("broken", "inference", 1)


def test_rows_become_a_picture(tmp_path):
    rows = [
        Row(f"{panel}, N = {count}", f"{kind}, {way}", Timing(count, count, count))
        for panel in ("Int8, inference", "Int8, training", "Jagged, inference")
        for count in (1, 5)
        for kind in ("plain", "JaggedTensor", "torch.nested")
        for way in ("eager", "torch.compile")
    ]
    points = points_of(rows)
    assert points[0][:4] == ("Int8, inference", 1, "plain", "eager")
    save_scaling(points, tmp_path / "kinds.png")
    assert (tmp_path / "kinds.png").stat().st_size > 10_000
