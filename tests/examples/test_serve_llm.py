"""Serving: every request gets the answer that it gets alone, three programs do it, and failures are failures."""

import copy
from functools import partial

import pytest
import torch

import serve_llm as example
from _llama import Llama, Request, answer_alone, make_requests
from subclasses.testing import suite
from tests.doors import by_desugar
from tests.examples.command import check_exits, run_command

SLOTS = 2


def make_cache(slots=3):
    table = (2, slots, 5, 2, 4)
    return example.KVCache(torch.randn(table), torch.randn(table), torch.randint(1, 5, (slots,)))


TestKVCache = suite(make_cache, sizes=[lambda: make_cache(2), lambda: make_cache(4)])


@pytest.fixture
def requests():
    return make_requests(7, example.BUCKETS[-1], 8, seed=3)


@pytest.fixture
def model():
    return Llama(64, 1, example.CAPACITY).requires_grad_(False)


@pytest.mark.slow
def test_by_itself():
    result = run_command(example.main, "--quick", "--layers=1", "--slots=2")
    assert result.exit_code == 0, result.output
    assert "prompts in tables of 32 and 64 places" in result.stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 6]
    assert [row[0] for row in rows[::3]] == ["float32", "int8 weights, activations"]
    assert [row[1] for row in rows] == ["alone", "in slots", "compiled"] * 2
    assert [int(row[4]) for row in rows] == [0, 0, example.PROGRAMS] * 2
    assert {row[5] for row in rows} == {"6 of 6"}


@pytest.mark.parametrize("weight_only", [False, True])
def test_which_weights(weight_only, monkeypatch):
    asked = []
    monkeypatch.setattr(example, "compare", lambda model, kinds, *_: asked.extend(kinds))
    monkeypatch.setattr(example, "make_requests", lambda *_: [])
    assert run_command(example.main, "--quick", "--slots=2", *["--weight-only"] * weight_only).exit_code == 0
    assert asked == ["float32", "int8 weights" if weight_only else "int8 weights, activations"]
    assert set(example.TIES) == set(example.CONFIGS)


@pytest.mark.slow
def test_int8_weights(model, requests, monkeypatch, capsys):
    monkeypatch.setattr(example, "RUNS", 1)
    example.compare(model, ["int8 weights"], requests, SLOTS, "eager")
    assert capsys.readouterr().out.count("7 of 7") == 3


@pytest.mark.slow
def test_each_answer_is_that_of_the_request_alone(model, requests):
    server, alone = example.Server(model, SLOTS, partial(by_desugar, dynamic=False)), copy.deepcopy(requests)
    answer_alone(model, alone)
    for _ in range(2):  # in the second round, the slots still hold values of the first round
        served = copy.deepcopy(requests)
        server.serve(served)
        assert [request.answer for request in served] == [request.answer for request in alone]
    assert all(len(request.answer) == request.size for request in alone)
    assert {len(request.prompt) > example.BUCKETS[0] for request in requests} == {False, True}
    assert len(server.prefill.programs) == 2 and len(server.decode.programs) == 1


@pytest.mark.slow
def test_requests_come_and_go(model, requests, monkeypatch):
    server, admitted = example.Server(model, SLOTS, lambda function: function), []
    admit = server.admit

    def watched(request):
        admitted.append((request, [len(other.answer) for other in server.busy.values()]))
        admit(request)

    monkeypatch.setattr(server, "admit", watched)
    server.serve(requests)
    assert [request for request, _ in admitted] == requests
    assert sum(any(begun) for _, begun in admitted) > len(requests) // 2  # others were in the middle
    assert not server.busy and sorted(server.free) == list(range(SLOTS))
    assert server.cache.lengths.tolist() == [0] * SLOTS


def test_a_request_waits_until_it_arrives(model, monkeypatch):
    server, order = example.Server(model, SLOTS, lambda function: function), []
    early, late = Request(torch.tensor([1, 2]), 2, arrives=0), Request(torch.tensor([3]), 1, arrives=5)
    give = server.give
    monkeypatch.setattr(
        server, "give", lambda slot, token: (order.append(server.busy[slot]), give(slot, token))
    )
    server.serve([early, late])
    assert order == [early, early, late]
    assert len(early.answer) == 2 and len(late.answer) == 1


def attend_to_everything(self, layer, q, k, v):
    self.write(layer, torch.arange(SLOTS)[:, None], self.lengths[:, None], k, v)
    return example.attention(q, self.key[layer], self.value[layer])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "wrong", "words"),
    [
        (
            example.KVCache,
            "attend_next",
            attend_to_everything,
            "differs from the answer to its request alone",
        ),
        (example, "PROGRAMS", 2, "too many programs"),
    ],
)
def test_what_fails(owner, name, wrong, words, model, requests, monkeypatch, capsys):  # noqa: PLR0913
    monkeypatch.setattr(example, "RUNS", 1)
    monkeypatch.setattr(owner, name, wrong)
    check_exits(capsys, words, example.compare, model, ["float32"], requests, SLOTS, "eager")


def test_where_two_answers_part():
    alone = Request(torch.tensor([1]), 3, 0, answer=[5, 6, 7], margins=[0.3, 0.2, 0.1])
    served = Request(torch.tensor([1]), 3, 0, answer=[5, 6, 7])
    assert alone.margin_at_difference(served) is None
    served.answer[1:] = [9, 9]
    assert alone.margin_at_difference(served) == 0.2


@pytest.mark.parametrize("option", ["--width=100", "--width=0", "--slots=0", "--layers=0"])
def test_wrong_options(option):
    result = run_command(example.main, option)
    assert result.exit_code == 2 and f"Invalid value for '{option.partition('=')[0]}'" in result.output
