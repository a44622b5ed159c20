"""Tests from tables that each folder may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from subclasses import DispatchError


def giving(cases: Mapping[str, tuple[Callable[..., Any], Any]], fixture: str = "") -> Any:
    """A test of ``(call, expected)``: a call gives this number, size, text, or list of them.

    The call takes the value of the fixture, if one is named.
    """

    @pytest.mark.parametrize("name", cases)
    def test(name, request):
        call, expected = cases[name]
        assert call(*([request.getfixturevalue(fixture)] if fixture else [])) == expected

    return test


def raising(cases: Mapping[str, Any] | Sequence[Any]) -> Any:
    """A test of ``(call, words)``, or ``(call, error, words)``: a call raises, by default a `DispatchError`."""

    @pytest.mark.parametrize("name", cases if isinstance(cases, Mapping) else range(len(cases)))
    def test(name):
        call, *errors, words = cases[name]
        with pytest.raises(*(errors or [DispatchError]), match=words):
            call()

    return test
