"""Idioms of Python around tensors behave as in eager mode over several calls, in both ways to compile.

The idioms are in `idioms/`, grouped by the objects that they change; `idioms/running.py` runs and compares them.
`EXPECTED` names idioms with another outcome because of how Dynamo captures a function; PyTorch's own backend has the
same one.
"""

import importlib
from pathlib import Path

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import make
from tests.desugar.idioms.running import DOORS, IDIOMS, STOCK, Unlike, check_idiom

FILES = sorted(path.stem for path in (Path(__file__).parent / "idioms").glob("*.py"))
for file in FILES:
    importlib.import_module(f"tests.desugar.idioms.{file}")

pytestmark = [
    # Dynamo warns about two idioms on purpose here: a cached helper, and a builtin that it does not trace.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
]

EXPECTED = {
    # Values that Dynamo reads without a guard: the first compiled graph stays in use after they change.
    "environment_variable": Unlike("differs", "os.environ is read without a guard"),
    "builtin_shadowed": Unlike("differs", "nothing checks whether a global with a builtin's name was added"),
    "hooks_of_a_nested_module": Unlike(
        "differs",
        "config.skip_nnmodule_hook_guards is on: hooks of nested modules are not guarded",
        doors=("torch.compile", STOCK),  # `desugar.compile` checks them
    ),
    "forward_of_a_nested_class_replaced": Unlike(
        "differs", "a nested module's own forward is guarded, that of its class is not"
    ),
    "exception_caught_inside": Unlike(
        "differs", "a missing key that raised a caught KeyError is not guarded to stay missing"
    ),
    # Results that a Dynamo graph computes differently from eager mode.
    "formatted_float": Unlike(
        ("differs", "InternalTorchDynamoError"),
        "a float that varies is appended as a float, not as the text made of it; 2.15 raises",
    ),
    "deque_of_bounded_length": Unlike("differs", "a traced `append` to a full deque removes no entry"),
    "dropout_of_everything": Unlike(
        "differs", "a traced dropout with p=1 draws no random numbers; an eager one does"
    ),
    "inference_mode_inside": Unlike(
        "differs", "inference mode entered inside a graph does not make its results inference tensors"
    ),
    # Functions that the compiler refuses.
    "exception_of_an_operator": Unlike(
        "TorchRuntimeError",
        "an operator that fails on fake tensors is not traced into the `except` clause",
        fixed_in="2.15",
    ),
}


@pytest.mark.sweep(704)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", IDIOMS)
def test_idiom(name, door):
    check_idiom(name, door, EXPECTED.get(name))


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", EXPECTED)
def test_exception_is_pytorchs_own(name):
    check_idiom(name, STOCK, EXPECTED[name])


def test_table_names_existing_idioms():
    assert set(EXPECTED) <= set(IDIOMS)
    assert all(unlike.reason for unlike in EXPECTED.values())
    assert len(IDIOMS) >= 200, "idioms got lost"


# ------------------------------------------------------------------ expected differences from eager mode


@pytest.mark.parametrize("door", DOORS)
def test_code_knows_that_it_is_compiled(door):
    compiled, x = (
        DOORS[door](lambda x: (x * 2, torch.compiler.is_compiling(), torch.compiler.is_dynamo_compiling())),
        make(TwoTensor, 2, 3),
    )
    for stance, told in (("default", True), ("default", True), ("force_eager", False), ("default", True)):
        with torch.compiler.set_stance(stance):
            assert compiled(x)[1:] == (told, told)


@pytest.mark.parametrize("door", DOORS)
def test_disabled_code_is_not_compiled(door):
    helper = torch.compiler.disable(lambda x: torch.compiler.is_compiling())
    fn = DOORS[door](lambda x: (helper(x * 2), torch.compiler.is_compiling()))
    for _ in range(2):
        assert fn(make(TwoTensor, 2, 3)) == (False, True)


@pytest.mark.parametrize("door", DOORS)
def test_call_that_needs_another_program_fails_where_none_may_be_made(door):
    fn = DOORS[door](lambda x: x * 2)
    x, other = make(TwoTensor, 2, 3), make(TwoTensor, 2, 3, dtype=torch.float64)
    fn(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        fn(x)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            fn(other)
    assert fn(other).dtype == torch.float64
