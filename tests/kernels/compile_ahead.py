"""
Compiles every shipped kernel for a GPU that is not there and prints what became of it, as JSON. A script, not a test.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from margingate_kernels import column_repair, margin

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _top2(dtype: str) -> tuple:
    signature = {"logits_ptr": f"*{dtype}", "ids_ptr": "*i64", "values_ptr": "*fp32", "margins_ptr": "*fp32"}
    signature |= {"row_stride": "i32", "vocabulary": "i32"}
    return margin.top2_kernel, signature, {"BLOCK": margin.BLOCK}, margin.NUM_WARPS, ("row_stride", "vocabulary")


def _repair(two: bool) -> tuple:
    signature = {"states_ptr": "*fp32", "high_ptr": "*i16", "low_ptr": "*i16"}
    signature |= {"slots_ptr": "*i64", "positions_ptr": "*i64"}
    names = column_repair.repair_kernel.arg_names
    strides = tuple(name for name in names if name.endswith("stride")) + ("dim",)
    signature |= {name: "i32" for name in names if name not in signature and not name.isupper()}
    return column_repair.repair_kernel, signature, {"TWO_PLANES": two, "DIM": 64}, column_repair.NUM_WARPS, strides


KERNELS = {
    "top2/fp32": _top2("fp32"),
    "top2/bf16": _top2("bf16"),
    "top2/fp16": _top2("fp16"),
    "repair/one plane": _repair(False),
    "repair/two planes": _repair(True),
}


def compile_one(function, signature: dict, constants: dict, warps: int, multiples_of_16: tuple, arch: int) -> dict:
    """Registers, spilled bytes, shared memory and wide loads of one kernel on one architecture."""
    names = function.arg_names
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if types[name].startswith("*") or name in multiples_of_16
    }
    source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=attributes)
    built = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "enable_fp_fusion": False}
    )
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        run = {"capture_output": True, "text": True, "check": True}
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], **run).stdout
        code = subprocess.run([TOOLS / "cuobjdump", "-sass", cubin], **run).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    return {
        "registers": int(found[1]),
        "spilled": int(found[2]) + int(found[3]),
        "shared_bytes": built.metadata.shared,
        "loads_128": len(re.findall(r"LDG\.E\.[A-Z.]*128", code)),
    }


if __name__ == "__main__":
    result = {
        f"{name}@sm_{arch}": compile_one(*kernel, arch)
        for arch in map(int, sys.argv[1:])
        for name, kernel in KERNELS.items()
    }
    print(json.dumps(result, indent=1))
