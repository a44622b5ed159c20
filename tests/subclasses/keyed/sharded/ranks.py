"""Batches of each rank, and the results of one process for all batches together."""

import torch
from torch import nn

from subclasses.keyed import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from subclasses.keyed.sharded import RowWise, ShardingPlan, TableWise

SIZES = {"a": (7, 3), "b": (10, 3), "c": (5, 2), "e": (1, 3)}
KEYS = ["a", "b", "c", "d", "e"]  # d has the table of a; e has a table of one row

PLANS = {
    "rank 0": dict.fromkeys("abce", TableWise(0)),
    "rank 1": dict.fromkeys("abce", TableWise(1)),
    "rows": dict.fromkeys("abce", RowWise()),
    "both": {"a": TableWise(1), "b": RowWise(), "c": TableWise(0), "e": RowWise()},
}

# The lengths of the rows of each key, for each rank.
LENGTHS = {
    "rows of all lengths": ([2, 0, 1, 3, 1, 0, 0, 4, 2, 1], [1, 1, 2, 0, 5]),
    "no ids on one rank": ([0] * 10, [2, 1, 3, 1, 2, 4, 0, 1, 1, 1]),
    "no ids": ([0] * 5, [0] * 15),
    "no rows on one rank": ([3, 1, 2, 1, 2], []),
    "one row": ([1] * 5, [2] * 5),
}

# ---- collections and batches -------------------------------------------------------------------------------


def make_collection(mode, seed=0, **options):
    """Tables with a pooling mode, or without pooling."""
    torch.manual_seed(seed)
    pooled = mode != "none"
    kind, table = (EmbeddingBagCollection, nn.EmbeddingBag) if pooled else (EmbeddingCollection, nn.Embedding)
    options |= {"mode": mode} if pooled else {}
    tables = {key: table(*size, **options) for key, size in SIZES.items()}
    return kind({key: tables["a" if key == "d" else key] for key in KEYS})


def make_plan(name):
    return ShardingPlan(PLANS[name])


def make_batch(lengths, *, weighted=False, dtype=torch.int64, seed=0):
    """Ids with duplicates, in tables of different sizes; weights require grad."""
    gen = torch.Generator().manual_seed(seed + sum(lengths))
    counts = torch.tensor(lengths, dtype=torch.int64)
    totals = counts.view(len(KEYS), len(lengths) // len(KEYS)).sum(1).tolist()
    rows = [SIZES["a" if key == "d" else key][0] for key in KEYS]
    ids = [torch.randint(0, n, (total,), generator=gen) for n, total in zip(rows, totals, strict=True)]
    weights = torch.rand(len(torch.cat(ids)), generator=gen).requires_grad_() if weighted else None
    batch = KeyedJaggedTensor(KEYS, torch.cat(ids).to(dtype), counts, weights=weights)
    batch.leaf = weights  # which gets the gradient
    return batch


def batches(name, **options):
    """One batch for each rank."""
    return [make_batch(lengths, seed=rank, **options) for rank, lengths in enumerate(LENGTHS[name])]


# ---- comparisons -------------------------------------------------------------------------------------------


def loss_of(found, rank):
    """A loss with another gradient for each key and rank."""
    values = [f if type(f) is torch.Tensor else f.sum(1) for f in found.values()]
    return sum((v * v).sum() * (k + 1) * (rank + 1) for k, v in enumerate(values))


def join(parts):
    """The rows of all ranks as one batch."""
    keys = parts[0].keys
    ends = [part.offsets[:, [0, -1]].tolist() for part in parts]

    def of_all(per_entry):
        return torch.cat(
            [
                per_entry(p)[slice(*end[k])]
                for k in range(len(keys))
                for p, end in zip(parts, ends, strict=True)
            ]
        )

    weights = None if parts[0].weights is None else of_all(lambda part: part.weights)
    lengths = torch.cat([part.lengths.view(len(keys), part.batch_size) for part in parts], 1)
    return KeyedJaggedTensor(
        keys, of_all(lambda part: part.values.long()), lengths.flatten(), weights=weights
    )


def joint_loss(module, parts):
    """The loss that one process computes for the rows of all ranks as one batch."""
    found = {key: f if type(f) is torch.Tensor else f.sum(1) for key, f in module(join(parts)).items()}
    sizes = [part.batch_size for part in parts]
    by_rank = zip(*(f.split(sizes) for f in found.values()), strict=True)
    return sum(loss_of(dict(zip(found, rows, strict=True)), rank) for rank, rows in enumerate(by_rank))


def assert_same_results(got, expected, exact):
    assert list(got) == list(expected)
    for key, want in expected.items():
        found = got[key]
        assert type(found) is type(want) and found.shape == want.shape and found.dtype == want.dtype
        if type(want) is not torch.Tensor:
            assert torch.equal(found.offsets, want.offsets) and found.max_length == want.max_length
            found, want = found.values, want.values
        torch.testing.assert_close(found, want, **({"rtol": 0, "atol": 0} if exact else {}))


def assert_same_rows(sharded, whole, attribute=lambda weight: weight):
    """Compares the rows of this rank with the same rows of the whole tables, or of their gradients."""
    for key, table in sharded.tables.items():
        got, want = attribute(table.weight), attribute(whole.tables[key].weight)
        if want is None or got is None:  # of a key that is not looked up, or without rows on this rank
            assert got is None and (want is None or table.start == table.stop)
            continue
        assert got.is_sparse is want.is_sparse
        got, want = (t.to_dense() if t.is_sparse else t for t in (got.local, want))
        torch.testing.assert_close(got, want[table.start : table.stop])
