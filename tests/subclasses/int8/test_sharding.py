"""Int8 parameters on several ranks: sharded by FSDP2, cut by columns, gathered, sent."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from subclasses import DispatchError
from subclasses.int8 import Int8Tensor
from tests.subclasses.int8.models import CONFIGS, quantized
from tests.subclasses.ragged.ranks import group, in_processes, on_ranks
from tests.subclasses.subjects import Scaled


def layers(config, *sizes):
    return quantized(nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes))), config)


# ---- hooks of FSDP2 ----------------------------------------------------------------------------------------


def gather(x, shards, mesh, policy=None):
    """Gathers shards as FSDP2 does; returns the parts, the whole, and the metadata of each shard."""
    asked = [s.fsdp_pre_all_gather(mesh, x.shape, None, None, policy) for s in shards]
    parts = [inputs for inputs, _ in asked]
    return parts, tuple(map(torch.cat, zip(*parts, strict=True))), [metadata for _, metadata in asked]


@pytest.mark.parametrize("block_size", [None, (8, 6), (1, 3), (2, 6), (4, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_are_put_together(block_size, ranks):
    x = Int8Tensor.from_float(torch.randn(8, 6), block_size=block_size, symmetric=False)
    shards = x.chunk(2 if block_size == (4, 2) else ranks)
    _, outputs, metadata = gather(x, shards, None, SimpleNamespace(param_dtype=torch.bfloat16))
    whole, _ = x.fsdp_post_all_gather(outputs, metadata[0], torch.bfloat16)
    assert whole.dtype == torch.bfloat16 and whole.scale.dtype == torch.float32
    assert torch.equal(whole.float().dequantize(), x.dequantize())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("size", [(7, 6), (5, 2), (7, 1), (7, 2, 3), (1, 6), (3, 6)])
@pytest.mark.parametrize("blocks", ["rows", "tensor", "entries"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_uneven_shards_are_put_together(size, blocks, symmetric, ranks):
    block_size = {"rows": None, "tensor": size, "entries": (1,) * len(size)}[blocks]
    x = Int8Tensor.from_float(torch.randn(size), block_size=block_size, symmetric=symmetric)
    rows = -(-size[0] // ranks)
    shards = [x[min(i * rows, size[0]) : min((i + 1) * rows, size[0])] for i in range(ranks)]
    parts, outputs, metadata = gather(x, shards, SimpleNamespace(size=lambda: ranks))
    # FSDP2 takes no other size where a shard is padded.
    assert all(t.shape == (rows, *size[1:]) and t.is_contiguous() for inputs in parts for t in inputs)
    whole, freed = x.fsdp_post_all_gather(outputs, metadata[-1], None)
    assert freed is outputs
    assert torch.equal(whole.dequantize(), x.dequantize())
    for t in (whole.qdata, whole.scale):
        t.zero_()
    assert x.fsdp_post_all_gather(outputs, metadata[0], None, out=whole) is None
    whole.qdata.copy_(x.qdata)  # FSDP2 fills what it was given back
    assert torch.equal(whole.dequantize(), x.dequantize())


# ---- FSDP2 -------------------------------------------------------------------------------------------------


@on_ranks
def shard_and_compare(mesh, folder):
    """Runs in each process: the whole model and the sharded model return the same results."""
    for config in CONFIGS.values():
        for rows in (32, 33, 1):
            torch.manual_seed(0)
            model = layers(config, 16, rows, 8) if rows % 4 == 0 else layers(config, 16, rows)
            x, sharded = torch.randn(3, 16), copy.deepcopy(model)
            for layer in (*sharded, sharded):
                fully_shard(layer, mesh=mesh)
            shard = sharded[0].weight.to_local()
            own = range(rows)[mesh.get_local_rank() :: mesh.size()]
            assert type(shard) is Int8Tensor and shard.shape == (len(own), 16)
            for _ in range(2):
                expected, got = model(x), sharded(x)
                torch.testing.assert_close(got, expected)
                expected.sum().backward()
                got.sum().backward()
                torch.testing.assert_close(sharded[0].bias.grad.full_tensor(), model[0].bias.grad)


@on_ranks
def save_and_load(mesh, folder):
    """Full and sharded state dicts hold int8 weights, and load."""

    def make(config, rows, seed):
        torch.manual_seed(seed)
        whole = layers(config, 16, rows)
        sharded = copy.deepcopy(whole)
        fully_shard(sharded[0], mesh=mesh)
        return whole, fully_shard(sharded, mesh=mesh)

    full, x = dcp.StateDictOptions(full_state_dict=True), torch.randn(4, 16)
    for config in CONFIGS.values():
        for rows in (4, 5, 1):
            (whole, sharded), (alone, other), (_, third) = (make(config, rows, seed) for seed in range(3))
            expected, state = whole(x), dcp.get_model_state_dict(sharded, options=full)
            assert torch.equal(state["0.weight"].dequantize(), whole[0].weight.dequantize())
            alone.load_state_dict(state, assign=True)
            dcp.set_model_state_dict(other, state, options=full)
            third.load_state_dict(sharded.state_dict())
            for model in (alone, other, third):
                torch.testing.assert_close(model(x), expected)


# ---- tensor parallelism ------------------------------------------------------------------------------------


@on_ranks
def cut_by_device(mesh, folder):
    """One layer cut by rows, the next by columns, as parts of distributed tensors."""
    rank, n = mesh.get_local_rank(), 32 // mesh.size()
    for config in (CONFIGS["rows"], CONFIGS["tensor"], CONFIGS["groups"]):
        torch.manual_seed(0)
        model, x = layers(config, 16, 32, 16), torch.randn(4, 16)
        expected, mine = model(x), slice(rank * n, (rank + 1) * n)
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        for options in ({}, {"src_data_rank": None}):  # sent by the first rank, or cut by each
            parallel = parallelize_module(copy.deepcopy(model), mesh, plan, **options)
            assert type(parallel[0].weight.to_local()) is Int8Tensor
            torch.testing.assert_close(parallel(x), expected)
        up, down = (nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
        for layer, source, cut in ((up, model[0], 0), (down, model[1], 1)):
            part = source.weight[mine] if cut == 0 else source.weight[:, mine]
            whole = DTensor.from_local(part, mesh, [Shard(cut)])
            layer.weight = nn.Parameter(whole, requires_grad=False)
        expected = x @ model[0].weight.dequantize().t() @ model[1].weight.dequantize().t()
        x = DTensor.from_local(x, mesh, [Replicate()])
        for run in (lambda t: t, lambda t: torch.compile(t, backend="aot_eager")):
            torch.testing.assert_close(run(down)(run(up)(x)).full_tensor(), expected)


# ---- collectives -------------------------------------------------------------------------------------------


def random_int8(seed=0, **options):
    return Int8Tensor.from_float(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)), **options)


@on_ranks
def send(mesh, folder):
    """A collective fills its output or refuses it; it never writes to a copy that is lost."""
    rank, last = mesh.get_local_rank(), mesh.size() - 1
    for options in ({}, {"symmetric": False}, {"block_size": (2, 4)}):
        x = random_int8(rank, **options)
        version = x._version
        dist.broadcast(x, last)
        assert torch.equal(x.dequantize(), random_int8(last, **options).dequantize()) and x._version > version
        gathered = [torch.zeros(4, 8) for _ in range(mesh.size())]
        dist.all_gather(gathered, random_int8(rank, **options))
        assert all(torch.equal(t, random_int8(i, **options).dequantize()) for i, t in enumerate(gathered))
        for refused in (
            lambda x=x: dist.all_reduce(x),
            lambda x=x: dist.all_gather([x] * mesh.size(), x),
        ):
            with pytest.raises(DispatchError, match="writes to an Int8Tensor"):
                refused()
    parts = [random_int8(i, block_size=(4 if i else 1, 8)) for i in range(2)]
    with pytest.raises(DispatchError, match="src_data_rank=None"):
        torch.ops.c10d.scatter_(parts[:1], [parts], dist.group.WORLD.boxed(), 0, True, -1)
    with pytest.raises(DispatchError, match="writes to a Scaled"):
        dist.broadcast(Scaled(torch.ones(2), torch.tensor(2.0)), 0)


SENT = {
    "a plain tensor": (
        lambda: torch.randn(4, 8),
        r"got a Tensor of size \(4, 8\) too; quantize the inputs and outputs of all ranks alike",
    ),
    "numbers with a zero point": (
        lambda: random_int8(symmetric=False),
        r"got Int8Tensors with a scale of \(4, 1\) and a zero point too; quantize .* alike, with symmetric=True or",
    ),
    "other blocks": (
        lambda: random_int8(block_size=(4, 8)),
        r"got Int8Tensors with a scale of \(1, 1\) .*src_data_rank=None",
    ),
}


@pytest.mark.filterwarnings("ignore")
def test_what_is_sent_is_what_is_received(tmp_path):
    """Tensors with the same kind of quantization are sent; other tensors are refused."""
    with group(0, 1, tmp_path / "store"):
        for symmetric in (True, False):
            sent, received = (random_int8(seed, symmetric=symmetric) for seed in range(2))
            dist.scatter(received, [sent])
            assert torch.equal(received.dequantize(), sent.dequantize())
        for make, text in SENT.values():
            text = f"scatter_.*: expected Int8Tensors with a scale of \\(4, 1\\) and no zero point throughout, {text}"
            with pytest.raises(DispatchError, match=text):
                dist.scatter(random_int8(), [make()])


# ---- in processes ------------------------------------------------------------------------------------------

ALONE = {"fully_shard": shard_and_compare, "state dicts": save_and_load, "collectives": send}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", ALONE.values(), ids=ALONE)
def test_in_one_process(start, tmp_path):
    start(0, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("start", [*ALONE.values(), cut_by_device], ids=[*ALONE, "tensor parallelism"])
def test_in_two_processes(start, tmp_path):
    in_processes(start, tmp_path)
