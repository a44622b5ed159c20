"""Tests from tables that each folder may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest


def giving(cases: Mapping[str, tuple[Callable[[], Any], Any]]) -> Any:
    """A test of ``(call, expected)``: a call gives this number, size, text, or list of them."""

    @pytest.mark.parametrize("name", cases)
    def test(name):
        call, expected = cases[name]
        assert call() == expected

    return test
