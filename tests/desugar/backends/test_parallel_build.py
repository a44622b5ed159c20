"""The backward is compiled while the C++ compiler works on the forward; which vector instruction sets that tries."""

import functools
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import types
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch._inductor.utils import fresh_cache

import desugar
from desugar import _torch as torch_private
from desugar.backends import choose
from desugar.backends.base import Backend
from desugar.backends.inductor_patches import PendingKernels, postpone_kernels, tried_when_asked
from desugar.backward.variants import expected_tangents
from desugar.dynamo.backend import dynamo_backend
from desugar.recording.listeners import listen
from tests.desugar import classes
from tests.desugar.classes import TwoTensor
from tests.desugar.judge import by_pass


def make(rows=3):
    return classes.make(TwoTensor, rows, 4, grad=True)


def chain(x, w):
    for _ in range(3):
        x = torch.sigmoid(x * w) + x
    return x


def loss_and_logits(x, w):
    logits = torch.tanh(x * w)
    return (logits * logits).sum(), logits


@pytest.fixture
def empty_cache():
    """Inductor's caches, empty, and two threads that build kernels."""
    with torch_private.inductor_config.patch(compile_threads=2), fresh_cache():
        yield


@pytest.fixture
def backwards(monkeypatch):
    """How often a backward graph was compiled."""
    counted = []
    compile_ = Backend.compile

    def counting(backend, graph, kind, mode):
        counted.extend([graph] * (kind.role == "backward"))
        return compile_(backend, graph, kind, mode)

    monkeypatch.setattr(Backend, "compile", counting)
    return counted


def gradients(results, args, which=slice(None)):
    results = (results if isinstance(results, tuple) else (results,))[which]
    tangents = [torch.ones_like(r) for r in results]
    return torch.autograd.grad(results, args, tangents, allow_unused=True, retain_graph=True)


def assert_right(results, args, fn=chain, which=slice(None)):
    """Asserts that results have the same gradients as a function in eager mode."""
    for one, other in zip(gradients(results, args, which), gradients(fn(*args), args, which), strict=True):
        torch.testing.assert_close((one.a, one.b), (other.a, other.b))


def called(compiled):
    """(the results of a call, its arguments)."""
    args = make(), make()
    return compiled(*args), args


def pending(compiled):
    """The kernels of the backward that was compiled ahead, if one was."""
    return [kernels for _, kernels in compiled.programs[0].variants._ahead.values()]


# --------------------------------------------------------------------------------------- expected behaviour


@pytest.mark.slow
def test_the_backward_is_compiled_beside_the_forward(empty_cache, backwards):
    recordings, compiled = [], desugar.compile(chain)
    with listen(recordings.append):
        results, args = called(compiled)
    assert len(backwards) == 1 and len(pending(compiled)) == 1
    stages = [name for name, _ in recordings[0].stages]
    assert stages.index("compile forward") < stages.index("compile backward") < stages.index("build kernels")
    assert_right(results, args)
    assert len(backwards) == 1 and not pending(compiled)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (chain, (True,)),
        (loss_and_logits, (True, False)),
        (lambda x, w: (x * w, x + w), (True, True)),
        (lambda x, w: ((x * w).sum(), (x + w).sum(), x), (True, True)),
        (lambda x, w: (x, torch.tanh(w), w.sum()), (False, True)),
    ],
)
def test_a_result_without_dimensions_is_a_loss(fn, expected):
    compiled = by_pass(fn)
    called(compiled)
    assert expected_tangents(compiled.programs[0].variants.interface) == expected


@pytest.mark.sweep(12)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("which", "compilations"), [(slice(0, 1), 1), (slice(1, 2), 2), (slice(None), 2)])
def test_other_gradients_than_expected_have_a_backward_of_their_own(
    empty_cache, backwards, which, compilations, dynamic
):
    compiled = desugar.compile(loss_and_logits, dynamic=dynamic)
    for rows in (3, 5) if dynamic else (3,):
        args = make(rows), make(rows)
        results = compiled(*args)
        assert len(backwards) == 1 or rows == 5
        assert_right(results, args, loss_and_logits, which)
    assert len(compiled.programs) == 1 and len(backwards) == compilations


# ----------------------------------------------------------------------------------- when there is no time


@pytest.mark.parametrize(
    ("door", "threads", "ahead"),
    [
        pytest.param(
            functools.partial(desugar.compile, options={"compile_threads": 2}), 1, 1, marks=pytest.mark.slow
        ),
        pytest.param(functools.partial(torch.compile, backend=dynamo_backend), 2, 1, marks=pytest.mark.slow),
        pytest.param(
            functools.partial(desugar.compile, options={"max_autotune": True}), 2, 0, marks=pytest.mark.slow
        ),
        pytest.param(
            functools.partial(desugar.compile, options={"compile_threads": 1}), 2, 0, marks=pytest.mark.slow
        ),
        (by_pass, 2, 0),
    ],
)
def test_a_backward_is_compiled_when_it_is_called_where_nobody_waits(
    empty_cache, backwards, door, threads, ahead
):
    with torch_private.inductor_config.patch(compile_threads=threads):
        results, args = called(door(chain))
        assert len(backwards) == ahead
        assert_right(results, args)
    assert len(backwards) == 1


@pytest.mark.slow
def test_nothing_is_compiled_ahead_when_the_forward_is_there(empty_cache, backwards):
    called(desugar.compile(chain))
    torch.compiler.reset()
    compiled = desugar.compile(chain)
    results = called(compiled)  # its kernels are in Inductor's cache
    assert len(backwards) == 1 and not pending(compiled)
    assert_right(*results)


def test_kernels_of_other_devices_are_not_put_off():
    graph = torch_private.make_fx(lambda x: x * 2, tracing_mode="fake")(torch.rand(3, device="meta"))
    with torch_private.inductor_config.patch(compile_threads=2), postpone_kernels(graph) as kernels:
        torch_private.AsyncCompile().wait({"kernel": lambda: None})
    assert not kernels.waits


# ------------------------------------------------------------------------------------------ possible errors


@pytest.mark.slow
def test_two_functions_with_one_graph(empty_cache, backwards):
    other = types.FunctionType(chain.__code__.replace(co_name="other"), chain.__globals__)
    functions = [desugar.compile(chain), desugar.compile(other)]
    calls = list(map(called, functions))
    assert list(map(len, map(pending, functions))) == [1, 0]  # one module of Inductor's for both
    for results, args in reversed(calls):
        assert_right(results, args)


@pytest.mark.slow
def test_the_first_backward_in_several_threads(empty_cache, backwards):
    results, args = called(desugar.compile(chain))
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(assert_right, [results] * 3, [args] * 3))
    assert len(backwards) == 1


@pytest.mark.slow
def test_a_program_is_gone_before_its_backward(empty_cache):
    compiled = desugar.compile(chain)
    results = called(compiled)
    variants = weakref.ref(compiled.programs[0].variants)
    del compiled
    assert_right(*results)
    del results
    torch.compiler.reset()  # Dynamo keeps what it compiled with the code of the function
    while gc.collect():
        pass
    assert variants() is None


@pytest.mark.slow
def test_an_interrupt_while_kernels_are_built(empty_cache):
    compiled = desugar.compile(chain)
    interrupted = mock.patch.object(PendingKernels, "finish", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        called(compiled)
    with fresh_cache():  # by now, the other cache may have the kernels
        results, args = called(compiled)
        with interrupted, pytest.raises(KeyboardInterrupt):
            gradients(results, args)
        assert_right(results, args)


@pytest.mark.slow
def test_a_backward_that_inductor_refuses_fails_when_it_is_called(empty_cache, monkeypatch):
    compile_inductor = choose._compile_inductor

    def refuse_backward(graph, inputs, kind):
        if kind.role == "backward":
            raise torch_private.InductorError(NotImplementedError("no such kernel"), None)
        return compile_inductor(graph, inputs, kind)

    monkeypatch.setattr(choose, "_compile_inductor", refuse_backward)
    results, args = called(desugar.compile(chain))
    torch.testing.assert_close(results.a, chain(*args).a)
    with pytest.raises(torch_private.InductorError, match="no such kernel"):
        gradients(results, args)


@pytest.mark.slow
def test_the_compilers_own_error_is_raised_by_the_call(empty_cache):
    with (
        torch_private.inductor_config.patch({"cpp.cxx": (None, "false")}),  # a compiler that always fails
        pytest.raises((torch_private.CppCompileError, torch_private.InductorError)),
    ):
        called(desugar.compile(chain))
    assert_right(*called(desugar.compile(chain)))  # nothing is left of it


@pytest.mark.slow
def test_the_cache_is_gone_before_the_backward(empty_cache, backwards):
    compiled = desugar.compile(chain)
    results, args = called(compiled)
    (kernels,) = pending(compiled)
    assert [build.result(60) for build in kernels.builds] == [None]
    shutil.rmtree(torch._inductor.runtime.runtime_utils.cache_dir())
    assert_right(results, args)
    assert len(backwards) == 2


def test_waits_are_made_once_and_again_after_an_error():
    failing, other = mock.Mock(side_effect=[OSError("the disk is full"), None]), mock.Mock()
    kernels = PendingKernels(waits=[failing, other])
    assert not kernels.are_ready()
    assert kernels.finish() and kernels.finish()
    assert (failing.call_count, other.call_count) == (2, 1)


def test_another_process_does_not_wait_for_this_ones_compiler():
    build = Future()
    kernels = PendingKernels(builds=[build], process=-1)
    assert kernels.are_being_built() and not kernels.finish()
    build.set_result(None)
    assert kernels.finish()


FORKED = """
import os
import torch
import desugar
from torch._inductor.utils import fresh_cache

def chain(x, w):
    for _ in range(3):
        x = torch.sigmoid(x * w) + x
    return x

args = [torch.rand(3, 4, requires_grad=True) for _ in range(2)]
with fresh_cache():
    results = desugar.compile(chain)(*args)
    child = os.fork()
    found = torch.autograd.grad(results, args, torch.ones(3, 4))
    expected = torch.autograd.grad(chain(*args), args, torch.ones(3, 4))
    torch.testing.assert_close(found, expected)
    if child == 0:
        y = torch.rand(5)
        torch.testing.assert_close(desugar.compile(lambda y: y.cos() * 3)(y), y.cos() * 3)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
@pytest.mark.skipif(
    torch.version.cuda is not None, reason="a CUDA build's autograd starts threads, and takes no fork"
)
def test_a_fork_between_forward_and_backward(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=240)


# ---- which vector instruction sets are tried with the C++ compiler --------------------------------------------------

on_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="several sets are known for x86-64 on Linux",
)


@on_x86
def test_outside_of_the_context_the_list_is_pytorchs():
    module = torch_private.cpu_vec_isa
    with tried_when_asked():
        pass
    everywhere = module.valid_vec_isa_list()
    assert isinstance(everywhere, list)
    with tried_when_asked():
        assert module.valid_vec_isa_list() is everywhere  # known already


SCRIPT = """
import json, torch
import desugar
from torch._inductor import cpu_vec_isa
tried, check = [], cpu_vec_isa.VecISA.check_build
def noted(isa, code):
    tried.append(str(isa))
    return check(isa, code)
cpu_vec_isa.VecISA.check_build = noted
BEFORE
value = desugar.compile(lambda x: x * 2 + 1)(torch.ones(64))
ours = list(tried)
torch.compile(lambda x: x * 2 + 1)(torch.ones(65))
assert value.tolist() == [3.0] * 64
print(json.dumps([ours, tried, str(cpu_vec_isa.pick_vec_isa()), list(map(str, cpu_vec_isa.valid_vec_isa_list()))]))
"""


def run_with_empty_caches(folder, before="", **environment):
    """Returns the sets that our compile tried, those that stock's tried then, the chosen one, and all that work."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "DESUGAR_STORE": "0"} | environment
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.replace("BEFORE", before)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@on_x86
@pytest.mark.slow  # the C++ compiler builds each set's probe
@pytest.mark.parametrize("capability", ["", "avx2"])
def test_a_first_start_tries_no_set_after_the_one_that_it_chooses(tmp_path, capability):
    environment = {"ATEN_CPU_CAPABILITY": capability} if capability else {}
    ours, tried, chosen, working = run_with_empty_caches(tmp_path, **environment)
    assert chosen in working and (not capability or chosen == capability)
    assert set(ours) == set(tried[: len(ours)]) and not set(ours) & set(working[working.index(chosen) + 1 :])
    assert len(set(tried)) == len(working), "stock's compile tries all of them"


@on_x86
@pytest.mark.slow
def test_a_set_that_does_not_build_gives_way_to_the_next(tmp_path):
    *_, working = run_with_empty_caches(tmp_path)
    if len(working) < 2:
        pytest.skip("this processor has one vector instruction set")
    fail = (
        "cpu_vec_isa.VecISA.check_build = lambda isa, code: "
        f"False if str(isa) == {working[0]!r} else noted(isa, code)"
    )
    ours, *_, chosen, others = run_with_empty_caches(tmp_path, fail)
    assert chosen == others[0] == working[1] and ours
