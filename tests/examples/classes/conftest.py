"""The ways in which each class of the gallery is compared with plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import desugar

Way = Callable[[Callable[..., Any]], Callable[..., Any]]

WAYS: dict[str, Way] = {
    "eager": lambda function: function,
    "torch.compile": partial(torch.compile, backend="aot_eager", fullgraph=True),
    "desugar.compile": partial(desugar.compile, backend="eager"),
}


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> Way:
    """Takes a function and gives it compiled in one way, or as it is."""
    return WAYS[request.param]
