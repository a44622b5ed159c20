"""``TableShard``: the rows of a table that one rank holds, as a parameter, gradient or optimizer state.

A ``DTensor`` can hold rows of equal parts on all ranks, not all rows on one rank, and no sparse gradient. A
`TableShard` is a range of rows, so one class serves tables cut by rows and tables on one rank (an empty range
elsewhere). Its ops run on the tensor of its rows. The tensors that optimizers make from it (``zeros_like``, ``clone``)
have its range, too, so `torch.distributed.checkpoint` reads and writes the right rows of the whole table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subclasses import DispatchError, Outer, TensorSubclass, inner, static
from subclasses._torch import foreach_norm, sparse_indices, sparse_values

aten = torch.ops.aten


class TableShard(TensorSubclass, trainable=True):
    """A tensor ``[rows, ...]`` of which this rank holds the rows ``start`` to ``start + n``, ``local``.

    The ops of optimizers run on the rows of this rank. Other ops raise, since they would need all ranks.

    Args:
        local: ``[n, ...]``, the rows of this rank; n may be 0. A gradient may be sparse.
        start: the index of the first row in the whole tensor.
        rows: the number of rows of the whole tensor.
    """

    local: Tensor = inner(differentiable=True)
    start: int = static()
    rows: int = static()

    if TYPE_CHECKING:  # where the field is stored; reading it by name is an op of autograd

        @property
        def _raw_local(self) -> Tensor: ...

    @staticmethod
    def outer(local: Tensor, rows: int) -> Outer:
        """Returns the size of the whole tensor."""
        return Outer((rows, *local.shape[1:]))

    def like(self, local: Tensor) -> TableShard:
        """Returns other data for the same rows, such as one number for each row."""
        return type(self)(local, start=self.start, rows=self.rows)

    def rows_here(self) -> Tensor:
        """Returns the rows of this rank, detached; they share memory with the shard."""
        return self._raw_local.detach()

    def wrap_cotangent(self, cotangent: Tensor) -> TableShard:
        """Converts a cotangent of the whole tensor: the rows that are here count."""
        return self.like(cotangent[self.start : self.start + self._raw_local.shape[0]])

    # ---- the protocol of torch.distributed.checkpoint ----------------------------------------------------------

    @property
    def _is_written(self) -> bool:
        """Whether this rank writes a part of the tensor; every rank writes a tensor without rows."""
        return self._raw_local.shape[0] > 0 or self.rows == 0

    def _chunk(self) -> Any:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        offsets = (self.start, *(0 for _ in self.shape[1:]))
        return ChunkStorageMetadata(torch.Size(offsets), self._raw_local.shape)

    def __create_chunk_list__(self) -> list[Any]:
        return [self._chunk()] if self._is_written else []

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not self._is_written:
            return []
        chunk = self._chunk()
        properties = TensorProperties.create_from_tensor(self.rows_here())
        data = TensorWriteData(chunk=chunk, properties=properties, size=self.shape)
        index = MetadataIndex(fqn, chunk.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.rows_here()


# ---- sparse gradients ------------------------------------------------------------------------------------------
# A gradient may have a sparse tensor inside. Optimizers for sparse gradients coalesce it, and compute with plain sparse
# tensors of the whole size. These have entries only in rows of this rank. The optimizers add them.


@TableShard.Cotangent.implements(torch.Tensor.is_sparse.__get__)  # type: ignore[attr-defined]
def _(func: Any, x: TableShard) -> bool:
    return func(x._raw_local)


@TableShard.Cotangent.implements(torch.Tensor.coalesce)
def _(func: Any, x: TableShard) -> Tensor:
    return _moved(func(x._raw_local), x.start, x.shape)


@TableShard.Cotangent.implements(torch.Tensor.sparse_mask)
def _(func: Any, x: TableShard, mask: Tensor) -> Tensor:
    return _moved(func(x._raw_local, _moved(mask, -x.start, x._raw_local.shape)), x.start, x.shape)


@TableShard.implements(torch.Tensor.add_)
@TableShard.Cotangent.implements(torch.Tensor.add_)  # a state of SparseAdam
def _(func: Any, x: TableShard, other: Any, *, alpha: Any = 1) -> TableShard:
    if not isinstance(other, Tensor) or isinstance(other, TableShard) or not other.is_sparse:
        return TableShard.unruled(func, x, other, alpha=alpha)
    func(x._raw_local, _moved(other, -x.start, x._raw_local.shape), alpha=alpha)
    return x


def _moved(t: Tensor, by: int, size: Any) -> Tensor:
    """Returns a sparse tensor of another size, with the rows of ``t`` moved down by ``by``."""
    indices = sparse_indices(t).clone()
    indices[0] += by
    return torch.sparse_coo_tensor(
        indices, sparse_values(t), size, is_coalesced=t.is_coalesced(), check_invariants=False
    )


@TableShard.Cotangent.implements(aten.new_empty_strided.default)
def _(func: Any, x: TableShard, size: Any, stride: Any, **options: Any) -> TableShard:
    """Returns the tensor to which autograd copies a gradient that it cannot keep."""
    if not x._raw_local.is_sparse:
        return x.like(x._raw_local.new_empty(x._raw_local.shape, **options))
    options |= {"dtype": x.dtype, "device": x.device, "check_invariants": False}
    return x.like(torch.sparse_coo_tensor(size=x._raw_local.shape, **options))


# ---- norms -----------------------------------------------------------------------------------------------------


_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm, foreach_norm)


@TableShard.implements(*_NORMS)
@TableShard.Cotangent.implements(*_NORMS)
def _(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise DispatchError(
        f"{func.__name__} of a TableShard, which clip_grad_norm_ calls, would count this rank's rows alone, "
        "and differ between ranks",
        code="argument-refused",
        hint="clip the gradients of the other parameters, or add up squares of x.rows_here() over all ranks",
    )
