"""A job of many prompts: stock `generate` in static batches, stock `generate_batch`, and exact continuous batching.

    OMP_NUM_THREADS=2 python -m evals batching --jobs mixed,gsm8k-5shot-stops --limit 64 --repeats 3

Runs are interleaved in one process and medians are given; peak memory is measured in a process of its own for each
system. Every exact run's tokens are compared with `generate(margin_gate=...)` on each prompt alone before a time is
written. What is finished is kept under `OUT/batching/raw` and taken up again by a later call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from margingate_hf import MarginGateConfig, MarginGateEngine
from margingate_hf.analysis.compare import eos_ids, first_difference, until_end
from margingate_hf.cli.loading import as_prompts
from margingate_hf.verifier.weights import WeightStore

from ..machine import as_text, peak_bytes
from ..models import load
from ..prompts import load_few_shot, load_prompts
from ..reports import keep, slug
from ..run import common

GATE = MarginGateConfig()
JOBS = ("mixed", "gsm8k-5shot", "gsm8k-5shot-stops", "math500", "chat")
PARTS = ("prefill_seconds", "decode_seconds", "verify_seconds")
# Slow, and about memory: only where they are asked for. K/V in 16 bits is another canonical output.
NO_COPY = "exact, engine, no FP32 copy"
LEAST = "exact, engine, no FP32 copy, K/V in 16 bits"
WITHOUT_COPY = (NO_COPY, LEAST)
MEASURED_MEMORY = (
    "stock, static, sorted",
    "exact, static, sorted",
    "exact, engine, no reuse",
    "exact, engine",
    *WITHOUT_COPY,
)
STOPS = ["Question:", "</s>", "<|im_end|>"]  # of lm-eval's gsm8k task
Tokens = list[list[int]]


def _questions(name: str, limit: int, tokenizer: Any, data_dir: str | None) -> list[str]:
    """Prompts of a job. `mixed`: a quarter chat, the rest half GSM8K 5-shot and half MATH500, in turns."""
    if name == "mixed":
        chat = _questions("chat", limit // 4, tokenizer, data_dir)
        kinds = [chat, *(_questions(kind, limit, tokenizer, data_dir) for kind in ("gsm8k-5shot", "math500"))]
        turns = [text for turn in itertools.zip_longest(*kinds) for text in turn if text is not None]
        return turns[:limit]
    if name.startswith("gsm8k-5shot"):
        return load_few_shot(limit, 5, data_dir)
    return as_prompts(tokenizer, load_prompts(name, limit, data_dir))


class Job:
    """
    Prompts and how far to decode each.

    Args:
        name (`str`): one of `JOBS`.
        model, tokenizer: an enabled BF16 model.
        options (`argparse.Namespace`): `limit`, `new_tokens`, `data_dir`.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, options: argparse.Namespace):
        texts = _questions(name, options.limit, tokenizer, options.data_dir)
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.prompts: Tokens = tokenizer(texts, add_special_tokens=False)["input_ids"]
        self.call: dict[str, Any] = {"max_new_tokens": options.new_tokens, "do_sample": False}
        if name.endswith("stops"):
            self.call |= {"stop_strings": STOPS, "tokenizer": tokenizer}
        self.rows = options.rows

    def static(self, model: Any, order: list[int], gate: MarginGateConfig | None = None) -> Tokens:
        """Left-padded batches of `rows` prompts in the given order."""
        found: Tokens = [[]] * len(self.prompts)
        pad, eos = self.tokenizer.pad_token_id, eos_ids(model)
        for start in range(0, len(order), self.rows):
            part = order[start : start + self.rows]
            width = max(len(self.prompts[i]) for i in part)
            ids = torch.tensor([[pad] * (width - len(self.prompts[i])) + self.prompts[i] for i in part])
            mask = torch.tensor([[0] * (width - len(self.prompts[i])) + [1] * len(self.prompts[i]) for i in part])
            extra = {"margin_gate": gate} if gate else {}
            out = model.generate(ids, attention_mask=mask, **self.call, **extra, return_dict_in_generate=True)
            for place, (index, row) in enumerate(zip(part, out.sequences[:, width:].tolist(), strict=True)):
                found[index] = row[: out.margin_gate.rows[place].new_tokens] if gate else until_end(row, eos)
        return found

    def by_length(self) -> list[int]:
        """Prompts of like length beside each other, the longest first."""
        return sorted(range(len(self.prompts)), key=lambda i: -len(self.prompts[i]))

    def engine(self, prefix_bytes: int | None, gate: MarginGateConfig = GATE) -> tuple[Tokens, dict[str, Any]]:
        """Exact continuous batching, an engine as `generate_batch` makes one: nothing from or for another call."""
        engine = MarginGateEngine(
            self.model, gate, max_batch_size=self.rows, prefix_bytes=prefix_bytes, reuse_later=False
        )
        out = engine.generate(self.prompts, **self.call)
        kept = engine.statistics
        counts = {"reused_tokens": kept.reused_tokens, "prefill_tokens": kept.prefill_tokens}
        counts |= {"verify_forwards": kept.verify_forwards, "draft_steps": kept.draft_steps, "flips": kept.flips}
        counts |= {name: round(getattr(kept, name), 2) for name in PARTS}
        return [out[f"req_{i}"].generated_tokens for i in range(len(self.prompts))], counts


def systems(job: Job, fp32: Any, names: list[str]) -> dict[str, Callable[[], tuple[Tokens, dict[str, Any]]]]:
    """What is compared, by name."""
    arrival = list(range(len(job.prompts)))
    everything: dict[str, Callable[[], tuple[Tokens, dict[str, Any]]]] = {
        "stock, static, arrival order": lambda: (job.static(job.model, arrival), {}),
        "stock, static, sorted": lambda: (job.static(job.model, job.by_length()), {}),
        "stock FP32, static, sorted": lambda: (job.static(fp32, job.by_length()), {}),
        "stock generate_batch": lambda: (_stock_batch(job), {}),
        "exact, static, sorted": lambda: (job.static(job.model, job.by_length(), GATE), {}),
        "exact, engine, no reuse": lambda: job.engine(0),
        "exact, engine": lambda: job.engine(None),
        NO_COPY: lambda: job.engine(None, GATE.update(resident_weights=False)),
        LEAST: lambda: job.engine(None, GATE.update(resident_weights=False, kv_dtype="auto")),
    }
    if "stop_strings" in job.call:  # its rows cannot stop at a string: other work
        del everything["stock generate_batch"]
    wanted = names or [name for name in everything if name not in WITHOUT_COPY]
    return {name: work for name, work in everything.items() if name in wanted}


def _stock_batch(job: Job) -> Tokens:
    call = {name: value for name, value in job.call.items() if name == "max_new_tokens"}
    out = job.model.generate_batch(job.prompts, **call)
    return [out[f"req_{i}"].generated_tokens for i in range(len(job.prompts))]


class Kept:
    """
    Finished runs of one job, on disk after each.

    Args:
        path (`Path`): of the file; read if it exists.
    """

    def __init__(self, path: Path):
        self.path = path
        found = json.loads(path.read_text()) if path.exists() else {}
        self.alone: Tokens = found.get("alone", [])
        self.seconds: dict[str, list[float]] = found.get("seconds", {})
        self.notes: dict[str, dict[str, Any]] = found.get("notes", {})

    def save(self) -> None:
        """Writes everything there is."""
        keep(self.path, {"alone": self.alone, "seconds": self.seconds, "notes": self.notes})


def bare(tokens: list[int], ends: set[int]) -> list[int]:
    """`tokens` without the ends and the padding behind them."""
    count = len(tokens)
    while count and tokens[count - 1] in ends:
        count -= 1
    return tokens[:count]


def decode_alone(job: Job, kept: Kept) -> None:
    """What every exact run must equal: `generate(margin_gate=...)` on each prompt alone."""
    for prompt in tqdm(job.prompts[len(kept.alone) :], desc=f"{job.name}: each alone"):
        ids = torch.tensor([prompt])
        out = job.model.generate(ids, attention_mask=torch.ones_like(ids), **job.call, margin_gate=GATE)
        kept.alone.append(out[0, len(prompt) :].tolist())
        kept.save()


def run_once(name: str, job: Job, work: Callable[[], tuple[Tokens, dict[str, Any]]], kept: Kept) -> None:
    """One timed run of a system, compared before its time is kept."""
    started = time.perf_counter()
    try:
        tokens, counts = work()
    except Exception as error:
        kept.notes[name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        return
    seconds = time.perf_counter() - started
    if name.startswith("stock"):
        # Rows of a batch that ended at a string are padded with a token that may end outputs too.
        ends = {job.tokenizer.pad_token_id, *eos_ids(job.model)}
        pairs = [(bare(a, ends), bare(b, ends)) for a, b in zip(kept.alone, tokens, strict=True)]
    else:
        pairs = list(zip(kept.alone, tokens, strict=True))
    differ = sum(first_difference(a, b) is not None for a, b in pairs)
    if name.startswith("exact") and differ:
        raise SystemExit(f"{job.name}, {name}: {differ} prompts differ from themselves alone; times mean nothing")
    kept.seconds.setdefault(name, []).append(seconds)
    kept.notes[name] = {"new_tokens": sum(map(len, tokens)), "differ_from_canonical": differ, **counts}
    kept.save()


def run_job(name: str, model: Any, fp32: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Interleaved runs of one job, `repeats` of each system in all, one of those in `once`."""
    job = Job(name, model, tokenizer, options)
    run = f"{options.limit}x{options.new_tokens}_r{options.rows}_t{torch.get_num_threads()}"
    file = f"{slug(options.model)}_{name}_{run}.json"
    kept = Kept(options.out / "batching" / "raw" / file)
    decode_alone(job, kept)
    compared = systems(job, fp32, options.systems)
    for turn in range(options.repeats):
        for system, work in tqdm(compared.items(), desc=name):
            if len(kept.seconds.get(system, [])) <= turn and (turn == 0 or system not in options.once):
                run_once(system, job, work, kept)
    lengths = [len(prompt) for prompt in job.prompts]
    return {
        "job": name,
        "prompts": len(lengths),
        "prompt_tokens": [min(lengths), statistics.median(lengths), max(lengths)],
        "seconds": {system: kept.seconds[system] for system in compared if system in kept.seconds},
        "notes": {system: kept.notes[system] for system in compared if system in kept.notes},
    }


def report(record: dict[str, Any]) -> str:
    """A table for each job, times over stock static batches in arrival order, the engine's parts below it."""
    lines = ["# Continuous batching", "", f"`{record['command']}`", ""]
    lines += [
        f"{as_text(record['machine'])}; SmolLM2-135M-Instruct in BF16, at most {record['rows']} rows at once, "
        f"{record['new_tokens']} new tokens."
    ]
    for job in record["jobs"]:
        low, middle, high = job["prompt_tokens"]
        about = f"{job['prompts']} prompts of {low} to {high} tokens, median {middle:g}."
        lines += ["", f"## {job['job']}", "", about, "", *_times(job), *_parts(job)]
    if record.get("memory"):
        lines += [
            "",
            "## Peak memory",
            "",
            *_memory(record["memory"], record["fp32_weights_mb"], record["packed_weights_mb"]),
        ]
    return "\n".join(lines) + "\n"


def _times(job: dict[str, Any]) -> list[str]:
    lines = ["| system | median seconds | over stock | runs | new tokens | differ from canonical |", "|---" * 6 + "|"]
    base = statistics.median(job["seconds"].get("stock, static, arrival order") or [float("nan")])
    for system, note in job["notes"].items():
        if "failed" in note:
            lines.append(f"| {system} | failed: {note['failed']} | | | | |")
            continue
        seconds = job["seconds"][system]
        middle = statistics.median(seconds)
        over = f"{middle / base:.2f}x" if base == base else ""
        cells = [system, f"{middle:.1f}", over, len(seconds), note["new_tokens"], note["differ_from_canonical"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _parts(job: dict[str, Any]) -> list[str]:
    """Of the engine's last run. Static against no reuse is what admission and retirement give; the rest is reuse."""
    notes = {system: note for system, note in job["notes"].items() if "verify_forwards" in note}
    if not notes:
        return []
    names = ("prefill_tokens", "reused_tokens", "verify_forwards", "draft_steps", "flips", *PARTS)
    lines = ["", "| engine | " + " | ".join(name.replace("_", " ") for name in names) + " |"]
    lines.append("|---" * (1 + len(names)) + "|")
    lines += [f"| {system} | " + " | ".join(str(note[name]) for name in names) + " |" for system, note in notes.items()]
    return lines


def _memory(memory: dict[str, list[float]], weights: float, packed: float = 0.0) -> list[str]:
    stock = statistics.median(memory["stock, static, sorted"])
    lines = [
        f"Peak resident set of a process that runs the system once, on the first job: the median of "
        f"{len(memory['stock, static, sorted'])} processes, and their range. The FP32 copy of the weights is "
        f"{weights:.0f} MB; the last column leaves it out where there is one."
        + (f" A packed BF16 copy of {packed:.0f} MB, for draft steps, goes with it and stays in." if packed else ""),
        "",
        "| system | MB | range | over stock | without the copy |",
        "|---|---|---|---|---|",
    ]
    for system, all_used in memory.items():
        used, copied = statistics.median(all_used), 0.0
        if system.startswith("exact") and system not in WITHOUT_COPY:
            copied = weights
        lines.append(
            f"| {system} | {used:.0f} | {min(all_used):.0f} to {max(all_used):.0f} | {used / stock:.2f}x | "
            f"{(used - copied) / stock:.2f}x |"
        )
    return lines


def peak_memory(options: argparse.Namespace) -> dict[str, list[float]]:
    """Each system a few times, in turns, in processes of their own; megabytes."""
    found: dict[str, list[float]] = {system: [] for system in MEASURED_MEMORY}
    for system in MEASURED_MEMORY * options.memory_repeats:
        command = [sys.executable, "-m", "evals", "batching", "--model", options.model, "--measure-memory", system]
        command += ["--jobs", options.jobs.split(",")[0], "--limit", str(options.memory_limit)]
        command += ["--new-tokens", str(options.new_tokens), "--rows", str(options.rows)]
        command += ["--data-dir", options.data_dir] if options.data_dir else []
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[system].append(float(out.split()[-1]))
    return found


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(";") if name.strip()]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of this experiment."""
    common(parser, repeats=3, limit=64, new_tokens=128)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--systems", type=_names, default=[], help="semicolon-separated; default: all")
    parser.add_argument("--once", type=_names, default=[], help="semicolon-separated: systems that run once")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--memory-limit", type=int, default=16, help="prompts of the memory runs; 0 leaves them out")
    parser.add_argument("--memory-repeats", type=int, default=3, help="0 leaves the memory runs out")
    parser.add_argument("--name", default="batching", help="of the result's files")
    parser.add_argument("--measure-memory", help=argparse.SUPPRESS)


def result(options: argparse.Namespace) -> str:
    """Name of the result's files."""
    return str(options.name)


def measure(options: argparse.Namespace) -> dict[str, Any] | None:
    """Interleaved runs of every job, and peak memory of every system."""
    model, tokenizer = load(options.model)
    if options.measure_memory:
        job = Job(options.jobs, model, tokenizer, options)
        systems(job, None, [options.measure_memory])[options.measure_memory]()
        print(peak_bytes() / 2**20)
        return None
    fp32 = load(options.model)[0].float()
    record: dict[str, Any] = {
        "rows": options.rows,
        "new_tokens": options.new_tokens,
        "jobs": [run_job(name, model, fp32, tokenizer, options) for name in options.jobs.split(",")],
    }
    if options.memory_limit and options.memory_repeats:
        record["memory"] = peak_memory(options)
        weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() >= 2)
        head = model.get_output_embeddings().weight
        record["fp32_weights_mb"] = 4 * weights / 2**20
        record["packed_weights_mb"] = 2 * weights / 2**20 if WeightStore.keeps_short(head) else 0.0
    return record
