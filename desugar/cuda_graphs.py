"""``record``: runs a whole training or serving step as a CUDA graph for each size of its arguments.

A graph repeats the kernels of one call with the addresses of that call. Arguments are copied to static tensors, and
results are cloned from static tensors. The Python code of the step runs at the capture and before it. `RecordedStep`
keys the graphs; `CudaGraphs` captures them.
"""

from __future__ import annotations

import functools
import gc
import operator
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from desugar import _torch as torch_private
from desugar.errors import DesugarError
from subclasses._torch import is_traceable_wrapper_subclass, storage_key
from subclasses._torch_capture import pytree
from subclasses.slow_paths import say_once
from subclasses.spec.values import PLAIN

_UNCAPTURED = 2  # calls of one size before the capture, which compile and create the states of optimizers
_GRAPHS = 32  # the most graphs of a step; their intermediate results share a pool of memory
_SIZES = 1000  # the most sizes whose calls are counted

Step = Callable[..., Any]


def record(step: Step) -> Step:
    """Returns a step that repeats its kernels as a CUDA graph; without CUDA the step itself.

    The step is a whole unit of work: forward, backward and optimizer, or the forward of a service. Its third call with
    arguments of one size captures a graph, and further calls of that size replay it. Results are new tensors
    without ``grad_fn``. A call runs the step uncaptured if

    * a tensor is not on the CUDA device, requires grad, is not strided, or is a view of another argument's memory,
    * an argument is not hashable,
    * a `JaggedTensor` varies in size from call to call; ``JaggedTensor.pack`` makes batches of one size,
    * there are 32 graphs already, or fewer than two calls of its size came before.

    The Python code of the step does not run in a replay. The step must not read tensors on the host (``.item()``). It
    may depend on its arguments, on Parameters, on tensors that it holds and writes in place, and on hyperparameters of
    its optimizers. A changed hyperparameter captures the graph anew, except in a tensor on the device:
    ``lr=torch.tensor(..., device="cuda")``, where the optimizer supports it. So does a Parameter or a state with
    another address. Adam and the like need ``capturable=True``. Calls of ``train()`` and ``eval()`` are not noticed,
    nor an assignment of another tensor to an attribute.

    Args:
        step: the function. Tensors in its arguments may be in lists, tuples and dicts.

    Raises:
        DesugarError: at the capture, if an operation in the step cannot be part of a CUDA graph. Also if the step
            writes to an argument, a result is not a tensor, or an optimizer keeps a number on the host.
    """
    return RecordedStep(step, CudaGraphs()) if torch.cuda.is_available() else step


class CudaGraphs:
    """Captures calls as CUDA graphs, which share a pool of memory; a test has the same methods for the CPU."""

    device = "cuda"

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def warm(self, call: Callable[[], Any]) -> Any:
        """Runs a call on the stream of the captures, as autograd requires for a later capture."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = call()
        current.wait_stream(self.stream)
        return result

    def capture(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Returns the static results of a call, and a function that computes them; it has not run yet."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            result = call()
        return result, graph.replay


# ---- sizes and static tensors ----------------------------------------------------------------------------------


def plain_tensors(x: Tensor) -> list[Tensor]:
    """Returns the plain tensors that a tensor consists of, with the carriers of its dynamic ints."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    return [plain for name in x.__tensor_flatten__()[0] for plain in plain_tensors(getattr(x, name))]


def rebuilt(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a tensor with ``change(plain)`` in place of each plain tensor that it consists of."""
    if not is_traceable_wrapper_subclass(x):
        return change(x)
    names, context = x.__tensor_flatten__()
    inners = {name: rebuilt(getattr(x, name), change) for name in names}
    return type(x).__tensor_unflatten__(inners, context, x.size(), x.stride())  # type: ignore[attr-defined]


def size_of(leaf: Any, device: str, seen: dict[int, tuple[int, int]]) -> Any:
    """Returns a hashable description of an argument, without the data of its tensors; None if no graph takes it.

    Args:
        leaf: the argument.
        device: the type of device that tensors must be on.
        seen: storage of each plain tensor so far -> its id and number: a graph relies on which arguments share one.
    """
    if not isinstance(leaf, Tensor):
        return (type(leaf), leaf)
    if leaf.requires_grad or leaf.device.type != device or leaf.layout is not torch.strided:
        return None
    if not is_traceable_wrapper_subclass(leaf):
        owner, number = seen.setdefault(storage_key(leaf), (id(leaf), len(seen)))
        if owner != id(leaf):
            return None  # two tensors over one memory, which two static tensors would not have
        return (type(leaf), leaf.dtype, leaf.device, tuple(leaf.shape), number)
    names, context = leaf.__tensor_flatten__()
    inners = [size_of(getattr(leaf, name), device, seen) for name in names]
    return None if None in inners else (type(leaf), context, tuple(leaf.shape), *inners)


def _modes() -> tuple[Any, ...]:
    """Returns the modes of PyTorch that change the kernels of a step."""
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    kernels = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, kernels


# ---- one graph -------------------------------------------------------------------------------------------------


class StepGraph:
    """A captured call: its static arguments and results, and the state of the step's Python code that it relies on."""

    def __init__(self, step: Step, leaves: list[Any], structure: Any, graphs: CudaGraphs) -> None:
        copies: dict[int, Tensor] = {}

        def static(plain: Tensor) -> Tensor:
            if id(plain) not in copies:
                copies[id(plain)] = plain.clone()
            return copies[id(plain)]

        own = [rebuilt(x, static) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(own, structure)
        self.inputs = list(copies.values())
        self.optimizers: list[torch.optim.Optimizer] = []
        versions = [0 if t.is_inference() else t._version for t in self.inputs]
        before = _gradients()
        handle = register_optimizer_step_pre_hook(self._note_optimizer)
        torch.clear_autocast_cache()  # a copy in it would be freed, while replays read it
        try:
            self.result, self.replay = graphs.capture(lambda: step(*args, **kwargs))
            for leaf in pytree.tree_leaves(self.result):
                if not isinstance(leaf, Tensor | None):
                    raise RuntimeError(f"expected tensors as its results, got {type(leaf).__name__}")
            if versions != [0 if t.is_inference() else t._version for t in self.inputs]:
                raise RuntimeError("it writes to an argument, and a graph gets copies of the arguments")
            self.states = self._current_states()
            on_host = (
                v.device.type != graphs.device if isinstance(v, Tensor) else type(v) in (int, float)
                for v in self.states
            )
            if any(on_host):
                raise RuntimeError(
                    "an optimizer keeps a number on the host, which a replay would not count up"
                )
        except BaseException:
            for parameter, gradient, _ in before:
                parameter.grad = gradient
            raise
        finally:
            handle.remove()
            torch.clear_autocast_cache()
        tensors = [p for p, _, _ in before] + [v for v in self.states if isinstance(v, Tensor)]
        self.addresses = [(weakref.ref(t), address) for t in tensors if (address := _address(t)) is not None]
        self.settings = self._current_settings()
        stepped = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}
        self.gradients = [
            (p, gradient, p.grad)
            for p, gradient, version in before
            if id(p) in stepped
            or p.grad is not gradient
            or (gradient is not None and gradient._version != version)
        ]

    def _note_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)

    def _current_settings(self) -> list[Any]:
        """Returns the hyperparameters of the optimizers, which are constants of the graph."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [_constant(v) for group in groups for k, v in group.items() if k != "params"]

    def _current_states(self) -> list[Any]:
        """Returns the states of the optimizers."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        return [v for state in states for v in state.values()]

    def is_current(self) -> bool:
        """Returns whether the Python code of the step would run the same kernels as at the capture.

        A gradient accumulates into the tensor, or None, that a parameter had at the capture. If the step assigned
        another gradient although there was one, it has reset the gradient itself, so any value is right.
        """
        is_moved = any((t := of()) is not None and _address(t) != known for of, known in self.addresses)
        states = self._current_states()
        return (
            not is_moved
            and len(states) == len(self.states)
            and all(map(operator.is_, states, self.states))
            and self.settings == self._current_settings()
            and all(
                p.grad is before or not (before is None or after is None or after is before)
                for p, before, after in self.gradients
            )
        )

    def run(self, leaves: list[Any]) -> Any:
        """Copies the arguments, replays the graph, and returns clones of its results."""
        given = {id(t): t for x in leaves if isinstance(x, Tensor) for t in plain_tensors(x)}
        for static, plain in zip(self.inputs, given.values(), strict=True):
            if static.numel():
                static.copy_(plain)
        self.replay()
        for parameter, _, after in self.gradients:
            if parameter.grad is not after:
                parameter.grad = after
        return pytree.tree_map_only(Tensor, lambda x: rebuilt(x.detach(), torch.clone), self.result)


def _constant(value: Any) -> Any:
    """Returns the value of a hyperparameter, or the address of a tensor on the device, which replays read."""
    if not isinstance(value, Tensor):
        return value
    return value.tolist() if value.device.type == "cpu" else _address(value)


def _address(x: Tensor) -> list[int] | None:
    """Returns the addresses of the plain tensors that a tensor consists of; None if one has no memory of its own."""
    try:
        if type(x) in PLAIN:
            return [x.data_ptr()]
        plains = plain_tensors(x)
        is_fake = any(isinstance(plain, torch_private.FakeTensor) for plain in plains)
        return None if is_fake else [plain.data_ptr() for plain in plains]
    except RuntimeError:  # a sparse or functional tensor, or one in a transform such as vmap
        return None


def _gradients() -> list[tuple[Tensor, Tensor | None, int]]:
    """Returns all parameters with their gradients and the versions of these."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:  # by gc.freeze(), which takes objects out of those that get_objects() returns
        gc.unfreeze()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
    if is_frozen:
        gc.freeze()
    return [
        (t, t.grad, 0 if t.grad is None else t.grad._version) for t in tensors if isinstance(t, Parameter)
    ]


# ---- the step --------------------------------------------------------------------------------------------------


class RecordedStep:
    """A step with its graphs, by the sizes of its arguments; see `record`."""

    def __init__(self, step: Step, graphs: CudaGraphs) -> None:
        functools.update_wrapper(self, step)
        self.step, self.graphs = step, graphs
        self.captured: dict[Any, StepGraph] = {}
        self.calls: Counter[Any] = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays the graph of these sizes, captures it, or runs the step."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = self._key(leaves, structure)
        if key is None:
            return self.step(*args, **kwargs)
        graph = self.captured.get(key)
        if graph is None and (self.calls[key] < _UNCAPTURED or len(self.captured) >= _GRAPHS):
            if len(self.calls) >= _SIZES:
                self.calls.clear()
            self.calls[key] += 1
            return self.graphs.warm(lambda: self.step(*args, **kwargs))
        if graph is not None and not graph.is_current():
            say_once(
                "a recorded step was captured anew, since a hyperparameter of its optimizer or a gradient has changed",
                'give the optimizer lr=torch.tensor(..., device="cuda"), and reset gradients in the step',
            )
            graph = None
        if graph is None:
            graph = self.captured[key] = self._capture(leaves, structure)
        return graph.run(leaves)

    def _key(self, leaves: list[Any], structure: Any) -> Any:
        seen: dict[int, tuple[int, int]] = {}
        sizes = [size_of(leaf, self.graphs.device, seen) for leaf in leaves]
        key = (structure, _modes(), *sizes)
        try:
            hash(key)
        except TypeError:  # an argument is not hashable
            return None
        return None if None in sizes else key

    def _capture(self, leaves: list[Any], structure: Any) -> StepGraph:
        try:
            return StepGraph(self.step, leaves, structure, self.graphs)
        except RuntimeError as error:
            raise DesugarError(
                f"record: the step cannot be captured as a CUDA graph: {error}",
                instead="read no tensor on the host in the step, such as by .item() or print(). Create optimizers like "
                "Adam with capturable=True, and pass batches of JaggedTensor.pack. Hold a tensor that the step writes",
            ) from error
