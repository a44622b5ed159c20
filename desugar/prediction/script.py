"""Collects the calls that `desugar.compile` compiles while a script runs, to predict each on a device afterwards.

The script runs as it always does, with real values. Its compiled calls are then traced again, with fake tensors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from desugar.prediction.devices import find_device
from desugar.prediction.predicting import OURS, predict
from desugar.prediction.records import Prediction, Way
from desugar.recording.listeners import Recording, caller, listen
from desugar.recording.user_names import function_name


class CompiledCalls:
    """Calls that compiled a program; calls that `torch.compile` compiled have no owner and are not among them."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def collecting(self, is_on: bool = True) -> Iterator[None]:
        """Collects the calls inside the context, in all threads, if it is on."""
        with listen(self._note) if is_on else contextlib.nullcontext():
            yield

    def _note(self, recording: Recording) -> None:
        owner = caller()
        call = None if owner is None else owner.call()
        if owner is None or call is None or recording.program is None:
            return
        with self._lock:
            if not any(args is call[0] for _, args, _ in self._calls[-1:]):  # a graph break, in the same call
                self._calls.append((owner.what, *call))

    def predict(self, device: str) -> tuple[Prediction, ...]:
        """Returns a prediction for each call; one that fails has the error in place of its ways."""
        return tuple(_predict(fn, args, kwargs, device) for fn, args, kwargs in self._calls)


def _predict(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Prediction:
    name = function_name(fn)
    try:
        return replace(predict(fn, args, kwargs, device=device), name=name)
    except Exception as error:  # noqa: BLE001 - an error about one call must not hide the other predictions
        found = find_device(device)
        way = Way(OURS, error=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
        return Prediction(name, found.title, found.bandwidth, found.source, (), (way,))
