"""
Compiles every shipped kernel for GPUs that are not there and prints what became of it, as JSON. A script, not a test.

    python tests/kernels/compile_ahead.py 80 90
    python tests/kernels/compile_ahead.py 80 90 --write kernels/resources.json
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from margingate_kernels import attention, column_repair, launch_table, margin, matmul, rows

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _top2(dtype: str) -> dict:
    signature = {"logits_ptr": f"*{dtype}", "ids_ptr": "*i64", "values_ptr": "*fp32", "margins_ptr": "*fp32"}
    signature |= {"row_stride": "i32", "vocabulary": "i32"}
    return dict(
        function=margin.top2_kernel,
        signature=signature,
        constants={"BLOCK": margin.BLOCK},
        warps=margin.NUM_WARPS,
        multiples=("row_stride", "vocabulary"),
    )


def _repair(dtype: str, planes: int) -> dict:
    stored = {"bf16": "*i16"}.get(dtype, TYPES[dtype])
    signature = {"states_ptr": "*fp32", "high_ptr": stored, "low_ptr": "*fp32" if planes == 3 else stored}
    signature |= {"slots_ptr": "*i64", "positions_ptr": "*i64"}
    names = column_repair.repair_kernel.arg_names
    signature |= {name: "i32" for name in names if name not in signature and not name.isupper()}
    return dict(
        function=column_repair.repair_kernel,
        signature=signature,
        constants={"PLANES": planes, "DTYPE": dtype, "DIM": 128, "LARGEST": torch.finfo(DTYPES[dtype]).max},
        warps=column_repair.NUM_WARPS,
        multiples=(*(name for name in names if name.endswith("stride")), "dim"),
    )


def _linear(arch: int, dtype: str, pieces: int, fused: bool) -> dict:
    launch = launch_table.LAUNCH[arch].linear
    weight = {"bf16": 1, "fp16": 2, "fp32": 3}[dtype]
    names = matmul.linear_kernel.arg_names
    signature = {
        name: "*fp32" if name.endswith("_ptr") else "i32" for name in names if not name.isupper() or name in "MNK"
    }
    signature |= {"w_ptr": TYPES[dtype], "bias_ptr": TYPES[dtype], "locks_ptr": "*i32"}
    return dict(
        function=matmul.linear_kernel,
        signature=signature,
        constants={
            "TILES": launch.tokens // 16,
            "BLOCK_N": launch.block_n,
            "BLOCK_K": launch.block_k,
            "W_PIECES": weight,
            "X_PIECES": pieces,
            "HAS_BIAS": fused,
            "HAS_RESIDUAL": fused,
            "TENSOR_CORES": True,
        },
        warps=launch.num_warps,
        stages=launch.num_stages,
        multiples=("N", "K"),
    )


def _attend(arch: int, dtype: str, planes: int, dim: int, pieces: int, softcap: bool = False) -> dict:
    launch = launch_table.attention_launch(
        launch_table.LAUNCH[arch],
        dim,
        DTYPES[dtype],
    )
    names = attention.attend_kernel.arg_names
    signature = {name: "i32" for name in names if not name.isupper()}
    signature |= {name: "*fp32" for name in names if name.endswith("_ptr")}
    signature |= {
        "scaling": "fp32",
        "softcap": "fp32",
        "tiles_ptr": "*i32",
        "slots_ptr": "*i64",
        "positions_ptr": "*i64",
    }
    signature |= {"k_ptr": TYPES[dtype], "v_ptr": TYPES[dtype], "q_ptr": "*fp32" if pieces == 3 else TYPES[dtype]}
    padded = launch_table.padded_dim(dim)
    constants = {"GROUP": 4, "GROUP_TILE": 4, "DIM": dim, "VALUE_DIM": dim, "D": padded, "DV": padded}
    constants |= {"BLOCK": launch.block, "SPLIT": launch.split, "PIECES": pieces, "PLANES": planes}
    constants |= {"BF16": dtype == "bf16", "SOFTCAP": softcap, "TENSOR_CORES": True}
    return dict(
        function=attention.attend_kernel,
        signature=signature,
        constants=constants,
        warps=launch.num_warps,
        stages=launch.num_stages,
        multiples=tuple(name for name in names if name.endswith("stride")),
    )


def _combine(sinks: bool) -> dict:
    names = attention.combine_kernel.arg_names
    signature = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in names if not name.isupper()}
    return dict(
        function=attention.combine_kernel,
        signature=signature | {"positions_ptr": "*i64"},
        constants={"VALUE_DIM": 128, "DV": 128, "SPLIT": 256, "HAS_SINKS": sinks},
        warps=1,
    )


def _rows(operation: str) -> dict:
    launch = launch_table.LAUNCH[80].rows
    names = rows.row_kernel.arg_names
    signature = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in names if not name.isupper()}
    norm = operation.endswith("NORM")
    constants = {"OPERATION": getattr(rows, operation).value, "HAS_RESIDUAL": operation == "RMS_NORM"}
    constants |= {"HAS_WEIGHT": norm, "HAS_BIAS": operation == "LAYER_NORM", "BLOCK": launch.block}
    return dict(
        function=rows.row_kernel,
        signature=signature | {"eps": "fp32"},
        constants=constants,
        warps=launch.num_warps,
        multiples=("n", "x_stride"),
    )


def configurations(arch: int) -> dict[str, dict]:
    """Every form that a shipped launcher can ask for, one of each kind."""
    row = 90 if arch == 90 else 80
    found = {
        "linear/bf16": _linear(row, "bf16", 3, False),
        "linear/bf16+bias+residual": _linear(row, "bf16", 3, True),
        "linear/bf16/one piece": _linear(row, "bf16", 1, False),
        "linear/fp16": _linear(row, "fp16", 3, False),
        "linear/fp16/one piece": _linear(row, "fp16", 1, False),
        "linear/fp32": _linear(row, "fp32", 3, False),
    }
    for dim in (64, 96, 128, 256):
        for planes in (1, 2):
            found[f"attention/bf16 x{planes}/{dim}"] = _attend(row, "bf16", planes, dim, 3)
        found[f"attention/fp32/{dim}"] = _attend(row, "fp32", 1, dim, 3)
        found[f"attention/decode/{dim}"] = _attend(row, "bf16", 1, dim, 1)
    found |= {
        "attention/fp16 x2/128": _attend(row, "fp16", 2, 128, 3),
        "attention/bf16 x2/256/softcap": _attend(row, "bf16", 2, 256, 3, softcap=True),
        "attention/combine": _combine(False),
        "attention/combine+sinks": _combine(True),
    }
    found |= {
        f"rows/{name.lower()}": _rows(name) for name in ("SUM", "RMS_NORM", "LAYER_NORM", "SOFTMAX", "LOG_SOFTMAX")
    }
    found |= {f"top2/{dtype}": _top2(dtype) for dtype in TYPES}
    found |= {f"repair/bf16 x{planes}": _repair("bf16", planes) for planes in (1, 2, 3)}
    found["repair/fp16 x2"] = _repair("fp16", 2)
    return found


def compile_one(
    arch: int, function, signature: dict, constants: dict, warps: int, stages: int = 3, multiples: tuple = ()
) -> dict:
    """Registers, spills, shared memory, tensor-core products and wide loads of one kernel on one architecture."""
    names = function.arg_names
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if types[name].startswith("*") or name in multiples
    }
    source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        run = {"capture_output": True, "text": True, "check": True}
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], **run).stdout
        code = subprocess.run([TOOLS / "cuobjdump", "-sass", cubin], **run).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    products = sorted(set(re.findall(r"\bHG?MMA\.(?:\d+x\d+x\d+|\d+)", code)))
    return {
        "warps": warps,
        "registers": int(found[1]),
        "spilled": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "stack": int(found[2]) + int(found[3]),
        "shared_bytes": built.metadata.shared,
        "products": products,
        "copies_128": len(re.findall(r"LDGSTS\.E\.[A-Z.]*128", code)),
        "loads_128": len(re.findall(r"LDG\.E\.[A-Z.]*128", code)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", type=int, nargs="+")
    parser.add_argument("--only", default="", help="configurations whose name holds this")
    parser.add_argument("--write", type=Path, help="write the table here as well")
    options = parser.parse_args()
    table = {}
    for arch in options.architectures:
        for name, configuration in configurations(arch).items():
            if options.only in name:
                try:
                    table[f"{name}@sm_{arch}"] = compile_one(arch, **configuration)
                except Exception as error:
                    table[f"{name}@sm_{arch}"] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    text = json.dumps({"triton": triton.__version__, "kernels": table}, indent=1)
    if options.write:
        options.write.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
