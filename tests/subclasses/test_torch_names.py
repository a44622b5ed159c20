"""Every private name of torch that the spec layer uses is there and does what we rely on."""

import ctypes
import functools
import inspect
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import utils as higher_order_utils
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta
from torch.testing._internal.two_tensor import TwoTensor

from subclasses import (
    DispatchError,
    TensorSubclass,
    _torch,
    _torch_callers,
    _torch_capture,
    _torch_distributed,
    _torch_tracing,
    inner,
)
from tests.subclasses.subjects import Hostile, Nested, Pair, declare, make_pair

aten = torch.ops.aten
cond = torch.ops.higher_order.cond

X, LEAF, META = torch.ones(2), torch.ones(2, requires_grad=True), torch.device("meta")


# ---- helpers of several checks ------------------------------------------------------------------------------


def gives(call, expected):
    """A check that a call gives this."""

    def check():
        assert call() == expected

    return check


def for_names(names, check):
    """The one check of several names, which runs once."""
    return dict.fromkeys(names, functools.cache(check))


Box = declare(name="Box", a=inner(), keywords={"fallback": "map"})


def boxed(rules, parent=TensorSubclass, **keywords):
    """A value, full of ones, of a class of its own with these rules."""
    return declare(parent, a=inner(), rules=rules, keywords=keywords)(torch.ones(2))


def captured(fn, *args, fullgraph=True):
    """The result of a compiled function, and the functions that each of its graphs calls."""
    called = []

    def backend(graph, inputs):
        called.append([n.target for n in graph.graph.nodes if n.op == "call_function"])
        return graph

    return torch.compile(fn, backend=backend, fullgraph=fullgraph)(*args), called


class Seeing(_torch.TorchDispatchMode):
    """Shows each op to a function."""

    def __init__(self, look=lambda func: None):
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.look(func)
        return func(*args, **(kwargs or {}))


def answers(ask, *ways):
    """The results of `ask` for a tensor: by itself, in each of the ways to run a function, by itself again."""
    seen = []

    def look(x):
        seen.append(ask(x))
        return x

    for way in (by_itself, *ways, by_itself):
        way(look)
    return seen


def by_itself(look):
    look(X)


def within(context):
    """The way to run a function in a context."""

    def way(look):
        with context():
            look(X)

    return way


def in_backend(look):
    torch.compile(lambda x: x * 2, backend=lambda graph, inputs: look(X) is X and graph)(X)


def in_backward(look):
    y = LEAF.exp()
    y.grad_fn.register_prehook(lambda grads: (look(grads[0]), None)[1])
    y.sum().backward()


def in_vmap(look):
    torch.vmap(look)(X)


def in_jvp(look):
    torch.func.jvp(look, (X,), (X,))


def in_make_fx(look, **options):
    make_fx(look, **options)(X)


# ---- wrappers and ops ---------------------------------------------------------------------------------------


def make_wrapper_subclass(*given):
    """Size, stride, storage offset, memory format, dtype, layout, device: in this order on every release."""
    x = _torch.make_wrapper_subclass(Pair, (2, 3), *given, torch.strided, META)
    return type(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.layout, x.requires_grad


WRAPPERS = TwoTensor(X, X), make_pair(), X, 1


def without_lazy_bits():
    """Conjugated, negated, and zeros that a derivative of `sgn` is: real ones also where a trace looks for symbols."""
    x = torch.ones(2, requires_grad=True)
    (zeros,) = torch.autograd.grad(x.sgn().sum(), x)
    numbers = torch.complex(torch.ones(2), torch.ones(2)).conj()
    assert _torch_tracing.has_no_memory(zeros) and not _torch_tracing.has_no_memory(numbers)
    held = [torch.ones(2), x, torch.ones(2).to_sparse(), nn.Parameter(X, requires_grad=False), zeros, numbers]
    assert [*map(_torch_tracing.is_bare, [*held, numbers.imag])] == [True] * 3 + [False] * 4
    assert not torch.vmap(lambda t: t * _torch_tracing.is_bare(t))(torch.ones(2, 2)).any()
    for lazy in (zeros, numbers, numbers.imag):
        solid = _torch_tracing.without_lazy_bits(lazy)
        assert solid.data_ptr() and not (solid.is_conj() or solid.is_neg()) and torch.equal(solid, lazy)
    with _torch.fake_mode():
        assert _torch_tracing.without_lazy_bits(zeros).shape == (2,)


def unseen():
    """Neither functions nor ops are seen, and in a trace tensors are fake."""

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with Seeing(), _torch_tracing.unseen():
        assert torch.add(torch.ones(1), 1) == 2
    with _torch.fake_mode() as mode, _torch_tracing.unseen():
        assert torch.ones(1).fake_mode is mode


def disable_torch_function_subclass():
    """`EnableTorchFunction` turns dispatch on again after a guard has disabled it."""
    x = boxed({torch.cos: lambda func, x: "ruled"}, fallback="map")
    assert torch.cos(x) == "ruled"
    with _torch.DisableTorchFunctionSubclass():
        with pytest.raises(DispatchError, match="arrived without the function"):
            torch.cos(x)
        with _torch.EnableTorchFunction():
            assert torch.cos(x) == "ruled"


def autograd_excluded():
    """Nothing is recorded, and a rule's op may enable both again."""
    x = torch.ones(1, requires_grad=True)
    with _torch.autograd_excluded():
        assert _torch.is_below_autograd() and not (x * 2).requires_grad
        with _torch.autograd_enabled():
            assert (x * 2).requires_grad
    assert (x * 2).requires_grad


def apply_function():
    """The same as ``Function.apply``, also under a transform, which needs more than the C++ method."""

    class Double(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    double = partial(_torch.apply_function, Double)
    (gradient,) = torch.autograd.grad(double(LEAF).sum(), LEAF)
    results = gradient, torch.vmap(double)(X), torch.func.grad(lambda x: double(x).sum())(X)
    assert [found.tolist() for found in results] == [[2, 2]] * 3
    with mock.patch("inspect.signature", side_effect=AssertionError("defaults are bound at each call")):
        assert double(LEAF).requires_grad


@pytest.mark.parametrize("hop", [True, False], ids=["newer", "older release"])
def test_call_unruled(hop, monkeypatch):
    if not hop:
        monkeypatch.setattr(_torch, "_skip_one_hop", None)
    x = boxed({torch.sin: lambda func, x: "ruled"}, fallback="map")
    assert torch.sin(x) == "ruled"
    assert [f(x * 0).a.tolist() for f in (torch.cos, F.relu, torch.abs)] == [[1, 1], [0, 0], [0, 0]]
    rows = type(x)(torch.arange(6.0))  # a method in Python that calls the method in C of the same name
    for parts in (
        rows.unflatten(0, (2, 3)),
        rows.unflatten(dim=0, sizes=(2, -1)),
        torch.unflatten(rows, 0, (2, 3)),
    ):
        assert parts.shape == (2, 3) and torch.equal(parts.a, rows.a.view(2, 3))


def autograd_enabled():
    """Below autograd nothing is recorded; inside the context it is."""

    def rule(func, x):
        with torch.enable_grad():
            assert (LEAF * 2).grad_fn is None
            with _torch.autograd_enabled():
                return type(x)(*torch.autograd.grad((LEAF * 2).sum(), LEAF))

    assert aten.cos.default(boxed({aten.cos.default: rule})).a.tolist() == [2, 2]


def is_recording():
    """Three questions: the tensor requires grad, gradients are on, and autograd is not below."""
    seen = []
    ask = lambda x: (_torch.is_recording(x), _torch.is_below_autograd())  # noqa: E731
    x = boxed({aten.cos.default: lambda func, x: (seen.append(ask(x)), x)[1]}, Materialized)
    assert ask(x) == (False, False) and ask(x.requires_grad_()) == (True, False)
    assert torch.no_grad()(ask)(x) == (False, False)
    assert x.cos().requires_grad and seen == [(False, True)] and ask(x) == (True, False)


Materialized = declare(a=inner(), materialize=lambda self: self.a)


# ---- Dynamo and export --------------------------------------------------------------------------------------


def guard_flags():
    """Dynamo calls ``call_isinstance``; without a guard on the flag, both values would take one program."""
    compiled = torch.compile(lambda x: x * (2 if isinstance(x, nn.Parameter) else 3), backend="eager")
    for make, factor in ((nn.Parameter, 2), (Tensor.requires_grad_, 3)):
        x = make(make_pair(2))
        assert compiled(x).unwrap()[0].equal(x.unwrap()[0] * factor)


GLOBAL_PAIR = make_pair(2)


def guard_identities():
    """Dynamo builds variables by ``VariableBuilder``, and omits a guard that an argument is a global."""
    compiled = torch.compile(lambda x: x * 2 + GLOBAL_PAIR, backend="eager")
    for x in (GLOBAL_PAIR, make_pair(2)):
        assert compiled(x).unwrap()[0].equal((x * 2 + GLOBAL_PAIR).unwrap()[0])


def replace_(x):
    x.a = x.a * 3
    return x


def break_at_assignments():
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Box\.a = "):
        torch.compile(replace_, backend="eager", fullgraph=True)(Box(torch.ones(2)))
    assert torch.compile(replace_, backend="eager")(Box(torch.ones(2))).a.tolist() == [3.0, 3.0]


def backend_of():
    seen = []

    def backend(graph, inputs):
        from torch._dynamo.symbolic_convert import InstructionTranslator

        seen.append(_torch_tracing.backend_of(InstructionTranslator.current_tx().output))
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert seen == [backend] and _torch_tracing.backend_of(None) is None


def choose_paths_as_eager():
    """Functions that choose a way get the answer of eager mode; those that ask the class next get Dynamo's."""
    asked, seen = torch.overrides.has_torch_function, []

    def choose(x):
        seen.append(asked((x,)))
        return x.detach()

    def ask(x):
        if asked((x,)):
            return torch.overrides.handle_torch_function(ask, (x,), x)
        return x.detach()

    for x, ruled in (
        (boxed({torch.sin: lambda func, x: x}), True),
        (Hostile(torch.zeros(2)), False),
        (X, False),
    ):
        torch.compile(choose, fullgraph=True, backend="eager")(x)
        torch.compile(ask, fullgraph=True, backend="eager")(x)
        assert seen.pop() is asked((x,)) is ruled


def is_compiling_here():
    """In the thread that compiles, and in no other."""
    here = _torch_tracing.is_compiling_here
    with ThreadPoolExecutor(1) as pool:
        seen = answers(lambda _: (here(), pool.submit(here).result()), in_backend)
    assert seen == [(False, False), (True, False), (False, False)]
    fn = torch.compile(lambda x: x * 2 if here() else x * 3, backend="eager", fullgraph=True)
    assert fn(torch.ones(1)).item() == 2


def skip_frames():
    def twice(x):
        return x * 2

    _torch.skip_frames(twice)
    functions = (lambda x: x * 2, twice, lambda x: twice(x) + 1)
    with torch._dynamo.config.patch(suppress_errors=False):
        graphs = [len(captured(fn, torch.ones(2), fullgraph=False)[1]) for fn in functions]
    assert graphs == [1, 0, 1], "it is inlined all the same"


def leave_in_graph():
    """Dynamo calls the function where it would trace into it, and where it has not been imported before as well."""

    @_torch_tracing.leave_in_graph
    def opaque(x):
        return x * 2

    result, (called,) = captured(lambda x: opaque(x) + 1, torch.ones(3))
    assert result.tolist() == [3, 3, 3] and opaque in called


def patch_aliasing_checks():
    """If the predicate holds for a value, Dynamo gets the wrapper and its own storage."""
    home = torch._dynamo.variables.higher_order_ops
    nested, two = Nested(make_pair(2), torch.ones(2)), TwoTensor(torch.ones(2), torch.ones(2))
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["example_value"] = nested
    assert (
        higher_order_utils._collect_fake_inputs([node]) == [nested]
        and len(home.get_tensor_storages(nested)) == 1
    )
    with pytest.raises(NotImplementedError):
        home.get_tensor_storages(two)


# ---- modes, transforms, the autograd engine -----------------------------------------------------------------


def in_dual_level(_):
    return eval(_torch_tracing.in_dual_level("forward_ad"), {"forward_ad": forward_ad})


def dispatch_mode():
    seen = []
    with Seeing(seen.append):
        torch.ones(2).cos()
    assert aten.cos.default in seen


def hooks():
    x, seen = torch.ones(2, requires_grad=True), []
    x.register_hook(lambda grad: seen.append("replaced"))
    other = torch.ones(2, requires_grad=True)
    other.register_hook(lambda grad: seen.append("other's"))
    _torch.set_hooks(x, _torch.hooks_of(other))
    x.register_hook(lambda grad: seen.append("added"))
    x.sum().backward()
    assert seen == ["other's", "added"] and len(_torch.hooks_of(other)) == 2
    assert _torch.hooks_of(torch.ones(1)) is None


def preserve_version_counter():
    x = torch.ones(2)
    with _torch.preserve_version_counter(x):
        x.mul_(2)
    assert x._version == 0 and x.tolist() == [2, 2]


def set_version_counters():
    t = torch.ones(2)
    t.add_(1)
    _torch_tracing.set_version_counters((t,), (0,))
    assert t._version == 0


def printing():
    with _torch.printing_with(threshold=3, edgeitems=1):
        assert (_torch.print_options.threshold, _torch.print_options.edgeitems) == (3, 1)
        assert "..." in str(torch.arange(5))
    assert _torch.print_options.threshold > 3


def disable_current_modes():
    with _torch.fake_mode(), _torch.disable_current_modes():
        assert type(torch.ones(2)) is Tensor


def view_tracking():
    """Below autograd a view has a counter of its own, unless its key is enabled again."""
    seen = []

    def look(func):
        t, versions = torch.ones(2), []
        assert _torch.is_excluded(_torch.VIEWS_KEY)
        for excluded in (True, False):
            _torch.set_excluded(_torch.VIEWS_KEY, excluded)
            try:
                view = aten.alias.default(t)
                torch.autograd.graph.increment_version(t)
                versions.append(view._version - t._version)
            finally:
                _torch.set_excluded(_torch.VIEWS_KEY, True)
        seen.append(versions)

    with Seeing(look):
        torch.ones(2).sin()
    assert [-1, 0] in seen
    assert not _torch.is_excluded(_torch.VIEWS_KEY)


def owns_memory():
    def check():
        t = torch.ones(2)
        held = {"t": t}
        assert _torch_callers.owns_memory(t, references=2, tensors=1)
        assert not _torch_callers.owns_memory(t, references=1, tensors=1)
        view = t.detach()
        assert not _torch_callers.owns_memory(t, references=2, tensors=1)
        assert view.equal(held["t"])

    check()
    # Python keeps arguments elsewhere while Dynamo handles frames.
    frames = torch._C._dynamo.eval_frame
    prior = frames.set_eval_frame(False)
    try:
        check()
    finally:
        frames.set_eval_frame(prior)


# ---- higher-order ops ---------------------------------------------------------------------------------------


def run_with_interpreter():
    def plain(x):
        return x

    graph = make_fx(lambda x: x * 2)(torch.ones(2))
    assert (
        _torch_tracing.run_with_interpreter(plain) is plain
        and _torch_tracing.run_with_interpreter(graph) is graph
    )
    with preserve_node_meta():
        assert _torch_tracing.run_with_interpreter(graph) is not graph


def fresh_fakes():
    x = torch.ones(2, 3).t().requires_grad_()
    with Seeing(), _torch_tracing.fresh_fakes([x, 3, make_pair(2)]) as (fake, number, pair):
        assert type(fake) is not Tensor and (fake.shape, fake.stride()) == (x.shape, x.stride())
        assert number == 3 and type(pair) is Pair and type(pair.a) is type(fake)
        assert not (fake.requires_grad or torch.is_grad_enabled())


def functional_storage_key():
    x = torch.ones(2)
    key_of = _torch_tracing.functional_storage_key
    assert key_of(x) == key_of(x[1:]) != key_of(x.clone())
    with FunctionalTensorMode():
        views = FunctionalTensor.to_functional(x), FunctionalTensor.to_functional(x[1:])
        assert key_of(views[0]) == key_of(views[1])
    assert _torch.storage_key(views[0]) != _torch.storage_key(views[1])


# ---- distributed --------------------------------------------------------------------------------------------


DTENSORS = """
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from subclasses import TensorSubclass, _torch_callers, _torch_distributed, inner
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
spec = _torch_distributed.dtensor_spec(x)
assert spec.mesh is x.device_mesh and spec.placements == x.placements and spec.shard_order
meta = _torch_distributed.tensor_meta((4, 2), [2, 1], torch.float32)
assert meta == spec.tensor_meta and type(meta.shape) is torch.Size
assert getattr(x, _torch_distributed.SPEC) is spec
found = _torch_distributed.distributed_types()
assert (found.tensor, found.spec, found.mesh) == (type(x), type(spec), type(mesh)) and Shard in found.placements
again = type(x)(x.to_local(), spec, requires_grad=False)
assert again.shape == (4, 2) and torch.equal(again.full_tensor(), x.full_tensor())
handles = [dist.Work.boxed(dist.all_reduce(torch.ones(2), async_op=True)) for _ in range(2)]
assert [_torch_distributed.is_work(x) for x in (handles[0], None, mesh)] == [True, False, False]
joint = _torch_distributed.joint_work(handles)
class Holder(TensorSubclass):
    part: torch.Tensor = inner()
compiled = torch.compile(lambda holder: holder.part.sin(), backend="eager")
for rows in (4, 6, 8, 10):
    part = distribute_tensor(torch.ones(rows, 2), mesh, [Shard(0)])
    assert compiled(Holder(part)).shape == (rows, 2)
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
assert _torch_distributed.is_work(joint) and dist.Work.unbox(joint).wait()
dist.destroy_process_group()
"""

FSDP = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import _utils
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from subclasses import Outer, TensorSubclass, _torch_callers, inner
class Ask(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.setdefault(func, (_torch_callers.sharding_caller(), _torch_callers.fsdp_ranks()))
        return func(*args, **(kwargs or {}))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh, seen = dist.init_device_mesh("cpu", (1,)), {}
layer = nn.Sequential()
layer.first = nn.Linear(2, 2)
with Ask():
    fully_shard(layer.first, mesh=mesh)
class Refused(TensorSubclass, fallback="materialize"):
    part: torch.Tensor = inner()
    @staticmethod
    def outer(part):
        return Outer(tuple(part.T.shape))
    def materialize(self):
        return self.part.T.contiguous()
layer.last = nn.Parameter(Refused(torch.ones(3, 2)), requires_grad=False)
before = dict(layer._parameters)
for _ in range(2):
    try:
        fully_shard(layer, mesh=mesh)
    except NotImplementedError:
        assert layer._parameters == before and not layer._forward_hooks
    else:
        raise AssertionError
assert seen[torch.ops.aten.split.Tensor] == ("fsdp", 1), seen
assert seen[torch.ops.aten.new_zeros.default][0] == "fsdp"
with Ask():
    seen.clear()
    _utils.narrow_tensor_by_index(torch.ones(4), [1], [2])
    assert seen[torch.ops.aten.slice.Tensor][0] == "checkpoint"
    seen.clear()
    layer.first.weight.full_tensor()
    assert seen[torch.ops.aten.view.default][0] == "dtensor", seen
dist.destroy_process_group()
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
part = DTensor.from_local(torch.ones(2), dist.init_device_mesh("cpu", (2,)), [Shard(0)])
with Ask():
    part.redistribute(placements=[Replicate()])
    assert seen[torch.ops._c10d_functional.all_gather_into_tensor.default][0] == "dtensor", seen
assert not _torch_callers.sharding_caller() and _torch_callers.fsdp_ranks() is None
dist.destroy_process_group()
"""


def distributed():
    """In a process of its own, with process groups of one rank and of two that do not talk."""
    command = [sys.executable, "-W", "ignore", "-c", DTENSORS + FSDP]
    subprocess.run(command, check=True, timeout=240)


# ---- kernels ------------------------------------------------------------------------------------------------


def is_legacy_batchedtensor():
    seen, x = [], torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: seen.append(_torch.is_legacy_batchedtensor(g)))
    torch.autograd.grad(x * 2, x, torch.eye(2), is_grads_batched=True)
    torch.autograd.grad(x * 2, x, torch.ones(2))
    assert seen == [True, False]


def attention_of_rows():
    """Rows of 1 and 3 entries with 2 heads, forward and backward; without data, since the kernels are CUDA's."""
    q = torch.empty(4, 2, 8, dtype=torch.float16, device="meta", requires_grad=True)
    starts = torch.tensor([0, 1, 4], dtype=torch.int32, device="meta")
    out = _torch.flash_attention_rows(q, q, q, starts, starts, 3, 3, 0.0, True, False, scale=0.5)[0]
    assert out.shape == torch.autograd.grad(out.sum(), q)[0].shape == q.shape
    parts = [q[None]] * 3
    out = _torch.efficient_attention_rows(*parts, None, starts, starts, 3, 3, 0.0, 1, True, scale=0.5)[0]
    assert out.shape == (1, *q.shape)
    if _torch.efficient_attention_traces:
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
    elif torch.__version__ < "2.14":
        with pytest.raises(TypeError, match="scale"):
            torch.autograd.grad(out.sum(), q)


def grouped_products():
    x, ends = torch.ones(4, 4, device="meta"), torch.tensor([1, 4], dtype=torch.int32, device="meta")
    with nullcontext() if _torch.grouped_mm_traces else pytest.raises(RuntimeError, match="BF16"):
        assert F.grouped_mm(x, x.expand(2, 4, 4), offs=ends).shape == (4, 4)


def build_library():
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "answer.cpp"
        source.write_text('extern "C" int answer() { return ANSWER; }')
        _torch_tracing.build_library(str(source), folder, "built", ["-DANSWER=42"])
        assert ctypes.CDLL(str(Path(folder) / "built.so")).answer() == 42
        source.write_text("an error")
        with pytest.raises(RuntimeError):
            _torch_tracing.build_library(str(source), folder, "other", [])


def check_in_graph():
    """The condition holds in the graph: a comparison of the size is decided, and a false condition raises."""
    with pytest.raises(RuntimeError):
        _torch.check_in_graph(False)
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    _torch.check_in_graph(size >= 0)
    assert size >= 0 and not size < 0


CHECKS = {
    "check_in_graph": check_in_graph,
    "foreach_functions": gives(
        lambda: (
            {"_foreach_add", "_foreach_mul_", "_foreach_sqrt"}
            - {f.__name__ for f in _torch.foreach_functions},
            [t.tolist() for t in torch._foreach_add([torch.ones(1), torch.ones(2)], 1)],
        ),
        (set(), [[2], [2, 2]]),
    ),
    "build_library": build_library,
    "is_composed": gives(
        lambda: [_torch.is_composed(op) for op in (aten.add.Scalar, aten.mm.default)], [True, False]
    ),
    **for_names(["VIEWS_KEY", "is_excluded", "set_excluded"], view_tracking),
    "owns_memory": owns_memory,
    "HigherOrderOperator": gives(
        lambda: (isinstance(cond, _torch.HigherOrderOperator), cond.name()), (True, "cond")
    ),
    "TreeSpec": gives(lambda: isinstance(_torch.tree_flatten(TREE)[1], _torch.TreeSpec), True),
    "tree_flatten": gives(lambda: _torch.tree_flatten(TREE)[0], [1, None]),
    "tree_flatten_with_path": gives(
        lambda: [leaf for _, leaf in _torch.tree_flatten_with_path(TREE)[0]], [1, None]
    ),
    "tree_leaves": gives(lambda: _torch.tree_leaves([TREE, 2]), [1, None, 2]),
    "tree_map": gives(
        lambda: (
            _torch.tree_map(lambda v: v + 1, (1, [2])),
            _torch.tree_map(str, (1, [2]), is_leaf=lambda v: isinstance(v, list)),
        ),
        ((2, [3]), ("1", "[2]")),
    ),
    "tree_unflatten": gives(
        lambda: _torch.tree_unflatten([2, 3], _torch.tree_flatten(TREE)[1]), {"a": [2, 3]}
    ),
    "is_traced": gives(
        lambda: answers(
            lambda x: _torch_tracing.is_traced(cond, (x,)),
            within(Seeing),  # a mode without a rule for the op
            within(_torch.fake_mode),
            lambda look: look(_torch.fake_mode().from_tensor(X)),
            in_vmap,
            in_make_fx,
            partial(in_make_fx, pre_dispatch=True),
        ),
        [False, False, True, True, True, True, True, False],
    ),
    "run_with_interpreter": run_with_interpreter,
    "trace_graph": gives(
        lambda: _torch_tracing.trace_graph(lambda x, n: x * n, [X, 3], dynamic_ints=False)(X, 3).tolist(),
        [3, 3],
    ),
    "is_recorded": gives(
        lambda: answers(lambda _: _torch_tracing.is_recorded(), in_make_fx, within(_torch.fake_mode)),
        [False, True, False, False],
    ),
    "fresh_fakes": fresh_fakes,
    "functional_storage_key": functional_storage_key,
    "patch_aliasing_checks": patch_aliasing_checks,
    "leave_in_graph": leave_in_graph,
    **for_names(["print_options", "printing_with"], printing),
    "disable_current_modes": disable_current_modes,
    "skip_frames": skip_frames,
    "in_dispatch_mode": gives(
        lambda: answers(lambda _: _torch.in_dispatch_mode(), within(_torch.fake_mode)), [False, True, False]
    ),
    "OpOverload": gives(lambda: isinstance(aten.mul.Tensor, _torch.OpOverload), True),
    "OpOverloadPacket": gives(lambda: isinstance(aten.mul, _torch.OpOverloadPacket), True),
    "is_traceable_wrapper_subclass": gives(
        lambda: [_torch.is_traceable_wrapper_subclass(x) for x in WRAPPERS], [True, True, False, False]
    ),
    "is_traceable_wrapper_subclass_type": gives(
        lambda: [_torch.is_traceable_wrapper_subclass_type(type(x)) for x in WRAPPERS],
        [True, True, False, False],
    ),
    "make_wrapper_subclass": gives(
        lambda: [
            make_wrapper_subclass((1, 2), 5, None, torch.float64),
            make_wrapper_subclass(None, None, None, torch.int8),
        ],
        [
            (Pair, (2, 3), (1, 2), 5, torch.float64, META, torch.strided, False),
            (Pair, (2, 3), (3, 1), 0, torch.int8, META, torch.strided, False),
        ],
    ),
    # A release without it compiles a program more, and that is all.
    "dynamic_dims_name": gives(
        lambda: _torch.dynamic_dims_name in inspect.getsource(torch._dynamo.variables.builder), True
    ),
    "disabled_torch_function_impl": gives(
        lambda: Hostile.__torch_function__ is _torch.disabled_torch_function_impl, True
    ),
    **for_names(
        ["DisableTorchFunctionSubclass", "EnableTorchFunction", "call_unruled"],
        disable_torch_function_subclass,
    ),
    "nn_functions": gives(lambda: _torch.nn_functions.linear, F.linear),
    "is_dispatched": gives(
        lambda: [_torch.is_dispatched(op) for op in (aten.cos.default, aten.cos.int)], [True, False]
    ),
    "is_composite": gives(
        lambda: [_torch.is_composite(op) for op in (aten.linear.default, aten.mm.default)], [True, False]
    ),
    "resolve_overload": gives(
        lambda: [
            _torch.resolve_overload(aten.max, args, kwargs)
            for args, kwargs in (((X, X), {}), ((X,), {"dim": 0}), ((make_pair(),), {}), (("x",), {}))
        ],
        [aten.max.other, aten.max.dim, aten.max.default, None],
    ),
    "cpp_callable": gives(
        lambda: (_torch.cpp_callable(aten.mul.Tensor)(torch.ones(1), 3).item(), _torch.cpp_callable(len)),
        (3, len),
    ),
    "schema_of": gives(
        lambda: [a.name for a in _torch.schema_of(aten.mul.Tensor).arguments], ["self", "other"]
    ),
    "all_aten_ops": gives(
        lambda: (
            len(_torch.all_aten_ops()) > 2500,
            {aten.mul.Tensor, aten.mul_.Tensor, aten.detach.default} - set(_torch.all_aten_ops()),
        ),
        (True, set()),
    ),
    "aten_overload_names": gives(
        lambda: (
            list(_torch.aten_overload_names()) == sorted(_torch.aten_overload_names()),
            {"Tensor", "Scalar", "out"} - set(_torch.aten_overload_names()["add"]),
            _torch.aten_overload_names()["relu"],
        ),
        (True, set(), ["default", "out"]),
    ),
    "tags_of": gives(
        lambda: [
            _torch.tags_of(*name) for name in (("add", "Tensor"), ("relu", "default"), ("t_", "default"))
        ],
        [op.tags for op in (aten.add.Tensor, aten.relu.default, aten.t_.default)],
    ),
    "python_decomposition": gives(
        lambda: [_torch.python_decomposition(op) is None for op in (aten.addcmul.default, aten.mm.default)],
        [False, True],
    ),
    "autograd_enabled": autograd_enabled,
    **for_names(
        ["sparse_indices", "sparse_values"],
        gives(
            lambda: [get(REPEATED).tolist() for get in (_torch.sparse_indices, _torch.sparse_values)],
            [[[1, 1]], [2, 3]],
        ),
    ),
    "foreach_norm": gives(
        lambda: [n.item() for n in _torch.foreach_norm([torch.tensor([3.0, 4.0]), torch.ones(1)])], [5, 1]
    ),
    "is_legacy_batchedtensor": is_legacy_batchedtensor,
    **for_names(
        ["in_backward", "graph_task"],  # only while the engine runs, which calls a hook
        gives(lambda: answers(lambda _: _torch.in_backward(), in_backward), [False, True, False]),
    ),
    "backward_node": gives(
        lambda: answers(lambda _: _torch_tracing.backward_node(), in_backward), ["", "ExpBackward0", ""]
    ),
    "break_at_assignments": break_at_assignments,
    "apply_function": apply_function,
    "autograd_excluded": autograd_excluded,
    "preserve_version_counter": preserve_version_counter,
    "set_version_counters": set_version_counters,
    **for_names(["hooks_of", "set_hooks"], hooks),
    "guard_flags": guard_flags,
    "guard_identities": guard_identities,
    "backend_of": backend_of,
    "unseen": unseen,
    **for_names(["has_no_memory", "is_bare", "without_lazy_bits"], without_lazy_bits),
    # In the backend of a compiled function, and where a rule is run for its graph.
    "is_tracing": gives(lambda: answers(lambda _: _torch.is_tracing(), in_backend), [False, True, False]),
    # Inside of a level, one of torch.func.jvp too, and not after it.
    "in_dual_level": gives(
        lambda: answers(in_dual_level, within(forward_ad.dual_level), in_jvp), [False, True, True, False]
    ),
    # By gradients where they are on, in a level of tangents, in a transform.
    "is_differentiated": gives(
        lambda: (
            answers(
                lambda x: _torch_tracing.is_differentiated(x, None), within(forward_ad.dual_level), in_vmap
            ),
            _torch_tracing.is_differentiated(X, LEAF, None),
            torch.no_grad()(_torch_tracing.is_differentiated)(LEAF),
        ),
        ([False, True, True, False], True, False),
    ),
    # As AOTAutograd makes the arguments of a graph.
    "is_graph_argument": gives(
        lambda: [
            *map(_torch_tracing.is_graph_argument, (LEAF, LEAF.exp())),
            torch._mirror_autograd_meta_to(LEAF, t := torch.ones_like(LEAF.detach())),
            (t.is_leaf, _torch_tracing.is_graph_argument(t)),
        ],
        [False, False, None, (False, True)],
    ),
    "is_compiling_here": is_compiling_here,
    "is_transient_here": gives(
        lambda: answers(lambda _: _torch_tracing.is_transient_here(), in_vmap, within(Seeing)),
        [False, True, True, False],
    ),
    # Of several tensors; without a call of the class's ``__torch_function__``.
    "any_requires_grad": gives(
        lambda: [_torch.any_requires_grad(*given) for given in ((X, LEAF), (X,), ())], [True, False, False]
    ),
    **for_names(["is_below_autograd", "is_recording"], is_recording),
    "choose_paths_as_eager": choose_paths_as_eager,
    "TorchDispatchMode": dispatch_mode,
    "dispatch_keys": gives(
        lambda: [
            _torch.dispatch_keys(x).raw_repr() == _torch.dispatch_keys(X).raw_repr()
            for x in (torch.ones(3), torch.ones(2, dtype=torch.cfloat).conj(), torch.ones(2, device=META))
        ],
        [True, False, False],
    ),
    "in_function_mode": gives(
        lambda: answers(lambda _: _torch.in_function_mode(), within(lambda: torch.device("cpu"))),
        [False, True, False],
    ),
    **for_names(
        ["current_transform", "is_transformed"],
        gives(
            lambda: answers(
                lambda x: (_torch.current_transform() is None, _torch.is_transformed(x)), in_vmap
            ),
            [(True, False), (False, True), (True, False)],
        ),
    ),
    "is_differentiated_by_transform": gives(
        lambda: answers(
            _torch.is_differentiated_by_transform,
            in_vmap,
            lambda look: torch.func.grad(lambda x: look(x).sum())(X),
            lambda look: torch.vmap(torch.func.grad(lambda x: look(x).sum()))(X),
            lambda look: torch.func.grad(lambda x: torch.vmap(look)(x).sum())(X),
            in_jvp,
        ),
        [False, False, True, True, True, True, False],
    ),
    "fake_mode": gives(
        lambda: [
            (fake.shape, type(fake) is Tensor) for fake in [_torch.fake_mode().from_tensor(X) * 2, X * 2]
        ],
        [((2,), False), ((2,), True)],
    ),
    "storage_key": gives(
        lambda: [_torch.storage_key(x) == _torch.storage_key(X) for x in (X, X[1:], X.clone())],
        [True, True, False],
    ),
    "op_infos": gives(lambda: {"add", "matmul"} - {info.name for info in _torch.op_infos()}, set()),
    **for_names(
        [
            "dtensor_spec",
            "is_work",
            "joint_work",
            "tensor_meta",
            "SPEC",
            "size_inner_dtensors",
            "DistributedTypes",
            "distributed_types",
            "sharding_caller",
            "reduce_packed_gradients",
            "fsdp_ranks",
            "undo_refused_sharding",
        ],
        distributed,
    ),
    **for_names(
        ["flash_attention_rows", "efficient_attention_rows", "efficient_attention_traces"], attention_of_rows
    ),
    "grouped_mm_traces": grouped_products,
}
TREE = {"a": [1, None]}
REPEATED = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=False)


# Names without a check here. The tests of the file, in this folder, fail at once where PyTorch moves such a name.
ELSEWHERE = {
    "autograd/test_fields.py": ["VIEWS", "record_readings"],
    "autograd/test_writes.py": ["FunctionalTensor"],
    "dispatch/test_conversions.py": ["with_lazy_bits"],
    "methods/test_assignments.py": ["MAKES_ASSIGNMENTS", "check_assignable"],
    "methods/test_attributes.py": ["find_methods"],
    "higher_order/test_dispatch.py": ["eager_while_loop"],
    "op_schemas/test_aliasing.py": ["return_and_correct_aliasing", "set_storage_of"],
    "ragged/test_attention_of_rows.py": [
        "flash_attention_cpu",
        "flash_attention_cpu_backward",
        "math_attention",
    ],
    "rules/test_families.py": ["canonicalize_dim"],
    "test_serialize.py": ["dims_marked_dynamic", "mark_dim_dynamic", "marked_dims_name"],
    "test_export.py": [
        *("LIVE", "desugar_exported", "is_exporting", "reads_of_values_made_inside"),
        *("SequenceKey", "pytree", "register_pytree_node"),
    ],
}


MODULES = (_torch, _torch_callers, _torch_capture, _torch_distributed, _torch_tracing)


@pytest.mark.parametrize("name", CHECKS)
def test_name(name):
    assert any(hasattr(module, name) for module in MODULES)
    CHECKS[name]()


def test_every_name_has_its_check():
    used = {
        "annotations",
        "Any",
        "Callable",
        "DispatchError",
        "Iterator",
        "NamedTuple",
        "Sequence",
        "after_import",
        "contextlib",
        "dataclasses",
        "functools",
        "get_args",
        "importlib",
        "inspect",
        "one_of",
        "partial",
        "sys",
        "threading",
        "types",
        "weakref",
    }
    own = {n for m in MODULES for n in vars(m) if not n.startswith("_")} - {*used, "torch"}
    assert own == {*CHECKS, *chain.from_iterable(ELSEWHERE.values())}
    assert all((Path(__file__).parent / file).exists() for file in ELSEWHERE)
