"""``TensorSubclass``: the base class whose subclass statements are declarations.

Each class statement is collected into a ``SubclassSpec``, and every method that PyTorch requires of a traceable wrapper
subclass is generated from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinMethodType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, dataclass_transform, overload

import torch
from torch import Tensor

from subclasses._torch import OpOverload, OpOverloadPacket, is_tracing
from subclasses._torch_capture import choose_paths_as_eager, desugar_exported
from subclasses.autograd import construct
from subclasses.autograd.above import call
from subclasses.autograd.cotangent_class import CotangentClass, make_cotangent
from subclasses.dispatch.views import view_functions
from subclasses.errors import DispatchError, SpecError, one_of
from subclasses.higher_order.dispatch import intercept
from subclasses.layout import Layout, has_values
from subclasses.methods.install import install
from subclasses.rules.checks import check_key, check_rule
from subclasses.rules.registration_checks import check_called, check_derivative
from subclasses.rules.registry import BOOK, RuleBook, by_formula, is_decomposed, registration
from subclasses.spec.annotations import names_around
from subclasses.spec.collect import SubclassSpec, collect_spec, raise_unknown_keywords
from subclasses.spec.construction import check_class
from subclasses.spec.fields import dynamic, inner, static
from subclasses.spec.load_checks import check_by_constructor
from subclasses.spec.traits import Traits
from subclasses.spec.undeclared import check_undeclared
from subclasses.spec.values import is_declared

RuleType = TypeVar("RuleType", bound=Callable[..., Any])

intercept()
desugar_exported(is_declared)
choose_paths_as_eager(is_declared)


@dataclass_transform(field_specifiers=(inner, static, dynamic))
class TensorSubclass(Tensor):
    """Base of all declared classes; the package's guide shows how to declare one.

    Class keywords:
        size_from: name of the inner tensor whose size, stride and device are the outer ones. Default: the first.
        dtype_from: name of the inner tensor whose dtype is the outer one. Default: ``size_from``.
        fallback: how an op without a rule runs: ``"error"`` (default), ``"views"``, ``"materialize"`` or ``"map"``.
        decompose: whether PyTorch's decompositions may be used, or the collection of ops that may be decomposed.
        trainable: whether an optimizer updates the inner tensors of a Parameter. Default: only with ``fallback="map"``.
        kind: a value is one plain tensor (``"representation"``) or its inner tensors (``"structure"``).

    A class with ``materialize`` is a representation by default, except with ``fallback="map"``.

    The gradient of a Parameter of a trainable class is a cotangent of the class. Weight decay, clipping and averages
    act on each differentiable inner tensor. With a Parameter of a class that is not trainable, a step of
    an optimizer raises before it writes. A rule for ``add_`` or ``add`` of a representation allows the step.
    """

    __spec__: SubclassSpec
    __source__: str
    _layout: Layout
    _traits: Traits
    _instead = ""  # advice for users in the error for an op without a rule
    _is_ragged = False  # whether a cotangent is a value, whose rules add inner tensors
    _is_cotangent = False
    _value_cls: Any  # the class of values, of a class of cotangents; any other class itself
    Cotangent: Any
    """The class of the derivatives by the inner tensors of a value; ``x.cotangent(...)`` makes one."""
    _has_function_rules = False  # whether it has rules for Python-level functions
    _runs_above = False  # whether its ops run above autograd where gradients are recorded
    _rules_views = False  # whether one of them is for a view
    _has_formulas = False  # whether it has rules for ops whose derivative is PyTorch's formula
    # Returns the dims of a value (key "") and of its inner tensors, by field, that differ from value to value.
    _varying_dims: Callable[[Any], Mapping[str, Collection[int]]] | None = None

    if TYPE_CHECKING:
        # Tensor.outer is the outer product. A declared class uses the name for a function of its fields.
        outer: Any
        # Generated for each class; each has its text as ``__source__``.
        __tensor_flatten__: Any
        __tensor_unflatten__: Any
        __torch_dispatch__: Any

        # Tensor declares that ops return Tensor. The rules and the fallback of a declared class determine the type that
        # an operator returns. Copies are values of the class, unless their dtype changes.
        def __add__(self, other: Any) -> Any: ...
        def __radd__(self, other: Any) -> Any: ...
        def __sub__(self, other: Any) -> Any: ...
        def __rsub__(self, other: Any) -> Any: ...
        def __mul__(self, other: Any) -> Any: ...
        def __rmul__(self, other: Any) -> Any: ...
        def __truediv__(self, other: Any) -> Any: ...
        def __rtruediv__(self, other: Any) -> Any: ...
        def __pow__(self, other: Any) -> Any: ...
        def __rpow__(self, other: Any) -> Any: ...
        def __matmul__(self, other: Any) -> Any: ...
        def __rmatmul__(self, other: Any) -> Any: ...
        def __neg__(self) -> Any: ...
        def __getitem__(self, indices: Any, /) -> Any: ...
        def to(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102
        def detach(self) -> Self: ...  # noqa: D102
        def clone(self, *, memory_format: Any = None) -> Self: ...  # noqa: D102
        def cpu(self, memory_format: Any = None) -> Self: ...  # noqa: D102

    def __init_subclass__(
        cls,
        *,
        size_from: str | None = None,
        dtype_from: str | None = None,
        fallback: Literal["error", "views", "materialize", "map"] | None = None,
        decompose: bool | Collection[Any] | None = None,
        trainable: bool | None = None,
        kind: Literal["representation", "structure"] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs and isinstance(super().__init_subclass__, BuiltinMethodType):  # object's takes no keywords
            raise_unknown_keywords(cls, kwargs)
        super().__init_subclass__(**kwargs)
        keywords = {
            "size_from": size_from,
            "dtype_from": dtype_from,
            "fallback": fallback,
            "decompose": decompose,
            "trainable": trainable,
            "kind": kind,
        }
        scope = names_around(sys._getframe(1))
        if not cls._is_cotangent:
            check_undeclared(cls, scope)
        cls._value_cls = cls.__base__ if cls._is_cotangent else cls
        cls.Cotangent = CotangentClass()
        cls.__spec__ = collect_spec(cls, keywords, scope)
        setattr(cls, BOOK, RuleBook())
        install(cls, TensorSubclass)

    def __new__(cls, *inners: Any, **metadata: Any) -> Self:
        """Calls the generated constructor; a class body's own ``__new__`` ends with ``super().__new__(cls, ...)``."""
        check_class(cls)
        if cls is TensorSubclass:
            raise TypeError(
                "TensorSubclass has no fields; declare a class: `class Pair(TensorSubclass): ...`"
            )
        return cls._new(cls, *inners, **metadata)  # type: ignore[attr-defined]

    if not TYPE_CHECKING:

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Calls the generated method, for a class body's own that ends with ``super().__torch_dispatch__(...)``."""
            return cls._dispatch(cls, func, types, args, kwargs)

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Calls the generated method, for a class body's own that ends with ``super().__torch_function__(...)``."""
            return cls._function(cls, func, types, args, kwargs)

    # ---- rules -------------------------------------------------------------------------------------------------

    @classmethod
    def implements(
        cls, *ops: Any, derivative: Literal["formula"] | None = None
    ) -> Callable[[RuleType], RuleType]:
        """Registers the decorated function as the rule for ops; it is called as ``rule(func, *args, **kwargs)``.

        Args:
            *ops: each an ``OpOverload`` or a packet, a Python-level function, a ``torch.Tag``, or a family of ops
                (``subclasses.arithmetic``, ``comparisons``, ``reductions``). The rule of a function runs above
                autograd, on differentiable inner tensors. So does a rule of a structure for an op. A rule of a
                representation for an op, a family or a tag runs below autograd, on raw inner tensors. A function of
                the author is accepted if it dispatches by ``torch.overrides.wrap_torch_function``.
            derivative: ``"formula"`` for a rule of a structure with ``materialize`` that computes the op on the tensors
                which values represent. Its derivative is PyTorch's formula, as for a rule of a representation. It runs
                below autograd. Reading inner tensors of its result raises where gradients are recorded.

        If values of the class exist, `torch.compiler.reset()` drops all compiled programs of the process: one may
        have been compiled without the rule.

        Raises:
            SpecError: an op is of another kind, torch never calls a rule for it, or it already has a rule on this
                class. Also if the rule is not callable. No op is registered then.
        """
        if cls is TensorSubclass:
            raise SpecError(
                "TensorSubclass.implements: TensorSubclass itself has no rules",
                code="class-not-declared",
                hint="register a rule on a class declared with TensorSubclass",
            )
        if not ops:
            raise SpecError(
                f"{cls.__name__}.implements() needs an op, such as torch.ops.aten.mul.Tensor", code="rule-key"
            )
        for op in ops:
            check_key(cls, op)
        check_called(cls, TensorSubclass, ops)
        check_derivative(cls, ops, derivative)

        def register(rule: RuleType) -> RuleType:
            check_rule(cls, ops, rule)
            with registration(cls, lambda: _refresh(cls)) as register_rule:
                register_rule(ops, rule if derivative is None else by_formula(rule))
            _drop_programs(cls)
            return rule

        return register

    @classmethod
    def unruled(cls, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a Python-level function as if it had no rule, for a rule that only normalizes its arguments.

        Args:
            func: the function, or an op that PyTorch decomposes before dispatch. A rule for any other op, for a family
                or for a tag cannot be skipped.
            *args: its arguments.
            **kwargs: its keyword arguments.

        Raises:
            SpecError: ``func`` is another op, or not a function.
        """
        if not callable(func):
            raise SpecError(
                f"{cls.__name__}.unruled takes the function before its arguments, got {one_of(type(func))}",
                code="rule-key",
            )
        if isinstance(func, OpOverload | OpOverloadPacket) and not is_decomposed(func):
            raise SpecError(
                f"{cls.__name__}.unruled takes a Python-level function, such as torch.add, got {func}, whose rule runs "
                "below autograd",
                code="rule-key",
                hint="compute with the inner tensors, or with x.materialize()",
            )
        if cls.__spec__.fallback == "materialize" and func in view_functions:
            return view_functions[func](func, *args, **kwargs)
        return call(func, (cls,), args, kwargs)

    def __get_tensor_shard__(self, index: Any) -> Self:
        """Returns the value that a distributed checkpoint saves, or loads into: this one, also inside a ``DTensor``."""
        return self.detach()

    # ---- inner tensors -----------------------------------------------------------------------------------------

    @overload
    def unwrap(self) -> tuple[Any, ...]: ...

    @overload
    def unwrap(self, name: str) -> Tensor: ...

    def unwrap(self, name: str | None = None) -> Any:
        """Returns one inner tensor, or all of them, as a differentiable function of this tensor.

        If a rule for an op made this value, its inner tensors are functions of the operands of the rule, which PyTorch
        differentiates. Code must not write to a tensor that this returns where autograd records.

        Args:
            name: the inner tensor to return. Without a name, the result is a tuple of all inner tensors in order of
                declaration, ``None`` for absent ones.

        Raises:
            AttributeError: the class has no inner tensor of this name.
        """
        spec = type(self).__spec__
        if name is None:
            return construct.unwrap(self, spec.attributes)
        if name in spec.inner_names:
            return construct.unwrap_one(self, spec.attributes[spec.inner_names.index(name)])
        if name not in dict(spec.derived):
            raise AttributeError(
                f"{type(self).__name__} has no inner tensor {name!r}; its inner tensors are "
                f"{', '.join(spec.inner_names)}"
            )
        return getattr(type(self), name).make(construct.open_wrapper(self))

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets in place whether autograd records ops on this tensor, as for any tensor."""
        if not (requires_grad and self.requires_grad):  # a non-leaf tensor accepts True
            self.requires_grad = requires_grad
        return self

    def cotangent(self, *inners: Tensor | None, **named: Tensor | None) -> Any:
        """Returns a cotangent of this value, as an autograd function and a hook return it.

        Args:
            *inners: the derivatives in order of declaration, each of the size and dtype of its inner tensor.
            **named: derivatives by the names of inner tensors. One that is not given, or None, is zero.

        Raises:
            TypeError: a name is unknown or given twice, or an inner tensor that has no derivative is named.
            ValueError: a derivative has another size than its inner tensor.
        """
        return make_cotangent(self, inners, named)

    def wrap_cotangent(self, cotangent: Tensor) -> Any:
        """Converts a plain cotangent of the outer size to a cotangent of this class.

        The result has the same metadata and the same non-differentiable inner tensors as this value. The backward of a
        construction calls this method on the value that was constructed. The default pulls the cotangent back through
        ``materialize``. A class without ``materialize`` overrides it if plain cotangents can reach it. The
        differentiable inner tensors of this value then have the right size and dtype, but undefined contents.

        Raises:
            DispatchError: the class has no ``materialize`` and does not override this method.
        """
        if not type(self).__spec__.has_materialize:
            raise DispatchError(
                f"{type(self).__name__}: a plain cotangent needs a method `materialize(self) -> Tensor`, or "
                f"`wrap_cotangent(self, cotangent)` that returns it as {one_of(type(self))}",
                code="cotangent-plain",
            )
        return construct.pull_back(self, cotangent)

    # ---- memory ------------------------------------------------------------------------------------------------

    def apply_(self, callable: Callable[..., Any]) -> Any:
        """Raises DispatchError: PyTorch would write to memory that a wrapper does not have."""
        raise _no_memory(self, "apply_(...)")

    def __dlpack__(self, **options: Any) -> Any:
        """Raises DispatchError: ``from_dlpack`` would read memory that a wrapper does not have."""
        raise _no_memory(self, "__dlpack__()")

    # ---- files -------------------------------------------------------------------------------------------------

    @classmethod
    def check_loaded(cls, **fields: Any) -> None:
        """Raises unless the class's own constructor accepts fields; called before a value is made from a file.

        The default calls the ``__new__`` of the class body with every field by its name, and drops the result. A class
        overrides this method if its ``__new__`` takes other arguments, or makes other fields of them. It also overrides
        it to check more for a file than for a caller. The default checks nothing if an inner tensor has no data, as on
        the meta device. The declared dtypes and shapes are checked afterwards in any case.

        Args:
            **fields: the inner tensors, None for absent ones, and the metadata.

        Raises:
            TypeError: as the constructor does.
            ValueError: as the constructor does.
        """
        check_by_constructor(cls, fields)

    def __setstate__(self, state: Any) -> None:
        """Raises TypeError: a file has the arguments that construct a value, which are checked, and no other state."""
        raise TypeError(
            f"{type(self).__name__}.__setstate__: the state of a value is in the arguments that make it, and a file "
            f"may set no other, got {type(state).__name__}"
        )


def _no_memory(x: TensorSubclass, call: str) -> DispatchError:
    spec = type(x).__spec__
    whole = ", or on x.materialize()" if spec.has_materialize else ""
    return DispatchError(
        f"{type(x).__name__}.{call} reads the numbers of a tensor in memory, and {one_of(type(x))} has none of its own",
        code="no-memory",
        hint=f"call it on an inner tensor (x.{spec.inner_names[0]}){whole}",
    )


@contextmanager
def many_rules(cls: Any) -> Iterator[Callable[[tuple[Any, ...], Callable[..., Any]], None]]:
    """Yields a function that registers a rule under keys, for a class that has no values yet.

    The rules become visible together, at the end of the block. ``check_key`` and ``check_rule`` are not called: a test
    calls them for the rules of this package's classes, so that an import does not have to.
    """
    with registration(cls, lambda: _refresh(cls)) as register_rule:
        yield register_rule


def _refresh(cls: Any) -> None:
    """Makes a new rule visible to a class and all classes that inherit from it."""
    for child in (cls._value_cls, *descendants(cls._value_cls)):
        child._refresh()


def _drop_programs(cls: Any) -> None:
    """Drops all compiled programs if one may have been compiled for a class: it has no guard for the rules."""
    if "torch._dynamo" in sys.modules and any(map(has_values, (cls, *descendants(cls)))) and not is_tracing():
        torch.compiler.reset()


def descendants(cls: type) -> list[type]:
    """Returns the classes that inherit from a class, directly or not."""
    return [d for child in cls.__subclasses__() for d in (child, *descendants(child))]
