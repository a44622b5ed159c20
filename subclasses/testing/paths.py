"""Compilers to try a class with: which there are, and how one compiled call is judged."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from subclasses.testing.compare import value_difference
from subclasses.testing.promise import Attempt, Broken, Skipped, shown
from subclasses.testing.subject import Compile, Subject

# ---- which compilers ---------------------------------------------------------------------------------------


def named(target: str, **options: Any) -> Compile:
    """A compiler by its import path, looked up when it is used: one that is not installed is left out.

    Args:
        target: ``"package:function"``; the function takes the function to compile.
        **options: passed on to it; a ``backend`` of ``torch.compile`` must be registered.
    """

    def compile(fn: Callable[..., Any]) -> Callable[..., Any]:
        package = target.partition(":")[0]
        if importlib.util.find_spec(package) is None:
            raise Skipped(f"{package} is not installed")
        backend = options.get("backend")
        if package == "torch" and backend not in torch.compiler.list_backends(exclude_tags=()):
            raise Skipped(f"torch.compile knows no backend {backend}")
        return pkgutil.resolve_name(target)(fn, **options)

    return compile


PATHS: Mapping[str, Compile] = {
    "torch.compile": named("torch:compile", backend="aot_eager", fullgraph=True),
    "desugar.compile": named("desugar:compile", backend="eager"),
    'torch.compile(backend="desugar")': named(
        "torch:compile", backend="desugar", fullgraph=True, options={"backend": "eager"}
    ),
}
"""The compilers that are tried by default, none with Inductor."""


def compilers(s: Subject) -> Iterator[tuple[str, Compile]]:
    """The compilers to try, each starting afresh; those that are not installed are left out."""
    paths = s.options.get("paths")
    for name, compile in (PATHS if paths is None else paths).items():
        with Attempt() as attempt:
            compile(lambda: None)
        if isinstance(attempt.error, Skipped):
            continue
        torch.compiler.reset()
        yield name, compile
    torch.compiler.reset()


def against_eager(
    s: Subject, what: str, path: str, run: Callable[[], Any], expected: Any, *, note: bool = True
) -> None:
    """Raises unless a compiled call gives what eager mode gave, or refuses."""
    got = None
    with Attempt() as attempt:
        got = run()
    if attempt.error is not None:
        if note and s.refuses(f"{what} under {path}", attempt.error):
            return
        raise Broken(f"{what} under {path} raised {shown(attempt.error)}") from attempt.error
    problem = value_difference(s, got, expected)
    if problem:
        raise Broken(f"{what} under {path} is not what eager mode gives: {problem}")
