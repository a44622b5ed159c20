"""``KeyedJaggedTensor``: several jagged features of one batch, by key.

The rows of a key are contiguous in ``values``, which all keys share. ``offsets [K, B + 1]`` locates them: row b of key
k is ``values[offsets[k, b]:offsets[k, b + 1]]``. Selecting a feature, or permuting or splitting the keys, only changes
the offsets: no values are copied, no data is read, and no size in a graph depends on the lengths of a key. Some entries
of ``values`` may therefore belong to no key. Such entries count as absent; ``compact()`` drops them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subclasses import DispatchError, Outer, TensorSubclass, dynamic, inner, static
from subclasses.keyed import checks, rows
from subclasses.ragged import JaggedTensor
from subclasses.ragged.segments import Segments
from subclasses.spec.values import mark_varying_dims

aten = torch.ops.aten

# ---- the declaration -------------------------------------------------------------------------------------------


class KeyedJaggedTensor(TensorSubclass):
    """Jagged features by key; outer size ``[K, B, T, ...]``: keys, rows, and the longest row of all keys.

    Args:
        keys: the distinct names of the features. They are static: other keys compile another program.
        values: the entries of all features, ``[total, ...]``: the rows of the first key, then of the next key.
        lengths: ``[K * B]`` integers, the number of entries of each row, key by key.
        weights: ``[total]``, one for each entry. They determine the outer dtype if present, and may require grad.
        max_length: ``T``, an upper bound of the lengths. None computes it, with one synchronization on CUDA, and then
            also checks the lengths.

    Raises:
        TypeError: a part is of the wrong type.
        ValueError: shapes, dtypes or devices do not fit together, or the lengths do not add up.
    """

    values: Tensor = inner(differentiable=True)
    offsets: Tensor = inner(dtype=torch.int64)
    weights: Tensor | None = inner(optional=True, differentiable=True)
    keys: tuple[str, ...] = static()
    max_length: int = dynamic()

    _instead = "work on a feature, which kjt[key] returns as a JaggedTensor"

    def __new__(
        cls,
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        *,
        weights: Tensor | None = None,
        max_length: int | None = None,
    ) -> Any:
        """Checks that the parts fit together; the class describes the arguments."""
        keys = checks.check_keys(keys)
        checks.check_parts(keys, values, lengths, weights)
        if max_length is None:
            max_length = checks.longest_row(values, lengths)
        else:
            checks.check_given_bound(values, max_length)
        offsets = rows.offsets_of(lengths.to(torch.int64).view(len(keys), lengths.shape[0] // len(keys)))
        x = super().__new__(cls, values, offsets, weights, keys=keys, max_length=max_length)
        return x if checks.is_traced(values) else mark_varying_dims(x)

    if (
        TYPE_CHECKING
    ):  # the signature that type checkers would derive from the fields, and where they are stored
        _raw_values: Tensor
        _raw_weights: Tensor | None

        def __init__(
            self,
            keys: Sequence[str],
            values: Tensor,
            lengths: Tensor,
            *,
            weights: Tensor | None = None,
            max_length: int | None = None,
        ) -> None: ...

    @staticmethod
    def outer(values: Tensor, offsets: Tensor, weights: Tensor | None, max_length: int) -> Outer:
        """Returns the size of the equivalent padded tensor, and the dtype of the weights, or else of the values."""
        size = (offsets.size(0), offsets.size(1) - 1, max_length, *values.shape[1:])
        return Outer(size, dtype=values.dtype if weights is None else weights.dtype)

    # ---- construction ------------------------------------------------------------------------------------------

    @classmethod
    def from_jagged(
        cls, features: Mapping[str, JaggedTensor], *, weights: Mapping[str, JaggedTensor] | None = None
    ) -> KeyedJaggedTensor:
        """Joins jagged tensors ``[B, T, ...]`` as features with their dict keys; differentiable in them.

        Args:
            features: jagged tensors with the same number of rows, and entries of one dtype and shape.
            weights: for each key one weight per entry, ``[B, T]``, with the lengths of the feature.

        Raises:
            TypeError: an argument is not a dict of jagged tensors.
            ValueError: the features differ in more than their lengths, or the weights do not fit them.
        """
        checks.check_features(features, "from_jagged")
        keys = checks.check_keys(list(features))
        parts = [rows.packed_rows(features[k]) for k in keys]
        starts = rows.start_indices([values.shape[0] for values, _ in parts])
        values = torch.cat([values for values, _ in parts])
        offsets = torch.stack([row + start for (_, row), start in zip(parts, starts, strict=True)])
        scaled = None
        if weights is not None:
            scaled = torch.cat([values for values, _ in rows.packed_weights(features, weights)])
        longest = max(x.max_length for x in features.values())
        x = cls(keys, values, offsets.diff(dim=1).flatten(), weights=scaled, max_length=longest)
        # In a graph, entries outside of the rows were kept, so the rows of consecutive keys need not be adjacent.
        return x._with_parts(values, scaled, offsets) if checks.is_traced(values) else x

    @classmethod
    def cat(cls, kjts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Joins the features of several tensors in order; ``torch.cat(kjts)`` does the same.

        Raises:
            TypeError: an argument is not a KeyedJaggedTensor.
            ValueError: they share a key, or differ in batch size, in kind of entries, or in having weights.
        """
        checks.check_joinable(kjts, cls)
        keys = checks.check_keys([key for x in kjts for key in x.keys])
        starts = rows.start_indices([x._raw_values.shape[0] for x in kjts])
        weights = None if kjts[0]._raw_weights is None else torch.cat([x.unwrap("weights") for x in kjts])
        return kjts[0]._with_parts(
            torch.cat([x.unwrap("values") for x in kjts]),
            weights,
            torch.cat([x.offsets + start for x, start in zip(kjts, starts, strict=True)]),
            keys,
            max(x.max_length for x in kjts),
        )

    @classmethod
    def check_loaded(
        cls, values: Tensor, offsets: Tensor, weights: Tensor | None, keys: Any, max_length: Any
    ) -> None:
        """Raises unless the keys and the offsets describe rows of the values."""
        checks.check_loaded(values, offsets, weights, keys, max_length)

    # ---- access ------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """The number of rows of each key, ``B``."""
        return self.offsets.size(1) - 1

    @property
    def lengths(self) -> Tensor:
        """The number of entries of each row, key by key, ``[K * B]``."""
        return self.offsets.diff(dim=1).flatten()

    def feature(self, key: str) -> JaggedTensor:
        """Returns the rows of one key, ``[B, T, ...]``, which share the values; same as ``kjt[key]``.

        Raises:
            KeyError: there is no such key.
        """
        return rows.feature_rows(
            self.unwrap("values"), self.offsets[checks.key_index(self, key)], self.max_length
        )

    def feature_weights(self, key: str) -> JaggedTensor:
        """Returns the weights of one key's entries, ``[B, T]``, with the rows of the feature.

        Raises:
            KeyError: there is no such key, or there are no weights.
        """
        if self._raw_weights is None:
            raise KeyError("KeyedJaggedTensor has no weights; give weights= where it is made")
        return rows.feature_rows(
            self.unwrap("weights"), self.offsets[checks.key_index(self, key)], self.max_length
        )

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.feature(key)
        raise DispatchError(
            f"KeyedJaggedTensor[...]: expected a key, got {key!r}",
            code="argument-refused",
            hint=f"its keys are {', '.join(self.keys)}. Select several keys with permute([...]) or split([...]), and "
            "rows with kjt[key][...]",
        )

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Returns every feature by its key."""
        return {key: self.feature(key) for key in self.keys}

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Shows each key with its lengths; while a graph is traced, the fields."""
        name = type(self).__name__
        if checks.is_traced(self._raw_values) or self._raw_values.is_meta:
            return f"{name}({', '.join(f'{n}={getattr(self, n)!r}' for n in type(self).__spec__.names)})"
        weighted = "" if self._raw_weights is None else ", weighted"
        lengths_by_key = zip(self.keys, self.offsets.diff(dim=1).tolist(), strict=True)
        text = ", ".join(f"{key!r}: {lengths}" for key, lengths in lengths_by_key)
        return f"{name}(lengths={{{text}}}, {self._raw_values.dtype}{list(self._raw_values.shape)}{weighted})"

    def wrap_cotangent(self, cotangent: Tensor) -> KeyedJaggedTensor:
        """Converts a dense cotangent: its entries within rows count, padding does not."""
        total = self._raw_values.shape[0]
        shares = [
            Segments(row, row.diff(), total, self.max_length).unpad(dense)
            for row, dense in zip(self.offsets, cotangent.expand(self.shape), strict=True)
        ]
        values = torch.stack(shares).sum(0)
        if self._raw_weights is None:
            return self._with_parts(values, None)
        return self._with_parts(self.values, values if values.dim() == 1 else values.flatten(1).sum(1))

    def _with_parts(
        self,
        values: Tensor,
        weights: Tensor | None,
        offsets: Tensor | None = None,
        keys: tuple[str, ...] | None = None,
        max_length: int | None = None,
    ) -> Any:
        """Returns a value with other parts, which fit together; offsets, keys and `max_length` default to its own."""
        return TensorSubclass.__new__(
            type(self),
            values,
            self.offsets if offsets is None else offsets,
            weights,
            keys=self.keys if keys is None else keys,
            max_length=self.max_length if max_length is None else max_length,
        )

    def _varying_dims(self) -> dict[str, set[int]]:
        """The number of entries and of rows, and the longest row, differ from value to value."""
        return {"": {1, 2}, "values": {0}, "weights": {0}, "offsets": {1}}

    # ---- selecting keys ----------------------------------------------------------------------------------------

    def permute(self, keys: Sequence[str | int]) -> KeyedJaggedTensor:  # type: ignore[override]
        """Selects keys, by name or index, in the given order; the values are shared.

        Raises:
            TypeError: the argument is not a sequence of keys and indices.
            KeyError: there is no such key.
            IndexError: an index is out of range.
            ValueError: a key is named twice, or none is named.
        """
        indices = checks.key_indices(self, keys)
        keys = checks.check_keys([self.keys[i] for i in indices])
        offsets = torch.stack([self.offsets[i] for i in indices])
        return self._with_parts(self.unwrap("values"), self.unwrap("weights"), offsets, keys)

    def split(self, counts: Sequence[int], dim: int = 0) -> list[KeyedJaggedTensor]:  # type: ignore[override]
        """Splits the keys, dim 0, into parts of the given numbers of keys, in order; the values are shared.

        Raises:
            DispatchError: the argument is a single int, or ``dim`` is not 0.
            TypeError: the argument is not a sequence of ints.
            ValueError: the counts do not add up to the number of keys.
        """
        checks.check_counts(counts, dim)
        if sum(counts) != len(self.keys) or min(counts, default=0) < 1:
            raise ValueError(
                f"KeyedJaggedTensor.split: expected numbers of keys, each from 1, that add up to {len(self.keys)}, got "
                f"{counts}"
            )
        ends = rows.start_indices(list(counts))
        return [self.permute(range(start, start + n)) for start, n in zip(ends, counts, strict=True)]

    def with_values(self, values: Tensor) -> KeyedJaggedTensor:
        """Returns the same rows with other values ``[total, ...]``, such as embeddings of ids, and without weights.

        Raises:
            ValueError: the number of entries differs.
        """
        if values.shape[0] != self._raw_values.shape[0]:
            raise ValueError(
                f"KeyedJaggedTensor.with_values: expected {self._raw_values.shape[0]} entries, got {values.shape[0]}"
            )
        return self._with_parts(values, None)

    def compact(self) -> KeyedJaggedTensor:
        """Returns the same features with values that contain only existing entries, key by key; reads the lengths.

        Raises:
            DispatchError: a graph is being traced.
        """
        checks.check_not_traced(self, "compact", "do it outside")
        lengths = self.lengths
        ends = lengths.cumsum(0)
        shift = torch.repeat_interleave(self.offsets[:, :-1].flatten() - (ends - lengths), lengths)
        index = shift + torch.arange(shift.shape[0], device=shift.device)
        weights = self.unwrap("weights")
        return type(self)(
            self.keys,
            self.unwrap("values").index_select(0, index),
            lengths,
            weights=None if self._raw_weights is None else weights.index_select(0, index),
        )


# ---- ops -------------------------------------------------------------------------------------------------------


@KeyedJaggedTensor.implements(torch.cat)
def _(func: Any, tensors: Any, dim: int = 0) -> Any:
    if dim != 0:
        raise DispatchError(
            f"torch.cat of KeyedJaggedTensors joins keys, along dim 0, got dim={dim}", code="argument-refused"
        )
    keys = [key for x in tensors if isinstance(x, KeyedJaggedTensor) for key in x.keys]
    if len(set(keys)) < len(keys):
        raise DispatchError(
            f"torch.cat of KeyedJaggedTensors joins distinct keys, got {', '.join(keys)}",
            code="argument-refused",
        )
    return KeyedJaggedTensor.cat(tensors)


@KeyedJaggedTensor.implements(aten._to_copy.default)
def _(op: Any, x: KeyedJaggedTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Converts the outer dtype: if there are weights, only their dtype changes."""
    if x._raw_weights is None:
        return x._with_parts(op(x._raw_values, dtype=dtype, **kwargs), None, op(x.offsets, **kwargs))
    weights = op(x._raw_weights, dtype=dtype, **kwargs)
    return x._with_parts(op(x._raw_values, **kwargs), weights, op(x.offsets, **kwargs))
