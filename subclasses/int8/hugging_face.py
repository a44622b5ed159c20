"""``save_pretrained`` and ``from_pretrained`` of transformers for models with int8 weights.

Both call a *quantizer*, as transformers names it. The quantizer writes the tensors of :func:`to_plain`, and metadata
that describes the weights made of them. ``config.json`` names the quantizer. ``subclasses.int8`` imports this module
after transformers.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps  # type: ignore[reportMissingImports]
from transformers.modeling_utils import PreTrainedModel  # type: ignore[reportMissingImports]
from transformers.quantizers.auto import register_quantization_config, register_quantizer  # type: ignore[reportMissingImports]
from transformers.quantizers.base import HfQuantizer  # type: ignore[reportMissingImports]
from transformers.utils.quantization_config import QuantizationConfigMixin  # type: ignore[reportMissingImports]

from subclasses.files import (
    TIED_KEY,
    VALUES_KEY,
    from_plain,
    read_metadata,
    tied_names,
    to_plain,
)
from subclasses.int8.tensor import Int8Tensor

METHOD = "desugar_int8"


@register_quantization_config(METHOD)
class Int8QuantizationConfig(QuantizationConfigMixin):
    """The entry in ``config.json``; the metadata of the weights' files describe the weights."""

    quant_method: Any = METHOD

    def __init__(self, **_: Any) -> None:
        self.quant_method = METHOD


@register_quantizer(METHOD)
class Int8Quantizer(HfQuantizer):
    """Writes and reads int8 weights."""

    metadata: dict[str, str] | None = None

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` may write the model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters and other unquantized parameters may train."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` may compile the model."""
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns plain tensors for a file, under the model's own names, and the metadata that describes them."""
        model._weight_conversions = []  # those are for names and sizes of weights, not of their inner tensors
        tensors, metadata = to_plain(model.state_dict())
        if (
            not model.config.get_text_config().tie_word_embeddings
        ):  # then transformers ties nothing after loading
            tied = json.loads(metadata[TIED_KEY])
            tensors |= {name: tensors[first].clone() for name, first in tied.items()}
        return tensors, metadata

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Checks that there are int8 weights to load.

        Raises:
            ValueError: the checkpoint holds floats.
        """
        if not self.pre_quantized:
            raise ValueError(
                "from_pretrained quantizes no weights of floats: load the model without quantization_config, then call "
                "subclasses.int8.quantize_(model, Int8WeightOnlyConfig())"
            )

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.metadata = read_metadata(kwargs.get("checkpoint_files") or [])

    @property
    def serialized_names(self) -> dict[str, list[str]]:  # type: ignore[override]
        """Maps the last part of each int8 weight's name to the names of its inner tensors in a file."""
        names = json.loads((self.metadata or {}).get(VALUES_KEY, "{}"))
        last = {name.rpartition(".")[2] for name in names}
        return {name: [f"{name}.{part}" for part in Int8Tensor.__spec__.inner_names] for name in sorted(last)}

    def get_load_operations(self) -> dict[str, Any]:
        """Returns the operation that makes a weight of its inner tensors."""
        return {"deserialize": _FromPlain}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model._weight_conversions = []
        for name, first in tied_names(self.metadata or {}).items():
            _assign(model, name, model.get_parameter(first))
        return model


class _FromPlain(ConversionOps):
    """Makes a weight of its inner tensors while ``from_pretrained`` loads a model."""

    hf_quantizer: Any

    def __init__(self, hf_quantizer: Int8Quantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: Any) -> _FromPlain:  # transformers copies the operation for each weight
        return self

    def convert(
        self, input_dict: dict[str, Any], *args: Any, full_layer_name: str, model: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the weight under its name, in the dtype that the model has there."""
        parts = {
            f"{full_layer_name}.{key.rpartition('.')[2]}": tensors[0] for key, tensors in input_dict.items()
        }
        described = json.loads((self.hf_quantizer.metadata or {})[VALUES_KEY])
        metadata = {VALUES_KEY: json.dumps({full_layer_name: described[full_layer_name]})}
        weight = from_plain(parts, metadata)[full_layer_name]
        path, _, name = full_layer_name.rpartition(".")
        module = model.get_submodule(path)
        weight = weight.to(getattr(module, name).dtype)
        return {
            full_layer_name: weight if name in module._buffers else nn.Parameter(weight, requires_grad=False)
        }


def _assign(model: nn.Module, name: str, value: Any) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, value)


def mark_quantized(module: nn.Module) -> None:
    """Sets the quantizer of each model of transformers in a module that has int8 weights."""
    models: Any = module.modules()
    for model in models:
        if isinstance(model, PreTrainedModel) and _has_int8(model) and not hasattr(model, "hf_quantizer"):
            config = Int8QuantizationConfig()  # type: ignore[call-arg]
            model.hf_quantizer = Int8Quantizer(config)  # type: ignore[assignment]
            model.config.quantization_config = config
            _note_untied(model)


def _has_int8(model: nn.Module) -> bool:
    return any(isinstance(p.data, Int8Tensor) for p in model.parameters())


def _note_untied(model: Any) -> None:
    """Changes the configuration where the embedding and the output layer no longer share their weight."""
    for name, first in model.all_tied_weights_keys.items():
        if model.get_parameter(name) is not model.get_parameter(first):
            for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
                config.tie_word_embeddings = False
