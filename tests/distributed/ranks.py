"""Runs the cases in two processes that talk over gloo, through each way to compile."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.guards
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.distributed.cases import CASES
from tests.distributed.judge import RanksDisagree, Record, difference, difference_of_facts, record
from tests.distributed.world import DOORS, RANKS, Case, World

TIMEOUT = datetime.timedelta(seconds=20)  # of a collective: a rank that waits for one that raised ends
CLOSE = 1e-5  # of values on one rank, compiled and not
ERRORS = (
    *(RuntimeError, TypeError, ValueError, AssertionError, AttributeError, LookupError),
    CheckpointException,  # a BaseException
)
GRACE = datetime.timedelta(seconds=1)  # for the other rank to raise by itself
BROKEN = re.compile(r"Connection (closed|reset)|[Tt]imed out|Broken pipe|Socket")
ORDER = ("right", "stock", "eager", "refused", "wrong")

Cell = tuple[str, str]  # a case and a way to compile
Outcome = tuple[str, str]  # one of ORDER, or "waits" of one rank; and the message


def run_cases(folder: Path, names: list[str]) -> dict[str, dict[str, Outcome]]:
    """The outcome of each case in each way to compile; cases that end a process are followed by new processes."""
    found: dict[str, dict[str, Outcome]] = {name: {} for name in names}
    cells = [(name, door) for name in names for door in DOORS]
    for number in itertools.count():
        (own := folder / str(number)).mkdir()
        signal = _start_ranks(own, cells)
        ranks = [(own / str(rank)).read_text().splitlines() for rank in range(RANKS)]
        outcomes = [_joined(*map(json.loads, lines)) for lines in zip(*ranks, strict=False)]
        outcomes += [("wrong", f"a process ends by {signal}")] if signal else []
        for (name, door), outcome in zip(cells, outcomes, strict=False):
            found[name][door] = outcome
        cells = cells[len(outcomes) :]
        if not cells:
            break
    return found


def _start_ranks(folder: Path, cells: list[Cell]) -> str:
    """Runs cells until a process is ended by a signal, whose name it returns, or until all have run."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    try:
        mp.start_processes(_run_rank, (folder, store.port, cells), nprocs=RANKS, start_method="spawn")
    except mp.ProcessExitedException as error:
        if error.signal_name is None:
            raise
        return error.signal_name
    return ""


def _joined(first: Outcome, second: Outcome) -> Outcome:
    """The outcome of both ranks."""
    if "waits" in (first[0], second[0]):
        waiting, other = (0, second) if first[0] == "waits" else (1, first)
        return "wrong", f"rank {waiting} waits for the other; {other[1]}"
    if (first[0] == "refused") != (second[0] == "refused"):
        return "wrong", f"refused by one rank: {first[1] or second[1]}"
    return max(first, second, key=lambda outcome: ORDER.index(outcome[0]))


# ---- one rank ------------------------------------------------------------------------------------------------


def _run_rank(rank: int, folder: Path, port: int, cells: list[Cell]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # as in conftest.py
    link = Link(rank, dist.TCPStore("localhost", port))
    with (folder / str(rank)).open("w") as file:
        for name, of_case in itertools.groupby(cells, lambda cell: cell[0]):
            for outcome in _outcomes(CASES[name], [door for _, door in of_case], link):
                print(json.dumps(outcome), file=file, flush=True)
    link.close()


def _outcomes(case: Case, doors: list[str], link: Link) -> Iterator[Outcome]:
    torch.manual_seed(0)
    alone, eager = record((case.alone or case.run)(World())), None
    for door in dict.fromkeys(("eager", *doors)):
        torch.compiler.reset()
        torch.manual_seed(0)
        with compilations() as seen:
            outcome, got = _run(case, link, door, alone, eager)
        link.meet(outcome[0] not in ("refused", "waits"))
        if door == "eager":
            eager = got if outcome[0] == "right" else None
        elif outcome[0] == "right" and "desugar" in door:
            outcome = seen.by, ""
        if door in doors:
            yield outcome


def _run(
    case: Case, link: Link, door: str, alone: Record, eager: Record | None
) -> tuple[Outcome, Record | None]:
    try:
        got = record(case.run(World(link.mesh(), DOORS[door])))
    except RanksDisagree as error:
        return ("wrong", f"the ranks have {error}"), None
    except ERRORS as error:
        return ("waits" if BROKEN.search(str(error)) else "refused", said_by(error)), None
    differs = difference(got.whole, alone.whole, case.tolerance)
    if eager is not None:
        differs = differs or difference_of_facts(got.facts, eager.facts)
        differs = differs or difference(got.own, eager.own, CLOSE)
    return ("wrong" if differs else "right", differs), got


def said_by(error: BaseException) -> str:
    """The class and the first line of an error, without what another run would say differently."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    error = getattr(error, "inner_exception", error)
    line = next(iter(str(error).splitlines()), "")
    line = re.sub(r"^\[\S+\] |0x[0-9a-f]+| ?\[[\d.:a-f]+\]:\d+|/\S+/", "", line).split(". ")[0]
    return f"{type(error).__name__}: {line}"


class Link:
    """The process group of a rank; another one after an error, since a broken one stays broken."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.rank, self.store, self.numbers = rank, store, itertools.count()
        store.set_timeout(datetime.timedelta(seconds=60))

    def mesh(self) -> Any:
        """A mesh of both ranks; DTensor's cache has specs of the one before."""
        _clear_sharding_prop_cache()
        if not dist.is_initialized():
            store = dist.PrefixStore(f"group {next(self.numbers)}", self.store)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=RANKS, timeout=TIMEOUT)
        return dist.init_device_mesh("cpu", (RANKS,))

    def meet(self, well: bool) -> None:
        """Waits for the other rank. If one has raised, both close the group, which ends a collective of the other."""
        key = f"met {next(self.numbers)} by"
        keys = [f"{key} {rank}" for rank in range(RANKS)]
        self.store.set(keys[self.rank], str(well))
        if not well:
            self._wait(keys)
            self.close()
        elif b"False" in map(self.store.get, keys):
            self.close()
        self.store.wait(keys)

    def _wait(self, keys: list[str]) -> None:
        with contextlib.suppress(dist.DistStoreError):
            self.store.wait(keys, GRACE)

    def close(self) -> None:
        """Ends the group if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- who compiled --------------------------------------------------------------------------------------------


class _Compilations(logging.Handler):
    """Notes which graphs this library compiled, and which it left to AOTAutograd."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.left = 0, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        self.ours += message.startswith("compiled ")
        self.left += [message] if "AOTAutograd compiles this graph" in message else []

    @property
    def by(self) -> str:
        """The outcome of a case that is right."""
        return "stock" if self.left else "right" if self.ours else "eager"


@contextlib.contextmanager
def compilations() -> Iterator[_Compilations]:
    """Listens to the logger of this library."""
    log, seen = logging.getLogger("desugar"), _Compilations()
    level, propagate = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(seen)
    try:
        yield seen
    finally:
        log.removeHandler(seen)
        log.setLevel(level)
        log.propagate = propagate
