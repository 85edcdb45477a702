"""The demo's table and its verdict."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
from tqdm.auto import tqdm

from ..analysis.compare import Decoded, decode_all, divergence
from ..config import MarginGateConfig
from ..verifier import verifier_for
from .checkpoints import quiet_transformers
from .loading import as_prompts, load
from .prompts import PROMPTS

HEADER = (
    "system",
    "batch size",
    "prompts that change",
    "first at",
    "margin there",
    "tokens/s",
    "low margin",
    "flips",
    "time over stock",
)


def run_demo(
    model_name: str | None = None,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16),
    new_tokens: int = 24,
    n_prompts: int = len(PROMPTS),
    gate: MarginGateConfig | None = None,
    progress: bool = True,
) -> tuple[str, bool]:
    """
    Decodes the project's prompts alone and in batches, by stock `generate` and with the margin gate.

    Args:
        model_name (`str`, *optional*): see [`load`].
        batch_sizes (`Sequence[int]`): the first must be 1, what the others are compared with.

    Returns:
        `(report, invariant)`: the table, and whether every exact output equals that of its prompt alone.

    Raises:
        `ValueError`: `batch_sizes` does not begin with 1.
    """
    if not batch_sizes or batch_sizes[0] != 1:
        raise ValueError(f"`batch_sizes` must begin with 1, what the others are compared with, got {batch_sizes}.")
    gate = gate or MarginGateConfig()
    model, tokenizer = load(model_name, progress)
    prompts = as_prompts(tokenizer, PROMPTS[:n_prompts])
    results: list[Decoded] = []
    total = 2 * len(batch_sizes) * len(prompts)
    with quiet_transformers(), tqdm(total=total, desc="decoding", unit="prompt", disable=not progress) as bar:
        bar.set_postfix_str("verifier self-test")
        verifier = verifier_for(model, gate)
        for batch_size in batch_sizes:
            for config in (None, gate):
                bar.set_postfix_str(f"{'exact' if config else 'stock'}, batch {batch_size}")
                results.append(decode_all(model, tokenizer, prompts, batch_size, new_tokens, config, bar.update))
        bar.set_postfix_str("done")
    lines = [
        f"{len(prompts)} prompts, {new_tokens} new tokens, {model.dtype}, {torch.get_num_threads()} threads, "
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}",
        f"verifier: {verifier.name}",
        "",
        *_table(results),
        "",
    ]
    alone = {result.system: result for result in results if result.batch_size == 1}
    diverged = sum(divergence(alone["exact"], result).prompts for result in results if result.system == "exact")
    lines.append(
        "With the gate every prompt gives the same tokens at every batch size."
        if diverged == 0
        else f"FAILED: {diverged} outputs differ from those of the same prompt alone. Please report this."
    )
    return "\n".join(lines), diverged == 0


def _table(results: list[Decoded]) -> list[str]:
    rows: list[Sequence[str]] = [HEADER]
    stock_seconds = {result.batch_size: result.seconds for result in results if result.system == "stock"}
    for result in sorted(results, key=lambda result: result.system, reverse=True):
        alone = next(other for other in results if other.system == result.system and other.batch_size == 1)
        rows.append(_row(result, alone, stock_seconds[result.batch_size]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    rows.insert(1, ["-" * (width - 1) + ":" for width in widths])  # Markdown, right-aligned
    return [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]


def _row(result: Decoded, alone: Decoded, stock_seconds: float) -> tuple[str, ...]:
    found = divergence(alone, result)
    differ = "-" if result is alone else f"{found.prompts} of {len(result.tokens)}"
    first = "-" if found.first is None else f"token {found.first}"
    margin = "-" if found.margin is None else f"{found.margin:.3f}"
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
        f"{result.seconds / stock_seconds:.2f}x",
    )
