"""Copies of arguments are like what they are copies of, and share nothing with them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from desugar.compare.replay.copies import NoCopy, bytes_of, copy_call, restored
from tests.desugar.explain.subjects import make_weight


def copied(*args, **kwargs):
    return copy_call((args, kwargs))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 3),
        lambda: torch.ones(2, 3).t(),
        lambda: torch.arange(12.0).reshape(3, 4)[:, 1:3],
        lambda: torch.ones(3, 1).expand(3, 4),
        lambda: torch.ones(0, 4)[:, ::2],
        lambda: torch.ones(2, requires_grad=True),
        lambda: nn.Parameter(torch.ones(2), requires_grad=False),
        make_weight,
        lambda: torch.eye(3).to_sparse(),
    ],
)
def test_a_tensor_has_its_class_strides_and_gradients_again(make):
    x = make()
    ((other,), _) = copied(x)
    assert type(other) is type(x) and other is not x and other.requires_grad == x.requires_grad
    assert other.shape == x.shape and other.dtype == x.dtype and other.is_leaf == x.is_leaf
    if x.layout is torch.strided:
        assert other.stride() == x.stride()
    dense = [t.to_dense() if t.layout is not torch.strided else t for t in (x.detach(), other.detach())]
    assert torch.equal(dense[0] + 0, dense[1] + 0)


def test_what_is_no_leaf_has_a_copy_that_may_be_written_to():
    x = torch.ones(2, requires_grad=True) * 2
    ((other,), _) = copied(x)
    other.add_(1)
    assert not other.is_leaf and x.tolist() == [2, 2]


def test_containers_are_copied_modules_and_functions_are_not():
    @dataclass
    class Batch:
        words: torch.Tensor
        name: str

    batch, net, rows = Batch(torch.ones(2), "a"), nn.Linear(2, 2), [torch.ones(1)]
    (a, b, c, d), by_name = copied(batch, net, rows, torch.relu, again=rows)
    assert isinstance(a, Batch) and a.words is not batch.words and b is net and d is torch.relu
    assert c is not rows and c[0] is not rows[0] and by_name["again"] is c


def test_sizes_that_are_to_be_symbolic_stay_so():
    x = torch.ones(4, 2)
    torch._dynamo.mark_dynamic(x, 0)
    ((other,), _) = copied(x)
    assert other._dynamo_dynamic_indices == {0}


def test_an_argument_that_is_given_twice_is_copied_once():
    x = torch.ones(4)
    ((a, b), _) = copied(x, x)
    assert a is b


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (lambda x: (x, x[1:]), "share memory"),
        (
            lambda x: ((n for n in range(3)),),
            "its arguments cannot be copied: TypeError: cannot pickle 'generator'",
        ),
    ],
)
def test_what_cannot_be_copied_says_so(args, says):
    with pytest.raises(NoCopy, match=says):
        copied(*args(torch.ones(4)))


def test_bytes_count_each_tensor_once():
    x = torch.ones(4)
    assert bytes_of(((x, [x]), {"w": make_weight()})) == 16 + 32 + 16


def test_state_is_restored():
    net = nn.BatchNorm1d(3)
    net.weight.grad = torch.ones(3)
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    with restored(state):
        net(torch.randn(5, 3) + 7).sum().backward()
        net.weight.grad = None
        assert net.num_batches_tracked == 1
    assert net.num_batches_tracked == 0 and net.running_mean.tolist() == [0, 0, 0]
    assert net.weight.grad.tolist() == [1, 1, 1] and net.bias.grad is None
