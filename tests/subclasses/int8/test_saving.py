"""State dicts, files of three kinds, and shards."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from subclasses.int8 import (
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    PerGroup,
    PerTensor,
    from_plain,
    quantize_,
    to_plain,
)

CONFIGS = {
    "rows": Int8WeightOnlyConfig(),
    "tensor": Int8WeightOnlyConfig(PerTensor()),
    "groups": Int8WeightOnlyConfig(PerGroup(4), symmetric=False),
    "dynamic": Int8DynamicActivationInt8WeightConfig(act_mapping_type="asymmetric"),
}


def make_model(config, dtype=torch.float32):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)
    quantize_(model, config)
    return model


def assert_same(model, other, dtype=torch.float32):
    x = torch.randn(3, 16, dtype=dtype)
    assert torch.equal(model(x), other(x))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert type(a.data) is type(b.data) and a.dtype == b.dtype
        assert type(a.data) is not Int8Tensor or a.data._layout is b.data._layout


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict(config, assign):
    model, other = make_model(CONFIGS[config]), make_model(CONFIGS[config])
    other.load_state_dict(model.state_dict(), assign=assign)
    assert_same(model, other)


@pytest.mark.parametrize("config", CONFIGS)
def test_torch_save(config):
    model, file = make_model(CONFIGS[config], torch.bfloat16), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
    other.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert_same(model, other, torch.bfloat16)


@pytest.mark.parametrize("config", CONFIGS)
def test_safetensors(config, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_file, save_file

    model, path = make_model(CONFIGS[config], torch.bfloat16), str(tmp_path / "model.safetensors")
    tensors, metadata = to_plain(model.state_dict())
    save_file(tensors, path, metadata)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    other = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
    state = from_plain(load_file(path), metadata)
    assert set(state) == set(model.state_dict())
    other.load_state_dict(state, assign=True)
    assert_same(model, other, torch.bfloat16)


def test_wrong_files():
    state = make_model(CONFIGS["rows"]).state_dict()
    tensors, metadata = to_plain(state)
    with pytest.raises(ValueError, match="int8_tensors"):
        from_plain(tensors, None)
    with pytest.raises(ValueError, match=r"0\.weight\.qdata or 0\.weight\.scale is missing"):
        from_plain({k: v for k, v in tensors.items() if k != "0.weight.scale"}, metadata)
    with pytest.raises(ValueError, match=r"named 0\.weight\.qdata already"):
        to_plain({**state, "0.weight.qdata": torch.zeros(1)})


def test_module_to():
    model = make_model(CONFIGS["rows"])
    before = model[0].weight.dequantize()
    model.to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16 and type(model[0].weight.data) is Int8Tensor
    assert torch.equal(model[0].weight.data.float().dequantize(), before)
    assert model(torch.randn(2, 16).bfloat16()).dtype == torch.bfloat16


# ---- shards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [None, (8, 6), (1, 3), (2, 6), (4, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_are_put_together(block_size, ranks):
    x = Int8Tensor.from_float(torch.randn(8, 6), block_size=block_size, symmetric=False)
    if block_size == (4, 2) and ranks == 4:
        ranks = 2
    policy = SimpleNamespace(param_dtype=torch.bfloat16)
    asked = [s.fsdp_pre_all_gather(None, x.shape, None, None, policy) for s in x.chunk(ranks)]
    outputs = tuple(torch.cat(parts) for parts in zip(*(inputs for inputs, _ in asked), strict=True))
    whole, _ = x.fsdp_post_all_gather(outputs, asked[0][1], torch.bfloat16)
    assert whole.dtype == torch.bfloat16 and whole.scale.dtype == torch.float32
    assert torch.equal(whole.float().dequantize(), x.dequantize())


def shard_and_compare(rank, world, store):
    """What each process does: the same model whole and sharded gives the same."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        for config in CONFIGS.values():
            torch.manual_seed(0)
            model = make_model(config)
            x, sharded = torch.randn(3, 16), copy.deepcopy(model)
            for layer in (sharded[0], sharded[2], sharded):
                fully_shard(layer, mesh=dist.init_device_mesh("cpu", (world,)))
            shard = sharded[0].weight.to_local()
            assert type(shard) is Int8Tensor and shard.shape == (32 // world, 16)
            for _ in range(2):
                expected, got = model(x), sharded(x)
                torch.testing.assert_close(got, expected)
                expected.sum().backward()
                got.sum().backward()
                torch.testing.assert_close(sharded[0].bias.grad.full_tensor(), model[0].bias.grad)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_fully_shard_in_one_process(tmp_path):
    if not dist.is_available():
        pytest.skip("needs torch.distributed")
    shard_and_compare(0, 1, tmp_path / "store")


@pytest.mark.slow
def test_fully_shard_in_two_processes(tmp_path):
    if not dist.is_available():
        pytest.skip("needs torch.distributed")
    mp.start_processes(shard_and_compare, (2, tmp_path / "store"), nprocs=2, start_method="fork")


def cut_by_device(rank, world, store):
    """Tensor parallelism: one layer cut by rows, the next by columns, as parts of distributed tensors."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        mesh, n = dist.init_device_mesh("cpu", (world,)), 32 // world
        for config in (CONFIGS["rows"], CONFIGS["tensor"], CONFIGS["groups"]):
            torch.manual_seed(0)
            up, down, x = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False), torch.randn(4, 16)
            quantize_(up, config)
            quantize_(down, config)
            expected, mine = down(up(x)), slice(rank * n, (rank + 1) * n)
            for layer, part, cut in ((up, up.weight[mine], 0), (down, down.weight[:, mine], 1)):
                whole = DTensor.from_local(part, mesh, [Shard(cut)])
                layer.weight = nn.Parameter(whole, requires_grad=False)
            x = DTensor.from_local(x, mesh, [Replicate()])
            for run in (lambda t: t, lambda t: torch.compile(t, backend="aot_eager")):
                torch.testing.assert_close(run(down)(run(up)(x)).full_tensor(), expected)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_tensor_parallel_in_two_processes(tmp_path):
    if not dist.is_available():
        pytest.skip("needs torch.distributed")
    mp.start_processes(cut_by_device, (2, tmp_path / "store"), nprocs=2, start_method="fork")
