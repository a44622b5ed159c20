"""The base of the records that reports are made of."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


class Record:
    """A record that can be written as JSON."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The record and those in it as dictionaries and lists."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[call-overload]
