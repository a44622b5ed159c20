"""A module that tests make of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class Held(nn.Module):
    """A module with given buffers, layers, parameters and other attributes, and a forward that a subclass writes."""

    def __init__(self, buffers: Mapping[str, Tensor] | None = None, **attributes: Any) -> None:
        super().__init__()
        for name, buffer in (buffers or {}).items():
            self.register_buffer(name, buffer)
        for name, value in attributes.items():
            setattr(self, name, value)
