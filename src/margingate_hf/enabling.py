"""`enable` and `disable`: a loaded model gets the `margin_gate` argument, in place, and gives it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from .generation import MarginGateGenerationMixin, enabled_class
from .verifier import forget_verifiers

_FILE_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def _unwrapped(model: Any) -> Any:
    """The transformers model inside PEFT, `torch.compile` and DDP wrappers."""
    if hasattr(model, "_orig_mod"):
        return _unwrapped(model._orig_mod)
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return _unwrapped(model.module)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return _unwrapped(model.get_base_model())
    return model


def enable(model: Any) -> Any:
    """
    Gives a model's `generate` the `margin_gate` argument, in place.

    Args:
        model (`PreTrainedModel`): a causal language model, possibly wrapped by PEFT, `torch.compile` or DDP. Its
            class is replaced by a subclass of the same name; weights, hooks and forward stay as they are.

    Returns:
        `model` itself.

    Raises:
        `TypeError`: not a transformers model that can generate.
    """
    inner = _unwrapped(model)
    if not isinstance(inner, GenerationMixin) or not isinstance(inner, torch.nn.Module):
        raise TypeError(f"`model` must be a transformers model that can generate, got {type(inner).__name__}.")
    if not isinstance(inner, MarginGateGenerationMixin):
        inner.__class__ = enabled_class(type(inner))
    return model


def disable(model: Any) -> Any:
    """
    Undoes [`enable`], in place, and frees the verifier's FP32 weights.

    Returns:
        `model` itself. A model that was not enabled is left alone.
    """
    inner = _unwrapped(model)
    stock = getattr(type(inner), "_margin_gate_stock_class", None)
    if stock is not None:
        inner.__class__ = stock
        forget_verifiers(inner)
    return model


class MarginGateModelForCausalLM:
    """Loads a causal language model as [`~transformers.AutoModelForCausalLM`] does, and enables it."""

    def __init__(self) -> None:
        raise EnvironmentError(
            "MarginGateModelForCausalLM is made with `MarginGateModelForCausalLM.from_pretrained(name_or_path)`."
        )

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Arguments of [`~transformers.AutoModelForCausalLM.from_pretrained`]; returns the enabled model."""
        model = enable(AutoModelForCausalLM.from_pretrained(*args, **kwargs))
        _keep_entry(model, str(args[0] if args else kwargs["pretrained_model_name_or_path"]), kwargs)
        return model

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Arguments of [`~transformers.AutoModelForCausalLM.from_config`]; returns the enabled model, in eval mode."""
        return enable(AutoModelForCausalLM.from_config(*args, **kwargs).eval())


def _keep_entry(model: Any, name_or_path: str, arguments: dict[str, Any]) -> None:
    """
    Takes `margin_gate` from a checkpoint's generation config: transformers drops unknown entries of a file that says it
    was derived from the model's config.
    """
    config = model.generation_config
    if getattr(config, "margin_gate", None) is not None:
        return
    passed = {name: arguments[name] for name in _FILE_ARGUMENTS if name in arguments}
    try:
        path = cached_file(name_or_path, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **passed)
    except OSError:  # no such file, or not reachable: there is nothing to keep
        return
    entry = json.loads(Path(path).read_text()).get("margin_gate") if path else None
    if entry is not None:
        config.margin_gate = entry
