"""What each verb of the command line does: options in, a report and the exit status out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..config import MarginGateConfig


def demo(options: argparse.Namespace) -> tuple[str, int]:
    """Decodes the project's prompts alone and in batches; 1 if an exact output changes with the batch."""
    from .demo import run_demo
    from .prompts import PROMPTS

    if not 1 <= options.prompts <= len(PROMPTS):
        raise ValueError(f"--prompts must be between 1 and {len(PROMPTS)}, got {options.prompts}.")
    report, invariant = run_demo(
        options.model,
        options.batch_sizes,
        options.max_new_tokens,
        options.prompts,
        MarginGateConfig(num_draft_tokens=options.num_draft_tokens, threshold=options.threshold),
        progress=not options.no_progress,
    )
    return report, 0 if invariant else 1


def calibrate(options: argparse.Namespace) -> tuple[str, int]:
    """Writes a calibration record; 1 if the sample was too small for the bound asked for."""
    from ..analysis.calibrate import calibrate as run
    from ..decoding.calibration_record import FILE
    from .loading import as_ids

    model, tokenizer = _load(options)
    found = run(
        model,
        as_ids(tokenizer, _prompts(options)),
        options.batch_sizes,
        options.miss_rate,
        options.confidence,
        options.max_new_tokens,
        progress_bar=not options.no_progress,
    )
    found.save_pretrained(options.out)
    lines = [
        f"{found.flips} flips in {found.steps} steps of {found.prompts} prompts",
        *(
            f"  batch {row.batch_size}: {row.flips} flips in {row.steps} steps, {row.near_ties} near ties, "
            f"{row.confident} confident, largest margin of one {row.largest_flip}"
            for row in found.batch_sizes
        ),
        f"threshold {found.threshold:.4g} logits ({found.threshold_steps:.3g} BF16 steps) flags "
        f"{found.trigger_rate:.1%} of steps; missed flips a step at most {found.miss_bound:.1e} "
        f"at {found.confidence:.0%} confidence",
        f"prompts with a miss: at most {found.prompts_missed_bound:.1%}",
        f"written to {Path(options.out) / FILE}",
    ]
    if not found.sufficient:
        lines.append(
            f"the sample is too small for a miss rate of {found.miss_rate:g}: even without any miss {found.steps} "
            f"steps bound it by {found.miss_bound:.1e}; the threshold is beyond every flip that was seen"
        )
    return "\n".join(lines), 0 if found.sufficient else 1


def audit(options: argparse.Namespace) -> tuple[str, int]:
    """Audits a model as it is; 1 if an exact output changes, or with `--fail-on-divergence` a stock one."""
    from ..analysis.audit import audit as run
    from ..analysis.html_page import as_html
    from .loading import as_prompts

    model, tokenizer = _load(options)
    if options.padding_side:
        tokenizer.padding_side = options.padding_side
    report = run(
        model,
        tokenizer,
        as_prompts(tokenizer, _prompts(options)),
        options.batch_sizes,
        options.max_new_tokens,
        collate=lambda prompts: dict(tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)),
        gate=not options.no_gate,
        progress_bar=not options.no_progress,
    )
    if options.html:
        Path(options.html).write_text(as_html(report), encoding="utf-8")
    if options.json:
        Path(options.json).write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    failed = bool(report.exact_diverged) or (options.fail_on_divergence and report.diverged > 0)
    return report.summary(), int(failed)


def replay(options: argparse.Namespace) -> tuple[str, int]:
    """Replays transcripts; 1 if one is not canonical or something in its receipt has changed."""
    from ..analysis.replay import read_transcripts, replay_all

    model, tokenizer = _load(options)
    transcripts = read_transcripts(options.transcripts, tokenizer)
    results = list(replay_all(model, transcripts))
    if options.json:
        Path(options.json).write_text("".join(json.dumps(result.to_dict()) + "\n" for result in results))
    lines = []
    for number, result in enumerate(results):
        if result.canonical:
            continue
        parts = [f"changed: {', '.join(result.changed)}"] if result.changed else []
        if result.index is not None:
            found, expected = (
                "the end" if token is None else repr(tokenizer.decode([token]))
                for token in (result.found, result.expected)
            )
            margin = "" if result.margin is None else f" (margin {result.margin:.3f})"
            parts.append(f"token {result.index} is {found}, canonical is {expected}{margin}")
        lines.append(f"  transcript {number}: {'; '.join(parts)}")
    good = sum(result.canonical for result in results)
    lines.insert(0, f"{good} of {len(results)} transcripts are canonical")
    lines += [f"  note: {note}" for note in sorted({note for result in results for note in result.notes})]
    return "\n".join(lines), 0 if good == len(results) else 1


def _load(options: argparse.Namespace) -> tuple[Any, Any]:
    from .loading import load

    return load(options.model, progress=not options.no_progress)


def _prompts(options: argparse.Namespace) -> list[str]:
    from .prompt_sets import load_prompts

    return load_prompts(options.prompts, options.limit, options.data_dir)
