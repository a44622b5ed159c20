"""Records the results of a model's call and its changes to the model, and compares records."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn


def content(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf inside a value, with its path; the class of every container counts as a leaf.

    Containers are tuples, lists, dictionaries (outputs of models are), and the caches of transformers.
    """
    if isinstance(value, dict | tuple | list) or type(value).__module__.startswith(
        "transformers.cache_utils"
    ):
        yield path, type(value)
        items = value if isinstance(value, dict) else None if isinstance(value, tuple | list) else vars(value)
        for key, inner in enumerate(value) if items is None else items.items():
            yield from content(inner, f"{path}.{key}")
    else:
        yield path, value


def assert_same(got: Any, want: Any, **tolerance: float) -> None:
    """The same classes, keys in the same order, tensors and other leaves."""
    got, want = list(content(got)), list(content(want))
    assert [path for path, _ in got] == [path for path, _ in want]
    for (path, g), (_, w) in zip(got, want, strict=True):
        if isinstance(w, Tensor):
            for fact in (type, Tensor.stride, attrgetter("requires_grad", "is_leaf")):
                assert fact(g) == fact(w), path
            torch.testing.assert_close(
                g, w, equal_nan=True, msg=lambda message, path=path: f"{path}: {message}", **tolerance
            )
        else:
            assert g == w, path


def state(model: nn.Module) -> dict[str, Any]:
    """The state of the modules: parameters, buffers, and attributes that are tensors or numbers."""
    return dict(model.state_dict()) | {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor | float | None)
    }


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_step(model: nn.Module, other: nn.Module, fast: Any, run: Any, loss: Any) -> None:
    """Checks that a compiled copy and the model return the same result, and the same gradients of a loss of it."""
    want, got = (run(call) for call in (model, fast))
    assert_same(got, want)
    for output in (want, got):
        loss(output).backward()
    assert_same(gradients(other), gradients(model))
