"""Unwraps the result of a run, and finds the inputs that the function mutated.

A result leaf is one of these:

- An input object itself (`Same("input", ...)`).
- The object of an earlier result (`Same("output", ...)`).
- A view of an argument, of an inner tensor of an argument, or of another result (`View`). The runtime wrapper takes the
  view again, so that the caller gets a real view of the real tensor.
- A tensor that the graph computes: a plain tensor (`Plain`) or the inner tensors of a subclass value (`Wrapper`).
- A symbolic number, or another object that is not a tensor and is a constant of the program (`Constant`).

A *hidden result* is a value that the graph computes for the runtime wrapper and that the caller does not get. It is the
base of results that share memory, the new value of a mutated input, or an inner tensor that the function assigned.
Hidden results follow the visible results.

A mutated input gets its new value in one of two ways. Where autograd recorded the mutation, the new value is a hidden
result of the program. The runtime wrapper calls `copy_`, which autograd records again. Otherwise the graph stores the
new value. Functionalization has turned every mutation into a value, so one store at the end of the graph is enough.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import SymInt, Tensor

from desugar import _torch as torch_private
from desugar.errors import DesugarError
from desugar.ir.fx_utils import result_leaves
from desugar.ir.stages import Outputs
from desugar.ir.storage import base_of
from desugar.ir.values import (
    Flat,
    Int,
    Plain,
    Same,
    Value,
    View,
    Wrapper,
    paths_of,
    plain_parts,
    renumber,
    unwrap_value,
)
from desugar.tracing.run import Run, assigned_inners, changed_slots, from_functional, identity
from desugar.tracing.views import DetachedReplay, ViewReplay, find_inner, return_base, view_as
from subclasses._torch import is_traceable_wrapper_subclass, storage_key

# ----------------------------------------------------------------------------------------------- unwrapping


def unwrap_result(run: Run) -> tuple[Outputs, list[Any], list[Any]]:
    """Unwraps the result of a run.

    Returns:
        Its structure, mutations and plain tensors; the result leaves, then the hidden leaves; the functional tensors
        and symbolic ints inside the leaves, by output slot.

    Raises:
        DesugarError: A result shares memory with an input or another result in a way that views cannot repeat.
    """
    return _ResultUnwrapper(run, result_leaves(run.result)).unwrap()


@dataclass(slots=True)
class _ResultUnwrapper:
    """Unwraps the result of one run.

    Attributes:
        run: The run.
        leaves: The result leaves; hidden leaves are appended.
        flat: The flat list of output slots.
        values: The value of each leaf so far.
        new_slots: Output slots of the new values of mutated inputs.
    """

    run: Run
    leaves: list[Any]
    flat: Flat = field(default_factory=Flat)
    values: list[Value] = field(default_factory=list)
    new_slots: set[int] = field(default_factory=set)

    def unwrap(self) -> tuple[Outputs, list[Any], list[Any]]:
        visible = list(self.leaves)
        bases = self._shared_bases(visible)
        hidden = {id(base): base for base in bases.values() if not any(base is leaf for leaf in visible)}
        self.leaves = [*visible, *hidden.values()]
        # The number of the first leaf that is this object.
        numbers = {id(leaf): n for n, leaf in reversed([*enumerate(self.leaves)]) if isinstance(leaf, Tensor)}
        for number, leaf in enumerate(self.leaves):
            self.values.append(self._value(number, leaf, numbers, bases))
        assigns = self._find_assigns()
        writes, stores = self._find_writes()
        tokens = tuple(self.flat.tensor(token) for token in self.run.tokens)
        same = self._same_as_inputs()
        outputs = Outputs(
            len(visible),
            tuple(self.values),
            tuple(from_functional(item) for item in self.flat.items),
            same,
            writes,
            stores,
            self._find_version_rises(),
            assigns,
            tokens,
            self._find_stored_views([slot for slot, _ in stores], same),
        )
        return outputs, self.leaves, self.flat.items

    def _value(self, number: int, leaf: Any, numbers: dict[int, int], bases: dict[int, Tensor]) -> Value:
        if not isinstance(leaf, Tensor):
            return unwrap_value(leaf, self.flat)
        for n, input_leaf in enumerate(self.run.input_leaves):
            if leaf is input_leaf.argument:
                return Same("input", n)
        if numbers[id(leaf)] != number:
            return Same("output", numbers[id(leaf)])
        if (inner := find_inner(self.run, leaf)) is not None:
            view = self._view("input", inner.leaf, leaf, base_of(leaf))
            return replace(view, replay=replace(inner, replay=view.replay))
        if _has_own_gradient(leaf):
            return unwrap_value(leaf, self.flat)
        source = self._input_sharing_memory(leaf)
        if source is not None:
            return self._view("input", source, leaf, self.run.input_leaves[source].argument)
        base = bases.get(storage_key(leaf))
        if base is None or base is leaf:
            return unwrap_value(leaf, self.flat)
        return self._view("output", numbers[id(base)], leaf, base)

    def _same_as_inputs(self) -> dict[int, int]:
        """Returns output slot -> input slot, for each output that is an input tensor or symbol itself."""
        slots = {identity(item): n for n, item in enumerate(self.run.items) if isinstance(item, Tensor)}
        symbols: dict[Any, int] = {}
        for slot, item in enumerate(self.run.items):
            if isinstance(item, SymInt):
                symbols.setdefault(item.node.expr, slot)
        same: dict[int, int] = {}
        for slot, item in enumerate(self.flat.items):
            key = symbols.get(item.node.expr) if isinstance(item, SymInt) else slots.get(identity(item))
            if key is not None and slot not in self.new_slots:
                same[slot] = key
        return same

    # .............................................................................................. views

    def _input_sharing_memory(self, leaf: Tensor) -> int | None:
        """Returns the input leaf whose storage a result shares, preferably the result's base."""
        storage, base = storage_key(leaf), base_of(leaf)
        leaves = self.run.leaves
        sharing = [n for n, e in enumerate(leaves) if isinstance(e, Tensor) and storage_key(e) == storage]
        return next((n for n in sharing if leaves[n] is base), sharing[0] if sharing else None)

    def _is_computed(self, leaf: Tensor) -> bool:
        """Returns whether a result is not a view of an input, and its base passes on its gradient."""
        is_own = find_inner(self.run, leaf) is None and not _has_own_gradient(leaf)
        return is_own and self._input_sharing_memory(leaf) is None

    def _shared_bases(self, leaves: Sequence[Any]) -> dict[int, Tensor]:
        """Returns storage -> the base of its results, for storages of several results and no input."""
        groups: dict[int, list[Tensor]] = {}
        for leaf in {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values():
            if self._is_computed(leaf):
                groups.setdefault(storage_key(leaf), []).append(leaf)
        shared: dict[int, Tensor] = {}
        for storage, group in groups.items():
            if len(group) > 1:
                bases = [base_of(leaf) for leaf in group]
                shared[storage] = next((base for base in bases if base.requires_grad), bases[0])
        return shared

    def _view(self, of: str, index: int, leaf: Tensor, base: Any) -> View:
        """Records how to take a view again.

        Args:
            of: "input" or "output".
            index: The input leaf or result leaf that `base` is.
            leaf: The view.
            base: A traced tensor that shares the view's storage.

        Raises:
            DesugarError: `leaf` is not a view of `base`, and its own base does not have the extents of `base` or
                requires grad.
        """
        own_base = base_of(leaf)
        detached = own_base is not base
        # Autograd does not treat `x.view(dtype)` as a view.
        dtype = own_base.dtype if own_base.dtype != base.dtype else None
        if detached and (own_base.requires_grad or _extents(own_base) != _extents(view_as(base, dtype))):
            if id(own_base) in self.run.detached:
                if own_base.requires_grad:
                    raise DesugarError(
                        f"a result shares memory with {of} {index}, from which it was detached, and was then written "
                        f"to by an op that autograd records: it would lose the gradient of that write",
                        instead="write to a clone() of the detached tensor, or return a clone() of the result",
                        stock_is_wrong=of == "input",
                    )
                return self._detached_view(of, index, leaf, base)
            raise DesugarError(
                f"a result of size {tuple(leaf.shape)} shares memory with {of} {index} without being a view of it",
                instead="return a clone()",
                # For a view of a wrapper, AOTAutograd returns a view of its inner tensor, without a gradient.
                stock_is_wrong=of == "input"
                and leaf.requires_grad
                and is_traceable_wrapper_subclass(own_base),
            )
        no_grad = own_base.requires_grad and _has_no_node(leaf)
        if not leaf._is_view():
            replay = return_base if dtype is None else ViewReplay(leaf, dtype)
            return View(of, index, replay, (), detached, no_grad)
        return View(of, index, ViewReplay(leaf, dtype), self._ints_of(leaf), detached, no_grad)

    def _detached_view(self, of: str, index: int, leaf: Tensor, base: Any) -> View:
        """Records how to take a detached view again, or a view of a detached tensor."""
        own_base = base_of(leaf)
        first = self._view(of, index, self.run.detached[id(own_base)].source, base)
        ints, following = (), None
        if leaf is not own_base:
            ints, following = self._ints_of(leaf), ViewReplay(leaf, None)
        replay = DetachedReplay(first.replay, len(first.ints), following)
        return View(of, index, replay, (*first.ints, *ints), True, first.no_grad)

    def _ints_of(self, view: Tensor) -> tuple[Int, ...]:
        """Returns the sizes, strides and indices of a view."""
        ints: list[Int] = []

        def record(extent: Any) -> Any:
            ints.append(self.flat.integer(extent))
            return extent

        with torch_private.DisableTorchFunctionSubclass():
            view._view_func_unsafe(base_of(view), record)
        return tuple(ints)

    # ............................................................................................ mutations

    def _find_writes(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Returns `writes` and `stores` of `Outputs`; appends the new values of `writes` as hidden leaves."""
        writes: list[tuple[int, int]] = []
        stores: dict[int, int] = {}
        recorded: set[int] = set()
        for number, source in enumerate(self.run.input_leaves):
            changed = changed_slots(source.value, self.run.items)
            if changed and source.argument.grad_fn is not source.grad_fn:
                writes.append((number, len(self.values)))
                self.values.append(self._new_value(source.argument))
                self.leaves.append(source.argument)
                recorded.update(changed)
        for source in self.run.input_leaves:
            for slot in changed_slots(source.value, self.run.items):
                if slot not in recorded and slot not in stores:
                    stores[slot] = self._new_slot(self.run.items[slot])
        return tuple(writes), tuple(stores.items())

    def _find_stored_views(self, homes: Sequence[int], same: Collection[int]) -> tuple[tuple[int, int], ...]:
        """Returns `stored_views` of `Outputs`: inner tensors of new wrappers that are views of a written input."""
        stored = {storage_key(self.run.items[home]): home for home in homes}
        return tuple(
            (slot, stored[storage_key(item)])
            for slot, item in enumerate(self.flat.items)
            if isinstance(item, Tensor)
            and storage_key(item) in stored
            and not (slot in same or slot in self.new_slots)
        )

    def _find_assigns(self) -> tuple[tuple[int, str, int], ...]:
        """Returns `assigns` of `Outputs`; appends the assigned inner tensors as hidden leaves."""
        assigns: list[tuple[int, str, int]] = []
        for number, source in enumerate(self.run.input_leaves):
            for name in assigned_inners(source, self.run.items):
                assigns.append((number, name, len(self.values)))
                self.leaves.append(getattr(source.argument, name))
                self.values.append(unwrap_value(self.leaves[-1], self.flat))
        return tuple(assigns)

    def _new_slot(self, item: Any) -> int:
        """Adds an output slot for the new value of an input's tensor, even if the tensor has a slot already."""
        slot = self.flat.add(item)
        self.new_slots.add(slot)
        return slot

    def _new_value(self, leaf: Any) -> Value:
        """Unwraps a mutated input leaf, with a new output slot for each of its tensors."""
        unwrapped = Flat()
        value = unwrap_value(leaf, unwrapped)
        slots = [
            self._new_slot(item) if isinstance(item, Tensor) else self.flat.integer(item).index  # type: ignore[union-attr]
            for item in unwrapped.items
        ]
        return renumber(value, slots)

    def _find_version_rises(self) -> tuple[tuple[int, tuple[str, ...], int], ...]:
        """Returns `versions` of `Outputs`."""
        rises: list[tuple[int, tuple[str, ...], int]] = []
        counted: set[int] = set()  # a tensor that occurs several times has one counter
        for number, source in enumerate(self.run.input_leaves):
            if not isinstance(source.value, Plain | Wrapper):
                continue  # a repeated object, or not a tensor
            rise = source.argument._version - source.version
            changed = changed_slots(source.value, self.run.items)
            if changed or rise:  # a write of the same data counts, too
                if isinstance(source.value, Wrapper):
                    rises.append((number, (), rise))
                for slot, path in paths_of(source.value):
                    if slot not in counted:
                        counted.add(slot)
                        own = self.run.items[slot]._version - self.run.versions[slot]
                        rises.append((number, path, own if path else rise))
        return tuple(rises)


# ---------------------------------------------------------------------------------------------------- views


def _extents(tensor: Tensor) -> tuple[Any, ...]:
    """Returns the size and stride of a tensor, and the storage offset of each plain tensor inside."""
    offsets = tuple(part.storage_offset() for part in plain_parts(tensor))
    return tuple(tensor.size()), tuple(tensor.stride()), offsets


def _has_own_gradient(tensor: Tensor) -> bool:
    """Returns whether a tensor has a gradient that its base does not pass on.

    It is a result of `unwrap()`, or an autograd function returned it as its input or a view of its input. A view of
    such a tensor has its own gradient, too.
    """
    if tensor.grad_fn is None or not tensor._is_view():
        return False
    made_by_function = (
        torch_private.get_creation_meta(tensor) == torch_private.CreationMeta.IN_CUSTOM_FUNCTION
    )
    return made_by_function or not base_of(tensor).requires_grad


def _has_no_node(view: Tensor) -> bool:
    """Whether autograd has no node for a view.

    PyTorch raises where the view was taken without gradients and its base has been written to since.
    """
    try:
        return view.grad_fn is None
    except RuntimeError:
        return True
