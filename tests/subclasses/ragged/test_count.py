"""Rows with a count: packed batches train as exact ones, and spare rows reach no result and no gradient."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples._language_model import LanguageModel
from subclasses.ragged import JaggedTensor, weighted_loss
from tests.doors import by_desugar, eager
from tests.tables import giving, raising

# Functions that would compute spare rows.
UNCOUNTED = [
    lambda x: x[1:],
    lambda x: x[torch.tensor([0])],
    lambda x: x[:, torch.tensor([0])],
    lambda x: torch.cat([x, x]),
    lambda x: x.repeat_interleave(2, 0),
    lambda x: x.repeat_interleave(2, 1),
    lambda x: x.transpose(0, 1),
    lambda x: x.kthvalue(1, 1),
    lambda x: x.to_nested(),
    lambda x: F.conv1d(x.transpose(1, 2), torch.ones(1, 2, 1)),
    nn.GRU(2, 2, batch_first=True),
]

# ---- whole models ----------------------------------------------------------------------------------------------


def packed(rows):
    """Rows, and tokens and classes in spare rows that no table has."""
    x = JaggedTensor.pack(rows, tokens=64, rows=9, longest=32)
    x.values[sum(map(len, rows)) :] = 10**6
    return x


SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BATCHES = [[torch.randint(64, (n,)) for n in lengths] for lengths in ([9, 31, 2, 8], [2], [5, 0, 7])]
# Models, and their loss of tokens and classes.
MODELS = {
    "language": (lambda: LanguageModel(16, 2, 2, 32), lambda model, *rows: model(*rows)),
    "llama": (
        lambda: (lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, **HEADS)))(
            pytest.importorskip("transformers")
        ),
        lambda model, tokens, classes: model(input_ids=tokens, labels=classes, use_cache=False).loss,
    ),
}
OPTIMIZERS = {"SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), "AdamW": torch.optim.AdamW}


def train(model, loss_of, make_optimizer, batch_of, door=eager):
    """The losses, gradients and parameters of a step for each batch, and the compiled function."""
    model, found = copy.deepcopy(model), []
    optimizer, compiled = make_optimizer(model.parameters()), door(functools.partial(loss_of, model))
    for rows in BATCHES:
        found.append(compiled(batch_of(rows), batch_of([row.flip(0) for row in rows])))
        found[-1].backward()
        optimizer.step()
        found += [t.clone() for p in model.parameters() for t in (p.grad, p)]
        optimizer.zero_grad()
    return found, compiled


@pytest.mark.sweep(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_packed_batches_train_as_exact_ones(name, optimizer):
    """In one program for all batches of a budget."""
    make_model, loss_of = MODELS[name]
    given = make_model().double(), loss_of, OPTIMIZERS[optimizer]
    expected, _ = train(*given, JaggedTensor.from_tensors)
    for door in (eager, by_desugar):
        found, compiled = train(*given, packed, door)
        torch.testing.assert_close(found, expected)
        assert door is eager or len(compiled.programs) == 1


# ---- rows ------------------------------------------------------------------------------------------------------

ROWS = [torch.tensor([[1.0, 2.0]]).expand(n, 2) for n in (2, 0, 1)]
X = JaggedTensor.pack(ROWS, tokens=8, rows=6, longest=3)
NOTHING = JaggedTensor(torch.full((4, 2), float("nan")), torch.tensor([0, 4, 4]), count=torch.tensor(0))


WEIGHT = torch.ones(2, 2, requires_grad=True)

test_which_rows_exist = giving(
    {
        "capacity": (
            lambda: (tuple(X.shape), X.offsets.tolist(), int(X.count)),
            ((6, 3, 2), [0, 2, 2, 3, 6, 8, 8], 3),
        ),
        "no budget": (lambda: JaggedTensor.pack(ROWS, tokens=8).offsets.tolist(), [0, 2, 2, 3, 5, 7, 8]),
        "rows": (lambda: [len(row) for row in X.to_tensors()], [2, 0, 1]),
        "unbind": (lambda: [len(row) for row in X.unbind(0)], [2, 0, 1]),
        "lengths": (lambda: X.row_lengths().tolist(), [2, 0, 1]),
        "a row": (lambda: X[-1].tolist(), [[1.0, 2.0]]),
        "text": (lambda: str(X).count("tensor("), 3),
        "of each row": (lambda: X.sum(1).to_tensors()[0].tolist(), [[2.0, 4.0], [0.0, 0.0], [1.0, 2.0]]),
        "last of each row": (lambda: X[:, 1:].sum((1, 2)).mean().item(), 1.0),
        "tokens": (lambda: weighted_loss(X.sum(), X.mask().sum()).item(), 1.5 * 2),
        "mean over the batch": (lambda: X.mean().item(), 1.5),
        "padded": (lambda: X.to_padded().sum(1).mean().item(), 1.5),
        "copied": (lambda: copy.deepcopy(X).row_lengths().tolist(), [2, 0, 1]),
        "none": (
            lambda: (NOTHING.to_tensors(), NOTHING.sum().item(), str(NOTHING.mean().item())),
            ([], 0.0, "nan"),
        ),
        "no gradient": (
            lambda: torch.autograd.grad(F.linear(NOTHING, WEIGHT).sum(), WEIGHT)[0].tolist(),
            [[0.0, 0.0], [0.0, 0.0]],
        ),
    }
)
test_what_is_refused = raising(
    [
        (
            lambda: JaggedTensor.pack(ROWS, tokens=2),
            ValueError,
            "tokens=2 is exceeded by 1, got 3 tokens in 3 rows",
        ),
        (lambda: JaggedTensor.pack(ROWS, tokens=8, longest=1), ValueError, "longest=1 is exceeded by 1"),
        (
            lambda: JaggedTensor.pack(ROWS, tokens=8, rows=4),
            ValueError,
            "rows=4.*3 rows and 3 spare rows.*rows=6",
        ),
        (lambda: JaggedTensor.pack([], tokens=8), ValueError, "at least one row"),
        (
            lambda: JaggedTensor(X.values, X.offsets, count=torch.tensor(7)),
            ValueError,
            "from 0 to 6 rows, got 7",
        ),
        (
            lambda: JaggedTensor(X.values, X.offsets, count=torch.ones(1).long()),
            ValueError,
            r"shape \[\], .*\(1,\)",
        ),
        (lambda: X[3], IndexError, "3 rows"),
        (
            lambda: X + JaggedTensor(X.values, X.offsets, count=torch.tensor(2)),
            ValueError,
            "as many rows.*3 and 2",
        ),
        (lambda: X + JaggedTensor(X.values, X.offsets), "a count of both ragged tensors or of none"),
        *((lambda f=f: f(X), "with a count.*from_tensors") for f in UNCOUNTED),
    ]
)
