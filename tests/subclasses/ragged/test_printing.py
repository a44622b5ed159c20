"""What ragged tensors print: rows, and not too many."""

from __future__ import annotations

import torch

from subclasses import _torch
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import classes
from tests.tables import giving

CLASSES = JaggedTensor, PaddedTensor
MANY = [torch.full((i % 3,), i) for i in range(500)]
LONG = [torch.arange(n) for n in (900, 400, 2)]
VECTORS = [torch.ones(2, 3), torch.ones(1, 3)]
NOTHING, ONE = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def ones(cls):
    return cls.from_tensors([torch.ones(2), torch.ones(1)])


def end(x):
    """What follows the last row."""
    return repr(x).rpartition("],")[2]


def without_gradients(f):
    with torch.inference_mode():
        return f()


def with_edges_of_one(f):
    with _torch.printing_with(edgeitems=1):
        return f()


CASES = {
    "few rows": (
        lambda cls: cls.from_tensors([torch.tensor([1.0, 2.0]), torch.tensor([3.0])]),
        "([\n  tensor([1., 2.]),\n  tensor([3.]),\n], size=(2, 2))",
    ),
    "integers": (
        lambda cls: ones(cls).long(),
        "([\n  tensor([1, 1]),\n  tensor([1]),\n], size=(2, 2))",
    ),
    "half precision": (
        lambda cls: ones(cls).half(),
        "([\n  tensor([1., 1.], dtype=torch.float16),\n  tensor([1.], dtype=torch.float16),\n], size=(2, 2))",
    ),
    "many rows": (
        lambda cls: cls.from_tensors(MANY),
        "([\n  tensor([], dtype=torch.int64),\n  tensor([1]),\n  tensor([2, 2]),\n  ... (494 rows)\n"
        "  tensor([497, 497]),\n  tensor([], dtype=torch.int64),\n  tensor([499]),\n], size=(500, 2))",
    ),
    "long rows": (
        lambda cls: cls.from_tensors(LONG),
        "([\n  tensor([  0,   1,   2,  ..., 897, 898, 899]),\n  tensor([  0,   1,   2,  ..., 397, 398, 399]),\n"
        "  tensor([0, 1]),\n], size=(3, 900))",
    ),
}

test_whole = giving(
    {
        f"{name}, {cls.__name__}": (lambda make=make, cls=cls: repr(make(cls)), cls.__name__ + text)
        for cls in CLASSES
        for name, (make, text) in CASES.items()
    }
)
test_parts = giving(
    {
        f"{name}, {cls.__name__}": (lambda call=call, cls=cls: call(cls), expected)
        for cls in CLASSES
        for name, (call, expected) in {
            "str": (lambda cls: str(ones(cls)) == repr(ones(cls)), True),
            "format": (lambda cls: f"{ones(cls)}" == repr(ones(cls)), True),
            "20 rows": (lambda cls: repr(cls.from_tensors(MANY[:20])).count("tensor("), 20),
            "edges of one": (
                lambda cls: with_edges_of_one(lambda: repr(cls.from_tensors(MANY)).count("tensor(")),
                2,
            ),
            "300 entries": (lambda cls: repr(cls.from_tensors(LONG)[:, :300]).count("..."), 0),
            "the options are put back": (lambda cls: str(torch.arange(900)).count(","), 899),
            "a leaf": (lambda cls: end(ones(cls).requires_grad_()), " size=(2, 2), requires_grad=True)"),
            "a result": (
                lambda cls: end(ones(cls).requires_grad_() * 2),
                " size=(2, 2), grad_fn=<MulBackward0>)",
            ),
            "inference mode": (lambda cls: without_gradients(lambda: end(ones(cls) * 2)), " size=(2, 2))"),
            "turned": (
                lambda cls: end(cls.from_tensors(VECTORS).transpose(1, 2)),
                " size=(2, 3, 2), ragged_dim=2)",
            ),
            "merged": (lambda cls: repr(cls.from_tensors(VECTORS).flatten(0, 1)).count("tensor("), 2),
            "merged, where": (
                lambda cls: repr(cls.from_tensors(VECTORS).flatten(0, 1)).count("ragged_dim=0"),
                1,
            ),
        }.items()
    }
    | {
        "no rows": (
            lambda: repr(JaggedTensor(torch.ones(0, 4), ONE)),
            "JaggedTensor([], size=(0, 0, 4))",
        ),
        "no padded rows": (
            lambda: repr(PaddedTensor(torch.ones(0, 3), NOTHING)),
            "PaddedTensor([], size=(0, 3))",
        ),
        "no integers": (
            lambda: repr(PaddedTensor(NOTHING[:, None], NOTHING)),
            "PaddedTensor([], size=(0, 1), dtype=torch.int64)",
        ),
        "lengths beyond the table": (
            lambda: repr(PaddedTensor(torch.ones(2, 2), torch.tensor([5, 1]))),
            "PaddedTensor([\n  tensor([1., 1.]),\n  tensor([1.]),\n], size=(2, 2))",
        ),
        "rows second": (
            lambda: end(PaddedTensor.from_tensors(VECTORS).transpose(0, 1)),
            " size=(2, 2, 3), ragged_dim=0, batch_dim=1)",
        ),
    }
)


@classes
def test_under_a_mode(cls):
    x, mode, first = ones(cls), _torch.fake_mode(), cls.__spec__.inner_names[0]
    text = repr(x)

    class Refusing(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was seen")

    with Refusing():
        assert repr(x) == text
    fake = repr(mode.from_tensor(x))
    with mode:
        assert repr(x) == text
    assert fake.startswith(f"{cls.__name__}({first}=FakeTensor(...") and "ragged_dim=1" in fake
    assert repr(x.to("meta")).startswith(f"{cls.__name__}({first}=tensor(..., device='meta'")
