"""Gradients of Parameters that FSDP2 cut: packed for all ranks, unpacked on each; `tests/distributed` runs FSDP2."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from subclasses import DispatchError, TensorSubclass, inner
from subclasses.dispatch.sharding import rows_of
from subclasses.generate.sharded_gradients import pack, unpack
from tests.subclasses.subjects import LowRank, Pair, assert_same, declare

Gain = declare(
    name="Gain",
    base=inner(),
    gain=inner(),
    materialize=lambda self: self.base * self.gain,
    keywords={"fallback": "materialize", "trainable": True},
)
# Holds a class whose inner tensors are no rows, all of them.
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


class Layer(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(w)

    def forward(self, x):
        return x @ self.w.materialize()


# Looks at a class inside of it by views, as an author may.
Columns = declare(
    keywords={"fallback": "materialize", "trainable": True},
    materialize=lambda self: self.held.view(-1)[:12].view(self.held.shape) + self.held[:, :1],
)


def test_views_in_materialize_are_the_authors(one_process):
    w = Columns(Gain(torch.randn(4, 3), torch.randn(())))
    plain = w.materialize()
    module = Layer(w)
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
    x = torch.randn(2, 4)
    torch.testing.assert_close(module(x), x @ plain)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")
def test_gradients_are_added_to_those_that_are_there_and_hooks_run(one_process):
    plain = Layer(LowRank(torch.randn(4, 2), torch.randn(2, 5)))
    module = Layer(plain.w.detach().clone())
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
    part, seen = module.w, []
    part.register_post_accumulate_grad_hook(lambda p: seen.append(p is part and type(p.grad).__name__))
    for seed in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        plain(x).sin().sum().backward()
        module(x).sin().sum().backward()
        assert_same(part.grad._local_tensor, plain.w.grad)
    assert seen == ["DTensor"] * 3
