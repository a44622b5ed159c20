"""Results that show what a trace saw: sizes in texts, traced tensors in texts and objects."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import desugar
from tests.desugar.judge import assert_same_values, leaves_of

SIZES = (3, 4, 5, 8, 1, 0)

# What takes ints and may take no symbols, and what shows a symbol as text.
OF_SIZES: dict[str, Callable[..., Any]] = {
    "text": lambda x: (x * 2, f"{x.shape[0]} rows"),
    "printed size": lambda x: str(x.shape),
    "printed int": lambda x: [repr(x.shape[0])],
    "key of text": lambda x: {f"rows {x.shape[0]}": x * 2},
    "key": lambda x: {x.shape[0]: x * 2},
    "looked up": lambda x: {3: "three", 4: "four"}.get(x.shape[0]),
    "slice": lambda x: slice(0, x.shape[0]),
    "divmod": lambda x: divmod(x.shape[0], 3),
    "numpy": lambda x: x * float(np.sqrt(x.shape[0])),
    "json": lambda x: json.dumps([x.shape[0]]),
    "set": lambda x: len({x.shape[0], 4}),
    "ceil": lambda x: x[: math.ceil(x.shape[0] / 2)] * 2,
    "floor": lambda x: x[: math.floor(x.shape[0] / 2)] * 2,
    "divided by a size": lambda x: [part * 2 for part in x.split(max(1, x.shape[0] // 2))],
    "chunks": lambda x: [part * 2 for part in x.chunk(3)],
    "padded": lambda x: F.pad(x, (0, 0, 0, 8 - x.shape[0])),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", OF_SIZES)
def test_sizes_where_symbols_do_not_go(name, dynamic):
    fn = OF_SIZES[name]
    compiled = desugar.compile(fn, backend="eager", dynamic=dynamic)
    for n in SIZES:
        x = torch.arange(2.0 * n).view(n, 2)
        got, want = compiled(x), fn(x)
        assert_same_values(leaves_of(got), leaves_of(want))
        assert str(got) == str(want)


def test_why_sizes_are_constants_is_logged(caplog):
    compiled = desugar.compile(OF_SIZES["key"], backend="eager")
    with caplog.at_level(logging.INFO, logger="desugar"):
        compiled(torch.ones(3, 2))
        compiled(torch.ones(4, 2))
    assert "sizes are constants of this program: TypeError: unhashable" in caplog.text
    assert not any(program.is_dynamic for program in compiled.programs)


def test_an_error_of_the_function_is_raised_as_it_is_with_sizes_that_changed():
    compiled = desugar.compile(lambda x, y: x @ y, backend="eager")
    compiled(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(RuntimeError, match=r"\[2, 3\] X \[2, 2\]|2x3 and 2x2"):
        compiled(torch.ones(2, 3), torch.ones(2, 2))


OF_TRACES: dict[str, Callable[..., Any]] = {
    "text of a tensor": lambda x: str(x.sum()),
    "text in a list": lambda x: [x * 2, f"sum: {x.sum()}"],
    "text of a number": lambda x: repr(x.sum().item()),
    "key": lambda x: {repr(x.sum()): x},
    "format": lambda x: f"{x.sum():.2f}",
    "format of a number": lambda x: f"{x.sum().item():.2f}",
    "class": lambda x: type(x),
    "name of the class": lambda x: type(x).__name__,
    "storage": lambda x: x.untyped_storage(),
    "node of autograd": lambda x: (x * x.detach().requires_grad_()).grad_fn,
    "numbers": lambda x: x.tolist(),
    "deep copy": lambda x: __import__("copy").deepcopy(x.detach()),
}


@pytest.mark.parametrize("name", OF_TRACES)
def test_what_shows_a_trace_is_refused(name):
    with pytest.raises(desugar.DesugarError) as caught:
        desugar.compile(OF_TRACES[name], backend="eager")(torch.ones(2, 2))
    assert caught.value.instead
