"""Names the machine and the versions a result was measured with."""

from __future__ import annotations

import os
import platform
import re
import resource
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from margingate_hf.verifier.precision import multiplies_bfloat16


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    return f"{named.get('model name', platform.machine())} family {named.get('cpu family')} model {named.get('model')}"


def describe() -> dict[str, Any]:
    """Processor, cores, threads, instruction set, versions and date."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16_products": multiplies_bfloat16(),
        "amx": torch.cpu._is_amx_tile_supported(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def peak_bytes() -> int:
    """
    Largest resident set of this process so far. Of its own memory alone: `getrusage` counts in a child what its parent
    held when it started it.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]


def as_text(machine: dict[str, Any]) -> str:
    """One line for a table's caption."""
    products = {True: " with BF16 products", False: " without BF16 products"}.get(machine.get("bf16_products"), "")
    products += {True: " and AMX", False: ", no AMX"}.get(machine.get("amx"), "")
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['instructions']}{products}, "
        f"torch {machine['torch']}, transformers {machine['transformers']}, {machine['date']}"
    )
