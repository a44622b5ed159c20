"""Generated code in a debugger: its lines are shown, and one steps into a wrapper as into any function."""

from __future__ import annotations

import bdb
import inspect
import linecache

import torch

import desugar
from tests.desugar.classes import Pair


class Steps(bdb.Bdb):
    """Steps through a call line by line, and keeps what a debugger would show of generated code."""

    def __init__(self):
        super().__init__()
        self.shown = []

    def user_line(self, frame):
        name = frame.f_code.co_filename
        if "desugar_wrapper" in name or name.startswith("<subclasses"):
            self.shown.append((frame.f_code.co_name, linecache.getline(name, frame.f_lineno).strip()))
        self.set_step()


def test_one_steps_through_the_wrapper_and_the_methods():
    compiled = desugar.compile(lambda x: x * 2, backend="eager")
    x = Pair(torch.ones(2), torch.ones(2))
    compiled(x)
    steps = Steps()
    steps.runcall(lambda: (compiled(x), x + x))
    shown = [text for function, text in steps.shown if function == "run"]
    assert shown[0] == "a0_a = a0.a" and shown[-1].startswith("return (out0")
    assert any("compiled_graph([" in text for text in shown)
    assert any(function == "__torch_dispatch__" for function, _ in steps.shown)
    assert all(text for _, text in steps.shown)


def test_inspect_knows_the_wrapper():
    program = desugar.trace(lambda x: x * 2, torch.ones(2))
    assert inspect.getsource(program.run) in program.source
