"""The compilers that a class is tried with, and the comparison of a compiled call with eager mode."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from subclasses.testing.compare import check_equal
from subclasses.testing.errors import Attempt, Broken, Skipped, problem
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
    """The compilers to try, each starting afresh; those that are not installed are left out.

    Raises:
        Skipped: they cannot take the class apart.
    """
    s.needs_flatten()
    paths = s.options.get("paths")
    for name, compile in (PATHS if paths is None else paths).items():
        with Attempt() as attempt:
            compile(lambda: None)
        if isinstance(attempt.error, Skipped):
            continue
        torch.compiler.reset()
        yield name, compile
    torch.compiler.reset()


# ---- comparison --------------------------------------------------------------------------------------------


def check_compiled(s: Subject, what: str, run: Callable[[Compile], Any]) -> None:
    """Raises unless ``run(compile)`` gives the same result for each compiler as in eager mode, or is refused."""
    works, expected = s.works(what, lambda: run(lambda function: function))
    for path, compile in compilers(s) if works else ():
        against_eager(s, f"{what} under {path}", lambda c=compile: run(c), expected)


def against_eager(s: Subject, what: str, run: Callable[[], Any], expected: Any, *, note: bool = True) -> None:
    """Raises unless a compiled call gives the result of eager mode, or is refused.

    With ``note=False`` a refusal is an error as well.
    """
    got = None
    with Attempt() as attempt:
        got = run()
    if attempt.error is None:
        check_equal(s, f"{what} is not what eager mode gives", got, expected)
    elif not (note and s.refuses(what, attempt.error, deliberate=False)):
        raise Broken(problem(what, attempt.error)) from attempt.error
