"""The function that is compared, the arguments of its calls, and the state that calls may change.

It may be a small model of a Hugging Face architecture: random weights, nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from desugar import _torch as private
from desugar.api import uncompiled
from desugar.compare.import_names import Call, TargetError, find_calls, find_target, inputs_beside, needed_by
from desugar.compare.outcome import leaves_of, tangent_of
from desugar.compare.records import Request
from desugar.user_code import is_library_file
from subclasses.errors import one_of

SEED = 0


@dataclass(frozen=True)
class Subject:
    """What is compared.

    Attributes:
        fn: The function or module.
        make_calls: Makes the arguments of all calls, equal ones each time, with new tensors.
        train: Whether a call is a training step.
        no_grad: Whether calls run without gradients.
        modules: Modules that each call is given as they are, by their names among the arguments.
    """

    fn: Any
    make_calls: Callable[[], list[Call]]
    train: bool = False
    no_grad: bool = False
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors besides arguments that a call may read or change, by their names in the user's code."""
        found = dict(_state_of(self.fn))
        for path, module in self.modules.items():
            found.update(_tensors_of(module, f"{path}."))
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}

    def run(self, fn: Any, call: Call) -> Any:
        """Calls a compiled form of the function; in training the backward follows. Returns the result."""
        with torch.no_grad() if self.no_grad else contextlib.nullcontext():
            result = fn(*call[0], **call[1])
        if self.train:
            backward(result)
        return result

    def clear_gradients(self, call: Call) -> None:
        """Forgets the gradients of earlier calls, as an optimizer does between steps."""
        for tensor in (*self.state().values(), *tensors_in(call)):
            if tensor.is_leaf:
                tensor.grad = None


def find_subject(request: Request) -> Subject:
    """Finds what a request names; a class of modules, or a function that makes one, makes the module.

    Raises:
        TargetError: It names nothing that can be compared.
    """
    seed()
    if request.target.startswith(PREFIX):
        model = build_model(request.target, train=request.train)
        make = _seeded(lambda: make_calls(model, train=request.train))
        return Subject(model, make, request.train, request.no_grad)
    module, found = find_target(request.target)
    name = request.target.rpartition(":")[2].rpartition(".")[2]
    made = make_module(found, has_inputs=bool(request.inputs or inputs_beside(module, name)))
    fn = _as_written(made, name)
    make = _seeded(lambda: find_calls(module, fn, request.inputs, name))
    return Subject(fn, make, request.train, request.no_grad)


def _as_written(found: Any, name: str) -> Any:
    """Returns the function or module that a compiled one was compiled from, which eager mode runs."""
    found = uncompiled(found)
    if not isinstance(found, nn.Module):
        return private.undisabled(found)
    found = getattr(found, "_orig_mod", found)
    if getattr(found, "_compiled_call_impl", None) is not None:
        raise TargetError(
            f"{name}.compile() was called in the file; leave that out, since eager mode is the judge"
        )
    return found


def make_module(found: Any, *, has_inputs: bool) -> Any:
    """Returns the module that a class or function makes; a function that takes arguments itself."""
    is_class = isinstance(found, type) and issubclass(found, nn.Module)
    takes_nothing = inspect.isfunction(found) and not inspect.signature(found).parameters
    if not is_class and not (takes_nothing and has_inputs):
        return found
    if needed := needed_by(found):
        raise TargetError(
            f"{found.__name__} is made with {', '.join(needed)}: name a function that takes nothing and returns "
            "the module, or a module that is there already"
        )
    made = found()
    if not isinstance(made, nn.Module):
        raise TargetError(
            f"{found.__name__} takes nothing and has inputs, so it should return an nn.Module; it returned a "
            f"{type(made).__name__}"
        )
    return made


def _seeded(make: Callable[[], list[Call]]) -> Callable[[], list[Call]]:
    def seeded() -> list[Call]:
        seed()
        return make()

    return seeded


def seed(number: int = SEED) -> None:
    """Seeds the generators of torch, Python and, where it is imported, numpy."""
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


# --------------------------------------------------------------------------------------------- running a call


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in nested containers."""
    return [leaf for _, leaf in leaves_of(value, "") if isinstance(leaf, Tensor)]


def backward(result: Any) -> None:
    """Backpropagates the sum of all float results: each gets a gradient of ones.

    Raises:
        TargetError: No result requires grad.
    """
    results = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    if not results:
        raise TargetError(
            "no result requires grad, so there is nothing to train: leave --train out, or make an argument or a "
            "parameter require grad"
        )
    torch.autograd.backward(results, [tangent_of(tensor) for tensor in results])


# ------------------------------------------------------------------------------------------------------ state


def _state_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a function closes over, names globally or is bound to, and the tensors of modules among it."""
    if isinstance(value, nn.Module):
        yield from _tensors_of(value, "self.")
        return
    if inspect.ismethod(value):
        yield from _state_of_owner(value.__self__)
        value = value.__func__
    if inspect.isfunction(value) and not is_library_file(value.__code__.co_filename):
        yield from _named(_variables_of(value), "")


def _state_of_owner(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yields the tensors of the object that a method is bound to: a module, or one that has modules and tensors."""
    if isinstance(owner, nn.Module):
        yield from _tensors_of(owner, "self.")
    else:
        yield from _named(getattr(owner, "__dict__", {}), "self.")


def _named(parts: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            yield from _tensors_of(part, f"{prefix}{name}.")
        elif isinstance(part, Tensor):
            yield f"{prefix}{name}", part


def _variables_of(fn: Any) -> dict[str, Any]:
    try:
        found = inspect.getclosurevars(fn)
    except ValueError:  # a variable that it closes over has no value yet
        return {}
    return {**found.nonlocals, **found.globals}


def _tensors_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield f"{prefix}{name}", tensor


# ---- models of Hugging Face --------------------------------------------------------------------------------

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
            "pip install 'torch-desugar[models]'"
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
