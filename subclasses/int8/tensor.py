"""``Int8Tensor``: int8 numbers with scales that represent floats, in a quarter of the memory.

The size of ``scale`` determines which entries share a scale (see `blocks.py`). The outer dtype is metadata, because
scales stay in float32 where the tensor represents bfloat16. The rules for ops are in the modules beside this file:
products and lookups in `layers.py`, ops that move entries in `structure.py` and `writing.py`. An op without a rule runs
on ``dequantize()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from subclasses.base import TensorSubclass
from subclasses.errors import one_of
from subclasses.int8 import affine, blocks, sharding
from subclasses.spec.fields import Outer, inner, static

Activation = Literal["row", "tensor"] | None

# ---- the declaration ---------------------------------------------------------------------------------------


class Int8Tensor(TensorSubclass, size_from="qdata", dtype_from="scale", fallback="materialize"):
    """Int8 numbers that represent ``(qdata - zero_point) * scale``; see also :meth:`from_float`.

    Args:
        qdata: int8, of the outer size.
        scale: floats, one for each block. It has as many dimensions as ``qdata``, each of a size that divides the outer
            size. A tensor of one number is the scale of all entries.
        zero_point: int8, of the size of ``scale``; None means 0 everywhere.
        block_size: entries of a block along each dimension, which is checked against ``scale``; None derives it from
            the size of ``scale``.
        float_dtype: the outer dtype; None means the dtype of ``scale``.
        activation: ``"row"`` or ``"tensor"`` makes a linear layer with this weight quantize its input dynamically, and
            multiply integers. The input has one scale for each row, or one for all entries.
        activation_symmetric: whether inputs are quantized without a zero point.
        partial: whether blocks are parts of larger blocks whose scale other tensors share, as in a slice of a row.
            Writes that would change such a scale raise a `DispatchError`.

    Raises:
        ValueError: sizes do not fit together, the outer dtype is not floating point, or ``activation`` is unknown.
    """

    qdata: Tensor = inner(dtype=torch.int8)
    scale: Tensor = inner()
    zero_point: Tensor | None = inner(optional=True, dtype=torch.int8)
    float_dtype: torch.dtype | None = static(default=None)
    activation: Activation = static(default=None)
    activation_symmetric: bool = static(default=True)
    partial: bool = static(default=False)

    def __new__(
        cls,
        qdata: Tensor,
        scale: Tensor,
        zero_point: Tensor | None = None,
        *,
        block_size: blocks.Size | None = None,
        float_dtype: torch.dtype | None = None,
        **metadata: Any,
    ) -> Any:
        """Checks that the inner tensors and metadata fit together; the class describes the arguments."""
        if isinstance(qdata, Tensor) and isinstance(scale, Tensor):
            scale, zero_point = _match_dims(qdata, scale), _match_dims(qdata, zero_point)
            _check_parts(qdata, scale, zero_point, block_size)
            float_dtype = _check_dtype(float_dtype or scale.dtype)
        _check_metadata(**metadata)
        return super().__new__(cls, qdata, scale, zero_point, float_dtype=float_dtype, **metadata)

    if TYPE_CHECKING:  # replaces the signature that type checkers derive from the fields

        def __init__(
            self,
            qdata: Tensor,
            scale: Tensor,
            zero_point: Tensor | None = None,
            *,
            block_size: blocks.Size | None = None,
            float_dtype: torch.dtype | None = None,
            **metadata: Any,
        ) -> None: ...

    @staticmethod
    def outer(qdata: Tensor, scale: Tensor, float_dtype: torch.dtype | None) -> Outer:
        """Returns the size, stride and offset of ``qdata``, and the represented dtype."""
        dtype = scale.dtype if float_dtype is None else float_dtype
        return Outer(qdata.size(), qdata.stride(), dtype, None, qdata.storage_offset())  # type: ignore[arg-type]

    @classmethod
    def check_loaded(
        cls,
        qdata: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        float_dtype: torch.dtype | None,
        **metadata: Any,
    ) -> None:
        """Raises unless the constructor accepts the fields just as they are."""
        _check_parts(qdata, scale, zero_point, None)
        _check_dtype(scale.dtype if float_dtype is None else float_dtype)
        _check_metadata(**metadata)

    # ---- to and from floats --------------------------------------------------------------------------------

    @classmethod
    def from_float(
        cls, w: Tensor, *, block_size: blocks.Size | None = None, symmetric: bool = True, **metadata: Any
    ) -> Int8Tensor:
        """Quantizes a tensor of floats to the nearest numbers; gradients do not flow through the rounding.

        Args:
            w: floats, of one dimension or more. A block with an infinite entry or NaN represents no finite values.
            block_size: the number of entries along each dimension that share a scale; None means one scale for each
                row, the whole last dimension.
            symmetric: whether 0 is the middle of the range. Otherwise each block has a zero point, which represents
                values of one sign more accurately.
            **metadata: ``activation`` and ``activation_symmetric`` of the class.

        Raises:
            TypeError: ``w`` is not a tensor of floats.
            ValueError: ``block_size`` does not divide the size of ``w``, or ``w`` has no dimension.
        """
        if not isinstance(w, Tensor) or not w.is_floating_point():
            got = f"a {w.dtype} tensor" if isinstance(w, Tensor) else f"{one_of(type(w))}"
            raise TypeError(f"Int8Tensor.from_float: expected a tensor of floats, got {got}")
        if w.dim() == 0:
            raise ValueError("Int8Tensor.from_float: expected one dimension or more, got a single number")
        if isinstance(w, Int8Tensor):
            w = w.dequantize()
        w = w.detach()
        counts = blocks.block_counts(
            w.shape, blocks.row_block_size(w.shape) if block_size is None else block_size
        )
        scale, zero_point = affine.choose_scale(w, counts, symmetric)
        qdata = affine.to_int8(w, scale, zero_point)
        return cls(qdata, scale, zero_point, float_dtype=w.dtype, **metadata)

    def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:
        """Returns the represented plain tensor in ``output_dtype`` (default: outer dtype); differentiable in scale."""
        qdata, scale, zero_point = self.unwrap()
        return affine.from_int8(qdata, scale, zero_point, output_dtype or self.dtype)  # type: ignore[arg-type]

    def materialize(self) -> Tensor:
        """Returns the represented plain tensor from raw inner tensors."""
        return affine.from_int8(self.qdata, self.scale, self.zero_point, self.dtype)

    @property
    def block_size(self) -> tuple[int, ...]:
        """The number of entries along each dimension that share a scale."""
        return blocks.block_size_of(self.qdata.shape, self.scale.shape)

    # ---- sharding ------------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        """Returns this rank's tensors to gather; the policy's dtype changes the outer dtype, not the scales."""
        dtype = None if mp_policy is None else mp_policy.param_dtype
        return sharding.all_gather_inputs(self, mesh, outer_size, dtype)

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        """Rebuilds the whole parameter from the gathered tensors of all ranks."""
        return sharding.rebuild_parameter(all_gather_outputs, metadata, out)


# ---- checks ------------------------------------------------------------------------------------------------


def _match_dims(qdata: Tensor, t: Any) -> Any:
    """Gives a scale or zero point of a single number as many dimensions as ``qdata``."""
    if isinstance(t, Tensor) and t.dim() != qdata.dim() and t.numel() == 1:
        return t.reshape([1] * qdata.dim())
    return t


def _check_parts(qdata: Tensor, scale: Tensor, zero_point: Any, block_size: blocks.Size | None) -> None:
    if not blocks.is_valid_scale(qdata.shape, scale.shape):
        raise ValueError(
            f"Int8Tensor.scale: expected a number for each block, of {qdata.dim()} dimensions that divide "
            f"{tuple(qdata.shape)}, got {tuple(scale.shape)}"
        )
    if not scale.dtype.is_floating_point:
        raise ValueError(f"Int8Tensor.scale: expected a floating point dtype, got {scale.dtype}")
    if isinstance(zero_point, Tensor) and zero_point.shape != scale.shape:
        raise ValueError(
            f"Int8Tensor.zero_point: expected the size of scale, {tuple(scale.shape)}, got {tuple(zero_point.shape)}"
        )
    if block_size is not None and blocks.block_counts(qdata.shape, block_size) != tuple(scale.shape):
        raise ValueError(
            f"Int8Tensor.block_size: {tuple(block_size)} needs a scale of size "
            f"{blocks.block_counts(qdata.shape, block_size)}, got {tuple(scale.shape)}"
        )


def _check_dtype(dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"Int8Tensor.float_dtype: expected a floating point dtype, got {dtype}")
    return dtype


def _check_metadata(activation: Any = None, activation_symmetric: Any = True, partial: Any = False) -> None:
    if activation not in (None, "row", "tensor"):
        raise ValueError(f"Int8Tensor.activation: expected 'row', 'tensor' or None, got {activation!r}")
    for name, flag in (("activation_symmetric", activation_symmetric), ("partial", partial)):
        if type(flag) is not bool:
            raise TypeError(f"Int8Tensor.{name}: expected a bool, got {flag!r}")
