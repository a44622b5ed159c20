"""A package of training computes the gradients of eager mode, whichever results get a gradient."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import desugar
from desugar import SignatureError
from subclasses.ragged import JaggedTensor
from tests.desugar.packages.test_inference import Block, rows
from tests.modules import Held


def gradients(fn, leaves, args, loss):
    """Returns the gradients of the leaves, and `(requires_grad, is_leaf)` of each result."""
    for leaf in leaves:
        leaf.grad = None
    results = fn(*args)
    loss(results).backward()
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    return [leaf.grad for leaf in leaves], [(leaf.requires_grad, leaf.is_leaf) for leaf in tensors]


def assert_same_gradients(package, fn, leaves, args, loss, *, atol=1e-5):
    leaves = list(leaves)
    (got, said), (want, expected) = (gradients(one, leaves, args, loss) for one in (package, fn))
    assert said == expected
    torch.testing.assert_close(got, want, rtol=1e-4, atol=atol)


def test_training_goes_on_with_the_same_losses(pack):
    model = Block()
    step = lambda x, y: F.mse_loss(model(x), y)  # noqa: E731
    package = pack(step, desugar.call(torch.randn(5, 8), torch.randn(5, 8)), training=True, dynamic=True)
    optimizers = [torch.optim.AdamW(p, lr=0.01) for p in (model.parameters(), package.parameters())]
    for n in (5, 3, 1, 8):
        x, y = torch.randn(n, 8), torch.randn(n, 8)
        losses = []
        for fn, optimizer in zip((step, package), optimizers, strict=True):
            loss = fn(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(package.state[f"model.{name}"], parameter, rtol=1e-4, atol=1e-5)


class Both(Held):
    def forward(self, x):
        y = self.block(x)
        return total(y), y * 2, x.shape[0]


def total(y):
    return (y.values if isinstance(y, JaggedTensor) else y).square().sum()


LOSSES = {
    "both": lambda r: r[0] + total(r[1]),
    "the first": lambda r: r[0] * 2,
    "the second": lambda r: total(r[1]),
}
SIZES = {
    "tensors": (lambda n: torch.randn(n, 8), (5, 1, 9)),
    "rows": (lambda n: rows(*n), ((3, 5, 2), (7,), (0, 4))),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("arriving", LOSSES)
@pytest.mark.parametrize("kind", SIZES)
def test_gradients_of_some_results(pack, kind, arriving):
    model, (make, sizes) = Both(block=Block()), SIZES[kind]
    options = {"training": True, "dynamic": True, "state": model, "weights": False}
    package = pack(model, desugar.call(make(sizes[0])), **options)
    for size in sizes:
        assert_same_gradients(package, model, model.parameters(), (make(size),), LOSSES[arriving])


def test_gradients_of_two_of_three_results(pack):
    fn = lambda x, y, z: (x * y, x + 1, z * 2)  # noqa: E731
    leaves = [torch.randn(3, requires_grad=True) for _ in range(3)]
    package = pack(fn, desugar.call(*leaves), training=True)
    assert_same_gradients(package, fn, leaves, leaves, lambda r: r[0].sum() + r[1].sum())


def test_arguments_that_require_grad(pack):
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    package = pack(lambda x, y: (x * y).sum(), desugar.call(x, y), training=True)
    package(x, y).backward()
    torch.testing.assert_close(x.grad, y)
    with pytest.raises(SignatureError, match="y: expected a tensor that does not require grad"):
        package(x, y.clone().requires_grad_())
    with pytest.raises(SignatureError, match="x: expected a tensor that requires grad"):
        package(x.detach(), y)
    with torch.no_grad():
        assert not package(x, y).requires_grad


def test_ragged_arguments_that_require_grad(pack):
    fn = lambda x: (x * 2).values.square().sum()  # noqa: E731
    package = pack(fn, desugar.call(rows(3, 2).requires_grad_()), training=True)
    mine = rows(1, 4).requires_grad_()
    theirs = copy.deepcopy(mine)
    package(mine).backward()
    fn(theirs).backward()
    assert isinstance(mine.grad, JaggedTensor)
    torch.testing.assert_close(mine.grad.values, theirs.grad.values)


def test_second_derivatives_are_refused(pack):
    package = pack(nn.Linear(3, 1), desugar.call(torch.randn(2, 3)), training=True)
    with pytest.raises(SignatureError, match="of first order"):
        torch.autograd.grad(package(torch.randn(2, 3)).sum(), list(package.parameters()), create_graph=True)


def test_a_weight_that_is_written_between_forward_and_backward(pack):
    package = pack(nn.Linear(3, 2), desugar.call(torch.randn(2, 3, requires_grad=True)), training=True)
    loss = package(torch.randn(2, 3, requires_grad=True)).sum()
    with torch.no_grad():
        package.state["weight"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_batch_norm_in_training(pack):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    package = pack(model, desugar.call(torch.randn(6, 3)), training=True, dynamic=True)
    for n in (6, 4):
        x = torch.randn(n, 3)
        torch.testing.assert_close(package(x), model(x))
    torch.testing.assert_close(package.state["1.running_mean"], model[1].running_mean)
    assert package.state["1.num_batches_tracked"] == 2
