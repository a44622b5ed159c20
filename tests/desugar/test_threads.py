"""Compilations in several threads at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.desugar.judge import by_pass


@pytest.mark.sweep(2)
@pytest.mark.parametrize("round", range(3))
def test_different_functions_compile_in_threads_at_once(round):
    barrier, x = threading.Barrier(4), torch.arange(3.0, requires_grad=True)

    def run(n):
        compiled = by_pass(lambda x: (x * n).sin().sum())
        barrier.wait(timeout=60)
        return compiled(x)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, range(1, 5)))
    for n, result in enumerate(results, 1):
        torch.testing.assert_close(result, (x * n).sin().sum())


def test_a_thread_is_not_kept_waiting_by_a_call_that_is_compiled_already():
    compiled, entered, go_on = by_pass(torch.sin), threading.Event(), threading.Event()
    compiled(torch.ones(2))

    def slow(x):
        entered.set()
        go_on.wait(timeout=60)
        return x + 1

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(by_pass(slow), torch.ones(2))
        assert entered.wait(timeout=60)
        try:
            torch.testing.assert_close(
                pool.submit(compiled, torch.ones(2)).result(timeout=30), torch.ones(2).sin()
            )
        finally:
            go_on.set()
        torch.testing.assert_close(waiting.result(timeout=60), torch.full((2,), 2.0))
