"""The kernels behind each goal that needs a GPU: which kernels run, their reads and writes, and their waits."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench.prediction import DEVICES, fake_device, predict
from bench.prediction.fake import move
from bench.prediction.lower import recording_backend
from bench.prediction.predicting import EAGER, OURS
from desugar.api import capture
from desugar.backends.choose import choose_backend
from examples._language_model import LanguageModel, jagged
from subclasses.int8 import Int8Tensor
from subclasses.keyed import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from subclasses.ragged import PaddedTensor
from tests.bench.prediction.needs import cuda_build
from tests.subclasses.subjects import Pair

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


@pytest.mark.sweep(32)
@pytest.mark.parametrize("size", [4096, 8192])
@pytest.mark.parametrize("batch", [1, 2, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_int8_decode_reads_the_weight_once_as_int8_in_one_kernel(size, batch, dtype):
    """A second kernel, of a compiler, adds the parts of long sums: at most a quarter of the weight's bytes."""
    weight = Int8Tensor.from_float(torch.ones(size, size, dtype=dtype))
    (stage,) = ours(multiply, torch.ones(batch, size, dtype=dtype), weight)
    kernel, *adds = stage.kernels
    assert kernel.kind == "triton" and kernel.launches == 1 and len(adds) <= (batch > 1)
    assert dict(kernel.reads_by_dtype)["int8"] == size * size
    assert kernel.reads < 1.05 * size * size, "something as large as the weight is read besides it"
    assert kernel.writes <= (size * size // 4 if adds else 2 * batch * size), "a dequantized copy is written"
    assert stage.kernels[-1].writes == 2 * batch * size and kernel.spills == 0 and wait_for_nothing([stage])


@pytest.mark.sweep(4)
@pytest.mark.parametrize("batch", [1, 4, 16, 256])
@torch.no_grad()
def test_dynamic_int8_multiplies_integers(batch):
    weight = Int8Tensor.from_float(torch.ones(4096, 4096, dtype=torch.bfloat16), activation="row")
    (stage,) = ours(multiply, torch.ones(batch, 4096, dtype=torch.bfloat16), weight)
    readers = [kernel.name for kernel in stage.kernels if kernel.reads >= 4096 * 4096]
    assert readers == ["aten._int_mm.out" if batch > 64 else "int8_by_int8_rows_kernel"]
    assert len(stage.kernels) == {1: 1, 4: 1, 16: 2}.get(batch, 3), (
        "kernels besides quantizing and the product"
    )
    assert max(kernel.writes for kernel in stage.kernels) < 4096 * 4096 and wait_for_nothing([stage])


BLOCKS = {
    "groups": {"block_size": (1, 128)},
    "small groups": {"block_size": (1, 32)},
    "wide groups": {"block_size": (1, 1024)},
    "zero points": {"symmetric": False},
    "groups with zero points": {"block_size": (1, 128), "symmetric": False},
}


@pytest.mark.sweep(40)
@pytest.mark.parametrize("batch", [1, 2, 16, 64])
@pytest.mark.parametrize("blocks", BLOCKS)
@torch.no_grad()
def test_int8_decode_with_groups_and_zero_points_writes_no_dequantized_copy(batch, blocks):
    size = 4096
    weight = Int8Tensor.from_float(torch.ones(size, size, dtype=torch.bfloat16), **BLOCKS[blocks])
    (stage,) = ours(multiply, torch.ones(batch, size, dtype=torch.bfloat16), weight)
    readers = [kernel for kernel in stage.kernels if kernel.reads >= size * size]
    assert [(kernel.kind, kernel.launches) for kernel in readers] == [("triton", 1)]
    zero_points = weight.scale.numel() if weight.zero_point is not None else 0
    assert dict(readers[0].reads_by_dtype)["int8"] <= size * size + zero_points
    assert readers[0].name == ("int8_row_kernel" if batch == 1 else "int8_rows_kernel")
    assert sum(kernel.writes for kernel in stage.kernels) <= 2 * batch * size + size * size // 4
    assert all(kernel.spills == 0 for kernel in stage.kernels) and wait_for_nothing([stage])


@pytest.mark.sweep(14)
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("batch", [16, 32, 64])
@torch.no_grad()
def test_the_kernel_for_a_few_rows_fits_into_every_device(name, batch):
    """A block has 99 KiB of shared memory on an L4: a kernel that needs more does not start."""
    weight = Int8Tensor.from_float(
        torch.ones(64, 1024, dtype=torch.bfloat16), block_size=(1, 32), symmetric=False
    )
    (stage,) = ours(multiply, torch.ones(batch, 1024, dtype=torch.bfloat16), weight, device=name)
    (kernel,) = stage.kernels
    assert kernel.name == "int8_rows_kernel" and kernel.spills == 0
    assert 0 < kernel.shared_memory <= 99 * 1024


@torch.no_grad()
def test_a_kernel_that_the_device_cannot_start_is_named():
    small = replace(DEVICES["h100"], shared_memory=2**14)
    weight = Int8Tensor.from_float(torch.ones(64, 1024, dtype=torch.bfloat16))
    way = predict(
        multiply, (torch.ones(16, 1024, dtype=torch.bfloat16), weight), device=small, ways=(OURS,)
    ).way(OURS)
    assert (
        re.search("at most 16384 bytes of shared memory.*int8_rows_kernel with", way.error) and not way.stages
    )


@torch.no_grad()
def test_groups_that_are_no_multiple_of_8_are_left_to_the_compiler():
    weight = Int8Tensor.from_float(torch.ones(64, 192, dtype=torch.bfloat16), block_size=(1, 12))
    (stage,) = ours(multiply, torch.ones(16, 192, dtype=torch.bfloat16), weight)
    assert "aten.mm.out" in {kernel.name for kernel in stage.kernels}


# ---- jagged -----------------------------------------------------------------------------------------------------

LENGTHS = [37, 200, 5, 128, 90, 17, 256, 64]


def rows_of(lengths):
    return [torch.randint(256, (n + 1,)) for n in lengths]


def training_step():
    model = LanguageModel(256, 4, 2, 256).to(torch.bfloat16)
    return model, jagged(rows_of(LENGTHS))


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def keyed_batch():
    return KeyedJaggedTensor(["user", "item"], torch.arange(12), torch.tensor([3, 0, 2, 1, 4, 2]))


def pooled(collection):
    return lambda batch: torch.cat([*collection(batch).values()], 1).square().sum()


def looked_up(collection):
    return lambda batch: sum((rows * rows).sum() for rows in collection(batch).values())


def bags(**options):
    return {key: torch.nn.EmbeddingBag(1000, 32, **options) for key in ("user", "item")}


LOOKUPS = {
    "sum": lambda: pooled(EmbeddingBagCollection(bags(mode="sum"))),
    "mean": lambda: pooled(EmbeddingBagCollection(bags(mode="mean"))),
    "max": lambda: pooled(EmbeddingBagCollection(bags(mode="max"))),
    "no pooling": lambda: looked_up(
        EmbeddingCollection({key: torch.nn.Embedding(1000, 32) for key in ("user", "item")})
    ),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_of_a_keyed_batch_stay_on_the_device(name):
    stages = ours(LOOKUPS[name](), keyed_batch())
    assert [stage.name for stage in stages] == ["forward", "backward"]
    assert wait_for_nothing(stages), [stage.no_cuda_graph for stage in stages]
    assert all(kernel.on_device for stage in stages for kernel in stage.kernels)
    launched = [{kernel.name: kernel.launches for kernel in stage.kernels} for stage in stages]
    forward = "keyed_lookup_kernel" if name == "no pooling" else "keyed_pool_kernel"
    assert launched[0][forward] == launched[1]["keyed_table_grad_kernel"] == 2  # one for each key
    assert not any(kernel.kind == "library" for stage in stages for kernel in stage.kernels)


def test_an_op_that_waits_inside_is_seen():
    """Frequencies of ids are divided by in an op that reads the offsets; its code is run on fake tensors."""
    fn = pooled(EmbeddingBagCollection(bags(mode="sum", scale_grad_by_freq=True)))
    for stage, op in zip(ours(fn, keyed_batch()), ("keyed_pool", "keyed_pool_backward"), strict=True):
        assert stage.synchronizations == (f"aten.item.default in subclasses.{op}.default",)
        assert any("wait" in reason for reason in stage.no_cuda_graph)


def test_a_kernel_of_triton_is_a_kernel_without_a_compiler_too():
    found = predict(LOOKUPS["sum"](), (keyed_batch(),), ways=(EAGER,)).way(EAGER)
    assert not found.error and wait_for_nothing(found.stages)
    assert {"keyed_pool_kernel", "keyed_table_grad_kernel"} <= {kernel.name for kernel in found.kernels}
