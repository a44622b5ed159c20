"""The class under test: its values, the tensors that they represent, their inner tensors, and how results compare."""

from __future__ import annotations

import functools
import inspect
import random
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from subclasses._torch import (
    SequenceKey,
    is_traceable_wrapper_subclass,
    storage_key,
    tree_flatten_with_path,
    tree_leaves as leaves,
)
from subclasses.base import TensorSubclass
from subclasses.errors import one_of
from subclasses.layout import RAW, field_name
from subclasses.rules.registry import all_rules
from subclasses.spec.values import PLAIN, is_differentiable
from subclasses.testing.errors import (
    Broken,
    Skipped,
    check_that,
    refusal,
    short,
    shown,
    skip_unless,
    succeeds,
    tried,
)

Factory = Callable[[], Tensor]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Level = Literal["smoke", "gradients", "full"]
LEVELS: tuple[Level, ...] = get_args(Level)
SEED = 20240229


def seed(number: int = SEED) -> None:
    """Seeds random numbers.

    `torch.manual_seed` keeps a stack of its caller for each kind of device, also where there is none, which takes
    longer than most cases.
    """
    seed_all = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed_all(number)


class Options(TypedDict, total=False):
    """The options of :func:`subclasses.testing.check`, beside the factory.

    Attributes:
        level: ``"smoke"`` runs in eager mode alone, in seconds. ``"gradients"``, the default, compares gradients and
            compiles without Inductor, the ops with the first compiler alone. ``"full"`` tries every compiler.
        only: names of promises to try; by default all of the level.
        ops: ops to try beside the kit's own list. A mapping ``{op: lambda x: (arg, x, ...)}`` adds ops, functions
            or methods with their arguments. ``"all"``, or a collection of names such as ``{"softmax", "addmm"}``,
            picks PyTorch's OpInfo entries. These need ``wrap``.
        wrap: makes a value of the class from a plain tensor, to try OpInfo's inputs. Default: the class itself or
            its ``from_float`` and the like, where that returns a value that represents the tensor.
        reference: returns the plain tensor that a value represents, or a tuple of tensors if an op on the value runs
            on each of them. Default: ``materialize`` where the class has it. Under ``fallback="map"`` the inner
            tensors, where they have one dtype and the class has no rules.
        construct: makes a value from its inner tensors, in the order of ``__tensor_flatten__``. Default: the class
            itself, with the metadata of a value of the factory.
        sizes: factories of values that differ in sizes (and dynamic ints) alone. Default: two longer values, where
            the concatenation of inner tensors or values is right on the reference.
        variants: factories of values with other metadata. Default: a declared class with another value of a
            static bool, enum, ``Literal`` or optional, where its ops are still right.
        paths: compilers to try beside eager mode: a name and a function from a function to a compiled one.
            Default: :data:`subclasses.testing.PATHS`; see :func:`subclasses.testing.named`.
        skip: names of promises to leave out.
        rtol: relative tolerance, where a rule computes less exactly than the reference.
        atol: absolute tolerance.
    """

    level: Level
    only: Collection[str]
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


# For each option, a test of its value, and the words for it.
_FACTORIES: tuple[Callable[[Any], bool], str] = (
    lambda given: isinstance(given, Sequence) and all(map(callable, given)),
    "takes a list of factories, as in {name}=[lambda: ...]",
)
_TAKES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("sizes", "variants"), _FACTORIES),
    **dict.fromkeys(("wrap", "reference", "construct"), (callable, "takes a function")),
    "level": (lambda level: level in LEVELS, 'takes "smoke", "gradients" or "full"'),
    "ops": (
        lambda ops: not isinstance(ops, Mapping) or all(map(callable, ops.values())),
        "takes a function from a value to the arguments of each op, as in ops={{torch.add: lambda x: (x, 2)}}",
    ),
}


def check_options(factory: Any, options: Mapping[str, Any]) -> None:
    """Checks that options are known, and functions where functions are expected.

    Raises:
        TypeError: an option is unknown or of the wrong type, or the factory is not a function.
    """
    known = Options.__annotations__
    if unknown := set(options).difference(known):
        raise TypeError(
            f"check() has no option {', '.join(sorted(unknown))}; they are {', '.join(sorted(known))}"
        )
    if not callable(factory) or (isinstance(factory, type) and issubclass(factory, Tensor)):
        cls = factory if isinstance(factory, type) else type(factory)
        raise TypeError(
            f"check() takes a factory, a function without parameters that returns a value, as in check(lambda: "
            f"{cls.__name__}(...)), got {one_of(cls)}"
        )
    for name, (fits, words) in _TAKES.items():
        if options.get(name) is not None and not fits(options[name]):
            raise TypeError(f"check(): {name}= {words.format(name=name)}, got {options[name]!r}")


# Tries a call without gradients.
tried_alone = torch.no_grad()(tried)
# Finds something, such as cases, at the first call for a class, and keeps it while few other classes are tested.
once = functools.lru_cache(maxsize=4)


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


# Facts that a promise may need: a test, and words for a class that fails it.
FACTS: dict[str, tuple[Callable[[Subject], object], str]] = {
    "flatten": (
        lambda s: s.traceable,
        "needs __tensor_flatten__ and __tensor_unflatten__, which {s.name} lacks",
    ),
    "reference": (
        lambda s: s.has_reference,
        "pass reference=, which returns the plain tensor that {a_value} represents",
    ),
    "one plain tensor": (
        lambda s: len(s.meaning(s.make().detach())) == 1,
        "values represent no plain tensors, or several",
    ),
    "rules": (lambda s: s.declared, "only a declared class lists its rules"),
    "metadata": (lambda s: not s.declared or metadata(s.make()), "{s.name} has no metadata"),
    "materialize": (lambda s: hasattr(s.cls, "materialize"), "{s.name} has no materialize()"),
    "materialize if mapped": (
        lambda s: hasattr(s.cls, "materialize") or not s.is_mapped,
        "{s.name} has no materialize()",
    ),
    "declared materialize": (lambda s: s.has_materialize, "{s.name} has no materialize()"),
    "gradients": (lambda s: is_differentiable(s.make()), "{s.dtype} cannot require grad"),
    "autocast": (lambda s: s.dtype is torch.float32, "autocast leaves {s.dtype} as it is"),
    "reals": (lambda s: s.dtype.is_floating_point, "dropout is defined for floating point numbers alone"),
    "many numbers": (
        lambda s: s.make().numel() > 8,
        "draws of random ops need more than 8 numbers to differ",
    ),
    "module": (
        lambda s: "<locals>" not in s.cls.__qualname__,
        "pickle finds a class by its name, and this one is local to a function: declare it in a module",
    ),
    "plain inner tensors": (
        lambda s: all(type(t) is Tensor for t in s.inners(s.make()).values()),
        "the inner tensors are not plain",
    ),
}


class Subject:
    """A class under test.

    Attributes:
        cls: the class.
        dtype: the dtype of a value.
        declared: whether it is a ``TensorSubclass``.
        has_materialize: whether it is one with a ``materialize()``.
        is_mapped: whether a value represents its inner tensors. It does under "map", if the class has no rules and all
            inner tensors have one dtype.
        odd_sizes: the sizes of such inner tensors that have another one than the value.
        plain_of: returns the plain tensor, or tensors, that a value represents; None for a class without a reference.
        derived: the options that were not passed, and how the kit replaced them.
        refused: the calls that the class refused in the check in progress, each with its message.
        wrong_values: names of the calls that give other numbers than the reference.
        usual: the function of a case -> its result in eager mode, with which several promises compare.
    """

    @undisturbed()
    def __init__(self, factory: Factory, options: Options) -> None:
        """Makes one value, to get its class."""
        self.factory, self.options = factory, options
        x = self.make()
        if not isinstance(x, Tensor) or type(x) in PLAIN:
            raise TypeError(
                f"expected a factory of values of a traceable wrapper subclass (a Tensor with "
                f"__tensor_flatten__ and __tensor_unflatten__), got {type(x).__name__}"
            )
        self.cls: Any = type(x)
        self.name, self.declared = self.cls.__name__, issubclass(self.cls, TensorSubclass)
        self.has_materialize = self.declared and self.cls.__spec__.has_materialize
        self.traceable, self.dtype = is_traceable_wrapper_subclass(x), x.dtype
        given = options.get("reference")
        maps = self.declared and self.cls._traits.is_mapped and given is None and not all_rules(self.cls)
        self.is_mapped = maps and {t.dtype for _, t in self.inner_fields(x)} == {x.dtype}
        sizes = {f.name: list(t.shape) for f, t in self.inner_fields(x)} if self.is_mapped else {}
        self.odd_sizes = {name: size for name, size in sizes.items() if size != list(x.shape)}
        of_inners = None if self.odd_sizes else lambda x: tuple(t for _, t in self.inner_fields(x))
        self.plain_of: Any = given or (
            of_inners if self.is_mapped else getattr(self.cls, "materialize", None)
        )
        self.has_reference = self.plain_of is not None
        self.derived, self.refused, self.wrong_values = dict[str, str](), list[tuple[str, str]](), set[str]()
        self.usual = dict[Any, Any]()

    # ---- values --------------------------------------------------------------------------------------------

    def make(self, factory: Factory | None = None, number: int = SEED) -> Any:
        """A fresh value, the same one at each call: the seed is set before."""
        seed(number)
        return (factory or self.factory)()

    def trainable(self) -> Any:
        """A fresh value that requires grad.

        Raises:
            Skipped: its dtype cannot.
        """
        self.needs("gradients")
        return self.make().detach().requires_grad_()

    def needs(self, *facts: str) -> None:
        """Raises Skipped unless facts of the table ``FACTS`` hold."""
        for holds, words in map(FACTS.__getitem__, facts):
            skip_unless(holds(self), words.format(s=self, a_value=one_of(self.cls)))

    def context(self, x: Any) -> Any:
        """The metadata that a value is flattened to; None for a class that cannot be flattened."""
        return x.__tensor_flatten__()[1] if is_traceable_wrapper_subclass(x) else None

    def inners(self, x: Any) -> dict[str, Any]:
        """The inner tensors by name; the tensors among the attributes, for a class that cannot be flattened."""
        of_attributes = (name for name, t in vars(x).items() if isinstance(t, Tensor))
        names = x.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(x) else of_attributes
        return {name: getattr(x, name) for name in names}

    def floats(self, x: Any) -> dict[str, Any]:
        """The differentiable inner tensors by name."""
        return {name: t for name, t in self.inners(x).items() if is_differentiable(t)}

    def inner_fields(self, x: Any) -> list[tuple[Any, Tensor]]:
        """The inner tensors of a value of a declared class, each with its field."""
        inners = self.inners(x)
        return [(f, inners[f.attribute]) for f in self.cls.__spec__.inners if f.attribute in inners]

    def unflatten(self, x: Any, inners: Mapping[str, Any]) -> Any:
        """A value with other inner tensors, as PyTorch puts it together: no checks, nothing detached.

        Raises:
            Skipped: the class cannot be flattened.
        """
        self.needs("flatten")
        return type(x).__tensor_unflatten__(dict(inners), self.context(x), x.size(), x.stride())

    def changed(self, x: Any, change: Callable[[str, Tensor], Any], path: str = "") -> dict[str, Any]:
        """The inner tensors of a value, each plain tensor in them replaced by a function of its path and it."""
        return {name: self._replaced(t, change, f"{path}{name}") for name, t in self.inners(x).items()}

    def _replaced(self, t: Any, change: Callable[[str, Tensor], Any], path: str) -> Any:
        if not is_traceable_wrapper_subclass(t):
            return change(path, t)
        parts = self.changed(t, change, f"{path}.")
        if not isinstance(t, TensorSubclass):
            return self.unflatten(t, parts)
        return self.of_fields(t, **{f.name: parts.get(f.attribute) for f in t.__spec__.inners})

    # ---- construction --------------------------------------------------------------------------------------

    def construct(self, x: Any, inners: Mapping[str, Any]) -> Any:
        """A value with other inner tensors, as a user puts it together.

        Raises:
            Skipped: the kit has no constructor to call; ``construct=`` passes one.
        """
        build, names = self.builder(x)
        return build(*(inners.get(name) for name in names))

    def builder(self, x: Any) -> tuple[Any, list[str]]:
        """A function from inner tensors to a value with the metadata of ``x``, and their names.

        Raises:
            Skipped: the kit has no constructor to call; ``construct=`` passes one.
        """
        build: Any = self.options.get("construct")
        wrong = self._wrong_constructor if self.declared else ""
        # Carriers of dynamic ints are not part of a construction.
        names = [n for n in self.inners(x) if not self.declared or n in self.cls.__spec__.attributes]
        if build is None and self.declared and not wrong:
            # A compiler traces the function, so that it holds no value.
            fields, meta = [f.name for f in self.cls.__spec__.inners if f.attribute in names], metadata(x)
            return lambda *parts: self.cls(**dict(zip(fields, parts, strict=True)), **meta), names
        is_bound = succeeds(lambda: inspect.signature(self.cls.__new__).bind(self.cls, *names))
        if build is None and not self.declared and self.context(x) is None and is_bound:
            build = self.cls
        parts = ", ".join(map(field_name, names))
        skip_unless(build, f"pass construct=, which makes {one_of(self.cls)} from {parts}{wrong}")
        return build, names

    @functools.cached_property
    def _wrong_constructor(self) -> str:
        """Words for how the constructor of a declared class fails to take its fields; empty if it takes them."""
        x = self.make().detach()
        made, error = tried(self.of_fields, x)
        if error is not None:
            return f": its constructor takes other arguments ({shown(error)})"
        words = ": given the fields of a value, its constructor makes another value"
        return words if differs(self, self.inners(made), self.inners(x)) else ""

    def of_fields(self, x: Any, **change: Any) -> Any:
        """A value of a declared class with the fields of another one, some of them changed."""
        fields = {f.name: self.inners(x).get(f.attribute) for f in type(x).__spec__.inners}
        return type(x)(**(fields | metadata(x) | change))

    # ---- the plain tensors of a value ----------------------------------------------------------------------

    def reference(self, x: Any) -> tuple[Tensor, ...]:
        """The plain tensors that a value represents: one, or several, on each of which ops run.

        Raises:
            Skipped: the class has no reference.
        """
        self.needs("reference")
        plain = self.plain_of(x)
        return plain if isinstance(plain, tuple) else (plain,)

    def references(self, result: Any, count: int) -> tuple[Any, ...]:
        """The plain tensors that a result represents; a plain result is repeated for each of ``count`` tensors."""
        if isinstance(result, self.cls):
            return self.reference(result)
        # A value of another declared class may have the method that the reference calls.
        plain = tried(self.reference, result)[0] if isinstance(result, TensorSubclass) else None
        return plain or (result,) * count

    def meaning(self, x: Any) -> tuple[Tensor, ...]:
        """The plain tensors that a value represents; none without a reference."""
        return self.reference(x) if self.has_reference else ()

    # ---- judging -------------------------------------------------------------------------------------------

    def is_own(self, frame: FrameType) -> bool:
        """Whether a frame runs code of the class: of a package that defines its methods, or of one inside."""
        return f"{frame.f_globals.get('__name__', '')}.".startswith(self._packages)

    @functools.cached_property
    def _packages(self) -> tuple[str, ...]:
        """The packages of the class and its bases: the outer two names of each, with a dot."""
        modules = [b.__module__.rpartition(".")[0] or b.__module__ for b in self.own_bases]
        return tuple(f"{'.'.join(module.split('.')[:2])}." for module in modules)

    @functools.cached_property
    def own_bases(self) -> list[type]:
        """The class and its bases, without the classes of torch and of this package."""
        bases = [b for b in self.cls.__mro__ if b is self.cls or not b.__module__.startswith("torch.")]
        return [b for b in bases if b not in {*Tensor.__mro__, *TensorSubclass.__mro__}]

    def refuses(self, what: str, error: BaseException | None, *, deliberate: bool = True) -> bool:
        """Whether an error is a clean refusal, which is then noted.

        Args:
            what: names the call.
            error: the error that the call raised.
            deliberate: whether a ``TypeError``, ``ValueError`` or ``RuntimeError`` that the class's own code raises
                counts, too.
        """
        message = refusal(error, self.is_own if deliberate else None)
        if message is not None:
            self.refused.append((what, message))
        return message is not None

    def works(self, what: str, run: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether a call runs, and its result; a clean refusal is noted, other errors go through."""
        result, error = tried(run)
        if error is not None and (isinstance(error, Skipped) or not self.refuses(what, error)):
            raise error
        return error is None, result


def metadata(x: Any) -> dict[str, Any]:
    """The static and dynamic fields of a value of a declared class."""
    return {f.name: getattr(x, f.name) for f in (*type(x).__spec__.statics, *type(x).__spec__.dynamics)}


# ---- comparisons -----------------------------------------------------------------------------------------------


def parts(value: Any) -> dict[str, Any]:
    """The parts of a result by words for each: lists, tuples and dictionaries are flattened."""
    flat, _ = tree_flatten_with_path(value)
    words = [
        [f"result {k.idx}" if isinstance(k, SequenceKey) else str(getattr(k, "key", k)) for k in p]
        for p, _ in flat
    ]
    return {": ".join(filter(None, w)): leaf for w, (_, leaf) in zip(words, flat, strict=True)}


def check_stands_for(
    s: Subject, what: str, got: Any, expected: Sequence[Any], *, rounded: bool = False
) -> None:
    """Raises unless a result represents the results on the reference.

    Args:
        s: the class under test.
        what: names the call in the message.
        got: the result on a value: a plain tensor, a value of the class, or several of them.
        expected: the result on each plain tensor that the value represents.
        rounded: compare in the dtype of the reference, as the class may keep more digits.
    """
    for one in leaves(got):
        check_class(s, what, one)
    for i, one in enumerate(expected):
        for where, g, e in _pairs(f"{what} is not what its reference gives", got, one):
            if isinstance(g, Tensor) and isinstance(e, Tensor):
                check_attributes(where, g, e, *("shape", "dtype")[: 1 if rounded else 2])
                plains, count = s.references(g, len(expected)), len(expected)
                check_that(len(plains) == count, where, f"a value for {len(plains)} tensors", str(count))
                g = plains[i].to(e.dtype) if rounded else plains[i]
            check_equal(s, where, g, e)


def check_equal(s: Subject, what: str, got: Any, expected: Any) -> None:
    """Raises unless two results are the same in type, metadata, size, dtype and content."""
    for where, g, e in _pairs(what, got, expected):
        if isinstance(e, float | complex) and type(g) is type(e):
            g, e = torch.tensor(g), torch.tensor(e)
        if not isinstance(e, Tensor):
            check_that(type(g) is type(e) and bool(g == e), where, repr(g), repr(e))
            continue
        is_plain = {type(g), type(e)} <= PLAIN
        check_that(is_plain or type(g) is type(e), where, one_of(type(g)), one_of(type(e)))
        check_attributes(where, g, e, "shape", "dtype", "device")
        if is_traceable_wrapper_subclass(e) or isinstance(e, s.cls):
            contexts = [s.context(x) for x in (g, e)]
            check_that(contexts[0] == contexts[1], where, *(f"metadata {short(repr(c))}" for c in contexts))
            inners = [{field_name(name): t for name, t in s.inners(x).items()} for x in (g, e)]
            check_equal(s, where, *inners)
        else:
            check_close(s, where, g, e)


def check_close(s: Subject, what: str, got: Any, expected: Any) -> None:
    """Raises unless two plain tensors are equal up to rounding.

    Rounding errors of a sum are relative to its terms, and so to the largest entry, not to each entry.
    """
    got, expected = plainest(got), plainest(expected)
    rtol, atol = s.options.get("rtol"), s.options.get("atol")
    if (rtol, atol) == (None, None) and is_differentiable(expected) and expected.device.type != "meta":
        rtol = torch.finfo(expected.dtype).eps ** 0.75
        finite = torch.where(expected.isfinite(), expected, 0).abs().flatten()
        atol = rtol * float(torch.cat([finite, finite.new_ones(1)]).amax())
    options = {"rtol": rtol or 0.0, "atol": atol or 0.0, "equal_nan": True}
    _, error = tried(partial(torch.testing.assert_close, **options), got, expected)
    check_that(error is None, what, short(str(error).partition("Greatest relative")[0]), "equal numbers")


def differs(s: Subject, got: Any, expected: Any) -> bool:
    """Whether two results differ in type, metadata, size, dtype or content."""
    return not succeeds(check_equal, s, "", got, expected)


def check_class(s: Subject, what: str, got: Any) -> None:
    """Raises if a declared class has inherited a rule that makes values of the base."""
    made = type(got)
    if s.declared and made is not s.cls and issubclass(made, TensorSubclass) and issubclass(s.cls, made):
        raise Broken(
            f"{what} gives {one_of(made)}, a base of {s.name}, and not {one_of(s.cls)}",
            mend=f"for classes that inherit the rule, write type(x)(...) in place of {made.__name__}(...), which makes "
            f"{one_of(made)} whatever class its operand is of",
        )


def _pairs(what: str, got: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each result beside the expected one, with words for it.

    Raises:
        Broken: there are more or fewer results.
    """
    results, wanted = parts(got), parts(expected)
    names = [f"{len(given)} results ({', '.join(given)})" for given in (results, wanted)]
    check_that(results.keys() == wanted.keys(), what, *names)
    for name, e in wanted.items():
        yield f"{what}: {name}" if name else what, results[name], e


def check_attributes(what: str, got: Any, expected: Any, *names: str) -> None:
    """Raises unless two tensors have the same shape, dtype or other attributes."""
    for name in names:
        one, other = (list(v) if name == "shape" else v for v in (getattr(t, name) for t in (got, expected)))
        check_that(one == other, what, f"{name} {one}", str(other))


def plainest(t: Any) -> Any:
    """Converts to a tensor that torch can compare.

    Unwraps a wrapper to its first inner tensor, converts float8 to float32, and resolves lazy bits.
    """
    while is_traceable_wrapper_subclass(t):
        t = getattr(t, t.__tensor_flatten__()[0][0])
    if not isinstance(t, Tensor):
        return t
    is_float8 = t.is_floating_point() and t.dtype.itemsize == 1  # torch compares no float8 tensors
    return t.detach().float() if is_float8 else t.detach().resolve_conj().resolve_neg()


def snapshot(s: Subject, x: Any) -> Any:
    """A copy of a value with inner tensors of its own, made without a call of the class's own copy."""
    return s.unflatten(x, s.changed(x, lambda _, t: t.detach().clone()))


def memory_of(s: Subject, x: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The plain tensors inside of a value, by path, each by its storage; of a plain tensor, its own."""
    if is_traceable_wrapper_subclass(x) or isinstance(x, s.cls):
        for inner, t in s.inners(x).items():
            yield from memory_of(s, t, f"{name}.{inner.removeprefix(RAW)}")
    elif isinstance(x, Tensor) and x.numel():
        yield name, storage_key(x)


def shared_memory(s: Subject, y: Any, x: Any) -> list[tuple[str, str]]:
    """Pairs of the plain tensors in a result and in a value that lie in one storage."""
    return [(of_y, of_x) for of_y, a in memory_of(s, y) for of_x, b in memory_of(s, x) if a == b]
