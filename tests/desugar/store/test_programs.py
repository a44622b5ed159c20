"""What is stored is found again, and only by a compilation that would make the same."""

from __future__ import annotations

import functools
import logging
import os
import pickle
import sys
import textwrap

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import desugar
import subclasses
from desugar import _torch as private
from desugar.recording.listeners import listen
from desugar.store import files, keys
from subclasses.int8 import Int8Tensor
from subclasses.ragged import JaggedTensor


def compiled_again(fn, **options):
    """Forgets what Dynamo compiled, and compiles anew, as another process would."""
    torch.compiler.reset()
    return desugar.compile(fn, backend="eager", **options)


def double(x):
    return x * 2


def trained(fn, *args):
    """Runs a function forward and backward; returns its result and the gradients."""
    args = [a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in args]
    result = fn(*args)
    result.sum().backward()
    return [result.detach(), *(a.grad for a in args if a.requires_grad)]


# ------------------------------------------------------------------------------------------------- found again


def test_a_program_is_traced_once(traced):
    x = torch.randn(3)
    for _ in range(3):
        assert torch.equal(compiled_again(double)(x), x * 2)
    assert len(traced) == 1


def test_a_training_program_and_its_backwards_are_found(traced, folder):
    def fn(x, y):
        return x.sin() * y, y.exp()

    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    for which in ((0, 1), (0,), (1,), (0, 1), (0,), (1,)):
        results, expected = compiled_again(fn)(x, y), fn(x, y)
        got = torch.autograd.grad(sum(results[n].sum() for n in which), (x, y), allow_unused=True)
        wanted = torch.autograd.grad(sum(expected[n].sum() for n in which), (x, y), allow_unused=True)
        for one, other in zip(got, wanted, strict=True):
            assert (one is None and other is None) or torch.allclose(one, other)
    assert len(traced) == 1
    assert len(list(folder.glob("*/*/*"))) == 4  # the program, and three backwards


def test_subclasses_come_back_whole(traced):
    def fn(x):
        return torch.nn.functional.relu(x) * 2

    x = JaggedTensor(torch.randn(6, 4), torch.tensor([0, 2, 2, 6]))
    expected = fn(x)
    for _ in range(2):
        got = compiled_again(fn)(x)
        assert type(got) is JaggedTensor and torch.equal(got.values, expected.values)
        assert got.offsets is x.offsets and got.max_length == expected.max_length
    assert len(traced) == 1


def test_parameters_that_are_subclasses(traced):
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(Int8Tensor.from_float(layer.weight.detach()), requires_grad=False)
    x, expected = torch.randn(2, 8), None
    for _ in range(2):
        torch.compiler.reset()
        got = desugar.compile(layer, backend="eager")(x)
        expected = layer(x)
        assert torch.allclose(got, expected)
    assert len(traced) == 1


def test_writes_into_arguments(traced):
    def fn(x, y):
        x.add_(y)
        return x * 2

    for _ in range(2):
        x, y = torch.ones(3), torch.ones(3)
        assert compiled_again(fn)(x, y).tolist() == [4.0] * 3 and x.tolist() == [2.0] * 3
    assert len(traced) == 1


def test_views_of_arguments_and_results(traced):
    def fn(x, y):
        z = x.sin() + y
        return x.view(2, 3), z, z.t(), y[0], x.detach()

    for needs_grad in (False, True):
        for _ in range(2):
            x, y = torch.randn(3, 2, requires_grad=needs_grad), torch.randn(3, 2)
            results, expected = compiled_again(fn)(x, y), fn(x, y)
            for got, wanted, base in zip(results, expected, (x, None, results[1], y, x), strict=True):
                assert torch.equal(got, wanted) and got.requires_grad == wanted.requires_grad
                assert got._is_view() == wanted._is_view()
                assert base is None or got.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
            if needs_grad:
                (sum(r.sum() for r in results[:3])).backward()
                grad, x.grad = x.grad, None
                (sum(r.sum() for r in expected[:3])).backward()
                assert torch.allclose(grad, x.grad)
    assert len(traced) == 2  # one that needs gradients, one that does not


def test_the_graphs_are_read_when_they_are_asked_for(traced):
    def fn(x):
        return (x.sin() * 2).sum()

    texts = []
    for _ in range(2):
        compiled = compiled_again(fn)
        trained(compiled, torch.randn(3))
        (program,) = compiled.programs
        texts.append([graph.code for graph in (program.joint, program.forward, program.backward)])
        texts[-1].append(program.source)
    assert texts[0] == texts[1] and len(traced) == 1


def test_an_explanation_traces(traced):
    compiled_again(double)(torch.ones(3))
    ops = []
    with listen(lambda recording: ops.extend(op.name for op in recording.ops)):
        compiled_again(double)(torch.ones(3))
    assert any("mul" in name for name in ops)
    assert len(traced) == 2


# ------------------------------------------------------------------------------------------------------- sizes


def test_what_a_program_assumes_of_sizes_is_checked(traced):
    def fn(x):
        return x + 1 if x.numel() > 8 else x - 1

    def cut(x):
        half = x[: x.size(0) // 2]
        return half.reshape(-1, 2).sum(1) if half.size(0) % 2 == 0 else half

    for function, sizes in ((fn, (4, 12, 4, 12)), (cut, (8, 10, 12, 8, 10))):
        for size in sizes:
            x = torch.arange(float(size))
            assert torch.equal(compiled_again(function, dynamic=True)(x), function(x))


def test_the_assumptions_of_a_found_program_are_guards(traced):
    def fn(x, y):
        return x * y  # the sizes have to be equal, or one of them 1

    x = torch.ones(4)
    compiled_again(fn, dynamic=True)(x, x)
    compiled = compiled_again(fn, dynamic=True)
    for first, second in ((4, 4), (6, 6), (4, 1), (1, 5)):
        args = torch.full((first,), 3.0), torch.full((second,), 2.0)
        assert torch.equal(compiled(*args), fn(*args))
    with pytest.raises(RuntimeError):
        compiled(torch.ones(2), torch.ones(3))


def test_another_range_of_a_size_is_another_program(traced):
    def fn(x):
        return x.sum() * 2

    for least in (2, 16, 2, 16):
        torch.compiler.reset()
        x = torch.ones(32)
        torch._dynamo.mark_dynamic(x, 0, min=least, max=64)
        assert desugar.compile(fn, backend="eager")(x).item() == 64.0
    assert len(traced) == 2


# ------------------------------------------------------------------------------------------------------ the key


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.no_grad(),
        lambda: torch.inference_mode(),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch._inductor.config.patch(max_fusion_size=3),
    ],
    ids=["no_grad", "inference_mode", "autocast", "an option of Inductor"],
)
def test_a_setting_is_part_of_the_key(traced, change):
    def fn(x):
        return x @ x

    x = torch.randn(3, 3)
    compiled_again(fn)(x)
    with change():
        expected = fn(x)
        got = compiled_again(fn)(x)
    assert len(traced) == 2
    assert got.dtype == expected.dtype and got.requires_grad == expected.requires_grad


@pytest.mark.sweep(2)
@pytest.mark.parametrize("part", range(5), ids=["torch", "python", "own", "system", "processor"])
def test_a_release_is_part_of_the_key(traced, monkeypatch, part):
    compiled_again(double)(torch.randn(3))
    released = list(keys._release())
    released[part] += "1"
    monkeypatch.setattr(keys, "_release", lambda: tuple(released))
    compiled_again(double)(torch.randn(3))
    assert len(traced) == 2


def test_default_dtype_and_grad_of_arguments_are_part_of_the_key(traced):
    def fn(x):
        return x * torch.ones(3)

    compiled_again(fn)(torch.ones(3))
    torch.set_default_dtype(torch.float64)
    try:
        assert compiled_again(fn)(torch.ones(3, dtype=torch.float32)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert compiled_again(fn)(torch.ones(3, requires_grad=True)).requires_grad
    assert len(traced) == 3


SOURCE = """
    import torch
    from subclasses import TensorSubclass, inner
    import {helper}

    FACTOR = {factor}

    class Scaled(TensorSubclass, fallback="map"):
        value: torch.Tensor = inner()

    @Scaled.implements(torch.ops.aten.mul.Tensor)
    def mul(func, x, other):
        return Scaled({helper}.scale(x.value * other) * FACTOR + {added})
"""


def load_module(folder, name, helper, *, times=2, factor=3, added=0):
    """Writes a module with a class, and one with a function that its rule calls; imports both anew."""
    for module in (name, helper):
        sys.modules.pop(module, None)
    (folder / f"{helper}.py").write_text(f"def scale(t):\n    return t * {times}\n")
    (folder / f"{name}.py").write_text(
        textwrap.dedent(SOURCE.format(helper=helper, factor=factor, added=added))
    )
    for module in (name, helper):  # as if they had been written before this process began
        os.utime(folder / f"{module}.py", (1e9, 1e9))
    sys.dont_write_bytecode = True
    return __import__(name)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "change", [{"added": 1}, {"times": 5}, {"factor": 7}], ids=["rule", "helper", "global"]
)
def test_an_edited_rule_never_runs_the_old_program(traced, tmp_path, monkeypatch, change):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for options, traces in (({}, 1), ({}, 1), (change, 2), ({}, 2)):
        module = load_module(tmp_path, "scaled_class", "scaled_helper", **options)
        x = module.Scaled(torch.ones(3))
        expected = double(x).value
        assert torch.equal(compiled_again(double)(x).value, expected)
        assert len(traced) == traces, options


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


def test_a_custom_op_is_not_stored(traced, tmp_path, monkeypatch, caplog):
    """Its derivative is Python code that runs while the graph is traced, and that nothing leads to."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for derivative in (2, 5):
        sys.modules.pop("scaled_op", None)
        (tmp_path / "scaled_op.py").write_text(textwrap.dedent(OP.format(derivative=derivative)))
        module = __import__("scaled_op")
        x = torch.ones(3, requires_grad=True)
        with caplog.at_level(logging.INFO, "desugar"):
            compiled_again(lambda x, op=module.scaled: op(x) + 1)(x).sum().backward()
        assert x.grad.tolist() == [derivative] * 3
    assert "it calls the op store_tests::scaled" in caplog.text


def test_a_policy_of_checkpointing_is_not_stored(traced, caplog):
    checkpoint = torch.utils.checkpoint
    saved = [torch.ops.aten.sin.default]

    def policy(ctx, op, *args, **kwargs):
        return (
            checkpoint.CheckpointPolicy.MUST_SAVE
            if op in saved
            else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
        )

    def fn(x):
        contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, policy)
        return checkpoint.checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False, context_fn=contexts)

    with caplog.at_level(logging.INFO, "desugar"):
        for _ in range(2):
            x = torch.ones(3, requires_grad=True)
            compiled_again(fn)(x).sum().backward()
    assert len(traced) == 2 and "what checkpointing saves" in caplog.text


def test_a_file_that_was_edited_while_the_process_runs(traced, tmp_path, monkeypatch):
    """What counts is the code in memory; the next process has that of the file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = load_module(tmp_path, "late_class", "late_helper")
    x, expected = module.Scaled(torch.ones(3)), 2 * 2 * 3
    (tmp_path / "late_helper.py").write_text("def scale(t):\n    return t * 5\n")
    os.utime(tmp_path / "late_helper.py", (1e9, 1e9))
    assert compiled_again(double)(x).value.tolist() == [expected] * 3
    module = load_module(tmp_path, "late_class", "late_helper", times=5)
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
def test_a_class_with_rules_for_functions(traced, tmp_path, monkeypatch, caplog, change):
    caplog.set_level(logging.INFO, "desugar")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def fn(x):
        return torch.relu(x) + torch.sigmoid(x) + x

    original = {"divisor": 2, "factor": 3, "part": 2, "offset": 0.5}
    for options in (original, original, original | change):
        sys.modules.pop("looked_class", None)
        text = WITH_FUNCTIONS.format(**options).replace("[inf,", "[float('inf'),")
        (tmp_path / "looked_class.py").write_text(textwrap.dedent(text))
        os.utime(tmp_path / "looked_class.py", (1e9, 1e9))
        x = __import__("looked_class").Looked(torch.ones(3))
        torch.testing.assert_close(compiled_again(fn)(x), fn(x))
    assert len(traced) == (2 if change else 1), caplog.text


UNKNOWN = {
    "environment": "import os\n\ndef scale(t):\n    return t * int(os.environ.get('X', 2))\n",
    "object": "class Config:\n    k = 2\n\nCONFIG = Config()\n\ndef scale(t):\n    return t * CONFIG.k\n",
    "table": "import random\nTABLE = {'a': random.random}\n\ndef scale(t):\n    return t * TABLE['a']()\n",
    "import": "def scale(t):\n    import random\n    return t * random.random()\n",
    "class": "class Helper:\n    def run(self, t):\n        return t\n\ndef scale(t):\n    return Helper().run(t)\n",
    "cache": "import functools\n\n@functools.cache\ndef k():\n    return 2\n\ndef scale(t):\n    return t * k()\n",
    "default": "import random\n\ndef scale(t, k=random.Random(0)):\n    return t * k.random()\n",
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_rules_that_cannot_be_followed_are_not_stored(traced, tmp_path, monkeypatch, caplog, kind):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = load_module(tmp_path, "open_class", "open_helper")
    sys.modules.pop("open_helper")
    (tmp_path / "open_helper.py").write_text(UNKNOWN[kind])
    module.open_helper = __import__("open_helper")
    with caplog.at_level(logging.INFO, "desugar"):
        compiled_again(double)(module.Scaled(torch.ones(3)))
    assert "not stored: " in caplog.text and not files.folder().exists()


@pytest.mark.sweep(6)
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
def test_what_a_helper_holds_is_part_of_the_key(traced, tmp_path, monkeypatch, before, after):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = load_module(tmp_path, "held_class", "held_helper")
    for text, times in ((before, 2), (before, 2), (after, 5)):
        sys.modules.pop("held_helper")
        (tmp_path / "held_helper.py").write_text(text)
        module.held_helper = __import__("held_helper")
        assert compiled_again(double)(module.Scaled(torch.ones(3))).value.tolist() == [times * 2 * 3] * 3
    assert len(traced) == 2


def test_a_storage_offset_that_a_rule_reads_is_part_of_the_key(traced):
    base = torch.arange(12.0)
    for start in (2, 5, 2):
        x = base[start : start + 4]

        def fn(x):
            return x * x.storage_offset()

        assert torch.equal(compiled_again(fn)(x), x * start)


# ---------------------------------------------------------------------------------------------- what is not stored


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
    with (
        caplog.at_level(logging.INFO, "desugar"),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        for _ in range(2):
            x = make()
            got, expected = compiled_again(fn)(x), fn(x)
            assert torch.equal(getattr(got, "value", got), getattr(expected, "value", expected))
    assert len(traced) == 2 and "not stored" in caplog.text


def test_it_can_be_switched_off(traced, monkeypatch):
    monkeypatch.setenv("DESUGAR_STORE", "0")
    for _ in range(2):
        compiled_again(double)(torch.ones(3))
    monkeypatch.setenv("DESUGAR_STORE", "1")
    with torch._functorch.config.patch(enable_autograd_cache=False):
        compiled_again(double)(torch.ones(3))
    assert len(traced) == 3 and not files.folder().exists()


def test_a_release_without_the_names_stores_nothing(traced, monkeypatch):
    monkeypatch.setitem(private._LAZY, "GraphPickler", "torch.fx:no_such_name")
    monkeypatch.delitem(vars(private), "GraphPickler", raising=False)
    private.can_store.cache_clear()
    try:
        for _ in range(2):
            assert compiled_again(double)(torch.ones(3)).tolist() == [2.0] * 3
        assert len(traced) == 2 and not files.folder().exists()
    finally:
        private.can_store.cache_clear()


# ------------------------------------------------------------------------------------------------- damaged files


def the_file(folder, ending=".program"):
    (path,) = (path for path in folder.glob("*/*/*") if path.name.endswith(ending))
    return path


def test_a_damaged_file_is_ignored(traced, folder, caplog):
    x = torch.randn(3, requires_grad=True)
    compiled_again(double)(x).sum().backward()
    for path in (the_file(folder), the_file(folder, ".1")):
        whole = path.read_bytes()
        for damaged in (
            b"",
            whole[:-1],
            whole + b"x",
            *(flipped(whole, n) for n in range(0, len(whole), 997)),
        ):
            path.write_bytes(damaged)
            caplog.clear()
            x.grad = None
            compiled_again(double)(x).sum().backward()
            assert x.grad.tolist() == [2.0] * 3
            assert "damaged" in caplog.text
            assert path.read_bytes() != damaged or path.name.endswith(".1")
        path.write_bytes(whole)


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :]


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
    x = torch.randn(3, requires_grad=True)
    compiled_again(double)(x).sum().backward()
    path = the_file(folder)
    content = pickle.loads(files.read(path.parent.name, path.name))
    files.write(path.parent.name, path.name, pickle.dumps(content | {"by": "another process"}))
    x.grad = None
    compiled_again(double)(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3 and len(traced) == 1
    assert len([path for path in folder.glob("*/*/*") if path.name.endswith(".1")]) == 2


# ------------------------------------------------------------------------------------------------------ artifacts


def test_artifacts_carry_programs(traced, folder):
    from torch.compiler._cache import CacheArtifactManager

    x = torch.randn(3, requires_grad=True)
    with CacheArtifactManager.with_fresh_cache():
        compiled_again(double)(x).sum().backward()
        artifacts, info = torch.compiler.save_cache_artifacts()
    assert len(info.desugar_program_artifacts) == 2
    before = {path.relative_to(folder): path.read_bytes() for path in folder.glob("*/*/*")}
    for path in folder.glob("*/*/*"):
        path.unlink()
    torch.compiler.load_cache_artifacts(artifacts)
    assert {path.relative_to(folder): path.read_bytes() for path in folder.glob("*/*/*")} == before
    compiled_again(double)(x).sum().backward()
    assert len(traced) == 1
