"""What reviewers found silently wrong: each is an error, or right, now."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import desugar
from desugar import PackageError, SignatureError
from desugar.packages.loading import recompile
from tests.desugar.packages.test_inference import check, rows


def test_weights_that_change_their_dtype_or_memory(pack):
    model = nn.Linear(3, 2).requires_grad_(False)
    package = pack(model, desugar.call(torch.randn(4, 3)), weights=False, state=model)
    x = torch.randn(4, 3)
    for change in (nn.Module.double, nn.Module.half):
        change(model)
        with pytest.raises(SignatureError, match="weight weight: expected a tensor of torch"):
            package(x)
        model.float()
    check(package, model, x)
    model.weight.data = torch.randn(2, 6)[:, ::2]
    with pytest.raises(SignatureError, match=r"weight weight.stride\(0\): expected 3, got 6"):
        package(x)
    model.weight.data = torch.randn(1, 3)
    with pytest.raises(SignatureError, match=r"weight weight.size\(0\): expected 2, got 1"):
        package(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_in_other_modes(pack, mode):
    model = nn.Linear(3, 2)
    package = pack(model, desugar.call(torch.randn(4, 3)))
    for _ in range(3):
        with mode():
            check(package, model, torch.randn(4, 3))
        check(package, model, torch.randn(4, 3))


def _handed_out(package):
    return package._weights.handed_out


def test_weights_are_checked_from_when_the_package_hands_them_out(pack):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    package = pack(model, desugar.call(x))
    check(package, model, x)
    assert not _handed_out(package) and "not handed_out or same_weights" in package.source
    package.state["weight"].data = torch.randn(1, 3)
    with pytest.raises(SignatureError, match=r"weight weight.size\(0\): expected 2, got 1"):
        package(x)
    other = pack(model, desugar.call(x))
    next(other.parameters()).data = torch.randn(1, 3)
    with pytest.raises(SignatureError, match=r"expected 2, got 1"):
        other(x)


@pytest.mark.parametrize("give", ["view", "state", "training", "buffer"])
def test_weights_that_others_can_reach_are_checked_from_the_start(give, pack):
    class Giving(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if give == "buffer":
                self.total.add_(y.sum())
            return (y, self.weight[:1] if give == "view" else y)

    model, x = Giving(3, 2).requires_grad_(give == "training"), torch.randn(4, 3)
    model.register_buffer("total", torch.zeros(()))
    package = pack(model, desugar.call(x), training=give == "training")
    if give == "state":
        package = desugar.load(pack.path, state=model, native=False)
    assert _handed_out(package)


def test_weights_that_are_unfrozen(pack):
    model = nn.Linear(3, 2).requires_grad_(False)
    package = pack(model, desugar.call(torch.randn(4, 3)))
    package.state["weight"].requires_grad_()
    with pytest.raises(SignatureError, match="saved for inference"):
        package(torch.randn(4, 3))
    with torch.no_grad():
        package(torch.randn(4, 3))
    with pytest.raises(SignatureError, match="saved for inference"):
        package(torch.randn(4, 3))
    model.bias.requires_grad_()
    training = pack(model, desugar.call(torch.randn(4, 3)), training=True)
    training.state["weight"].requires_grad_()
    with pytest.raises(SignatureError, match="a weight that does not require grad"):
        training(torch.randn(4, 3))
    with pytest.raises(PackageError, match="weight weight requires grad, and did not"):
        desugar.load(pack.path, state=nn.Linear(3, 2), native=False)


def test_a_file_that_is_replaced(tmp_path, monkeypatch):
    from desugar.packages.archive import Archive

    monkeypatch.setattr(recompile, "BACKEND", "eager")
    place = tmp_path / "a.pt2"
    desugar.save(place, lambda x: x.sin(), desugar.call(torch.ones(2)), native=False)
    archive = Archive(place)
    desugar.save(place, lambda x: x.exp() + 1, desugar.call(torch.ones(2)), native=False)
    with pytest.raises(PackageError, match="was replaced since it was loaded"):
        archive.check_library("forward0")


def test_an_int_of_a_wrapper(pack):
    package = pack(lambda x: x.values * x.max_length, desugar.call(rows(2, 3)))
    check(package, lambda x: x.values * x.max_length, rows(3, 1, 2))
    with pytest.raises(SignatureError, match=r"x.max_length: expected 3, got 7"):
        package(rows(7, 1))


def test_attributes_of_arguments(pack):
    x = torch.ones(2)
    for value in (1, torch.ones(2)):
        x.more = value
        with pytest.raises(PackageError, match=r"x\.more|\.more of an argument"):
            pack(lambda x: x + x.more, desugar.call(x))


def test_one_object_in_two_places(pack):
    weight = torch.ones(3)
    with pytest.raises(PackageError, match="x is also a weight"):
        pack(lambda x: x * 10 + weight, desugar.call(weight))
    x = rows(2, 3)
    with pytest.raises(PackageError, match="an inner tensor of another argument"):
        pack(lambda x, v: x.values * 10 + v, desugar.call(x, x.values))
    package = pack(lambda x, y: x * 2 if x is y else x * 3, desugar.call(torch.ones(2), torch.ones(2)))
    one = torch.ones(2)
    with pytest.raises(SignatureError, match="y: expected another object than x"):
        package(one, one)


def test_numbers_of_python(pack):
    with pytest.raises(PackageError, match="draws random numbers in Python"):
        pack(lambda x: x + random.randint(0, 10**6), desugar.call(torch.zeros(1)))
    package = pack(lambda x, s: x / torch.full_like(x, s), desugar.call(torch.ones(1), 0.0))
    with pytest.raises(SignatureError, match=r"s: expected 0.0, .* got -0.0"):
        package(torch.ones(1), -0.0)
    nan = pack(lambda x, s=float("nan"): x * s, desugar.call(torch.ones(3)))
    assert nan(torch.ones(3)).isnan().all()
    with pytest.raises(PackageError, match="holds a number that is computed"):
        pack(lambda x, n: (x * 2, n / 2), desugar.call(torch.ones(3), 5), dynamic=True)


def test_weights_that_share_memory(pack):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            whole = torch.zeros(4)
            self.register_buffer("whole", whole)
            self.register_buffer("part", whole[:2])

        def forward(self, x):
            return x + self.whole.sum() + self.part.sum()

    with pytest.raises(PackageError, match="share memory, and would be two in a file"):
        pack(Views(), desugar.call(torch.ones(2)))


def test_gradients_of_two_of_three_results(pack):
    def fn(x, y, z):
        return x * y, x + 1, z * 2

    def make():
        return [torch.randn(3, requires_grad=True) for _ in range(3)]

    package = pack(fn, desugar.call(*make()), training=True)
    given = make()
    first, second, _ = package(*given)
    (first.sum() + second.sum()).backward()
    torch.testing.assert_close(given[0].grad, given[1].detach() + 1)
    torch.testing.assert_close(given[1].grad, given[0].detach())
    assert given[2].grad is None


def test_functions_of_decorators_and_of_torch(pack):
    @torch.no_grad()
    def decorated(x):
        return x * 2

    check(pack(decorated, desugar.call(torch.ones(3))), decorated, torch.randn(3))
    check(pack(nn.functional.relu, desugar.call(torch.ones(3))), nn.functional.relu, torch.randn(3))
    with pytest.raises(TypeError, match="wrap it in a function"):
        pack(torch.add, desugar.call(torch.ones(3), torch.ones(3)))


def test_a_method_of_a_module(pack):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.L, self.G = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.L(x)

        def generate(self, x):
            return self.G(x)

    model = Two()
    package = pack(model.generate, desugar.call(torch.randn(2, 3)), weights=False, state=model)
    with torch.no_grad():
        check(package, model.generate, torch.randn(2, 3))
    assert sorted(package.state) == ["G.bias", "G.weight"]


def test_keywords_in_another_order(pack):
    def fn(x, **more):
        return x * more["a"] + more["b"]

    package = pack(fn, desugar.call(torch.ones(1), a=1, b=2))
    check(package, fn, torch.ones(1), b=2, a=1)
    with pytest.raises(SignatureError, match="more: expected the keys"):
        package(torch.ones(1), a=1)


def test_a_package_is_not_copied(pack):
    import copy

    with pytest.raises(TypeError, match="load its file again"):
        copy.deepcopy(pack(lambda x: x * 2, desugar.call(torch.ones(3))))
