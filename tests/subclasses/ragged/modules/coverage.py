"""Writes into docs/jagged.md and docs/padded.md which modules of `torch.nn` run on rows.

python -m tests.subclasses.ragged.modules.coverage

A module counts if the result of every row equals the result of that row alone, with its gradients. This holds in eager
mode and through `desugar.compile`. A refused module is listed with the beginning of the message.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from docs.wrap import wrap
from subclasses import DispatchError
from tests.doors import DOORS
from tests.subclasses.ragged.modules.cases import CASES, DIM, Case, channels_first, judge

DOCS = Path(__file__).parents[4] / "docs"
BEGIN, END = "<!-- written by python -m tests.subclasses.ragged.modules.coverage -->", "<!-- end -->"
LAYOUTS = {"jagged": "jagged.md", "padded": "padded.md"}

POINTWISE = (
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity),
    *(nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid),
    *(nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink),
)
MORE = {
    **{cls.__name__: Case(cls) for cls in POINTWISE},
    **{cls.__name__: Case(lambda cls=cls: cls(-1)) for cls in (nn.Softmax, nn.LogSoftmax, nn.Softmin)},
    **{
        cls.__name__: Case(lambda cls=cls: cls().eval())
        for cls in (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
    },
    "Dropout1d": Case(lambda: nn.Dropout1d().eval(), channels_first),
    "Threshold": Case(lambda: nn.Threshold(0.1, 0.0)),
    "Unflatten": Case(lambda: nn.Unflatten(-1, (2, -1))),
    "CosineSimilarity": Case(lambda: nn.CosineSimilarity(-1), lambda m, x: m(x, x + 1)),
    "PairwiseDistance": Case(nn.PairwiseDistance, lambda m, x: m(x, x * 2)),
    "InstanceNorm1d": Case(lambda: nn.InstanceNorm1d(DIM), channels_first),
    "LocalResponseNorm": Case(lambda: nn.LocalResponseNorm(2), channels_first),
    "ConstantPad1d": Case(lambda: nn.ConstantPad1d(2, 1.0), channels_first),
    "ZeroPad1d": Case(lambda: nn.ZeroPad1d((1, 2)), channels_first),
    "ReflectionPad1d": Case(lambda: nn.ReflectionPad1d(1), channels_first),
    "ReplicationPad1d": Case(lambda: nn.ReplicationPad1d(1), channels_first),
    "CircularPad1d": Case(lambda: nn.CircularPad1d(1), channels_first),
    "Upsample": Case(lambda: nn.Upsample(scale_factor=2), channels_first),
    "Transformer": Case(
        lambda: nn.Transformer(DIM, 2, 1, 1, 16, dropout=0.0, batch_first=True), lambda m, x: m(x, x * 2)
    ),
    "FractionalMaxPool2d": Case(lambda: nn.FractionalMaxPool2d(2, output_size=2), channels_first),
}


def name_of(case: Case) -> str:
    """The class of the module."""
    return type(case.make()).__name__


def outcome(case: Case, layout: str) -> str:
    """Empty if the module is right in eager mode and compiled; else the message of the refusal, or the error."""
    for door in ("eager", "desugar"):
        torch.compiler.reset()
        try:
            judge(case, layout, DOORS[door])
        except DispatchError as error:
            return str(error).split("; ")[0].split("\n")[0]
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def outcomes(layout: str) -> dict[str, str]:
    """The outcome of each module, by the name of its class; of several cases of one class, the first wrong one."""
    found: dict[str, str] = {}
    for case in (*CASES.values(), *MORE.values()):
        name = name_of(case)
        found[name] = found.get(name) or outcome(case, layout)
    return found


def emit_section(found: dict[str, str]) -> str:
    """The text of a section."""
    right = sorted(name for name, said in found.items() if not said)
    lines = [BEGIN, "", f"Right, with gradients, in eager mode and compiled: {listed(right)}.", ""]
    lines += ["| refused | because |", "|---|---|"]
    lines += [f"| `nn.{name}` | {said.replace('|', '/')} |" for name, said in sorted(found.items()) if said]
    return wrap("\n".join([*lines, "", END])).rstrip("\n")


def listed(names: Iterable[str]) -> str:
    """Names of modules."""
    return ", ".join(f"`nn.{name}`" for name in names)


def replace_section(text: str, section: str) -> str:
    """A page with another section."""
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: section, text, flags=re.DOTALL)


def main() -> None:
    """Writes both pages."""
    warnings.simplefilter("ignore")
    for layout, page in LAYOUTS.items():
        path = DOCS / page
        path.write_text(replace_section(path.read_text(), emit_section(outcomes(layout))))


if __name__ == "__main__":
    main()
