"""How tests look at what the pass does not take: through each door, with its error and what the error leaves alone."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch

from desugar import DesugarError
from tests.desugar.classes import metadata, plain_parts
from tests.desugar.idioms.running import DOORS
from tests.desugar.judge import by_pass, judge, tensors_of, versions
from tests.doors import by_stock


def strictly(fn):
    """The front door, where nothing goes to AOTAutograd."""
    return by_pass(fn, strict=True)


EVERY_DOOR = pytest.mark.parametrize("door", [strictly, *DOORS.values()])
BOTH_DOORS = pytest.mark.parametrize("door", [strictly, DOORS["torch.compile"]])


def warned(caplog):
    """What the pass has handed over, by its warnings."""
    found = [r for r in caplog.records if r.name == "desugar" and r.levelno >= logging.WARNING]
    return [record.getMessage() for record in found]


def snapshot(args):
    """All that a refused call may not change."""
    tensors = tensors_of(args)
    parts = [part for tensor in tensors for part in plain_parts(tensor)]
    return (
        [metadata(t) for t in tensors],
        [(tuple(t.size()), tuple(t.stride()), t.requires_grad, t.grad is None) for t in tensors],
        versions(tensors),
        versions(parts),
        [id(part) for part in parts],
        [part.tolist() for part in parts],
    )


def assert_refused(fn, make_args, match, *, way=strictly, works=None):
    """Every call raises and leaves its arguments and modes alone, and what is compiled still works on others."""
    args = make_args()
    before, modes = snapshot(args), (torch.is_grad_enabled(), torch._C._len_torch_dispatch_stack())
    compiled = way(fn)
    for _ in range(2):
        with pytest.raises(DesugarError, match=match) as caught:
            compiled(*args)
        assert snapshot(args) == before
    assert (torch.is_grad_enabled(), torch._C._len_torch_dispatch_stack()) == modes
    assert compiled.programs == []
    assert "\n  instead: " in str(caught.value)
    if works is not None:
        judge(fn, works, compiled)
    return caught.value


def assert_handed_over(fn, make_args, match, caplog, **options):
    """Refused by the strict door, right through both others, which warn of it."""
    with options.get("around", contextlib.nullcontext)():
        error = assert_refused(fn, make_args, match)
    assert not error.stock_is_wrong
    for door in DOORS.values():
        torch.compiler.reset()
        caplog.clear()
        judge(fn, make_args, way=door, calls=2, **options)
        assert any("AOTAutograd compiles this graph instead" in m and error.what in m for m in warned(caplog))
    return error


def assert_wrong_everywhere(fn, make_args, match):
    """Refused by all three doors, and neither taken nor right in PyTorch's own compiler."""
    for way in (by_pass, strictly):
        error = assert_refused(fn, make_args, match, way=way)
        assert error.stock_is_wrong
    args = make_args()
    before = snapshot(args)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=match) as caught:
        DOORS["torch.compile"](fn)(*args)
    assert isinstance(caught.value.inner_exception, DesugarError) and snapshot(args) == before
    with pytest.raises((AssertionError, RuntimeError)):
        judge(fn, make_args, way=by_stock)
    return error


def unlooked_at(fn):
    """The function as one node of Dynamo's graph: its Python runs in the trace of the pass."""
    return torch._dynamo.nonstrict_trace(fn)
