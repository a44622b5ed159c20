"""The work of one process of a comparison, run in the process of the tests."""

import pickle
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from desugar.compare import ways
from desugar.compare.import_names import TargetError
from desugar.compare.judge import judge
from desugar.compare.meters import describe_machine, profile_call
from desugar.compare.processes import Worker, answer
from desugar.compare.records import Request
from desugar.compare.subject import find_subject, observe_calls
from subclasses.slow_paths import say_once
from tests.desugar.compare import subjects

SUBJECTS = str(Path(__file__).parent / "subjects.py")


def request(name, **options):
    return Request(f"{SUBJECTS}:{name}", backend="eager", **options)


def observed(way, asked, calls):
    """The outcomes of calls that run in one way."""
    torch.compiler.reset()
    subject = find_subject(asked)
    return observe_calls(subject, ways.compile_way(way, subject.fn, "eager"), calls)


def judged(way, asked, calls):
    outcomes = [observed(one, asked, calls) for one in (ways.EAGER, way)]
    return judge(list(zip(*outcomes, strict=True))), outcomes[0]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("way", ways.WAYS[1:])
@pytest.mark.parametrize("name", ["draws", "Net"])
def test_ways_that_do_what_eager_mode_does_are_right(way, name):
    verdict, outcomes = judged(way, request(name, train=name == "Net"), 3)
    assert verdict.state == "right"
    if name == "Net":
        entries = outcomes[2]["entries"]
        assert {"the gradient of self.linear.weight", "self.norm.running_mean after the call"} <= set(entries)
        assert "self.linear.weight after the call" not in entries  # it did not change


def test_a_way_that_is_wrong_is_told_from_one_that_is_right():
    """Two arguments share an inner tensor, which stock torch.compile misses."""
    right, wrong = (judged(way, request("pairs"), 1)[0] for way in (ways.DIRECT, ways.STOCK))
    assert (right.state, wrong.state) == ("right", "wrong")
    assert wrong.detail.startswith("call 1 of 1: result[0].first[0]: ")


@pytest.mark.slow
def test_gradients_are_forgotten_between_steps():
    worker = Worker(request("with_weight", train=True))
    worker.start(ways.EAGER, ())
    worker.call()
    (weight,) = worker.subject.state().values()
    assert torch.equal(weight.grad, torch.full((3, 3), 2.0))


@pytest.mark.parametrize("no_grad", [False, True])
def test_a_call_is_timed(no_grad):
    worker = Worker(request("with_weight", no_grad=no_grad))
    assert worker.start(ways.EAGER, ("json", "no_such_module")) > 0
    assert worker.turn(2) > 0 and worker.look()[0] > 0
    assert worker.call().requires_grad is not no_grad


def test_the_peak_of_memory_and_the_time_in_graphs_are_those_of_a_call():
    x, compiled = torch.ones(2**18), ways.compile_way(ways.DIRECT, lambda x: (x * 2).sin() * 2, "eager")
    for _ in range(2):
        memory, seconds = profile_call(lambda: compiled(x))
    assert 2 * 2**20 <= memory < 2.2 * 2**20 and 0 < seconds < 1
    assert profile_call(lambda: x[:9].clone()) == (9 * 4, None)


def counted(compiled, *calls):
    """The number of programs that calls of a compiled function make."""
    torch.compiler.reset()
    with ways.watch_programs() as programs:
        for args in calls:
            compiled(*args)
    return programs()


def test_recompiles_and_graph_breaks_are_counted():
    compiled, rows = (
        ways.compile_way(ways.STOCK, subjects.breaks, "eager"),
        [torch.ones(n, 3) for n in (2, 4, 6)],
    )
    before, found = counted(compiled), counted(compiled, *((x,) for x in rows))
    assert found.graphs - before.graphs == 4  # two for the first size, two for all others
    assert any("x.size(0): expected 2, got 4" in text for text in found.recompiles)
    (broken,) = [text for text in found.breaks if "subjects.py" in text]
    assert 'print("a break")' in broken


def test_what_is_handed_to_aotautograd_is_a_note():
    rows = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    found = counted(ways.compile_way(ways.BACKEND, subjects.double, "eager"), (rows,))
    assert any(note.startswith("AOTAutograd compiles this graph instead") for note in found.notes)


def test_a_slow_path_is_a_note_with_the_remedy():
    for _ in range(2):  # the log has it once
        assert counted(say_once, ("a padded table", "pass lengths")).notes == (
            "a padded table; pass lengths",
        )


def branches(x, n):
    return x * n if n > 2 else x + n


@pytest.mark.parametrize(
    ("fn", "calls", "recompiles"),
    [
        (
            lambda x, n: x * n,
            [(x, 2.5) for x in [torch.ones(2), torch.ones(2, 1), torch.ones(2, 1).double()]],
            ("<lambda>: x.rank: expected 1, got 2", "<lambda>: x.dtype: expected Float, got Double"),
        ),
        # A guard of a branch is told without the line that it came from.
        (branches, [(torch.ones(2), 1), (torch.ones(2), 3)], ("branches: n == 1",)),
    ],
)
def test_recompiles_are_told_in_the_words_of_a_report(fn, calls, recompiles):
    assert counted(torch.compile(fn, backend="eager"), *calls).recompiles == recompiles


def test_errors_are_answers():
    def wrong():
        raise TargetError("there is no such thing")

    assert answer(lambda: 3) == 3
    assert (answer(wrong).kind, answer(wrong).text) == ("target", "there is no such thing")
    assert answer(partial(sys.exit, 0)).text.endswith("called sys.exit(0)")
    subject = find_subject(request("raises"))
    failure = answer(partial(observe_calls, subject, subject.fn, 1))
    assert failure.text == "ValueError: odd" and failure.kind == "way"
    assert "subjects.py" in failure.traceback and "compare/subject.py" not in failure.traceback
    assert pickle.loads(pickle.dumps(failure)).__dict__ == failure.__dict__  # it comes from a process


def test_the_machine_is_described(monkeypatch):
    monkeypatch.setenv("DESUGAR_STRICT", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somewhere")
    facts = dict(describe_machine())
    assert facts["torch"] == torch.__version__ and facts["DESUGAR_STRICT"] == "1"
    assert "TORCHINDUCTOR_CACHE_DIR" not in facts
