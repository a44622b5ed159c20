"""Making ragged tensors, converting them, and what is refused."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import desugar
from subclasses import DispatchError
from subclasses.ragged import JaggedTensor
from tests.subclasses.ragged.judge import LAYOUTS, WAYS, check_parts, make_batch

# ---- making one ------------------------------------------------------------------------------------------------


def rows_of(*lengths: int, requires_grad: bool = False) -> list[Tensor]:
    return [torch.randn(n, 4, dtype=torch.float64, requires_grad=requires_grad) for n in lengths]


def test_from_tensors():
    rows = rows_of(3, 0, 5, requires_grad=True)
    x = JaggedTensor.from_tensors(rows)
    assert (
        x.shape == (3, 5, 4) and x.stride() == (20, 4, 1) and x.is_contiguous() and x.dtype == torch.float64
    )
    assert x.row_lengths().tolist() == [3, 0, 5] and len(x) == 3
    torch.testing.assert_close(x.to_tensors(), rows)
    x.sum().backward()
    assert all((row.grad == 1).all() for row in rows)


def test_from_lengths_shares_the_values():
    values = torch.randn(6, 2)
    x = JaggedTensor.from_lengths(values, [1, 2, 3])
    assert (
        x.values.data_ptr() == values.data_ptr() and x.offsets.tolist() == [0, 1, 3, 6] and x.max_length == 3
    )
    assert JaggedTensor.from_lengths(values, torch.tensor([6, 0])).shape == (2, 6, 2)


def test_from_padded_and_back():
    padded = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    x = JaggedTensor.from_padded(padded, [3, 0, 5])
    torch.testing.assert_close(x.to_tensors(), [padded[0, :3], padded[1, :0], padded[2]])
    assert torch.autograd.gradcheck(
        lambda p: JaggedTensor.from_padded(p, [3, 0, 5]).to_dense(fill=2), [padded]
    )


def test_max_length_is_an_upper_bound():
    x = JaggedTensor(torch.randn(6, 2), torch.tensor([0, 2, 6]), max_length=9)
    assert x.shape == (2, 9, 2) and x.to_dense().shape == (2, 9, 2) and x.mask().sum() == 6
    assert JaggedTensor(x.values, x.offsets).shape == (2, 4, 2)


def test_no_rows_at_all():
    x = JaggedTensor(torch.randn(0, 4), torch.zeros(1, dtype=torch.int64))
    assert x.shape == (0, 0, 4) and x.to_tensors() == []
    assert (x * 2 + 1).shape == (0, 0, 4) and x.sum(1).shape == (0, 4) and x.sum().item() == 0
    assert x.to_dense().shape == (0, 0, 4) and F.linear(x, torch.randn(3, 4)).shape == (0, 0, 3)
    assert JaggedTensor.from_tensors([torch.randn(0, 4)] * 2).softmax(1).shape == (2, 0, 4)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: JaggedTensor([1.0], torch.tensor([0, 1])), TypeError, "JaggedTensor.values"),
        (lambda: JaggedTensor(torch.ones(2), [0, 2]), TypeError, "JaggedTensor.offsets"),
        (lambda: JaggedTensor(torch.ones(2), torch.tensor([0.0, 2])), ValueError, "expected dtype torch.int64"),
        (lambda: JaggedTensor(torch.ones(2), torch.tensor([0, 2], dtype=torch.int32)), ValueError, "torch.int64"),
        (lambda: JaggedTensor(torch.ones(2), torch.tensor(2)), ValueError, r"expected shape \[B \+ 1\]"),
        (lambda: JaggedTensor(torch.tensor(1.0), torch.tensor([0, 1])), ValueError, "got a scalar"),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 3, 2, 4])), ValueError, "increasing offsets"),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 5])), ValueError, "at most 4"),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 3])), ValueError, "Give lengths"),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([1, 4])), ValueError, "Give lengths"),
        (
            lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 2, 4]), lengths=torch.tensor([3, 1])),
            ValueError,
            r"\[2, 2\], got \[3, 1\]",
        ),
        (
            lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 4]), lengths=torch.tensor([3, 1])),
            ValueError,
            r"expected shape \[1\]",
        ),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 4]), ragged_dim=2), ValueError, "from 0 to 1"),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 4]), ragged_dim=True), ValueError, "ragged_dim"),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 4]), max_length=-1), ValueError, "non-negative"),
        (lambda: JaggedTensor.from_tensors([]), ValueError, "at least one row"),
        (lambda: JaggedTensor.from_tensors(torch.ones(2, 3)), TypeError, "a list of tensors"),
        (lambda: JaggedTensor.from_tensors([torch.ones(2), 3]), TypeError, "a list of tensors"),
        (lambda: JaggedTensor.from_tensors([torch.ones(2, 3), torch.ones(2, 4)]), ValueError, r"row 1 \(2, 4\)"),
        (lambda: JaggedTensor.from_tensors([torch.ones(2), torch.ones(2).double()]), ValueError, "float64"),
        (lambda: JaggedTensor.from_lengths(torch.ones(4), [2, 3]), ValueError, "add up to 5"),
        (lambda: JaggedTensor.from_lengths(torch.ones(4), [5, -1]), ValueError, "at least 0"),
        (lambda: JaggedTensor.from_padded(torch.ones(2, 3), [4, 1]), ValueError, "from 0 to 3"),
        (lambda: JaggedTensor.from_padded(torch.ones(2, 3), [1]), ValueError, "lengths"),
        (lambda: JaggedTensor.from_nested(torch.ones(2)), TypeError, "layout=torch.jagged"),
    ],
)  # fmt: skip
def test_bad_input(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_offsets_elsewhere_are_refused():
    with pytest.raises(ValueError, match="offsets: expected device"):
        JaggedTensor(torch.ones(2), torch.tensor([0, 2], device="meta"), max_length=2)


# ---- converting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_dense_and_mask(layout):
    batch = make_batch(layout)
    x = batch.x
    dense, mask = x.to_dense(fill=-1.0), x.mask()
    assert dense.shape == x.shape and mask.shape == (4, 5)
    at = dense.movedim(batch.ragged_dim, 1)
    for i, row in enumerate(batch.rows):
        n = row.shape[batch.ragged_dim - 1]
        torch.testing.assert_close(at[i, :n], row.movedim(batch.ragged_dim - 1, 0))
        assert (at[i, n:] == -1).all() and mask[i].sum() == n
    check_parts(batch, x.like_dense(dense).to_tensors(), batch.rows)


def test_like_dense_refuses_another_size():
    with pytest.raises(ValueError, match=r"size \(4, 5, 4\)"):
        make_batch().x.like_dense(torch.ones(4, 5, 3))


@pytest.mark.parametrize("layout", ["back to back", "holes", "ragged dim 2"])
def test_nested_and_back_without_a_copy(layout):
    batch = make_batch(layout)
    nested = batch.x.to_nested()
    assert nested.is_nested and nested.layout == torch.jagged
    assert nested.values().data_ptr() == batch.leaf.data_ptr()
    back = JaggedTensor.from_nested(nested)
    assert back.values.data_ptr() == batch.leaf.data_ptr() and back.ragged_dim == batch.ragged_dim
    check_parts(batch, (back * 2).to_tensors(), [row * 2 for row in batch.rows])


def test_merged_dimensions_have_no_rows():
    merged = make_batch().x.flatten(0, 1)
    with pytest.raises(DispatchError, match="unflatten"):
        merged.to_nested()


# ---- being a tensor --------------------------------------------------------------------------------------------


def test_printing_shows_rows():
    x = JaggedTensor.from_tensors([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    assert repr(x) == "JaggedTensor([\n  tensor([1., 2.]),\n  tensor([3.]),\n], size=(2, 2))"
    assert "grad_fn" in repr(JaggedTensor.from_tensors(rows_of(1, requires_grad=True)))
    assert "ragged_dim=0" in repr(x.flatten(0, 1))


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), torch.clone]
)
def test_copies(duplicate):
    x = make_batch("holes").x.detach()
    y = duplicate(x)
    assert type(y) is JaggedTensor and y.shape == x.shape
    torch.testing.assert_close(y.to_tensors(), x.to_tensors())
    torch.testing.assert_close((y + x).to_tensors(), [row * 2 for row in x.to_tensors()])


def test_likenesses_are_ragged():
    x = make_batch("holes").x.detach()
    for like in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.randn_like):
        assert type(like(x)) is JaggedTensor and like(x).offsets is x.offsets
    assert torch.zeros_like(x, dtype=torch.int64).dtype == torch.int64
    assert torch.full_like(x, 3.0).sum() == 3 * 9 * 4
    assert type(x.new_zeros(3)) is Tensor


def test_a_leaf_that_is_ragged():
    x = make_batch().x.detach().requires_grad_()
    (x * x).sum().backward()
    assert type(x.grad) is JaggedTensor
    torch.testing.assert_close(x.grad.values, 2 * x.values)
    optimizer = torch.optim.SGD([x], lr=0.5)
    optimizer.step()
    assert (x.values == 0).all()


def test_a_dense_cotangent():
    batch, dense = make_batch(), torch.randn(4, 5, 4, dtype=torch.float64)
    (batch.x * 3).backward(dense)
    torch.testing.assert_close(
        batch.leaf.grad, torch.cat([dense[i, : len(r)] * 3 for i, r in enumerate(batch.rows)])
    )


def test_second_derivatives():
    offsets = torch.tensor([0, 2, 2, 5])
    shapes = [(5, 4), (4, 4), (3, 1, 4)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def run(values, weight, bias):
        x = JaggedTensor(values, offsets, max_length=3)
        y = (F.linear(x, weight) + bias).softmax(-1) * x
        return y.sum(1), y.mean(), y.unwrap("values")

    assert torch.autograd.gradcheck(run, inputs) and torch.autograd.gradgradcheck(run, inputs)


def test_autocast_and_inference_mode():
    batch, layer = make_batch(dtype=torch.float32), nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(batch.x).dtype == (batch.x @ layer.weight).dtype == torch.bfloat16
    with torch.inference_mode():
        x = JaggedTensor(torch.randn(9, 4), torch.tensor([0, 3, 3, 8, 9]))
        got = layer(x).transpose(1, 2).mT.reshape(-1, 4).unflatten(0, (4, 5))[1:]
        torch.testing.assert_close(got.to_tensors(), [layer(row) for row in x.to_tensors()[1:]])


def test_threads():
    batch, failures = make_batch(), []

    def work():
        expected = [F.gelu(row * 2).sum(0) for row in batch.rows]
        for _ in range(20):
            got = list(F.gelu(batch.x * 2).sum(1))
            failures.extend(1 for a, b in zip(got, expected, strict=True) if not torch.allclose(a, b))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_as_a_collate_function():
    data = [torch.arange(n) for n in (3, 1, 4, 1)]
    batches = list(DataLoader(data, batch_size=2, collate_fn=JaggedTensor.from_tensors))
    assert [b.row_lengths().tolist() for b in batches] == [[3, 1], [4, 1]]


# ---- attention -------------------------------------------------------------------------------------------------


def split(x, i):
    return x.unflatten(-1, (3, 2, -1)).unbind(-3)[i].transpose(-2, -3)


@pytest.mark.sweep(18)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("layout", ["back to back", "holes"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_attention(options, layout, way):
    def run(x):
        q, k, v = (split(x, i) for i in range(3))
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(-2, -3).flatten(-2)

    batch = make_batch(layout, entry=(24,))
    got = way(run)(batch.x)
    check_parts(
        batch, got.to_tensors(), [run(row[None])[0] if len(row) else row[:, :8] for row in batch.rows]
    )


def test_attention_to_rows_of_other_lengths():
    a, b = make_batch(lengths=[3, 2, 4], entry=(2, 8)), make_batch("holes", lengths=[5, 1, 4], entry=(2, 8))
    q, kv = a.x.transpose(1, 2), b.x.transpose(1, 2)
    got = F.scaled_dot_product_attention(q, kv, kv * 2)
    expected = [
        F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (r, s, s * 2)))[0]
        for r, s in zip(a.rows, b.rows, strict=True)
    ]
    check_parts(a, got.to_tensors(), expected)


MASKS = {
    "bool": lambda: torch.rand(5, 5) > 0.3,
    "added": lambda: torch.randn(5, 5, dtype=torch.float64, requires_grad=True),
    "one for each row": lambda: torch.randn(4, 1, 5, 5, dtype=torch.float64, requires_grad=True),
    "heads": lambda: torch.randn(2, 1, 5, dtype=torch.float64, requires_grad=True),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_with_a_mask(mask, way):
    bias = MASKS[mask]()
    bias = bias | torch.eye(5, dtype=torch.bool) if bias.dtype == torch.bool else bias
    batch = make_batch("holes", entry=(24,))

    def run(x, m):
        q, k, v = (split(x, i) for i in range(3))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m).transpose(-2, -3).flatten(-2)

    def of_row(i, n):
        return bias.expand(4, 2, 5, 5)[i, None, :, :n, :n]

    expected = [run(r[None], of_row(i, len(r)))[0] if len(r) else r[:, :8] for i, r in enumerate(batch.rows)]
    parameters = [bias] if bias.requires_grad else []
    check_parts(batch, way(run)(batch.x, bias).to_tensors(), expected, parameters)


def test_attention_by_padded_tables_to_rows_without_keys():
    a, b = make_batch(lengths=[3, 2], entry=(8,)), make_batch("holes", lengths=[0, 4], entry=(8,))
    q, kv = a.x.unsqueeze(1), b.x.unsqueeze(1)
    open_mask = torch.ones(3, 4, dtype=torch.bool)
    got = F.scaled_dot_product_attention(q, kv, kv, attn_mask=open_mask)
    check_parts(a, got.to_tensors(), F.scaled_dot_product_attention(q, kv, kv).to_tensors())
    assert (got[0] == 0).all()


def test_attention_with_dropout():
    batch = make_batch(lengths=[300, 200], entry=(2, 16))
    x = batch.x.detach().transpose(1, 2)
    ones = torch.ones_like(x)
    got = F.scaled_dot_product_attention(x, x, ones, dropout_p=0.5)
    assert abs(got.mean() - 1) < 0.05 and got.std() > 0.01


def test_grouped_heads():
    batch = make_batch(entry=(4, 8), lengths=[3, 2])
    x = batch.x.transpose(1, 2)
    got = F.scaled_dot_product_attention(x, x[:, :2], x[:, 2:], enable_gqa=True)
    expected = [
        F.scaled_dot_product_attention(r[None], r[None, :2], r[None, 2:], enable_gqa=True)[0]
        for r in (row.transpose(0, 1) for row in batch.rows)
    ]
    check_parts(batch, got.to_tensors(), expected)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.scaled_dot_product_attention(x.mT, x.mT, x.mT),
        lambda x: F.scaled_dot_product_attention(x, x.to_dense(), x),
    ],
)
def test_attention_of_what_does_not_fit(f):
    with pytest.raises(DispatchError, match="scaled_dot_product_attention"):
        f(make_batch(entry=(4,)).x)


# ---- a model, for ever-new lengths -----------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(9, 16), nn.Embedding(20, 16)
        self.norm, self.qkv, self.head = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 9)

    def forward(self, tokens, targets):
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(F.gelu(x)).flatten(0, 1), targets.flatten(0, 1))

    def loop(self, rows):
        losses = []
        for row in rows:
            tokens = row[None]
            x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            losses.append(
                F.cross_entropy(self.head(F.gelu(x)).flatten(0, 1), (row + 1) % 9, reduction="none")
            )
        return torch.cat(losses).mean()


BATCHES = [[3, 7, 5], [2, 9], [4, 4, 4, 4], [11, 2, 0, 5, 6], [19, 18]]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "desugar"])
def test_one_program_serves_all_lengths(backend):
    model = Model().double()
    compiled = model
    programs: list[object] = []
    if backend == "desugar":
        compiled = desugar.compile(model, backend="eager")
    elif backend == "aot_eager":
        inner = torch._dynamo.lookup_backend("aot_eager")
        compiled = torch.compile(model, fullgraph=True, backend=lambda *a: [inner(*a), programs.append(a)][0])
    for lengths in BATCHES:
        rows = [torch.randint(0, 9, (n,)) for n in lengths]
        tokens = JaggedTensor.from_tensors(rows)
        targets = JaggedTensor((tokens.values + 1) % 9, tokens.offsets, max_length=tokens.shape[1])
        losses = compiled(tokens, targets), model.loop(rows)
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, list(model.parameters())) for loss in losses))
    if compiled is not model:
        assert len(compiled.programs if backend == "desugar" else programs) == 1
