"""`margingate-lm-eval` and `python -m margingate_hf.lm_eval`: lm-eval's own command line, the model type registered."""

from __future__ import annotations

from typing import Any

NAME = "margingate-hf"
TARGET = "margingate_hf.lm_eval.model:MarginGateLM"


def register() -> None:
    """
    Makes lm-eval know `--model margingate-hf`; does nothing twice.

    Raises:
        `SystemExit`: lm-eval is missing or older than 0.4.10.
    """
    try:
        import lm_eval.models  # noqa: F401  # fills lm-eval's own table first
        from lm_eval.api import registry
    except ImportError as error:
        raise SystemExit(
            f'lm-eval cannot be imported ({error}); install it with `pip install "margingate-hf[lm-eval]"`.'
        ) from None
    known = getattr(registry, "model_registry", None)
    if known is None:
        raise SystemExit("lm-eval 0.4.10 or newer is needed; this one has no model registry.")
    if NAME not in known:
        known.register(NAME, target=TARGET)


def main() -> Any:
    """The flags of `lm_eval`, unchanged."""
    register()
    from lm_eval.__main__ import cli_evaluate

    return cli_evaluate()


if __name__ == "__main__":
    main()
