"""PyTorch's own list of ops, run on values of a class and on the tensors that they represent."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from subclasses._torch import op_infos
from subclasses.testing import derive
from subclasses.testing.calls import Case
from subclasses.testing.cases import plains_of
from subclasses.testing.contexts import Setting
from subclasses.testing.errors import problem, skip_unless, succeeds, tried
from subclasses.testing.oracles import by_reference
from subclasses.testing.subject import Options, Subject, leaves, seed, undisturbed

Verdict = Literal["right", "refused", "wrong"]

# Ops whose results are not a function of their arguments, or that PyTorch's samples call for their side effects.
_RANDOM = frozenset(
    """bernoulli cauchy empty empty_like empty_permuted empty_strided exponential geometric log_normal
    multinomial new_empty new_empty_strided normal rand_like randint_like randn_like uniform item
    nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.alpha_dropout
    nn.functional.feature_alpha_dropout nn.functional.rrelu nn.functional.fractional_max_pool2d
    nn.functional.fractional_max_pool3d randn randint full zeros ones eye arange linspace logspace
    svd_lowrank pca_lowrank nn.functional.scaled_dot_product_attention nn.functional.multi_head_attention_forward
    to_sparse resize_ resize_as_ sparse.mm sparse.sampled_addmm""".split()
)


# Tried where `wrap` is derived: ops that most programs call, exact enough for any class.
_COMMON = frozenset(
    """add sub mul div neg abs exp log sqrt sin cos tanh sigmoid pow maximum clamp where eq gt floor erf
    sum mean amax std logsumexp cumsum sort argmax softmax log_softmax mm bmm addmm matmul outer
    cat stack split chunk unbind reshape view transpose permute squeeze unsqueeze expand flip roll tril
    gather index_select masked_fill nn.functional.relu nn.functional.gelu nn.functional.silu
    nn.functional.softplus nn.functional.linear nn.functional.layer_norm nn.functional.embedding""".split()
)
_FEW = 8  # samples of an op that are looked through for one that a derived `wrap` takes


class Verdicts(dict[str, tuple[Verdict, str]]):
    """For each op by its name in PyTorch's list: right, refused or wrong, and the message behind it."""

    def count(self, verdict: Verdict) -> int:
        """How many ops got a verdict."""
        return [outcome for outcome, _ in self.values()].count(verdict)

    def __str__(self) -> str:
        return f"{self.count('right')} right, {self.count('refused')} refused, {self.count('wrong')} wrong"


def sweep(
    factory: Callable[[], Tensor], *, samples: int = 1, ops: Collection[str] | str = "all", **options: Any
) -> Verdicts:
    """Runs PyTorch's OpInfo entries on a class, in eager mode, and compares with its reference.

    Args:
        factory: returns a value of the class; the entries run with the dtype of that value.
        samples: how many sample inputs of each op to try.
        ops: names of entries, or ``"all"``.
        options: as for :func:`subclasses.testing.check`; ``wrap`` is needed where it cannot be derived.
    """
    verdicts = Verdicts()
    with undisturbed():
        s = Subject(factory, Options(**options))  # type: ignore[typeddict-item]
        for case in samples_of(s, ops, samples):
            _, error = tried(on_sample, s, case)
            outcome: tuple[Verdict, str] = ("wrong", problem(case.name, error)) if error else ("right", "")
            outcome = ("refused", ": ".join(s.refused[-1])) if s.refuses(case.name, error) else outcome
            verdicts[case.name] = max(
                verdicts.get(case.name, outcome),
                outcome,
                key=lambda f: ("right", "refused", "wrong").index(f[0]),
            )
    return verdicts


def samples_of(s: Subject, ops: Any, most: int = 1) -> Iterator[Case]:
    """Up to ``most`` sample inputs of each op that ``ops`` names: else of the common ops where ``wrap`` is derived."""
    wrap = derive.wrap(s)
    if ops is None or isinstance(ops, Mapping):
        ops = "all" if s.options.get("wrap") else _COMMON
    entries, error = tried(op_infos)
    skip_unless(error is None, f"PyTorch's OpInfo list needs numpy and expecttest: {error}")
    dtype, few = s.reference(s.make())[0].dtype, ops is _COMMON
    for entry in entries:
        is_left = entry.name in _RANDOM or entry.name.startswith("_refs") or dtype not in entry.dtypes
        if not is_left and (ops == "all" or entry.name in ops) and not (few and entry.variant_test_name):
            yield from itertools.islice(_samples(s, entry, dtype, wrap, _FEW if few else None), most)


def _samples(
    s: Subject, entry: Any, dtype: torch.dtype, wrap: Callable[[Tensor], Any], most: int | None
) -> Iterator[Case]:
    """The samples that the class can hold and that the tensors that it represents take."""
    seed(0)
    with contextlib.suppress(Exception), closing_samples(entry, dtype) as samples:
        for sample in itertools.islice(samples, most):
            inputs = leaves(sample.input)
            if all(isinstance(t, Tensor) and t.dtype == dtype and t.layout == torch.strided for t in inputs):
                values, error = tried(lambda inputs=inputs: [wrap(t.detach()) for t in inputs])
                run = functools.partial(_call, entry, sample)
                if error is None and all(succeeds(run, plains) for plains in plains_of(s, values)):
                    yield Case(
                        ".".join(filter(None, (entry.name, entry.variant_test_name))), run, operand=values
                    )


def closing_samples(
    entry: Any, dtype: torch.dtype, requires_grad: bool = False
) -> contextlib.closing[Generator[Any]]:
    """The samples of an op; at the end of a block with them, PyTorch's generator of them is closed.

    Left to the garbage collector, which may run inside of a trace, the generator would switch gradients off there.
    """

    def samples() -> Generator[Any]:
        yield from entry.sample_inputs_func(entry, "cpu", dtype, requires_grad)

    return contextlib.closing(samples())


def _call(entry: Any, sample: Any, inputs: Sequence[Any]) -> Any:
    parts = [t.clone() for t in inputs]
    first = parts[0] if isinstance(sample.input, Tensor) else type(sample.input)(parts)
    return entry.op(first, *sample.args, **sample.kwargs)


def on_sample(s: Subject, case: Case) -> None:
    """Compares an op on a sample with the op on the tensors that it represents."""
    by_reference(s, case, Setting(lambda: case.operand))
