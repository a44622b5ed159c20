"""The modes that differ between two programs, in words."""

from __future__ import annotations

import pytest
import torch

import desugar
from desugar.dynamo.guard_failures import describe_modes
from desugar.recording.listeners import listen


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("grad_mode ", "gradients: expected off, got on"),
        ("autocast(cpu)_enabled ", "autocast on cpu: expected on, got off"),
        ("autocast(cpu)_dtype ", "dtype of autocast on cpu: expected another value, got bfloat16"),
        ("default_dtype ", "default dtype: expected another value, got float32"),
        ("a_mode_of_the_future ", "another mode: a_mode_of_the_future"),
        (
            "grad_mode deterministic_algorithms ",
            "gradients: expected off, got on; deterministic algorithms: expected on, got off",
        ),
    ],
)
def test_the_present_value_is_read_and_a_switch_was_the_other_way(names, says):
    assert describe_modes(names) == says


def test_a_call_under_another_default_dtype_says_so():
    found, compiled = [], desugar.compile(lambda x: x * 2, backend="eager")
    with listen(lambda recording: found.append(recording.failed)):
        compiled(torch.ones(2))
        torch.set_default_dtype(torch.float64)
        try:
            compiled(torch.ones(2, dtype=torch.float32))
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == ["", "default dtype: expected another value, got float64"]
