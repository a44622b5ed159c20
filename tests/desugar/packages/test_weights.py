"""Weights of packages: whose they are, and which changes of them a call notices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import desugar
from desugar import PackageError, SignatureError, call
from subclasses.int8 import Int8Tensor
from tests.desugar.packages.test_inference import Block, check, int8_block, of
from tests.modules import Held


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()))
        self.tied = self.norm.weight

    def forward(self, x):
        self.calls.add_(1)
        return self.norm(x) * self.tied + self.calls


class Two(Held):
    def forward(self, x):
        return self.L(x)

    def generate(self, x):
        return self.G(x)


class Tied(nn.Module):
    """An embedding that shares its weight with the last layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index):
        return self.head(self.embedding(index))


# --------------------------------------------------------------------------------------------------- names, owners


@pytest.mark.parametrize(
    ("method", "names"),
    [("forward", ["L.bias", "L.weight"]), ("generate", ["G.bias", "G.weight"])],
)
def test_a_package_has_the_weights_that_a_method_reads(pack, method, names):
    model = Two(L=nn.Linear(3, 3), G=nn.Linear(3, 3))
    package = pack(getattr(model, method), of(2, 3), weights=False, state=model)
    check(package, getattr(model, method), torch.randn(2, 3))
    assert sorted(package.state) == names


def test_a_weight_keeps_its_class(pack):
    weight = pack(int8_block(), of(4, 32)).state["first.weight"]
    assert isinstance(weight, Int8Tensor) and isinstance(weight, nn.Parameter)


def test_buffers_change_with_each_call(pack):
    model = Counter()
    package = pack(model, of(4, 3), dynamic=True)
    assert model.calls == 0  # saving runs nothing
    for n in (4, 6, 3):
        check(package, model, torch.randn(n, 3))
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(package.state[name], buffer)


def test_weights_shared_with_a_module(pack):
    model, x = Counter(), torch.randn(4, 3)
    package = pack(model, of(4, 3), weights=False, state=model)
    with torch.no_grad():
        package(x)
        model.norm.weight.mul_(2)
        package(x)
    assert model.calls == 2 and package.state["tied"] is model.norm.weight
    model.eval()
    with pytest.raises(SignatureError, match="weight tied: expected a call under"):
        package(x)


def test_weights_that_are_given(pack):
    model, other = Block(), Block()
    desugar.save(pack.path, model, of(4, 8), weights=False, native=False)
    rest = {name: tensor for name, tensor in other.state_dict().items() if name != "first.weight"}
    for state, said in (
        (None, "has no weights: it was saved with weights=False"),
        (rest, r"state lacks 1 of the 6 weights: first\.weight"),
        (Block(9), r"weight first.weight.size\(1\): expected 8, got 9"),
    ):
        with pytest.raises(PackageError, match=said):
            desugar.load(pack.path, state=state, native=False)
    check(desugar.load(pack.path, state=other.state_dict(), native=False), other, torch.randn(4, 8))


@pytest.mark.parametrize("held", [False, True])
def test_tied_weights_that_are_given(pack, held):
    model, other, untied = Tied(), Tied(), Tied()
    fn = (lambda index: model(index) + 1) if held else model
    index, prefix = torch.tensor([1, 6]), "model." if held else ""

    def load(state):
        return desugar.load(pack.path, state=state, native=False)

    assert list(pack(fn, call(index)).state) == [f"{prefix}embedding.weight"]
    desugar.save(pack.path, fn, call(index), weights=False, native=False)
    tensors = {f"{prefix}{name}": tensor for name, tensor in other.state_dict().items()}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    last = {f"{prefix}head.weight": other.head.weight}  # as files that keep one of them do
    for state in ({"model": other} if held else other, tensors, copies, last):
        check(load(state), lambda index: other(index) + (1 if held else 0), index)
    untied.head.weight = nn.Parameter(torch.randn(7, 4))
    with pytest.raises(PackageError, match=r"embedding\.weight and .*head\.weight were one weight when"):
        load({"model": untied} if held else untied)


def test_a_function_that_holds_a_module(pack):
    model, table = Block(), torch.randn(8)

    def fn(x):
        return model(x) + table

    package = pack(fn, of(4, 8))
    assert sorted(package.state) == sorted(["table", *(f"model.{n}" for n, _ in model.named_parameters())])
    for one in (package, desugar.load(pack.path, state={"model": model, "table": table}, native=False)):
        check(one, fn, torch.randn(4, 8))


# --------------------------------------------------------------------------------------------------------- changes


def assign(weight):
    """Returns a change that assigns the data of the weight of a layer."""
    return lambda model: setattr(model.weight, "data", weight())


CHANGES = {
    "double": (nn.Module.double, "weight weight: expected a tensor of torch"),
    "half": (nn.Module.half, "weight weight: expected a tensor of torch"),
    "strides": (
        assign(lambda: torch.randn(2, 6)[:, ::2]),
        r"weight weight.stride\(0\): expected 3, got 6",
    ),
    "fewer rows": (assign(lambda: torch.randn(1, 3)), r"weight weight.size\(0\): expected 2, got 1"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_their_dtype_or_memory(pack, change):
    model, x = nn.Linear(3, 2).requires_grad_(False), torch.randn(4, 3)
    package = pack(model, of(4, 3), weights=False, state=model)
    before = {parameter: parameter.data for parameter in model.parameters()}
    make, said = CHANGES[change]
    make(model)
    with pytest.raises(SignatureError, match=said):
        package(x)
    for parameter, data in before.items():
        parameter.data = data
    check(package, model, x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_in_other_modes(pack, mode):
    model = nn.Linear(3, 2)
    package = pack(model, of(4, 3))
    for _ in range(3):
        with mode():
            check(package, model, torch.randn(4, 3))
        check(package, model, torch.randn(4, 3))


@pytest.mark.parametrize("reach", [lambda p: p.state["weight"], lambda p: next(p.parameters())])
def test_weights_are_checked_from_when_the_package_hands_them_out(pack, reach):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    package = pack(model, call(x))
    check(package, model, x)
    assert not package._weights.handed_out and "not handed_out or same_weights" in package.source
    reach(package).data = torch.randn(1, 3)
    with pytest.raises(SignatureError, match=r"weight weight.size\(0\): expected 2, got 1"):
        package(x)


@pytest.mark.parametrize("give", ["view", "state", "training", "buffer"])
def test_weights_that_others_can_reach_are_checked_from_the_start(give, pack):
    class Giving(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if give == "buffer":
                self.total.add_(y.sum())
            return (y, self.weight[:1] if give == "view" else y)

    model = Giving(3, 2).requires_grad_(give == "training")
    model.register_buffer("total", torch.zeros(()))
    package = pack(model, of(4, 3), training=give == "training")
    if give == "state":
        package = desugar.load(pack.path, state=model, native=False)
    assert package._weights.handed_out


def test_weights_that_are_unfrozen(pack):
    model, x = nn.Linear(3, 2).requires_grad_(False), torch.randn(4, 3)
    package = pack(model, of(4, 3))
    package.state["weight"].requires_grad_()
    with torch.no_grad():
        package(x)
    with pytest.raises(SignatureError, match="saved for inference"):
        package(x)
    model.bias.requires_grad_()
    training = pack(model, of(4, 3), training=True)
    training.state["weight"].requires_grad_()
    with pytest.raises(SignatureError, match="a weight that does not require grad"):
        training(x)
    with pytest.raises(PackageError, match="weight weight requires grad, and did not"):
        desugar.load(pack.path, state=nn.Linear(3, 2), native=False)
