"""The few PTX instructions of `sipp.runtime.gpu.assembly`, run one after the other for one thread."""

from __future__ import annotations

import re

import numpy as np

WORD, HALF = 0xFFFFFFFF, 0xFFFF


def float_of(bits: int) -> np.float32:
    return np.uint32(bits & WORD).view(np.float32)


def bits_of(number: float) -> int:
    return int(np.float32(number).view(np.uint32))


def run(text: str, registers: dict[str, int], shared: bytes) -> dict[str, int]:
    """The registers, as bits, after the instructions; `shared` is what lies in shared memory from address 0 on."""
    found = dict(registers)

    def get(name: str) -> int:
        return found[name] if name in found else int(name, 0)

    def names(list_of: str) -> list[str]:
        return [name.strip() for name in list_of.strip("{} ").split(",")]

    for line in (part.strip() for part in text.strip("{}\n ").split(";")):
        if not line or line.startswith(".reg"):
            continue
        kind, rest = line.split(None, 1)
        parts = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", rest) if part.strip()]
        to, given = parts[0], parts[1:]
        if kind == "dp4a.u32.u32":
            a, b = get(given[0]), get(given[1])
            dot = sum((a >> 8 * i & 255) * (b >> 8 * i & 255) for i in range(4))
            found[to] = (dot + get(given[2])) & WORD
        elif kind == "mov.b32" and to.startswith("{"):
            low, high = names(to)
            found[low], found[high] = get(given[0]) & HALF, get(given[0]) >> 16
        elif kind == "mov.b32" and given[0].startswith("{"):
            low, high = names(given[0])
            found[to] = get(low) | get(high) << 16
        elif kind.startswith("mov."):
            found[to] = get(given[0])
        elif kind == "shr.s16":
            found[to] = (int(np.uint16(get(given[0])).view(np.int16)) >> get(given[1])) & HALF
        elif kind == "cvt.f32.f16":
            found[to] = bits_of(np.uint16(get(given[0])).view(np.float16))
        elif kind == "cvt.rn.f32.s8":
            found[to] = bits_of(np.uint8(get(given[0]) & 255).view(np.int8))
        elif kind.startswith("ld.shared."):
            address, size = get(given[0].strip("[]")), 2 if kind.endswith("b16") else 4
            assert address % size == 0, "misaligned"
            found[to] = int.from_bytes(shared[address : address + size], "little")
        elif kind == "fma.rn.f32":
            a, b, c = (float(float_of(get(name))) for name in given)
            found[to] = bits_of(a * b + c)
        else:
            raise ValueError(f"no such instruction here: {line}")
    return found
