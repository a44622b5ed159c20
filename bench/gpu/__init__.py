"""Benchmarks on a GPU that is there for a quarter of an hour: one command, stage by stage.

    make bench-gpu                           # measures for at most 560 s, goes on with an earlier run
    make bench-gpu ARGS="--only int8"        # one stage
    python -m bench.gpu --rehearse           # every stage on the CPU, with small sizes
    python -m bench.gpu --report FILE        # the report of a file of lines

The driver (`driver.py`) imports no torch. It runs each stage of `table.py` in a process of its own, up to a limit. A
stage that crashes or hangs costs its own figures alone. Each figure is a line of JSON (`lines.py`), written when it is
measured. A second run skips the figures that the file has for the same device and versions.

A stage (`stages/`) gets a `Run` (`run.py`) with a `Device` (`device.py`). The device times calls with CUDA events and
records CUDA graphs; in a rehearsal, `StandIn` uses a clock and a loop on the CPU. `report.py` writes
`bench/results/gpu-*.md`.
"""
