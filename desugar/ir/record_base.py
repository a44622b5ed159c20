"""The base of the records that reports are made of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any


class Record:
    """A record that can be written as JSON."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The record and those in it as dictionaries and lists."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[call-overload]


def find_named(records: Iterable[Any], name: str) -> Any:
    """Returns the record that has a name.

    Raises:
        KeyError: There is none.
    """
    found = {record.name: record for record in records}
    if name not in found:
        raise KeyError(f"expected one of {', '.join(found)}, got {name!r}")
    return found[name]
