"""Writes docs/scoreboard.md: which promises of the conformance kit tensor classes keep.

    python -m bench.scoreboard MXTensor NF4Tensor    # puts these classes to the kit, and writes the page
    python -m bench.scoreboard --all                 # all of them, some minutes
    python -m bench.scoreboard --write               # the page alone, from bench/results/scoreboard.json

`bench/reproductions.py` has the classes, and a program for each broken promise of another library.
"""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.reproductions import OTHERS, SUBJECTS, Subject
from docs.wrap import wrap
from subclasses.testing import Failure, Outcome, examine

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "bench" / "results" / "scoreboard.json"
PAGE = ROOT / "docs" / "scoreboard.md"

# The states of a promise for a class, and the letter of each in the table.
STATES = {"kept": "k", "refused": "r", "broken": "**B**", "open": "o", "not tried": "-"}

# ---- states ------------------------------------------------------------------------------------------------


def put_to_the_kit(subject: Subject) -> dict[str, str]:
    """Returns the state of each promise for a class."""
    home = home_of(type(subject.make()))
    report = examine(subject.make, reference=subject.reference, **subject.options)
    return {o.promise.name: state_of(o, subject, home) for o in report.outcomes}


def state_of(outcome: Outcome, subject: Subject, home: Path) -> str:
    """Returns the state of a promise: a difference is broken only where a program without this project shows it."""
    match outcome.state:
        case "kept":
            return "refused" if outcome.refused else "kept"
        case "skipped":
            return "not tried"
    if subject.ours:
        return "broken"
    if outcome.failures and all(is_refusal(failure, home) for failure in outcome.failures):
        return "refused"
    return "broken" if outcome.promise.name in subject.reproductions else "open"


def is_refusal(failure: Failure, home: Path) -> bool:
    """Whether a failure is an ``assert`` in the class's own package, or PyTorch's refusal to unpickle a class."""
    error: BaseException | None = failure.error
    while error is not None:
        if isinstance(error, pickle.UnpicklingError):
            return True
        if isinstance(error, AssertionError) and _raised_in(error, home):
            return True
        error = error.__cause__ or error.__context__
    return False


def _raised_in(error: BaseException, home: Path) -> bool:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and Path(last.tb_frame.f_code.co_filename).is_relative_to(home)


def home_of(cls: type) -> Path:
    """Returns the folder of a class's package; of a class of PyTorch, the folder of its module."""
    package = cls.__module__.partition(".")[0]
    module: Any = import_module(cls.__module__ if package in ("torch", "examples") else package)
    return Path(module.__file__).parent


# ---- the page ----------------------------------------------------------------------------------------------

HEAD = """# Scoreboard

This page shows which promises of the [conformance kit](conformance.md) tensor classes keep: classes of torchao and
PyTorch, and classes of this project beside them. `python -m bench.scoreboard --all` puts each class to the kit and
writes this page; `python -m bench.scoreboard MXTensor` does so for one class.

Measured with {versions}, on the CPU, at the kit's level `gradients`.

| letter | state of a promise |
|---|---|
| k | kept |
| r | kept in each call that the class takes; it refuses some calls, by a deliberate error or an `assert` of its own |
| **B** | broken: a program of at most ten lines below shows it, which needs nothing of this project |
| o | open: the kit finds a difference that no such program shows; only this project may require it |
| - | not tried: the kit lacks an option for it, or the class does not keep a promise that it needs |

A refusal is not a fault. An error from inside, such as an `AttributeError` for a plain operand, is not a refusal. Many
of these classes serve inference in one kind of layer, and claim no more.

**Who should look before this is believed.** This project wrote the kit, the programs and this page. No maintainer of
torchao or PyTorch has reviewed them. A maintainer of the library should run each program, and may call the result
intended: the entry then becomes a refusal. Views in inference mode fail in PyTorch's own code for wrapper subclasses.

Of the classes of this project, each difference that the kit finds counts as broken. A slice of a `JaggedTensor` shares
its values, and PyTorch does not record it as a view, since its offsets are new. [Its own tests](jagged.md) compare it
with a loop over rows.

Four classes are missing. torchao's `Int4Tensor` needs the package `mslk`. The kit cannot read a `DTensor`, whose
`__tensor_flatten__` names a `DeviceMesh`, and a jagged `NestedTensor`, whose copies each have another symbolic size.
tensordict's `TensorDict` (0.15.3) does not inherit from `torch.Tensor`.
"""


def emit_page(record: dict[str, Any]) -> str:
    """Returns the text of the page."""
    versions = ", ".join(f"{name} {number}" for name, number in sorted(record["versions"].items()))
    parts = [HEAD.format(versions=versions), *_counts(record["classes"]), *_matrix(record["classes"])]
    return wrap("\n".join([*parts, *_programs(record["classes"])])).rstrip("\n") + "\n"


def _counts(classes: dict[str, dict[str, str]]) -> Iterator[str]:
    yield f"## Counts\n\n| class | {' | '.join(STATES)} |\n|---|{'---:|' * len(STATES)}"
    for name, states in classes.items():
        yield f"| {_titled(name)} | {' | '.join(str([*states.values()].count(state)) for state in STATES)} |"


def _matrix(classes: dict[str, dict[str, str]]) -> Iterator[str]:
    promises = dict.fromkeys(promise for states in classes.values() for promise in states)
    yield f"\n## Promises\n\n| promise | {' | '.join(map(_titled, classes))} |\n|---|{'---|' * len(classes)}"
    for promise in promises:
        cells = (STATES[states.get(promise, "not tried")] for states in classes.values())
        yield f"| `{promise}` | {' | '.join(cells)} |"


def _titled(name: str) -> str:
    subject = SUBJECTS[name]
    return f"`{name.removesuffix(' here')}`, {'here' if subject.ours else subject.library}"


def _programs(classes: dict[str, dict[str, str]]) -> Iterator[str]:
    yield "\n## Programs\n\n<!-- fmt: off -->\n"
    for subject in OTHERS:
        broken = [p for p, state in classes.get(subject.name, {}).items() if state == "broken"]
        if broken:
            yield f"### {subject.name} of {subject.library}\n"
        programs: dict[str, list[str]] = {}
        for promise in broken:
            programs.setdefault(subject.program(promise), []).append(promise)
        for program, promises in programs.items():
            names = ", ".join(f"`{promise}`" for promise in promises)
            yield f"{names}:\n\n```py\n{program}\n```\n"
    yield "<!-- fmt: on -->"


# ---- the command -------------------------------------------------------------------------------------------


def read_record() -> dict[str, Any]:
    """Returns the states of all classes, and the releases with which they were found."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"versions": {}, "classes": {}}


def main(arguments: Sequence[str]) -> None:
    """Puts the named classes to the kit, and writes the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*SUBJECTS, []], metavar="CLASS")
    parser.add_argument("--all", action="store_true", help="put every class to the kit")
    parser.add_argument("--write", action="store_true", help="write the page from the record alone")
    options = parser.parse_args(arguments)
    record = read_record()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for name in SUBJECTS if options.all else options.names:
        subject = SUBJECTS[name]
        if find_spec(subject.library) is None:
            print(f"{name}: {subject.library} is not installed")
            continue
        record["classes"][name] = put_to_the_kit(subject)
        record["versions"] |= {
            package: version(package) for package in {"torch", subject.library} - {"subclasses"}
        }
        print(name, {state: [*record["classes"][name].values()].count(state) for state in STATES})
    record["classes"] = {name: record["classes"][name] for name in SUBJECTS if name in record["classes"]}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(emit_page(record))


if __name__ == "__main__":
    main(sys.argv[1:])
