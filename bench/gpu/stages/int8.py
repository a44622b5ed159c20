"""Linear layers with int8 weights, in CUDA graphs over more weights than a cache holds.

The layers have the shapes of a block of Llama-3-8B. The floor is a kernel that reads the bytes of the int8 weight and
does nothing else. torchao runs twice: with the settings of Inductor that it chooses itself, and without them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu.device import Call, at_least_64
from bench.gpu.run import Absent, Run, Turns
from bench.timing import copy_function

CACHE = 2**28  # bytes of int8 weights that one graph reads, more than any GPU cache has
SHAPES = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))  # outputs, inputs
BATCHES = (1, 16, 4, 64)
# Outputs and inputs of q, k, v, out, gate, up, down.
BLOCK = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
PLAIN = "bf16, torch.compile"
WEIGHT_ONLY, DYNAMIC = "int8 weight-only, desugar.compile", "int8 dynamic, desugar.compile"
FP8 = "fp8, torch._scaled_mm, the input converted in the call"
TORCHAO = "int8 weight-only, torchao, set_inductor_config=False"
TORCHAO_TUNED = "int8 weight-only, torchao, its own configuration"
TORCHAO_DYNAMIC = "int8 dynamic, torchao, its own configuration"
GEMLITE = "int8 weight-only, gemlite"
FLOOR = "floor: reading the int8 weight"
KERNEL = "int8, the kernel alone"
# Tiles of this library's kernels by the rows of the input: columns, width, warps, stages. The kernels choose among the
# first of them (`subclasses/int8/matmul/cuda_products.py`); the others are candidates.
TILES = {
    1: ((8, 512, 4, 1), (4, 1024, 4, 1), (4, 2048, 8, 1), (2, 2048, 4, 1), (1, 4096, 4, 1)),
    16: ((32, 256, 4, 4), (64, 128, 4, 4), (64, 128, 4, 5), (64, 256, 4, 3), (128, 128, 4, 4)),
    64: ((64, 128, 4, 3),),
}
TILES_OF_INTEGERS = ((16, 512, 4, 4), (32, 256, 4, 4))
Linear = Callable[[Tensor], Any]


def _multiply(x: Tensor, w: Any) -> Tensor:
    return F.linear(x, w)


def _multiply_fp8(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    x8 = (x / x_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch._scaled_mm(x8, w, scale_a=x_scale, scale_b=w_scale, out_dtype=x.dtype)


# ---------------------------------------------------------------------------------------------------------
# ways to multiply: each takes weights and returns one function for each of them
# ---------------------------------------------------------------------------------------------------------


def _plain(run: Run, weights: Sequence[Tensor]) -> list[Linear]:
    fn = run.device.compile(torch.compile, copy_function(_multiply), dynamic=False)
    return [partial(_call, fn, w) for w in weights]


def _call(fn: Callable, w: Any, x: Tensor) -> Any:
    return fn(x, w)


def _ours(activation: str | None, run: Run, weights: Sequence[Tensor]) -> list[Linear]:
    run.library()
    import desugar
    from subclasses.int8 import Int8Tensor

    fn = run.device.compile(desugar.compile, copy_function(_multiply), dynamic=False)
    return [partial(_call, fn, Int8Tensor.from_float(w, activation=activation)) for w in weights]


def _fp8(run: Run, weights: Sequence[Tensor]) -> list[Linear]:
    fn = run.device.compile(torch.compile, copy_function(_multiply_fp8), dynamic=False)
    x_scale = torch.full((), 0.02, device=run.device.name)
    linears = []
    for w in weights:
        scale = (w.abs().amax() / 448).float()
        w8 = (w / scale).to(torch.float8_e4m3fn).t()
        linears.append(lambda x, w8=w8, scale=scale: fn(x, w8, x_scale, scale))
    return linears


def _torchao(config: str, tuned: bool, run: Run, weights: Sequence[Tensor]) -> list[Linear]:
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns about missing extensions
    from torchao import quantization

    quantized = []
    with _settings_of_inductor():
        for w in weights:
            layer = nn.Sequential(nn.Linear(1, 1, bias=False, device="meta"))
            layer[0].weight = nn.Parameter(w.clone(), requires_grad=False)
            quantization.quantize_(layer, getattr(quantization, config)(set_inductor_config=tuned))
            quantized.append(layer[0].weight)
        settings = {name: getattr(torch._inductor.config, name) for name in _OF_TORCHAO}
    fn = run.device.compile(torch.compile, copy_function(_multiply), dynamic=False)

    def multiply(w: Tensor, x: Tensor) -> Any:
        with torch._inductor.config.patch(settings):
            return fn(x, w)

    return [partial(multiply, w) for w in quantized]


# The settings of Inductor that torchao's own configuration changes, for the whole process.
_OF_TORCHAO = (
    "coordinate_descent_tuning",
    "coordinate_descent_check_all_directions",
    "force_fuse_int_mm_with_mul",
    "fx_graph_cache",
)


@contextlib.contextmanager
def _settings_of_inductor() -> Iterator[None]:
    """Restores all settings of Inductor at the end."""
    config: Any = torch._inductor.config
    with config.patch(config.get_config_copy()):
        yield


def _gemlite(run: Run, weights: Sequence[Tensor]) -> list[Linear]:
    if run.device.name != "cuda":
        raise Absent("gemlite needs CUDA")
    import gemlite

    gemlite.set_autotune("fast")
    cached = run.folder / "cache" / "gemlite.json"
    gemlite.load_config(str(cached), print_error=False)
    helper = gemlite.helper.A16W8(device=run.device.name, dtype=torch.bfloat16)
    return [helper.from_weights(w) for w in weights]


def _keep_gemlite(run: Run) -> None:
    """Saves the configurations that gemlite chose by timing, for the next process."""
    import sys

    if "gemlite" in sys.modules:
        cached = run.folder / "cache" / "gemlite.json"
        cached.parent.mkdir(parents=True, exist_ok=True)
        sys.modules["gemlite"].cache_config(str(cached))


def _by_tiles(kernel: str, tiles: Sequence[int], options: Any, run: Run, weights: Any) -> list[Linear]:
    """Calls a kernel of this library by itself."""
    if run.device.name != "cuda":
        raise Absent("kernels of Triton need CUDA")
    from subclasses.int8 import Int8Tensor
    from subclasses.int8.matmul import cuda_products as kernels

    if options["is_dependent"] and not kernels.can_depend(weights[0].device):
        raise Absent("a dependent launch needs a Triton that offers it, and a device of Hopper or later")
    multiply = partial(getattr(kernels, kernel), tiles=kernels.Tiles(*tiles), **options)
    return [partial(multiply, kernels.Weight(*Int8Tensor.from_float(w).unwrap())) for w in weights]


def kernel_ways(rows: int) -> dict[str, Callable[[Run, Any], list[Linear]]]:
    """Returns the ways to call a kernel for ``rows`` rows: each tile, whole rows or parts, each kind of launch."""
    kernel, choices = ("multiply_row", [{}]) if rows == 1 else ("multiply_rows", [{"parts": 1}, {"parts": 4}])
    ways = {}
    for tiles, more, is_dependent in itertools.product(TILES[rows], choices, (False, True)):
        name = _name_tiles(tiles, f"in {more['parts']} parts, " if more else "", is_dependent)
        options = {**more, "is_dependent": is_dependent}
        if not is_dependent or tiles == TILES[rows][0]:
            ways[name] = partial(_by_tiles, kernel, (rows, *tiles), options)
    return ways


def kernel_ways_of_integers() -> dict[str, Callable[[Run, Any], list[Linear]]]:
    """Returns the ways to call the kernel that quantizes one row and multiplies integers."""
    options = {"x_scale": None, "dtype": torch.bfloat16}
    return {
        _name_tiles(tiles, "integers, ", is_dependent): partial(
            _by_tiles, "multiply_integers", (16, *tiles), {**options, "is_dependent": is_dependent}
        )
        for tiles, is_dependent in itertools.product(TILES_OF_INTEGERS, (False, True))
    }


def _name_tiles(tiles: Sequence[int], more: str, is_dependent: bool) -> str:
    columns, width, warps, stages = tiles
    launch = ", dependent launch" if is_dependent else ""
    return f"{KERNEL}: {more}tiles of {columns} x {width}, {warps} warps, {stages} stages{launch}"


WAYS: dict[str, Callable[[Run, Sequence[Tensor]], list[Linear]]] = {
    PLAIN: _plain,
    WEIGHT_ONLY: partial(_ours, None),
    FP8: _fp8,
    TORCHAO: partial(_torchao, "Int8WeightOnlyConfig", False),
    TORCHAO_TUNED: partial(_torchao, "Int8WeightOnlyConfig", True),
    GEMLITE: _gemlite,
}
DYNAMIC_WAYS = {
    PLAIN: _plain,
    WEIGHT_ONLY: WAYS[WEIGHT_ONLY],
    DYNAMIC: partial(_ours, "row"),
    TORCHAO_DYNAMIC: partial(_torchao, "Int8DynamicActivationInt8WeightConfig", True),
}


def read_steps(run: Run, weights: Sequence[Tensor]) -> list[Call]:
    """Returns the floor: one kernel for each weight, which reads as many bytes as it has entries."""
    numbers = [torch.ones(w.numel() // 4, dtype=torch.int32, device=run.device.name) for w in weights]
    if run.device.name != "cuda":
        return [x.sum for x in numbers]
    from bench.gpu.read_kernel import PROGRAMS, read_all

    out = torch.empty(PROGRAMS, dtype=torch.int32, device=run.device.name)
    return [partial(read_all, x, out) for x in numbers]


# ---------------------------------------------------------------------------------------------------------
# measuring
# ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_int8(run: Run) -> None:
    """Times one layer of each shape at each batch size, then the kernels alone."""
    shapes = run.device.pick(SHAPES, ((64, 32),))
    for shape in shapes:
        _measure_layers(run, shape, run.device.pick(BATCHES, (1, 16)), WAYS)
    for m in TILES:
        _measure_layers(run, shapes[0], (m,), {PLAIN: _plain, **kernel_ways(m)}, "int8, kernels")


@torch.no_grad()
def measure_dynamic(run: Run) -> None:
    """Times layers that quantize their input, beside weight-only ones."""
    shapes = run.device.pick(SHAPES[:2], ((64, 32),))
    for shape in shapes:
        _measure_layers(run, shape, run.device.pick((1, 16), (1,)), DYNAMIC_WAYS)
    _measure_layers(
        run, shapes[0], (1,), {PLAIN: _plain, **kernel_ways_of_integers()}, "int8 dynamic, kernels"
    )


def _measure_layers(
    run: Run, shape: tuple[int, int], batches: Sequence[int], ways: dict[str, Any], kind: str = "int8"
) -> None:
    options: dict[str, Any] = {"device": run.device.name, "dtype": torch.bfloat16}
    count = run.device.pick(max(3, -(-CACHE // (shape[0] * shape[1]))), 2)
    weights = [torch.randn(shape, **options) / shape[1] ** 0.5 for _ in range(count)]
    for m in batches:
        torch.compiler.reset()
        x = torch.randn(m, shape[1], **options)
        makers = {name: partial(_layer, run, way, weights, x) for name, way in ways.items()}
        makers[FLOOR] = lambda: run.device.record(at_least_64(read_steps(run, weights)))
        sizes = f"N = K = {shape[0]}" if shape[0] == shape[1] else f"N = {shape[0]}, K = {shape[1]}"
        group = f"{kind}, M = {m}, {sizes}"
        run.compare(group, makers, Turns(PLAIN, items=len(at_least_64(weights)), seconds=2.0))
    _keep_gemlite(run)


def _layer(run: Run, way: Callable, weights: Sequence[Tensor], x: Tensor) -> Call:
    """Returns a graph of at least 64 products, each with the next weight.

    Raises:
        AssertionError: A product is far from the product of the floats.
    """
    linears = way(run, weights)
    _check(linears[0](x), F.linear(x, weights[0]))
    return run.device.record(at_least_64([partial(linear, x) for linear in linears]))


def _check(actual: Tensor, expected: Tensor) -> None:
    off = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
    assert off < 0.1, f"expected the product of the floats, got one that is {off:.0%} off"


@torch.no_grad()
def measure_chain(run: Run) -> None:
    """Times the seven layers of a block, ten blocks as one graph, each with its own weights; a figure is one block."""
    shapes = run.device.pick(BLOCK, tuple((n // 256, k // 256) for n, k in BLOCK))
    blocks = run.device.pick(10, 2)
    options: dict[str, Any] = {"device": run.device.name, "dtype": torch.bfloat16}
    for m in run.device.pick((1, 16), (1,)):
        torch.compiler.reset()
        inputs = {k: torch.randn(m, k, **options) for _, k in shapes}
        weights = [torch.randn(shape, **options) / shape[1] ** 0.5 for _ in range(blocks) for shape in shapes]
        xs = [inputs[w.shape[1]] for w in weights]
        makers = {name: partial(_chain, run, way, weights, xs) for name, way in WAYS.items()}
        makers[FLOOR] = lambda weights=weights: run.device.record(read_steps(run, weights))
        run.compare(
            f"int8, seven layers of a block, M = {m}", makers, Turns(PLAIN, items=blocks, seconds=2.0)
        )
    _keep_gemlite(run)


def _chain(run: Run, way: Callable, weights: Sequence[Tensor], xs: Sequence[Tensor]) -> Call:
    linears = way(run, weights)
    return run.device.record([partial(linear, x) for linear, x in zip(linears, xs, strict=True)])
