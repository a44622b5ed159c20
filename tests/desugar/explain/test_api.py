"""`desugar.explain` reports the expected programs for functions whose answer the tests define."""

import json
import re
import runpy
from dataclasses import replace

import pytest
import torch
from torch import nn

import desugar
from desugar.explain.collecting.graphs import kind_of
from desugar.explain.records import Guard, Report, Worth
from desugar.explain.render import render_rich
from desugar.explain.text import percent, render_report_text, render_text
from desugar.recording import listeners
from subclasses.ragged import JaggedTensor
from tests.desugar.explain import subjects
from tests.desugar.explain.subjects import Net, effects, layer, make_weight, make_x
from tests.modules import Held
from tests.tables import giving


@pytest.fixture(scope="module")
def explained():
    """The layer with its backward."""
    return desugar.explain(layer, make_x(), make_weight()).program


FACTOR = 4


class Outer(Held):
    def forward(self, x):
        return self.net(x).sin()


def scaled(d, how):
    return d["x"] * d["by"][0] * FACTOR if how == "up" else d["x"]


def by_size(x, n):
    if x.shape[0] % 2 == 0 and n < 5:
        return x * n
    return x


def several(x):
    total = x.sum()
    first = x[0]
    return total, x * 2, first


def op_named(program, name):
    (found,) = [op for op in program.ops if op.name == name]
    return found


def rows(*lengths):
    return JaggedTensor.from_tensors([torch.ones(n, 4) for n in lengths])


# ------------------------------------------------------------------------------------------------ findings

LINEAR, MUL, INNER_MUL = "torch.nn.functional.linear", "torch.Tensor.mul", "aten.mul.Tensor"

# Each case: a function that reads the explanation of the layer, and the expected value.
OF_THE_LAYER = {
    "inputs are leaves of a tree": (
        lambda p: [(x.name, x.kind, x.size, x.dtype, x.requires_grad, x.metadata) for x in p.inputs],
        [
            ("x", "Tensor", ("2", "8"), "float32", True, ()),
            ("w", "Int8Weight", ("4", "8"), "float32", False, (("axis", "0"),)),
        ],
    ),
    "inner tensors": (
        lambda p: [(inner.name, inner.dtype) for inner in p.inputs[1].inner],
        [("qdata", "int8"), ("scale", "float32")],
    ),
    "outputs": (lambda p: [leaf.name for leaf in p.outputs], ["result"]),
    "an op by a rule": (
        lambda p: (op_named(p, LINEAR).kind, "rule_for_linear" in op_named(p, LINEAR).how),
        ("rule", True),
    ),
    "what an op became": (
        lambda p: [
            "aten.mm.default" in nodes
            for nodes in (op_named(p, LINEAR).forward, op_named(p, LINEAR).backward)
        ],
        [True, True],
    ),
    "a plain op": (lambda p: op_named(p, "torch.Tensor.relu").kind, "plain"),
    "an op that materializes": (lambda p: op_named(p, INNER_MUL).kind, "materialize"),
    "an op inside of another": (lambda p: op_named(p, INNER_MUL).parent - op_named(p, MUL).number, 0),
    "lines of ops": (
        lambda p: [op_named(p, name).place.text for name in (LINEAR, INNER_MUL)],
        ["y = F.linear(x, w).relu()", "z = w * 2  # materializes"],
    ),
    "materializing fallbacks and their lines": (
        lambda p: [(found.cls, found.op, found.place.text) for found in p.materialized],
        [("Int8Weight", INNER_MUL, "z = w * 2  # materializes")],
    ),
    "nodes belong to ops of the function": (
        lambda p: {node.op for graph in p.graphs for node in graph.nodes} - {op.number for op in p.ops},
        set(),
    ),
    "lines of nodes": (
        lambda p: [
            node.name
            for graph in p.graphs
            for node in graph.nodes
            if not graph.text.splitlines()[node.line].strip().startswith(f"{node.name} = ")
        ],
        [],
    ),
    "the source": (
        lambda p: [(source.function, source.lines[0]) for source in p.sources],
        [("layer", "def layer(x, w):")],
    ),
    "lines of the source that ran an op": (
        lambda p: [
            op
            for op in p.ops
            for source in p.sources
            if source.lines[op.place.line - source.first].strip() != op.place.text
        ],
        [],
    ),
    "checks left out stand in the wrapper with their proof": (
        lambda p: [
            left
            for left in p.left_out
            if p.wrapper.splitlines()[left.line].strip() != f"# left out: {left.check}: {left.proof}"
        ],
        [],
    ),
    "some checks are left out, by guards": (
        lambda p: (len(p.left_out) > 3, any("guards" in left.proof for left in p.left_out)),
        (True, True),
    ),
    "guards are Dynamo's, in the user's names": (
        lambda p: [guard.text for guard in p.guards],
        [
            "type(w) is Int8Weight",
            "w has the inner tensors qdata, scale",
            "w.axis == 0",
            "w: Int8Weight float32[4, 8] on cpu",
            "x: Tensor float32[2, 8] on cpu requires_grad",
            "w.qdata: Tensor int8[4, 8] on cpu",
            "w.scale: Tensor float32[4, 1] on cpu",
            "modes are what they were: gradients, autocast, determinism, defaults, torch function modes",
            "2 guards on builtins, modules and the like: nobody has patched them",
        ],
    ),
    "what guards are about": (
        lambda p: [guard.name for guard in p.guards],
        ["w", "w", "w", "w", "x", "w.qdata", "w.scale", "", ""],
    ),
    "guards count Dynamo's checks": (
        lambda p: (p.guards[0].checks, p.guards[4].checks > 1),
        (1, True),
    ),
    "what is saved adds up": (
        lambda p: (
            p.saved_bytes > 0,
            p.saved_bytes - sum(saved.nbytes for saved in p.saved),
            p.saved_bytes - desugar.trace(layer, make_x(), make_weight()).saved_bytes,
            "input w.scale" in [saved.source for saved in p.saved],
        ),
        (True, 0, 0, True),
    ),
    "stages are timed": (
        lambda p: ({name for name, _ in p.stages}, sum(seconds for _, seconds in p.stages) <= p.seconds),
        ({"discover", "trace", "partition", "compile forward", "compile backward", "wrapper"}, True),
    ),
    "the cost is measured": (
        lambda p: (
            p.cost.rounds >= 5,
            0 < p.cost.graph <= p.cost.call,
            p.cost.wrapper == pytest.approx(p.cost.call - p.cost.graph),
            0 <= p.cost.share < 1,
        ),
        (True,) * 4,
    ),
}


test_the_layer = giving(OF_THE_LAYER, "explained")


@pytest.mark.slow
def test_the_wrapper_differs_from_that_of_the_program_in_comments_alone(explained):
    plain, lines = desugar.trace(layer, make_x(), make_weight()), explained.wrapper.splitlines()
    bare = "\n".join(line for line in lines if not line.strip().startswith("# left out"))
    assert "left out" not in plain.source and bare.startswith(plain.wrapper.rstrip())


def places(program):
    """The line of the user by the text of a guard, where there is one."""
    return {guard.text: guard.place.text for guard in program.guards if guard.place}


def with_symbols(fn, *args):
    return desugar.explain(desugar.compile(fn, backend="eager", dynamic=True), *args)


def guard_texts(program):
    return {guard.text for guard in program.guards}


# Each case: a function that explains something, a function that reads the program, and the expected value.
OF_OTHERS = {
    "methods of one name are functions of their own": (
        lambda: desugar.explain(Outer(net=Net()), torch.ones(2, 3)),
        lambda p: sorted(s.lines[1].strip() for s in p.sources if s.function.endswith("forward")),
        ["return self.inner(x) * scale", "return self.net(x).sin()"],
    ),
    "names of guards on a module": (
        lambda: desugar.explain(Net(), torch.ones(2, 3)),
        lambda p: {"self.inner.weight", "self.inner", "x"} - {guard.name for guard in p.guards},
        set(),
    ),
    "guards on hooks": (
        lambda: desugar.explain(Net(), torch.ones(2, 3)),
        lambda p: [(g.name, g.checks > 1) for g in p.guards if g.text == "self.inner has no hooks"],
        [("self.inner", True)],
    ),
    "guards on a value have the line that read it": (
        lambda: desugar.explain(scaled, {"x": torch.ones(3), "by": [2, 3]}, "up"),
        places,
        dict.fromkeys(
            ["type(d['by']) is list", "len(d['by']) == 2", "d['by'][0] == 2", "how == 'up'", "FACTOR == 4"],
            'return d["x"] * d["by"][0] * FACTOR if how == "up" else d["x"]',
        ),
    ),
    "other guards have none": (
        lambda: desugar.explain(scaled, {"x": torch.ones(3), "by": [2, 3]}, "up"),
        lambda p: {"type(d) is dict", "d['x']: Tensor float32[3] on cpu"} - guard_texts(p),
        set(),
    ),
    "guards on sizes have the line that asked": (
        lambda: with_symbols(by_size, torch.ones(4, 3), 3),
        lambda p: [places(p)[text] for text in ("(x.size(0) % 2) == 0", "n <= 4")],
        ["if x.shape[0] % 2 == 0 and n < 5:"] * 2,
    ),
    "no line asks whether a size is 0 or 1": (
        lambda: with_symbols(by_size, torch.ones(4, 3), 3),
        lambda p: ("2 <= x.size(0)" in places(p), "2 <= x.size(0)" in guard_texts(p)),
        (False, True),
    ),
    "files of the user": (
        lambda: with_symbols(by_size, torch.ones(4, 3), 3),
        lambda p: {guard.place.file for guard in p.guards if guard.place},
        {__file__},
    ),
    "guards that the type proves are not made": (
        lambda: desugar.explain(torch.sin, rows(2, 3)),
        lambda p: (
            [text for text in guard_texts(p) if "inner tensors of" in text],
            bool({"type(input) is JaggedTensor", "type(args[0]) is JaggedTensor"} & guard_texts(p)),
        ),
        ([], True),
    ),
    "results have numbers": (
        lambda: desugar.explain(several, torch.ones(2, 3)),
        lambda p: ([leaf.name for leaf in p.outputs], p.aliasing),
        (["result 1", "result 2", "result 3"], ("result 3 is a view of x",)),
    ),
    "effects": (
        lambda: desugar.explain(effects, ZEROS, torch.zeros(1)),
        lambda p: (
            (p.cost, "writes" in p.no_cost),
            p.aliasing,  # Dynamo's code returns y past the graph
            [leaf.name for leaf in p.inputs],
            any(text.startswith("x is written to") for text in p.mutation),
            ZEROS.any().item(),  # nothing is run
        ),
        ((None, True), ("result 1 is a view of x",), ["x"], True, False),
    ),
    "no gradients": (
        lambda: torch.no_grad()(desugar.explain)(layer, make_x(), make_weight()),
        lambda p: ([graph.name for graph in p.graphs], p.saved),
        (["forward"], ()),
    ),
    "inference mode": (
        lambda: torch.inference_mode()(desugar.explain)(layer, make_x(), make_weight()),
        lambda p: ([graph.name for graph in p.graphs], p.saved),
        (["forward"], ()),
    ),
    **{
        f"{size} rows": (
            lambda size=size: desugar.explain(lambda x: (x * 2).sum(), torch.ones(size, 3)),
            lambda p: p.inputs[0].size,
            (str(size), "3"),
        )
        for size in (0, 1)
    },
    "inner tensors that are shared": (
        lambda: desugar.explain(
            lambda a, b: a + b, *(JaggedTensor(torch.ones(5, 4), OFFSETS, max_length=3) for _ in "ab")
        ),
        lambda p: "a.offsets and b.offsets are one tensor in this call" in p.aliasing,
        True,
    ),
}
OFFSETS, ZEROS = torch.tensor([0, 2, 5]), torch.zeros(2, 3)


@pytest.mark.parametrize("name", OF_OTHERS)
def test_other_programs(name):
    explain, read, want = OF_OTHERS[name]
    assert read(explain().program) == want


# ---------------------------------------------------------------------------------------- kinds of functions


def printed(path, graph):
    """The function that the text of a graph defines."""
    path.write_text(graph.text)
    return runpy.run_path(str(path))[graph.name]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_graphs_run_as_they_are_printed(explained, tmp_path, number):
    graph = explained.graphs[number]
    traced = getattr(desugar.trace(layer, make_x(), make_weight()), graph.name)
    fakes = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder")]
    arguments = [torch.ones(tuple(fake.shape), dtype=fake.dtype) for fake in fakes]
    torch.testing.assert_close(
        list(printed(tmp_path / "printed.py", graph)(*arguments)), list(traced(*arguments))
    )


@pytest.mark.slow
def test_branches_are_functions_inside_of_the_graph(tmp_path):
    def fn(x):
        return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,)).sin()

    (graph,) = desugar.explain(fn, torch.ones(3)).program.graphs
    assert graph.needs == () and "    def true_graph_0(" in graph.text
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(printed(tmp_path / "printed.py", graph)(x)[0], fn(x))


@pytest.mark.slow
def test_a_module_and_what_compile_made_of_it():
    net = Net()
    compiled = desugar.compile(net, backend="eager")
    for fn in (net, compiled):
        program = desugar.explain(fn, torch.ones(2, 3), scale=3).program
        assert [leaf.name for leaf in program.inputs] == ["x"] and "scale == 3" in guard_texts(program)
        assert [leaf.name for leaf in program.captured] == ["self.inner.weight", "self.inner.bias"]
    assert not compiled.programs  # an explanation does not count as a call


def test_outer_sizes_and_symbols_are_told_in_the_users_words():
    program = with_symbols(lambda x: (x * 2).sum(1), rows(3, 5)).program
    of = {symbol.source: symbol.name for symbol in program.symbols}
    assert set(of) >= {"x.values.size(0)", "x.size(0)", "x.max_length"}
    batch = of["x.size(0)"]
    assert program.inputs[0].size[:2] == (f"{batch} (2 here)", f"{of['x.max_length']} (5 here)")
    assert program.inputs[0].inner[1].size == (f"{batch} + 1 (3 here)",)
    assert f"  # float32[{batch}, " in program.graphs[0].text
    assert all(": _" not in op.how and "<locals>" not in op.how for op in program.ops)


@pytest.mark.slow
def test_symbols_are_shown_where_a_size_has_changed():
    compiled = desugar.compile(layer, backend="eager")
    for size in (2, 5):
        compiled(make_x(size), make_weight())
    program = desugar.explain(compiled, make_x(3), make_weight()).program
    (symbol,) = program.symbols
    assert symbol.value == 3 and program.inputs[0].size[0] == f"{symbol.name} (3 here)"
    assert len(compiled.programs) == 2


def test_nothing_listens_afterwards_and_random_numbers_go_on():
    state = torch.get_rng_state()
    desugar.explain(nn.Dropout(0.5), torch.ones(4))
    assert torch.equal(torch.get_rng_state(), state)
    assert not listeners.has_listeners() and listeners.current() is None
    assert subjects.layer is layer


# --------------------------------------------------------------------------------------------------- shown

TITLES = [
    *(
        "layer",
        "Signature",
        "Line by line",
        "Aliasing and mutation",
        "The forward graph",
        "The backward graph",
    ),
    *("Saved for the backward", "The wrapper", "A call runs this program if"),
]


WORTH = Worth((("eager", 4e-3), ("torch.compile", None), ("desugar.compile", 1e-3)), "3 calls: right")
TIMES = "eager 4 ms, torch.compile failed, desugar.compile 1 ms; 3 calls: right\n"
GUARDS = tuple(Guard(f"x{n} == 0", name=f"x{n}") for n in range(300))


def not_timed(program, *reasons):
    return render_report_text(
        Report("a script", tuple(replace(program, no_worth=reason) for reason in reasons))
    )


def shows(*parts, **changes):
    """Which of these parts the text of a changed explanation shows."""
    return lambda p: [part in render_text(replace(p, **changes)) for part in parts]


# Each case: a function that reads the rendered explanation of the layer, and the expected value.
SHOWN = {
    "the text has every part": (
        lambda p: re.findall(r"^== (.*) ==$", render_text(p), re.MULTILINE),
        TITLES,
    ),
    "the text names rules": (shows("by rule of Int8Weight: rule_for_linear"), [True]),
    "the text has no other ways": (shows("worth"), [False]),
    "a terminal is not flooded with guards": (
        shows("x99 == 0", "x100 ", "200 more; the page", guards=GUARDS),
        [True, False, True],
    ),
    "unfolded text has all guards": (
        lambda p: "x299 == 0" in render_text(replace(p, guards=GUARDS), folded=False),
        True,
    ),
    "other ways": (shows(f"\nwas it worth it: {TIMES}", worth=WORTH), [True]),
    "other ways, with an answer": (
        shows(
            f"\nwas it worth it: yes, 4 times faster than eager; {TIMES}",
            worth=replace(WORTH, answer="yes, 4 times faster than eager"),
        ),
        [True],
    ),
    "memory and losses of other ways": (
        shows(
            "\npeak memory of a call: eager 1 KiB\nloss: slow: a; b\n",
            worth=replace(WORTH, memory=(("eager", 1024), ("torch.compile", None)), losses=("slow: a; b",)),
        ),
        [True],
    ),
    "no other ways": (shows("\nnot timed in other ways: it ran away\n", no_worth="it ran away"), [True]),
    "the reason why a program was not timed stands below it": (
        lambda p: re.findall("^      not timed in other ways: (.)$", not_timed(p, "a", "b", "a", ""), re.M),
        ["a", "b", "a"],
    ),
    "rich shows the same words": (
        lambda p: (
            {"Line by line", LINEAR, "apply([", "primals_1"}
            - {
                part
                for part in ("Line by line", LINEAR, "apply([", "primals_1")
                if part in re.sub(r"\x1b\[[0-9;]*m", "", render_rich(p, width=200))
            }
        ),
        set(),
    ),
    "JSON is the dictionary": (
        lambda p: (
            json.loads(desugar.explain(layer, make_x(), make_weight()).to_json()).keys() ^ p.to_dict().keys()
        ),
        set(),
    ),
    "JSON has names of dtypes": (
        lambda p: json.loads(json.dumps(p.to_dict()))["inputs"][1]["inner"][0]["dtype"],
        "int8",
    ),
}
test_what_is_shown_of_the_layer = giving(SHOWN, "explained")

test_words = giving(
    {
        "a small part is not none": (
            lambda: [percent(share) for share in (0, 0.004, 0.126)],
            ["0%", "< 1%", "13%"],
        ),
        "a rule": (lambda: kind_of("rule of A: f (a.py:1)"), "rule"),
        "a class": (lambda: kind_of("__torch_dispatch__ of TwoTensor"), "class"),
        "what is derived": (lambda: kind_of("derived from aten.add.Tensor (rule) of A"), "derived"),
    }
)
