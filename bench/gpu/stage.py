"""Runs one stage in this process: `python -m bench.gpu.stage NAME`; the driver calls it.

It writes lines of JSON to the file descriptor `--pipe`, or prints them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu.lines import Line, first_words, of_machine, read_lines
from bench.gpu.table import BY_NAME


def _writer(pipe: int | None) -> Callable[[Line], None]:
    def write(line: Line) -> None:
        text = line.as_json() + "\n"
        if pipe is None:
            print(text, end="", flush=True)
        else:
            os.write(pipe, text.encode())

    return write


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 2 without CUDA."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=BY_NAME)
    parser.add_argument("--folder", type=Path, default=Path("build/bench-gpu"))
    parser.add_argument("--pipe", type=int)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small sizes")
    parser.add_argument("--any-torch", action="store_true", help="tries the library on an older PyTorch")
    parser.add_argument(
        "--shard", type=int, nargs=2, metavar=("K", "N"), help="compiles each N-th group from K on"
    )
    options = parser.parse_args(arguments)
    device_module, run_module = (importlib.import_module(f"bench.gpu.{name}") for name in ("device", "run"))
    if not options.rehearse and not device_module.has_cuda():
        print("expected a CUDA device, found none", file=sys.stderr)
        return 2
    device: Any = device_module.StandIn() if options.rehearse else device_module.Cuda()
    path = options.folder / ("rehearsal.jsonl" if options.rehearse else "lines.jsonl")
    machine = device.describe()
    run = run_module.Run(
        options.name,
        device,
        _writer(options.pipe),
        of_machine(read_lines(path), machine),
        folder=options.folder,
        shard=tuple(options.shard) if options.shard else None,
        any_torch=options.any_torch,
    )
    stage = BY_NAME[options.name]
    module, _, function = stage.function.partition(":")
    try:
        if stage.needs_library:
            run.library()
        getattr(importlib.import_module(module), function)(run)
    except run_module.Absent as error:
        run.line("", "", state="absent", error=first_words(error))
    else:
        run.line("", "", state="done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
