"""`desugar.explain`: what it finds, on functions whose answer is known."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def explained():
    """The layer with its backward."""
    return desugar.explain(layer, make_x(), make_weight()).program


FACTOR = 4


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

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


# ------------------------------------------------------------------------------------------- what it finds


def test_the_signature_is_a_tree_with_what_is_constant(explained):
    leaves = [(x.name, x.kind, x.size, x.dtype, x.requires_grad, x.metadata) for x in explained.inputs]
    assert leaves == [
        ("x", "Tensor", ("2", "8"), "float32", True, ()),
        ("w", "Int8Weight", ("4", "8"), "float32", False, (("axis", "0"),)),
    ]
    inner = [(inner.name, inner.dtype) for inner in explained.inputs[1].inner]
    assert inner == [("qdata", "int8"), ("scale", "float32")]
    assert [leaf.name for leaf in explained.outputs] == ["result"]


def test_each_op_has_its_line_its_rule_and_what_it_became(explained):
    linear = op_named(explained, "torch.nn.functional.linear")
    inner, outer = op_named(explained, "aten.mul.Tensor"), op_named(explained, "torch.Tensor.mul")
    assert linear.kind == "rule" and "rule_for_linear" in linear.how
    assert linear.place.text == "y = F.linear(x, w).relu()"
    assert "aten.mm.default" in linear.forward and "aten.mm.default" in linear.backward
    assert op_named(explained, "torch.Tensor.relu").kind == "plain"
    assert inner.kind == "materialize" and inner.parent == outer.number
    assert inner.place.text == "z = w * 2  # materializes"


def test_every_computed_node_belongs_to_an_op_of_the_function(explained):
    known = {op.number for op in explained.ops}
    for graph in explained.graphs:
        assert graph.nodes
        assert {node.op for node in graph.nodes} <= known
        lines = graph.text.splitlines()
        assert all(lines[node.line].strip().startswith(f"{node.name} = ") for node in graph.nodes)


def test_the_sources_hold_every_line_that_ran_an_op(explained):
    (source,) = explained.sources
    assert source.function == "layer" and source.lines[0] == "def layer(x, w):"
    for op in explained.ops:
        assert source.lines[op.place.line - source.first].strip() == op.place.text


def test_methods_of_one_name_are_functions_of_their_own():
    sources = desugar.explain(Outer(), torch.ones(2, 3)).program.sources
    forwards = [source.lines[1].strip() for source in sources if source.function.endswith("forward")]
    assert sorted(forwards) == ["return self.inner(x) * scale", "return self.net(x).sin()"]


def test_materializing_fallbacks_are_told_with_their_line(explained):
    (found,) = explained.materialized
    assert (found.cls, found.op) == ("Int8Weight", "aten.mul.Tensor")
    assert found.place.text == "z = w * 2  # materializes"


def test_what_is_saved_adds_up(explained):
    program = desugar.trace(layer, make_x(), make_weight())
    assert explained.saved_bytes == program.saved_bytes == sum(saved.nbytes for saved in explained.saved) > 0
    assert "input w.scale" in [saved.source for saved in explained.saved]


def test_checks_left_out_stand_in_the_wrapper_with_their_proof(explained):
    lines = explained.wrapper.splitlines()
    assert len(explained.left_out) > 3
    for left in explained.left_out:
        assert lines[left.line].strip() == f"# left out: {left.check}: {left.proof}"
    assert any("guards" in left.proof for left in explained.left_out)


@pytest.mark.slow
def test_the_wrapper_differs_from_that_of_the_program_in_comments_alone(explained):
    plain, lines = desugar.trace(layer, make_x(), make_weight()), explained.wrapper.splitlines()
    bare = "\n".join(line for line in lines if not line.strip().startswith("# left out"))
    assert "left out" not in plain.source and bare.startswith(plain.wrapper.rstrip())


def test_guards_are_dynamos_in_the_users_names(explained):
    assert [guard.text for guard in explained.guards] == [
        "type(w) is Int8Weight",
        "w has the inner tensors qdata, scale",
        "w.axis == 0",
        "w: Int8Weight float32[4, 8] on cpu",
        "x: Tensor float32[2, 8] on cpu requires_grad",
        "w.qdata: Tensor int8[4, 8] on cpu",
        "w.scale: Tensor float32[4, 1] on cpu",
        "modes are what they were: gradients, autocast, determinism, defaults, torch function modes",
        "2 guards on builtins, modules and the like: nobody has patched them",
    ]


def test_guards_name_what_they_are_about_and_count_dynamos_checks(explained):
    names = {guard.text: guard.name for guard in explained.guards}
    assert names["type(w) is Int8Weight"] == "w" and names["w.qdata: Tensor int8[4, 8] on cpu"] == "w.qdata"
    assert [text for text, name in names.items() if not name] == list(names)[-2:], "modes and inner workings"
    checks = {guard.text: guard.checks for guard in explained.guards}
    assert checks["type(w) is Int8Weight"] == 1 < checks["x: Tensor float32[2, 8] on cpu requires_grad"]
    program = desugar.explain(Net(), torch.ones(2, 3)).program
    assert {"self.inner.weight", "self.inner", "x"} <= {guard.name for guard in program.guards}
    (hooks,) = [guard for guard in program.guards if guard.text == "self.inner has no hooks"]
    assert hooks.name == "self.inner" and hooks.checks > 1


def test_a_guard_on_a_value_has_the_line_that_read_it():
    program = desugar.explain(scaled, {"x": torch.ones(3), "by": [2, 3]}, "up").program
    places = {guard.text: guard.place and guard.place.text for guard in program.guards}
    read = ["type(d['by']) is list", "len(d['by']) == 2", "d['by'][0] == 2", "how == 'up'", "FACTOR == 4"]
    line = 'return d["x"] * d["by"][0] * FACTOR if how == "up" else d["x"]'
    assert {text: place for text, place in places.items() if place is not None} == dict.fromkeys(read, line)
    assert {"type(d) is dict", "d['x']: Tensor float32[3] on cpu"} <= {*places}


def test_a_size_guard_has_the_line_that_asked():
    compiled = desugar.compile(by_size, backend="eager", dynamic=True)
    program = desugar.explain(compiled, torch.ones(4, 3), 3).program
    places = {guard.text: guard.place and guard.place.text for guard in program.guards}
    assert places["(x.size(0) % 2) == 0"] == "if x.shape[0] % 2 == 0 and n < 5:"
    assert places["n <= 4"] == "if x.shape[0] % 2 == 0 and n < 5:"
    assert places["2 <= x.size(0)"] is None, "no line of the user's: sizes 0 and 1 have programs of their own"
    assert {guard.place.file for guard in program.guards if guard.place} == {__file__}


def test_guards_that_the_type_proves_are_not_made():
    x = JaggedTensor.from_tensors([torch.ones(2, 4), torch.ones(3, 4)])
    here = {guard.text for guard in desugar.explain(torch.sin, x).program.guards}
    assert "type(input) is JaggedTensor" in here or "type(args[0]) is JaggedTensor" in here
    assert not any("inner tensors of" in text for text in here)


def test_the_cost_is_measured(explained):
    cost = explained.cost
    assert cost.rounds >= 5 and 0 < cost.graph <= cost.call
    assert cost.wrapper == pytest.approx(cost.call - cost.graph) and 0 <= cost.share < 1


def test_stages_are_timed(explained):
    names = [name for name, _ in explained.stages]
    assert {"discover", "trace", "partition", "compile forward", "compile backward", "wrapper"} == set(names)
    assert sum(seconds for _, seconds in explained.stages) <= explained.seconds


# ---------------------------------------------------------------------------------------- kinds of functions


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_graphs_run_as_they_are_printed(tmp_path, name):
    x, w = make_x(), make_weight()
    program = desugar.explain(layer, x, w).program
    (graph,) = [graph for graph in program.graphs if graph.name == name]
    (tmp_path / "printed.py").write_text(graph.text)
    printed = runpy.run_path(str(tmp_path / "printed.py"))[name]
    traced = getattr(desugar.trace(layer, x, w), name)
    fakes = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder")]
    arguments = [torch.ones(tuple(fake.shape), dtype=fake.dtype) for fake in fakes]
    torch.testing.assert_close(list(printed(*arguments)), list(traced(*arguments)))


def test_effects_are_told_and_nothing_is_run():
    x, y = torch.zeros(2, 3), torch.zeros(1)
    program = desugar.explain(effects, x, y).program
    assert not x.any()
    assert program.cost is None and "writes" in program.no_cost
    assert program.aliasing == ("result 1 is a view of x",)  # Dynamo's code returns y past the graph
    assert [leaf.name for leaf in program.inputs] == ["x"]
    assert any(text.startswith("x is written to") for text in program.mutation)


@pytest.mark.slow
def test_shared_inner_tensors_are_told():
    j = JaggedTensor.from_tensors([torch.ones(2, 4), torch.ones(3, 4)])
    other = JaggedTensor(torch.ones(5, 4), j.offsets, max_length=3)
    program = desugar.explain(lambda a, b: a + b, j, other).program
    assert "a.offsets and b.offsets are one tensor in this call" in program.aliasing


def test_results_have_the_names_of_the_users_variables():
    program = desugar.explain(several, torch.ones(2, 3)).program
    assert [leaf.name for leaf in program.outputs] == ["total", "result 2", "first"]
    assert program.aliasing == ("first is a view of x",)


@pytest.mark.slow
def test_a_module_and_what_compile_made_of_it():
    net = Net()
    compiled = desugar.compile(net, backend="eager")
    for fn in (net, compiled):
        program = desugar.explain(fn, torch.ones(2, 3), scale=3).program
        assert [leaf.name for leaf in program.inputs] == ["x"]
        assert "scale == 3" in [guard.text for guard in program.guards]
        assert [leaf.name for leaf in program.captured] == ["self.inner.weight", "self.inner.bias"]
    assert not compiled.programs  # an explanation is no call


def test_outer_sizes_and_symbols_are_told_in_the_users_words():
    x = JaggedTensor.from_tensors([torch.randn(3, 4), torch.randn(5, 4)])
    compiled = desugar.compile(lambda x: (x * 2).sum(1), backend="eager", dynamic=True)
    program = desugar.explain(compiled, x).program
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
    compiled(make_x(2), make_weight())
    compiled(make_x(5), make_weight())
    program = desugar.explain(compiled, make_x(3), make_weight()).program
    (symbol,) = program.symbols
    assert symbol.value == 3 and program.inputs[0].size[0] == f"{symbol.name} (3 here)"
    assert len(compiled.programs) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_one_graph(mode):
    program = mode()(desugar.explain)(layer, make_x(), make_weight()).program
    assert [graph.name for graph in program.graphs] == ["forward"] and program.saved == ()


@pytest.mark.parametrize("size", [0, 1])
def test_empty_and_single_rows(size):
    program = desugar.explain(lambda x: (x * 2).sum(), torch.ones(size, 3)).program
    assert program.inputs[0].size == (str(size), "3")


@pytest.mark.slow
def test_branches_are_functions_inside_of_the_graph(tmp_path):
    def fn(x):
        return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,)).sin()

    (graph,) = desugar.explain(fn, torch.ones(3)).program.graphs
    assert graph.needs == () and "    def true_graph_0(" in graph.text
    (tmp_path / "printed.py").write_text(graph.text)
    printed = runpy.run_path(str(tmp_path / "printed.py"))["forward"]
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(printed(x)[0], fn(x))


def test_random_numbers_go_on_as_if_nothing_had_run():
    state = torch.get_rng_state()
    desugar.explain(nn.Dropout(0.5), torch.ones(4))
    assert torch.equal(torch.get_rng_state(), state)


# --------------------------------------------------------------------------------------------------- shown


@pytest.mark.slow
def test_the_text_has_every_part():
    text = str(desugar.explain(layer, make_x(), make_weight()))
    titles = re.findall(r"^== (.*) ==$", text, re.MULTILINE)
    assert titles == [
        "layer",
        "Signature",
        "Line by line",
        "Aliasing and mutation",
        "The forward graph",
        "The backward graph",
        "Saved for the backward",
        "The wrapper",
        "A call runs this program if",
    ]
    assert "by rule of Int8Weight: rule_for_linear" in text


def test_a_terminal_is_not_flooded_with_guards(explained):
    many = replace(explained, guards=tuple(Guard(f"x{n} == 0", name=f"x{n}") for n in range(300)))
    text = render_text(many)
    assert "x99 == 0" in text and "x100 " not in text and "200 more; the page" in text
    assert "x299 == 0" in render_text(many, folded=False)


WORTH = Worth((("eager", 4e-3), ("torch.compile", None), ("desugar.compile", 1e-3)), "3 calls: right")
TIMES = "eager 4 ms, torch.compile failed, desugar.compile 1 ms; 3 calls: right\n"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"worth": WORTH}, f"\nwas it worth it: {TIMES}"),
        (
            {"worth": replace(WORTH, answer="yes, 4 times faster than eager")},
            f"\nwas it worth it: yes, 4 times faster than eager; {TIMES}",
        ),
        ({"no_worth": "it ran away"}, "\nnot timed in other ways: it ran away\n"),
    ],
)
def test_other_ways_are_told_where_they_were_measured(explained, changes, says):
    assert says in render_text(replace(explained, **changes)) and "worth" not in render_text(explained)


def test_reasons_why_programs_were_not_timed_stand_once(explained):
    programs = tuple(replace(explained, no_worth=reason) for reason in ("a", "b", "a", ""))
    text = render_report_text(Report("a script", programs))
    assert "\nnot timed in other ways: 1, 3: a\nnot timed in other ways: 2: b\n" in text


def test_rich_shows_the_same_words(explained):
    shown = re.sub(r"\x1b\[[0-9;]*m", "", render_rich(explained, width=200))
    for word in ("Line by line", "torch.nn.functional.linear", "apply([", "primals_1"):
        assert word in shown


def test_the_dictionary_is_json(explained):
    found = json.loads(desugar.explain(layer, make_x(), make_weight()).to_json())
    assert set(found) == set(explained.to_dict())
    assert found["inputs"][1]["inner"][0]["dtype"] == "int8"


def test_nothing_listens_afterwards():
    desugar.explain(layer, make_x(), make_weight())
    assert not listeners.has_listeners() and listeners.current() is None
    assert subjects.layer is layer


def test_a_small_part_is_not_none():
    assert [percent(share) for share in (0, 0.004, 0.126)] == ["0%", "< 1%", "13%"]


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("rule of A: f (a.py:1)", "rule"),
        ("__torch_dispatch__ of TwoTensor", "class"),
        ("derived from aten.add.Tensor (rule) of A", "derived"),
    ],
)
def test_kinds_are_words(how, kind):
    assert kind_of(how) == kind
