"""Leading dims, `shape="... 4"`: views and joins along them, and the derivatives of these, need no rule."""

import pytest
import torch

from subclasses import DispatchError, Outer, inner
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agree, agreeing, numbers
from tests.subclasses.subjects import declare
from tests.tables import raising

aten = torch.ops.aten
INDEX = torch.tensor([2, 0])


# A matrix and a number for each entry.
Turn = declare(
    matrix=inner(differentiable=True, shape="... 2 2"), weight=inner(differentiable=True, shape="...")
)


def first(parts):
    return parts[0]


# An op on a value of size (3, 4), and on an inner tensor, with dims counted from the front.
OPS = {
    "x[1]": (lambda x: x[1], lambda t: t[1]),
    "x[:, 1:]": (lambda x: x[:, 1:], lambda t: t[:, 1:]),
    "x[..., 0]": (lambda x: x[..., 0], lambda t: t[:, 0]),
    "x[None]": (lambda x: x[None], lambda t: t[None]),
    "x[index]": (lambda x: x[INDEX], lambda t: t[INDEX]),
    "x[:, index]": (lambda x: x[:, INDEX], lambda t: t[:, INDEX]),
    "mT": (lambda x: x.mT, lambda t: t.transpose(0, 1)),
    "t": (lambda x: x.t(), lambda t: t.transpose(0, 1)),
    "transpose": (lambda x: x.transpose(-1, -2), lambda t: t.transpose(0, 1)),
    "permute": (lambda x: x[None].permute(2, 0, 1), lambda t: t[None].movedim(2, 0)),
    "movedim": (lambda x: x.movedim(-1, 0), lambda t: t.movedim(1, 0)),
    "reshape": (lambda x: x.reshape(-1, 2), lambda t: t.reshape(6, 2, *t.shape[2:])),
    "reshape of a transpose": (lambda x: x.mT.reshape(12), lambda t: t.transpose(0, 1).flatten(0, 1)),
    "view": (lambda x: x.view(2, 6), lambda t: t.view(2, 6, *t.shape[2:])),
    "flatten": (lambda x: x.flatten(), lambda t: t.flatten(0, 1)),
    "unsqueeze": (lambda x: x.unsqueeze(-1), lambda t: t.unsqueeze(2)),
    "squeeze": (lambda x: x[:1].squeeze(0), lambda t: t[0]),
    "expand": (lambda x: x[:1].expand(5, 4), lambda t: t[:1].expand(5, *t.shape[1:])),
    "narrow": (lambda x: x.narrow(-1, 1, 2), lambda t: t.narrow(1, 1, 2)),
    "split": (lambda x: first(x.split(3, -1)), lambda t: first(t.split(3, 1))),
    "chunk": (lambda x: x.chunk(2, 1)[1], lambda t: t.chunk(2, 1)[1]),
    "unbind": (lambda x: x.unbind(-1)[2], lambda t: t.unbind(1)[2]),
    "cat": (lambda x: torch.cat([x, x[:, :1]], -1), lambda t: torch.cat([t, t[:, :1]], 1)),
    "stack": (lambda x: torch.stack([x, x.flip(0)], -1), lambda t: torch.stack([t, t.flip(0)], 2)),
    "index_select": (lambda x: x.index_select(-1, INDEX), lambda t: t.index_select(1, INDEX)),
    "flip": (lambda x: x.flip(-1), lambda t: t.flip(1)),
    "roll": (lambda x: x.roll(1, -1), lambda t: t.roll(1, 1)),
    "repeat": (lambda x: x.repeat(2, 1), lambda t: torch.cat([t, t])),
    "clone": (lambda x: x.clone(), lambda t: t.clone()),
    "a view of a view": (lambda x: x[1:].mT[0], lambda t: t[1:, 0]),
}
COPIES = {"x[index]", "x[:, index]", "cat", "stack", "index_select", "flip", "roll", "repeat", "clone"}
COPIES |= {"expand", "reshape of a transpose"}  # to which is not written


def inners():
    return numbers((3, 4, 2, 2), (3, 4))


def sines(run):
    def fn(m, w):
        out = run(Turn(m, w))
        assert type(out) is Turn and (out.shape, out.stride()) == (out.weight.shape, out.weight.stride())
        return [t.sin() for t in out.unwrap()]

    return fn


test_values_and_gradients = agreeing(
    {
        name: (
            sines(run),
            lambda m, w, plain=plain: [plain(t).sin() for t in (m, w)],
            [(3, 4, 2, 2), (3, 4)],
        )
        for name, (run, plain) in OPS.items()
    },
    twice=["eager"],
)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("way", DOORS)
@pytest.mark.parametrize(
    ("name", "grad"),
    [
        (name, grad)
        for name in OPS
        for grad in (False, True)
        if name not in COPIES and not (grad and name in ("split", "chunk", "unbind"))  # PyTorch refuses it
    ],
)
def test_a_view_is_written_to(name, grad, way):
    run, plain = OPS[name]

    def on_value(m, w):
        x = Turn(m * 1, w * 1)
        view = run(x)
        view.copy_(run(Turn(m + 1, w + 2)))
        return (*x.unwrap(), *view.unwrap())

    def on_plain(m, w):
        m, w, others = m * 1, w * 1, (m + 1, w + 2)
        views = [plain(t) for t in (m, w)]
        for view, other in zip(views, others, strict=True):
            view.copy_(plain(other))
        return m, w, *views

    if grad:
        agree(on_value, on_plain, inners(), door=DOORS[way])
    else:
        torch.testing.assert_close(DOORS[way](on_value)(*inners()), on_plain(*inners()))


def test_the_size_and_the_strides():
    x = Turn(torch.rand(3, 4, 2, 2), torch.rand(3, 4))
    assert x.shape == (3, 4) and x.stride() == (4, 1) and x[1, 2:].storage_offset() == 6
    assert Turn(torch.rand(2, 2), torch.rand(())).shape == ()
    assert Turn(torch.rand(0, 2, 2), torch.rand(0)).shape == (0,)
    assert Turn(torch.rand(2, 4, 3, 2).permute(2, 1, 0, 3), torch.rand(3, 4)).is_contiguous()


test_what_is_refused = raising(
    {
        "another size": (
            lambda: Turn(torch.rand(3, 2), torch.rand(3)),
            ValueError,
            r"expected shape \(\.\.\. 2 2\)",
        ),
        **{
            name: (
                lambda call=call: call(Turn(torch.rand(3, 3, 2, 2), torch.rand(3, 3))),
                (DispatchError, RuntimeError),
                r"rule|shape|size",
            )
            for name, call in {
                "diagonal": lambda x: x.diagonal(),
                "unfold": lambda x: x.unfold(0, 2, 1),
                "another dtype": lambda x: x.view(torch.int32),
                "exp": lambda x: x.exp(),
            }.items()
        },
    }
)


def test_an_outer_of_the_class_comes_first():
    Shown = declare(
        parts=inner(differentiable=True, shape="... 2"),
        outer=staticmethod(lambda parts: Outer(parts.shape[:-1])),
    )
    parts = torch.arange(12.0).reshape(3, 2, 2).requires_grad_()
    y = Shown(parts).mT
    assert y.shape == (2, 3) and torch.autograd.grad(y[0].parts.sum(), parts)[0].sum() == 6
    with pytest.raises(
        Exception, match="must return them for views"
    ):  # the strides that it gives are not a view's
        torch.compile(lambda x: x.transpose(0, 1), backend="aot_eager")(Shown(parts.detach()))


def test_a_rule_for_a_view_that_returns_a_value_is_refused_where_gradients_are_recorded():
    Viewed = declare(
        parts=inner(differentiable=True),
        rules={aten.select: lambda func, x, dim, index: Viewed(func(x.parts, dim, index))},
    )
    assert Viewed(torch.ones(3, 2))[0].shape == (2,)
    x = Viewed(torch.ones(3, 2, requires_grad=True))
    with pytest.raises(DispatchError, match=r'declare so, as in `parts: Tensor = inner\(shape="\.\.\. 4"\)`'):
        _ = x[0]
    with torch.no_grad():
        assert x[0].shape == (2,)
