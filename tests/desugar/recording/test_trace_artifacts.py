"""What PyTorch's tools see: artifacts under TORCH_TRACE, the logger's levels."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import desugar
from desugar.recording.listeners import Recording
from desugar.recording.trace_artifacts import collect_texts

ROOT = Path(__file__).parents[3]
SCRIPT = """
import torch, desugar
f = desugar.compile(lambda x: (x * 2).sum(), backend="eager", dynamic=False)
f(torch.ones(2, requires_grad=True)).backward()
f(torch.ones(3))
torch.compile(lambda x: x + 1, backend="desugar", options={"backend": "eager"})(torch.ones(2))
"""


def run_script(folder, **environment):
    """Runs the script from a file, whose lines Dynamo's graphs then name."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def read_artifacts(folder):
    """(compile id, name, text) of the artifacts of ours: a line of JSON, and the indented payload below it."""
    (file,) = folder.glob("*.log")
    found, lines = [], file.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("V") and '"desugar_' in line:
            record = json.loads(line[line.index("{") :])
            payload = itertools.takewhile(lambda text: text.startswith("\t"), lines[number:])
            text = "\n".join(one[1:] for one in payload)
            numbers = record["frame_id"], record["frame_compile_id"]
            found.append((numbers, record["artifact"]["name"], text))
    return found


@pytest.mark.slow
def test_torch_trace_gets_the_texts_of_each_compilation(tmp_path):
    run_script(tmp_path, TORCH_TRACE=str(tmp_path))
    found = read_artifacts(tmp_path)
    ids = list(dict.fromkeys(number for number, _, _ in found))
    assert ids == [(0, 0), (0, 1), (1, 0)], "Dynamo's own, through both doors"
    names = [{name for number, name, _ in found if number == one} for one in ids]
    common = {
        "desugar_reason",
        "desugar_stages",
        "desugar_layouts",
        "desugar_forward_graph",
        "desugar_wrapper",
    }
    assert names[0] == common | {"desugar_backward_graph"} and names[1] == names[2] == common
    texts = {(number, name): text for number, name, text in found}
    assert "def run(a0):" in texts[ids[0], "desugar_wrapper"]
    assert "aten.mul.Tensor" in texts[ids[1], "desugar_forward_graph"]
    reasons = [json.loads(texts[number, "desugar_reason"]) for number in ids]
    assert [(reason["function"], reason["reason"]) for reason in reasons] == [
        ("<lambda>", "first call"),
        ("<lambda>", "x.requires_grad: expected True, got False"),
        ("<lambda>", "a graph of torch.compile"),
    ]


@pytest.mark.slow
def test_the_stack_of_each_call_is_there_for_the_tree_of_compilations(tmp_path):
    run_script(tmp_path, TORCH_TRACE=str(tmp_path))
    script = tmp_path / "script.py"
    (file,) = tmp_path.glob("*.log")
    records = [
        json.loads(line[line.index("{") :]) for line in file.read_text().splitlines() if line[0] == "V"
    ]
    names = {number: text for text, number in (r["str"] for r in records if "str" in r)}
    stacks = [r["dynamo_start"]["stack"] for r in records if "dynamo_start" in r]
    lines = [[f["line"] for f in stack if names[f["filename"]] == str(script)] for stack in stacks]
    assert lines == [[4, 3], [5, 3], [6]]


# As pip installs it beside this Python, whose environment need not be activated.
TLPARSE = shutil.which("tlparse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
NEEDS_TLPARSE = pytest.mark.skipif(TLPARSE is None, reason="needs tlparse")


@pytest.mark.slow
@NEEDS_TLPARSE
def test_tlparse_shows_them(tmp_path):
    run_script(tmp_path, TORCH_TRACE=str(tmp_path))
    (file,) = tmp_path.glob("*.log")
    command = [TLPARSE, str(file), "-o", str(tmp_path / "out"), "--no-browser"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "fail" not in done.stdout + done.stderr
    shown = (tmp_path / "out" / "index.html").read_text()
    assert shown.count("desugar_wrapper") >= 3 and shown.count("desugar_reason") >= 3


@pytest.mark.slow
@NEEDS_TLPARSE
def test_tlparse_shows_those_of_a_folder_with_a_file_for_each_rank(tmp_path):
    run_script(tmp_path, TORCH_TRACE=str(tmp_path / "trace"))
    (file,) = (tmp_path / "trace").glob("*.log")
    for rank in range(2):  # the names that PyTorch gives in a torch.distributed run
        shutil.copy(file, file.with_name(f"dedicated_log_torch_trace_rank_{rank}_abc.log"))
    file.unlink()
    command = [TLPARSE, "--all-ranks-html", str(file.parent), "-o", str(tmp_path / "out"), "--no-browser"]
    subprocess.run(command, capture_output=True, text=True, check=True)
    for rank in range(2):
        shown = (tmp_path / "out" / f"rank_{rank}" / "index.html").read_text()
        assert shown.count("desugar_wrapper") >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("level", "has_texts"), [("desugar", False), ("+desugar", True)])
def test_torch_logs_sets_the_level(tmp_path, level, has_texts):
    said = run_script(tmp_path, TORCH_LOGS=level)
    assert "compiled program 1 of <lambda>: first call" in said
    assert "compiled program 2 of <lambda>: x.requires_grad: expected True, got False" in said
    assert "compiled a graph of <lambda> for torch.compile" in said
    assert ("def run(a0):" in said) is has_texts


def test_the_logger_has_the_same_levels(caplog):
    compiled = desugar.compile(lambda x: x * 2, backend="eager")
    with caplog.at_level(logging.INFO, logger="desugar"):
        compiled(torch.ones(2))
    assert [record.levelname for record in caplog.records if record.name == "desugar"] == ["INFO"]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="desugar"):
        compiled(torch.ones(2).double())
    said = [record.getMessage() for record in caplog.records if record.name == "desugar"]
    assert any(
        text.endswith("wrapper\ndef run(a0):") for text in (one[: one.find(":\n") + 1] for one in said)
    )
    assert said[-1].startswith("compiled program 2 of test_the_logger_has_the_same_levels")
    assert said[-1].endswith(": x.dtype: expected float32, got float64")


def test_a_failed_compilation_has_its_error():
    texts = collect_texts(Recording(len, "first call", error=ValueError("odd")))
    assert json.loads(texts["reason"])["error"] == "ValueError: odd" and "wrapper" not in texts
