"""``quantize_`` and its configurations, with the names and the meaning that they have in torchao."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from subclasses.base import TensorSubclass
from subclasses.int8.tensor import Int8Tensor

# ---- which entries share a scale ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PerRow:
    """One scale for each row; for a convolution, each output channel."""

    def block_size(self, weight: Tensor) -> tuple[int, ...]:
        """Rows along the last dimension of up to three, else all but the first."""
        whole = weight.dim() - 1 if weight.dim() < 4 else 1
        return (*(1 for _ in weight.shape[:whole]), *weight.shape[whole:])


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole."""

    def block_size(self, weight: Tensor) -> tuple[int, ...]:
        """All of it."""
        return tuple(weight.shape)


@dataclass(frozen=True)
class PerGroup:
    """One scale for each ``group_size`` neighbours of a row."""

    group_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.group_size, int) or self.group_size < 1:
            raise ValueError(
                f"PerGroup.group_size: expected a number of entries, 1 or more, got {self.group_size!r}"
            )

    def block_size(self, weight: Tensor) -> tuple[int, ...]:
        """Neighbours along the last dimension."""
        return (*(1 for _ in weight.shape[:-1]), self.group_size)


Granularity = PerRow | PerTensor | PerGroup

# ---- configurations ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Int8WeightOnlyConfig:
    """Weights as int8, multiplied with inputs as they are.

    Args:
        granularity: which entries share a scale.
        symmetric: whether weights have no zero point.
    """

    granularity: Granularity = field(default_factory=PerRow)
    symmetric: bool = True

    def __post_init__(self) -> None:
        _check_granularity(self, self.granularity, Granularity)

    def quantize(self, weight: Tensor) -> Int8Tensor:
        """The weight as this configuration has it."""
        return Int8Tensor.from_float(
            weight, block_size=self.granularity.block_size(weight), symmetric=self.symmetric
        )


@dataclass(frozen=True)
class Int8DynamicActivationInt8WeightConfig:
    """Weights as int8; linear layers quantize their inputs as they come and multiply integers.

    Args:
        granularity: for inputs and weights alike, or one for each in this order; of rows or of the whole.
        act_mapping_type: whether inputs are ``"symmetric"`` or ``"asymmetric"``, that is, have a zero point.
        symmetric: whether weights have no zero point.
    """

    granularity: Granularity | tuple[Granularity, Granularity] = field(default_factory=PerRow)
    act_mapping_type: Literal["symmetric", "asymmetric"] = "symmetric"
    symmetric: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.granularity, list):  # as torchao takes it; a configuration is hashed
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
        """The weight as this configuration has it."""
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
        fqn_to_config: to a configuration, or None, which leaves a layer as it is, from the name of a layer or of one of
            its parameters, from ``"re:..."`` that matches the whole of one, or from ``"_default"`` for all other linear
            layers. The name of a parameter goes before that of its layer, names go before expressions, and these count
            in order; they match parameters of floats. A key that names nothing in the model is no error: one
            configuration may serve parts of a model.

    Raises:
        TypeError: a value is no configuration.
        ValueError: an expression cannot be compiled.
    """

    fqn_to_config: Mapping[str, Config | None]

    def __post_init__(self) -> None:
        for key, config in self.fqn_to_config.items():
            if config is not None and not isinstance(config, Config):
                raise TypeError(f"FqnToConfig: expected a configuration or None for {key!r}, got {config!r}")
            try:
                re.compile(key.removeprefix("re:") if key.startswith("re:") else "")
            except re.error as error:
                raise ValueError(f"FqnToConfig: {key!r} is no regular expression: {error}") from error

    def find(self, name: str, layer: nn.Module) -> dict[str, Config]:
        """The parameters of a layer to quantize, and how."""
        own = {f"{name}.{p}".removeprefix("."): p for p in (*layer._parameters, *layer._buffers)}
        floats = {
            p for p, t in layer._parameters.items() if t is not None and t.is_floating_point() and t.dim()
        }
        named = {p: self.fqn_to_config[key] for key, p in own.items() if key in self.fqn_to_config}
        if not any(named.values()) and name in self.fqn_to_config:
            named.setdefault("weight", self.fqn_to_config[name])
            return _given(named)
        matched = {p: self._first_match(key) for key, p in own.items() if p in floats - named.keys()}
        named |= {p: found[0] for p, found in matched.items() if found}
        if not named:
            found = self._first_match(name)
            if found and isinstance(getattr(layer, "weight", None), Tensor):
                named["weight"] = found[0]
            elif not found and _is_linear(layer):
                named["weight"] = self.fqn_to_config.get("_default")
        return _given(named)

    def _first_match(self, name: str) -> list[Config | None]:
        """What the first expression that matches a name leads to, or nothing."""
        expressions = (key for key in self.fqn_to_config if key.startswith("re:"))
        return [self.fqn_to_config[key] for key in expressions if re.fullmatch(key[3:], name)][:1]


def _given(configs: dict[str, Config | None]) -> dict[str, Config]:
    return {name: config for name, config in configs.items() if config is not None}


# ---- a model -----------------------------------------------------------------------------------------------


def quantize_(
    module: nn.Module,
    config: Config | FqnToConfig,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> None:
    """Replaces weights of a model by :class:`Int8Tensor` ones, which do not require grad.

    Weights that are tensor subclasses already stay as they are; one that two chosen layers share stays shared, so
    choose both the embedding and the linear layer that a language model ties. All new weights are made before the
    first one is replaced. A compiled module is taken as the module that it runs.

    Args:
        module: the model; a layer itself will do.
        config: how; a :class:`FqnToConfig` says it layer by layer.
        filter_fn: called with each module and its name, says whether its weight is quantized; None: linear layers,
            but for the output of ``nn.MultiheadAttention``, as in torchao.

    Raises:
        TypeError: ``config`` is no configuration, or a chosen module has no weight of floats, or computes it.
        ValueError: groups do not divide a weight, or ``filter_fn`` is given besides a :class:`FqnToConfig`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"quantize_: expected a module, got {type(module).__name__}")
    if not isinstance(config, Config | FqnToConfig):
        raise TypeError(
            f"quantize_: expected a configuration such as Int8WeightOnlyConfig(), got {type(config).__name__}"
        )
    if isinstance(config, FqnToConfig) and filter_fn is not None:
        raise ValueError("quantize_: an FqnToConfig chooses the layers; leave filter_fn out")
    made: dict[tuple[int, Config], nn.Parameter] = {}
    chosen: list[tuple[nn.Module, str, nn.Parameter]] = []
    for given, layer in module.named_modules():
        name = given.replace("_orig_mod.", "").removesuffix("_orig_mod")
        for parameter, one in _configs_of(name, layer, config, filter_fn).items():
            weight = getattr(layer, parameter, None)
            if isinstance(_data(weight), TensorSubclass):
                continue
            _check_weight(name, layer, parameter, weight)
            key = (id(weight), one)
            if key not in made:
                made[key] = nn.Parameter(one.quantize(weight.detach()), requires_grad=False)  # type: ignore[union-attr]
            chosen.append((layer, parameter, made[key]))
    for layer, parameter, new in chosen:
        setattr(layer, parameter, new)


def _configs_of(name: str, layer: nn.Module, config: Any, filter_fn: Any) -> dict[str, Config]:
    if isinstance(config, FqnToConfig):
        return config.find(name, layer)
    return {"weight": config} if (filter_fn(layer, name) if filter_fn else _is_linear(layer)) else {}


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and not isinstance(layer, NonDynamicallyQuantizableLinear)


def _check_weight(name: str, layer: nn.Module, parameter: str, weight: Any) -> None:
    shown = f"{name or 'the module'} ({type(layer).__name__})"
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise TypeError(f"quantize_: {shown} has no {parameter} of floats")
    if parameter not in layer._parameters and parameter not in layer._buffers:
        raise TypeError(
            f"quantize_: {parameter} of {shown} is no parameter but computed, by a parametrization for one; make it a "
            f"parameter first: torch.nn.utils.parametrize.remove_parametrizations(layer, {parameter!r})"
        )


def _data(weight: Any) -> Any:
    return weight.data if isinstance(weight, nn.Parameter) else weight


def weight_bytes(module: nn.Module) -> int:
    """How many bytes the parameters and buffers of a model take, each counted once."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(_bytes(_data(t)) for t in tensors.values())


def _bytes(t: Tensor) -> int:
    if isinstance(t, TensorSubclass):
        return sum(_bytes(part) for part in (t.__dict__[name] for name in t._layout.present))
    return t.numel() * t.element_size()
