"""What the tests of several classes of the gallery check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor


def check_gradients(
    got: Any,
    expected: Any,
    leaves: Sequence[Tensor],
    loss: Callable[[Any], Tensor] = lambda t: t.square().sum(),
) -> None:
    """Compares values, and the gradients of a loss of them."""
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss(value), leaves) for value in (got, expected)))


def check_refused(
    *calls: Callable[[], Any], error: Any = NotImplementedError, match: str | None = None
) -> None:
    for call in calls:
        with pytest.raises(error, match=match):
            call()


def check_unchanged(tensors: Sequence[Tensor], *calls: Callable[[], Any], **refused: Any) -> None:
    """Checks that calls are refused, and leave some tensors as they are."""
    before = [t.clone() for t in tensors]
    check_refused(*calls, **refused)
    assert all(map(torch.equal, tensors, before))
