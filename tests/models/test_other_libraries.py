"""Models of other libraries, compiled: diffusion, images, graphs; plain and with int8 weights. Eager is the judge."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import desugar
from subclasses.int8 import Int8Tensor, Int8WeightOnlyConfig, quantize_
from tests.models.judge import assert_same, check_step

pytestmark = pytest.mark.slow


def floats(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


# ---- graphs ------------------------------------------------------------------------------------------------

EDGES = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 0]])


class GraphAttention(nn.Module):
    """A node attends to those with an edge to it (Veličković et al., 2018)."""

    def __init__(self, into, out):
        super().__init__()
        self.values, self.score = nn.Linear(into, out), nn.Linear(2 * out, 1)

    def forward(self, nodes, edges):
        values, (source, target) = self.values(nodes), edges
        scores = F.leaky_relu(self.score(torch.cat([values[source], values[target]], -1))).exp()
        total = torch.zeros(len(nodes), 1).index_add(0, target, scores)
        return torch.zeros_like(values).index_add(0, target, scores / total[target] * values[source])


class Messages(nn.Module):
    """Messages along edges; a node keeps the sum, the mean and the largest (Corso et al., 2020)."""

    def __init__(self, into, out):
        super().__init__()
        self.message, self.update = nn.Linear(2 * into, out), nn.Linear(3 * out, out)

    def forward(self, nodes, edges):
        source, target = edges
        message = self.message(torch.cat([nodes[source], nodes[target]], -1))
        where, like = target[:, None].expand_as(message), message.new_zeros(len(nodes), message.shape[-1])
        kept = [
            like.scatter_reduce(0, where, message, kind, include_self=False)
            for kind in ("sum", "mean", "amax")
        ]
        return self.update(torch.cat(kept, -1))


class GraphNet(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.second = layer(4, 8), layer(8, 3)

    def forward(self, nodes, edges):
        return self.second(self.first(nodes, edges).relu(), edges).sum(0)


# ---- images ------------------------------------------------------------------------------------------------


def timm(name, **sizes):
    library = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    return library.create_model(name, pretrained=False, num_classes=5, **sizes)


def diffusers(name, **sizes):
    return getattr(pytest.importorskip("diffusers"), name)(norm_num_groups=4, **sizes)


UNET = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (8, 16), "attention_head_dim": 4}
TIMES = torch.tensor([3, 7])

MODELS = {
    "graph attention": (lambda: GraphNet(GraphAttention), lambda: (floats(5, 4), EDGES)),
    "messages": (lambda: GraphNet(Messages), lambda: (floats(5, 4), EDGES)),
    "diffusers unet": (
        lambda: diffusers(
            "UNet2DModel",
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            **UNET,
        ),
        lambda: (floats(2, 3, 8, 8), TIMES),
    ),
    "diffusers unet, conditional": (
        lambda: diffusers(
            "UNet2DConditionModel",
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=16,
            **UNET,
        ),
        lambda: (floats(2, 4, 8, 8), TIMES, floats(2, 5, 16)),
    ),
    "diffusers autoencoder": (
        lambda: diffusers(
            "AutoencoderKL",
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        lambda: (floats(2, 3, 16, 16),),
    ),
    "diffusers dit": (
        lambda: diffusers(
            "DiTTransformer2DModel",
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            sample_size=8,
            num_embeds_ada_norm=10,
        ),
        lambda: (floats(2, 4, 8, 8), TIMES, torch.tensor([1, 2])),
    ),
    "timm vit": (
        lambda: timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
        lambda: (floats(2, 3, 32, 32),),
    ),
    "timm resnet": (lambda: timm("resnet10t"), lambda: (floats(2, 3, 32, 32),)),
    "timm mobilenet": (lambda: timm("mobilenetv3_small_050"), lambda: (floats(2, 3, 32, 32),)),
}


@pytest.mark.parametrize("weights", ["plain", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_and_a_training_step(name, weights):
    make, arguments = MODELS[name]
    model = make().eval()
    if weights == "int8":
        quantize_(model, Int8WeightOnlyConfig())
        assert any(isinstance(p.data, Int8Tensor) for p in model.parameters())
    other = copy.deepcopy(model)
    fast = desugar.compile(other, backend="eager", strict=True)
    with torch.no_grad():
        assert_same(fast(*arguments()), model(*arguments()))
    check_step(
        *(model, other, fast, lambda call: call(*arguments())),
        lambda out: getattr(out, "sample", out).square().sum(),
    )
    assert len(fast.programs) == 2
