"""Reports, refusals, options, the pytest class; and what the kit finds in PyTorch's own TwoTensor."""

from __future__ import annotations

import random
import subprocess
import sys
import unittest

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from subclasses import TensorSubclass, inner
from subclasses.testing import ConformanceError, check, examine, named, suite, sweep
from tests.subclasses.testing import broken
from tests.subclasses.testing.byhand import Tagged

aten = torch.ops.aten
QUICK = {"paths": {}, "construct": Tagged}


def make():
    return Tagged(torch.randn(4, 6))


class Refuses(TensorSubclass):
    """Has no rule and no fallback: everything but structure is refused."""

    held: Tensor = inner()


class Ruled(TensorSubclass):
    """Rules for ops that the kit does not call by itself: it cannot know what to pass."""

    held: Tensor = inner()

    def materialize(self) -> Tensor:
        return self.held


@Ruled.implements(F.normalize)
def _(func, x):
    return func(x.unwrap("held"))


@Ruled.implements(aten.roll.default)
def _(func, x, shifts, dims=()):
    return Ruled(func(x.held, shifts, dims))


# ---- reports -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_failure_says_which_promise_is_broken_and_how_to_mend_it():
    with pytest.raises(ConformanceError) as caught:
        check(lambda: broken.NoAliasing(torch.randn(4, 6)), paths={})
    text = str(caught.value)
    assert "NoAliasing keeps" in text
    assert "views: A view shares memory with the value that it is a view of" in text
    assert "broken: x.view(-1) has a storage of its own" in text
    assert "mend: end __torch_dispatch__ with" in text
    assert caught.value.report.broken == ["views"]


@pytest.mark.slow
def test_an_error_of_the_class_is_the_cause_of_a_failure():
    report = examine(lambda: broken.RaisesTypeErrors(torch.randn(4, 6)), paths={})
    values, arguments = report.of("broken")
    assert "x.softmax(-1) raised KeyError" in values.detail
    assert "x.softmax(-1, dtype=torch.float64) raised KeyError" in arguments.detail
    assert isinstance(values.error.__cause__, KeyError)


@pytest.mark.slow
def test_clean_refusals_break_nothing_and_are_told():
    report = check(lambda: Refuses(torch.randn(4, 6)), reference=lambda x: x.held, paths={})
    values = next(o for o in report.outcomes if o.promise.name == "values")
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


def test_wrong_arguments_are_refused_at_once():
    with pytest.raises(TypeError, match=r"traceable wrapper subclass.*got Tensor"):
        check(lambda: torch.ones(2))
    with pytest.raises(TypeError, match="no option refrence; they are atol"):
        check(make, refrence=lambda x: x)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unknown promises veiws; they are readable"):
        check(make, skip={"veiws"})


@pytest.mark.slow
def test_a_promise_can_be_skipped():
    report = examine(lambda: broken.NoAliasing(torch.randn(4, 6)), skip={"views"}, paths={})
    assert report.broken == []
    assert "left out by skip=" in str(report)


@pytest.mark.slow
def test_rules_that_were_not_tried_are_named_and_ops_tries_them():
    def outcome(**options):
        report = examine(lambda: Ruled(torch.randn(4, 6)), paths={}, **options)
        return next(o for o in report.outcomes if o.promise.name == "rules_tried")

    assert outcome().detail.startswith("not called: aten.roll.default, normalize")
    ops = {F.normalize: lambda x: (x,), torch.roll: lambda x: (x, 1)}
    assert outcome(ops=ops).state == "kept"


@pytest.mark.slow
def test_ops_that_write_are_compiled_on_values_of_their_own():
    class Written(TensorSubclass, fallback="materialize"):
        held: Tensor = inner()

        def materialize(self):
            return self.held * 1

    @Written.implements(aten.add_.Tensor, aten.mul_.Tensor)
    def write(func, x, y):
        func(x.held, y)
        return x

    paths = {"torch.compile": lambda fn: torch.compile(fn, backend="eager", fullgraph=True)}
    ops = {op: lambda x: (x, torch.full((4, 6), 2.0)) for op in (aten.add_.Tensor, aten.mul_.Tensor)}
    report = examine(lambda: Written(torch.ones(4, 6)), ops=ops, paths=paths)
    assert {"compiled_values", "rules_tried"} <= {o.promise.name for o in report.of("kept")}


@pytest.mark.slow
def test_a_rule_with_raw_inner_tensors_loses_gradients_and_is_caught():
    class Raw(TensorSubclass):
        held: Tensor = inner()

        def materialize(self):
            return self.held

    @Raw.implements(F.cosine_similarity)
    def _(func, x, y):
        return func(x.held, y)

    report = examine(
        lambda: Raw(torch.randn(4, 6)), paths={}, ops={F.cosine_similarity: lambda x: (x, torch.ones(4, 6))}
    )
    assert {"gradients", "inner_gradients"} <= set(report.broken)
    assert "cosine_similarity does not require grad" in str(report)


@pytest.mark.slow
def test_a_tolerance_lets_a_coarse_rule_pass():
    class Coarse(TensorSubclass, fallback="materialize"):
        held: Tensor = inner()

        def materialize(self):
            return self.held

    @Coarse.implements(aten.erf.default)
    def _(func, x):
        return func(x.held) * 1.001

    options = {"ops": {torch.erf: lambda x: (x,)}, "paths": {}, "skip": {"lazy_bits", "inference_mode"}}
    assert "values" in examine(lambda: Coarse(torch.randn(4, 6)), **options).broken
    assert "values" not in examine(lambda: Coarse(torch.randn(4, 6)), rtol=0.01, **options).broken


@pytest.mark.slow
def test_a_compiler_that_is_not_installed_is_left_out():
    report = examine(make, paths={"none": named("no_such_package:compile")}, construct=Tagged)
    assert not report.broken


@pytest.mark.slow
def test_a_compiler_that_computes_something_else_is_caught():
    def off_by_one(function):
        def compiled(*args):
            result = function(*args)
            return [leaf + 1 for leaf in result] if isinstance(result, list) else result

        return compiled

    report = examine(make, paths={"off": off_by_one}, construct=Tagged)
    assert report.broken == ["compiled_values", "dynamic_shapes"]
    assert "all ops at once under off is not what eager mode gives" in str(report)


# ---- pytest ------------------------------------------------------------------------------------------------

TestTagged = suite(make, **QUICK)


@pytest.mark.slow
def test_the_suite_has_one_test_for_each_promise():
    methods = {name for name in dir(TestTagged) if name.startswith("test_")}
    assert {"test_round_trip", "test_views", "test_inner_gradients", "test_compiled_values"} <= methods
    assert len(methods) == len(examine(make, **QUICK).outcomes)
    failing = suite(lambda: broken.NoAliasing(torch.randn(4, 6)), paths={})()
    with pytest.raises(ConformanceError, match="views: A view shares memory"):
        failing.test_views()
    failing.test_round_trip()
    with pytest.raises(unittest.SkipTest, match="only a declared class"):
        failing.test_rules_tried()


@pytest.mark.slow
def test_importing_the_kit_imports_no_test_library():
    others = ("pytest", "expecttest", "hypothesis")
    code = f"import sys, subclasses.testing; print([m for m in {others} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    code = "import sys, subclasses; print('subclasses.testing' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ---- PyTorch's own -----------------------------------------------------------------------------------------


def make_two():
    return TwoTensor(torch.randn(4, 6), torch.randn(4, 6))


@pytest.mark.slow
def test_what_the_kit_finds_in_two_tensor():
    report = examine(make_two, reference=lambda x: (x.a, x.b), paths={})
    assert set(report.broken) == {
        "inference_mode",  # a view of a value from outside cannot be made inside
        "lazy_bits",  # PyTorch issue 130646
        "strangers",  # an unknown subclass is taken for plain
        "serialization",  # weights_only loads no class that is not registered
        "inner_requires_grad",  # inner tensors that require grad get no gradient
    }


def test_the_op_list_finds_that_two_tensor_gives_the_first_answer_for_both():
    options = {"reference": lambda x: (x.a, x.b), "wrap": lambda t: TwoTensor(t, t + 1)}
    verdicts = sweep(make_two, ops={"add", "softmax", "equal", "allclose", "nonzero"}, **options)
    assert verdicts["add"][0] == verdicts["softmax"][0] == "right"
    assert verdicts["allclose"][0] == "wrong"
    assert str(verdicts).endswith("wrong")


@pytest.mark.slow
def test_the_kit_runs_on_torchaos_int8_tensor():
    quantization = pytest.importorskip("torchao.quantization")
    linear = torch.nn.Linear(64, 32)
    # Version 2 of the configuration makes an Int8Tensor, where a release has it.
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig(version=2))
    weight = linear.weight.detach()
    report = examine(lambda: weight.clone(), reference=lambda w: w.dequantize(), paths={})
    assert {"round_trip", "clone_and_detach"} <= {o.promise.name for o in report.of("kept")}


# ---- wrong arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "options", "words"),
    [
        (Tagged(torch.ones(2)), {}, r"takes a factory.*check\(lambda: Tagged\(...\)\), got a Tagged"),
        (Tagged, {}, r"takes a factory.*got a Tagged"),
        (3, {}, r"takes a factory.*got an? int"),
        (lambda: Tagged(torch.ones(2)), {"sizes": lambda: 3}, "sizes= takes a list of factories"),
        (lambda: Tagged(torch.ones(2)), {"variants": [5]}, "variants= takes a list of factories"),
        (lambda: Tagged(torch.ones(2)), {"wrap": 5}, "wrap= takes a function, got 5"),
        (lambda: Tagged(torch.ones(2)), {"ops": {torch.add: 1}}, "ops= takes a function from a value"),
    ],
)
def test_wrong_arguments_are_not_faults_of_the_class(factory, options, words):
    with pytest.raises(TypeError, match=words):
        examine(factory, **options)
