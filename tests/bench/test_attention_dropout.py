"""The benchmark of dropout in attention checks what it times, on few rows and without a compiler."""

from __future__ import annotations

import pytest
import torch

from bench import attention_dropout
from bench.timing import Timing


@pytest.mark.parametrize("causal", [False, True])
def test_the_mean_is_checked(monkeypatch, causal):
    monkeypatch.setattr(attention_dropout, "WAYS", {"eager": lambda f: f})
    monkeypatch.setattr(attention_dropout, "WIDTH", 16)
    torch.manual_seed(0)
    calls = attention_dropout.make_calls([20, 60, 3], causal)
    attention_dropout.check_mean(calls)
    with pytest.raises(ValueError, match="expected the attention without dropout"):
        attention_dropout.check_mean(calls | {"eager/0.1": calls["eager/0.0"]})
    timings = {name: Timing(1e3, 1e3, 1e3) for name in calls}
    found = attention_dropout.rows_of(timings, "few rows")
    assert found[1].ratios == {"/ without": 1.0, "/ limit": pytest.approx(1 / 2.3)}


def test_rows_fill_a_quarter_of_a_table():
    lengths = attention_dropout.draw_lengths(16)
    assert (min(lengths), max(lengths)) == (attention_dropout.SHORTEST, attention_dropout.LONGEST)
    assert sum(lengths) / len(lengths) / max(lengths) == pytest.approx(0.25, abs=0.03)
