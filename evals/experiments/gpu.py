"""Everything that only a GPU can show, in one command of under eight minutes and no network; tables in a directory.

    python -m evals gpu --out evals/results/gpu
    python -m evals gpu --out evals/results/gpu --checkpoint PATH    # SmolLM2-135M-Instruct as well

Parts that are already in the directory's record are not run again. Run from the repository's root; the package need not
be installed. Dry run without a GPU:

    TRITON_INTERPRET=1 MARGINGATE_BACKEND=triton python -m evals gpu --tiny --out DIR
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEEDED = {"torch": ((2, 11), (2, 14)), "triton": ((3, 6), (3, 10)), "transformers": ((5, 24), (6, 0))}


def check_installed() -> list[str]:
    """What is missing, or of a release this script was not written for, in words."""
    problems = []
    for name, (lowest, beyond) in NEEDED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{name} is missing")
            continue
        parts = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("+")[0].split(".")[:2])
        if not lowest <= parts < beyond:
            span = f"{'.'.join(map(str, lowest))} or later, before {'.'.join(map(str, beyond))}"
            problems.append(f"{name} {version} is here, {span} is needed")
    problems += [f"{name} is missing" for name in ("accelerate", "safetensors", "psutil") if not _found(name)]
    return problems


def _found(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def parts(options: argparse.Namespace) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """The parts in the order they run: bits first, since speed means nothing without them."""
    import torch

    from ..gpu import decode, kernels

    device = torch.device("cuda", 0) if torch.cuda.is_available() and not options.tiny else torch.device("cpu")
    shapes = kernels.TINY if options.tiny else kernels.FULL
    small, large = ("tiny", None) if options.tiny else ("llama-1b", "llama-8b")
    counts = ((2, 3),) if options.tiny else ((1, 1), (1, 8), (8, 1), (8, 4), (8, 8))
    context, prompt, new_tokens, rows = (8, 6, 3, 2) if options.tiny else (1024, 128, 64, 8)

    def steps(model: Any) -> list[dict[str, Any]]:
        return decode.verify_against_draft(model, device, context, counts)

    def systems(model: Any) -> list[dict[str, Any]]:
        return decode.exact_against_stock(model, device, prompt, new_tokens, rows)

    found: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "linear bits": lambda: kernels.linear_bits(shapes, device),
        "attention bits": lambda: kernels.attention_bits(shapes, device),
        "other kernels' bits": lambda: kernels.other_bits(shapes, device),
        "linear errors": lambda: kernels.linear_errors(shapes, device),
        "ceilings": lambda: kernels.ceilings(shapes, device),
        f"exact, {small}": lambda: decode.on_random(small, device, systems),
        "linear times": lambda: kernels.linear_times(shapes, device),
        "other kernels' times": lambda: kernels.other_times(shapes, device),
        f"verify and draft, {small}": lambda: decode.on_random(small, device, steps),
    }
    if options.checkpoint:
        found["SmolLM2"] = lambda: decode.real_checkpoint(options.checkpoint, device, 96)
    if large:
        found[f"verify and draft, {large}"] = lambda: decode.on_random(large, device, steps)
        found[f"exact, {large}"] = lambda: decode.on_random(large, device, systems)
    return found


def machine() -> dict[str, Any]:
    """The device and the versions."""
    import torch

    if not torch.cuda.is_available():
        name = "no GPU: Triton's interpreter (a dry run, its times mean nothing)"
    else:
        device = torch.cuda.get_device_properties(0)
        name = f"{device.name}, {device.multi_processor_count} SMs, sm_{device.major}{device.minor}"
    return {"device": name, **{package: importlib.metadata.version(package) for package in NEEDED}}


def report(record: dict[str, Any]) -> str:
    """Every part as a table."""
    lines = [
        "# GPU",
        "",
        f"`{record['command']}`, {', '.join(f'{k} {v}' for k, v in record['machine'].items())}",
    ]
    for name, part in record["parts"].items():
        lines += ["", f"## {name}", "", f"{part['seconds']:.0f} s"]
        if "error" in part:
            lines += ["", f"failed: {part['error']}"]
            continue
        columns = list(dict.fromkeys(column for row in part["rows"] for column in row))
        lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in part["rows"]]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.3g}"
    return str(value)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of this experiment."""
    parser.add_argument("--out", type=Path, required=True, help="directory of gpu.json and gpu.md")
    parser.add_argument("--checkpoint", help="folder of a small real model, SmolLM2-135M-Instruct")
    parser.add_argument("--budget", type=float, default=420, help="seconds after which no further part is begun")
    parser.add_argument("--tiny", action="store_true", help="dry run on tiny shapes in Triton's interpreter")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs what is missing from the record, writing it after every part."""
    check(options)
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu.json"
    record = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    if record.get("machine", machine()) != machine():
        raise SystemExit(f"{path} was recorded on another machine ({record['machine']}); give another --out.")
    record |= {"machine": machine(), "command": "python -m evals gpu"}
    for name, part in parts(options).items():
        if "rows" in record["parts"].get(name, {}):
            continue
        if time.monotonic() - started > options.budget:
            print(f"{name}: left for the next run, {options.budget} s are over")
            continue
        began = time.monotonic()
        try:
            entry: dict[str, Any] = {"rows": part()}
        except Exception as error:  # the other parts are still worth having
            entry = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        record["parts"][name] = {**entry, "seconds": time.monotonic() - began}
        print(f"{name}: {'failed: ' + entry['error'] if 'error' in entry else 'done'}", flush=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        (options.out / "gpu.md").write_text(report(record))
    return {**record, "failed": any("error" in part for part in record["parts"].values())}


def check(options: argparse.Namespace) -> None:
    """
    Raises:
        `SystemExit`: names everything that is missing.
    """
    problems = check_installed()
    import torch

    if not options.tiny and not torch.cuda.is_available():
        problems.append("no CUDA device is there (a dry run: --tiny, see --help)")
    if problems:
        raise SystemExit("evals gpu cannot run: " + "; ".join(problems))
