"""``python -m tests.degrade [NAME]...``: removes one private name of PyTorch after the other, and tries the packages.

Each name is removed in a process of its own, in which a small program then imports the packages and uses them. The
outcome is one of these:

- right: the program computes the right results, with or without a warning.
- named: an error names the release of PyTorch.
- PyTorch: PyTorch's own code needs the name, and raises.
- kept: Python cannot remove the name.
- unclear: any other error, or a wrong result. The exit code is 1 then.

Without arguments the command tries all names.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
# The program runs in a process that has imported these, so that PyTorch's own imports find the name.
IMPORTED = (
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "torch.fx.experimental.proxy_tensor",
)


# ---- the names ---------------------------------------------------------------------------------------------


def private_names() -> list[str]:
    """Returns the private names that the modules ``_torch*`` of the two packages use, with dots."""
    paths = [path for package in ("subclasses", "desugar") for path in (ROOT / package).glob("_torch*.py")]
    found = {name for path in paths for name in _names_in(ast.parse(path.read_text()))}
    return sorted(name for name in found if name != "torch._C")


def _names_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute() if (name := ast.unparse(node)).startswith("torch.") and "(" not in name:
                if _is_private(name):
                    yield name
            case ast.ImportFrom(module=str(module)) if module.startswith("torch"):
                names = [f"{module}.{alias.name}" for alias in node.names]
                yield from (name for name in names if "._" in name)
            case ast.Assign(targets=[ast.Name("_LAZY")], value=ast.Dict() as table):
                owners = {key: value.partition(":") for key, value in ast.literal_eval(table).items()}
                names = [f"{owner}.{attribute or key}" for key, (owner, _, attribute) in owners.items()]
                yield from filter(_is_private, names)


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _owner_of(name: str) -> tuple[Any, str]:
    """Returns the object that has a name as an attribute, and the attribute."""
    first, *parts, attribute = name.split(".")
    owner: Any = importlib.import_module(first)
    for part in parts:
        if not hasattr(owner, part):
            importlib.import_module(f"{owner.__name__}.{part}")
        owner = getattr(owner, part)
    return owner, attribute


# ---- the program -------------------------------------------------------------------------------------------


def use_the_packages() -> None:
    """Uses a declared class, a module with int8 weights, a training step on ragged rows, and a plain function."""
    from torch import Tensor

    import desugar
    from subclasses import TensorSubclass, inner
    from subclasses.int8 import Int8WeightOnlyConfig, quantize_
    from subclasses.ragged import JaggedTensor

    class Pair(TensorSubclass, fallback="map"):
        a: Tensor = inner()
        b: Tensor = inner()

    close, x = torch.testing.assert_close, torch.arange(1.0, 5.0)
    squared = lambda p: (p * p + p).relu()  # noqa: E731
    for call in (squared, desugar.compile(squared, backend="eager")):
        for _ in range(2):
            p = Pair(x.clone(), x + 1).requires_grad_()
            out = call(p)
            out.unwrap("a").sum().backward()
            close((out.unwrap("b"), p.grad.unwrap("a")), ((x + 1) ** 2 + x + 1, 2 * x + 1))

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).requires_grad_(False)
    quantize_(model, Int8WeightOnlyConfig())
    rows = torch.randn(4, 64)
    close(desugar.compile(model, backend="eager")(rows), model(rows))

    layer = torch.nn.Linear(8, 8)

    def loss(tokens: Any) -> Tensor:
        heads = layer(tokens).unflatten(-1, (2, 4)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).sum(-1).values.sum()

    tokens, gradients = JaggedTensor.from_tensors([torch.randn(n, 8) for n in (3, 5)]), []
    for call in (loss, desugar.compile(loss, backend="eager")):
        layer.zero_grad()
        call(tokens).backward()
        gradients.append(layer.weight.grad)
    close(gradients[1], gradients[0])
    close(desugar.compile(lambda x: x.sin() * 2, backend="eager")(x), x.sin() * 2)


# ---- the outcomes ------------------------------------------------------------------------------------------


def outcome_without(name: str) -> str:
    """Returns the outcome of the program in a process of its own, without one name; "" removes none."""
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        with os.fdopen(reading) as file:
            found = file.read()
        os.waitpid(child, 0)
        return found or "unclear: the process ended"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    with os.fdopen(writing, "w") as file:
        file.write(_try_without(name))
    os._exit(0)


def _try_without(name: str) -> str:
    owner, attribute = _owner_of(name) if name else (None, "")
    if name and attribute not in vars(owner):
        return "kept: a class in C++ has it"
    if name:
        delattr(owner, attribute)
    try:
        use_the_packages()
    except BaseException as error:  # noqa: BLE001 - each error is an outcome
        return _describe(error)
    return "right"


def _describe(error: BaseException) -> str:
    if torch.__version__ in str(error):
        return "named"
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    last = traceback.extract_tb(cause.__traceback__)[-1]
    # An error that C++ code raises where this file calls it has no frame of its own.
    by_torch = last.filename == __file__ or Path(torch.__file__).parent in Path(last.filename).parents
    text = str(cause).strip().partition("\n")[0]
    where = "PyTorch" if by_torch and not isinstance(cause, AssertionError) else "unclear"
    return f"{where}: {type(cause).__name__}: {text:.120} ({Path(last.filename).name}:{last.lineno})"


def main(names: list[str]) -> int:
    """Prints the outcome of each name; returns the exit code."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for module in IMPORTED:
        importlib.import_module(module)
    if (without_any := outcome_without("")) != "right":
        print(f"the program fails with all names: {without_any}")
        return 1
    outcomes = {}
    for name in names or private_names():
        outcomes[name] = outcome_without(name)
        print(f"{name:<72} {outcomes[name]}", flush=True)
    return int(any(outcome.startswith("unclear") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
