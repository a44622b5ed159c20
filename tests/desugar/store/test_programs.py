"""Programs are found again by a compilation that would make the same, and their files are whole or absent."""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.compiler._cache import CacheArtifactManager

import desugar
import subclasses
from desugar import _torch as torch_private
from desugar.recording.listeners import listen
from desugar.store import files, keys
from subclasses.int8 import Int8Tensor
from subclasses.ragged import JaggedTensor
from tests.desugar.judge import judge, switched, tensors_of


def compiled_again(fn, **options):
    """Forgets what Dynamo compiled, and compiles anew, as another process would."""
    torch.compiler.reset()
    return desugar.compile(fn, backend="eager", **options)


def check(traced, count, *calls, **options):
    """Each call, a function and arguments, is compiled anew and right; and so many of them were traced."""
    for fn, *args in calls:
        got, want = compiled_again(fn, **options)(*args), fn(*args)
        torch.testing.assert_close(getattr(got, "value", got), getattr(want, "value", want))
    assert len(traced) == count


def double(x):
    return x * 2


def gradient_of(fn):
    """The gradient of ones, of the function compiled anew."""
    x = torch.ones(3, requires_grad=True)
    compiled_again(fn)(x).sum().backward()
    return x.grad.tolist()


# ------------------------------------------------------------------------------------------------- found again


def int8_layer():
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(Int8Tensor.from_float(layer.weight.detach()), requires_grad=False)
    return layer


def jagged():
    return JaggedTensor(torch.randn(6, 4), torch.tensor([0, 2, 2, 6]))


VIEWS = lambda x, y: (lambda z: (x.view(2, 3), z, z.t(), y[0], x.detach()))(x.sin() + y)  # noqa: E731
FOUND = {
    "a function": (lambda: double, lambda: (torch.randn(3),)),
    "a subclass": (lambda: lambda x: torch.nn.functional.relu(x) * 2, lambda: (jagged(),)),
    "a parameter that is a subclass": (int8_layer, lambda: (torch.randn(2, 8),)),
    "a write into an argument": (
        lambda: lambda x, y: (x.add_(y), x * 2)[1],
        lambda: (torch.ones(3), torch.ones(3)),
    ),
    "views": (lambda: VIEWS, lambda: (torch.randn(3, 2), torch.randn(3, 2))),
    "views, with gradients": (
        lambda: VIEWS,
        lambda: (torch.randn(3, 2, requires_grad=True), torch.randn(3, 2)),
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", FOUND)
def test_a_program_is_traced_once(traced, name):
    make_fn, make_args = FOUND[name]
    fn = make_fn()
    for _ in range(3):
        compiled = judge(fn, make_args, compiled_again(fn))
        got, expected = tensors_of(compiled(*make_args())), tensors_of(fn(*make_args()))
        assert [t._is_view() for t in got] == [t._is_view() for t in expected]
    assert len(traced) == 1


def test_an_inner_tensor_of_a_result_is_the_one_of_the_argument(traced):
    for _ in range(2):
        x = jagged()
        assert compiled_again(double)(x).offsets is x.offsets
    assert len(traced) == 1


def test_a_training_program_and_its_backwards_are_found(traced, folder):
    def fn(x, y):
        return x.sin() * y, y.exp()

    for kept in ((0, 1), (0,), (1,)) * 2:
        make_args = lambda: (torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True))  # noqa: E731
        judge(fn, make_args, compiled_again(fn), missing={0, 1} - {*kept})
    assert len(traced) == 1
    assert len(list(folder.glob("*/*/*"))) == 4  # the program, and three backwards


def test_the_graphs_are_read_when_they_are_asked_for(traced):
    texts = []
    for _ in range(2):
        compiled = compiled_again(lambda x: (x.sin() * 2).sum())
        compiled(torch.randn(3, requires_grad=True)).backward()
        (program,) = compiled.programs
        texts.append((program.joint.code, program.forward.code, program.backward.code, program.source))
    assert texts[0] == texts[1] and len(traced) == 1


def test_an_explanation_traces(traced):
    compiled_again(double)(torch.ones(3))
    ops = []
    with listen(lambda recording: ops.extend(op.name for op in recording.ops)):
        compiled_again(double)(torch.ones(3))
    assert any("mul" in name for name in ops)
    assert len(traced) == 2


# ------------------------------------------------------------------------------------------------------- sizes


def marked(least):
    x = torch.ones(32)
    torch._dynamo.mark_dynamic(x, 0, min=least, max=64)
    return x


def half(x):
    part = x[: x.size(0) // 2]
    return part.reshape(-1, 2).sum(1) if part.size(0) % 2 == 0 else part


BASE = torch.arange(12.0)
# A function, its arguments call by call, how many of them are traced, and options.
CALLS = {
    "a branch on a size": (
        *(lambda x: x + 1 if x.numel() > 8 else x - 1, [torch.arange(float(n)) for n in (4, 12, 4, 12)]),
        *(2, {"dynamic": True}),
    ),
    "a size that is even": (half, [torch.arange(float(n)) for n in (8, 10, 12, 8, 10)], 2, {"dynamic": True}),
    "another range of a size": (double, [marked(least) for least in (2, 16, 2, 16)], 2, {}),
    "gradients": (double, [torch.ones(3).requires_grad_(grad) for grad in (False, True) * 2], 2, {}),
    "a storage offset that is read": (
        *(lambda x: x * x.storage_offset(), [BASE[start : start + 4] for start in (2, 5, 2)]),
        *(2, {}),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_program_assumes_of_arguments_is_checked(traced, name):
    fn, xs, count, options = CALLS[name]
    check(traced, count, *((fn, x) for x in xs), **options)


def test_the_assumptions_of_a_found_program_are_guards(traced):
    check(traced, 1, (torch.mul, torch.ones(4), torch.ones(4)), dynamic=True)
    compiled = compiled_again(torch.mul, dynamic=True)
    for first, second in ((4, 4), (6, 6), (4, 1), (1, 5)):  # equal sizes, or one of them 1
        judge(torch.mul, lambda n=first, m=second: (torch.randn(n), torch.randn(m)), compiled)
    with pytest.raises(RuntimeError):
        compiled(torch.ones(2), torch.ones(3))


# ------------------------------------------------------------------------------------------------------ the key


SETTINGS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "an option of Inductor": lambda: torch._inductor.config.patch(max_fusion_size=3),
    "default dtype": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_part_of_the_key(traced, name):
    fn, x = lambda x: x @ x * torch.ones(3), torch.randn(3, 3)
    check(traced, 1, (fn, x))
    with SETTINGS[name]():
        check(traced, 2, (fn, x))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("part", range(5), ids=["torch", "python", "own", "system", "processor"])
def test_a_release_is_part_of_the_key(traced, monkeypatch, part):
    check(traced, 1, (double, torch.randn(3)))
    released = list(keys._release())
    released[part] += "1"
    monkeypatch.setattr(keys, "_release", lambda: tuple(released))
    check(traced, 2, (double, torch.randn(3)))


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Returns a function that imports a text, as if it was in a file before this process began."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(name, text):
        sys.modules.pop(name, None)
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        os.utime(path, (1e9, 1e9))
        return __import__(name)

    return load


SOURCE = """
    import torch
    from subclasses import TensorSubclass, inner
    import helper_of_class

    FACTOR = {factor}

    class Scaled(TensorSubclass, fallback="map"):
        value: torch.Tensor = inner()

    @Scaled.implements(torch.ops.aten.mul.Tensor)
    def mul(func, x, other):
        return Scaled(helper_of_class.scale(x.value * other) * FACTOR + {added})
"""


def load_class(load, *, times=2, factor=3, added=0):
    """Imports anew a module with a class, and one with a function that its rule calls."""
    load("helper_of_class", f"def scale(t):\n    return t * {times}\n")
    return load("scaled_class", SOURCE.format(factor=factor, added=added))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "change", [{"added": 1}, {"times": 5}, {"factor": 7}], ids=["rule", "helper", "global"]
)
def test_an_edited_rule_never_runs_the_old_program(traced, load, change):
    for options, traces in (({}, 1), ({}, 1), (change, 2), ({}, 2)):
        check(traced, traces, (double, load_class(load, **options).Scaled(torch.ones(3))))


OP = """
    import torch

    @torch.library.custom_op("store_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @scaled.register_fake
    def _(x):
        return torch.empty_like(x)

    scaled.register_autograd(lambda ctx, grad: grad * {derivative})
"""


def test_a_custom_op_is_not_stored(traced, load, caplog):
    """Its derivative is Python code that runs while the graph is traced, and that nothing leads to."""
    caplog.set_level(logging.INFO, "desugar")
    for derivative in (2, 5):
        module = load("scaled_op", OP.format(derivative=derivative))
        assert gradient_of(lambda x, op=module.scaled: op(x) + 1) == [derivative] * 3
    assert "it calls the op store_tests::scaled" in caplog.text


def test_a_policy_of_checkpointing_is_not_stored(traced, caplog):
    checkpoint = torch.utils.checkpoint
    caplog.set_level(logging.INFO, "desugar")

    def policy(ctx, op, *args, **kwargs):
        choices = checkpoint.CheckpointPolicy
        return choices.MUST_SAVE if op is torch.ops.aten.sin.default else choices.PREFER_RECOMPUTE

    def fn(x):
        contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, policy)
        return checkpoint.checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False, context_fn=contexts)

    for _ in range(2):
        gradient_of(fn)
    assert len(traced) == 2 and "what checkpointing saves" in caplog.text


def test_a_file_that_was_edited_while_the_process_runs(traced, load, tmp_path):
    """A running process compiles the code in memory; the next process compiles the code of the file."""
    module, path = load_class(load), tmp_path / "helper_of_class.py"
    path.write_text("def scale(t):\n    return t * 5\n")
    os.utime(path, (1e9, 1e9))
    assert compiled_again(double)(module.Scaled(torch.ones(3))).value.tolist() == [2 * 2 * 3] * 3
    module = load_class(load, times=5)
    assert compiled_again(double)(module.Scaled(torch.ones(3))).value.tolist() == [5 * 2 * 3] * 3
    assert len(traced) == 2


WITH_FUNCTIONS = """
    import functools
    import torch
    import torch.nn.functional as F
    from subclasses import TensorSubclass, constant, inner

    class Looked(TensorSubclass, fallback="materialize"):
        twice: torch.Tensor = inner()
        offsets = constant([{offset}, 1.0, -0.0])

        def materialize(self):
            return self.twice / {divisor} + self.offsets

    @Looked.implements(torch.relu)
    def _(func, x, **options):
        return func(x.materialize()) * {factor}

    Looked.implements(torch.sigmoid)(functools.partial(lambda factor, func, x: func(x.materialize()) * factor, {part}))
"""


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "change", [{}, {"divisor": 4}, {"factor": 7}, {"part": 3}, {"offset": float("inf")}], ids=str
)
def test_a_class_with_rules_for_functions(traced, load, change):
    fn = lambda x: torch.relu(x) + torch.sigmoid(x) + x  # noqa: E731
    original = {"divisor": 2, "factor": 3, "part": 2, "offset": 0.5}
    for options in (original, original, original | change):
        text = WITH_FUNCTIONS.format(**options).replace("[inf,", "[float('inf'),")
        check(
            traced,
            2 if options is not original and change else 1,
            (fn, load("looked_class", text).Looked(torch.ones(3))),
        )


UNKNOWN = {
    "environment": "import os\n\ndef scale(t):\n    return t * int(os.environ.get('X', 2))\n",
    "object": "class Config:\n    k = 2\n\nCONFIG = Config()\n\ndef scale(t):\n    return t * CONFIG.k\n",
    "table": "import random\nTABLE = {'a': random.random}\n\ndef scale(t):\n    return t * TABLE['a']()\n",
    "import": "def scale(t):\n    import random\n    return t * random.random()\n",
    "class": "class Helper:\n    def run(self, t):\n        return t\n\ndef scale(t):\n    return Helper().run(t)\n",
    "cache": "import functools\n\n@functools.cache\ndef k():\n    return 2\n\ndef scale(t):\n    return t * k()\n",
    "default": "import random\n\ndef scale(t, k=random.Random(0)):\n    return t * k.random()\n",
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", UNKNOWN)
def test_rules_that_cannot_be_followed_are_not_stored(traced, load, caplog, kind):
    caplog.set_level(logging.INFO, "desugar")
    module = load_class(load)
    module.helper_of_class = load("helper_of_class", UNKNOWN[kind])
    compiled_again(double)(module.Scaled(torch.ones(3)))
    assert "not stored: " in caplog.text and not files.folder().exists()


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def scale(t, k=2):\n    return t * k\n", "def scale(t, k=5):\n    return t * k\n"),
        ("def scale(t, *, k=2):\n    return t * k\n", "def scale(t, *, k=5):\n    return t * k\n"),
        *(
            (text % 2, text % 5)
            for text in (
                "import functools\nscale = functools.partial(lambda k, t: t * k, %d)\n",
                "K = {%d}\n\ndef scale(t):\n    return t * max(K)\n",
                "def make(k):\n    return lambda t: t * k\n\nscale = make(%d)\n",
            )
        ),
    ],
    ids=["default", "keyword default", "partial", "set", "closure"],
)
def test_what_a_helper_holds_is_part_of_the_key(traced, load, before, after):
    module = load_class(load)
    for text, times in ((before, 2), (before, 2), (after, 5)):
        module.helper_of_class = load("helper_of_class", text)
        assert compiled_again(double)(module.Scaled(torch.ones(3))).value.tolist() == [times * 2 * 3] * 3
    assert len(traced) == 2


# ------------------------------------------------------------------------------------ programs that are not stored


def local_class():
    class Local(subclasses.TensorSubclass, fallback="map"):
        value: torch.Tensor = subclasses.inner()

    return Local(torch.ones(3))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("fn", "make"),
    [
        (lambda x: x * 2, local_class),
        (lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)), lambda: torch.ones(3)),
        (lambda x: x.nonzero(), lambda: torch.ones(3)),
    ],
    ids=["a class without a name", "cond", "sizes that depend on data"],
)
def test_what_is_not_stored_is_traced_again(traced, caplog, fn, make):
    caplog.set_level(logging.INFO, "desugar")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(traced, 2, (fn, make()), (fn, make()))
    assert "not stored" in caplog.text


def test_it_can_be_switched_off(traced, monkeypatch):
    monkeypatch.setenv("DESUGAR_STORE", "0")
    check(traced, 2, *[(double, torch.ones(3))] * 2)
    monkeypatch.setenv("DESUGAR_STORE", "1")
    with torch._functorch.config.patch(enable_autograd_cache=False):
        check(traced, 3, (double, torch.ones(3)))
    assert not files.folder().exists()


def test_a_release_without_the_names_stores_nothing(traced, monkeypatch):
    monkeypatch.setitem(torch_private._LAZY, "GraphPickler", "torch.fx:no_such_name")
    monkeypatch.delitem(vars(torch_private), "GraphPickler", raising=False)
    torch_private.can_store.cache_clear()
    try:
        check(traced, 2, *[(double, torch.ones(3))] * 2)
        assert not files.folder().exists()
    finally:
        torch_private.can_store.cache_clear()


# ------------------------------------------------------------------------------------------------- damaged files


def the_file(folder, ending=".program"):
    (path,) = (path for path in folder.glob("*/*/*") if path.name.endswith(ending))
    return path


def damages(whole):
    yield from (b"", whole[:-1], whole + b"x")
    yield from (
        whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :]
        for place in range(0, len(whole), 997)
    )


def test_a_damaged_file_is_ignored(traced, folder, caplog):
    gradient_of(double)
    for path in (the_file(folder), the_file(folder, ".1")):
        whole = path.read_bytes()
        for damaged in damages(whole):
            path.write_bytes(damaged)
            caplog.clear()
            assert gradient_of(double) == [2.0] * 3 and "damaged" in caplog.text
            assert path.read_bytes() != damaged or path.name.endswith(".1")
        path.write_bytes(whole)


@pytest.mark.parametrize("content", [b"", pickle.dumps(3), pickle.dumps({}), pickle.dumps({"guards": b"?"})])
def test_a_file_of_another_kind_is_ignored(traced, folder, caplog, content):
    compiled_again(double)(torch.ones(3))
    path = the_file(folder)
    path.unlink()
    files.write(path.parent.name, path.name, content)
    assert compiled_again(double)(torch.ones(3)).tolist() == [2.0] * 3
    assert "cannot be read" in caplog.text and len(traced) == 2


def test_a_folder_that_cannot_be_written(traced, folder, caplog):
    folder.parent.mkdir(parents=True)
    folder.write_text("no folder")
    assert compiled_again(double)(torch.ones(3)).tolist() == [2.0] * 3
    assert "cannot be stored" in caplog.text


def test_a_backward_belongs_to_one_file_of_its_program(traced, folder):
    """Another process may have compiled the same graph, and save other values for its backward."""
    gradient_of(double)
    path = the_file(folder)
    content = pickle.loads(files.read(path.parent.name, path.name))
    files.write(path.parent.name, path.name, pickle.dumps(content | {"by": "another process"}))
    assert gradient_of(double) == [2.0] * 3 and len(traced) == 1
    assert len([path for path in folder.glob("*/*/*") if path.name.endswith(".1")]) == 2


# ------------------------------------------------------------------------------------------------------ artifacts


def test_artifacts_carry_programs(traced, folder):
    with CacheArtifactManager.with_fresh_cache():
        gradient_of(double)
        artifacts, info = torch.compiler.save_cache_artifacts()
    assert len(info.desugar_program_artifacts) == 2
    before = {path: path.read_bytes() for path in folder.glob("*/*/*")}
    for path in before:
        path.unlink()
    torch.compiler.load_cache_artifacts(artifacts)
    assert {path: path.read_bytes() for path in folder.glob("*/*/*")} == before
    gradient_of(double)
    assert len(traced) == 1


# ---- the files: whole or absent, bounded, and found by a second process ---------------------------------------------

KEY = "k" * 32


def test_a_file_is_read_as_it_was_written(folder):
    assert files.read(KEY, "a.program") is None and files.names(KEY) == []
    files.write(KEY, "a.program", b"content")
    assert files.read(KEY, "a.program") == b"content" and files.names(KEY) == ["a.program"]
    assert not list(folder.rglob(".*"))  # nothing is left beside it


def test_the_oldest_files_go_first(folder, monkeypatch):
    monkeypatch.setenv(files.LIMIT, "2500")
    for number, name in enumerate("abc"):
        files.write(KEY, name, bytes(1000))
        os.utime(folder / KEY[:2] / KEY / name, (number, number)) if name != "c" else None
    assert files.names(KEY) == ["b", "c"]
    assert files.read(KEY, "b") is not None  # it was used just now
    os.utime(folder / KEY[:2] / KEY / "c", (1, 1))
    files.write(KEY, "d", bytes(1000))
    assert files.names(KEY) == ["b", "d"]


def write_often(key, content):
    for _ in range(200):
        files.write(key, "same", content)


@pytest.mark.slow
def test_processes_that_write_the_same_file(folder):
    contents = [bytes([n]) * 100_000 for n in (1, 2)]
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(KEY, content)) for content in contents]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        content = files.read(KEY, "same")
        assert content is None or content in contents
        seen.add(content)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert set(contents) & seen and files.names(KEY) == ["same"]


@pytest.mark.slow
def test_importing_the_package_makes_its_artifacts_known():
    code = "import desugar; from torch.compiler._cache import CacheArtifactFactory as f; print(*f._artifact_types)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "desugar_program" in done.stdout.split()


# ---- a second process ----------------------------------------------------------------------------------------

SCRIPT = """
import json, sys, torch
from subclasses.ragged import JaggedTensor
import desugar, desugar.pipeline
from torch._inductor.codecache import CppPythonBindingsCodeCache

counts = {"traced": 0, "asked the compiler": 0}
compile_stages, load = desugar.pipeline._compile, CppPythonBindingsCodeCache.load_async.__func__

def traced(*args):
    counts["traced"] += 1
    return compile_stages(*args)

def asked(cls, *args, **kwargs):
    counts["asked the compiler"] += 1
    return load(cls, *args, **kwargs)

desugar.pipeline._compile = traced
CppPythonBindingsCodeCache.load_async = classmethod(asked)

def fn(x, w):
    return (torch.nn.functional.gelu(x) @ w).sin()

torch.manual_seed(0)
values = torch.randn(7, 4, requires_grad=True)
x = JaggedTensor(values, torch.tensor([0, 3, 3, 7]))
w = torch.randn(4, 4, requires_grad=True)
compiled = {"desugar": desugar.compile, "backend": lambda fn: torch.compile(fn, backend="desugar")}[sys.argv[1]](fn)
got, expected = [], []
for function, grads in ((compiled, got), (fn, expected)):
    y = function(x, w)
    grads += [y.values.detach(), *torch.autograd.grad(y.values.square().sum(), (values, w), retain_graph=True)]
assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))
print(json.dumps(counts))
"""


def start(folder: Path, way: str = "desugar", **environment: str) -> dict[str, int]:
    """Runs the script in a new process; returns the numbers of traces and of reads of the compiler's command line."""
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "DESUGAR_STORE": "1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, way],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A cache folder that one process has filled."""
    folder = tmp_path_factory.mktemp("cache")
    assert start(folder)["traced"] == 1
    return folder


@pytest.mark.slow
def test_a_second_process_traces_nothing_and_asks_no_compiler(warm):
    assert start(warm) == {"traced": 0, "asked the compiler": 0}
    assert start(warm, "backend") == {"traced": 0, "asked the compiler": 0}


@pytest.mark.slow  # each process compiles
def test_another_number_of_threads_is_another_program(warm):
    assert start(warm, OMP_NUM_THREADS="2")["traced"] == 1


@pytest.mark.slow
def test_a_kernel_that_is_gone_or_damaged_is_compiled_again(warm):
    libraries = list(warm.glob("*/*.main.so"))
    assert libraries
    for library in libraries:
        library.write_bytes(b"no library")
    assert start(warm) == {"traced": 0, "asked the compiler": len(libraries)}
    for library in libraries:
        library.unlink()
    assert start(warm) == {"traced": 0, "asked the compiler": len(libraries)}
    assert start(warm) == {"traced": 0, "asked the compiler": 0}
