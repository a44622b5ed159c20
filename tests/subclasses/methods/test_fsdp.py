"""FSDP2's hooks in one process, called by the test and by FSDP2 itself; gradients of sharded values."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor

from subclasses import DispatchError, Outer, TensorSubclass, inner
from subclasses.dispatch.sharding import rows_of
from subclasses.methods.sharded_gradients import pack, unpack
from tests.subclasses.subjects import (
    FACTORIES,
    LowRank,
    Pair,
    Scaled,
    assert_same,
    declare,
    make_int8,
    make_pair,
)
from tests.tables import giving

aten = torch.ops.aten

POLICY = SimpleNamespace(param_dtype=None, reduce_dtype=None)


def gather(shards, outer_size, policy=POLICY, out=None):
    """Gathers as FSDP does: calls the hook of each rank, joins the results, and passes the whole to one rank."""
    asked = [s.fsdp_pre_all_gather(None, outer_size, None, None, policy) for s in shards]
    outputs = tuple(torch.cat(parts) for parts in zip(*(inputs for inputs, _ in asked), strict=True))
    dtype = policy.param_dtype or shards[0].dtype
    return shards[0].fsdp_post_all_gather(outputs, asked[0][1], dtype, out=out), outputs


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_are_put_together(ranks):
    x = make_pair(8, 3)
    (whole, inner_tensors), outputs = gather(x.chunk(ranks), x.shape)
    assert_same(whole, x)
    assert len(inner_tensors) == 2 and all(a is b for a, b in zip(inner_tensors, outputs, strict=True))


@pytest.mark.parametrize(
    ("x", "rows", "count"),
    [
        (make_int8(size=(4, 3)), lambda x, i: (x.qdata[i : i + 2], x.scale[i : i + 2]), 2),
        (Scaled(torch.randn(4, 3), torch.tensor(2.0)), lambda x, i: (x.data_[i : i + 2], x.factor), 1),
    ],
)
def test_a_scale_of_each_row_is_gathered_and_one_of_the_whole_stays(x, rows, count):
    (whole, inner_tensors), _ = gather([type(x)(*rows(x, i)) for i in (0, 2)], x.shape)
    assert_same(whole, x)
    assert len(inner_tensors) == count


@pytest.mark.parametrize("kind", [k for k in FACTORIES if not k.startswith("nested") and k != "rows"])
def test_every_kind_of_class(kind):
    x = FACTORIES[kind]()
    (whole, _), _ = gather([x], x.shape)
    assert_same(whole, x)


def test_mixed_precision_casts_before_the_gather():
    policy = SimpleNamespace(param_dtype=torch.bfloat16)
    x = make_int8()
    inputs, _ = x.fsdp_pre_all_gather(None, x.shape, None, None, policy)
    assert [t.dtype for t in inputs] == [torch.int8, torch.bfloat16]
    (whole, _), _ = gather([x], x.shape, policy)
    assert whole.dtype == torch.bfloat16 and x.dtype == torch.float32


def test_a_second_gather_fills_the_same_parameter():
    x = make_pair(4, 3)
    (whole, _), _ = gather([x], x.shape)
    x.mul_(2)
    result, _ = gather([x], x.shape, out=whole)
    assert result is None
    assert_same(whole, x)


# ---- FSDP2 itself ------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A parameter, and a function of it and of an argument."""

    def __init__(self, w, function=lambda w, x: (w * x).sin(), trains=False):
        super().__init__()
        self.w, self.function = nn.Parameter(w, requires_grad=trains), function

    def forward(self, x):
        return self.function(self.w, x)


def spy(called, name, method):
    @functools.wraps(method)
    def hook(*args, **kwargs):
        called.append(name)
        return method(*args, **kwargs)

    return hook


# ---- classes that materialize ------------------------------------------------------------------------------


Frozen = declare(LowRank, name="Frozen", keywords={"trainable": False})
# Its rows do not correspond to the rows of its inner tensor.
Reversed = declare(
    name="Reversed",
    data_=inner(),
    materialize=lambda self: self.data_.flip(0),
    keywords={"fallback": "materialize"},
)


def low_rank(rows=4, rank=2):
    return Frozen(torch.randn(rows, rank), torch.randn(rank, 6))


def twice_in_place(local):
    with torch.no_grad():
        local.mul_(2)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")
@pytest.mark.parametrize(
    ("make", "plain", "step"),
    [
        (lambda: make_pair(4, 3), lambda w: w.detach().clone(), twice_in_place),
        (low_rank, lambda w: w.materialize(), None),
        (lambda: Scaled(torch.randn(4, 3), torch.tensor(2.0)), lambda w: w.materialize(), None),
        (make_int8, lambda w: w.materialize(), None),
    ],
)
def test_fully_shard_calls_them_and_a_class_stays_one(make, plain, step, one_process, monkeypatch):
    w, called = make(), []
    for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        monkeypatch.setattr(type(w), name, spy(called, name, getattr(type(w), name)))
    module, expected = Layer(w), plain(w)
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
    local = module.w._local_tensor  # to_local() takes a view, which materializes
    assert type(local) is type(w)
    for n in range(3):
        x = torch.randn(expected.shape[1])
        assert_same(module(x).detach(), (expected * x).sin())
        module.reshard()
        assert len(called) == 2 * (n + 1)
        if step:
            step(local)
            step(expected)


# Stored by columns.
Turned = declare(
    name="Turned",
    data_=inner(),
    outer=staticmethod(lambda data_: Outer((data_.shape[1], data_.shape[0]))),
    materialize=lambda self: self.data_.T.contiguous(),
    keywords={"fallback": "materialize"},
)


def add_(func, x, y, alpha=1):
    x.data_.add_(y / 2, alpha=alpha)
    return x


# An optimizer may update it by a rule.
Adding = declare(
    name="Adding",
    data_=inner(),
    materialize=lambda self: self.data_ * 2,
    keywords={"fallback": "materialize"},
    rules={aten.add_.Tensor: add_},
)
Holding = declare(name="Holding", keywords={"fallback": "map"})


REFUSED = {
    "trained by a rule of its own": (
        lambda: nn.Parameter(Adding(torch.randn(4, 3))),
        "requires grad: .* Declare it with trainable=True",
    ),
    "holds a class that is not declared": (
        lambda: Holding(TwoTensor(torch.randn(4, 3), torch.randn(4, 3))),
        "its inner tensor held is of a class that is not declared",
    ),
    "other rows": (
        lambda: Reversed(torch.arange(8.0).view(4, 2)),
        "cannot be cut; pass it .* in ignored_params",
    ),
    "uneven": (lambda: low_rank(3, 1), "gathers equal numbers of rows"),
    "fewer rows than ranks": (lambda: low_rank(1, 3), "gathers equal numbers of rows"),
    "parts that do not fit": (lambda: Turned(torch.randn(3, 4)), "cannot be cut"),
    "as many rows as a part": (lambda: low_rank(4, 2), "right of size .2, 6. stays whole on each rank"),
}


class Between(nn.Module):
    """The refused Parameter lies between ordinary ones; two modules share an ordinary one."""

    def __init__(self, w):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 3), Layer(torch.ones(1)), nn.Linear(3, 3)
        self.middle.w = w
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x).relu())


def state_of(module):
    """The state of a module and its submodules: each object and the contents of its dictionaries."""
    return {
        name: (type(part), {key: dict(v) if isinstance(v, dict) else v for key, v in vars(part).items()})
        for name, part in module.named_modules()
    }


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_by_fully_shard(case, group, two_fake_ranks):
    """The model is as it was: it runs, and is sharded without the Parameter."""
    make, words = REFUSED[case]
    w = make() if case.startswith("trained") else nn.Parameter(make(), requires_grad=False)
    model, x = Between(w), torch.randn(2, 3)
    target = [model.first, model.middle, model.last] if group else model
    before, expected = state_of(model), model(x)
    mesh = dist.init_device_mesh("cpu", (2,))
    with pytest.raises(DispatchError, match=f"fully_shard of .*{words}"):
        fully_shard(target, mesh=mesh)
    assert state_of(model) == before
    assert torch.equal(model(x), expected)
    fully_shard(target, mesh=mesh, ignored_params={w})
    assert model.middle.w is w and type(model.first.weight).__name__ == "DTensor"


def test_rules_of_ones_own_cut(two_fake_ranks):
    split = lambda func, x, size, dim=0: [Own(t) for t in func(x.data_.flip(0), size)]  # noqa: E731
    Own = declare(Reversed, rules={aten.split.Tensor: split})
    module = Layer(Own(torch.arange(8.0).view(4, 2)))
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (2,)))
    local = module.w._local_tensor
    assert type(local) is Own and local.shape == (2, 2)


OWN = declare(fsdp_pre_all_gather=lambda self, mesh: ((), "mine"))
test_outside_of_fully_shard = giving(
    {
        "parts": (lambda: [type(part) for part in low_rank().split(2)], [Tensor, Tensor]),
        "a view": (lambda: type(low_rank().view(-1)), Tensor),
        "zeros": (lambda: type(low_rank().new_zeros(4, 6)), Tensor),
        "rows": (lambda: type(low_rank()[:2]), Tensor),
        "hooks of one's own": (lambda: OWN(torch.ones(2)).fsdp_pre_all_gather(None), ((), "mine")),
    }
)


# ---- gradients of Parameters that FSDP2 cut: packed for all ranks, unpacked on each ------------------------

Gain = declare(
    name="Gain",
    base=inner(),
    gain=inner(),
    materialize=lambda self: self.base * self.gain,
    keywords={"fallback": "materialize", "trainable": True},
)
# Holds a value of a class; not all inner tensors of that class have rows.
Sum = declare(name="Sum", one=inner(), other=inner(), keywords={"fallback": "map"})
Masked = declare(name="Masked", values=inner(), mask=inner(dtype=torch.bool), keywords={"fallback": "map"})


MAKE = {
    "pair": lambda: Pair(torch.randn(4, 3), torch.randn(4, 3)),
    "low rank": lambda: LowRank(torch.randn(4, 3), torch.randn(3, 5)),
    "gain": lambda: Gain(torch.randn(4, 3), torch.randn(())),
    "nested": lambda: Sum(Gain(torch.randn(4, 3), torch.randn(1, 3)), torch.randn(4, 3)),
    "integers": lambda: Masked(torch.randn(4, 3), torch.rand(4, 3) > 0.5),
    "bfloat16": lambda: Pair(torch.randn(4, 3).bfloat16(), torch.randn(4, 3).bfloat16()),
    "no rows": lambda: Pair(torch.randn(0, 3), torch.randn(0, 3)),
}


def gradient_of(x: Tensor, seed: int) -> Tensor:
    """The gradient of a Parameter, as autograd makes it."""
    torch.manual_seed(seed)
    p = nn.Parameter(x.detach().clone())
    with torch.no_grad():
        noise = torch.randn(p.shape)
    loss = p.materialize() if type(p).__spec__.has_materialize else sum(p.unwrap()[:1])
    (loss.materialize() if isinstance(loss, TensorSubclass) else loss).mul(noise).sum().backward()
    return p.grad


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", MAKE)
def test_each_rank_gets_the_sum_of_its_part(kind, ranks):
    x = MAKE[kind]()
    gradients = [gradient_of(x, seed) for seed in range(ranks)]
    total = sum(pack(x, g, ranks) for g in gradients)
    assert type(total) is Tensor and total.size(0) == ranks
    expected = sum(gradients[1:], start=gradients[0].clone())
    rows = x.size(0) // ranks
    for rank in range(ranks):
        start, stop = rank * rows, (rank + 1) * rows
        part = unpack(rows_of(nn.Parameter(x), start, stop), total[rank : rank + 1], ranks)
        assert_same(part, rows_of(expected, start, stop))


@pytest.mark.parametrize("ord", [0, 0.5, 1, 2, 3, math.inf])
@pytest.mark.parametrize("kind", ["pair", "low rank", "gain", "nested"])
def test_the_norms_of_all_parts_are_that_of_the_whole(kind, ord):
    x = nn.Parameter(MAKE[kind]())
    gradient = gradient_of(x, 0)
    rows = pack(x, gradient, 2)
    parts = [unpack(rows_of(x, 2 * k, 2 * k + 2), rows[k], 2) for k in (0, 1)]
    for norm in (torch.linalg.vector_norm, lambda g, ord: torch._foreach_norm([g], ord)[0]):
        each = torch.stack([norm(part, ord) for part in parts])
        joined = each.sum() if ord == 0 else torch.linalg.vector_norm(each, ord)
        torch.testing.assert_close(joined, norm(gradient, ord))


@pytest.mark.parametrize("kind", ["pair", "low rank", "gain"])
@pytest.mark.parametrize("change", [lambda g: g * 0.5, lambda g: g.clone() * 0.5, lambda g: (g + g) * 0.25])
def test_a_gradient_that_is_replaced_still_counts_once(kind, change):
    x = nn.Parameter(MAKE[kind]())
    gradient = gradient_of(x, 0)
    rows = pack(x, gradient, 2)
    parts = [change(unpack(rows_of(x, 2 * k, 2 * k + 2), rows[k], 2)) for k in (0, 1)]
    each = torch.stack(torch._foreach_norm(parts))
    torch.testing.assert_close(torch.linalg.vector_norm(each), torch.linalg.vector_norm(change(gradient)))


def test_a_plain_gradient_is_left_to_pytorch_and_another_class_is_refused():
    assert pack(torch.ones(2), torch.ones(2), 2) is None
    with pytest.raises(DispatchError, match="the gradient of a Parameter of a Pair is a Tensor"):
        pack(MAKE["pair"](), torch.ones(4, 3), 2)


# ---- FSDP2 itself, in one process; tests/distributed has two --------------------------------------------------


def layer(w):
    return Layer(w, lambda w, x: x @ w.materialize(), trains=True)


# Looks at a class inside of it by views, as an author may.
Columns = declare(
    keywords={"fallback": "materialize", "trainable": True},
    materialize=lambda self: self.held.view(-1)[:12].view(self.held.shape) + self.held[:, :1],
)


def test_views_in_materialize_are_the_authors(one_process):
    w = Columns(Gain(torch.randn(4, 3), torch.randn(())))
    plain = w.materialize()
    module = layer(w)
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
    x = torch.randn(2, 4)
    torch.testing.assert_close(module(x), x @ plain)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")
def test_gradients_are_added_to_those_that_are_there_and_hooks_run(one_process):
    plain = layer(LowRank(torch.randn(4, 2), torch.randn(2, 5)))
    module = layer(plain.w.detach().clone())
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
    part, seen = module.w, []
    part.register_post_accumulate_grad_hook(lambda p: seen.append(p is part and type(p.grad).__name__))
    for seed in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        plain(x).sin().sum().backward()
        module(x).sin().sum().backward()
        assert_same(part.grad._local_tensor, plain.w.grad)
    assert seen == ["DTensor"] * 3
