"""Every Triton kernel compiled ahead of time for the devices it is meant for, at real models' sizes: no spills."""

import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from engine.kernels import INTERPRETED, choose, gate, paged_attention, rms_norm, rotate_and_store

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter took the compiler's place"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10),
}
"""And the bytes of shared memory that one program may take."""


ALL_SIZES = ("sm_90", "gfx942")
OTHER_SIZES = ("decode-64", "decode-128", "prefill-64", "silu")
"""Of kernels that are compiled for the other targets too."""


class Case(NamedTuple):
    kernel: Any
    types: str
    """Of the arguments before the constants. Multiples of 16 are marked: launches find those out."""
    constants: dict[str, Any]


def attention(size: int, shared: int, *, decoding: bool, splits: int = 1, softcap: bool = False) -> Case:
    rows = paged_attention.rows_per_tile(shared, decoding=decoding)
    return Case(
        paged_attention.paged_attention_kernel,
        f"*bf16 *bf16 {'*bf16' if splits == 1 else '*fp32'} *fp32 *i32 *i32 *i32 *i32 *i32 "
        "i32:16 i32 i32 i32 i32:16 fp32 i32 fp32",
        {
            "SOFTCAP": softcap,
            "SPLITS": splits,
            "BLOCK_TOKENS": 16,
            "DOT": tl.bfloat16,
            **paged_attention.launch_constants(rows, shared, size),
        },
    )


CASES = {
    "decode-64": attention(64, 3, decoding=True),
    "decode-128": attention(128, 4, decoding=True),
    "decode-128-split": attention(128, 8, decoding=True, splits=16),
    "decode-256": attention(256, 2, decoding=True, softcap=True),
    "prefill-64": attention(64, 3, decoding=False),
    "prefill-128": attention(128, 4, decoding=False),
    "prefill-256": attention(256, 2, decoding=False, softcap=True),
    "join": Case(
        paged_attention.join_splits_kernel,
        "*fp32 *fp32 *bf16 *i32 *i32 *i32 i32 i32:16",
        {"SPLITS": 16, "ROWS": 2, "DIM": 128, "num_warps": 1},
    ),
    "rotate": Case(
        rotate_and_store.rotate_and_store_kernel,
        "*bf16 *fp32 *fp32 *fp32 *bf16 *i64 i32 i32 i32:16 fp32",
        {"NORMED": True, "BLOCK_TOKENS": 16, **rotate_and_store.launch_constants(64 + 2 * 8, 128)},
    ),
    "norm": Case(
        rms_norm.rms_norm_kernel,
        "*bf16 *bf16 *fp32 *bf16 i32 i32:16 fp32",
        {"ADD": True, **rms_norm.launch_constants(8192)},
    ),
    "silu": Case(gate.gate_kernel, "*bf16 *bf16 i32 i32:16", {"GELU": False, "BLOCK": gate.BLOCK}),
    "gelu": Case(gate.gate_kernel, "*bf16 *bf16 i32 i32:16", {"GELU": True, "BLOCK": gate.BLOCK}),
    "choose": Case(
        choose.choose_kernel,
        "*fp32 *fp32 *i64 *fp32 *fp32 *fp32 *i64 i32:16 i32:16",
        {"BLOCK": choose.BLOCK, "num_warps": choose.WARPS},
    ),
}


def compiled(case: Case, target: GPUTarget) -> CompiledKernel:
    names, types = case.kernel.arg_names, case.types.split()
    constants = {name: value for name, value in case.constants.items() if name != "num_warps"}
    assert len(types) + len(constants) == len(names)
    source = ASTSource(
        fn=case.kernel,
        signature={
            name: "constexpr" if name in constants else types[i].removesuffix(":16") for i, name in enumerate(names)
        },
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind[0] == "*" or ":16" in kind},
    )
    return triton.compile(source, target=target, options={"num_warps": case.constants.get("num_warps", 4)})


def usage(kernel: CompiledKernel) -> dict[str, int]:
    """Registers of a thread, and bytes or registers that did not find room there."""
    if "amdgcn" in kernel.asm:
        pattern = r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size): +(\d+)"
        return {name: int(value) for name, value in re.findall(pattern, kernel.asm["amdgcn"])}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        dump = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump.stdout)}


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, target) for name in CASES for target in TARGETS if target in ALL_SIZES or name not in OTHER_SIZES],
)
def test_kernel_compiles_without_spills(name: str, target: str) -> None:
    device, shared_memory = TARGETS[target]
    kernel = compiled(CASES[name], device)
    used = usage(kernel)
    print(f"{name} {target}: {kernel.metadata.shared} bytes of shared memory, {used}")
    registers = used.pop("vgpr_count", None) or used.pop("REG")
    assert registers > 0
    assert not any(used.values()), used
    assert kernel.metadata.shared <= shared_memory


def test_a_spill_would_be_seen() -> None:
    """Four times the keys at a time do not fit the registers."""
    case = attention(256, 2, decoding=False)
    crowded = case._replace(constants={**case.constants, "KEYS": 64, "num_warps": 4})
    assert usage(compiled(crowded, TARGETS["sm_90"][0]))["STACK"] > 0
