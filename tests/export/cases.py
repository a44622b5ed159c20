"""The exported functions over tensor subclasses, the calls that are traced, and the calls that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from subclasses import TensorSubclass, inner, static
from subclasses.int8 import (
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    quantize_,
)
from subclasses.keyed import EmbeddingBagCollection, KeyedJaggedTensor
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.modules import Held


@dataclass(frozen=True)
class Case:
    """A function, and calls of it.

    Attributes:
        make: makes the module.
        traced: makes the arguments that are exported.
        later: makes the arguments of another call.
        dynamic: ``dynamic_shapes=``; None selects the dimensions that the classes mark.
    """

    make: Callable[[], nn.Module]
    traced: Callable[[], tuple[Any, ...]]
    later: Callable[[], tuple[Any, ...]]
    dynamic: Any = None


# ---- modules -----------------------------------------------------------------------------------------------


class Pair(TensorSubclass, fallback="map"):
    first: Tensor = inner()
    second: Tensor = inner()
    tag: str = static(default="")


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Any) -> Any:
        return self.fn(x)


class Layers(nn.Module):
    """Layers between two functions, of the arguments and of the result."""

    def __init__(self, before: Callable[..., Any], after: Callable[[Any], Any]) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Any, y: Any = None) -> Any:
        return self.after(self.layers(self.before(x, y)))


class Attention(Held):
    """Rows that attend to themselves, summed."""

    def forward(self, x: Any) -> Any:
        q, k, v = self.project(x).chunk(3, -1)
        heads = [t.unflatten(-1, (2, 2)).transpose(1, 2) for t in (q, k, v)]
        return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2).sum(1)


def bags() -> nn.Module:
    """Embeddings of two features, summed by row."""
    tables = {key: nn.EmbeddingBag(10, 4, mode="sum") for key in ("user", "item", "other")}
    return nn.Sequential(EmbeddingBagCollection(tables))


class Constant(Held):
    """A weight that is an attribute, and not a Parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def attention() -> Attention:
    return Attention(project=nn.Linear(4, 12))


def first(x: Any, y: Any = None) -> Any:
    return x


def total(x: Any) -> Any:
    return x.sum(1)


def jagged(values: Tensor, lengths: Tensor) -> JaggedTensor:
    return JaggedTensor.from_lengths(values, lengths, max_length=values.shape[0])


def padded(table: Tensor, lengths: Tensor) -> PaddedTensor:
    return PaddedTensor(table, lengths)


def quantized(config: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        quantize_(module, config)
        return module

    return make


def quantized_layers() -> nn.Module:
    module = Layers(first, total)
    quantize_(module, Int8WeightOnlyConfig())
    return module


# ---- arguments ---------------------------------------------------------------------------------------------


def batch(n: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(n, 4),)


def rows(*lengths: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (JaggedTensor.from_tensors([torch.randn(n, 4) for n in lengths]),)


def merged(*lengths: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (JaggedTensor.from_tensors([torch.randn(n, 4) for n in lengths]).flatten(0, 1),)


def table(*lengths: int, width: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (PaddedTensor(torch.randn(len(lengths), width, 4), torch.tensor(lengths)),)


def parts(*lengths: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(sum(lengths), 4), torch.tensor(lengths))


def table_parts(*lengths: int, width: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(len(lengths), width, 4), torch.tensor(lengths))


def features(*lengths: int, keys: tuple[str, ...] = ("user", "item")) -> Callable[[], tuple[Any, ...]]:
    return lambda: (KeyedJaggedTensor(keys, torch.randint(10, (sum(lengths),)), torch.tensor(lengths)),)


def weight() -> tuple[Any, ...]:
    return (Int8Tensor.from_float(torch.randn(3, 4)),)


def pair(tag: str) -> Callable[[], tuple[Any, ...]]:
    return lambda: (Pair(torch.randn(3), torch.randn(3), tag=tag),)


# ---- the rows of the tables --------------------------------------------------------------------------------

BATCH = ({0: Dim("batch")},)
WEIGHTS, ACTIVATIONS = Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()
PARTS = {"x": {0: Dim("total")}, "y": {0: Dim("rows")}}
TABLE = {"x": {0: Dim("rows"), 1: Dim("width")}, "y": {0: Dim("rows")}}

PLAIN = {
    "`Int8Tensor` weights": Case(quantized(WEIGHTS), batch(4), batch(4)),
    "`Int8Tensor` weights, another batch": Case(quantized(WEIGHTS), batch(4), batch(7), BATCH),
    "`Int8Tensor` weights and activations, another batch": Case(
        quantized(ACTIVATIONS), batch(4), batch(7), BATCH
    ),
    "`Int8Tensor` attribute that is not a Parameter": Case(
        lambda: Constant(weight=Int8Tensor.from_float(torch.randn(3, 4))), batch(4), batch(7), BATCH
    ),
    "`Int8Tensor` made inside": Case(
        lambda: Function(lambda x: F.linear(x, Int8Tensor.from_float(x.new_ones(3, 4)))),
        batch(4),
        batch(7),
        BATCH,
    ),
    "`JaggedTensor` made inside": Case(
        lambda: Layers(jagged, total), parts(3, 1, 4), parts(2, 5, 0, 6), PARTS
    ),
    "`JaggedTensor` made inside, one row": Case(
        lambda: Layers(jagged, total), parts(3, 1, 4), parts(5), PARTS
    ),
    "`JaggedTensor` made inside, its values returned": Case(
        lambda: Layers(jagged, lambda y: y.softmax(-1).values), parts(3, 1, 4), parts(2, 5), PARTS
    ),
    "`PaddedTensor` made inside": Case(
        lambda: Layers(padded, total), table_parts(3, 1, 4, width=5), table_parts(2, 6, width=7), TABLE
    ),
    "`JaggedTensor` result": Case(lambda: Layers(jagged, first), parts(3, 1, 4), parts(2, 5, 0, 6), PARTS),
    "`JaggedTensor` argument": Case(lambda: Layers(first, total), rows(3, 1, 4), rows(2, 5, 0, 6)),
    "`PaddedTensor` argument": Case(
        lambda: Layers(first, total), table(3, 1, 4, width=4), table(2, 0, 3, width=4)
    ),
    "`Int8Tensor` argument": Case(lambda: Function(lambda w: F.linear(torch.ones(2, 4), w)), weight, weight),
}
FLATTENED = {
    "`JaggedTensor`, other lengths": Case(lambda: Layers(first, total), rows(3, 1, 4), rows(2, 5, 0, 6)),
    "`JaggedTensor`, one row": Case(lambda: Layers(first, total), rows(3, 1, 4), rows(5)),
    "`JaggedTensor`, only empty rows": Case(lambda: Layers(first, total), rows(3, 1, 4), rows(0, 0)),
    "`JaggedTensor` and its result": Case(lambda: Layers(first, first), rows(3, 1, 4), rows(2, 5, 0, 6)),
    "`JaggedTensor`, softmax over rows": Case(
        lambda: Layers(first, lambda y: y.softmax(1)), rows(3, 1, 4), rows(2, 5, 0, 6)
    ),
    "`JaggedTensor`, mean and max of rows": Case(
        lambda: Layers(first, lambda y: (y.mean(1), y.amax(1))), rows(3, 1, 4), rows(2, 5, 1, 6)
    ),
    "`JaggedTensor`, attention": Case(attention, rows(3, 1, 4), rows(2, 5, 1, 6)),
    "`JaggedTensor` to `PaddedTensor`": Case(
        lambda: Layers(first, lambda y: y.to_padded()), rows(3, 1, 4), rows(2, 5, 0, 6)
    ),
    "`JaggedTensor`, `Int8Tensor` weights": Case(quantized_layers, rows(3, 1, 4), rows(2, 5, 0, 6)),
    "`PaddedTensor`, other lengths in one width": Case(
        lambda: Layers(first, total), table(3, 1, 4, width=4), table(2, 0, 3, width=4)
    ),
    "`PaddedTensor` and its result": Case(
        lambda: Layers(first, first), table(3, 1, 4, width=4), table(2, 0, 3, width=4)
    ),
    "`PaddedTensor`, another width and batch": Case(
        lambda: Layers(first, total),
        table(3, 1, 4, width=4),
        table(2, 6, width=7),
        {"args": ([TABLE["x"], TABLE["y"]],)},
    ),
    "`PaddedTensor`, attention": Case(attention, table(3, 1, 4, width=4), table(2, 1, 3, width=4)),
    "`Int8Tensor`": Case(lambda: Function(lambda w: F.linear(torch.ones(2, 4), w)), weight, weight),
    "`Int8Tensor` result": Case(lambda: Function(Int8Tensor.from_float), batch(4), batch(7), {"args": BATCH}),
    "`KeyedJaggedTensor`, embedding bags": Case(bags, features(1, 2, 3, 0), features(2, 0, 5, 1, 3, 4)),
    'class with `fallback="map"`': Case(lambda: Function(lambda p: p * 2 + 1), pair("a"), pair("a")),
}
MISFITS = {
    "`Int8Tensor` weights, another batch than the exported one": Case(quantized(WEIGHTS), batch(4), batch(5)),
    "`JaggedTensor` of another layout": Case(
        lambda: Layers(first, lambda y: y * 2), rows(3, 1, 4), merged(2, 5)
    ),
    "`PaddedTensor` of another width than the exported one": Case(
        lambda: Layers(first, total), table(3, 1, 4, width=4), table(2, 0, 3, width=5)
    ),
    "`KeyedJaggedTensor` of other keys": Case(
        bags, features(1, 2, 3, 0), features(1, 2, 3, 0, keys=("user", "other"))
    ),
    "class with other metadata": Case(lambda: Function(lambda p: p * 2 + 1), pair("a"), pair("b")),
}
UNFLATTENED = "the function itself"
WHOLE, MISFIT = "`Flattened(fn)`", "`Flattened(fn)`, a call that does not fit"
SECTIONS = {UNFLATTENED: PLAIN, WHOLE: FLATTENED, MISFIT: MISFITS}
CASES = {f"{section}: {name}": case for section, cases in SECTIONS.items() for name, case in cases.items()}
