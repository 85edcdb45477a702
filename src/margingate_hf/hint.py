"""Makes `margin_gate` on a model that was not enabled an error that says how to enable it.

Transformers refuses an unknown argument, and ignores an unknown entry of a generation config, in two private methods of
`GenerationMixin`. Importing this package wraps both, once, for the sake of that one message; nothing else of
transformers is touched by the import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, GenerationMixin


def _refuse(model: Any) -> ValueError:
    return ValueError(
        f"`margin_gate` was passed to {type(model).__name__}, which has not been enabled. Call "
        "`margingate_hf.enable(model)` once, or load with `MarginGateModelForCausalLM.from_pretrained`; to decode "
        "without the gate, leave `margin_gate` out of the call and of the generation config."
    )


def install_hint() -> None:
    """Wraps `GenerationMixin`'s two checks; a second call does nothing."""
    check_arguments: Callable = GenerationMixin._validate_model_kwargs
    check_mode: Callable = GenerationMixin._validate_generation_mode
    if hasattr(check_arguments, "_margin_gate_hint"):
        return

    def _validate_model_kwargs(self: Any, model_kwargs: dict[str, Any]) -> None:
        if model_kwargs.get("margin_gate") not in (None, False):
            raise _refuse(self)
        check_arguments(self, model_kwargs)

    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        wanted = getattr(generation_config, "margin_gate", None) not in (None, False)
        if wanted and not getattr(type(self), "_margin_gate_enabled", False):
            raise _refuse(self)
        check_mode(self, generation_mode, generation_config, generation_mode_kwargs)

    _validate_model_kwargs._margin_gate_hint = True  # type: ignore[attr-defined]
    GenerationMixin._validate_model_kwargs = _validate_model_kwargs
    GenerationMixin._validate_generation_mode = _validate_generation_mode
