"""Pickle, torch.save, deepcopy, state_dict, other processes, shared memory, modules and optimizers, export."""

import copy
import enum
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from subclasses import _torch, inner, static
from tests.subclasses.dispatch.training import saved
from tests.subclasses.subjects import (
    FACTORIES,
    Pair,
    assert_same,
    declare,
    inners_of,
    make_int8,
    make_pair,
)
from tests.tables import giving, raising

ROOT = Path(__file__).parents[2]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


Colored = declare(
    __module__=__name__,
    name="Colored",
    keywords={"fallback": "map"},
    held=inner(),
    color=static(default=Color.RED),
)
WAYS = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "pickle 2": lambda x: pickle.loads(pickle.dumps(x, protocol=2)),
    "save": lambda x: saved(x, weights_only=False),
    "save, weights only": lambda x: saved(x, weights_only=True),
    "save, mapped": lambda x: saved(x, weights_only=True, map_location="cpu"),
    "deepcopy": copy.deepcopy,
}

# ---- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FACTORIES)
def test_a_value_comes_back(kind, way):
    x = FACTORIES[kind]()
    y = WAYS[way](x)
    assert_same(x, y)
    mine, theirs = inners_of(x), inners_of(y)
    assert not {t.data_ptr() for t in mine.values()} & {t.data_ptr() for t in theirs.values()}


def noted():
    x = make_pair().requires_grad_()
    x.note = {"any": ["thing"]}
    return x


def marked():
    x = make_pair()
    _torch.mark_dim_dynamic(x, 1)
    _torch.mark_dim_dynamic(x.a, 0)
    return x


def made_in_inference_mode():
    with torch.inference_mode():
        return make_pair()


# A value, and facts of it that come back.
FACTS = {
    "flags and attributes": (noted, lambda y: (y.requires_grad, y.is_leaf, y.note)),
    "a Parameter": (
        lambda: nn.Parameter(make_pair()),
        lambda y: (isinstance(y, nn.Parameter), type(y), y.requires_grad),
    ),
    "what is marked dynamic": (
        marked,
        lambda y: [_torch.dims_marked_dynamic(t) for t in (y, y.a, y.b)],
    ),
    "an enum as metadata": (lambda: Colored(torch.ones(2), color=Color.BLUE), lambda y: y.color),
    "a value made in inference mode": (made_in_inference_mode, type),
    "a view": (lambda: make_pair(4, 6)[1:, ::2], type),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", FACTS)
def test_facts_of_a_value_come_back(case, way):
    make, facts = FACTS[case]
    x = make()
    y = WAYS[way](x)
    assert_same(y, x)
    assert facts(y) == facts(x)


def test_facts_are_those_that_were_set():
    assert [FACTS[case][1](FACTS[case][0]()) for case in list(FACTS)[:4]] == [
        (True, True, {"any": ["thing"]}),
        (True, Pair, True),
        [[1], [0], []],
        Color.BLUE,
    ]


@pytest.mark.parametrize("way", [w for w in WAYS if not w.startswith("pickle")])  # pickle copies storages
def test_what_shares_memory_still_does(way):
    t = torch.arange(6.0)
    x, y = WAYS[way]([Pair(t, t[2:]), t])
    x.a.zero_()
    assert not x.b.any() and not y.any()


def test_copies_of_values():
    x = make_pair().requires_grad_()
    x.sum().backward()
    y, z = copy.deepcopy([x, x])
    assert y is z is not x
    assert_same(y.grad, x.grad)
    assert y.grad is not x.grad
    y = copy.copy(x)
    assert y is not x and y.a is x.a
    with pytest.raises(RuntimeError, match=r"Only a leaf can be deep-copied.*copy x.detach"):
        copy.deepcopy(x * 2)


def test_a_field_with_a_default_may_be_added_later():
    func, (cls, inners, metadata, *rest) = Colored(torch.ones(2)).__reduce_ex__(2)[:2]
    assert metadata == {"color": Color.RED}
    assert func(cls, inners, {}, *rest).color is Color.RED


test_a_class_that_is_not_there_is_named = raising(
    [
        (
            lambda: pickle.dumps(declare(name="Local")(torch.ones(1))),
            (AttributeError, pickle.PicklingError),
            "Local",
        )
    ]
)


# ---- other processes ---------------------------------------------------------------------------------------


def _double_in_place(queue, answers):
    x = queue.get()
    x.mul_(2)
    answers.put(x.is_shared())
    queue.get()


def declare_again(monkeypatch):
    """A class of one and the same name, as a notebook's cell declares it at each run."""
    cls = declare(name="Again", __module__=__name__, keywords={"fallback": "map"})
    monkeypatch.setattr(sys.modules[__name__], "Again", cls, raising=False)
    return cls


@pytest.mark.parametrize("way", WAYS)
def test_a_class_declared_again_is_the_one_that_comes_back(monkeypatch, way):
    kept = []  # which of them torch would take from a set is chance, so there are some
    for _ in range(6):
        kept.append(declare_again(monkeypatch))
        assert type(WAYS[way](kept[-1](torch.ones(2)))) is kept[-1]


@pytest.mark.slow
def test_another_process_writes_to_the_same_memory():
    context = mp.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=_double_in_place, args=(queue, answers), daemon=True)
    process.start()
    x = make_pair()
    expected = x * 2
    queue.put(x)
    assert answers.get(timeout=120)
    assert_same(x, expected)
    queue.put(None)
    process.join(60)


@pytest.mark.slow
def test_a_file_is_read_by_another_process(tmp_path):
    torch.save({"w": make_int8(zero=True)}, tmp_path / "w.pt")
    code = (
        "import torch, tests.subclasses.subjects as s; "
        f"print(type(torch.load({str(tmp_path / 'w.pt')!r}, weights_only=True)['w']).__name__)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert out.stdout.strip() == "Int8Weight"


def test_shared_memory():
    x, module = make_pair(), Holder()
    assert not x.is_shared() and x.share_memory_() is x
    module.share_memory()
    assert x.is_shared() and x.a.is_shared() and x.b.is_shared() and module.w.is_shared()


# ---- modules -----------------------------------------------------------------------------------------------


class Holder(nn.Module):
    def __init__(self, kind="pair", requires_grad=False):
        super().__init__()
        self.w = nn.Parameter(FACTORIES[kind](), requires_grad=requires_grad)
        self.register_buffer("b", FACTORIES[kind]())

    def forward(self, x):
        return self.w * 2 + x


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("kind", FACTORIES)
def test_state_dict(kind, assign):
    one, two = Holder(kind), Holder(kind)
    before = two.w
    state = saved(one.state_dict(), weights_only=True)
    two.load_state_dict(state, assign=assign)
    assert_same(two.w, one.w)
    assert_same(two.b, one.b)
    assert (two.w is before) != assign
    if assign:
        mine, given = inners_of(two.w), inners_of(state["w"])
        assert all(t.data_ptr() == given[name].data_ptr() for name, t in mine.items())


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_module_with_such_parameters(kind):
    module, cls = Holder(kind), type(FACTORIES[kind]())
    assert isinstance(module.w, nn.Parameter) and [n for n, _ in module.named_parameters()] == ["w"]
    assert_same(copy.deepcopy(module).w, module.w)
    assert module.double().w.dtype == torch.float64 and module.b.dtype == torch.float64
    assert module.to("meta").w.device.type == "meta" and type(module.w) is cls


@pytest.mark.sweep(5)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", ["pair", "tagged", "nested", "optional, absent", "rows"])
def test_export(kind, strict):
    module = Holder(kind)
    program = torch.export.export(module, (torch.ones(4),), strict=strict)
    assert_same(program.module()(torch.ones(4)), module(torch.ones(4)))


# ---- moves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FACTORIES)
def test_moves(kind):
    x = FACTORIES[kind]()
    assert x.cpu() is x and x.to("cpu") is x
    y = x.to("meta")
    assert y.device.type == "meta" and all(t.device.type == "meta" for t in inners_of(y).values())
    assert y.shape == x.shape and y._layout is x._layout


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FACTORIES)
def test_the_device_and_back(kind):
    x = FACTORIES[kind]()
    y = x.cuda()
    assert y.device.type == "cuda" and all(t.is_cuda for t in inners_of(y).values())
    assert_same(y.cpu(), x)
    pinned = x.pin_memory()
    assert pinned.is_pinned() and not x.is_pinned()
    assert_same(pinned.to("cuda", non_blocking=True).cpu(), x)


MIXED = declare(a=inner(), offsets=inner(device="any", dtype=torch.int64))

test_classes = giving(
    {
        "an inner tensor that may live elsewhere stays": (
            lambda: [t.device.type for t in MIXED(torch.ones(2), torch.arange(2)).to("meta").unwrap()],
            ["meta", "cpu"],
        ),
        "a local class is not kept alive by the list of what may be loaded": (
            lambda: [cls in torch.serialization.get_safe_globals() for cls in (declare(), Pair)],
            [False, True],
        ),
    }
)


@pytest.mark.parametrize("kind", FACTORIES)
def test_parameters_that_are_swapped(kind, monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    module = Holder(kind)
    w = module.w
    module.to(torch.bfloat16)
    assert module.w is w and w.dtype == torch.bfloat16
    other = Holder(kind).to(torch.bfloat16)
    other.load_state_dict(module.state_dict())
    assert_same(other.w, w)
