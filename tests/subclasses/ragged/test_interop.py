"""Ragged tensors among what else there is: torch.nested, masks, modules, optimizers, files and compiled functions."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.doors import COMPILED, by_desugar
from tests.subclasses.ragged.judge import classes, with_holes
from tests.tables import raising

KINDS = {
    "jagged": JaggedTensor.from_tensors,
    "padded": lambda rows: PaddedTensor.from_tensors(rows, multiple=4),
    "padded batch": lambda rows: PaddedTensor.from_tensors(rows, multiple=4, batch_multiple=4),
}
LENGTHS = [2, 0, 3]


MORE_KINDS = KINDS | {"holes": with_holes, "[T, B]": lambda rows: KINDS["padded"](rows).transpose(0, 1)}
kinds = pytest.mark.parametrize("kind", KINDS)


def rows_of(lengths=LENGTHS, **options: Any) -> list[Tensor]:
    return [torch.randn(n, 2, dtype=torch.float64, **options) for n in lengths]


def check_rows(x: Any, rows: list[Tensor]) -> None:
    torch.testing.assert_close(x.detach().to_tensors(), [row.detach() for row in rows])


# ---- torch.nested ----------------------------------------------------------------------------------------------


STARTS, COUNTS = torch.tensor([0, 1, 0]), torch.tensor([2, 3, 5])
jag = torch.nested.nested_tensor_from_jagged
# A nested tensor of a leaf, and the rows of it.
NESTED = {
    "back to back": (
        lambda t: jag(t.flatten(0, 1), torch.tensor([0, 2, 2, 15])),
        lambda t: t.flatten(0, 1).split([2, 0, 13]),
    ),
    "with holes": (
        lambda t: torch.nested.narrow(t, 1, STARTS, COUNTS, layout=torch.jagged),
        lambda t: [t[0, :2], t[1, 1:4], t[2]],
    ),
    "ragged along 2": (
        lambda t: jag(t, torch.tensor([0, 2, 5]), jagged_dim=2),
        lambda t: t.split([2, 3], 1),
    ),
    "without rows": (lambda t: jag(t[0, :0], torch.zeros(1, dtype=torch.int32)), lambda t: []),
    "short offsets": (
        lambda t: jag(t[0, :3], torch.tensor([0, 1, 3], dtype=torch.int32)),
        lambda t: t[0, :3].split([1, 2]),
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_from_nested_and_back_shares_and_is_differentiable(name):
    nest, part = NESTED[name]
    table = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    nested, rows = nest(table), part(table)
    x = JaggedTensor.from_nested(nested)
    assert (x.shape[0], x.offsets.dtype) == (len(rows), torch.int64)
    assert x.row_lengths().tolist() == [row.shape[x.ragged_dim - 1] for row in rows]
    check_rows(x, rows)
    if rows:
        assert x.values.data_ptr() == x.to_nested().values().data_ptr() == table.data_ptr()
        assert x.to_nested().offsets() is x.offsets
        losses = x.square().sum(), sum(r.square().sum() for r in rows)
        torch.testing.assert_close(*(torch.autograd.grad(loss, table) for loss in losses))


def test_a_nested_leaf_gets_its_gradient():
    nested = torch.nested.nested_tensor(rows_of(), layout=torch.jagged, requires_grad=True)
    x = JaggedTensor.from_nested(nested)
    (grad,) = torch.autograd.grad((x * x).sum(), nested)
    assert x.offsets is nested.offsets()
    torch.testing.assert_close(grad.values(), 2 * nested.values().detach())


# ---- from values, tables and masks -----------------------------------------------------------------------------


def test_the_same_rows_from_everything():
    rows = rows_of()
    values = torch.cat(rows)
    table = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)
    mask = torch.arange(3) < torch.tensor(LENGTHS)[:, None]
    for x in (
        JaggedTensor.from_tensors(rows),
        JaggedTensor.from_lengths(values, LENGTHS),
        JaggedTensor.from_lengths(values, torch.tensor(LENGTHS, dtype=torch.int32)),
        JaggedTensor.from_lengths(values, LENGTHS, max_length=7),
        JaggedTensor.from_lengths(values, torch.tensor(LENGTHS)),
        JaggedTensor(values, torch.tensor([0, 2, 2, 5])),
        JaggedTensor.from_padded(table, LENGTHS),
        JaggedTensor.from_mask(table, mask),
        PaddedTensor(table, torch.tensor(LENGTHS)),
        PaddedTensor.from_mask(table, mask),
        PaddedTensor.from_mask(table, mask).to_jagged(),
        JaggedTensor.from_mask(table, mask).to_padded(multiple=8),
    ):
        check_rows(x, rows)
        assert torch.equal(x.mask()[:, :3], mask) and not x.mask()[:, 3:].any()
        torch.testing.assert_close(x.to_dense(fill=torch.nan)[:, :3], table, equal_nan=True)
    assert JaggedTensor.from_lengths(values, LENGTHS).values.data_ptr() == values.data_ptr()
    assert PaddedTensor.from_mask(table, mask).padded is table


def test_a_mask_may_lie_anywhere():
    table = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False, True, True, False], [False, False, False, True]])
    x = JaggedTensor.from_mask(table, mask)
    check_rows(x, [table[0, 1:3], table[1, 3:]])
    (grad,) = torch.autograd.grad(x.sum(), table)
    torch.testing.assert_close(grad, mask.double())
    with pytest.raises(RuntimeError, match=r"first entries of each row.*JaggedTensor\.from_mask"):
        PaddedTensor.from_mask(table, mask)


@classes
@pytest.mark.parametrize(
    "mask", [torch.ones(2, 3), torch.ones(3, 2, dtype=torch.bool), torch.ones(2, dtype=torch.bool), [[True]]]
)
def test_a_wrong_mask(cls, mask):
    with pytest.raises(ValueError, match=rf"{cls.__name__}\.from_mask: expected .* a bool mask \[B, T\]"):
        cls.from_mask(torch.ones(2, 3), mask)


# ---- copies and files ------------------------------------------------------------------------------------------


def through_a_file(x: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "file": through_a_file,
    "clone": torch.clone,
    "to": lambda x: x.to("cpu", copy=True),
}


@pytest.mark.parametrize("kind", MORE_KINDS)
@pytest.mark.parametrize("how", COPIES)
def test_copies(kind, how):
    x = MORE_KINDS[kind](rows_of())
    for original in (x, x.mT, x.transpose(0, 1) if kind == "[T, B]" else x.flatten(0, 1)):
        y = COPIES[how](original)
        assert type(y) is type(x) and y.shape == original.shape
        check_rows(y, original.to_tensors())
        check_rows(y + original, (2 * original).to_tensors())
    leaf = MORE_KINDS[kind](rows_of()).requires_grad_()
    if how not in ("clone", "to"):
        assert COPIES[how](leaf).requires_grad and COPIES[how](leaf).is_leaf


@kinds
def test_what_shares_memory_does_so_after_loading(kind):
    x = KINDS[kind](rows_of())
    loaded = through_a_file({"x": x, "view": x.transpose(1, 2)})
    loaded["x"].mul_(2)
    check_rows(loaded["view"], (2 * x).transpose(1, 2).to_tensors())
    assert through_a_file(x, map_location="meta").device.type == "meta"


CONVERSIONS = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "to a device": lambda x: x.to("cpu", torch.float32),
    "type": lambda x: x.type(torch.float32),
    "to another": lambda x: x.to(x.float()),
}


@kinds
def test_conversions(kind):
    rows = rows_of()
    x = KINDS[kind](rows)
    assert x.to("cpu") is x and x.to(torch.float64) is x and x.cpu() is x
    for convert in CONVERSIONS.values():
        check_rows(convert(x), [row.float() for row in rows])
    meta = (x.to("meta") * 2).sum(1)
    assert meta.device.type == "meta" and meta.shape == x.sum(1).shape


# ---- modules and optimizers ------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A module with a ragged buffer and a ragged parameter."""

    def __init__(self, buffer: Any, parameter: Any):
        super().__init__()
        self.register_buffer("buffer", buffer)
        self.parameter = nn.Parameter(parameter)
        self.layer = nn.Linear(2, 3, dtype=torch.float64)

    def forward(self) -> Tensor:
        """Something of both."""
        return self.layer(self.buffer + self.parameter).square().sum()


def make_holder(kind: str, lengths=LENGTHS) -> Holder:
    return Holder(KINDS[kind](rows_of(lengths)), KINDS[kind](rows_of(lengths)))


@kinds
def test_state_dicts(kind):
    one, two = make_holder(kind), make_holder(kind)
    state = through_a_file(one.state_dict())
    two.load_state_dict(state)
    torch.testing.assert_close(two(), one())
    other = make_holder(kind, [3, 2, 0])  # as many rows, as wide, and of other lengths
    with pytest.raises(RuntimeError, match=r"same length, got lengths \[3, 2, 0.*and \[2, 0, 3"):
        other.load_state_dict(state)
    other.load_state_dict(state, assign=True)
    torch.testing.assert_close(other(), one())


@pytest.mark.sweep(3)
@kinds
def test_modules_are_moved_copied_and_compiled(kind):
    module = make_holder(kind)
    loss = module()
    torch.testing.assert_close(copy.deepcopy(module)(), loss)
    assert copy.deepcopy(module).to("meta")().device.type == "meta"
    half = copy.deepcopy(module).float()
    assert half.buffer.dtype == half.parameter.dtype == torch.float32
    compiled = by_desugar(module)()
    torch.testing.assert_close(compiled, loss)
    compiled.backward()
    grad = module.parameter.grad
    assert type(grad) is type(module.buffer)
    check_rows(
        grad, [row @ (2 * module.layer.weight) for row in module.layer(module.buffer + module.parameter)]
    )


OPTIMIZERS = "SGD Adam AdamW Adagrad RMSprop Adadelta NAdam RAdam Adamax ASGD Rprop".split()


@kinds
@pytest.mark.parametrize("name", [*OPTIMIZERS, "SGD, many at once", "AdamW, many at once"])
def test_optimizers_step_as_they_step_rows(kind, name):
    name, _, foreach = name.partition(", ")
    options = {"foreach": True} if foreach else {}
    rows = [nn.Parameter(row) for row in rows_of(LENGTHS * 2)]
    ragged = [nn.Parameter(KINDS[kind]([r.detach() for r in part])) for part in (rows[:3], rows[3:])]
    parameters = {"ragged": ragged, "rows": rows}
    optimizers = {k: getattr(torch.optim, name)(p, lr=0.1, **options) for k, p in parameters.items()}
    for _ in range(3):
        for k, optimizer in optimizers.items():
            optimizer.zero_grad()
            sum((p**3).sum() for p in parameters[k]).backward()  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(parameters[k], 1.5)
            optimizer.step()
        optimizers["ragged"].load_state_dict(copy.deepcopy(optimizers["ragged"].state_dict()))
    torch.testing.assert_close(
        [r.detach() for x in ragged for r in x.to_tensors()], [r.detach() for r in rows]
    )


# ---- compared as a whole ---------------------------------------------------------------------------------------


@kinds
def test_equal(kind):
    rows = rows_of()
    x = KINDS[kind](rows)
    assert torch.equal(x, KINDS[kind](rows)) and x.equal(x.clone()) and torch.equal(x.mT, x.clone().mT)
    for other in (x + 1, x[:, :2], x.mT, KINDS[kind](rows_of([3, 2, 0])), KINDS[kind](rows_of([2, 3]))):
        assert not torch.equal(x, other)
    with pytest.raises(NotImplementedError, match=f"equal: expected two {type(x).__name__}s"):
        torch.equal(x, x.to_dense())


# ---- made inside a compiled function ---------------------------------------------------------------------------


def starts_of(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))


BUILDERS = {
    "list": lambda table, lengths: JaggedTensor.from_tensors([table[0, :2], table[1, :0], table[2]]),
    "list, padded": lambda table, lengths: PaddedTensor.from_tensors([table[0, :2], table[1]], multiple=4),
    "values, lengths": lambda table, lengths: JaggedTensor.from_lengths(table.flatten(0, 1)[:5], lengths, max_length=4),
    "values, list": lambda table, lengths: JaggedTensor.from_lengths(table.flatten(0, 1)[:5], [2, 3]),
    "values, offsets": lambda table, lengths: JaggedTensor(table.flatten(0, 1)[:5], starts_of(lengths), max_length=3),
    "table": lambda table, lengths: JaggedTensor.from_padded(table, lengths),
    "table, padded": PaddedTensor,
    "mask": lambda table, lengths: PaddedTensor.from_mask(table, torch.arange(3) < lengths[:, None]),
    "padded to jagged": lambda table, lengths: PaddedTensor(table, lengths).to_jagged(),
    "jagged to padded": lambda table, lengths: JaggedTensor.from_padded(table, lengths).to_padded(multiple=2),
    "pad": lambda table, lengths: PaddedTensor.pad(table, dim=1, multiple=8),
}  # fmt: skip


@pytest.mark.sweep(42)
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize("builder", BUILDERS)
def test_made_inside_a_compiled_function(builder, door):
    def inside(table, lengths):
        return BUILDERS[builder](table, lengths).softmax(1).square().sum(1)

    table, lengths = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True), torch.tensor(LENGTHS)
    got, expected = COMPILED[door](inside)(table, lengths), inside(table, lengths)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), table) for y in (got, expected)))
    whole = COMPILED[door](lambda *args: BUILDERS[builder](*args) * 2)(table, lengths)
    check_rows(whole, (BUILDERS[builder](table, lengths) * 2).to_tensors())


UNBOUNDED = {
    "lengths": lambda table, lengths: JaggedTensor.from_lengths(table.flatten(0, 1)[:5], lengths).sum(),
    "offsets": lambda table, lengths: JaggedTensor(table.flatten(0, 1)[:5], starts_of(lengths)).sum(),
}
test_what_a_compiled_function_cannot_know = raising(
    {
        name: (
            lambda build=build: by_desugar(build)(torch.randn(3, 3, 2), torch.tensor(LENGTHS)),
            torch._dynamo.exc.TorchRuntimeError,
            "give max_length",
        )
        for name, build in UNBOUNDED.items()
    }
)
