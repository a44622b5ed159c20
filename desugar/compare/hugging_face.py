"""A small model of a Hugging Face architecture: random weights, nothing is downloaded."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any

import torch
from torch import nn

from desugar.compare.import_names import Call, TargetError
from subclasses.errors import one_of

PREFIX = "hf:"
VOCABULARY, BATCH, LENGTH, IMAGE, SAMPLES = 256, 2, 16, 32, 4000

# Each configuration gets those sizes whose names it has.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 128,
    "d_ff": 128,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_heads": 4,
    "n_head": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "head_dim": 16,
    "d_kv": 16,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "image_size": IMAGE,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
# The auto classes to try, the first that knows the configuration; a model with a head has a loss.
_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
)


def check_available() -> None:
    """Raises a TargetError if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise TargetError(
            f"a target {PREFIX}MODEL_TYPE needs transformers, which is not installed: "
            "pip install 'desugar[models]'"
        )


def build_model(target: str, *, train: bool) -> nn.Module:
    """Returns a small model of an architecture, in training mode, or in eval mode with frozen parameters.

    Args:
        target: `hf:` and a model type, such as `hf:llama`.
        train: Whether it is going to be trained.

    Raises:
        TargetError: transformers is not installed, has no such model type, or builds no model of these sizes.
    """
    check_available()
    transformers = importlib.import_module("transformers")
    config = _config(transformers, target.removeprefix(PREFIX))
    for name in _CLASSES:
        cls = getattr(transformers, name)
        if type(config) in cls._model_mapping:
            break
    else:
        raise TargetError(f"transformers has no model for {target}; expected one of {', '.join(_CLASSES)}")
    try:
        model = cls.from_config(config)
    except (ValueError, TypeError, RuntimeError, ImportError, AttributeError) as error:
        raise TargetError(
            f"{target} cannot be built at a small size ({type(error).__name__}: {str(error).splitlines()[0]}): "
            "write a function that makes the model, and name it as MODULE:FUNCTION"
        ) from error
    return model.train(train).requires_grad_(train)


def _config(transformers: Any, model_type: str) -> Any:
    known = transformers.CONFIG_MAPPING
    if model_type not in known:
        near = [name for name in known if model_type.split("-")[0].lower() in name][:8]
        shown = ", ".join(near or ("bert", "gpt2", "llama", "t5", "vit"))
        raise TargetError(
            f"transformers has no model type {model_type!r}; expected a type, not a checkpoint: {shown}, ..."
        )
    config = known[model_type]()
    for name, value in SIZES.items():
        if hasattr(config, name):
            with contextlib.suppress(AttributeError, NotImplementedError):  # a property of another size
                setattr(config, name, value)
    config.use_cache = False
    if config.is_encoder_decoder:
        config.decoder_start_token_id = SIZES["decoder_start_token_id"]
    return config


def make_calls(model: Any, *, train: bool) -> list[Call]:
    """Returns the arguments of two calls, of different batch sizes; in training with labels, if it takes them."""
    return [((), _arguments(model, batch, train)) for batch in (BATCH, BATCH + 1)]


def _arguments(model: Any, batch: int, train: bool) -> dict[str, Any]:
    tokens = torch.randint(3, VOCABULARY, (batch, LENGTH))
    match model.main_input_name:
        case "pixel_values":
            channels = getattr(model.config, "num_channels", 3)
            return {"pixel_values": torch.randn(batch, channels, IMAGE, IMAGE)}
        case "input_values":
            return {"input_values": torch.randn(batch, SAMPLES)}
        case "input_ids":
            arguments: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        case other:
            raise TargetError(
                f"{one_of(type(model))} takes {other}, which has no default here: write functions that make "
                "the model and its inputs, and name them as MODULE:FUNCTION and --inputs"
            )
    if train and not type(model).__name__.endswith("Model"):
        arguments["labels"] = tokens
    elif model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = tokens
    return arguments
