"""How far a call walks through our modules."""

from __future__ import annotations

from bench.walk import walk_calls


def test_a_second_call_enters_three_modules():
    first, second = walk_calls()
    assert first.order[0] == "desugar.dynamo.entry"
    assert set(first.order) >= {"desugar.pipeline", "desugar.tracing.trace", "desugar.wrapper.run"}
    assert len(first.order) <= 79
    assert first.moves <= 1000
    # Graphs that run as they are, and the class's detach() when autograd keeps the gradient.
    assert len(second.order) <= 3
    assert second.moves <= 5
    assert not any(name.startswith(("desugar.tracing", "desugar.dynamo")) for name in second.order)
