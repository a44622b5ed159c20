"""The ways in which each class of the gallery is compared with plain tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.doors import DOORS


@pytest.fixture(params=["eager", "stock", "desugar"])
def way(request: pytest.FixtureRequest) -> Any:
    """Takes a function and gives it compiled in one way, or as it is."""
    return partial(DOORS[request.param], fullgraph=True)
