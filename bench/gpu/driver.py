"""Runs the stages one after another, each in a process of its own. It imports no torch: a device may hang."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.gpu.lines import Line, first_words, of_machine, parse_line, read_lines
from bench.gpu.table import Stage

ATTEMPTS = 3  # a stage that crashes starts again behind the subject that made it crash
STOPPING = 25.0  # seconds for the report, and for packing the caches
Command = Callable[[Stage, int], list[str]]


@dataclass
class Driver:
    """One run: a file of lines, and the seconds that are left.

    Attributes:
        folder: The folder of the lines, of the stages' logs, and of the caches of compilers.
        budget: The seconds of the whole run.
        command: Returns the command of a stage, given the number of the pipe for its lines.
        rehearsal: Whether the stages run on the CPU.
        copy: A second file that gets each new line, or None.
        show: Gets each new line.
        patience: A factor of the stages' limits, for a machine that is slow.
    """

    folder: Path
    budget: float
    command: Command
    rehearsal: bool = False
    copy: Path | None = None
    show: Callable[[Line], None] = lambda line: None
    patience: float = 1.0
    machine: str = ""
    started: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> Path:
        """The file of the lines; a rehearsal has its own."""
        return self.folder / ("rehearsal.jsonl" if self.rehearsal else "lines.jsonl")

    def seconds_left(self) -> float:
        return self.budget - STOPPING - (time.monotonic() - self.started)

    def write(self, line: Line) -> None:
        """Appends a line to the files at once; that a step has begun matters to the driver alone."""
        if line.state == "begun":
            return
        self.machine = line.machine or self.machine
        line = replace(line, machine=line.machine or self.machine, rehearsal=self.rehearsal)
        for path in filter(None, (self.path, self.copy)):
            with path.open("a") as file:
                file.write(line.as_json() + "\n")
        self.show(line)

    def end_last_line(self) -> None:
        """Ends a line of which an earlier run wrote a part before it was killed."""
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            with self.path.open("a") as file:
                file.write("\n")

    # -------------------------------------------------------------------------------------------------
    # stages
    # -------------------------------------------------------------------------------------------------

    def run(self, stages: Sequence[Stage]) -> None:
        """Runs the stages that the file does not call done; the first one always runs, and names the machine."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.end_last_line()
        for number, stage in enumerate(stages):
            left = self.seconds_left()
            if left <= 0:
                self.write(Line(stage.name, state="not run", error="no time was left"))
            elif number == 0 or not self.is_done(stage):
                self.run_stage(stage)

    def is_done(self, stage: Stage) -> bool:
        """Whether an earlier run, on this machine, ended the stage."""
        lines = of_machine(read_lines(self.path), self.machine)
        return any(line.stage == stage.name and line.state in ("done", "absent") for line in lines)

    def run_stage(self, stage: Stage) -> None:
        """Runs a stage until it ends, its time is over, or it crashes again without a new line."""
        deadline = time.monotonic() + min(self.patience * stage.seconds, self.seconds_left())
        for attempt in range(ATTEMPTS):
            process = _Process(self.command, stage, self.folder / "logs" / f"{stage.name}.{attempt}.log")
            lines, state = process.collect(deadline, self.write)
            if any(line.state in ("done", "absent") for line in lines):
                return  # the process may fail afterwards, such as while it frees the device
            if state == "":
                self.write(Line(stage.name, state="done"))
                return
            if not lines or lines[-1].state != "begun":
                break
            self.write(replace(lines[-1], error=process.why(state), state="hung" if state == "hung" else ""))
            if state == "hung":
                break
        self.write(Line(stage.name, state=state, error=process.why(state)))


# ---------------------------------------------------------------------------------------------------------
# processes
# ---------------------------------------------------------------------------------------------------------


class _Process:
    """The process of a stage, in a process group of its own, which writes lines to a pipe and all else to a log."""

    def __init__(self, command: Command, stage: Stage, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.stage, self.log, self.started = stage, log, time.monotonic()
        self.pipe, written = os.pipe()
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command(stage, written),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[written],
                process_group=0,
            )
        os.close(written)

    def collect(self, deadline: float, write: Callable[[Line], None]) -> tuple[list[Line], str]:
        """Passes lines on as they come; returns them, and `hung`, `crashed` or nothing."""
        lines: list[Line] = []
        rest = b""
        try:
            while (left := deadline - time.monotonic()) > 0:
                is_over = self.process.poll() is not None
                if select.select([self.pipe], [], [], 0 if is_over else min(left, 0.2))[0]:
                    part = os.read(self.pipe, 65536)
                    *whole, rest = (rest + part).split(b"\n")
                    for line in filter(None, (parse_line(text.decode(errors="replace")) for text in whole)):
                        lines.append(line)
                        write(line)
                    is_over = not part
                if is_over:
                    break
            code = self._wait(deadline)
        finally:
            self._kill()
            os.close(self.pipe)
        return lines, "hung" if code is None else "crashed" if code else ""

    def _wait(self, deadline: float) -> int | None:
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def _kill(self) -> None:
        """Ends the process and its children. One that waits for the device inside of the kernel may stay."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2)

    def why(self, state: str) -> str:
        """Returns one line: the signal or the last line of the log."""
        if state == "hung":
            return f"ended after {time.monotonic() - self.started:.0f} s, the limit"
        code = self.process.returncode
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        written = self.log.read_text(errors="replace").strip().splitlines()
        return first_words(written[-1] if written else f"exit status {code}")


def stage_command(folder: Path, rehearsal: bool, arguments: Sequence[str] = ()) -> Command:
    """Returns the function that gives the command of a stage."""

    def command(stage: Stage, pipe: int) -> list[str]:
        more = ["--rehearse"] if rehearsal else []
        return [
            *(sys.executable, "-m", "bench.gpu.stage", stage.name),
            *("--folder", str(folder), "--pipe", str(pipe), *more, *arguments),
        ]

    return command
