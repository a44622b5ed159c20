"""``TensorSubclass``: from a class statement to a class that does all that PyTorch asks of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import BuiltinMethodType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, dataclass_transform, overload

from torch import Tensor

from subclasses._torch import call_unruled
from subclasses.autograd import construct
from subclasses.dispatch.rules import BOOK, RuleBook, registering
from subclasses.errors import DispatchError, SpecError
from subclasses.generate.install import install
from subclasses.higher_order.dispatch import intercept
from subclasses.layout import Layout
from subclasses.spec.collect import SubclassSpec, collect_spec, raise_unknown_keywords
from subclasses.spec.fields import dynamic, inner, static

RuleType = TypeVar("RuleType", bound=Callable[..., Any])

intercept()


@dataclass_transform(field_specifiers=(inner, static, dynamic))
class TensorSubclass(Tensor):
    """Base of all declared classes; see the package's guide for how to declare one.

    Class keywords:
        size_from: the inner tensor whose size, stride and device are the outer ones; default the first.
        dtype_from: the inner tensor whose dtype is the outer one; default ``size_from``.
        fallback: what to do with an op that has no rule: ``"error"``, ``"materialize"`` or ``"map"``.
        decompose: whether PyTorch's decompositions may be used, or for which ops.
    """

    __spec__: SubclassSpec
    __source__: str
    _layout: Layout
    _saves_inners = False
    _instead = ""  # what a user may do where an op has no rule, added to the error

    if TYPE_CHECKING:
        # Tensor's method of this name is the outer product; a declared class has a function of its fields here.
        outer: Any

    def __init_subclass__(
        cls,
        *,
        size_from: str | None = None,
        dtype_from: str | None = None,
        fallback: Literal["error", "materialize", "map"] | None = None,
        decompose: bool | Collection[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs and isinstance(super().__init_subclass__, BuiltinMethodType):  # object's: nobody takes them
            raise_unknown_keywords(cls, kwargs)
        super().__init_subclass__(**kwargs)
        keywords = {
            "size_from": size_from,
            "dtype_from": dtype_from,
            "fallback": fallback,
            "decompose": decompose,
        }
        cls.__spec__ = collect_spec(cls, keywords, sys._getframe(1).f_locals)
        setattr(cls, BOOK, RuleBook())
        install(cls, TensorSubclass)

    def __new__(cls, *inners: Any, **metadata: Any) -> Self:
        """The generated constructor, for a class body's own ``__new__`` to end with ``super().__new__(cls, ...)``."""
        if cls is TensorSubclass:
            raise TypeError(
                "TensorSubclass has no fields; declare a class: `class Pair(TensorSubclass): ...`"
            )
        return cls._new(cls, *inners, **metadata)  # type: ignore[attr-defined]

    # ---- rules -------------------------------------------------------------------------------------------------

    @classmethod
    def implements(cls, *ops: Any) -> Callable[[RuleType], RuleType]:
        """Registers the decorated function as the rule for ops; called as ``rule(func, *args, **kwargs)``.

        Args:
            *ops: an ``OpOverload`` or a packet (the rule runs below autograd, on raw inner tensors),
                Python-level functions (it runs above autograd), or a ``torch.Tag``.

        Raises:
            SpecError: an op is of no such kind, or has a rule on this class already, or the rule cannot be
                called; nothing is registered then.
        """
        if cls is TensorSubclass:
            raise SpecError(
                "TensorSubclass.implements: register a rule on a class declared with TensorSubclass"
            )
        if not ops:
            raise SpecError(f"{cls.__name__}.implements() needs an op, such as torch.ops.aten.mul.Tensor")

        def register(rule: RuleType) -> RuleType:
            with registering(cls, lambda: _refresh(cls)) as file:
                for op in ops:
                    file(op, rule)
            return rule

        return register

    @classmethod
    def unruled(cls, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a Python-level function as if it had no rule, so that a rule may settle its arguments only."""
        return call_unruled(func, (cls,), args, kwargs)

    # ---- inner tensors -----------------------------------------------------------------------------------------

    @overload
    def unwrap(self) -> tuple[Tensor | None, ...]: ...

    @overload
    def unwrap(self, name: str) -> Tensor: ...

    def unwrap(self, name: str | None = None) -> Any:
        """An inner tensor, or all of them, as a differentiable function of this tensor.

        Args:
            name: the inner tensor; without it a tuple of all in order of declaration, ``None`` for absent ones.
        """
        names = type(self).__spec__.inner_names
        if name is None:
            return construct.unwrap(self, names)
        if name not in names:
            raise AttributeError(
                f"{type(self).__name__} has no inner tensor {name!r}; they are {', '.join(names)}"
            )
        return construct.unwrap(self, (name,))[0]

    def wrap_cotangent(self, cotangent: Tensor) -> Any:
        """A plain cotangent of the outer size as one of this class: same metadata, same fixed inner tensors.

        Called in the backward of a construction with the value that was constructed. The default pulls the
        cotangent back through ``materialize``. A class without ``materialize`` overrides it where plain
        cotangents can reach it; there the differentiable inner tensors of this value have the right size and
        dtype and hold nothing.
        """
        if not type(self).__spec__.has_materialize:
            raise DispatchError(f"{type(self).__name__} does not say what a plain cotangent means for it")
        return construct.pull_back(self, cotangent)


def _refresh(cls: Any) -> None:
    """Makes a class and all that inherit from it see a new rule."""
    for child in (cls, *_descendants(cls)):
        child._refresh()


def _descendants(cls: type) -> list[type]:
    return [d for child in cls.__subclasses__() for d in (child, *_descendants(child))]
