"""Runs benchmarks with one thread, and removes the machine's name from saved results."""

from __future__ import annotations

import pytest
import torch

from bench.timing import describe_machine


def pytest_benchmark_update_machine_info(machine_info: dict) -> None:
    machine_info.clear()
    machine_info.update(describe_machine())


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.compiler.reset()
