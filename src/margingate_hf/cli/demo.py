"""The demo's table and its verdict."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..analysis.compare import Decoded, decode_all, divergence
from ..config import MarginGateConfig
from ..enabling import enable
from ..verifier import verifier_for
from .checkpoints import fetch, quiet_transformers
from .prompts import PROMPTS

HEADER = ("system", "batch", "differ from alone", "first at", "margin there", "tokens/s", "low margin", "flips", "time")


def load(model_name: str | Path | None, progress: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """
    An enabled model and its tokenizer.

    Args:
        model_name (`str` or `Path`, *optional*): a local folder or a hub id; `None` brings SmolLM2-135M-Instruct.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`): of the model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: str | Path = model_name if model_name is not None else fetch(progress=progress)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return enable(model), tokenizer


def as_prompts(tokenizer: Any, texts: Sequence[str]) -> list[str]:
    """The texts as a chat would send them, or bare where the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        return list(texts)
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in texts
    ]


def as_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each of [`as_prompts`]."""
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in as_prompts(tokenizer, texts)]


def run_demo(
    model_name: str | None = None,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16),
    new_tokens: int = 24,
    n_prompts: int = len(PROMPTS),
    gate: MarginGateConfig | None = None,
    progress: bool = True,
) -> tuple[str, bool]:
    """
    Decodes the project's prompts alone and in batches, plain and gated.

    Args:
        model_name (`str`, *optional*): see [`load`].
        batch_sizes (`Sequence[int]`): the first must be 1, what the others are compared with.

    Returns:
        `(report, invariant)`: the table as text, and whether every gated text equals its text alone.

    Raises:
        `ValueError`: `batch_sizes` does not begin with 1.
    """
    if not batch_sizes or batch_sizes[0] != 1:
        raise ValueError(f"`batch_sizes` must begin with 1, what the others are compared with, got {batch_sizes}.")
    gate = gate or MarginGateConfig()
    model, tokenizer = load(model_name, progress)
    texts = as_prompts(tokenizer, PROMPTS[:n_prompts])
    results: list[Decoded] = []
    total = 2 * len(batch_sizes) * len(texts)
    with quiet_transformers(), tqdm(total=total, desc="decoding", unit="prompt", disable=not progress) as bar:
        bar.set_postfix_str("verifier self-test")
        verifier = verifier_for(model, gate)
        for batch_size in batch_sizes:
            for config in (None, gate):
                bar.set_postfix_str(f"{'gated' if config else 'plain'}, batch {batch_size}")
                results.append(decode_all(model, tokenizer, texts, batch_size, new_tokens, config, bar.update))
        bar.set_postfix_str("done")
    lines = [
        f"{len(texts)} prompts, {new_tokens} new tokens, {model.dtype}, {torch.get_num_threads()} threads, "
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}",
        f"verifier: {verifier.name}",
        "",
        *_table(results),
        "",
    ]
    alone = {result.system: result for result in results if result.batch_size == 1}
    moved = sum(divergence(alone["gated"], result).prompts for result in results if result.system == "gated")
    lines.append(
        "With the gate every prompt gives the same tokens at every batch size."
        if moved == 0
        else f"FAILED: {moved} gated texts differ from the same prompt alone. Please report this."
    )
    return "\n".join(lines), moved == 0


def _table(results: list[Decoded]) -> list[str]:
    rows: list[Sequence[str]] = [HEADER]
    plain_seconds = {result.batch_size: result.seconds for result in results if result.system == "plain"}
    for result in sorted(results, key=lambda result: result.system, reverse=True):
        alone = next(other for other in results if other.system == result.system and other.batch_size == 1)
        rows.append(_row(result, alone, plain_seconds[result.batch_size]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    rows.insert(1, ["-" * (width - 1) + ":" for width in widths])  # Markdown, right-aligned
    return [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]


def _row(result: Decoded, alone: Decoded, plain_seconds: float) -> tuple[str, ...]:
    parted = divergence(alone, result)
    differ = "-" if result is alone else f"{parted.prompts} of {len(result.tokens)}"
    first = "-" if parted.first is None else f"token {parted.first}"
    margin = "-" if parted.margin is None else f"{parted.margin:.3f}"
    speed = f"{result.new_tokens / result.seconds:.1f}"
    drafts = sum(statistics.drafted_tokens for statistics in result.statistics)
    low = sum(statistics.low_margin_steps for statistics in result.statistics)
    flips = sum(statistics.flips for statistics in result.statistics)
    rates = (f"{low / drafts:.1%}", f"{flips / drafts:.1%}") if drafts else ("-", "-")
    return (
        result.system,
        str(result.batch_size),
        differ,
        first,
        margin,
        speed,
        *rates,
        f"{result.seconds / plain_seconds:.2f}x",
    )
