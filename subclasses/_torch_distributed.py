"""Every private torch name for several ranks that ``subclasses`` uses, with the reason; ``_torch.py`` has others."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from subclasses.after_import import after_import


def is_work(value: Any) -> bool:
    """Whether a value is the handle of a collective, as the dispatcher passes it."""
    return isinstance(value, torch.ScriptObject) and value._type().name() == "Work"  # type: ignore[attr-defined]


def joint_work(handles: Any) -> Any:
    """Returns one handle for several collectives of a process group, which waits for all of them."""
    import torch.distributed as dist

    # The dispatcher holds handles as ScriptObjects. A handle made in Python would need the interpreter where C++ drops
    # it, so this one is made from a future.
    futures = []
    for work in map(dist.Work.unbox, handles):
        try:
            futures.append(work.get_future())
        except RuntimeError:  # gloo has none for some collectives
            work.wait()
    if not futures:
        return handles[-1]
    make = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]
    return dist.Work.boxed(make(torch.futures.collect_all(futures)))


def undo_refused_sharding(refusal: type[Exception]) -> None:
    """Makes ``fully_shard`` restore the modules if it raises a certain error while it cuts Parameters."""

    # FSDP2 sets hooks and a state before it cuts, and then replaces one Parameter after the other.
    def patch(module: Any) -> None:
        cut = getattr(module, "_init_param_group", None)
        if cut is None:  # another release
            return

        @functools.wraps(cut)
        def cut_all_or_none(state: Any, params: Any, modules: Any, *args: Any, **kwargs: Any) -> None:
            owners = [owner for root in modules for owner in root.modules()]
            tables = [table for x in owners for table in (x._parameters, x._load_state_dict_post_hooks)]
            before = [dict(table) for table in tables]
            try:
                cut(state, params, modules, *args, **kwargs)
            except refusal:
                for table, entries in zip(tables, before, strict=True):
                    table.clear()
                    table.update(entries)
                _forget_state(state, modules)
                raise

        module._init_param_group = cut_all_or_none

    after_import("torch.distributed.fsdp._fully_shard._fully_shard", patch)


def _forget_state(state: Any, modules: Any) -> None:
    """Removes the hooks and the entries that ``fully_shard`` stored in modules."""
    # Otherwise another call of `fully_shard` on them is an error.
    contract = importlib.import_module("torch.distributed._composable.contract")
    states = importlib.import_module("torch.distributed._composable_state")._module_state_mapping
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for module in modules:
        states.pop(module, None)
        entries = vars(module).pop(contract.STATE_KEY, {})
        others = {api: other for api, other in entries.items() if other is not state}
        if others:
            vars(module)[contract.STATE_KEY] = others
        registry = vars(module).get(contract.REGISTRY_KEY, {})
        registry.pop("fully_shard", None)
        if not registry:
            vars(module).pop(contract.REGISTRY_KEY, None)


def reduce_packed_gradients(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Makes FSDP2 reduce gradients as packed by ``pack``, and store this rank's row as unpacked by ``unpack``."""

    # FSDP2 copies gradients into a flat buffer, and has no hook that a class could define for it.
    def patch(module: Any) -> None:
        reduce = getattr(module, "foreach_reduce", None)
        if reduce is None:  # another release
            return

        @functools.wraps(reduce)
        def reduce_packed(params: Any, gradients: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
            ranks = 1 if group is None else group.size()
            packed = [pack(p._sharded_local_tensor, g, ranks) for p, g in zip(params, gradients, strict=True)]
            stand_ins = [
                p
                if matrix is None
                else _PackedParameter(p, matrix.size(1), functools.partial(unpack, ranks=ranks))
                for p, matrix in zip(params, packed, strict=True)
            ]
            # The caller's list is the only reference to the gradients, and emptied when they are copied.
            gradients[:] = [
                g if matrix is None else matrix for g, matrix in zip(gradients, packed, strict=True)
            ]
            del packed
            return reduce(stand_ins, gradients, group, *args, **kwargs)

        module.foreach_reduce = reduce_packed

    after_import("torch.distributed.fsdp._fully_shard._fsdp_param_group", patch)


class _PackedParameter:
    """Replaces a Parameter while FSDP2 reduces its gradient, which has one row for each rank.

    It defines only the attributes that differ. FSDP2 passes this rank's row to ``to_sharded_dtensor``, and assigns the
    result to ``sharded_param.grad``.
    """

    def __init__(self, param: Any, width: int, unpack: Callable[..., Any]) -> None:
        self._param, self._unpack = param, unpack
        self.sharded_size, self.contiguous_sharded_stride = torch.Size((1, width)), (width, 1)
        self.sharded_param = _GradientOfPart(param.sharded_param)
        # A gradient that is added to another at once is not copied to the host meanwhile.
        self.pin_memory = param.pin_memory and param.sharded_param.grad is None

    def to_sharded_dtensor(self, row: torch.Tensor) -> Any:
        return self._param.to_sharded_dtensor(self._unpack(self._param._sharded_local_tensor, row))

    @property
    def grad_offload_event(self) -> Any:
        return self._param.grad_offload_event

    @grad_offload_event.setter
    def grad_offload_event(self, event: Any) -> None:
        self._param.grad_offload_event = event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._param, name)


class _GradientOfPart:
    """Replaces this rank's part of a Parameter: adds an assigned gradient to the current gradient."""

    def __init__(self, part: Any) -> None:
        self._part = part

    @property
    def grad(self) -> Any:
        return None

    @grad.setter
    def grad(self, gradient: Any) -> None:
        if self._part.grad is None:
            self._part.grad = gradient
        else:
            self._part.grad._local_tensor += gradient._local_tensor

    @property
    def _post_accumulate_grad_hooks(self) -> dict[int, Callable[[Any], None]]:
        hooks = self._part._post_accumulate_grad_hooks or {}
        return {key: lambda _, hook=hook: hook(self._part) for key, hook in hooks.items()}


SPEC = "_spec"  # the attribute of a DTensor that holds what `dtensor_spec` returns


def dtensor_spec(x: Any) -> Any:
    """Returns the spec of a DTensor: its mesh, its placements with their order, and its size."""
    # The public properties do not give the order in which two dimensions of a mesh cut one of the tensor.
    return x._spec


def tensor_meta(size: Any, stride: Any, dtype: torch.dtype) -> Any:
    """Returns the size, stride and dtype of a spec, in one object."""
    # A DTensor is made from its local tensor and a spec alone.
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    return TensorMeta(torch.Size(size), tuple(stride), dtype)


class DistributedTypes(NamedTuple):
    """The types of a DTensor, of its spec, and of the parts of a spec."""

    tensor: type
    spec: type
    mesh: type
    placements: tuple[type, ...]


def distributed_types() -> DistributedTypes | None:
    """Returns the types of a DTensor; None if nothing has imported them, since that takes long."""
    # The type of a spec has no public name.
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return DistributedTypes(DTensor, DTensorSpec, DeviceMesh, (Shard, Replicate, Partial))


def size_inner_dtensors(is_ours: Callable[[Any], bool]) -> None:
    """Makes the size of a DTensor inside a wrapper of certain classes symbolic if the size of its local tensor is.

    PyTorch makes a fake of such a wrapper from the inside out, and gives each inner wrapper a constant size. Other
    classes compute their size from their inner tensors. The size of a DTensor does not follow from its local tensor, so
    that each size would compile a program.
    """

    def patch(module: Any) -> None:
        make = module.MetaConverter._empty_create_subclass

        @functools.wraps(make)
        def make_sized(self: Any, t: Any, size: Any, stride: Any, shape_env: Any, *rest: Any) -> Any:
            symbols, _, source = rest
            holds_wrappers = t.attrs and any(getattr(part, "attrs", None) for part in t.attrs.values())
            if holds_wrappers and shape_env is not None and symbols is not None and is_ours(t.type):
                attrs = {
                    name: _sized(part, name, shape_env, symbols, source) for name, part in t.attrs.items()
                }
                t = dataclasses.replace(t, attrs=attrs)
            return make(self, t, size, stride, shape_env, *rest)

        module.MetaConverter._empty_create_subclass = make_sized

    after_import("torch._subclasses.meta_utils", patch)


def _sized(part: Any, name: str, shape_env: Any, symbols: Any, source: Any) -> Any:
    """Returns the description of an inner tensor, with symbols for sizes if it describes a DTensor."""
    types, known = distributed_types(), symbols.inner_contexts.get(name)
    if types is None or part.type is not types.tensor or part.fake_mode is not None or known is None:
        return part
    # Dynamo creates the same symbols by the same source when the function reads the attribute.
    from torch._dynamo.source import AttrSource

    size, stride, _ = shape_env._create_symbolic_sizes_strides_storage_offset(
        part.size,
        part.stride,
        part.storage_offset,
        [False] * part.ndim,
        AttrSource(source, name),
        symbolic_context=known,
        hint_overrides=part.dynamo_hint_overrides,
    )
    return dataclasses.replace(part, size=size, stride=stride)
