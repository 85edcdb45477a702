"""Do lm-eval's responses change with the batch size? `hf` and `margingate-hf` on the same tasks, record by record.

    OMP_NUM_THREADS=2 python -m evals lm_eval --limit 64

Compares `resps` (outputs, log-probabilities to the last bit), not scores: scores agree by luck. Data come from
`--data-dir` or `MARGINGATE_DATA`; see `evals/tasks/`. Finished runs are kept under `OUT/lm_eval/raw` and not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager

import lm_eval
from margingate_hf.lm_eval import register

from ..machine import as_text
from ..models import source
from ..reports import keep, slug
from ..run import common, sizes

MODELS = ("hf", "margingate-hf")
PARTS = ("prefill_tokens", "reused_tokens", "new_tokens", "draft_steps", "verify_forwards", "flips")
SECONDS = ("prefill_seconds", "decode_seconds", "verify_seconds")
TASKS = ("gsm8k_local", "math500_local", "humaneval_local", "gsm8k_choice")
HERE = Path(__file__).parents[1]


def write_tasks(folder: Path, data: Path) -> None:
    """Fills the paths into the task files."""
    choices = folder / "choices.jsonl"
    with (data / "gsm8k_test.jsonl").open() as lines, choices.open("w") as out:
        for line in lines:
            document = json.loads(line)
            answer = int(re.sub(r"\D", "", document["answer"].split("####")[-1]) or 0)
            endings = [f" {answer}.", f" {answer + 1}.", f" {answer * 2 + 3}.", f" {max(0, answer - 5)} in all."]
            out.write(json.dumps({"question": document["question"], "choices": endings}) + "\n")
    paths = {"{LM_EVAL}": str(Path(lm_eval.__file__).parent), "{DATA}": str(data), "{CHOICES}": str(choices)}
    for file in (HERE / "tasks").glob("*.yaml"):
        text = file.read_text()
        for name, path in paths.items():
            text = text.replace(name, path)
        (folder / file.name).write_text(text)


def evaluate(model: str, batch_size: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run; responses by task, seconds, and what the gate did."""
    started = time.perf_counter()
    results = lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(source(options.model)), "dtype": "bfloat16"},
        tasks=options.tasks.split(","),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=batch_size,
        device="cpu",
        limit=options.limit,
        gen_kwargs=f"max_gen_toks={options.new_tokens}",
        log_samples=True,
        bootstrap_iters=0,
    )
    seconds = time.perf_counter() - started
    responses = {task: [sample["resps"] for sample in samples] for task, samples in results["samples"].items()}
    scores = {
        task: {k: v for k, v in entry.items() if isinstance(v, float)} for task, entry in results["results"].items()
    }
    gate = results["config"].get("margingate", {})
    return {"responses": responses, "seconds": seconds, "scores": scores, "margingate": gate}


def run_once(model: str, batch_size: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A kept run of these settings, or a new one."""
    job = f"{slug(options.model)}_{options.tasks.replace(',', '+')}_{options.limit}x{options.new_tokens}"
    path = options.out / "lm_eval" / "raw" / f"{model}_{job}_b{batch_size}.json"
    if not path.exists():
        keep(path, evaluate(model, batch_size, folder, options))
    found: dict[str, Any] = json.loads(path.read_text())  # read back, so that new and kept runs compare alike
    return found


def run_all(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, int]]:
    """Runs by model and batch size, with the records that differ from the first size; records a task."""
    found: dict[str, Any] = {}
    records: dict[str, int] = {}
    for model in options.models:
        runs: dict[str, Any] = {}
        first: dict[str, list] = {}
        for size in options.sizes:
            run = run_once(model, size, folder, options)
            responses = run.pop("responses")
            first = first or responses
            records = {task: len(found) for task, found in responses.items()}
            run["differ"] = {
                task: sum(a != b for a, b in zip(first[task], responses[task], strict=True)) for task in responses
            }
            runs[str(size)] = run
        found[model] = runs
    return found, records


def report(record: dict[str, Any]) -> str:
    """Records that differ from batch 1, for each task and model."""
    sizes = record["batch_sizes"]
    lines = ["# lm-eval at several batch sizes", "", f"`{record['command']}`", "", f"{as_text(record['machine'])}.", ""]
    lines += [f"{record['limit']} documents a task, at most {record['new_tokens']} new tokens, 5-shot GSM8K.", ""]
    if len(sizes) > 1:
        lines += [*_differences(record), ""]
    lines += ["Seconds of the whole run, loading and the self-test included:", ""]
    lines += ["| model | " + " | ".join(f"batch {size}" for size in sizes) + " |", "|---" * (1 + len(sizes)) + "|"]
    for model, runs in record["runs"].items():
        lines.append(f"| {model} | " + " | ".join(f"{runs[str(size)]['seconds']:.0f}" for size in sizes) + " |")
    ours = record["runs"].get("margingate-hf", {})
    if "hf" in record["runs"] and ours:
        ratios = [ours[str(size)]["seconds"] / record["runs"]["hf"][str(size)]["seconds"] for size in sizes]
        lines.append("| margingate-hf over hf | " + " | ".join(f"{ratio:.2f}x" for ratio in ratios) + " |")
    if ours:
        lines += ["", *_parts(ours)]
    return "\n".join(lines) + "\n"


def _differences(record: dict[str, Any]) -> list[str]:
    sizes = record["batch_sizes"]
    lines = ["| task | model | " + " | ".join(f"differ at {size} from {sizes[0]}" for size in sizes[1:]) + " |"]
    lines += ["|---" * (1 + len(sizes)) + "|"]
    for task in record["tasks"]:
        for model, runs in record["runs"].items():
            cells = [f"{runs[str(size)]['differ'][task]} of {record['records'][task]}" for size in sizes[1:]]
            lines.append(f"| {task} | {model} | " + " | ".join(cells) + " |")
    return lines


def _parts(runs: dict[str, Any]) -> list[str]:
    """What the gate did, reuse and the parts of the time apart; `runs` by batch size."""
    names = [name.replace("_", " ") for name in (*PARTS, *SECONDS)]
    lines = ["What margingate-hf did:", "", "| batch | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for size, run in runs.items():
        gate = run["margingate"]
        cells = [str(gate[name]) for name in PARTS] + [f"{gate[name]:.0f}" for name in SECONDS]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return lines


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of this experiment."""
    common(parser, limit=64, new_tokens=256)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--name", default="lm_eval", help="of the result's files")
    parser.add_argument("--batch-sizes", dest="sizes", type=sizes, default=[1, 4, 16], metavar="1,4,...")


def result(options: argparse.Namespace) -> str:
    """Name of the result's files."""
    return str(options.name)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Responses of both models at every batch size; `failed` if those of margingate-hf change."""
    data = options.data_dir or os.environ.get("MARGINGATE_DATA")
    if not data:
        raise SystemExit("`--data-dir` (or $MARGINGATE_DATA) must name the folder with the JSONL files.")
    register()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, Path(data).resolve())
        runs, records = run_all(folder, options)
    return {
        "limit": options.limit,
        "new_tokens": options.new_tokens,
        "batch_sizes": options.sizes,
        "tasks": options.tasks.split(","),
        "runs": runs,
        "records": records,
        "failed": any(any(run["differ"].values()) for run in runs.get("margingate-hf", {}).values()),
    }
