"""The functions and modules that the tests compare, each with a function that makes its arguments."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

from subclasses import TensorSubclass, inner


class Pair(TensorSubclass, fallback="map"):
    first: Tensor = inner()
    second: Tensor = inner()


WEIGHT = torch.ones(3, 3, requires_grad=True)


def double(x):
    return x * 2


def double_inputs():
    return torch.arange(3.0)


def sizes_inputs():
    for rows in (2, 4, 6):
        yield torch.randn(rows, 3)


def list_inputs():
    return [(torch.ones(2),), (torch.ones(3),)]


def pairs(x, y):
    x.mul_(2)
    return y + 1, x, {"view": y.first[0], "number": 3}


def pairs_inputs():
    shared = torch.ones(2)
    return Pair(shared, torch.zeros(2)), Pair(shared, torch.ones(2))


def draws(x):
    return nn.functional.dropout(x, 0.5) + torch.rand(3)


def with_weight(x):
    return x @ WEIGHT


def with_weight_inputs():
    return torch.ones(2, 3)


def breaks(x):
    y = x * 2
    print("a break")
    return y + 1


def ends_when_compiled(x):
    if torch.compiler.is_dynamo_compiling():
        end()
    return x + 1


@torch.compiler.assume_constant_result
def end():
    print("last words", flush=True)
    os._exit(7)


def raises(x):
    raise ValueError("odd")


def hangs(x):
    time.sleep(60)


draws_inputs = breaks_inputs = yields_inputs = waits_inputs = double_inputs
ends_when_compiled_inputs = raises_inputs = hangs_inputs = of_the_process_inputs = double_inputs


def nothing():
    return torch.ones(2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(self.norm(x)).relu()


net = Net()


def make_net():
    return Net()


def make_nothing():
    return 3


class Wide(nn.Linear):
    """Takes arguments to be made."""


Wide_inputs = Net_inputs = net_inputs = make_net_inputs = make_nothing_inputs = sizes_inputs

if __name__ == "__main__":

    def guarded(x):
        return x


def yields(x):
    yield x.sin()


async def _later(x):
    return x.sin()


def waits(x):
    return [_later(x)]


def of_the_process(x):
    return x + os.getpid() % 100
