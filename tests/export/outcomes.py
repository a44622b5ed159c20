"""Runs a case through the steps of ``torch.export``, and returns the outcome of each step."""

from __future__ import annotations

import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from subclasses import TensorSubclass, export
from tests.export.cases import Case

STEPS = ("export", "module", "save, load", "run_decompositions", "AOTInductor")
RIGHT, NOT_RUN = ("right", ""), ("", "")
Outcome = tuple[str, str]  # "right", "wrong" or "refused", and the error message
Run = Callable[[], Any]


def run_case(
    case: Case, *, flattened: bool, strict: bool, fits: bool = True, steps: tuple[str, ...] = STEPS
) -> dict[str, Outcome]:
    """Exports a function, and calls each form of the program. Without a program, no form is called.

    Args:
        case: the function and its calls.
        flattened: whether it is exported as a ``Flattened``.
        strict: as in ``torch.export.export``.
        fits: whether the program may take the later call.
        steps: the steps whose outcomes are returned.
    """
    torch.manual_seed(0)
    module = case.make().eval()
    flatten = export.flatten if flattened else lambda tree: tree
    later = flatten(case.later())
    found: dict[str, Outcome] = dict.fromkeys(steps, NOT_RUN)
    with torch.no_grad(), quiet():
        expected = module(*export.unflatten(later))
        try:
            program = export_case(case, module, flattened, strict)
        except Exception as error:  # noqa: BLE001 - whatever it raises is the outcome
            return found | {"export": _refusal(error)}
        found["export"] = RIGHT
        for step in steps[1:]:
            found[step] = judge(lambda step=step: FORMS[step](program)(*later), expected, fits)
    return found


def export_case(case: Case, module: Any, flattened: bool, strict: bool) -> Any:
    """Exports the traced call of a case."""
    args, shapes = case.traced(), case.dynamic
    if not flattened:
        return torch.export.export(module, args, dynamic_shapes=shapes, strict=strict)
    args = export.flatten(args)
    shapes = shapes or export.dynamic_shapes(args)
    return torch.export.export(export.Flattened(module), args, dynamic_shapes=shapes, strict=strict)


def judge(run: Run, expected: Any, fits: bool) -> Outcome:
    """Runs one form of a program, and compares with eager mode."""
    try:
        got = export.unflatten(run())
    except Exception as error:  # noqa: BLE001 - whatever it raises is the outcome
        return _refusal(error)
    if not fits:
        return "wrong", "takes the call"
    try:
        check_same(got, expected)
    except AssertionError as error:
        return "wrong", _first_line(error)
    return RIGHT


def _refusal(error: Exception) -> Outcome:
    return "refused", f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


# ---- comparing ---------------------------------------------------------------------------------------------


def check_same(got: Any, expected: Any) -> None:
    """Raises AssertionError unless two results have the same types, metadata and values."""
    pairs = zip(_parts(got), _parts(expected), strict=True)
    for (kind, value), (wanted_kind, wanted) in pairs:
        assert kind == wanted_kind, f"{kind} in place of {wanted_kind}"
        torch.testing.assert_close(value, wanted, equal_nan=True)


def _parts(result: Any) -> Iterator[tuple[Any, Any]]:
    for leaf in optree.tree_leaves(result, none_is_leaf=True):
        if isinstance(leaf, TensorSubclass):
            names, layout = leaf.__tensor_flatten__()
            for name in names:
                yield (layout, name, tuple(leaf.shape)), getattr(leaf, name)
        else:
            yield type(leaf), leaf.detach() if isinstance(leaf, Tensor) else leaf


# ---- the forms of a program --------------------------------------------------------------------------------


def reload(program: Any) -> Any:
    """Saves a program and loads it."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def compile_ahead(program: Any) -> Callable[..., Any]:
    """Compiles a program with AOTInductor, and loads what that made."""
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder, "model.pt2")))
        return torch._inductor.aoti_load_package(path)


FORMS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "module": lambda program: program.module(),
    "save, load": lambda program: reload(program).module(),
    "run_decompositions": lambda program: program.run_decompositions().module(),
    "AOTInductor": compile_ahead,
}


@contextmanager
def quiet() -> Iterator[None]:
    """Leaves out what PyTorch logs and warns of on the way to an error."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
