"""Errors of a materializing class: a wrong ``materialize``, and copies between values that differ."""

import re

import pytest
import torch

from subclasses import DispatchError, Outer, SpecError, inner, static
from tests.doors import DOORS
from tests.subclasses.subjects import declare
from tests.tables import raising

MATERIALIZE = {"fallback": "materialize"}


def box(function):
    return declare(name="Box", keywords=MATERIALIZE, materialize=function)


GOT = [
    (lambda x: x.held[None], "one of size (1, 2) and torch.float32"),
    (lambda x: x.held[:1], "one of size (1,) and torch.float32"),
    (lambda x: x.held.double(), "one of size (2,) and torch.float64"),
    (lambda x: None, "None of type NoneType"),
]
WORDS = "Box.materialize: expected a tensor of the outer size (2,) and torch.float32, got {}; "
test_what_materialize_returns_has_the_outer_size_and_dtype = raising(
    [
        (
            lambda function=function, grad=grad, use=use: use(
                box(function)(torch.ones(2, requires_grad=grad))
            ),
            ValueError,
            re.escape(WORDS.format(got)),
        )
        for function, got in GOT
        for grad in (False, True)
        for use in (lambda x: x + 1, lambda x: x.materialize())
    ]
)
test_materialize_is_a_method = raising(
    [
        (
            lambda function=function: box(function),
            SpecError,
            r"Box.materialize must be a method, `def materialize\(self\) -> Tensor`, got",
        )
        for function in (property(lambda x: x.held), staticmethod(lambda x: x), 3)
    ]
)


def test_materialize_under_autocast_may_have_its_dtype():
    x = declare(
        keywords=MATERIALIZE, left=inner(), right=inner(), materialize=lambda self: self.left @ self.right
    )(torch.ones(2, 2), torch.ones(2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert x.materialize().dtype == torch.bfloat16 and (x + 1).dtype == torch.float32


# A tensor with a shift that may be absent.
Shifted = declare(
    name="Shifted",
    keywords={**MATERIALIZE, "trainable": True},
    held=inner(),
    shift=inner(optional=True),
    mode=static(default="add"),
    materialize=lambda self: self.held if self.shift is None else self.held + self.shift,
)


@pytest.mark.parametrize(
    "source",
    [
        lambda: Shifted(torch.ones(2), torch.ones(2), mode="other"),
        lambda: Shifted(torch.ones(2)),
    ],
)
@pytest.mark.parametrize("wrap", [lambda x: x, torch.nn.Parameter])
def test_a_copy_says_what_differs(source, wrap):
    x = wrap(Shifted(torch.zeros(2), torch.zeros(2)))
    with (
        torch.no_grad(),
        pytest.raises(DispatchError, match=r"Shifted\(mode='add'.*do not change.*assign=True"),
    ):
        x.copy_(source())
    assert not x.materialize().any()


def test_a_copy_of_a_plain_tensor_to_a_parameter_names_checkpoints():
    module = torch.nn.Linear(2, 1, bias=False)
    module.weight = torch.nn.Parameter(Shifted(torch.zeros(1, 2)))
    with pytest.raises(
        RuntimeError, match=r"a plain tensor, as a checkpoint may hold.*Make a Shifted of it first"
    ):
        module.load_state_dict({"weight": torch.ones(1, 2)})


test_a_copy_between_values_with_other_metadata_says_what_differs = raising(
    [
        (
            lambda unit=unit: unit(torch.ones(2)).copy_(unit(torch.ones(2), unit="s")),
            r"copy_\.default of Unit\(unit='s'\) to Unit\(unit='m'\).* do not change",
        )
        for unit in (
            declare(
                name="Unit",
                keywords={"fallback": fallback},
                held=inner(),
                unit=static(default="m"),
                materialize=lambda self: self.held,
            )
            for fallback in ("error", "views", "materialize")
        )
    ]
)


# ---- strides of the represented tensor ---------------------------------------------------------------------


# Shows a contiguous tensor, and represents one with other strides.
Turned = declare(
    keywords=MATERIALIZE,
    held=inner(ndim=2),
    outer=staticmethod(lambda held: Outer((held.shape[1], held.shape[0]))),
    materialize=lambda self: self.held.t(),
)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.reshape(-1),
        lambda x: x.flatten(),
        lambda x: x.view(-1),
        lambda x: x.view(3, 2, 1),
        lambda x: x.as_strided((2, 2), (2, 1)),
        lambda x: torch.as_strided_copy(x, (2,), (2,), 1),
        lambda x: torch.einsum("oi,oi->", x, x),
    ],
)
@pytest.mark.parametrize("door", ["eager", "desugar"])
def test_a_view_goes_by_the_strides_that_the_value_shows(fn, door):
    held = torch.arange(6.0).reshape(2, 3)
    assert Turned(held).is_contiguous() and not Turned(held).materialize().is_contiguous()
    torch.testing.assert_close(DOORS[door](fn, fullgraph=True)(Turned(held)), fn(held.t().contiguous()))


def test_a_view_goes_by_strides_that_are_not_contiguous():
    Columns = declare(
        keywords=MATERIALIZE,
        held=inner(ndim=2),
        outer=staticmethod(lambda held: Outer(held.shape, stride=(1, held.shape[0]))),
        materialize=lambda self: self.held * 1,
    )
    held = torch.arange(6.0).reshape(2, 3)
    assert Columns(held).as_strided((6,), (1,)).tolist() == held.t().flatten().tolist()
