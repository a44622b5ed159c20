import functools

import pytest
import torch
from torch import nn

from bench.prediction import _torch as private, _torch_patches as patches
from bench.prediction.devices import DEVICES
from bench.prediction.fake import check_installation, fake_device, move
from desugar.backends.inductor_patches import recorded
from subclasses.ragged import JaggedTensor
from tests.bench.prediction.needs import cuda_build


def test_without_the_cuda_build_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(private, "missing_parts", lambda: ["a CUDA build of PyTorch"])
    with pytest.raises(RuntimeError, match=r"comes without a CUDA build.*pip install torch==") as caught:
        check_installation(DEVICES["h100"])
    assert "\n" not in str(caught.value)


@cuda_build
def test_the_patches_fit_this_release():
    assert patches.patches_that_do_not_fit() == [], (
        "name the new places in bench/prediction/_torch_patches.py"
    )
    for name in private.NAMES:
        getattr(private, name)


@cuda_build
def test_a_release_that_the_patches_do_not_fit_is_named(monkeypatch):
    monkeypatch.setitem(patches.DESCRIPTION, "torch.cuda:no_such_function", "nothing")
    with pytest.raises(RuntimeError, match=r"lacks torch\.cuda:no_such_function"), fake_device("h100"):
        pass


@cuda_build
@pytest.mark.parametrize("name", DEVICES)
def test_inside_there_is_a_device_and_outside_there_is_none(name):
    with recorded():  # a patch for good, of the programs that are stored
        before = {place: getattr(*patches.owner_of(place)) for place in patches.DESCRIPTION}
    with fake_device(name) as fake:
        assert torch.cuda.is_available() and torch.cuda.get_device_name() == DEVICES[name].title
        assert torch.cuda.get_device_capability() == DEVICES[name].capability
        with fake.mode:
            x = torch.randn(3, 4, device="cuda")
            assert (x @ x.t()).device == torch.device("cuda", 0)
    after = {place: getattr(*patches.owner_of(place)) for place in patches.DESCRIPTION}
    assert before == after and not torch.cuda.is_available()


@cuda_build
def test_everything_is_put_back_after_an_error():
    class Mine(Exception):
        pass

    with pytest.raises(Mine), fake_device("a100"):
        raise Mine
    assert not torch.cuda.is_available()


# ---- moving -------------------------------------------------------------------------------------------------

model = nn.Linear(4, 4)


def by_global(x):
    return model(x)


def through_another(x):
    return by_global(x) + 1


def by_closure():
    weight = torch.randn(4)
    return lambda x: x * weight


class Holder:
    def __init__(self):
        self.weight = torch.randn(4)


@cuda_build
@pytest.mark.parametrize(
    "fn",
    [
        by_global,
        through_another,
        by_closure(),
        functools.partial(torch.add, other=torch.ones(4)),
        model,
        model.forward,
    ],
    ids=lambda fn: getattr(fn, "__qualname__", type(fn).__name__),
)
def test_tensors_of_a_function_move_with_it(fn):
    with fake_device("h100") as fake:
        moved, (x,), _ = move(fake, fn, (torch.randn(2, 4),), {})
        with fake.mode:
            assert moved(x).device.type == "cuda"
    assert fn(torch.randn(2, 4)).device.type == "cpu", "the original was changed"


@cuda_build
def test_arguments_move_with_their_kinds():
    tied = nn.Parameter(torch.randn(4, 4))
    rows = JaggedTensor.from_tensors([torch.randn(n, 3) for n in (2, 5)])
    with fake_device("h100") as fake:
        _, (nested, other), kwargs = move(
            fake, len, ({"a": [tied, 3]}, tied), {"x": rows, "y": torch.randn(6, 4).t()}
        )
    assert nested["a"][0] is other and isinstance(other, nn.Parameter) and other.requires_grad
    assert nested["a"][1] == 3
    assert (
        isinstance(kwargs["x"], JaggedTensor)
        and kwargs["x"].offsets.is_cuda
        and kwargs["x"].shape == rows.shape
    )
    assert kwargs["y"].stride() == (1, 4)


@cuda_build
def test_a_module_that_is_used_twice_is_moved_once():
    both = nn.ModuleList([model, model])
    with fake_device("h100") as fake:
        moved, (again,), _ = move(fake, both, (model.weight,), {})
    assert moved[0] is moved[1] and moved[0].weight is again
    assert model.weight.device.type == "cpu"
