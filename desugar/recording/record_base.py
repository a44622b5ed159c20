"""The base class of the records in reports."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any


class Record:
    """A record that can be written as JSON."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the record and its inner records as dictionaries and lists."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[call-overload]


def find_named(records: Iterable[Any], name: str) -> Any:
    """Returns the record with a name.

    Raises:
        KeyError: There is no such record.
    """
    by_name = {record.name: record for record in records}
    if name not in by_name:
        raise KeyError(f"expected one of {', '.join(by_name)}, got {name!r}")
    return by_name[name]
