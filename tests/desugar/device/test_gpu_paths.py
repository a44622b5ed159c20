"""What each goal that waits for a GPU depends on: which kernels run there, what they read and write, what waits."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from desugar.api import capture
from desugar.backends.choose import choose_backend
from desugar.device import fake_device, predict
from desugar.device.fake import move
from desugar.device.lower import recording_backend
from desugar.device.predicting import OURS, STOCK
from examples._language_model import LanguageModel, jagged
from subclasses import TensorSubclass, inner
from subclasses.int8 import Int8Tensor
from subclasses.keyed import EmbeddingBagCollection, KeyedJaggedTensor
from subclasses.ragged import PaddedTensor
from tests.desugar.device.needs import cuda_build

pytestmark = cuda_build
ROOT = Path(__file__).parents[3]


def ours(fn, *args, **options):
    """The stages of our way; there is no graph break, and no error."""
    found = predict(fn, args, ways=(OURS,), **options).way(OURS)
    assert not found.error, found.error
    return found.stages


def wait_for_nothing(stages):
    """Whether no stage waits, copies, or cannot be recorded as a CUDA graph."""
    return not any(stage.synchronizations or stage.copies or stage.no_cuda_graph for stage in stages)


# ---- int8 -------------------------------------------------------------------------------------------------------


def multiply(x, w):
    return F.linear(x, w)


@pytest.mark.parametrize("size", [4096, 8192])
@pytest.mark.parametrize("batch", [1, 2, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_int8_decode_reads_the_weight_once_as_int8_in_one_kernel(size, batch, dtype):
    weight = Int8Tensor.from_float(torch.ones(size, size, dtype=dtype))
    (stage,) = ours(multiply, torch.ones(batch, size, dtype=dtype), weight)
    (kernel,) = stage.kernels
    assert kernel.kind == "triton" and kernel.launches == 1
    assert dict(kernel.reads_by_dtype)["int8"] == size * size
    assert kernel.reads < 1.05 * size * size, "something as large as the weight is read besides it"
    assert kernel.writes == 2 * batch * size, "more than the result is written: a dequantized copy"
    assert kernel.spills == 0 and wait_for_nothing([stage])


@pytest.mark.parametrize("batch", [1, 16, 256])
@torch.no_grad()
def test_dynamic_int8_multiplies_integers(batch):
    weight = Int8Tensor.from_float(torch.ones(4096, 4096, dtype=torch.bfloat16), activation="row")
    (stage,) = ours(multiply, torch.ones(batch, 4096, dtype=torch.bfloat16), weight)
    assert [kernel.name for kernel in stage.kernels if kernel.kind == "library"] == ["aten._int_mm.out"]
    readers = [kernel for kernel in stage.kernels if kernel.reads >= 4096 * 4096]
    assert [kernel.name for kernel in readers] == ["aten._int_mm.out"], "the weight is read elsewhere, too"
    assert max(kernel.writes for kernel in stage.kernels) < 4096 * 4096 and wait_for_nothing([stage])


def test_the_kernel_for_a_few_rows_computes_what_eager_does():
    """Runs it by Triton's interpreter, on the CPU; it has no products of bfloat16, so in float16."""
    code = """
import torch
from subclasses.int8.cuda_products import BLOCK_K, BLOCK_N, int8_rows_kernel
torch.manual_seed(0)
for rows, columns, width, block in ((1, 5, 7, 16), (16, 40, 300, 16), (20, 16, 256, 32), (33, 17, 513, 64)):
    x = torch.randn(rows, width).to(torch.float16)
    w = torch.randint(-128, 128, (columns, width), dtype=torch.int8)
    for scale in (torch.rand(columns, 1) / 99, torch.rand(1, 1) / 99):
        y = torch.full((rows, columns), float("nan"), dtype=torch.float16)
        step = 0 if len(scale) == 1 else scale.stride(0)
        int8_rows_kernel[(-(-columns // BLOCK_N),)](
            x, w, scale, y, rows, columns, width, step, block, BLOCK_N, BLOCK_K
        )
        torch.testing.assert_close(y, ((x.double() @ w.double().t()) * scale.double().t()).to(torch.float16))
print("all agree")
"""
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.strip() == "all agree", done.stderr


# ---- jagged -----------------------------------------------------------------------------------------------------

LENGTHS = [37, 200, 5, 128, 90, 17, 256, 64]


def rows_of(lengths):
    return [torch.randint(256, (n + 1,)) for n in lengths]


def training_step():
    model = LanguageModel(256, 4, 2, 256).to(torch.bfloat16)
    return model, jagged(rows_of(LENGTHS))


def test_a_jagged_training_step_waits_for_nothing_and_attends_by_flash_attention():
    model, batch = training_step()
    forward, backward = ours(model, *batch)
    assert wait_for_nothing([forward, backward])
    attention = [
        [kernel for kernel in stage.kernels if "attention" in kernel.name] for stage in (forward, backward)
    ]
    assert [{kernel.name for kernel in kernels} for kernels in attention] == [
        {"aten._flash_attention_forward.default"},
        {"aten._flash_attention_backward.default"},
    ]
    assert [sum(kernel.launches for kernel in kernels) for kernels in attention] == [2, 2]


def test_a_jagged_training_step_has_no_dense_table():
    model, batch = training_step()
    with fake_device("h100") as fake:
        moved = move(fake, model, batch, {})
        program = capture(*moved, recording_backend(fake, choose_backend("inductor"), []))
    dense = len(LENGTHS) * max(LENGTHS)
    assert sum(LENGTHS) * 2 < dense
    for graph in (program.forward, program.backward):
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and node.op == "call_function":
                shape = [
                    (getattr(extent, "node", None) and extent.node.hint) or extent for extent in value.shape
                ]
                assert shape[:2] != [len(LENGTHS), max(LENGTHS)] and dense not in shape, (node, shape)


def test_a_jagged_step_moves_as_many_bytes_as_its_rows_have_entries():
    def feed_forward(x, up, down):
        return F.linear(F.gelu(F.linear(x, up)), down)

    from subclasses.ragged import JaggedTensor

    parts = [torch.ones(n, 256, dtype=torch.bfloat16) for n in LENGTHS]
    weights = torch.ones(1024, 256, dtype=torch.bfloat16), torch.ones(256, 1024, dtype=torch.bfloat16)
    (stage,) = ours(feed_forward, JaggedTensor.from_tensors(parts), *weights)
    entries = sum(LENGTHS)
    values = 2 * entries * (256 + 1024 + 1024 + 1024 + 1024 + 256)
    assert stage.bytes == values + 2 * 2 * 256 * 1024


# ---- padded -----------------------------------------------------------------------------------------------------


def decode(model):
    return lambda tokens: model.logits(tokens)[:, -1].argmax(-1)


@torch.no_grad()
def test_a_padded_step_is_one_recordable_program_for_every_length_of_a_bucket():
    model = LanguageModel(128, 4, 2, 256).to(torch.bfloat16).eval()
    codes = set()
    for longest in (65, 100, 128):
        batch = PaddedTensor.from_tensors(rows_of([longest - 1, longest // 2, 3]), multiple=64)
        assert batch.shape == (3, 128)
        (stage,) = ours(decode(model), batch, dynamic=False)
        assert wait_for_nothing([stage]), stage.no_cuda_graph
        assert stage.sizes == () and all(kernel.on_device for kernel in stage.kernels)
        codes.add(re.sub(r"/[^ ]*/\w+\.py|AOT ID: \['\w+'\]", "", stage.code))
    assert len(codes) == 1, "a length is in the program"


# ---- wrappers ---------------------------------------------------------------------------------------------------


class Pair(TensorSubclass, fallback="map"):
    a: torch.Tensor = inner()
    b: torch.Tensor = inner()


def train(*args):
    return [x * 2 for x in args]


def test_a_wrapper_adds_no_launch_event_stream_or_wait():
    tensors = [torch.randn(8, 8, requires_grad=True) for _ in range(4)]
    plain = ours(train, *tensors)
    wrapped = ours(train, *(Pair(*tensors[i : i + 2]) for i in (0, 2)))
    for one, other in zip(plain, wrapped, strict=True):
        assert (one.launches, one.bytes, one.name) == (other.launches, other.bytes, other.name)
        assert [kernel.kind for kernel in other.kernels] == ["triton"]
    assert wait_for_nothing([*plain, *wrapped])
    with fake_device("h100") as fake:
        moved = move(fake, train, [Pair(*tensors[:2]).requires_grad_()], {})
        program = capture(*moved, recording_backend(fake, choose_backend("inductor"), []))
    assert program.source and not re.search(
        r"Event|Stream|stream|synchronize|cuda\.|\.item\(|\.cpu\(", program.source
    )


# ---- keyed ------------------------------------------------------------------------------------------------------


def test_lookups_of_a_keyed_batch_stay_on_the_device():
    tables = {key: torch.nn.EmbeddingBag(1000, 32, mode="sum") for key in ("user", "item")}
    collection = EmbeddingBagCollection(tables)
    lengths = torch.tensor([3, 0, 2, 1, 4, 2])
    batch = KeyedJaggedTensor(["user", "item"], torch.arange(12), lengths)
    stages = ours(lambda batch: torch.cat([*collection(batch).values()], 1).square().sum(), batch)
    assert wait_for_nothing(stages)
    assert all(kernel.on_device for stage in stages for kernel in stage.kernels)
    assert STOCK != OURS and [stage.name for stage in stages] == ["forward", "backward"]
