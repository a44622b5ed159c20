"""Views of a class that declares leading dims, whose inner tensors are read, at changing sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import TensorSubclass, inner
from tests.subclasses.subjects import MODES


def rotation_class(differentiable):
    class Rotation(TensorSubclass):
        c: Tensor = inner(differentiable=differentiable, shape="...")
        s: Tensor = inner(differentiable=differentiable, shape="...")

        def angle(self):
            c, s = self.unwrap()
            return torch.atan2(s, c)

    return Rotation


VIEWS = {
    "permute": lambda x: x.permute(1, 0),
    "view": lambda x: x.view(-1),
    "slice": lambda x: x[1:],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "expand": lambda x: x.expand(2, *x.shape),
}


@pytest.mark.sweep(21)
@pytest.mark.parametrize("door", MODES)
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_read(name, differentiable, door):
    Rotation = rotation_class(differentiable)

    def f(x):
        view = VIEWS[name](x)
        return view.c.sin() if differentiable else view.angle()

    compiled = MODES[door](f)
    for n in (4, 5, 6):
        a = torch.linspace(0, 1, 3 * n).reshape(n, 3).requires_grad_()
        found = compiled(Rotation(a.cos(), a.sin()))
        view = VIEWS[name](a)
        expected = view.cos().sin() if differentiable else view
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(t.sum(), a)[0] for t in (found, expected)))
