"""Every stage of the GPU benchmarks runs on the CPU, with small sizes; the report is written from its lines."""

import importlib
import importlib.util
import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench.gpu.device import StandIn
from bench.gpu.lines import Line, read_lines
from bench.gpu.report import write_report
from bench.gpu.run import Absent, Run, Turns
from bench.gpu.stages import calls, counters, int8, model, padded, recorded, training
from bench.gpu.table import BY_NAME, STAGES
from tests.tables import giving, raising

ROOT = Path(__file__).parents[2]
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
# Rows without a figure on a CPU, and rows that do not exist yet; all other rows must have a figure.
MISSING = {
    "model": {model.NESTED},
    "training": {training.FLEX, training.NESTED},
    "int8": {int8.GEMLITE, *(name for rows in int8.TILES for name in int8.kernel_ways(rows))},
    "chain": {int8.GEMLITE},
    "dynamic": {*int8.kernel_ways_of_integers()},
    "padded": {padded.WITHOUT_MASK},
}
TIMED = {
    "basics": 3 + 2 + 2,
    "model": 2,
    "training": 6,
    "int8": 2 * 6 + 3 * 2,
    "chain": 6,
    "dynamic": 5 + 2,
    "padded": 4,
    "calls": 7 + 6,
    "events": 2,
    "keyed": 2 * 4,
}


def rehearse(name, **options):
    """Runs a stage in this process; returns its lines."""
    lines = []
    run = Run(name, StandIn(), lines.append, **options)
    module, _, function = BY_NAME[name].function.partition(":")
    try:
        getattr(importlib.import_module(module), function)(run)
    except Absent as error:
        run.line("", "", state="absent", error=str(error))
    return lines


@pytest.fixture
def no_advice():
    """Silences the log lines of torch.nested about attention on a CPU, and the warnings of torchao."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.sweep(20)
@pytest.mark.usefixtures("no_advice")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TIMED)
def test_a_stage_measures_each_of_its_subjects(name, tmp_path):
    lines = rehearse(name, folder=tmp_path)
    missing = {line.subject for line in lines if line.error}
    theirs = [line for line in lines if line.error and "torchao" in line.subject and not HAS_TORCHAO]
    wanted = MISSING.get(name, set()) | {line.subject for line in theirs}
    assert missing == wanted, [line.error for line in lines if line.error]
    timed = [(line.group, line.subject) for line in lines if line.figure == "time"]
    assert len(timed) == len(set(timed)) == TIMED[name] - len(theirs)
    for group in {group for group, _ in timed}:
        first, last = (
            [x for x in lines if x.group == group and x.figure == f"time, {y}"] for y in ("first", "last")
        )
        assert [x.subject for x in first] == [x.subject for x in last] and len(first) == 1
    assert all(line.rehearsal and line.machine for line in lines)
    path = tmp_path / "rehearsal.jsonl"
    path.write_text("".join(line.as_json() + "\n" for line in lines))
    assert read_lines(path) == lines
    (page,) = write_report(path)
    assert page.parent == tmp_path / "rehearsal"
    text = page.read_text()
    assert "no figure comes from a GPU" in text and all(subject in text for _, subject in timed)
    assert all(f"- {line.group}: {line.subject}: {line.error}" in text for line in lines if line.error)
    again = rehearse(name, folder=tmp_path, earlier=lines)
    assert not [line for line in again if line.figure == "time"], "a second run skips what is there"


def test_stages_without_a_subject_say_so(monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    (line,) = rehearse("counters")
    assert line.state == "absent" and "expected ncu" in line.error
    assert {"basics", "warm", "recorded", "counters", *TIMED} == {stage.name for stage in STAGES}


@pytest.mark.slow
def test_a_recorded_step_is_measured():
    """On the CPU it is the step itself."""
    lines = rehearse("recorded")
    assert not [line.error for line in lines if line.error]
    (off,) = [line.value for line in lines if "difference" in line.figure]
    assert off == 0
    assert {line.subject for line in lines if line.figure == "time"} == {recorded.PLAIN, recorded.RECORDED}


@pytest.mark.slow
def test_the_whole_rehearsal(tmp_path):
    """Through the command, each stage in a process of its own."""
    command = [sys.executable, "-m", "bench.gpu", "--rehearse", "--budget", "900", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = read_lines(tmp_path / "rehearsal.jsonl")
    states = {line.stage: line.state for line in lines if line.state and not line.subject}
    assert states == {stage.name: "absent" if stage.name == "counters" else "done" for stage in STAGES}
    pages = {path.name for path in (tmp_path / "rehearsal").glob("*.md")}
    assert pages == {f"gpu-{stage.name}.md" for stage in STAGES}
    for name, count in TIMED.items():
        assert len([x for x in lines if x.stage == name and x.figure == "time"]) >= count - 3 * (
            not HAS_TORCHAO
        )


# ---------------------------------------------------------------------------------------------------------
# failures in a stage
# ---------------------------------------------------------------------------------------------------------


def fail(error):
    raise error


def measure_around(error, **options):
    """Times two subjects beside one that raises an error; returns the lines."""
    lines = []
    run = Run("stage", StandIn(), lines.append, **options)
    makers = {"base": lambda: int, "bad": lambda: fail(error), "good": lambda: int}
    run.compare("group", makers, Turns("base", rounds=5, seconds=0.0))
    return lines


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"),
        ImportError("no x"),
        KeyError("k"),
        Absent("x"),
    ],
)
def test_a_subject_that_fails_costs_itself_alone(error):
    lines = measure_around(error)
    (failure,) = [line for line in lines if line.error]
    assert failure.subject == "bad" and failure.error.startswith(f"{type(error).__name__}: ")
    assert "\n" not in failure.error
    assert [line.subject for line in lines if line.figure == "time"] == ["base", "good"]
    assert {line.ratio is None for line in lines if line.figure == "time"} == {False}
    assert not [line for line in measure_around(error, earlier=lines) if line.figure or line.error]


def test_a_lost_device_ends_the_stage_behind_the_subject(monkeypatch):
    """The driver starts the stage again; the last line names the subject."""
    lines = []
    run = Run("stage", StandIn(), lines.append)
    monkeypatch.setattr(
        run.device, "synchronize", lambda: fail(RuntimeError("illegal access")), raising=False
    )
    with pytest.raises(RuntimeError, match="illegal access"):
        run.attempt("group", "bad", lambda: None)
    assert (lines[-1].state, lines[-1].subject) == ("begun", "bad")


def test_a_subject_that_hung_is_tried_once_more():
    hung = Line("stage", "group", "good", error="ended after 9 s, the limit", state="hung")
    machine = Run("stage", StandIn(), print).machine
    tried = measure_around(ImportError("no x"), earlier=[replace(hung, machine=machine)])
    assert "good" in {line.subject for line in tried if line.figure}
    tried = measure_around(ImportError("no x"), earlier=[replace(hung, machine=machine)] * 2)
    assert "good" not in {line.subject for line in tried if line.figure}


def test_an_older_torch_is_named_and_costs_our_subjects_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    lines = []
    with torch.no_grad():
        int8._measure_layers(
            Run("int8", StandIn(), lines.append, folder=tmp_path),
            (32, 16),
            (1,),
            {name: int8.WAYS[name] for name in (int8.PLAIN, int8.WEIGHT_ONLY)},
        )
    (failure,) = [line for line in lines if line.error]
    assert (
        failure.subject == int8.WEIGHT_ONLY and "expected torch >= 2.13, found 2.11.0+cu130" in failure.error
    )
    assert [line.subject for line in lines if line.figure == "time"] == [int8.PLAIN, int8.FLOOR]
    Run("int8", StandIn(), print, any_torch=True).library()


# ---------------------------------------------------------------------------------------------------------
# subjects have the right values
# ---------------------------------------------------------------------------------------------------------

attend = F.scaled_dot_product_attention


def attend_row_by_row(q, k, v, is_causal):
    """Causal attention of nested tensors, which `torch.nested` supports on a GPU only."""
    if not q.is_nested:
        return attend(q, k, v, is_causal=is_causal)
    parts = zip(*(x.transpose(1, 2).unbind() for x in (q, k, v)), strict=True)
    rows = [attend(*(p.transpose(0, 1) for p in row), is_causal=is_causal).transpose(0, 1) for row in parts]
    offsets = q.transpose(1, 2).offsets()
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets).transpose(1, 2)


class Eager(StandIn):
    """Compiles nothing."""

    def compile(self, compiler, fn, **options):
        return fn


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend_row_by_row)
    return Run("stage", Eager(), lambda line: None)


def loss_and_gradients(module, loss_of):
    loss = loss_of()
    loss.backward()
    return loss.detach(), [p.grad for p in module.parameters()]


def check_alike(found):
    """Compares the results of each name with the results of the first name."""
    first, *others = found
    for name in others:
        torch.testing.assert_close(found[name], found[first], msg=lambda text, name=name: f"{name}: {text}")


def test_every_layout_of_the_model_gives_the_same_loss_and_gradients(eager):
    rows = [torch.randint(256, (n + 1,)) for n in (5, 3, 12)]
    names = (model.DENSE, model.JAGGED, model.NESTED)
    check_alike(
        {name: loss_and_gradients(*model.make_loss(eager, name, model.SMALL, rows)) for name in names}
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_layout_of_the_layer_gives_the_loss_of_its_rows(eager):
    problem = training.Problem(eager, training.Case(16, 2, (5, 1, 12, 1)))
    names = (*(training.BY_HAND, training.BY_HAND_CUDNN, training.JAGGED), *(training.DENSE, training.NESTED))
    found = {name: loss_and_gradients(*training.make_loss(eager, name, problem)) for name in names}
    check_alike(found)
    _, flex_loss = training.make_loss(eager, training.FLEX, problem)
    with torch.no_grad():  # no backward on a CPU
        torch.testing.assert_close([found[training.BY_HAND][0], flex_loss()], [problem.loss] * 2)


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_every_way_to_encode_a_prefix_gives_the_same_bytes(batch):
    serving = padded.SMALL
    net, requests = serving.make_model("cpu"), serving.make_requests(batch, "cpu")
    assert [len(rows[0]) for rows in requests] == [24, 21, 18, 15, 12, 9, 6, 3]
    expected = [torch.stack([net.logits(row[None])[0, -1].argmax() for row in rows]) for rows in requests]
    subjects = padded.make_subjects(Eager(), net, requests, serving.bucket)
    for name, subject in subjects.items():
        found = [subject.step(*request) for request in subject.requests]
        torch.testing.assert_close(found, expected, msg=name)
    widths = {request[0].shape[1] for request in subjects[padded.BUCKETS].requests}
    assert widths == {request[1].shape[1] for request in subjects[padded.LIMIT].requests} == {8, 16, 24}
    assert len(widths) == serving.num_buckets


def uneven(fill):
    """How many lengths there are, the longest, whether there is an empty one, and how much they fill."""
    lengths = model.uneven_lengths(fill, 512, 32)
    return len(lengths), max(lengths), min(lengths) >= 1, sum(lengths) / (32 * 512)


def drawn(tokens):
    lengths = training.drawn_lengths(tokens, 4096)
    again = training.drawn_lengths(tokens, 4096)
    return sum(lengths), max(lengths), min(lengths) >= 1, lengths == again


def events():
    """How often functions that a step on the CPU calls are counted, in place of CUDA's events."""
    lines = []
    calls.measure_events(
        Run("events", StandIn(), lines.append), count=2, events=("Backward", "no such event")
    )
    return sorted((line.figure, line.value) for line in lines if line.unit == calls.CALLS)


COUNTERS = (
    "==PROF== Connected to process 7\n"
    '"ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum","lts__t_bytes.sum"\n'
    '"","","byte","nsecond","byte"\n'
    '"0","int8_rows_kernel","17,039,360","12,640","n/a"\n'
)

PRODUCT = torch.randn(4, 8)
test_what_ends_a_stage_or_a_subject = raising(
    [
        (lambda: measure_around(KeyboardInterrupt()), KeyboardInterrupt, "^$"),
        (lambda: int8._check(-PRODUCT, PRODUCT), AssertionError, "expected the product of the floats"),
    ]
)
test_what_stages_draw_and_count = giving(
    {
        **{
            f"lengths that fill {fill}": (
                lambda fill=fill: uneven(fill),
                (32, 512, True, pytest.approx(fill, abs=0.03)),
            )
            for fill in model.FILLS
        },
        **{
            f"lengths of {tokens} tokens": (lambda tokens=tokens: drawn(tokens), (tokens, 4096, True, True))
            for tokens in (4096, 32768, 65536)
        },
        "counters of the table of ncu": (
            lambda: counters.parse_counters(COUNTERS),
            {"time": (12640.0, "nsecond"), "bytes read from memory": (17039360.0, "byte")},
        ),
        "counters without a permission": (
            lambda: counters.parse_counters("==ERROR== no permission\n"),
            {},
        ),
        "a stage that only compiles": (lambda: measure_around(ImportError("no x"), shard=(0, 1)), []),
        "a product that is near": (lambda: int8._check(PRODUCT * 1.05, PRODUCT), None),
        "what is called in a step": (events, [("Backward", 1)] * 2 + [("no such event", 0)] * 2),
    }
)


def test_settings_of_torchao_are_undone():
    before = torch._inductor.config.coordinate_descent_tuning
    with int8._settings_of_inductor():
        torch._inductor.config.coordinate_descent_tuning = not before
    assert torch._inductor.config.coordinate_descent_tuning == before


# ---------------------------------------------------------------------------------------------------------
# the report
# ---------------------------------------------------------------------------------------------------------


def test_a_report_of_a_gpu_has_ratios_derived_columns_and_reasons(tmp_path):
    group, machine = "int8, M = 1, N = K = 4096", "NVIDIA H100 80GB HBM3; torch 2.13"
    common = {"stage": "int8", "group": group, "machine": machine}
    times = {int8.PLAIN: 16.0, int8.WEIGHT_ONLY: 8.0, int8.FLOOR: 6.0}
    lines = [
        Line(
            **common,
            subject=name,
            figure="time",
            value=time,
            unit="µs a call",
            low=time,
            high=time,
            ratio=time / 16,
        )
        for name, time in times.items()
    ]
    lines.append(Line(**common, subject=int8.PLAIN, figure="time, first", value=15.5, unit="µs a call"))
    lines.append(Line(**common, subject=int8.GEMLITE, error="ImportError: no gemlite"))
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(line.as_json() + "\n" for line in lines))
    (page,) = write_report(path, tmp_path)
    rows = {row["name"]: row["ratios"] for row in json.loads(page.with_suffix(".json").read_text())["rows"]}
    ours = rows[int8.WEIGHT_ONLY]
    assert ours[f"/ {int8.PLAIN}"] == 0.5 and ours["floor / this"] == 0.75
    assert not any("predicted" in column for column in ours)
    assert rows[int8.PLAIN]["alone, first µs"] == 15.5
    text = page.read_text()
    assert text.startswith("Measured side by side, with CUDA events,") and "no gemlite" in text
    assert "rehearsal" not in text
