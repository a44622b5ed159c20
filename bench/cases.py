"""Counts the hard cases that each compiler gets right, with eager mode as the judge: `python -m bench.cases`.

`tests/desugar/test_hard_cases.py` has the cases: shared inner tensors, mutation, views, gradients of another kind,
second derivatives, hooks, threads. Each runs with four classes. Three are written by hand: PyTorch's `TwoTensor`, a
class with metadata, and a class whose outer size differs from its inner tensors' sizes. The fourth is declared. No
compiler writes kernels here: the plain graphs run as they are.

An outcome is `right` if it equals the outcome in eager mode, `refused` for an error that eager mode does not raise, and
`wrong` otherwise. Writes `bench/results/cases.json` and `cases.md`.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.desugar import test_hard_cases as hard

RESULTS = Path(__file__).parent / "results"
STOCK, BACKEND, DIRECT = "torch.compile", 'torch.compile(backend="desugar")', "desugar.compile"

Outcomes = dict[str, dict[str, str]]  # case and class -> way -> outcome


def by_stock(fn: Any) -> Any:
    """Compiles with stock `torch.compile`, which runs the plain graphs as they are."""
    return torch.compile(fn, backend="aot_eager")


def by_backend(fn: Any) -> Any:
    """Compiles with `torch.compile` and this library's backend."""
    return torch.compile(fn, backend="desugar", options={"backend": "eager"})


WAYS: dict[str, Callable[[Any], Any]] = {STOCK: by_stock, BACKEND: by_backend, DIRECT: hard.by_pass}


def outcome(name: str, kind: str, way: Callable[[Any], Any]) -> str:
    """Runs one case in eager mode and compiled; returns `right`, `refused` or `wrong`."""
    torch.compiler.reset()
    scenario, cls = hard.CASES[name], hard.KINDS[kind]
    torch.manual_seed(0)
    want = hard.seen(scenario(hard.eager, cls))
    torch.manual_seed(0)
    try:
        got = hard.seen(scenario(way, cls))
    except AssertionError:
        return "wrong"  # an assertion of the scenario failed
    except Exception:  # noqa: BLE001 - a compiler may raise any error
        return "refused"
    return "right" if hard.differs(got, want) is None else "wrong"


def find_outcomes() -> Outcomes:
    """Returns the outcomes of all cases with all classes, in the order of the cases' numbers."""
    return {
        f"{name.removeprefix('c')}, {kind}": {
            way: outcome(name, kind, compiler) for way, compiler in WAYS.items()
        }
        for name in sorted(hard.CASES)
        for kind in hard.KINDS
    }


def count(outcomes: Outcomes, way: str) -> Counter[str]:
    """Returns how many cases have each outcome."""
    return Counter(ways[way] for ways in outcomes.values())


def format_markdown(outcomes: Outcomes, release: str) -> str:
    """Returns the counts, and the cases that are not right everywhere, as a page."""
    out = [
        f"Counted by `python -m bench.cases` with PyTorch {release}: {len(outcomes)} runs of each way.",
        "",
    ]
    out += ["|  | right | refused | wrong |", "|---|---:|---:|---:|"]
    for way in WAYS:
        counts = count(outcomes, way)
        out.append(f"| {way} | {counts['right']} | {counts['refused']} | {counts['wrong']} |")
    out += ["", f"| case, class | {' | '.join(WAYS)} |", "|---|---|---|---|"]
    for name, ways in outcomes.items():
        if {*ways.values()} != {"right"}:
            out.append(f"| {name.replace('_', ' ')} | {' | '.join(ways[way] for way in WAYS)} |")
    return "\n".join(out) + "\n"


def main() -> None:
    """Runs the cases; prints and writes their outcomes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    outcomes = find_outcomes()
    RESULTS.mkdir(exist_ok=True)
    record = {"machine": {"torch": torch.__version__, "python": sys.version.split()[0]}, "cases": outcomes}
    (RESULTS / "cases.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / "cases.md").write_text(format_markdown(outcomes, torch.__version__))
    print(format_markdown(outcomes, torch.__version__))


if __name__ == "__main__":
    main()
