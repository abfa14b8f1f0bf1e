"""Counting in a compiled kernel: the facts of a codegen report that stand in its assembly."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)", re.MULTILINE)
_PTX = re.compile(r"^\s+(?:@%p\d+\s+)?([a-z]\w*(?:\.[\w:]+)*)[ ;]", re.MULTILINE)
_AMDGCN = re.compile(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)", re.MULTILINE)
# Anywhere in a line: RDNA issues two instructions in one.
_AMD_FMA = re.compile(r"\bv_(?:dual_)?(?:fma|fmac|fmamk|fmaak|mad|mac)_(?:legacy_)?f32")

_AMD_BYTES = {
    **{"dwordx4": 16, "b128": 16, "dwordx3": 12, "b96": 12, "dwordx2": 8, "b64": 8, "dword": 4, "b32": 4},
    **{"short": 2, "ushort": 2, "sshort": 2, "u16": 2, "i16": 2, "b16": 2},
    **{"byte": 1, "ubyte": 1, "sbyte": 1, "u8": 1, "i8": 1, "b8": 1},
}
# What LLVM makes of a rounded fp32 division and square root: fused multiply-adds that nobody fused.
_FMAS_OF_A_DIVISION, _FMAS_OF_A_ROOT = 5, 2


def amd(asm: dict[str, Any]) -> dict[str, Any]:
    """The facts of an amdgcn listing."""
    text = asm["amdgcn"]
    names = Counter(_AMDGCN.findall(text))
    for padding in ("s_nop", "s_code_end"):
        names.pop(padding, None)

    def metadata(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        return int(found[1]) if found else 0

    def count(pattern: str) -> int:
        return sum(n for name, n in names.items() if re.fullmatch(pattern, name))

    fmas = len(_AMD_FMA.findall(text)) + 2 * count(r"v_pk_fma_f32\w*")
    explained = _FMAS_OF_A_DIVISION * count(r"v_div_fixup_f32\w*") + _FMAS_OF_A_ROOT * count(r"v_sqrt_f32\w*")
    return {
        "registers": metadata("vgpr_count"),
        "scalar_registers": metadata("sgpr_count"),
        "spills": metadata("vgpr_spill_count"),
        "scalar_spills": metadata("sgpr_spill_count"),
        "loads": _widths(names, r"(?:global|buffer|flat)_load_(?:d16_)?(?:hi_)?([a-z]+\d*(?:x\d)?)\w*", _AMD_BYTES),
        "stores": _widths(names, r"(?:global|buffer|flat)_store_(?:d16_)?(?:hi_)?([a-z]+\d*(?:x\d)?)\w*", _AMD_BYTES),
        "fp8_conversions": count(r"v_cvt_(scalef32_)?(pk|sr)_fp8_\w+"),
        "fused_multiply_adds": fmas - explained,
        "instructions": names.total(),
        "assembly": "amdgcn",
    }


def nvidia(asm: dict[str, Any]) -> dict[str, Any]:
    """The facts of a cubin where it can be taken apart, else those of its PTX."""
    # Fusion and conversions are told from PTX: in SASS a division is written out, multiply-adds and all.
    ptx = Counter(_PTX.findall(asm["ptx"]))
    facts: dict[str, Any] = {
        "scalar_registers": None,
        "scalar_spills": 0,
        "fp8_conversions": sum(n for name, n in ptx.items() if re.match(r"cvt\..*e4m3x2", name)),
        "fused_multiply_adds": sum(n for name, n in ptx.items() if re.match(r"(fma|mad)\..*f32", name)),
    }
    tool = disassembler()
    if tool is None:
        return facts | {
            "registers": None,
            "spills": asm["ptx"].count("__local_depot"),
            "loads": _ptx_widths(ptx, "ld"),
            "stores": _ptx_widths(ptx, "st"),
            "instructions": ptx.total(),
            "assembly": "ptx",
        }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(asm["cubin"])
        command = [tool, "--dump-sass", "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = Counter(_SASS.findall(text))
    names.pop("NOP", None)
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return facts | {
        "registers": used["REG"],
        "spills": used["STACK"] + used["LOCAL"],
        "loads": _sass_widths(names, "LDG"),
        "stores": _sass_widths(names, "STG"),
        "instructions": names.total(),
        "assembly": "sass",
    }


@cache
def disassembler() -> str | None:
    """cuobjdump, as Triton brings it; None where it does not."""
    from triton import knobs

    try:
        path: str = knobs.nvidia.cuobjdump.path
    except RuntimeError:
        return None
    return path


def _widths(names: Counter[str], pattern: str, widths: dict[str, int]) -> dict[int, int]:
    found: Counter[int] = Counter()
    for name, count in names.items():
        if match := re.fullmatch(pattern, name):
            found[widths[match[1]]] += count
    return dict(sorted(found.items()))


def _sass_widths(names: Counter[str], kind: str) -> dict[int, int]:
    found: Counter[int] = Counter()
    for name, count in names.items():
        first, *marks = name.split(".")
        if first == kind:
            bits = [int(mark.lstrip("US")) for mark in marks if re.fullmatch(r"[US]?(8|16|64|128|256)", mark)]
            found[bits[-1] // 8 if bits else 4] += count
    return dict(sorted(found.items()))


def _ptx_widths(names: Counter[str], kind: str) -> dict[int, int]:
    found: Counter[int] = Counter()
    for name, count in names.items():
        if match := re.fullmatch(rf"{kind}\.global(?:\.\w+)*?(?:\.v(\d))?\.[busf](\d+)", name):
            found[int(match[1] or 1) * int(match[2]) // 8] += count
    return dict(sorted(found.items()))
