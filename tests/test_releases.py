"""A release of PyTorch that lacks a private name: the packages work without it, or an error names the release."""

import operator
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from subclasses.releases import lacking
from tests.degrade import private_names

ROOT = Path(__file__).parents[1]
# Some that an import needs, some that a compilation needs, and some that a fast path needs.
SAMPLE = (
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C.DispatchKey.CompositeImplicitAutograd",
    "torch._C.DispatchKeySet",
    "torch._C._AutoDispatchBelowADInplaceOrView",
    "torch._C._DisableAutocast",
    "torch._C._ForceDispatchKeyGuard",
    "torch._C._any_requires_grad",
    "torch._C._are_functorch_transforms_active",
    "torch._C._autograd._unsafe_set_version_counter",
    "torch._C._current_graph_task_id",
    "torch._C._dispatch_get_all_op_names",
    "torch._C._dispatch_has_kernel",
    "torch._C._dispatch_keys",
    "torch._C._dispatch_tls_local_include_set",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "torch._C._functorch.is_dead_tensor_wrapper",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._storage_Use_Count",
    "torch._TorchCompileWrapper",
    "torch._compile._disable_dynamo",
)


def outcomes_without(*names):
    """Runs the command; returns its exit code and the outcome of each name."""
    command = [sys.executable, "-m", "tests.degrade", *names]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (line.split(maxsplit=1) for line in found.stdout.splitlines())
    return found.returncode, {name: outcome.partition(":")[0] for name, outcome in lines}


def test_a_name_that_is_gone_is_an_error_that_names_the_release():
    code, outcomes = outcomes_without(*SAMPLE)
    assert outcomes == dict.fromkeys(SAMPLE, "named") and code == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_name_that_is_gone_has_an_unclear_outcome():
    code, outcomes = outcomes_without()
    assert code == 0 and outcomes.keys() == set(private_names())
    assert Counter(outcomes.values())["named"] > 80


@pytest.mark.parametrize("attribute", ["_no_such_name", "_C._no_such_name"])
def test_an_error_about_a_name_of_torch_gets_the_release(attribute):
    with pytest.raises(AttributeError) as caught:
        operator.attrgetter(attribute)(torch)
    error = lacking(caught.value)
    assert "_no_such_name" in str(error) and torch.__version__ in str(error)


@pytest.mark.parametrize(
    "error", [AttributeError("x", obj=Counter(), name="x"), ImportError("x", name="rich")]
)
def test_another_error_stays(error):
    assert lacking(error) is None
