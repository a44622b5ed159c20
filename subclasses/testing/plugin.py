"""A plugin for pytest: ``pytest -p subclasses.testing.plugin --subclass MODULE:FACTORY`` tests each promise of a class.

A line ``pytest_plugins = ["subclasses.testing.plugin"]`` in ``conftest.py`` replaces the option ``-p``.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import pytest

from subclasses.testing.report import Promise
from subclasses.testing.runner import chosen, run_test
from subclasses.testing.subject import Options, Subject


def pytest_addoption(parser: Any) -> None:
    """Adds ``--subclass``, once for each class, and ``--subclass-level``."""
    options = parser.getgroup("subclasses")
    options.addoption(
        "--subclass",
        action="append",
        default=[],
        metavar="MODULE:FACTORY",
        help="a function that takes nothing and gives a value of the class to test",
    )
    options.addoption("--subclass-level", default="gradients", choices=["smoke", "gradients", "full"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: Any, config: Any, items: list[Any]) -> None:
    """Adds a test for each promise of each class."""
    options: Options = {"level": config.getoption("--subclass-level")}
    for target in config.getoption("--subclass"):
        try:
            subject = Subject(pkgutil.resolve_name(target), options)
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            raise pytest.UsageError(f"--subclass {target}: {error}") from error
        for promise in chosen(options):
            given = {"name": f"{target}::{promise.name}", "subject": subject, "promise": promise}
            items.append(PromiseItem.from_parent(session, **given))


class PromiseItem(pytest.Item):
    """The test of one promise of one class."""

    def __init__(self, *, subject: Subject, promise: Promise, **of_pytest: Any) -> None:
        super().__init__(**of_pytest)
        self.subject, self.promise = subject, promise

    def runtest(self) -> None:
        """Fails where the promise is broken."""
        run_test(self.subject, self.promise)

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        """The report alone."""
        return str(excinfo.value)
