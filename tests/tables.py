"""Tests from tables that each folder may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest


def giving(cases: Mapping[str, tuple[Callable[..., Any], Any]], fixture: str = "") -> Any:
    """A test of ``(call, expected)``: a call gives this number, size, text, or list of them.

    The call takes the value of the fixture, if one is named.
    """

    @pytest.mark.parametrize("name", cases)
    def test(name, request):
        call, expected = cases[name]
        assert call(*([request.getfixturevalue(fixture)] if fixture else [])) == expected

    return test


def raising(cases: Mapping[str, tuple[Callable[[], Any], type[Exception], str]]) -> Any:
    """A test of ``(call, error, words)``: a call raises this error, with these words."""

    @pytest.mark.parametrize("name", cases)
    def test(name):
        call, error, words = cases[name]
        with pytest.raises(error, match=words):
            call()

    return test
