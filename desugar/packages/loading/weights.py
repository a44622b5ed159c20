"""The weights of a package: read from its file, or passed by the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from desugar.errors import PackageError, SignatureError
from desugar.ir.values import Wrapper, plain_parts, wrap_value
from desugar.packages.archive import Archive
from desugar.packages.loading.entry import check_weight
from desugar.packages.manifest.records import Manifest, WeightRecord
from subclasses import TensorSubclass
from subclasses.layout import field_name
from subclasses.spec.load_checks import check_fields


def find_weights(
    archive: Archive, manifest: Manifest, state: Mapping[str, Tensor | nn.Module] | nn.Module | None
) -> dict[str, Tensor]:
    """Returns the weights by name, from the file or from `state`.

    Raises:
        PackageError: The file holds no weights or is damaged, or the weights in `state` do not fit.
    """
    if state is None:
        with torch.no_grad():
            return {record.name: _read_weight(archive, manifest, record) for record in manifest.weights}
    given = _tensors_of(state)
    for record in manifest.weights:
        _check_tied(record, given)
    missing = [record.name for record in manifest.weights if record.name not in given]
    if missing:
        raise PackageError(
            f"state lacks {len(missing)} of the {len(manifest.weights)} weights: {', '.join(missing[:5])}; it has "
            f"{', '.join(list(given)[:5])}"
        )
    tensors = {record.name: given[record.name] for record in manifest.weights}
    for record in manifest.weights:
        try:
            with torch.no_grad():
                check_weight(record, tensors[record.name])
        except SignatureError as error:
            raise PackageError(str(error)) from error
        if manifest.is_training and tensors[record.name].requires_grad and not record.value.requires_grad:
            raise PackageError(
                f"weight {record.name} requires grad, and did not when the package was saved: call "
                "requires_grad_(False), or save it again"
            )
    return tensors


def _check_tied(record: WeightRecord, given: dict[str, Tensor]) -> None:
    """Raises `PackageError` if the names of a tied weight have different tensors; adds a missing main name."""
    tied = {name: given[name] for name in (record.name, *record.aliases) if name in given}
    if tied:
        (first, weight), *others = tied.items()
        for name, other in others:
            if other is not weight and not _are_equal(weight, other):
                raise PackageError(
                    f"{first} and {name} were one weight when the package was saved, and state has two: tie them, or "
                    f"save the package again"
                )
        given.setdefault(record.name, weight)


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two weights have equal values, as the separate tensors of a tied weight in a `state_dict` do."""
    if type(a) is not type(b) or not isinstance(a, Tensor) or a.size() != b.size() or a.dtype != b.dtype:
        return False
    pairs = zip(plain_parts(a), plain_parts(b), strict=False)
    return all(x.size() == y.size() and x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def _tensors_of(state: Mapping[str, Tensor | nn.Module] | nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    given: Mapping[str, Any] = {"": state} if isinstance(state, nn.Module) else state
    for name, value in given.items():
        if isinstance(value, nn.Module):
            tensors |= value.named_parameters(name, remove_duplicate=False)
            tensors |= value.named_buffers(name, remove_duplicate=False)
        else:
            tensors[name] = value
    return tensors


def _read_weight(archive: Archive, manifest: Manifest, record: WeightRecord) -> Tensor:
    if len(record.data) != len(record.facts):
        raise PackageError(
            f"{archive.path} has no weights: it was saved with weights=False; pass state=, a module or tensors by name"
        )
    plain = [archive.weight(*one) for one in zip(record.data, record.facts, strict=True)]
    _ask_class(record.value, plain, record.name)
    tensor: Tensor = wrap_value(record.value, plain)
    requires_grad = record.value.requires_grad and manifest.is_training
    if record.is_parameter and isinstance(record.value, Wrapper) and not requires_grad:
        # Makes a Parameter of a wrapper as nn.Parameter does, but without its detach(), for which PyTorch imports
        # sympy.
        tensor._is_param = True  # type: ignore[attr-defined]
        return tensor
    if record.is_parameter:
        return nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _ask_class(value: Any, plain: Sequence[Tensor], name: str) -> None:
    """Raises `PackageError` if a class refuses the fields of a weight, as its constructor would."""
    if not isinstance(value, Wrapper):
        return
    for _, part in value.inner:
        _ask_class(part, plain, name)
    if not issubclass(value.cls, TensorSubclass):
        return
    statics = zip((field.name for field in value.cls.__spec__.statics), value.context.statics, strict=True)
    fields = {field_name(attribute): wrap_value(part, plain) for attribute, part in value.inner}
    try:
        check_fields(value.cls, fields, dict(statics) | dict(value.dynamics))
    except (TypeError, ValueError) as error:
        raise PackageError(f"weight {name}: {error}") from error
