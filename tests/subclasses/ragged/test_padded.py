"""Padded tensors: making, converting, refusing, and that no step reads a length."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F

import desugar
from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.padded_judge import LENGTHS, PLACES, Table, check_parts, make_table
from tests.subclasses.ragged.serving import Model, NoReading

# ---- making and converting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "width"), [({}, 5), ({"multiple": 4}, 8), ({"buckets": [16, 4, 6]}, 6), ({"multiple": 5}, 5)]
)
def test_from_tensors(options, width):
    rows = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in LENGTHS]
    x = PaddedTensor.from_tensors(rows, **options)
    assert x.shape == (4, width, 2) and x.row_lengths().tolist() == LENGTHS
    torch.testing.assert_close(x.to_tensors(), rows)
    weights = torch.randn(4, width, 2, dtype=torch.float64)
    grads = torch.autograd.grad((x.to_dense() * weights).sum(), rows)
    torch.testing.assert_close(grads, tuple(w[:n] for w, n in zip(weights, LENGTHS, strict=True)))


@pytest.mark.parametrize(("dim", "batch"), [(0, 1), (1, 0), (-1, 0)])
def test_pad(dim, batch):
    plain = torch.randn(3, 5, 6, requires_grad=True)
    x = PaddedTensor.pad(plain, dim=dim, multiple=4)
    place = dim % 3
    assert x.shape[place] == -(-plain.shape[dim] // 4) * 4 and x.batch_dim == batch and x.ragged_dim == place
    assert x.row_lengths().tolist() == [plain.shape[dim]] * plain.shape[batch]
    torch.testing.assert_close(torch.stack(x.to_tensors(), batch), plain)
    (grad,) = torch.autograd.grad(x.sum(), plain)
    assert (grad == 1).all()


@pytest.mark.parametrize("places", PLACES)
def test_round_trips(places):
    table = make_table(places)
    check_parts(table, table.x, table.rows)
    check_parts(table, table.x.to_padded(multiple=8), table.rows)
    assert table.x.to_padded(multiple=8).shape[table.ragged_dim] == 8
    check_parts(table, table.x.to_jagged().to_tensors(), table.rows)
    check_parts(table, table.x.to_jagged().to_padded(multiple=16), table.rows)
    mask = table.x.mask()
    assert mask.shape == (4, 7) and mask.sum(1).tolist() == LENGTHS
    dense = table.x.to_dense(fill=9.0)
    assert not dense.isnan().any() and int((dense == 9).sum()) == int((~mask).sum()) * 4
    assert torch.autograd.gradcheck(lambda t: Table(t, table.lengths, table.batch_dim, table.ragged_dim).x.to_dense(),
                                    [torch.nan_to_num(table.leaf.detach()).requires_grad_()])  # fmt: skip


def test_copies_keep_the_lengths():
    x = make_table().x
    for y in (
        x.detach(),
        x.clone(),
        torch.zeros_like(x),
        x.to(torch.float32),
        x.float().double(),
        x.contiguous(),
    ):
        assert y.lengths is x.lengths and y.shape == x.shape
    other = copy.deepcopy(x.detach())
    torch.testing.assert_close(other.to_tensors(), x.detach().to_tensors())


def test_it_prints_rows():
    x = PaddedTensor.from_tensors([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    assert repr(x) == "PaddedTensor([\n  tensor([1., 2.]),\n  tensor([3.]),\n], size=(2, 2))"


def test_no_rows_and_no_entries():
    empty = PaddedTensor(torch.ones(0, 4, 2), torch.zeros(0, dtype=torch.int64))
    assert (empty * 2).sum() == 0 and empty.sum(1).shape == (0, 2) and empty.to_tensors() == []
    nothing = PaddedTensor(torch.full((2, 0, 3), 1.0), torch.zeros(2, dtype=torch.int64))
    assert nothing.sum() == 0 and nothing.mean().isnan() and nothing.softmax(1).shape == (2, 0, 3)
    assert PaddedTensor.from_tensors([torch.ones(0)], multiple=8).shape == (1, 8)


def test_a_leaf_has_a_ragged_gradient_and_an_optimizer_steps_it():
    x = torch.nn.Parameter(make_table().x.detach())
    before = [row.clone() for row in x.detach().to_tensors()]
    (x * x).sum().backward()
    assert isinstance(x.grad, PaddedTensor)
    torch.optim.SGD([x], 0.25).step()
    torch.testing.assert_close(x.detach().to_tensors(), [row / 2 for row in before])


def test_it_is_saved_and_loaded(tmp_path):
    x = make_table("[T, B]").x.detach()
    torch.save(x, tmp_path / "x.pt")
    y = torch.load(tmp_path / "x.pt", weights_only=True)
    assert y.shape == x.shape and (y.batch_dim, y.ragged_dim) == (1, 0)
    torch.testing.assert_close(y.to_tensors(), x.to_tensors())


def test_second_derivatives():
    table = make_table()
    w, b = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 1))

    def run(w, b):
        return F.layer_norm(F.linear((table.x.detach() * b).tanh(), w).softmax(1), (3,)).square().mean()

    assert torch.autograd.gradcheck(run, [w, b]) and torch.autograd.gradgradcheck(run, [w, b])


def test_a_dense_cotangent_counts_where_there_are_entries():
    table = make_table()
    table.x.tanh().backward(torch.ones_like(table.leaf))
    for grad, row in zip(table.slices(table.leaf.grad), table.rows, strict=True):
        torch.testing.assert_close(grad, 1 - row.tanh() ** 2)
    assert (table.leaf.grad[1] == 0).all()


# ---- refusing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t, n: PaddedTensor(t, n[:1]), r"expected shape \[2\]"),
        (lambda t, n: PaddedTensor(t, n, ragged_dim=0), "both 0"),
        (lambda t, n: PaddedTensor(t, n, ragged_dim=3), "ragged_dim"),
        (lambda t, n: PaddedTensor(t, n, batch_dim="x"), "batch_dim"),
        (lambda t, n: PaddedTensor(t, n + 9).to_tensors(), "from 0 to 4"),
        (lambda t, n: PaddedTensor.from_tensors([]), "at least one row"),
        (lambda t, n: PaddedTensor.from_tensors([t, t[:, :1]]), "row 1"),
        (lambda t, n: PaddedTensor.from_tensors([t], multiple=2, buckets=[2]), "both"),
        (lambda t, n: PaddedTensor.from_tensors([t], buckets=[1]), "none of"),
        (lambda t, n: PaddedTensor.from_tensors([t], multiple=0), "at least 1"),
        (lambda t, n: PaddedTensor.pad(t[0, 0], dim=0), "two dimensions"),
        (lambda t, n: PaddedTensor.pad(t, dim=3), "expected a dimension"),
    ],
)
def test_wrong_parts(make, words):
    with pytest.raises(ValueError, match=words):
        make(torch.ones(2, 4, 3), torch.tensor([1, 2]))


def test_wrong_types():
    with pytest.raises(ValueError, match=r"lengths: expected dtype torch\.int64"):
        PaddedTensor(torch.ones(2, 4), torch.tensor([1, 2], dtype=torch.int32))
    with pytest.raises(TypeError, match="lengths"):
        PaddedTensor(torch.ones(2, 4), [1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="list of tensors"):
        PaddedTensor.from_tensors(torch.ones(2, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.unsqueeze(-1) @ x.unsqueeze(1).expand(-1, 1, -1, -1),
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda x: x.flatten(0, 2),
        lambda x: x.flatten(0, 1).sort(0),
        lambda x: x.flatten(0, 1).argmax(0),
        lambda x: x.unfold(0, 2, 1),
        lambda x: torch.cat([x, x[..., :2]], 1),
        lambda x: torch.cat([x, x.transpose(0, 1)], 0),
        lambda x: torch.cat([x, x[:2]], 1),
        lambda x: x.expand(4, 9, 4),
        lambda x: torch.ones(4, 7, 4, dtype=torch.float64).add_(x.detach()),
        lambda x: F.layer_norm(x.transpose(1, 2), (7,)),
        lambda x: F.linear(x.mT, torch.ones(2, 7, dtype=torch.float64)),
        lambda x: F.cross_entropy(x, torch.zeros(4, 7, dtype=torch.int64)),
        lambda x: F.embedding(x.detach().long(), torch.ones(3, 3), max_norm=1.0),
        lambda x: torch.ones(2, 4, 7, dtype=torch.float64) @ x,
        lambda x: x.argmax(),
    ],
)
def test_what_has_no_rule_is_refused(op):
    with pytest.raises((DispatchError, ValueError), match=r"Padded|lengths"):
        op(make_table().x)


def test_an_op_without_a_rule_says_what_to_do_instead():
    with pytest.raises(DispatchError, match=r"no rule for aten\.mode.*use x\.to_dense\(fill\)"):
        make_table().x.mode()


def test_equal():
    x = make_table().x
    assert torch.equal(x, x.clone()) and not torch.equal(x, x + 1)
    assert not torch.equal(x, make_table(lengths=[3, 0, 5, 2]).x)
    with pytest.raises(DispatchError, match="expected two PaddedTensors"):
        torch.equal(x, x.to_dense())


def test_other_lengths_are_refused_by_name():
    a, b = make_table(lengths=[3, 1]).x, make_table(lengths=[2, 2]).x
    with pytest.raises(ValueError, match=r"\[3, 1\] and \[2, 2\]"):
        a + b
    with pytest.raises(ValueError, match="2 rows and one of 3 rows"):
        a + make_table(lengths=[2, 1, 1]).x
    with pytest.raises((RuntimeError, ValueError), match="lengths"):
        desugar.compile(lambda x, y: x + y, backend="eager")(a, b)


def test_the_two_layouts_do_not_mix():
    x = make_table().x
    with pytest.raises((DispatchError, TypeError, ValueError), match="Jagged"):
        x + x.to_jagged()


# ---- buckets, and no length is read ----------------------------------------------------------------------------


def test_the_mode_would_notice():
    with NoReading(), pytest.raises(AssertionError, match="reads data"):
        torch.ones(2)[0].item()


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).transpose(1, 2), targets)


def batch_of(lengths, multiple=16):
    """Tokens and targets whose padding is no token."""
    pair = []
    for _ in range(2):
        x = PaddedTensor.from_tensors([torch.randint(20, (n,)) for n in lengths], multiple=multiple)
        pair.append(x.with_padded(x.to_dense(fill=10**6)))
    tokens, targets = pair
    return tokens, tokens.with_padded(targets.padded)


def test_a_training_step_reads_nothing_and_is_that_of_the_rows():
    torch.manual_seed(0)
    model = Model().double()
    tokens, targets = batch_of([5, 3, 9])
    with NoReading():
        loss = loss_of(model, tokens, targets)
        loss.backward()
    got = [p.grad for p in model.parameters()]
    model.zero_grad()
    rows = [
        (F.cross_entropy(model(row[None])[0], target, reduction="sum"), len(row))
        for row, target in zip(tokens.to_tensors(), targets.to_tensors(), strict=True)
    ]
    expected = sum(part for part, _ in rows) / sum(n for _, n in rows)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(got, [p.grad for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["desugar", "stock"])
def test_a_compiled_training_step(way):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model().double()
    step = functools.partial(loss_of, model)
    stock = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    compile_step = stock if way == "stock" else functools.partial(desugar.compile, backend="eager")
    compiled = compile_step(lambda a, b: step(a, b), dynamic=False)
    for lengths in ([5, 3, 9], [16, 1, 2], [0, 4, 4]):
        batch = batch_of(lengths)
        losses = step(*batch), compiled(*batch)
        torch.testing.assert_close(losses[1], losses[0])
        expected, got = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
        torch.testing.assert_close(got, expected)
    assert way == "stock" or len(compiled.programs) == 1


def test_jagged_and_padded_agree():
    model = Model().double()
    tokens, targets = batch_of([5, 3, 9])
    jagged = JaggedTensor.from_tensors(tokens.to_tensors()), JaggedTensor.from_tensors(targets.to_tensors())
    torch.testing.assert_close(loss_of(model, *jagged), loss_of(model, tokens, targets))
