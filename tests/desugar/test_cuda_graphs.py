"""Recorded steps equal the steps themselves; a tape of ops on the CPU replaces a CUDA graph."""

import functools
import gc

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import desugar
from desugar import DesugarError
from desugar.cuda_graphs import RecordedStep
from examples._language_model import LanguageModel
from subclasses._torch import fake_mode
from subclasses.ragged import JaggedTensor
from tests.doors import by_desugar, eager
from tests.tables import giving, raising


class Tapes(TorchDispatchMode):
    """Repeats the ops of a call with their tensors, as a CUDA graph repeats kernels with their addresses."""

    device, captures = "cpu", 0

    def warm(self, call):
        """Runs a call."""
        return call()

    def capture(self, call):
        """The ops of the call run here, so the first replay runs nothing."""
        self.captures, self.ops = self.captures + 1, []
        with self:
            result = call()
        return result, functools.partial(replay, iter([[]]), self.ops)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Lists ops on plain tensors; refuses those that no capture permits."""
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.ops.append((func, args, kwargs or {}, func(*args, **(kwargs or {}))))
        return self.ops[-1][-1]


@torch.no_grad()
def replay(first, ops):
    for func, args, kwargs, result in next(first, ops):
        for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.detach().copy_(new)


# ---- training --------------------------------------------------------------------------------------------------


def batch(number):
    """Tokens and targets of one of two budgets, which share their rows."""
    rows = [torch.arange(n) * (number + 7) % 256 for n in (3, 9, 1, 5)[: 1 + number % 4]]
    tokens = JaggedTensor.pack(rows, tokens=32, rows=8 + (number % 3 == 0), longest=16)
    return tokens, tokens.with_values((tokens.values + 1) % 256)


def train(wrap, resets, door):
    """The losses, parameters and gradients after each step, with a rate that changes once."""
    torch.manual_seed(0)
    model, found = LanguageModel(16, 2, 1, 32).double(), []
    optimizer, loss_of = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), door(model)

    resetting = {resets: optimizer.zero_grad}

    @wrap
    def step(tokens, targets):
        resetting.get("first", int)()
        loss = loss_of(tokens, targets)
        loss.backward()
        optimizer.step()
        resetting.get("last", int)()
        return {"loss": loss}

    gc.freeze()  # as a training loop may do, after it made the model
    for number in range(11):
        resetting.get("outside", int)()
        optimizer.param_groups[0]["lr"] = 0.1 if number < 9 else 0.01
        found.append(step(*batch(number))["loss"].detach())
        found += [None if t is None else t.clone() for p in model.parameters() for t in (p, p.grad)]
    return found


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", [eager, by_desugar])
@pytest.mark.parametrize("resets", ["first", "last", "outside", "never"])
def test_a_recorded_step_trains_as_the_step(resets, door):
    tapes = Tapes()
    recorded = train(lambda step: RecordedStep(step, tapes), resets, door)
    torch.testing.assert_close(recorded, train(lambda step: step, resets, door))
    assert tapes.captures == 4, "two sizes, each again for another rate"


# ---- serving ---------------------------------------------------------------------------------------------------

ROWS = JaggedTensor.pack([torch.ones(3, 2)], tokens=4, rows=2, longest=3)
COPY = JaggedTensor(ROWS.values * 2, ROWS.offsets.clone(), count=ROWS.count.clone(), max_length=3)


def captures_of(*calls, step=lambda x, *rest, **options: x * 2):
    """How many graphs these calls capture, after two of each; each gives the result of the step."""
    tapes = Tapes()
    recorded = RecordedStep(step, tapes)
    for args in [call for call in calls for _ in range(4)]:
        kept = recorded(*args)
        before = [t.clone() for t in tree_leaves(kept)]
        torch.testing.assert_close(kept, step(*args))
        recorded(*(a * 3 if isinstance(a, Tensor) else a for a in args))
        torch.testing.assert_close(tree_leaves(kept), before), "the next call writes to another tensor"
    return tapes.captures


X = torch.ones(3)
WITHOUT_ADDRESS = [torch.nn.Parameter(x) for x in (fake_mode().from_tensor(ROWS), torch.eye(3).to_sparse())]
COUNTER = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
COUNTER.register_step_post_hook(lambda optimizer, *_: optimizer.state["step"].update(count=1))
test_which_calls_are_captured = giving(
    {
        "one size": (lambda: captures_of([X], [X + 1]), 1),
        "sizes, dtypes, numbers": (lambda: captures_of([X], [X[1:]], [X.double()], [X, 1], [X, 2]), 5),
        "the same tensor twice": (lambda: captures_of([X, X], [X, X + 1]), 2),
        "rows": (lambda: captures_of([ROWS], [COPY]), 1),
        "shared rows": (lambda: captures_of([ROWS, ROWS * 2], [ROWS, COPY], step=lambda x, y: x + y), 2),
        "no hashable argument": (lambda: captures_of([X, {1}]), 0),
        "a gradient": (lambda: captures_of([X.clone().requires_grad_()]), 0),
        "two views of one memory": (lambda: RecordedStep(print, Tapes())._key([X[1:], X[:2]], None), None),
        "another device": (lambda: captures_of([X, torch.ones(2, device="meta")]), 0),
        "without CUDA": (lambda: desugar.record(print) is print or torch.cuda.is_available(), True),
    }
)
test_what_is_refused = raising(
    [
        (
            lambda: captures_of([X], step=lambda x: x * x.sum().item()),
            DesugarError,
            "(?s)capturing.*instead: read no",
        ),
        (
            lambda: captures_of([X.clone()], step=lambda x: x.add_(1) * 0),
            DesugarError,
            "writes to an argument",
        ),
        (
            lambda: captures_of([X], step=lambda x: COUNTER.step() or x * 2),
            DesugarError,
            "keeps a number on the host",
        ),
        (
            lambda: list(map(RecordedStep(set, Tapes()), [(1,)] * 3)),
            DesugarError,
            "tensors.*got set",
        ),
    ]
)
