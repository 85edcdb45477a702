"""Renders the committed resource table for docs/kernels.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path

RESOURCES = Path(__file__).parents[2] / "kernels" / "resources.json"
# What an SM holds: registers, shared memory in bytes, warps (NVIDIA's tuning guides for A100 and H100).
LIMITS = {80: (65536, 164 << 10, 64), 90: (65536, 228 << 10, 64)}


def programs_per_sm(entry: dict, warps: int, arch: int) -> int:
    """How many programs an SM holds: registers are given out by 8 a thread, and each program reserves 1 KB besides."""
    registers, shared, most = LIMITS[arch]
    by_registers = registers // (-(-entry["registers"] // 8) * 8 * 32 * warps)
    return min(by_registers, shared // (entry["shared_bytes"] + 1024), most // warps, 32)


def as_markdown() -> str:
    """One row a kernel: registers a thread, shared memory a program, programs an SM, instruction."""
    record = json.loads(RESOURCES.read_text())
    kernels = record["kernels"]
    lines = [
        "| kernel | sm_80: registers, KB, programs | instruction | sm_90: registers, KB, programs | instruction |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(name.rsplit("@", 1)[0] for name in kernels):
        cells = [name]
        for arch in (80, 90):
            entry = kernels[f"{name}@sm_{arch}"]
            fits = programs_per_sm(entry, entry["warps"], arch)
            shared = f"{entry['shared_bytes'] / 1024:.0f}"
            cells += [f"{entry['registers']}, {shared}, {fits}", " ".join(entry["products"]) or "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(as_markdown() + "\n")
