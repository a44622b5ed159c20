"""The class under test: values of it, what they stand for, and how to take them apart."""

from __future__ import annotations

import functools
import inspect
import random
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypedDict

import torch
from torch import Tensor

from subclasses._torch import is_traceable_wrapper_subclass
from subclasses.base import TensorSubclass
from subclasses.errors import one_of
from subclasses.rules.registry import all_rules
from subclasses.testing.errors import Attempt, Refused, Skipped, refusal, shown, succeeds

Factory = Callable[[], Tensor]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
SEED = 20240229


def seed(number: int = SEED) -> None:
    """Seeds random numbers.

    `torch.manual_seed` keeps a stack of its caller for each kind of device, also where there is none, which takes
    longer than most cases.
    """
    seed_all = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed_all(number)


class Options(TypedDict, total=False):
    """What :func:`subclasses.testing.check` takes beside the factory.

    Attributes:
        ops: what to try beside the kit's own list. A mapping ``{op: lambda x: (arg, x, ...)}`` adds ops with
            their arguments; ``"all"`` or a collection of names such as ``{"softmax", "addmm"}`` picks PyTorch's
            OpInfo entries, which need ``wrap``.
        wrap: a value of the class from a plain tensor, so that OpInfo's inputs can be tried. Default: the class
            itself or its ``from_float`` and the like, where that gives a value that stands for the tensor.
        reference: the plain tensor that a value stands for, or a tuple of them if an op on the value means
            the op on each. Default: ``materialize`` where the class has it, the inner tensors under
            ``fallback="map"``, where they have one dtype and the class no rules.
        construct: a value from its inner tensors, in the order of ``__tensor_flatten__``. Default: the class
            itself, with the metadata of a value of the factory.
        sizes: factories of values that differ in sizes (and dynamic ints) alone. Default: two longer values,
            where concatenating inner tensors or values gives what it gives on the reference.
        variants: factories of values with other metadata. Default: a declared class with another value of a
            static bool, enum, ``Literal`` or optional, where its ops are still right.
        paths: compilers to try beside eager mode: a name and a function from a function to a compiled one.
            Default: :data:`subclasses.testing.PATHS`; see :func:`subclasses.testing.named`.
        skip: names of promises to leave out.
        rtol: relative tolerance, where a rule computes less exactly than the reference.
        atol: absolute tolerance.
    """

    ops: Mapping[Any, Callable[[Any], tuple[Any, ...]]] | Collection[str] | None
    wrap: Callable[[Tensor], Tensor] | None
    reference: Callable[[Any], Tensor | tuple[Tensor, ...]] | None
    construct: Callable[..., Tensor] | None
    sizes: Sequence[Factory]
    variants: Sequence[Factory]
    paths: Mapping[str, Compile] | None
    skip: Collection[str]
    rtol: float | None
    atol: float | None


@dataclass
class Subject:
    """A class under test."""

    factory: Factory
    options: Options

    def __post_init__(self) -> None:
        """Makes one value, to learn the class."""
        unknown = set(self.options) - set(Options.__annotations__)
        if unknown:
            known = ", ".join(sorted(Options.__annotations__))
            raise TypeError(f"check() has no option {', '.join(sorted(unknown))}; they are {known}")
        self._check_options()
        x = self.make()
        if not isinstance(x, Tensor) or type(x) in (Tensor, torch.nn.Parameter):
            raise TypeError(
                f"expected a factory of values of a traceable wrapper subclass (a Tensor with "
                f"__tensor_flatten__ and __tensor_unflatten__), got {type(x).__name__}"
            )
        self.cls: Any = type(x)
        self.traceable = is_traceable_wrapper_subclass(x)
        self.derived: dict[str, str] = {}
        self.name = self.cls.__name__
        self.declared = issubclass(self.cls, TensorSubclass)
        self.refused: list[str] = []
        self.wrong_values: set[str] = (
            set()
        )  # names of the calls that do not give what they give on the reference
        self.cache: dict[str, Any] = {}

    def _check_options(self) -> None:
        """Checks that functions are functions.

        Raises:
            TypeError: one is not.
        """
        if not callable(self.factory) or (
            isinstance(self.factory, type) and issubclass(self.factory, Tensor)
        ):
            shown = self.factory.__name__ if isinstance(self.factory, type) else type(self.factory).__name__
            raise TypeError(
                f"check() takes a factory, a function without parameters that returns a value, as in check(lambda: "
                f"{shown}(...)), got {one_of(self.factory if isinstance(self.factory, type) else type(self.factory))}"
            )
        for name in ("sizes", "variants"):
            given = self.options.get(name)
            if given is not None and not (isinstance(given, Sequence) and all(map(callable, given))):
                raise TypeError(
                    f"check(): {name}= takes a list of factories, as in {name}=[lambda: ...], got {given!r}"
                )
        for name in ("wrap", "reference", "construct"):
            given = self.options.get(name)
            if given is not None and not callable(given):
                raise TypeError(f"check(): {name}= takes a function, got {given!r}")
        ops = self.options.get("ops")
        wrong = [op for op, make in ops.items() if not callable(make)] if isinstance(ops, Mapping) else []
        if wrong:
            raise TypeError(
                f"check(): ops= takes a function from a value to the arguments of each op, as in "
                f"ops={{torch.add: lambda x: (x, 2)}}, got {ops[wrong[0]]!r} for {wrong[0]}"  # type: ignore[index]
            )

    # ---- values --------------------------------------------------------------------------------------------

    def make(self, factory: Factory | None = None) -> Any:
        """A fresh value, the same one at each call: the seed is set before."""
        seed()
        return (factory or self.factory)()

    def trainable(self) -> Any:
        """A fresh value that requires grad.

        Raises:
            Skipped: its dtype cannot.
        """
        x = self.make().detach()
        if not (x.is_floating_point() or x.is_complex()):
            raise Skipped(f"{x.dtype} cannot require grad")
        return x.requires_grad_()

    def needs_flatten(self) -> None:
        """Raises Skipped for a class that PyTorch cannot take apart."""
        if not self.traceable:
            raise Skipped(f"needs __tensor_flatten__ and __tensor_unflatten__, which {self.name} lacks")

    def context(self, x: Any) -> Any:
        """The metadata that a value is flattened to; None for a class that cannot be flattened."""
        return x.__tensor_flatten__()[1] if is_traceable_wrapper_subclass(x) else None

    def inners(self, x: Any) -> dict[str, Any]:
        """The inner tensors by name; the tensors among the attributes, for a class that cannot be flattened."""
        if is_traceable_wrapper_subclass(x):
            return {name: getattr(x, name) for name in x.__tensor_flatten__()[0]}
        return {name: t for name, t in vars(x).items() if isinstance(t, Tensor)}

    def unflatten(self, x: Any, inners: Mapping[str, Any]) -> Any:
        """A value with other inner tensors, as PyTorch puts it together: no checks, nothing detached.

        Raises:
            Skipped: the class cannot be flattened.
        """
        self.needs_flatten()
        return type(x).__tensor_unflatten__(dict(inners), self.context(x), x.size(), x.stride())

    def construct(self, x: Any, inners: Mapping[str, Any]) -> Any:
        """A value with other inner tensors, as a user puts it together.

        Raises:
            Skipped: the kit cannot know how.
        """
        build, names = self.builder(x)
        return build(*(inners.get(name) for name in names))

    def builder(self, x: Any) -> tuple[Callable[..., Any], list[str]]:
        """A function from inner tensors to a value with the metadata of ``x``, and their names.

        Raises:
            Skipped: the kit cannot know how.
        """
        cls, names = self.cls, list(self.inners(x))
        if self.declared:  # carriers of dynamic ints are no part of a construction
            names = [n for n in names if n in cls.__spec__.attributes]
        build = self.options.get("construct")
        if build is not None:
            return build, names
        if self.declared:
            self._check_constructor()
            fields, meta = [f.name for f in cls.__spec__.inners if f.attribute in names], self.metadata(x)
            return lambda *parts: cls(**dict(zip(fields, parts, strict=True)), **meta), names
        takes_inners = succeeds(lambda: inspect.signature(cls.__new__).bind(cls, *names))
        if self.context(x) is not None or not takes_inners:
            raise Skipped(f"pass construct=, which makes {one_of(cls)} from {', '.join(names)}")
        return cls, names

    def _check_constructor(self) -> None:
        """Raises Skipped for a declared class whose own constructor makes no equal value of the fields of one."""
        if self._wrong_constructor:
            fields = ", ".join(self.cls.__spec__.inner_names)
            raise Skipped(
                f"pass construct=, which makes {one_of(self.cls)} from {fields}: {self._wrong_constructor}"
            )

    @functools.cached_property
    def _wrong_constructor(self) -> str:
        """How the constructor of a declared class fails to take its fields; empty if it takes them."""
        cls = self.cls
        if inspect.unwrap(cls.__new__) is cls._new and cls.__init__ is Tensor.__init__:  # the generated one
            return ""
        x = self.make().detach()
        fields = {f.name: self.inners(x).get(f.attribute) for f in cls.__spec__.inners}
        made = None
        with Attempt() as attempt:
            made = cls(**fields, **self.metadata(x))
        if attempt.error is not None:
            return f"its constructor takes other arguments ({shown(attempt.error)})"
        pairs = [(t, self.inners(made)[name]) for name, t in self.inners(x).items()]
        if all(
            a is b or succeeds(functools.partial(torch.testing.assert_close, equal_nan=True), a, b)
            for a, b in pairs
        ):
            return ""
        return "given the fields of a value, its constructor makes another value"

    def metadata(self, x: Any) -> dict[str, Any]:
        """The static and dynamic fields of a value of a declared class."""
        spec = self.cls.__spec__
        return {f.name: getattr(x, f.name) for f in (*spec.statics, *spec.dynamics)}

    def hiding_fields(self) -> set[str]:
        """The fields of a declared class that hide a method of tensors."""
        if not self.declared:
            return set()
        spec = self.cls.__spec__
        names = {f.name for f in (*spec.inners, *spec.statics, *spec.dynamics)}
        return {name for name in names if hasattr(Tensor, name)}

    # ---- what it stands for --------------------------------------------------------------------------------

    def reference(self, x: Any) -> tuple[Tensor, ...]:
        """The plain tensors that a value stands for: one, or several that ops are run on one by one.

        Raises:
            Skipped: nobody said.
        """
        if self._reference is None:
            raise Skipped(f"pass reference=, which says what plain tensor {one_of(self.cls)} stands for")
        plain = self._reference(x)
        return plain if isinstance(plain, tuple) else (plain,)

    def references(self, result: Any, count: int) -> tuple[Any, ...]:
        """The plain tensors that a result stands for; a plain result counts for each of ``count`` tensors."""
        return self.reference(result) if isinstance(result, self.cls) else (result,) * count

    @property
    def has_reference(self) -> bool:
        """Whether it is known what a value stands for."""
        return self._reference is not None

    @functools.cached_property
    def _reference(self) -> Callable[[Any], Any] | None:
        if self.options.get("reference") is not None:
            return self.options.get("reference")
        if not self.is_mapped:
            return getattr(self.cls, "materialize", None)
        return None if self.odd_sizes() else lambda x: tuple(x.__dict__[n] for n in x._layout.present)

    @functools.cached_property
    def is_mapped(self) -> bool:
        """Whether a value stands for its inner tensors: under "map", without rules, and where all have one dtype."""
        if not self.declared or not self.cls._traits.is_mapped or self.options.get("reference") is not None:
            return False
        x = self.make()
        dtypes = {x.__dict__[name].dtype for name in x._layout.present}
        return not all_rules(self.cls) and dtypes == {x.dtype}

    def odd_sizes(self) -> dict[str, list[int]]:
        """The sizes of the inner tensors that have another one than the value."""
        x = self.make()
        return {f.name: list(t.shape) for f, t in self.held(x) if t.shape != x.shape}

    def held(self, x: Any) -> list[tuple[Any, Tensor]]:
        """The inner tensors of a value of a declared class, each with its field."""
        pairs = [(f, self.inners(x).get(f.attribute)) for f in self.cls.__spec__.inners]
        return [(f, t) for f, t in pairs if t is not None]

    # ---- judging -------------------------------------------------------------------------------------------

    def is_own(self, frame: FrameType) -> bool:
        """Whether a frame runs code of the class: of a module that defines its methods, or of one around it."""
        name = frame.f_globals.get("__name__", "")
        return name in self._modules or name.startswith(self._packages)

    @functools.cached_property
    def _packages(self) -> tuple[str, ...]:
        """The packages of its modules, and, of a package inside of others, the one around it, each with a dot."""
        packages = {package for module in self._modules if (package := module.rpartition(".")[0])}
        around = {p.rpartition(".")[0] for p in packages if p.count(".") > 1}
        return tuple(f"{p}." for p in packages | around)

    @functools.cached_property
    def own_bases(self) -> list[type]:
        """The class and its bases, without those of torch and of this package."""
        known = {*Tensor.__mro__, *TensorSubclass.__mro__}
        bases = [b for b in self.cls.__mro__ if b is self.cls or not b.__module__.startswith("torch.")]
        return [b for b in bases if b not in known]

    @functools.cached_property
    def _modules(self) -> set[str]:
        """The modules of the functions of the class."""
        members = [getattr(m, "__func__", m) for b in self.own_bases for m in vars(b).values()]
        declared = (
            {b.__module__ for b in self.own_bases} if self.declared else set()
        )  # its rules are beside it
        return declared | {m.__globals__.get("__name__", "") for m in members if inspect.isfunction(m)} - {""}

    def refuses(self, what: str, error: BaseException | None, *, deliberate: bool = True) -> bool:
        """Whether an error is a clean refusal, which is then noted.

        Args:
            what: what was called.
            error: what it raised.
            deliberate: whether a ``TypeError``, ``ValueError`` or ``RuntimeError`` that the class's own code raises
                counts, too.
        """
        message = refusal(error, self.is_own if deliberate else None)
        if message is not None:
            self.refused.append(message if isinstance(error, Refused) else f"{what}: {message}")
        return message is not None

    def call(self, what: str, run: Callable[[], Any], *, any_error: bool = False) -> Any:
        """The result of a call.

        Raises:
            Refused: the class refuses it, or raises any error under ``any_error``; begins with ``what``.
        """
        try:
            return run()
        except (Refused, Skipped):
            raise
        except Exception as error:
            message = shown(error) if any_error else refusal(error, self.is_own)
            if message is None:
                raise
            raise Refused(f"{what}: {message}") from error

    def works(self, what: str, run: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether a call runs, and its result; a clean refusal is noted, other errors go through."""
        try:
            return True, self.call(what, run)
        except Refused as refused:
            return not self.refuses(what, refused), None


def is_differentiable(t: Any) -> bool:
    """Whether gradients can flow to a tensor, judging by its dtype."""
    return isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leaves the caller's random state and warnings as they are."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(state)
