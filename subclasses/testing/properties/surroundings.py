"""Calls beside other threads, under autocast, and with a subclass that the class does not know."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import disabled_torch_function_impl, make_wrapper_subclass
from subclasses.testing.cases import accepted, like, run_on_reference
from subclasses.testing.compare import check_close, check_equal, check_shape, leaves
from subclasses.testing.errors import Attempt, Broken, Skipped, must
from subclasses.testing.faults import harmless
from subclasses.testing.property import Case, promise
from subclasses.testing.subject import SEED, Subject, seed

_THREADS, _ROUNDS = 4, 3

# ---- threads -----------------------------------------------------------------------------------------------


@promise(
    "keep what belongs to one call in local variables: no scratch on the class or the module, no flag that is set and "
    "put back; a table that is filled on the way must not be seen half filled"
)
def threads(s: Subject) -> None:
    """Calls from several threads at once give what each gives alone."""
    cases = harmless(s)
    given, expected = [], []
    for i in range(_THREADS):
        seed(SEED + i)
        given.append(s.factory())  # a factory that draws random numbers makes another value for each thread
        with torch.no_grad():
            expected.append([case.run(given[i]) for case in cases])
    together = Barrier(_THREADS)

    def work(i: int) -> None:
        together.wait()
        for case, wanted in [*zip(cases, expected[i], strict=True)] * _ROUNDS:
            what = f"{case.name} beside other threads"
            with must(what), torch.no_grad():
                check_equal(s, what, case.run(given[i]), wanted)

    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(work, i) for i in range(_THREADS)]:
            done.result()


# ---- autocast ----------------------------------------------------------------------------------------------


@promise(
    "under autocast torch casts the arguments of matrix products before dispatch, by `to`: a rule must take inputs of "
    "a lower dtype than its inner tensors have, and bring both to one",
    cases=accepted,
    of_right_values=True,
)
@torch.no_grad()
def autocast(s: Subject, case: Case) -> None:
    """What an op gives under autocast is, up to rounding, what it gives there on the tensor stood for."""
    x = s.make()
    if x.dtype is not torch.float32:
        raise Skipped(f"autocast leaves {x.dtype} as it is")
    with torch.autocast(x.device.type, torch.bfloat16):
        expected = [leaves(result) for result in run_on_reference(s, case)]
        if torch.bfloat16 not in [getattr(leaf, "dtype", None) for leaf in expected[0]]:
            return
        for got, *wanted in zip(leaves(case.run(s.make())), *expected, strict=True):
            _check_rounded(s, f"{case.name} under autocast", got, wanted)


def _check_rounded(s: Subject, what: str, got: Any, expected: list[Any]) -> None:
    """Compares in the dtype of the reference: a class may keep more digits."""
    for p, e in zip(s.references(got, len(expected)), expected, strict=True):
        check_shape(what, p, e)
        check_close(s, what, p.to(e.dtype), e)


# ---- a foreign subclass ---------------------------------------------------------------------------------------


class ForeignSubclass(Tensor):
    """A subclass that no other class knows; it records the types of each call that it handles."""

    asked: list[tuple[type, ...]]

    @staticmethod
    def __new__(cls, like: Tensor) -> Any:
        """A value with the outer size, dtype and device of another tensor."""
        x = make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        x.asked = []
        x.inside = torch.ones(like.shape, dtype=like.dtype, device=like.device)
        return x

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "ForeignSubclass()"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inside"], None

    @staticmethod
    def __tensor_unflatten__(inners: Any, context: Any, size: Any, stride: Any) -> Any:
        return ForeignSubclass(inners["inside"])

    __torch_function__ = disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in args:
            if isinstance(x, ForeignSubclass):
                x.asked.append(tuple(types))
        return torch.zeros(())


@promise(
    "in __torch_dispatch__, `return NotImplemented` if types holds a class that you do not know: not every "
    "tensor that is not of your class is a plain one"
)
def strangers(s: Subject) -> None:
    """A call with an unknown subclass is left to that subclass, or refused."""
    ops: list[Any] = [torch.hypot, torch.fmax, torch.logaddexp]
    for op in ops:
        x = s.make()
        for flip in (False, True):
            foreign = ForeignSubclass(like(x))
            args = (foreign, x) if flip else (x, foreign)
            with Attempt() as attempt, torch.no_grad():
                op(*args)
            asked = any(s.cls in types for types in foreign.asked)
            if attempt.error is None and not asked:
                raise Broken(
                    f"torch.{op.__name__} on a {s.name} and an unknown subclass gave a result, and the unknown "
                    f"subclass was {'never asked' if not foreign.asked else 'asked about its part alone'}"
                )
            if attempt.error is not None and not s.refuses(f"torch.{op.__name__}", attempt.error):
                raise attempt.error
