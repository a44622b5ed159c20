"""The modules that `import desugar` imports; its additions to Dynamo exist whenever Dynamo is imported."""

import subprocess
import sys

import pytest

SLOW = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy")


def run(code):
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    "name", ["desugar", "subclasses", "subclasses.int8", "subclasses.ragged", "subclasses.keyed"]
)
def test_nothing_slow_is_imported(name):
    run(
        f"import sys, torch\nbefore = {{*sys.modules}}\nimport {name}\n"
        f"found = {{*sys.modules}} - before & {{*{SLOW!r}}}\nassert not found, found"
    )


# Each runs in a process of its own.
SCRIPTS = {
    # Names that exist before an import mean the same object after it, in modules and in their classes.
    "what torch has in public stays what it is": """
import sys
import torch, torch.masked, torch.nested, torch.distributed, torch.func, torch.utils.data
import torch._dynamo  # else `desugar` would wait with what it changes there

def is_public(name):
    return name.split(".")[0] == "torch" and not any(part.startswith("_") for part in name.split("."))

def held():
    found = {}
    for name, module in [*sys.modules.items()]:
        if not is_public(name):
            continue
        for key, value in [*vars(module).items()]:
            found[name, key] = value
            if isinstance(value, type) and is_public(value.__module__):
                found |= {(value.__module__, value.__name__, k): v for k, v in vars(value).items()}
    return found

before = held()
assert ("torch.masked", "mean") in before and ("torch", "Tensor", "norm") in before and len(before) > 10_000
import desugar, subclasses.int8, subclasses.keyed, subclasses.ragged, subclasses.testing
after = held()
changed = {key for key, value in before.items() if after.get(key) is not value}
assert not changed, changed
""",
    "what explains is imported by the first explanation": """
import sys, torch, desugar
late = {"desugar.explain.collecting.collect", "desugar.explain.collecting.guards", "desugar.explain.records"}
assert not late & {*sys.modules}
explanation = desugar.explain(torch.relu, torch.ones(2))
assert "relu" in str(explanation) and callable(desugar.explain)
""",
    "what compiles is imported when something is compiled": """
import sys, torch, desugar
waiting = {"desugar.api", "desugar.program", "desugar.pipeline", "desugar.dynamo.backend", "desugar.packages", "optree"}
assert not waiting & {*sys.modules}, waiting & {*sys.modules}
assert {*desugar.__all__} <= {*dir(desugar)}
assert desugar.compile.__module__ == desugar.trace.__module__ == "desugar.api"
assert desugar.compile is desugar.api.compile and desugar.Program is desugar.program.Program
assert "desugar.pipeline" in sys.modules and "desugar.packages" not in sys.modules
""",
    "a registration does not read the bytecode of its rule": """
import dis, torch, subclasses
taken, take_apart = [], dis.get_instructions

def counted(code, *args, **kwargs):
    taken.append(code)
    return take_apart(code, *args, **kwargs)

dis.get_instructions = counted
import subclasses.ragged, subclasses.int8, subclasses.keyed
assert not taken, taken  # of the hundreds of rules
subclasses.rules.author_code.steps_of(counted.__code__)
assert len(taken) == 1  # which the library looks up as counted
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_in_a_new_process(name):
    run(SCRIPTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch._dynamo", "desugar"])
def test_dynamo_may_be_imported_before_or_after(first):
    run(
        f"""
import {first}
import desugar, torch
from torch import Tensor
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.tensor import TensorVariable
from subclasses import TensorSubclass, inner

desugar.compile  # what compiles patches Dynamo
assert SideEffects.store_attr.__module__ == "torch._dynamo.side_effects"  # functools.wraps
assert SideEffects.store_attr.__wrapped__ and TensorVariable.dynamic_getattr.__wrapped__

class Box(TensorSubclass, fallback="map"):
    held: Tensor = inner()

    @property
    def doubled(self):
        return self.held * 2

def replace(x):
    x.held = x.held + 1
    return x * 3

def read(x):
    x.mul_(2)
    return x.doubled

for fn in (replace, read):
    expected, got = (f(Box(torch.ones(2))) for f in (fn, desugar.compile(fn, backend="eager")))
    assert torch.equal(getattr(expected, "held", expected), getattr(got, "held", got)), fn
"""
    )
