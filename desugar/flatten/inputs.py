"""The inputs of a program: arguments and captured tensors, flattened into plain tensors and symbolic ints.

Flattening is the first stage of a compilation. The plain tensors inside a tensor subclass replace it. The trace uses a
fake tensor for each of them, with the same dtype, device, size and stride. Dynamo makes the fakes of the arguments of
its graphs, where a size that may change from call to call is a symbol. Other fakes have constant sizes.

Each occurrence of a plain tensor in the arguments of Dynamo's graph is an input (`add_faked`). A derivative is compiled
for the identity of its arguments, so a tensor that occurs twice in them is one input (`add_arguments`).

A tensor that the function reads from elsewhere than its arguments, such as a closure cell of a rule, is *captured*:
when the function first uses it, it becomes an input that the program holds by reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import SymInt, Tensor, nn

from desugar import _torch as torch_private
from desugar.errors import DesugarError
from desugar.ir.stages import InputSpec, Origin
from desugar.ir.values import (
    Constant,
    Flat,
    Int,
    Plain,
    Same,
    Slot,
    Value,
    Wrapper,
    inner_names,
    is_wrapper,
    paths_of,
    slots_of,
    unwrap_value,
    wrap_value,
)
from subclasses._torch import disabled_torch_function_impl
from subclasses._torch_tracing import has_no_memory
from subclasses.errors import one_of

# -------------------------------------------------------------------------------------------------- inputs


def _make_fake_mode() -> Any:
    return torch_private.FakeTensorMode(
        shape_env=torch_private.ShapeEnv(duck_shape=False, specialize_zero_one=True)
    )


@dataclass(slots=True)
class Inputs:
    """The inputs of one program under construction; :meth:`spec` describes them.

    Attributes:
        mode: The fake mode, with its shape environment.
        values: One value per input leaf: argument leaves first, then captured tensors.
        captured: The captured tensors, in the order of their values.
        flat: Real plain tensors and symbolic ints, by input slot.
        fake_items: Input slot -> fake tensor or symbolic int.
        origins: Input slot -> its source at run time.
        num_arguments: The number of argument leaves in `values`.
        is_sealed: Whether the first run is over, so that every captured tensor and every generator is known.
        first_leaf: Id of each tensor among the arguments -> index of the first leaf that is this tensor.
        parameters: Indices of the argument leaves that are an `nn.Parameter`.
        inference: The places of the leaves and plain tensors that were made in inference mode.
        static: Argument leaves that Dynamo marks as parameters or buffers, which keep their addresses.
        generators: The generators that the function passed to random functions.
        offsets_matter: Whether the function reads a storage offset (:func:`desugar.ir.fx_utils.depends_on_offsets`).
    """

    mode: Any = field(default_factory=_make_fake_mode)
    values: list[Value] = field(default_factory=list)
    captured: list[Tensor] = field(default_factory=list)
    flat: Flat = field(default_factory=Flat)
    fake_items: dict[int, Any] = field(default_factory=dict)
    origins: dict[int, Origin] = field(default_factory=dict)
    num_arguments: int = 0
    first_leaf: dict[int, int] = field(default_factory=dict)
    is_sealed: bool = False
    parameters: set[int] = field(default_factory=set)
    inference: set[Origin] = field(default_factory=set)
    static: set[int] = field(default_factory=set)
    generators: list[torch.Generator] = field(default_factory=list)
    offsets_matter: bool = False

    def add_arguments(self, leaves: Sequence[object]) -> None:
        """Flattens the argument leaves, with constant sizes."""
        first = self.first_leaf
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, nn.Parameter):
                self.parameters.add(number)
            if isinstance(leaf, Tensor) and first.setdefault(id(leaf), number) != number:
                self.values.append(Same("input", first[id(leaf)]))
            else:
                self._add(leaf)
        self.num_arguments = len(self.values)

    def add_captured(self, tensor: Tensor) -> Value:
        """Makes a captured tensor an input that the program holds by reference, with constant sizes.

        Raises:
            DesugarError: The first run did not capture it, so the function makes a new tensor in each run.
        """
        if self.is_sealed:
            raise DesugarError(
                f"{one_of(type(tensor))} of size {tuple(tensor.shape)} is made inside the function by code that "
                "torch does not dispatch, such as torch.from_numpy, torch.frombuffer or torch.Tensor(...)",
                instead="make it outside the function, or with torch.tensor(...)",
            )
        self.captured.append(tensor)
        if id(tensor) in self.first_leaf:  # the tensor is an argument, too
            self.values.append(Same("input", self.first_leaf[id(tensor)]))
            return self.values[-1]
        return self._add(tensor)

    def note_generator(self, generator: torch.Generator) -> None:
        """Records a random number generator, which is a constant of the program.

        Raises:
            DesugarError: The first run did not use it, so the function makes a new generator in each run.
        """
        if any(generator is known for known in self.generators):
            return
        if self.is_sealed:
            raise DesugarError(
                "a torch.Generator is made inside the function; a program would keep using the generator of the trace",
                instead="make it outside the function",
                stock_is_wrong=True,
            )
        self.generators.append(generator)

    def add_faked(self, leaves: list[Any], fake_leaves: list[Any], names: Sequence[str]) -> None:
        """Flattens the argument leaves with the fakes that Dynamo made; Dynamo's guards cover them.

        An inner tensor that two arguments share in this call may be two tensors in the next. So each occurrence of a
        tensor is a separate input. The exception is an attribute of an argument that Dynamo passes as an argument
        (`x.values`): it is that inner tensor in every call, and shares its slot.

        Args:
            leaves: The arguments.
            fake_leaves: Their fakes.
            names: Dynamo's names for them.
        """
        values: dict[int, Value] = {}
        for number in sorted(range(len(leaves)), key=lambda n: not is_wrapper(leaves[n])):
            if isinstance(leaves[number], nn.Parameter):
                self.parameters.add(number)
            if torch_private.get_static_address_type(leaves[number]) is not None:
                self.static.add(number)
            self._note_inference(leaves[number], Origin(number))
            origin = self._find_in_other_argument(number, names)
            known = {} if origin is None or is_wrapper(leaves[number]) else self.origins
            slot = next((slot for slot, known_origin in known.items() if known_origin == origin), None)
            if slot is None:
                values[number] = self._add_fake(leaves[number], fake_leaves[number], number, ())
            else:
                values[number] = Plain(slot, leaves[number].requires_grad, leaves[number].is_leaf)
        self.values += [values[number] for number in range(len(leaves))]
        self.num_arguments = len(self.values)

    def _find_in_other_argument(self, number: int, names: Sequence[str]) -> Origin | None:
        """Returns the origin of an argument that is an attribute of another argument, judged by their names."""
        parts = names[number].split(".") if number < len(names) else []
        for length in range(len(parts) - 1, 0, -1):
            owner = ".".join(parts[:length])
            if owner in names:
                return Origin(names.index(owner), tuple(parts[length:]))
        return None

    def _add_fake(self, leaf: Any, fake: Any, number: int, path: tuple[str, ...]) -> Value:
        """Adds the plain tensors and symbols of an argument leaf, or of its inner tensor at an attribute path.

        Raises:
            DesugarError: Desugaring does not support such a tensor, or the fake is of another class.
        """
        if (
            isinstance(fake, SymInt) and fake.node.expr.is_number
        ):  # a symbol that was specialized to a constant
            return Constant(int(fake))
        if isinstance(fake, SymInt):
            extent = self._integer(fake, Origin(number).integer())
            return Constant(None, extent.index) if isinstance(extent, Slot) else Constant(extent)
        if not isinstance(fake, Tensor):
            return Constant(fake)
        check_nested(leaf)
        value = unwrap_value(fake, Flat())
        origin = Origin(number, path)
        if isinstance(value, Plain):
            check_class(leaf)
            slot = self.flat.add(leaf)
            self.fake_items[slot] = fake.detach() if slot != self.flat.tensor(leaf) else fake
            self.origins[slot] = origin
            self._note_inference(leaf, origin)
            self._add_extents(fake, origin)
            return Plain(slot, leaf.requires_grad and not path, leaf.is_leaf)
        assert isinstance(value, Wrapper)
        if type(fake) is not type(leaf):
            raise DesugarError(
                f"{type(leaf).__name__}.__tensor_unflatten__ returns {one_of(type(fake))}",
                instead=f"define it in {type(leaf).__name__}, and return one of that class",
            )
        inner = tuple(
            (field, self._add_fake(getattr(leaf, field), getattr(fake, field), number, (*path, field)))
            for field, _ in value.inner
        )
        dynamics = tuple(
            (field, self._integer(getattr(fake, field), Origin(number, (*path, field)).integer()))
            for field, _ in value.dynamics
        )
        size, stride = self._add_extents(fake, origin)
        return replace(
            value,
            inner=inner,
            dynamics=dynamics,
            size=size,
            stride=stride,
            requires_grad=leaf.requires_grad,
            is_leaf=leaf.is_leaf,
        )

    def _add_extents(self, fake: Tensor, origin: Origin) -> tuple[tuple[Int, ...], tuple[Int, ...]]:
        """Adds input slots for the symbols in a fake's size and stride, and returns that size and stride."""
        size, stride = (
            tuple(self._integer(extent, origin.integer(method, dim)) for dim, extent in enumerate(extents))
            for method, extents in (("size", fake.size()), ("stride", fake.stride()))
        )
        return size, stride

    def spec(self) -> InputSpec:
        """Returns the description of the inputs so far."""
        slots = range(len(self.flat.items))
        static = [n for n in range(len(self.values)) if n in self.static or n >= self.num_arguments]
        return InputSpec(
            tuple(self.values),
            tuple(self.fake_items[slot] for slot in slots),
            tuple(self.origins[slot] for slot in slots),
            self.num_arguments,
            frozenset(self.parameters),
            frozenset(self.inference),
            tuple(sorted({slot for n in static for slot in slots_of(self.values[n])})),
        )

    def primals(self) -> list[Any]:
        """Returns the arguments of the traced graph: fake tensors and symbolic ints, by input slot."""
        return [self.fake_items[slot] for slot in range(len(self.flat.items))]

    def rebuild(self, value: Value, items: list[Any]) -> Any:
        """Builds the leaf that `value` describes from plain tensors (fake or functional), and sets `requires_grad`."""
        leaf = wrap_value(value, items)
        if isinstance(value, Plain | Wrapper) and value.requires_grad:
            leaf.requires_grad_()
        return leaf

    # .................................................................................... flattening a leaf

    def _add(self, leaf: object) -> Value:
        number = len(self.values)
        check_nested(leaf)
        self._note_inference(leaf, Origin(number))
        value = unwrap_value(leaf, self.flat)
        for slot, path in paths_of(value):
            if slot not in self.fake_items:
                self.fake_items[slot] = _make_fake(self.mode, self.flat.items[slot])
                self.origins[slot] = Origin(number, path)
                self._note_inference(self.flat.items[slot], self.origins[slot])
        self.values.append(value)
        return value

    def _note_inference(self, leaf: object, origin: Origin) -> None:
        if isinstance(leaf, Tensor) and leaf.is_inference():
            self.inference.add(origin)

    def _integer(self, extent: Any, origin: Origin) -> Int:
        """Returns the input slot of a symbol; a constant or a derived int (a stride that sizes determine) unchanged.

        Args:
            extent: A size, stride or other int.
            origin: The source of the int at run time.
        """
        if isinstance(extent, SymInt) and not extent.node.expr.is_symbol:
            return extent  # type: ignore[return-value]
        known = self.flat.integer(extent)
        if isinstance(known, Slot) and known.index not in self.fake_items:
            self.fake_items[known.index] = _canonical(extent)
            self.origins[known.index] = origin
        return known


def is_traced(tensor: Tensor) -> bool:
    """Returns whether a tensor belongs to a trace: it or an inner tensor is fake, functional or a functorch wrapper."""
    return (
        isinstance(tensor, (torch_private.FunctionalTensor, torch_private.FakeTensor))
        or torch_private.is_functional_tensor(tensor)
        or torch_private.is_functorch_wrapped_tensor(tensor)
        or (is_wrapper(tensor) and any(is_traced(getattr(tensor, name)) for name in inner_names(tensor)))
    )


# --------------------------------------------------------------------------------------------- making fakes


def _make_fake(mode: Any, real: Tensor) -> Tensor:
    """Makes a fake of a plain tensor, with constant sizes and without autograd metadata.

    Raises:
        DesugarError: The tensor is of a kind that desugaring does not support (sparse, quantized, lazily conjugated).
    """
    check_plain(real)
    with torch.no_grad():
        fake = mode.from_tensor(_bare_alias(real), static_shapes=True)
    fake.item_memo = None
    return fake


def _bare_alias(real: Tensor) -> Tensor:
    """Returns a tensor over the same memory that has no autograd state.

    The result is not a view, not a parameter, not part of an autograd graph, and has no `.grad`.
    """
    if not real._is_view() and not real.requires_grad and type(real) is Tensor and real.grad is None:
        return real
    with torch.no_grad():
        blank = torch.empty(0, dtype=real.dtype, device=real.device)
        return blank.set_(real.untyped_storage(), real.storage_offset(), real.size(), real.stride())


def _canonical(extent: SymInt) -> SymInt:
    """Returns the symbol by which the trace replaced the equal symbol `extent`; else `extent` itself.

    Inductor names the input after the returned symbol.
    """
    node = extent.node
    is_own = node._expr == node.expr
    return extent if is_own else node.shape_env.create_symintnode(node.expr, hint=node.hint)


# ---------------------------------------------------------------------------------------- unsupported tensors


def check_nested(leaf: object) -> None:
    """Raises `DesugarError` for one of PyTorch's nested tensors, whose sizes a layout cannot describe."""
    if isinstance(leaf, Tensor) and leaf.is_nested:
        raise DesugarError(
            "expected strided tensors, got one of PyTorch's nested tensors, whose sizes are not ints",
            instead="pass or return its values and offsets, or a JaggedTensor (subclasses.ragged)",
        )


def check_plain(real: Tensor) -> None:
    """Raises `DesugarError` for a plain tensor that is not an ordinary strided tensor."""
    check_nested(real)
    kinds = {
        f"a {real.layout} tensor": real.layout is not torch.strided,
        "a quantized tensor": real.is_quantized,
        "a lazily conjugated or negated tensor": real.is_conj() or real.is_neg(),
    }
    unsupported = next((kind for kind, is_one in kinds.items() if is_one), None)
    if unsupported is not None:
        raise DesugarError(
            f"expected strided tensors, got {unsupported}",
            instead="convert it first (to_dense(), dequantize(), resolve_conj(), resolve_neg(), to_padded_tensor())",
        )
    check_class(real)


def check_class(real: Tensor) -> None:
    """Raises `DesugarError` for a tensor that a program cannot use because of its class.

    Such a tensor belongs to a functorch transform that has ended. Or its class has no `__tensor_flatten__` but a
    `__torch_function__`, which a program would not call.
    """
    if torch_private.is_dead_tensor_wrapper(real):
        raise DesugarError(
            "an argument is a tensor of a functorch transform that has ended",
            instead="pass its detach(), or return tensors from the transformed function",
        )
    cls = type(real)
    if cls is not Tensor and cls.__torch_function__ is not disabled_torch_function_impl:
        raise DesugarError(
            f"expected plain tensors and wrapper subclasses, got {one_of(cls)}: its class cannot be flattened "
            "(no __tensor_flatten__) and has a __torch_function__, which a program would not call",
            instead="pass x.as_subclass(torch.Tensor) and make the result one of the class again",
        )


def check_memory(leaves: Iterable[Any]) -> None:
    """Raises `DesugarError` for a tensor whose memory does not hold its values, inner tensors included.

    The memory of a lazily negated tensor holds the negated values. The zeros that a derivative of `sgn` returns have
    no memory.
    """
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        if is_wrapper(leaf):
            check_memory(getattr(leaf, name) for name in inner_names(leaf))
        elif leaf.is_neg():
            raise DesugarError(
                f"expected tensors with their values in memory, got a lazily negated one of size {tuple(leaf.shape)} "
                "(the imag of a conjugated tensor, for instance)",
                instead="call resolve_neg() on it before the compiled function",
                stock_is_wrong=True,
            )
        elif has_no_memory(leaf):
            raise DesugarError(
                f"expected tensors with their values in memory, got zeros of size {tuple(leaf.shape)} without any (a "
                "derivative of sgn or of another step, for instance)",
                instead="pass their clone()",
                stock_is_wrong=True,
            )
