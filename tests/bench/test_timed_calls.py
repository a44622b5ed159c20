"""Benchmarks compare and check the calls that they time, on small sizes and without a compiler."""

import inspect
import sys

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import desugar
from bench import (
    attention_dropout,
    bags,
    dtensors,
    floor,
    goals,
    kinds,
    long_rows,
    memory,
    programs,
    ragged_host,
)
from bench.timing import Timing
from subclasses.ragged import JaggedTensor

EAGER = {"eager": lambda fn: fn}


@pytest.fixture
def in_eager_mode(monkeypatch):
    monkeypatch.setattr(kinds, "WAYS", EAGER)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("family", kinds.FAMILIES)
def test_each_kind_has_a_call(in_eager_mode, family, mode):
    calls = kinds.make_calls(family, mode, 2)
    wanted = kinds.FAMILIES[family].keys() - set(kinds.PEERS)
    assert wanted <= {kind for kind, _ in calls} and "plain" in wanted
    for call in calls.values():
        results = call()
        takes_input = family == "Int8" and mode == "training"  # its input's gradient alone
        assert len(results) == (1 if takes_input else 2)


def plain(x):
    return x.values if isinstance(x, JaggedTensor) else getattr(x, "padded", x)


@pytest.mark.parametrize("family", kinds.FAMILIES)
def test_kinds_compute_the_same(family):
    found = []
    for name, kind in kinds.FAMILIES[family].items():
        if name not in kinds.PEERS:
            torch.manual_seed(0)
            args = [*kind.make_first(), *kind.make(), *kind.make()]
            found.append([plain(y) for y in kind.fn(*args)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_a_failure_of_our_own_is_no_missing_figure(in_eager_mode, monkeypatch):
    def fail(*args):
        raise NameError("no kernel")

    broken = kinds.Kind(fail, lambda: (torch.ones(2),))
    monkeypatch.setitem(kinds.FAMILIES, "broken", {"torch.nested": broken})
    assert not kinds.make_calls("broken", "inference", 1)
    monkeypatch.setitem(kinds.FAMILIES, "broken", {"JaggedTensor": broken})
    with pytest.raises(NameError):
        kinds.make_calls("broken", "inference", 1)


# ---- long_rows_and_bags ---------------------------------------------------------------------------------------------


@pytest.fixture
def eager_only(monkeypatch):
    monkeypatch.setattr(long_rows, "WAYS", {way: lambda model: model for way in long_rows.WAYS})
    monkeypatch.setattr(long_rows, "WIDTH", 16)
    monkeypatch.setattr(torch, "compile", lambda fn: fn)
    monkeypatch.setattr(bags.desugar, "compile", lambda fn: fn)


@pytest.mark.slow
def test_batches_of_every_kind_have_one_loss(eager_only):
    rows = long_rows.draw_rows(4)
    lengths = [len(r) - 1 for r in rows]
    assert (min(lengths), max(lengths)) == (long_rows.SHORTEST, long_rows.LONGEST)
    steps = long_rows.make_steps(rows)
    long_rows.check_equal(steps)
    with pytest.raises(ValueError, match="expected equal losses"):
        long_rows.check_equal(steps | {("another", "eager"): lambda: 0.0})
    found = long_rows.rows_of({name: Timing(1e3, 1e3, 1e3) for name in steps}, 0.3, 4)
    assert {row.name for row in found} >= set(goals.LONG_ROWS)
    assert {row.timing.median for row in found} == {1.0}


def test_gradients_of_each_class_on_uneven_rows_are_equal(eager_only):
    ragged_host.check_equal(ragged_host.make_steps())


def test_rows_in_tables_by_length_are_all_there():
    rows = long_rows.draw_rows(12)
    tables = long_rows.by_length(rows)
    assert sum(share for share, _ in tables) == pytest.approx(1)
    assert sum(len(tokens.lengths) for _, (tokens, _) in tables) == 12 and 1 < len(tables) <= 4
    for _, (tokens, targets) in tables:
        assert torch.equal(tokens.lengths, targets.lengths)
        for row, following in zip(tokens.to_tensors(), targets.to_tensors(), strict=True):
            assert torch.equal(row[1:], following[:-1])


@pytest.mark.parametrize("mode", bags.MODES)
def test_bags_are_looked_up_alike(eager_only, mode):
    tables = bags.make_tables(50, 4)
    calls = {
        name: bags.in_inference(call) if mode == "inference" else bags.in_training(call, tables)
        for name, call in bags.make_calls(tables, 3).items()
    }
    assert next(iter(calls)) == bags.ONE_BY_ONE and "EmbeddingBagCollection, desugar.compile" in calls
    bags.check_equal(calls)
    with pytest.raises(AssertionError):
        bags.check_equal(calls | {"wrong": lambda: [torch.full((3, 4), 7.0)] * bags.FEATURES})


# ---- attention_dropout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_the_mean_is_checked(monkeypatch, causal):
    monkeypatch.setattr(attention_dropout, "WAYS", {"eager": lambda f: f})
    monkeypatch.setattr(attention_dropout, "WIDTH", 16)
    calls = attention_dropout.make_calls([20, 60, 3], causal)
    attention_dropout.check_mean(calls)
    with pytest.raises(ValueError, match="expected the attention without dropout"):
        attention_dropout.check_mean(calls | {"eager/0.1": calls["eager/0.0"]})
    timings = {name: Timing(1e3, 1e3, 1e3) for name in calls}
    found = attention_dropout.rows_of(timings, "few rows")
    assert found[1].ratios == {"/ without": 1.0, "/ limit": pytest.approx(1 / 2.3)}


def test_rows_fill_a_quarter_of_a_table():
    lengths = attention_dropout.draw_lengths(16)
    assert (min(lengths), max(lengths)) == (attention_dropout.SHORTEST, attention_dropout.LONGEST)
    assert sum(lengths) / len(lengths) / max(lengths) == pytest.approx(0.25, abs=0.03)


# ---- dtensors -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dtensors.RANKS)
    yield dist.init_device_mesh("cpu", (dtensors.RANKS,))
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_all_ways_give_the_same(mesh, mode, monkeypatch):
    for fn, args, wanted in dtensors.make_cases(mesh).values():
        call = dtensors.in_inference(fn, args)
        if mode == "training":
            call = dtensors.in_training(fn, args, wanted)
        dtensors.check_equal({"eager": call, "again": call})
        with pytest.raises(AssertionError):
            dtensors.check_equal({"eager": call, "wrong": lambda: torch.full((3,), 7.0)})


def test_every_case_has_a_goal(mesh, monkeypatch):
    monkeypatch.setattr(dtensors, "WAYS", {way: lambda fn: fn for way in dtensors.WAYS})
    monkeypatch.setattr(
        dtensors, "time_side_by_side", lambda calls: dict.fromkeys(calls, Timing(2.0, 2.0, 2.0))
    )
    found = list(goals._dtensors(dtensors.measure()))
    assert len(found) == 2 * len(dtensors.make_cases(mesh))
    assert all(goal.measured == 1 and goal.wanted == 0.3 for goal in found)


# ---- floor ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["declared", "TwoTensor"])
def test_the_floor_checks_nothing_and_builds_all(kind):
    calls = floor.make_calls(2, kind)
    assert list(calls) == ["the graph", "the floor", "desugar.compile", floor.PLAIN]
    with torch.no_grad():
        graph, bottom, whole, plain = (call() for call in calls.values())
    assert len(graph) == len(plain) == 4 and [type(x) for x in bottom] == [type(x) for x in whole]
    text = inspect.getsource(calls["the floor"])
    assert text.count("make_wrapper_subclass(") == 2
    assert "if " not in text and "return [out0, out1]" in text


# ---- memory ---------------------------------------------------------------------------------------------------------

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the C library")


@linux
def test_an_instance_is_as_large_as_what_it_holds(monkeypatch):
    monkeypatch.setattr(memory, "INSTANCES", 500)
    found = memory.bytes_per_instance(lambda: bytearray(1000))
    assert 1000 <= found["Python"] < 1200
    tensor = torch.empty(0)
    found = memory.bytes_per_instance(tensor.detach)
    assert 50 < found["C++"] < 1000


@pytest.mark.parametrize("kept", [pytest.param(0, marks=pytest.mark.slow), 100])
def test_growth_is_what_calls_keep(monkeypatch, kept):
    monkeypatch.setattr(memory, "CALLS", 200)
    hoard = []

    def way(fn):
        def call(*args):
            hoard.extend(bytearray(1000) for _ in range(kept // 100))
            return fn(*args)

        return call

    grown = memory.growth_over_calls(way, grad=True)
    assert len(grown) == memory.BLOCKS
    assert (min(grown) > 1000 * 200) == bool(kept)


# ---- programs -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_cells_and_programs(monkeypatch):
    made = []

    def way(fn):
        made.append(desugar.compile(fn, backend="eager", dynamic=False))
        return made[-1]

    monkeypatch.setattr(programs, "WAYS", {"desugar.compile": way})
    monkeypatch.setattr(programs, "PROGRAMS", (1, 3))
    calls = programs.make_calls(2)
    titles = [title for title, _ in calls]
    assert titles == ["one program", "3 programs, one of them", "3 programs, in turn"]
    assert [len(fn.programs) for fn in made] == [1, 3, 3]
    before = [fn.programs for fn in made]
    sizes = {title: [tuple(call()[0].shape) for _ in range(4)] for (title, _), call in calls.items()}
    assert sizes == {
        "one program": [(8, 2)] * 4,
        "3 programs, one of them": [(8, 2)] * 4,
        "3 programs, in turn": [(8, 2), (8, 3), (8, 4), (8, 2)],
    }
    assert [len(fn.programs) for fn in made] == [len(known) for known in before]
