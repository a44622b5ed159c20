"""Reports, refusals, options, the pytest class; the kit's findings in PyTorch's own TwoTensor."""

import json
import random
import subprocess
import sys
import unittest
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

from subclasses import Outer, inner
from subclasses.testing import ConformanceError, check, examine, named, suite, sweep
from tests.subclasses.subjects import declare
from tests.subclasses.testing import broken
from tests.subclasses.testing.byhand import Tagged
from tests.subclasses.testing.faults import (
    check_kept,
    finding,
    of_tensors,
    outcome,
    outcomes,
    reporting,
    ruled,
)

aten = torch.ops.aten
QUICK = {"paths": {}, "construct": Tagged}


make = of_tensors(Tagged, (4, 6))


# Has no rule and no fallback: everything but structure is refused.
Refuses = declare(name="Refuses")
# Rules for ops that the kit does not call by itself: it does not know their arguments.
Ruled = declare(
    materialize=lambda self: self.held,
    rules={
        F.normalize: lambda func, x: func(x.unwrap("held")),
        aten.roll.default: lambda func, x, shifts, dims=(): type(x)(func(x.held, shifts, dims)),
    },
)
Written = declare(keywords={"fallback": "materialize"}, materialize=lambda self: self.held * 1)

no_aliasing = of_tensors(broken.NoAliasing, (4, 6))


# ---- reports -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_failure_says_which_promise_is_broken_and_how_to_mend_it():
    with pytest.raises(ConformanceError) as caught:
        check(no_aliasing, paths={})
    for words in (
        "NoAliasing keeps",
        "views: A view shares memory with the value that it is a view of",
        "broken: x.view(-1) has a storage of its own",
        "mend: end __torch_dispatch__ with",
    ):
        assert words in str(caught.value)
    assert caught.value.report.broken == ["views"]


@pytest.mark.slow
def test_an_error_of_the_class_is_the_cause_of_a_failure():
    report = examine(lambda: broken.RaisesTypeErrors(torch.randn(4, 6)), paths={})
    values, arguments = report.of("broken")
    assert "x.softmax(-1) raised KeyError" in values.detail
    assert "x.softmax(-1, dtype=torch.float64) raised KeyError" in arguments.detail
    assert isinstance(values.error, KeyError)


@pytest.mark.slow
def test_clean_refusals_break_nothing_and_are_told():
    report = check(of_tensors(Refuses, (4, 6)), reference=lambda x: x.held, paths={})
    (values,) = (o for o in report.outcomes if o.promise.name == "values")
    assert values.state == "kept"
    assert any("x.sum(): Refuses has no rule for aten.sum.default" in line for line in values.refused)


@pytest.mark.slow
def test_nothing_random_or_global_is_left_behind():
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    check(make, **QUICK)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


# ---- options -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rules_that_were_not_tried_are_named_and_ops_tries_them():
    make = of_tensors(Ruled, (4, 6))
    found = outcomes(make, "rules_tried", skip=set())["rules_tried"]
    assert found.detail.startswith("not called: aten.roll.default, normalize")
    ops = {F.normalize: lambda x: (x,), torch.roll: lambda x: (x, 1)}
    check_kept(make, "rules_tried", skip=set(), ops=ops)


@pytest.mark.slow
def test_ops_that_write_are_compiled_on_values_of_their_own():
    paths = {"torch.compile": lambda fn: torch.compile(fn, backend="eager", fullgraph=True)}
    ops = {op: lambda x: (x, torch.full((4, 6), 2.0)) for op in (aten.add_.Tensor, aten.mul_.Tensor)}
    cls = ruled(Written, dict.fromkeys(ops, lambda func, x, y: (func(x.held, y), x)[1]))
    report = examine(lambda: cls(torch.ones(4, 6)), ops=ops, paths=paths)
    assert {"compiled_values", "rules_tried"} <= {o.promise.name for o in report.of("kept")}


# ---- pytest ------------------------------------------------------------------------------------------------

TestTagged = suite(make, **QUICK)


@pytest.mark.slow
def test_the_suite_has_one_test_for_each_promise():
    methods = {name for name in dir(TestTagged) if name.startswith("test_")}
    assert {"test_round_trip", "test_views", "test_inner_gradients", "test_compiled_values"} <= methods
    assert len(methods) == len(examine(make, **QUICK).outcomes)
    failing = suite(no_aliasing, paths={})()
    with pytest.raises(ConformanceError, match="views: A view shares memory"):
        failing.test_views()
    failing.test_round_trip()
    with pytest.raises(unittest.SkipTest, match="only a declared class"):
        failing.test_rules_tried()


@pytest.mark.slow
def test_importing_the_kit_imports_no_test_library():
    others = ("pytest", "expecttest", "hypothesis")
    code = (
        "import sys, subclasses; print('subclasses.testing' in sys.modules); "
        f"import subclasses.testing; print([m for m in {others} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "[]"]


# ---- PyTorch's own -----------------------------------------------------------------------------------------


make_two = of_tensors(TwoTensor)


def plus_one(result):
    return [leaf + 1 for leaf in result] if isinstance(result, list) else result


COARSE = of_tensors(ruled(Written, {aten.erf.default: lambda func, x: func(x.held) * 1.001}), (4, 6))
OF_ERF = {"ops": {torch.erf: lambda x: (x,)}, "skip": {"lazy_bits", "inference_mode"}}


test_what_is_broken_under_which_options = pytest.mark.slow(
    reporting(
        {
            "a promise that is skipped": (no_aliasing, {"skip": {"views"}}, set(), ["left out by skip="]),
            "a declared class without materialize": (
                of_tensors(declare(), (4, 6)),
                {"level": "smoke"},
                set(),
                ['such as reference=lambda x: x.unwrap("held")'],
            ),
            "several tensors, of which none is the value": (
                of_tensors(declare(first=inner(), second=inner())),
                {"level": "smoke"},
                set(),
                ["NO RESULT WAS COMPARED", "the\n  tensor that it represents\n"],
            ),
            "a coarse rule": (COARSE, OF_ERF, {"values", "op_infos_agree"}, []),
            "a tolerance for it": (COARSE, {**OF_ERF, "rtol": 0.01}, set(), []),
            "a compiler that is not installed": (
                make,
                {"paths": {"none": named("no_such_package:compile")}, "construct": Tagged},
                set(),
                [],
            ),
            "a compiler that computes something else": (
                make,
                {"paths": {"off": lambda f: lambda *args: plus_one(f(*args))}, "construct": Tagged},
                {"compiled_values", "dynamic_shapes"},
                ["x * 2 under off is not what eager mode gives"],
            ),
            "PyTorch's TwoTensor": (
                make_two,
                {"reference": lambda x: (x.a, x.b)},
                {
                    "inference_mode",  # a view of a value from outside cannot be made inside
                    "lazy_bits",  # PyTorch issue 130646
                    "strangers",  # an unknown subclass is taken for plain
                    "serialization",  # weights_only loads no class that is not registered
                    "inner_requires_grad",  # inner tensors that require grad get no gradient
                },
                [],
            ),
        }
    )
)


def test_the_op_list_finds_that_two_tensor_gives_the_first_answer_for_both():
    options = {"reference": lambda x: (x.a, x.b), "wrap": lambda t: TwoTensor(t, t + 1)}
    verdicts = sweep(make_two, ops={"add", "softmax", "equal", "allclose", "nonzero"}, **options)
    assert verdicts["add"][0] == verdicts["softmax"][0] == "right"
    assert verdicts["allclose"][0] == "wrong"
    assert str(verdicts).endswith("wrong")


# ---- levels, and other programs ------------------------------------------------------------------------------


def test_levels_and_records():
    smoke = examine(make, level="smoke", **QUICK)
    names = {o.promise.name for o in smoke.outcomes}
    assert smoke.broken == [] and {"values", "own_memory"} <= names and not {"gradients", "inductor"} & names
    report = examine(no_aliasing, only={"views"}, paths={})
    assert [o.promise.name for o in report.outcomes] == ["readable", "views"]
    (failure, *_) = report.of("broken")[0].failures
    assert (failure.promise, failure.case) == ("views", "x.view(-1)") and "storage of its own" in failure.got
    assert json.loads(report.to_json())["outcomes"][1]["failures"][0]["case"] == "x.view(-1)"
    assert '<failure message="x.view(-1) has a storage of its own' in report.to_junit()


def test_the_plugin_tests_each_promise():
    command = f"-m pytest -q -p subclasses.testing.plugin --subclass {__name__}:{{}} --subclass-level smoke -k ::views"
    paths = [str(Path(__file__).parent / "byhand.py"), "-p", "no:cacheprovider"]
    for name, code, words in (
        ("make", 0, "1 passed"),
        ("no_aliasing", 1, "broken: x.view(-1) has a storage"),
        ("absent", 4, "has no attribute 'absent'"),
    ):
        done = subprocess.run(
            [sys.executable, *command.format(name).split(), *paths],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code and words in done.stdout + done.stderr, done.stdout


# ---- wrong arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "options", "words"),
    [
        (lambda: torch.ones(2), {}, r"traceable wrapper subclass.*got Tensor"),
        (make, {"refrence": lambda x: x}, "no option refrence; they are atol"),
        (make, {"skip": {"veiws"}}, "unknown promises veiws; they are readable"),
        (Tagged(torch.ones(2)), {}, r"takes a factory.*check\(lambda: Tagged\(...\)\), got a Tagged"),
        (Tagged, {}, r"takes a factory.*got a Tagged"),
        (3, {}, r"takes a factory.*got an? int"),
        (make, {"sizes": lambda: 3}, "sizes= takes a list of factories"),
        (make, {"variants": [5]}, "variants= takes a list of factories"),
        (make, {"level": "quick"}, 'level= takes "smoke", "gradients" or "full"'),
        (make, {"only": {"veiws"}}, "only= has unknown promises veiws"),
        (make, {"wrap": 5}, "wrap= takes a function, got 5"),
        (make, {"ops": {torch.add: 1}}, "ops= takes a function from a value"),
    ],
)
def test_wrong_arguments_are_not_faults_of_the_class(factory, options, words):
    for examiner in (examine, check):
        with pytest.raises(TypeError, match=words):
            examiner(factory, **options)


# ---- calls that the author passes as ops= ------------------------------------------------------------------

POINTS = torch.rand(3, 2, 4)


# Maps x to matrix @ x + offset; shown as one matrix with a column more.
Affine = declare(
    matrix=inner(shape="... n n"),
    offset=inner(shape="... n"),
    outer=staticmethod(lambda matrix: Outer((*matrix.shape[:-1], matrix.shape[-1] + 1))),
)


def products(product):
    cls = ruled(Affine, {torch.matmul: lambda func, x, points: product(x, points)})
    return of_tensors(cls, (3, 2, 2), (3, 2))


RIGHT = products(lambda x, points: x.unwrap("matrix") @ points + x.unwrap("offset").unsqueeze(-1))
WRONG = {
    "raw": lambda x, points: x.unwrap("matrix") @ points + x.offset.unsqueeze(-1),
    "detached": lambda x, points: x.unwrap("matrix").detach() @ points + x.unwrap("offset").unsqueeze(-1),
}
test_gradients_of_a_call_that_no_tensor_of_the_size_takes = pytest.mark.sweep(2)(
    finding(
        {
            name: (
                "inner_gradients",
                products(wrong),
                ["matmul"],
                RIGHT,
                {"ops": {torch.matmul: lambda x: (x, POINTS)}},
            )
            for name, wrong in WRONG.items()
        }
    )
)


Counts = declare(
    keywords={"fallback": "views"},
    rules={torch.quantile: lambda func, x, level: func(x.unwrap("held"), level)},
)


def level_of(x):
    return x, 0.5 * x.held.numel() / 15


@pytest.mark.sweep(4)
@pytest.mark.parametrize("arguments", [level_of, lambda x: (x, 0.5 * x.held.numel() / 15)])
@pytest.mark.parametrize("reference", [None, lambda x: x.held])
def test_arguments_that_read_fields(arguments, reference):
    options = {"reference": reference} if reference else {}
    report = examine(lambda: Counts(torch.rand(3, 5)), paths={}, ops={torch.quantile: arguments}, **options)
    assert not report.broken, report.details()


def test_arguments_that_cannot_be_made():
    ops = {torch.quantile: lambda x: (x, x.held.absent)}
    found = outcome(lambda: Counts(torch.rand(3, 5)), "values", ops=ops, reference=lambda x: x.held)
    assert found.state == "broken" and "quantile raised AttributeError" in found.detail
    assert "<lambda>" not in found.mend
