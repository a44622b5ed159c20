"""Output for PyTorch's tools: artifacts under TORCH_TRACE, the logger's levels, and the user's names for values."""

import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import desugar
from desugar import _torch as torch_private
from desugar.recording import listeners
from desugar.recording.listeners import Recording
from desugar.recording.trace_artifacts import collect_texts
from desugar.recording.user_names import function_name, leaf_names, readable
from subclasses.ragged import JaggedTensor
from tests.doors import by_torch
from tests.tables import giving

ROOT = Path(__file__).parents[3]
SCRIPT = """
import torch, desugar
f = desugar.compile(lambda x: (x * 2).sum(), backend="eager", dynamic=False)
f(torch.ones(2, requires_grad=True)).backward()
f(torch.ones(3))
torch.compile(lambda x: x + 1, backend="desugar", options={"backend": "eager"})(torch.ones(2))
"""


@pytest.fixture
def run_script(tmp_path):
    """Runs the script from a file, whose lines Dynamo's graphs then name, and returns its stderr."""

    def run(**environment):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment}
        done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


@pytest.fixture
def trace(run_script, tmp_path):
    """The file that the script leaves under TORCH_TRACE."""
    run_script(TORCH_TRACE=str(tmp_path / "trace"))
    (file,) = (tmp_path / "trace").glob("*.log")
    return file


def read_artifacts(file):
    """(compile id, name, text) of the artifacts of ours: a line of JSON, and the indented payload below it."""
    found, lines = [], file.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("V") and '"desugar_' in line:
            record = json.loads(line[line.index("{") :])
            payload = itertools.takewhile(lambda text: text.startswith("\t"), lines[number:])
            numbers = record["frame_id"], record["frame_compile_id"]
            found.append((numbers, record["artifact"]["name"], "\n".join(one[1:] for one in payload)))
    return found


@pytest.mark.slow
def test_torch_trace_gets_the_texts_of_each_compilation(trace):
    texts = {(number, name): text for number, name, text in read_artifacts(trace)}
    ids = list(dict.fromkeys(number for number, _ in texts))
    assert ids == [(0, 0), (0, 1), (1, 0)], "Dynamo's ids, from desugar.compile and torch.compile"
    names = [{name.removeprefix("desugar_") for number, name in texts if number == one} for one in ids]
    common = {"reason", "stages", "layouts", "forward_graph", "wrapper"}
    assert names == [common | {"backward_graph"}, common, common]
    assert "def run(a0):" in texts[ids[0], "desugar_wrapper"]
    assert "aten.mul.Tensor" in texts[ids[1], "desugar_forward_graph"]
    reasons = [json.loads(texts[number, "desugar_reason"]) for number in ids]
    assert [(reason["function"], reason["reason"]) for reason in reasons] == [
        ("<lambda>", "first call"),
        ("<lambda>", "x.requires_grad: expected True, got False"),
        ("<lambda>", "a graph of torch.compile"),
    ]


@pytest.mark.slow
def test_the_stack_of_each_call_is_there_for_the_tree_of_compilations(trace, tmp_path):
    lines = [line for line in trace.read_text().splitlines() if line[0] == "V"]
    records = [json.loads(line[line.index("{") :]) for line in lines]
    names = {number: text for text, number in (r["str"] for r in records if "str" in r)}
    stacks, script = (
        [r["dynamo_start"]["stack"] for r in records if "dynamo_start" in r],
        tmp_path / "script.py",
    )
    found = [[f["line"] for f in stack if names[f["filename"]] == str(script)] for stack in stacks]
    assert found == [[4, 3], [5, 3], [6]]


# As pip installs it beside this Python, whose environment need not be activated.
TLPARSE = shutil.which("tlparse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
NEEDS_TLPARSE = pytest.mark.skipif(TLPARSE is None, reason="needs tlparse")


@pytest.mark.slow
@NEEDS_TLPARSE
def test_tlparse_shows_those_of_a_folder_with_a_file_for_each_rank(trace, tmp_path):
    for rank in range(2):  # the names that PyTorch gives in a torch.distributed run
        shutil.copy(trace, trace.with_name(f"dedicated_log_torch_trace_rank_{rank}_abc.log"))
    trace.unlink()
    command = [TLPARSE, "--all-ranks-html", str(trace.parent), "-o", str(tmp_path / "out"), "--no-browser"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "fail" not in done.stdout + done.stderr
    for rank in range(2):
        shown = (tmp_path / "out" / f"rank_{rank}" / "index.html").read_text()
        assert shown.count("desugar_wrapper") >= 3 and shown.count("desugar_reason") >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("level", "has_texts"), [("desugar", False), ("+desugar", True)])
def test_torch_logs_sets_the_level(run_script, level, has_texts):
    said = run_script(TORCH_LOGS=level)
    for text in (
        "compiled program 1 of <lambda>: first call",
        "compiled program 2 of <lambda>: x.requires_grad: expected True, got False",
        "compiled a graph of <lambda> for torch.compile",
    ):
        assert text in said
    assert ("def run(a0):" in said) is has_texts


def test_the_logger_has_the_same_levels(caplog):
    compiled = desugar.compile(lambda x: x * 2, backend="eager")
    with caplog.at_level(logging.INFO, logger="desugar"):
        compiled(torch.ones(2))
    assert [record.levelname for record in caplog.records if record.name == "desugar"] == ["INFO"]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="desugar"):
        compiled(torch.ones(2).double())
    *texts, last = [record.getMessage() for record in caplog.records if record.name == "desugar"]
    assert any(text[: text.find(":\n") + 1].endswith("wrapper\ndef run(a0):") for text in texts)
    assert last.startswith("compiled program 2 of test_the_logger_has_the_same_levels")
    assert last.endswith(": x.dtype: expected Float, got Double")


FAILED = collect_texts(Recording(len, "first call", error=ValueError("odd")))
test_a_failed_compilation_has_its_error = giving(
    {
        "error": (lambda: json.loads(FAILED["reason"])["error"], "ValueError: odd"),
        "wrapper": (lambda: "wrapper" in FAILED, False),
    }
)


# ---- user's names for Dynamo's names --------------------------------------------------------------------------------

NAMES = [
    ("L['x']", "x"),
    ("L['xs'][0]", "xs[0]"),
    ("L['d']['q'][0].values", "d['q'][0].values"),
    ("L['self']._modules['layer']._parameters['weight']", "self.layer.weight"),
    ("L['self']._modules['layers']._modules['0']._buffers['mean']", "self.layers[0].mean"),
    ("L['self'].__dict__['p']", "self.p"),
    ("L['self']._parameters['odd-name']", "self._parameters['odd-name']"),
    ("G['K']", "K"),
    ("G['__import___main__'].K", "K"),
    ("G['__import_torch_dot_nn_dot_modules_dot_linear'].F.linear", "torch.nn.modules.linear.F.linear"),
    ("G['__builtins_dict___2']['len']", "len"),
    (
        "dict(type(G['net']).__dict__)['forward'].__kwdefaults__['scale']",
        "type(net).forward.__kwdefaults__['scale']",
    ),
    ("L['x'].size()[0] == 1 + L['y'].stride()[1]", "x.size(0) == 1 + y.stride(1)"),
    ("L['j']._max_length_carrier.size()[0]", "j.max_length"),
]


# Reasons of recompilations have names without their scope.
test_expressions = giving(
    {
        dynamos: (
            lambda dynamos=dynamos: [readable(dynamos), readable(re.sub(r"L\['(\w+)'\]", r"\1", dynamos))],
            [users] * 2,
        )
        for dynamos, users in NAMES
    }
)


class Plain(nn.Module):
    def forward(self, x, module): ...


class Any(nn.Module):
    def forward(self, x, *more, module=None, **rest): ...


test_names_in_the_call_of_a_module = giving(
    {
        dynamos: (lambda module=module, dynamos=dynamos: readable(dynamos, *module), users)
        for module, dynamos, users in [
            ([nn.ReLU()], "L['module'].inplace == False", "self.inplace == False"),
            ([Plain()], "L['module'].a + L['module_1'].b", "module.a + self.b"),
            ([Any()], "module.a + args[0] + args[2] + kwargs['module']", "self.a + x + more[1] + module"),
            ([Any()], "x.module == 'module' and kwargs['b'].args[0]", "x.module == 'module' and b.args[0]"),
            ([], "module.a + args[0]", "module.a + args[0]"),  # of a function, these are the user's own
        ]
    }
)


class Layer(nn.Linear):
    def forward(self, x, *, scale):
        return super().forward(x) * scale


SCALE, LAYER = torch.ones(3), Layer(3, 3)


def fn(xs, d, n):
    return LAYER(xs[0], scale=SCALE) + d["j"].values.sum() * n


def test_leaves_and_functions():
    found, j = [], JaggedTensor.from_tensors([torch.ones(2, 3), torch.ones(1, 3)])
    with listeners.listen(lambda r: found.append((leaf_names(r.graph), function_name(r.fn, r.graph)))):
        for n in (2.5, 3.5):
            by_torch(fn)([torch.ones(2, 3)], {"j": j}, n)
    names, function = found[0]
    assert function == "fn" and set(names) >= {"xs[0]", "LAYER.weight", "LAYER.bias", "SCALE"}
    assert any(name.startswith("d['j']") for name in names)
    assert list(map(function_name, (LAYER, fn, None))) == ["Layer", "fn", "a graph"]


def test_which_leaves_come_from_parameters():
    found = {}

    def note(recording):
        nodes = recording.graph.graph.find_nodes(op="placeholder")
        names = leaf_names(recording.graph)
        found.update({name: torch_private.is_argument(node) for name, node in zip(names, nodes, strict=True)})

    with listeners.listen(note):
        by_torch(lambda x, by: x * SCALE + by["k"])(torch.ones(3), {"k": torch.ones(3)})
    assert found == {"x": True, "SCALE": False, "by['k']": True}
