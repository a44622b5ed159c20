"""Promises about what surrounds a call: several threads at once, autocast."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch

from subclasses.testing.cases import Case, accepted
from subclasses.testing.compare import check_close, leaves, value_difference
from subclasses.testing.ops import collect_problems
from subclasses.testing.promise import Attempt, Broken, Skipped, promise, shown
from subclasses.testing.subject import SEED, Subject

_THREADS, _ROUNDS = 4, 3

# ---- threads -----------------------------------------------------------------------------------------------


@promise(
    "keep what belongs to one call in local variables: no scratch on the class or the module, no flag that is set and "
    "put back; a table that is filled on the way must not be seen half filled"
)
def threads(s: Subject) -> None:
    """Calls from several threads at once give what each gives alone."""
    cases = accepted(s)
    with torch.no_grad():
        given = [_seeded(s, i) for i in range(_THREADS)]
        expected = [[case.run(x) for case in cases] for x in given]
    together = Barrier(_THREADS)

    def work(i: int) -> None:
        together.wait()
        for _ in range(_ROUNDS):
            for case, wanted in zip(cases, expected[i], strict=True):
                with Attempt() as attempt, torch.no_grad():
                    got = case.run(given[i])
                    problem = value_difference(s, got, wanted)
                    if problem:
                        raise Broken(f"{case.name} beside other threads: {problem}")
                if attempt.error is not None:
                    text = f"{case.name} beside other threads raised {shown(attempt.error)}"
                    broken = attempt.error if isinstance(attempt.error, Broken) else Broken(text)
                    raise broken from attempt.error

    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(work, i) for i in range(_THREADS)]:
            done.result()


def _seeded(s: Subject, i: int) -> Any:
    """A value that a factory that draws makes another one for each thread."""
    torch.manual_seed(SEED + i)
    return s.factory()


# ---- autocast ----------------------------------------------------------------------------------------------


@promise(
    "under autocast torch casts the arguments of matrix products before dispatch, by `to`: a rule must take inputs of "
    "a lower dtype than its inner tensors have, and bring both to one"
)
def autocast(s: Subject) -> None:
    """What an op gives under autocast is, up to rounding, what it gives there on the tensor stood for."""
    x = s.make()
    if x.dtype is not torch.float32:
        raise Skipped(f"autocast leaves {x.dtype} as it is")

    def run(case: Case) -> None:
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
            expected = [leaves(case.run(plain.detach().clone())) for plain in s.reference(s.make())]
            if torch.bfloat16 in [getattr(leaf, "dtype", None) for leaf in expected[0]]:
                got = leaves(case.run(s.make()))
                for i, one in enumerate(got):
                    _check_rounded(s, f"{case.name} under autocast", one, [e[i] for e in expected])

    collect_problems(s, accepted(s), run)


def _check_rounded(s: Subject, what: str, got: Any, expected: list[Any]) -> None:
    """Compares in the dtype of the reference: a class may keep more digits."""
    plain = s.reference(got) if isinstance(got, s.cls) else (got,) * len(expected)
    for p, e in zip(plain, expected, strict=True):
        if p.shape != e.shape:
            raise Broken(f"{what} has shape {list(p.shape)}, its reference {list(e.shape)}")
        check_close(s, what, p.to(e.dtype), e)
