"""Calls of a script are made again in other ways after it has ended, on copies, and the script runs as ever."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn

import desugar
from desugar.compare import replay as module
from desugar.compare.records import Programs, Spread, Verdict, Way
from desugar.compare.replay import NoCopy, ScriptCalls, bytes_of, copy_call, restored
from desugar.compare.ways import DIRECT, EAGER, STOCK, TUNED
from desugar.compare.worth import sum_up
from desugar.dynamo.backend import dynamo_backend
from desugar.explain.collector import Collector
from tests.desugar.explain.subjects import make_weight
from tests.doors import by_desugar as compiled, by_torch as behind
from tests.tables import giving, raising


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(module, "_BUDGET", 0.05)


def reported(run):
    """The programs of a report about a function; each call runs again."""
    calls = ScriptCalls()
    collector = Collector(calls.keep)
    with collector.collecting():
        run()
    return calls.compare(collector.report("a script")).programs


OURS = 'backend="desugar"'


def test_a_call_is_timed_in_each_way():
    @compiled
    def scaled(x, *, by):
        return x.sin() * by

    (program,) = reported(lambda: scaled(torch.ones(3), by=2))
    ways = dict(program.worth.ways)
    assert list(ways) == ["eager", "torch.compile", "stock, tuned", "desugar.compile"] and all(
        t > 0 for t in ways.values()
    )
    told = "results of 2 calls compared; torch.compile: right; stock, tuned: right; desugar.compile: right"
    assert program.worth.verdict == told and [name for name, _ in program.worth.memory] == list(ways)
    assert all(12 <= nbytes < 2**16 for _, nbytes in program.worth.memory)
    assert program.worth.answer.startswith(("yes, ", "no, ", "hardly, ")) and program.calls == 1


@pytest.mark.slow
def test_each_call_that_compiled_is_made_again_in_the_modes_that_it_had():
    seen = []

    @compiled
    def noted(x):
        return x * 2 if torch.is_grad_enabled() else x * 3

    def run():
        noted(torch.ones(2, requires_grad=True))
        with torch.no_grad():
            noted(torch.ones(3))
        with torch.autocast("cpu", torch.bfloat16):
            noted(torch.ones(4, 5, requires_grad=True))
        seen.append(len(noted.programs))

    programs = reported(run)
    assert len(programs) == seen[0] == 3
    assert ["backward" in program.worth.verdict for program in programs] == [True, False, True]
    assert all("desugar.compile: right" in program.worth.verdict for program in programs)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["a function", "a module"])
def test_arguments_and_state_are_left_as_the_script_left_them(door):
    net, total, written = nn.BatchNorm1d(3), torch.zeros(3), []

    def step(total, x):
        y = net(x)
        total.add_(y.detach().sum(0).abs() + 1)
        return y.sum()

    call = partial(compiled(step), total) if door == "a function" else behind(net)

    def state():
        return [t.clone() for t in (total, net.running_mean, net.weight.grad, torch.get_rng_state())]

    def run():
        call(torch.randn(5, 3)).sum().backward()
        written.extend(state())

    (program,) = reported(run)
    assert f"{'desugar.compile' if door == 'a function' else OURS}: right" in program.worth.verdict
    assert all(map(torch.equal, state(), written)) and net.num_batches_tracked == 1


@pytest.mark.slow
def test_random_results_of_ones_own_are_not_compared():
    numbers = iter(range(10_000))

    @compiled
    def counted(x):
        return x + float(next(numbers))

    (program, *_) = reported(lambda: counted(torch.ones(2)))
    assert "unknown (eager mode does not do the same twice)" in (
        program.worth.verdict if program.worth else program.no_worth
    )


def branch(x):
    return x * 2 if x.sum() > 0 else x * 3


def prints_first(x):
    print("before")
    return x * 3


def prints_between(x):
    y = x * 2
    print("between")
    return y * 3


@pytest.mark.parametrize("door", [compiled, pytest.param(behind, marks=pytest.mark.slow)])
def test_a_branch_between_graphs_is_made_again_and_a_print_is_not(door, capsys):
    first, rest = reported(lambda: door(branch)(torch.ones(2)))
    assert "2 programs together" in first.worth.verdict and rest.worth is None
    assert rest.no_worth == "it belongs to the call of program 1, which is timed as a whole"
    for fn, said, count in ((prints_first, "before", 1), (prints_between, "between", 2)):
        programs = reported(lambda fn=fn: door(fn)(torch.ones(2)))
        assert len(programs) == count and all(program.worth is None for program in programs)
        assert all(f'print("{said}")' in program.no_worth for program in programs)
    assert capsys.readouterr().out == "before\nbetween\n"


def test_what_cannot_be_made_again_says_why():
    @torch.compile(backend=lambda graph, inputs: dynamo_backend(graph, inputs, options={"backend": "eager"}))
    def of_stock(x):
        return x * 2

    @compiled
    def aliases(x, y):
        return x + y

    gone = [torch.ones(2)]

    @compiled
    def once(x):
        return x + gone[0]

    own = desugar.compile(lambda x: x - 1, backend=lambda graph, inputs: graph)

    def run():
        base = torch.ones(4)
        of_stock(base)
        aliases(base[1:], base[:-1])
        once(torch.ones(2))
        gone.clear()
        own(base)

    reasons = [program.no_worth for program in reported(run)]
    for reason, start in zip(
        reasons,
        (
            "it was compiled outside of a call of a function from desugar.compile or torch.compile(",
            "its arguments share memory, and copies of them would not",
            "made again after the script's end, it raised IndexError",
            "its backend is a function of the script's",
        ),
        strict=True,
    ):
        assert reason.startswith(start)


def test_a_way_that_fails_or_differs_does_not_hide_the_others(monkeypatch):
    real = module.compile_way

    def compile_way(way, fn, backend, **more):
        if way == "torch.compile":
            return lambda x: 1 / 0
        return real(way, (lambda x: fn(x) + 1) if way == "desugar.compile" else fn, backend, **more)

    monkeypatch.setattr(module, "compile_way", compile_way)
    twice = compiled(lambda x: x * 2)
    (program,) = reported(lambda: twice(torch.ones(2)))
    assert program.worth.ways[1] == ("torch.compile", None) and program.worth.ways[3][1] > 0
    assert (
        "torch.compile: error (ZeroDivisionError: division by zero); stock, tuned: right; desugar.compile: wrong ("
        in (program.worth.verdict)
    )
    assert program.worth.answer == "no, desugar.compile does not do what eager mode does"


@pytest.mark.slow
def test_equal_calls_that_compile_again_are_told():
    log = []

    @compiled
    def grows(x):
        log.append(1)
        return x * len(log)

    (program,) = reported(lambda: grows(torch.ones(2)))
    found = program.worth.verdict if program.worth else program.no_worth
    assert "equal calls were compiled again and again" in found and "unknown" in found
    assert program.worth is None or program.worth.answer == (
        "unknown, equal calls were compiled again and again"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("door", "options"),
    [
        (desugar.compile, {"dynamic": False, "options": {"epilogue_fusion": True}}),
        (partial(torch.compile, backend="desugar"), {"mode": "max-autotune-no-cudagraphs"}),
    ],
)
def test_the_options_of_the_script_are_kept(monkeypatch, door, options):
    asked, real = [], module.compile_way

    def compile_way(way, fn, backend, **more):
        asked.append((backend, more))
        return real(way, fn, "eager")

    monkeypatch.setattr(module, "compile_way", compile_way)
    fn = door(lambda x: x.sin() * 2, **options)
    reported(lambda: fn(torch.ones(2)))
    assert asked == [("inductor", options)] * 4


# ---- behind torch.compile -------------------------------------------------------------------------------------


class Doubler(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, *, by=2):
        return x * self.weight * by

    def method(self, x):
        return x + self.weight


@pytest.mark.slow
def test_calls_behind_torch_compile_are_made_again():
    net = Doubler()
    function = behind(lambda x, *, by: x.sin() * by)
    module_, method, built_in = behind(net), behind(net.method), behind(nn.Linear(3, 2))

    def run():
        function(torch.ones(3), by=2)
        module_(torch.ones(3), by=3).sum().backward()
        method(torch.ones(3))
        with torch.no_grad():
            built_in(torch.ones(4, 3))

    programs = reported(run)
    assert [list(dict(p.worth.ways)) for p in programs] == [
        ["eager", "torch.compile", "stock, tuned", OURS]
    ] * 4
    assert all(seconds > 0 for p in programs for _, seconds in p.worth.ways)
    for program, train in zip(programs, (False, True, True, False), strict=True):
        told = program.worth.verdict
        compared = "results and gradients of 2 training steps" if train else "results of 2 calls"
        right = f"torch.compile: right; stock, tuned: right; {OURS}: right"
        assert told.startswith(f"{compared} compared; {right}")
        assert ("backward" in told) == train
    assert torch.equal(net.weight.grad, torch.full((3,), 3.0)), "as the script left it"


class Counting(nn.Module):
    """Each call changes a buffer; `act` and `step` are compiled where they are written, so that self is an argument."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen += 1
        return x * self.weight + self.seen

    @torch.compile(backend="desugar", options={"backend": "eager"})
    def act(self, x):
        return self.forward(x)


class Trainer:
    def __init__(self, net):
        self.net, self.total = net, torch.zeros(3)

    def step(self, x):
        self.total.add_(1)
        return self.net(x) + self.total


def call_of(net, x):
    return net(x)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", ["a method", "an argument", "an argument of ours", "a trainer's method"])
def test_modules_among_the_arguments_are_as_the_script_left_them(door):
    net = Counting()
    trainer = Trainer(net)
    call = {
        "a method": net.act,
        "an argument": lambda x: behind(call_of)(net, x),
        "an argument of ours": lambda x: compiled(call_of)(net, x),
        "a trainer's method": behind(trainer.step),
    }[door]
    (program,) = reported(lambda: call(torch.ones(3)).sum().backward())
    assert program.worth.verdict.count(": right") == 3, program.worth.verdict
    assert net.seen.tolist() == [1, 1, 1] and net.weight.grad.tolist() == [1, 1, 1]
    assert trainer.total.tolist() == [float(door == "a trainer's method")] * 3


@pytest.mark.slow
def test_two_functions_behind_torch_compile_are_told_apart():
    """Each is compiled anew once, and its calls have its own options."""
    one, other = behind(lambda x: x * 2), behind(lambda x: x * 3, dynamic=False)

    def run():
        for n in (3, 4):
            one(torch.ones(n))
            other(torch.ones(n))

    programs = reported(run)
    assert len(programs) == 4 and all(f"{OURS}: right" in p.worth.verdict for p in programs)


# ---- the answer ----------------------------------------------------------------------------------------------

RIGHT = Verdict("right")


def way(name, seconds, memory=0, verdict=RIGHT, graph=None, **found):
    call = None if seconds is None else Spread(seconds, 0.0)
    return Way(name, verdict, Programs(**found), call=call, memory=memory, graph=graph)


def summed(*seconds, **options):
    *others, ours = (way(name, one) for name, one in zip((EAGER, STOCK, DIRECT), seconds, strict=True))
    return lambda: sum_up(2, [*others, replace(ours, **options)], "2 programs")


test_the_answer = giving(
    {
        name: (lambda times=times: summed(*times)().answer, says)
        for name, times, says in (
            ("yes", (4.0, 2.0, 1.0), "yes, 4 times faster than eager, 2 times faster than torch.compile"),
            ("no", (1.0, 2.0, 4.0), "no, 4 times slower than eager, 2 times slower than torch.compile"),
            ("hardly", (1.0, 1e-4, 1.03), "hardly, as fast as eager, 10,300 times slower than torch.compile"),
            ("stock failed", (1.0, None, 0.5), "yes, 2 times faster than eager"),
            ("ours failed", (1.0, 1.0, None), "no, desugar.compile failed"),
        )
    }
    | {
        "what is wrong was not worth it": (
            lambda: (
                (found := summed(4.0, 2.0, 1.0, verdict=Verdict("wrong", "call 1 of 2: off"))()).answer,
                found.verdict.partition("; desugar.compile: ")[2],
            ),
            (
                "no, desugar.compile does not do what eager mode does",
                "wrong (call 1 of 2: off); 2 programs",
            ),
        )
    }
)


MIB, KERNELS, TUNES = (
    2**20,
    "the kernels of its graph are slower; ",
    "it compiles for constant sizes, with tuned kernels if there are any; pass dynamic=False",
)


def losses(rival, ours, **options):
    return lambda: list(sum_up(2, [rival, ours], **{"backend": "eager"} | options).losses)


test_each_loss_has_its_cause_and_the_remedy = giving(
    {
        "no loss": (losses(way(EAGER, 1.0, MIB), way(DIRECT, 1.0, MIB)), []),
        "a wrong way wins nothing": (
            losses(way(STOCK, 1.0, verdict=Verdict("wrong")), way(DIRECT, 2.0)),
            [],
        ),
        "a note": (
            losses(way(EAGER, 1.0), way(DIRECT, 2.0, notes=("padded; pass lengths",))),
            ["2 times slower than eager: padded; pass lengths"],
        ),
        "a break": (
            losses(way(STOCK, 1.0), way(DIRECT, 2.0, breaks=("a.py:1: why",))),
            [
                "2 times slower than torch.compile: a graph ends at a.py:1: why; keep that line out of the function"
            ],
        ),
        "settings": (
            losses(way(TUNED, 1.0), way(DIRECT, 2.0)),
            [f"2 times slower than stock, tuned: {TUNES}"],
        ),
        "settings that ours has, too": (
            losses(way(TUNED, 1.0), way(DIRECT, 2.0), options={"dynamic": False}),
            ['2 times slower than stock, tuned: its graph runs op by op; pass backend="inductor"'],
        ),
        "time around the graphs": (
            lambda: losses(way(EAGER, 1.0), way(DIRECT, 2.0, graph=0.5))()[0].partition(", the wrapper")[0],
            "2 times slower than eager: 1.5 s of a call are guards",
        ),
        "kernels": (
            losses(way(STOCK, 1.0), way(DIRECT, 2.0, graph=1.9), backend="inductor"),
            [f"2 times slower than torch.compile: {KERNELS}call it by torch.compile"],
        ),
        "a time that was not taken apart, as on a GPU": (
            losses(way(EAGER, 1.0), way(DIRECT, 2.0), backend="inductor"),
            [
                "2 times slower than eager: its graph or its wrapper takes longer; leave this function uncompiled"
            ],
        ),
        "memory": (
            lambda: [
                losses(way(STOCK, 1.0, 9 * MIB), way(DIRECT, 1.0, 12 * MIB), train=train)()[0].partition(";")[
                    0
                ]
                for train in (True, False)
            ],
            [
                "3 MiB more memory than torch.compile: more tensors are kept for the backward",
                "3 MiB more memory than torch.compile: its graph holds more tensors at once",
            ],
        ),
    }
)


# ---- copies of arguments -------------------------------------------------------------------------------------


def copied(*args, **kwargs):
    return copy_call((args, kwargs))


def copy_of(x):
    ((other,), _) = copied(x)
    return other


def dynamic():
    x = torch.ones(4, 2)
    torch._dynamo.mark_dynamic(x, 0)
    return x


X, NO_LEAF = torch.ones(4), torch.ones(2, requires_grad=True) * 2

test_copies = giving(
    {
        "what is no leaf has one that may be written to": (
            lambda: (copy_of(NO_LEAF).add_(1).tolist(), copy_of(NO_LEAF).is_leaf, NO_LEAF.tolist()),
            ([3, 3], False, [2, 2]),
        ),
        "sizes that are to be symbolic stay so": (
            lambda: copy_of(dynamic())._dynamo_dynamic_indices,
            {0},
        ),
        "an argument that is given twice is copied once": (lambda: len(set(map(id, copied(X, X)[0]))), 1),
        "bytes count each tensor once": (
            lambda: bytes_of(((X, [X]), {"w": make_weight()})),
            16 + 32 + 16,
        ),
    }
)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 3),
        lambda: torch.ones(2, 3).t(),
        lambda: torch.arange(12.0).reshape(3, 4)[:, 1:3],
        lambda: torch.ones(3, 1).expand(3, 4),
        lambda: torch.ones(0, 4)[:, ::2],
        lambda: torch.ones(2, requires_grad=True),
        lambda: nn.Parameter(torch.ones(2), requires_grad=False),
        make_weight,
        lambda: torch.eye(3).to_sparse(),
    ],
)
def test_a_tensor_has_its_class_strides_and_gradients_again(make):
    x = make()
    other = copy_of(x)
    assert type(other) is type(x) and other is not x and other.requires_grad == x.requires_grad
    assert other.shape == x.shape and other.dtype == x.dtype and other.is_leaf == x.is_leaf
    if x.layout is torch.strided:
        assert other.stride() == x.stride()
    dense = [t.to_dense() if t.layout is not torch.strided else t for t in (x.detach(), other.detach())]
    assert torch.equal(dense[0] + 0, dense[1] + 0)


def test_containers_are_copied_modules_and_functions_are_not():
    @dataclass
    class Batch:
        words: torch.Tensor
        name: str

    batch, net, rows = Batch(torch.ones(2), "a"), nn.Linear(2, 2), [torch.ones(1)]
    (a, b, c, d), by_name = copied(batch, net, rows, torch.relu, again=rows)
    assert isinstance(a, Batch) and a.words is not batch.words and b is net and d is torch.relu
    assert c is not rows and c[0] is not rows[0] and by_name["again"] is c


test_what_cannot_be_copied_says_so = raising(
    [
        (lambda: copied(X, X[1:]), NoCopy, "share memory"),
        (
            lambda: copied(n for n in range(3)),
            NoCopy,
            "its arguments cannot be copied: TypeError: cannot pickle 'generator'",
        ),
    ]
)


def test_state_is_restored():
    net = nn.BatchNorm1d(3)
    net.weight.grad = torch.ones(3)
    with restored({**dict(net.named_parameters()), **dict(net.named_buffers())}):
        net(torch.randn(5, 3) + 7).sum().backward()
        net.weight.grad = None
        assert net.num_batches_tracked == 1
    assert net.num_batches_tracked == 0 and net.running_mean.tolist() == [0, 0, 0]
    assert net.weight.grad.tolist() == [1, 1, 1] and net.bias.grad is None
