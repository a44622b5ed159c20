"""Backends: the graphs as they are, anybody's compiler, Inductor."""

import subprocess
import sys

import pytest
import torch
import torch._inductor.config as config
import torch.nn.functional as F
from torch import Tensor, fx

import desugar
from desugar import _torch as torch_private
from desugar.backends.choose import choose_backend
from tests.desugar.classes import Beside, Halves, Int8Like, Pair, TwoTensor, make
from tests.desugar.judge import by_pass, judge
from tests.tables import raising

# ---- choosing ------------------------------------------------------------------------------------------------


test_bad_backends = raising(
    {
        str(arguments): (lambda arguments=arguments: choose_backend(*arguments), ValueError, words)
        for arguments, words in (
            (("nothing",), 'expected backend "inductor", "eager" or a callable'),
            ((3,), "expected backend"),
            (("eager", "max-autotune"), "expected mode and options"),
            (("eager", None, {"x": 1}), "expected mode and options"),
            ((len, "reduce-overhead"), "expected mode and options"),
        )
    }
)


# ---- anybody's compiler --------------------------------------------------------------------------------------


def test_a_callable_gets_plain_graphs_and_their_inputs():
    seen = []

    def backend(graph, inputs):
        assert isinstance(graph, fx.GraphModule)
        assert all(type(t) is not Pair and isinstance(t, Tensor) for t in inputs)
        assert len(inputs) == len(graph.graph.find_nodes(op="placeholder"))
        seen.append(graph)
        return graph.forward

    for grad, count in ((True, 2), (False, 3)):  # forward and backward, then inference
        judge(
            torch.mul,
            lambda grad=grad: (make(Pair, 2, 3, grad=grad), torch.ones(3)),
            by_pass(torch.mul, backend=backend),
        )
        assert len(seen) == count


# ---- Inductor ------------------------------------------------------------------------------------------------


OF_WRAPPERS = lambda x: ((x * 2).sin(), x.cos())  # noqa: E731
INDUCTOR = {
    "training": (
        lambda x, w, y: (F.gelu(x @ w) * y, (x * 2).sum(), y),
        lambda: (make(TwoTensor, 4, 6, grad=True), torch.randn(6, 6, requires_grad=True), torch.randn(6)),
    ),
    "inference, Pair": (OF_WRAPPERS, lambda: (make(Pair, 4, 6),)),
    "inference, Halves": (OF_WRAPPERS, lambda: (make(Halves, 4, 6),)),
    "inference, Beside": (OF_WRAPPERS, lambda: (make(Beside, 4, 6),)),
    "a rule above autograd": (
        F.linear,
        lambda: (torch.randn(2, 4, requires_grad=True), make(Int8Like, 3, 4, grad=True)),
    ),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor(name):
    fn, make_args = INDUCTOR[name]
    around = torch.no_grad if name.startswith("inference") else torch.enable_grad
    judge(fn, make_args, way=desugar.compile, around=around, calls=2, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_inductor_with_dynamic_sizes_and_missing_gradients():
    fn, compiled = lambda x, y: ((x * y).sin(), x.sum()), None
    for n, missing in ((4, []), (5, []), (7, [0]), (9, [1])):
        compiled = judge(
            fn,
            lambda n=n: (make(Pair, n, 3, grad=True), torch.randn(3, requires_grad=True)),
            compiled,
            way=desugar.compile,
            missing=missing,
        )
    assert len(compiled.programs) == 2


def test_inductor_keeps_random_numbers_apart():
    compiled, x, found = desugar.compile(lambda x: F.dropout(x, 0.5)), make(Pair, 64, grad=True), []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        out = compiled(x)
        (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert torch.equal(out.a, x.a.detach() * grad.a), "forward and backward drop the same"
        found.append(out.a)
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def test_mode_and_options(monkeypatch):
    seen, compile_inner = [], torch_private.compile_fx_inner

    def spy(*args, **kwargs):
        seen.append((config.max_autotune, config.epilogue_fusion))
        return compile_inner(*args, **kwargs)

    monkeypatch.setattr(torch_private, "compile_fx_inner", spy)
    desugar.compile(torch.sin, mode="max-autotune-no-cudagraphs", options={"epilogue-fusion": False})(
        make(Pair, 3)
    )
    assert seen == [(True, False)] and not config.max_autotune


def test_a_backward_does_not_read_past_what_it_was_given_instead_of_what_was_saved():
    compiled, x = desugar.compile(lambda x: x * x * 2), make(TwoTensor, 64, 64, grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved, lambda saved: saved if isinstance(saved, TwoTensor) else torch.rand(2, 2)
    ):
        y = compiled(x)
    with pytest.raises(AssertionError, match="size"):
        torch.autograd.grad(y, x, torch.ones_like(y))
    y, was = compiled(x), x.a
    with torch.no_grad():
        x.a = torch.rand(2, 2)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close([grad.a, grad.b], [was * 4, x.b * 4])


# ---- Inductor in a process that has imported nothing of it yet ------------------------------------------------------

POOLED = """
import torch
import desugar

def pool(x):
    return torch.nn.functional.max_pool1d(x, 2).sin()

x = torch.randn(2, 3, 8)
desugar.save({path!r}, pool, desugar.call(x), native=False)
torch.testing.assert_close(desugar.load({path!r}, native=False)(x), pool(x))
"""


@pytest.mark.slow
def test_max_pool_in_a_new_process(tmp_path):
    text = POOLED.format(path=str(tmp_path / "pool.pt2"))
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
