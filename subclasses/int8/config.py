"""``quantize_`` and its configurations, with the names and the semantics of torchao."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from subclasses.base import TensorSubclass
from subclasses.int8.tensor import Int8Tensor

log = logging.getLogger("subclasses")

# ---- granularity -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerRow:
    """One scale for each row, or for each output channel of a convolution."""

    def block_size(self, weight: Tensor) -> tuple[int, ...]:
        """Returns blocks that span the last dimension, or all but the first one for 4 and more dimensions."""
        whole = weight.dim() - 1 if weight.dim() < 4 else 1
        return (*(1 for _ in weight.shape[:whole]), *weight.shape[whole:])


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor."""

    def block_size(self, weight: Tensor) -> tuple[int, ...]:
        """Returns one block that spans all entries."""
        return tuple(weight.shape)


@dataclass(frozen=True)
class PerGroup:
    """One scale for each ``group_size`` neighbouring entries of a row."""

    group_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.group_size, int) or self.group_size < 1:
            raise ValueError(
                f"PerGroup.group_size: expected a number of entries, 1 or more, got {self.group_size!r}"
            )

    def block_size(self, weight: Tensor) -> tuple[int, ...]:
        """Returns blocks of ``group_size`` entries along the last dimension."""
        return (*(1 for _ in weight.shape[:-1]), self.group_size)


Granularity = PerRow | PerTensor | PerGroup

# ---- configurations ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Int8WeightOnlyConfig:
    """Int8 weights that are multiplied with unquantized inputs.

    Args:
        granularity: which entries share a scale.
        symmetric: whether weights have no zero point.
    """

    granularity: Granularity = field(default_factory=PerRow)
    symmetric: bool = True

    def __post_init__(self) -> None:
        _check_granularity(self, self.granularity, Granularity)

    def quantize(self, weight: Tensor) -> Int8Tensor:
        """Quantizes a weight by this configuration."""
        return Int8Tensor.from_float(
            weight, block_size=self.granularity.block_size(weight), symmetric=self.symmetric
        )


@dataclass(frozen=True)
class Int8DynamicActivationInt8WeightConfig:
    """Int8 weights; linear layers quantize each input dynamically and multiply integers.

    Args:
        granularity: :class:`PerRow` or :class:`PerTensor`, for inputs and weights alike or a pair in this order.
        act_mapping_type: whether inputs are quantized ``"symmetric"`` or ``"asymmetric"``, with a zero point.
        symmetric: whether weights have no zero point.
    """

    granularity: Granularity | tuple[Granularity, Granularity] = field(default_factory=PerRow)
    act_mapping_type: Literal["symmetric", "asymmetric"] = "symmetric"
    symmetric: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.granularity, list):  # torchao accepts a list; a configuration has to be hashable
            object.__setattr__(self, "granularity", tuple(self.granularity))
        for one in self._both():
            _check_granularity(self, one, PerRow | PerTensor)
        if self.act_mapping_type not in ("symmetric", "asymmetric"):
            raise ValueError(
                f"act_mapping_type: expected 'symmetric' or 'asymmetric', got {self.act_mapping_type!r}"
            )

    def _both(self) -> tuple[Any, Any]:
        given = self.granularity
        if not isinstance(given, tuple):
            return given, given
        if len(given) != 2:
            raise ValueError(f"granularity: expected one, or two for inputs and weights, got {len(given)}")
        return given[0], given[1]

    def quantize(self, weight: Tensor) -> Int8Tensor:
        """Quantizes a weight by this configuration."""
        inputs, weights = self._both()
        return Int8Tensor.from_float(
            weight,
            block_size=weights.block_size(weight),
            symmetric=self.symmetric,
            activation="row" if isinstance(inputs, PerRow) else "tensor",
            activation_symmetric=self.act_mapping_type == "symmetric",
        )


def _check_granularity(config: Any, got: Any, expected: Any) -> None:
    if not isinstance(got, expected):
        names = ", ".join(c.__name__ for c in expected.__args__)
        raise ValueError(f"{type(config).__name__}.granularity: expected one of {names}, got {got!r}")


Config = Int8WeightOnlyConfig | Int8DynamicActivationInt8WeightConfig


@dataclass(frozen=True)
class FqnToConfig:
    """A configuration for each layer, by its name in the model.

    Args:
        fqn_to_config: maps keys to a configuration, or to None to keep a layer unquantized. A key is the name of a
            layer or of one of its parameters. It may be a regular expression ``"re:..."`` that matches such a whole
            name, or ``"_default"`` for all other linear layers. A parameter's name precedes its layer's name. Names
            precede expressions, which apply in order and match floating point parameters. A key without a match in the
            model is not an error: one configuration may serve parts of a model.

    Raises:
        TypeError: a value is not a configuration.
        ValueError: an expression does not compile.
    """

    fqn_to_config: Mapping[str, Config | None]

    def __post_init__(self) -> None:
        for key, config in self.fqn_to_config.items():
            if config is not None and not isinstance(config, Config):
                raise TypeError(f"FqnToConfig: expected a configuration or None for {key!r}, got {config!r}")
            try:
                re.compile(key.removeprefix("re:") if key.startswith("re:") else "")
            except re.error as error:
                raise ValueError(
                    f"FqnToConfig: {key!r} is not a valid regular expression: {error}"
                ) from error

    def find(self, name: str, layer: nn.Module, *, by_default: bool | None = None) -> dict[str, Config]:
        """Returns the configurations of the parameters of a layer that are to be quantized.

        Args:
            name: the name of the layer.
            layer: the layer.
            by_default: whether ``"_default"`` applies to the layer; None means to every linear layer.
        """
        own = {f"{name}.{p}".removeprefix("."): p for p in (*layer._parameters, *layer._buffers)}
        floats = {
            p for p, t in layer._parameters.items() if t is not None and t.is_floating_point() and t.dim()
        }
        named = {p: self.fqn_to_config[key] for key, p in own.items() if key in self.fqn_to_config}
        if not any(named.values()) and name in self.fqn_to_config:
            named.setdefault("weight", self.fqn_to_config[name])
            return _drop_none(named)
        matched = {p: self._first_match(key) for key, p in own.items() if p in floats - named.keys()}
        named |= {p: match[0] for p, match in matched.items() if match}
        if not named:
            match = self._first_match(name)
            if match and isinstance(getattr(layer, "weight", None), Tensor):
                named["weight"] = match[0]
            elif not match and (is_linear(layer) if by_default is None else by_default):
                named["weight"] = self.fqn_to_config.get("_default")
        return _drop_none(named)

    def _first_match(self, name: str) -> list[Config | None]:
        """Returns the configuration of the first expression that matches a name, as a list of one or none."""
        expressions = (key for key in self.fqn_to_config if key.startswith("re:"))
        return [self.fqn_to_config[key] for key in expressions if re.fullmatch(key[3:], name)][:1]


def _drop_none(configs: dict[str, Config | None]) -> dict[str, Config]:
    return {name: config for name, config in configs.items() if config is not None}


# ---- a model -----------------------------------------------------------------------------------------------


def quantize_(
    module: nn.Module,
    config: Config | FqnToConfig,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> None:
    """Replaces weights of a model by :class:`Int8Tensor` parameters, which do not require grad.

    Weights that are declared subclasses already stay unchanged. A weight shared by two chosen layers stays shared, so
    choose both the embedding and the linear layer that a language model ties. All new weights are computed before the
    first one is replaced. A line in the log names the matrices that the default choice leaves in floats. For a compiled
    module, names are relative to its original module. A model of transformers is marked as quantized, so that its
    ``save_pretrained`` writes int8 weights.

    On the CPU, a weight-only layer saves memory, and it saves time for a few rows. From 16 rows on, a 4096 by 4096
    layer takes 1.0 to 1.2 of the float layer's time, for lack of a kernel. A dynamic layer took less at every measured
    batch. These figures are for a processor with VNNI. With AVX2 alone, up to 16 rows take 0.4 to 1.2 of the float
    layer's time in a weight-only layer. They take 1.0 to 3.5 of it in a dynamic layer.

    Args:
        module: the model, or a single layer.
        config: the configuration of all chosen layers, or a :class:`FqnToConfig` for each layer.
        filter_fn: takes each module and its name and returns whether its weight is quantized. None chooses linear
            layers, and ``Conv1D`` of transformers. It leaves out the output layer of ``nn.MultiheadAttention``, as
            torchao does, and the adapters that peft adds beside frozen layers.

    Raises:
        TypeError: ``config`` is not a configuration, or a chosen module has no floating point weight or computes it.
        ValueError: groups do not divide a weight, or ``filter_fn`` is passed with a :class:`FqnToConfig`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"quantize_: expected a module, got {type(module).__name__}")
    if not isinstance(config, Config | FqnToConfig):
        raise TypeError(
            f"quantize_: expected a configuration such as Int8WeightOnlyConfig(), got {type(config).__name__}"
        )
    if isinstance(config, FqnToConfig) and filter_fn is not None:
        raise ValueError("quantize_: an FqnToConfig chooses the layers; omit filter_fn")
    quantized: dict[tuple[int, Config, bool], nn.Parameter] = {}
    chosen: list[tuple[nn.Module, str, nn.Parameter]] = []
    adapters = adapters_in(module)
    for given, layer in module.named_modules():
        name = given.replace("_orig_mod.", "").removesuffix("_orig_mod")
        by_default = is_linear(layer) and layer not in adapters
        for parameter, one in _configs_of(name, layer, config, filter_fn, by_default).items():
            weight = getattr(layer, parameter, None)
            if isinstance(_data(weight), TensorSubclass):
                continue
            _check_weight(name, layer, parameter, weight)
            is_transposed = parameter == "weight" and is_conv1d(layer)
            key = (id(weight), one, is_transposed)
            if key not in quantized:
                quantized[key] = nn.Parameter(_quantize(weight, one, is_transposed), requires_grad=False)
            chosen.append((layer, parameter, quantized[key]))
    for layer, parameter, new in chosen:
        setattr(layer, parameter, new)
    if isinstance(config, Config) and filter_fn is None:
        _log_floats_in(module, adapters)
    _mark_pretrained(module)


def _log_floats_in(module: nn.Module, adapters: set[nn.Module]) -> None:
    """Logs the names of a model's float matrices, such as an embedding and the input weights of attention."""
    names = [
        f"{name}.{parameter}".removeprefix(".")
        for name, layer in module.named_modules()
        for parameter, t in (layer._parameters.items() if layer not in adapters else ())
        if t is not None
        and t.dim() == 2
        and t.is_floating_point()
        and not isinstance(_data(t), TensorSubclass)
    ]
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        log.warning(
            "quantize_ leaves parameters in floats that are weights of no linear layer, or of one that torchao leaves: "
            "%s%s. An FqnToConfig with their names quantizes them too",
            ", ".join(names[:4]),
            more,
        )


def _configs_of(
    name: str, layer: nn.Module, config: Any, filter_fn: Any, by_default: bool
) -> dict[str, Config]:
    if isinstance(config, FqnToConfig):
        return config.find(name, layer, by_default=by_default)
    return {"weight": config} if (filter_fn(layer, name) if filter_fn else by_default) else {}


def _quantize(weight: Any, config: Config, is_transposed: bool) -> Tensor:
    """Quantizes a weight; a weight of size ``[inputs, outputs]`` gets the blocks of its transpose."""
    weight = weight.detach()
    return config.quantize(weight.t()).t().contiguous() if is_transposed else config.quantize(weight)


def _mark_pretrained(module: nn.Module) -> None:
    if "transformers.modeling_utils" in sys.modules:
        from subclasses.int8 import hugging_face

        hugging_face.mark_quantized(module)


def _check_weight(name: str, layer: nn.Module, parameter: str, weight: Any) -> None:
    shown = f"{name or 'the module'} ({type(layer).__name__})"
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise TypeError(f"quantize_: {shown} has no {parameter} of floats")
    if parameter not in layer._parameters and parameter not in layer._buffers:
        raise TypeError(
            f"quantize_: {parameter} of {shown} is computed, for example by a parametrization, and not a parameter; "
            f"make it a parameter first: torch.nn.utils.parametrize.remove_parametrizations(layer, {parameter!r})"
        )


def _data(weight: Any) -> Any:
    return weight.data if isinstance(weight, nn.Parameter) else weight


def weight_bytes(module: nn.Module) -> int:
    """Returns the total size in bytes of a model's parameters and buffers, each counted once."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(_bytes(_data(t)) for t in tensors.values())


def _bytes(t: Tensor) -> int:
    if isinstance(t, TensorSubclass):
        return sum(_bytes(part) for part in (t.__dict__[name] for name in t._layout.present))
    return t.numel() * t.element_size()


# ---- which modules are linear layers -----------------------------------------------------------------------


def is_linear(layer: nn.Module) -> bool:
    """Whether a module is a linear layer, but not the output layer of ``nn.MultiheadAttention``."""
    if is_conv1d(layer):
        return True
    return isinstance(layer, nn.Linear) and not isinstance(layer, NonDynamicallyQuantizableLinear)


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a module is a ``Conv1D`` of transformers: a linear layer with a weight of size ``[inputs, outputs]``."""
    transformers: Any = sys.modules.get("transformers.pytorch_utils")
    return transformers is not None and isinstance(layer, transformers.Conv1D)


def adapters_in(module: nn.Module) -> set[nn.Module]:
    """Returns the modules that peft adds beside frozen layers: they are trained, so they stay floats.

    A layer of peft names its adapters in ``adapter_layer_names``.
    """
    return {
        part
        for layer in module.modules()
        for name in getattr(layer, "adapter_layer_names", ())
        if isinstance(adapter := getattr(layer, name, None), nn.Module)
        for part in adapter.modules()
    }
