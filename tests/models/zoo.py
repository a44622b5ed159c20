"""Hugging Face architectures at tiny sizes with random weights, and the calls that each is tried with.

A call is a function that makes keyword arguments. It gets the arguments and the results of the model's previous call,
by name. So a decoder's second call goes on with the cache of its first.
"""

from __future__ import annotations

import operator
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MoEModelOutput

Call = Callable[[dict[str, Any]], dict[str, Any]]

VOCABULARY = 40
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = dict.fromkeys(
    ["attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0
)
# The names that encoder-decoders have for the same sizes.
TINY_PAIR: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
TINY_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}
TINY_SPEECH: dict[str, Any] = TINY | {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}


# A function that builds the model in eval mode; the forwards to try, in their order. Last, a function that makes the
# arguments of a training step, whose output has a `loss`.
Architecture = namedtuple("Architecture", "build calls training")


# ------------------------------------------------------------------------------------------- models and arguments


def build(name: str, sizes: dict[str, Any]) -> nn.Module:
    """The model class at the path `name` with these sizes; no parameter is left at zero or at one."""
    cls = operator.attrgetter(name)(transformers)
    torch.manual_seed(0)
    model = cls._from_config(cls.config_class(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def ids(batch: int, length: int, seed: int = 0) -> Tensor:
    """Tokens, none of them special."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def floats(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def mask(batch: int, length: int, *, left: bool = False, count: int = 2) -> Tensor:
    """Ones, but for some places of padding in the first row."""
    out = torch.ones(batch, length, dtype=torch.long)
    out[0, slice(None, count) if left else slice(-count, None)] = 0
    return out


def texts(batch: int, length: int, *, left: bool = False) -> dict[str, Tensor]:
    """Padded rows of tokens."""
    return {"input_ids": ids(batch, length), "attention_mask": mask(batch, length, left=left)}


def further(known: dict[str, Any]) -> dict[str, Any]:
    """One target token more with the cache of an encoder-decoder."""
    return {
        "encoder_outputs": MoEModelOutput(known["encoder_last_hidden_state"]),
        "decoder_input_ids": ids(2, 1),
        "past_key_values": known["past_key_values"],
    }


# ------------------------------------------------------------------------------------------- kinds of models


def decoder(
    name: str, cache: str = "past_key_values", own: Callable[[], dict[str, Any]] = dict, **sizes: Any
) -> Architecture:
    """A causal language model: a padded batch, two tokens more with the cache, another batch.

    Args:
        name: Of the model class.
        cache: The model's name for its cache.
        own: Makes arguments that this model needs for a cache.
        sizes: Of the configuration.
    """

    def step(length: int) -> Call:
        return lambda known: (
            own()
            | {
                "input_ids": ids(2, 1, seed=length),
                "attention_mask": mask(2, length, left=True),
                cache: known[cache],
            }
        )

    return Architecture(
        lambda: build(name, TINY | sizes),
        (
            lambda _: texts(2, 7, left=True) | own(),
            step(8),
            step(9),
            lambda _: texts(3, 5, left=True) | own(),
        ),
        lambda: texts(2, 7, left=True) | {"labels": ids(2, 7), "use_cache": False},
    )


def encoder(name: str, **sizes: Any) -> Architecture:
    """A masked language model on padded batches."""
    return Architecture(
        lambda: build(name, TINY | sizes),
        (lambda _: texts(2, 7), lambda _: texts(3, 5)),
        lambda: texts(2, 7) | {"labels": ids(2, 7)},
    )


def encoder_decoder(name: str, **sizes: Any) -> Architecture:
    """A translation model: a padded source, one target token more with the cache, another batch."""
    return Architecture(
        lambda: build(name, TINY_PAIR | sizes),
        (
            lambda _: texts(2, 7) | {"decoder_input_ids": ids(2, 4)},
            lambda known: further(known) | {"attention_mask": mask(2, 7)},
            lambda _: texts(3, 5) | {"decoder_input_ids": ids(3, 3)},
        ),
        lambda: texts(2, 7) | {"labels": ids(2, 4)},
    )


def vision(name: str, other: int = 16, **sizes: Any) -> Architecture:
    """An image classifier; `other` is the width and height of the second batch."""
    return Architecture(
        lambda: build(name, TINY_VISION | sizes),
        (
            lambda _: {"pixel_values": floats(2, 3, 16, 16)},
            lambda _: {"pixel_values": floats(3, 3, other, other)},
        ),
        lambda: {"pixel_values": floats(2, 3, 16, 16), "labels": torch.tensor([1, 3])},
    )


def images_and_texts(size: int, length: int) -> dict[str, Any]:
    return texts(size, length) | {"pixel_values": floats(size, 3, 16, 16)}


def waves(batch: int, length: int) -> dict[str, Any]:
    """Waves, the first of them with 100 places of padding."""
    return {"input_values": floats(batch, length), "attention_mask": mask(batch, length, count=100)}


def speech(name: str, **sizes: Any) -> Architecture:
    """Padded waves."""
    return Architecture(
        lambda: build(name, TINY_SPEECH | sizes),
        (lambda _: waves(2, 400), lambda _: waves(3, 500)),
        lambda: waves(2, 400) | {"labels": ids(2, 4)},
    )


def spectrograms(size: int, length: int) -> dict[str, Any]:
    return {"input_features": floats(size, 8, 24), "decoder_input_ids": ids(size, length)}


# ------------------------------------------------------------------------------------------- the table

GROUPED = {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
DEEPSEEK = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
T5 = {"d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
SWITCH = T5 | {
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_experts": 2,
}

ZOO: dict[str, Architecture] = {
    # decoders
    "llama": decoder("LlamaForCausalLM", **GROUPED),
    "mistral": decoder("MistralForCausalLM", **GROUPED, sliding_window=4),
    "qwen2": decoder("Qwen2ForCausalLM", **GROUPED),
    "qwen3": decoder("Qwen3ForCausalLM", **GROUPED, head_dim=8),
    "gemma": decoder("GemmaForCausalLM", **GROUPED, head_dim=8),
    "gemma2": decoder("Gemma2ForCausalLM", **GROUPED, head_dim=8, sliding_window=4),
    "gemma3": decoder("Gemma3ForCausalLM", **GROUPED, head_dim=8, sliding_window=4),
    "phi": decoder("PhiForCausalLM"),
    "phi3": decoder("Phi3ForCausalLM", **GROUPED),
    "gpt2": decoder("GPT2LMHeadModel"),
    "gpt_neo": decoder("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], window_size=4),
    "gpt_neox": decoder("GPTNeoXForCausalLM"),
    "gptj": decoder("GPTJForCausalLM", rotary_dim=4),
    "gpt_bigcode": decoder("GPTBigCodeForCausalLM"),
    "opt": decoder("OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=32),
    "bloom": decoder("BloomForCausalLM"),
    "falcon": decoder("FalconForCausalLM"),
    "stablelm": decoder("StableLmForCausalLM", **GROUPED),
    "cohere": decoder("CohereForCausalLM", **GROUPED),
    "olmo": decoder("OlmoForCausalLM", **GROUPED),
    "starcoder2": decoder("Starcoder2ForCausalLM", **GROUPED),
    "mpt": decoder("MptForCausalLM", use_cache=True, max_seq_len=64),
    # mixtures of experts
    "mixtral": decoder("MixtralForCausalLM", **EXPERTS, num_local_experts=4),
    "qwen2_moe": decoder("Qwen2MoeForCausalLM", **EXPERTS, num_experts=4, shared_expert_intermediate_size=24),
    "deepseek_v3": decoder("DeepseekV3ForCausalLM", **DEEPSEEK),
    "gpt_oss": decoder("GptOssForCausalLM", **EXPERTS, num_local_experts=4, head_dim=8),
    # recurrent models and state spaces
    "mamba": decoder("MambaForCausalLM", "cache_params", state_size=4),
    "mamba2": decoder(
        "Mamba2ForCausalLM", "cache_params", state_size=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=4
    ),
    "rwkv": decoder("RwkvForCausalLM", "state", attention_hidden_size=32),
    "recurrent_gemma": decoder(
        "RecurrentGemmaForCausalLM",
        # It keeps some of its state in its modules and does not return the rest.
        own=lambda: {"use_cache": True, "past_key_values": transformers.DynamicCache()},
        **GROUPED,
        num_hidden_layers=3,
        attention_window_size=4,
    ),
    "jamba": decoder(
        "JambaForCausalLM",
        **GROUPED,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
    ),
    # encoders
    "bert": encoder("BertForMaskedLM"),
    "roberta": encoder("RobertaForMaskedLM"),
    "distilbert": encoder("DistilBertForMaskedLM"),
    "albert": encoder("AlbertForMaskedLM", embedding_size=16),
    "electra": encoder("ElectraForMaskedLM", embedding_size=16),
    "deberta_v2": encoder("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "mpnet": encoder("MPNetForMaskedLM"),
    "convbert": encoder("ConvBertForMaskedLM", embedding_size=16),
    "longformer": encoder("LongformerForMaskedLM", attention_window=[4, 4]),
    "modernbert": encoder("ModernBertForMaskedLM", local_attention=4),
    "fnet": encoder("FNetForMaskedLM"),
    # encoders with decoders
    "t5": encoder_decoder("T5ForConditionalGeneration", **T5),
    "bart": encoder_decoder("BartForConditionalGeneration"),
    "pegasus": encoder_decoder("PegasusForConditionalGeneration"),
    "marian": encoder_decoder("MarianMTModel"),
    "mbart": encoder_decoder("MBartForConditionalGeneration"),
    "switch_transformers": encoder_decoder("SwitchTransformersForConditionalGeneration", **SWITCH),
    # images
    "vit": vision("ViTForImageClassification"),
    "deit": vision("DeiTForImageClassification"),
    "swin": vision(
        "SwinForImageClassification", embed_dim=16, depths=[2, 2], num_attention_heads=[2, 4], window_size=2
    ),
    "convnext": vision(
        "ConvNextForImageClassification", 24, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2
    ),
    "beit": vision("BeitForImageClassification"),
    "dinov2": vision("Dinov2ForImageClassification", 24),
    "resnet": vision(
        "ResNetForImageClassification", 24, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]
    ),
    "clip": Architecture(  # images and padded texts
        lambda: build("CLIPModel", {"text_config": TINY, "vision_config": TINY_VISION, "projection_dim": 16}),
        (lambda _: images_and_texts(2, 7), lambda _: images_and_texts(3, 5)),
        lambda: images_and_texts(2, 7) | {"return_loss": True},
    ),
    # speech
    "wav2vec2": speech("Wav2Vec2ForCTC"),
    "hubert": speech("HubertForCTC"),
    "whisper": Architecture(  # spectrograms of a fixed length, and text
        lambda: build(
            "WhisperForConditionalGeneration",
            TINY_PAIR | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 20},
        ),
        (lambda _: spectrograms(2, 4), further, lambda _: spectrograms(3, 5)),
        lambda: {"input_features": floats(2, 8, 24), "labels": ids(2, 4)},
    ),
}

# Mixtures of experts that are tried on ragged rows alone.
MIXTURES: dict[str, Architecture] = {
    "qwen3_moe": decoder("Qwen3MoeForCausalLM", **EXPERTS, num_experts=4, head_dim=8),
    "olmoe": decoder("OlmoeForCausalLM", **EXPERTS, num_experts=4),
    "granitemoe": decoder("GraniteMoeForCausalLM", **EXPERTS, num_local_experts=4),
    "phimoe": decoder("PhimoeForCausalLM", **EXPERTS, num_local_experts=4),
    "glm4_moe": decoder("Glm4MoeForCausalLM", **EXPERTS, n_routed_experts=4, n_group=2, head_dim=8),
    "ernie4_5_moe": decoder("Ernie4_5_MoeForCausalLM", **EXPERTS, moe_num_experts=4, moe_k=2),
    "minimax_m2": decoder("MiniMaxM2ForCausalLM", **EXPERTS, num_local_experts=4, head_dim=8),
    "flex_olmo": decoder("FlexOlmoForCausalLM", **EXPERTS, num_experts=4),
    "dots1": decoder("Dots1ForCausalLM", **EXPERTS, n_routed_experts=4, n_shared_experts=1, head_dim=8),
}
