"""What is refused, and what the errors say."""

from __future__ import annotations

import torch

from subclasses import DispatchError
from subclasses.keyed import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor
from tests.doors import by_desugar
from tests.subclasses.keyed.batches import batch
from tests.tables import raising

V, L = torch.arange(6), torch.tensor([1, 2, 0, 3])

WRONG = {
    "one string": (lambda: KeyedJaggedTensor("ab", V, L), "expected a sequence of strings, got 'ab'"),
    "no sequence": (lambda: KeyedJaggedTensor(3, V, L), r"keys: expected a sequence of strings, got 3"),
    "no keys": (lambda: KeyedJaggedTensor([], V, L), "expected at least one key"),
    "a key twice": (lambda: KeyedJaggedTensor(["a", "a"], V, L), "distinct keys, got 'a' more than once"),
    "a list": (lambda: KeyedJaggedTensor(["a"], [1], L), "values: expected a Tensor, got"),
    "a scalar": (lambda: KeyedJaggedTensor(["a"], torch.tensor(1), L), "got a scalar"),
    "lengths of a fraction": (lambda: KeyedJaggedTensor(["a", "b", "c"], V, L), r"shape \[K \* B\]"),
    "float lengths": (lambda: KeyedJaggedTensor(["a"], V, L.float()), "expected integers of shape"),
    "truth values as lengths": (lambda: KeyedJaggedTensor(["a"], V[:2], L[:2] > 0), "got torch.bool"),
    "a sum": (lambda: KeyedJaggedTensor(["a"], V[:5], L), "expected a sum of 5, .* got 6"),
    "negative": (lambda: KeyedJaggedTensor(["a"], V, torch.tensor([7, -1])), "none below 0, got -1"),
    "weights' shape": (
        lambda: KeyedJaggedTensor(["a"], V, L, weights=torch.ones(5)),
        "each of the 6 entries",
    ),
    "weights' dtype": (lambda: KeyedJaggedTensor(["a"], V, L, weights=V), "expected floating point weights"),
    "a device": (lambda: KeyedJaggedTensor(["a"], V, L.to("meta")), "lengths: expected device cpu"),
    "a key that is not there": (lambda: batch([1, 2])["c"], "no key 'c'; its keys are a, b"),
    "no weights": (lambda: batch([1, 2]).feature_weights("a"), "has no weights"),
    "an index": (lambda: batch([1, 2])[0], "expected a key, got 0"),
    "an op": (lambda: batch([1, 2]) * 2, r"work on a feature, which kjt\[key\] returns"),
    "split": (lambda: batch([1, 2]).split([1, 2]), r"add up to 2, got \[1, 2\]"),
    "split by size": (lambda: batch([1, 2]).split(1), "the number of keys of each part"),
    "split by torch": (lambda: torch.split(batch([1, 2]), 1), "the number of keys of each part"),
    "split of rows": (lambda: torch.split(batch([1, 2]), [1, 1], 1), "only dim 0, that of the keys"),
    "split by fractions": (lambda: batch([1, 2]).split([1.0, 1.0]), r"such as \[2, 1\], got \[1.0, 1.0\]"),
    "permute by a string": (lambda: batch([1, 2]).permute("ab"), "keys or of indices of keys, got 'ab'"),
    "permute by a fraction": (lambda: batch([1, 2]).permute([1.5]), r"indices of keys, got \[1.5\]"),
    "a place that is not there": (lambda: batch([1, 2]).permute([2]), "indices below 2, .* got 2"),
    "permute twice": (lambda: batch([1, 2]).permute([0, 0]), "distinct keys, got 'a'"),
    "cat of others": (lambda: KeyedJaggedTensor.cat([V]), "expected KeyedJaggedTensors, got a Tensor"),
    "cat of none": (lambda: KeyedJaggedTensor.cat([]), "got none"),
    "cat of batch sizes": (
        lambda: KeyedJaggedTensor.cat([batch([1, 2]), batch([1, 2], "c")]),
        "got batch sizes 1, 2",
    ),
    "cat of one weighted": (
        lambda: KeyedJaggedTensor.cat([batch([1, 2]), batch([1], "c", weighted=True)]),
        "with weights or none",
    ),
    "cat of the same keys": (lambda: torch.cat([batch([1, 2])] * 2), "distinct keys, got a, b, a, b"),
    "cat along rows": (lambda: torch.cat([batch([1, 2]), batch([1], "c")], 1), "along dim 0, got dim=1"),
    "from no dict": (lambda: KeyedJaggedTensor.from_jagged([V]), "expected a dict from keys"),
    "from tensors": (lambda: KeyedJaggedTensor.from_jagged({"a": V}), "expected a JaggedTensor for 'a'"),
    "from other entries": (
        lambda: KeyedJaggedTensor.from_jagged(
            {"a": JaggedTensor.from_tensors([V]), "b": JaggedTensor.from_tensors([V.float()])}
        ),
        "got 1 rows of torch.float32.* for 'b' and 1 rows of torch.int64",
    ),
    "other values": (lambda: batch([1, 2]).with_values(torch.ones(2)), "expected 3 entries, got 2"),
}


ENTRIES = batch([1, 2, 0, 3])
ONES = {key: ENTRIES[key].with_values(torch.ones(6)) for key in ENTRIES.keys}
GAPS = JaggedTensor(V, torch.tensor([0, 3, 6]), lengths=torch.tensor([2, 3]))


def from_jagged(features=None, **weights):
    """A batch of other features, or of the same with these weights."""
    given = {"weights": weights} if weights else {}
    return lambda: KeyedJaggedTensor.from_jagged(features or ENTRIES.to_dict(), **given)


WRONG |= {
    "gaps": (from_jagged({"a": GAPS}), "rows back to back, got some with gaps"),
    "weights of one key": (from_jagged(b=ONES["b"]), r"expected weights for \['a', 'b'\], got \['b'\]"),
    "weights of other rows": (
        from_jagged(a=ONES["b"], b=ONES["a"]),
        "rows of other lengths, or that lie elsewhere",
    ),
    "weights of two columns": (
        from_jagged(**{key: ENTRIES.with_values(torch.ones(6, 2))[key] for key in "ab"}),
        "make it by feature",
    ),
}
ERRORS = TypeError, ValueError, LookupError, DispatchError
test_refused = raising({name: (call, ERRORS, text) for name, (call, text) in WRONG.items()})


def read_in_a_graph(function, *args):
    """Calls a compiled function, with Dynamo's own error around ours."""
    return lambda: by_desugar(function)(*args)


test_what_cannot_be_read_in_a_graph = raising(
    {
        "the longest row": (
            read_in_a_graph(lambda v, n: KeyedJaggedTensor(["a"], v, n)["a"].sum(1), V, L),
            Exception,
            "give max_length=, or build it outside",
        ),
        "the lengths": (
            read_in_a_graph(lambda x: x.compact().values, ENTRIES),
            "compact reads the lengths",
        ),
    }
)


def test_permute_takes_keys_and_places_of_any_iterable():
    x = batch([1, 2])
    assert x.permute({"b": 1}.keys()).keys == ("b",)
    assert x.permute((-1, 0)).keys == ("b", "a")
