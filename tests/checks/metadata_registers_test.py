#!/usr/bin/env python3
"""Checks that no sparse WGMMA in flight has its metadata overwritten (sparse_warp_tile.cuh).

Usage: metadata_registers_test.py CUOBJDUMP OBJECT[;OBJECT]... | --self-test
Follows the machine code of every kernel from each HGMMA.SP to the wait that completes it: no
instruction on the way may write the register of its metadata. Skipped (77) without CUOBJDUMP or
OBJECT.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;")
# Instructions without a destination, or whose destination is no general register.
NO_REGISTER = (
    "ST",
    "RED.",
    "SYNCS",
    "HGMMA",
    "WARP",
    "U",
    "R2UR",
    "BAR",
    "MEMBAR",
    "FENCE",
    "NOP",
    "CCTL",
    "ERRBAR",
    "DEPBAR",
    "BSSY",
    "BSYNC",
    "BREAK",
    "BMOV",
    "BRA",
    "EXIT",
    "RET",
)


class Instruction(NamedTuple):
    """One line of machine code."""

    address: int
    conditional: bool
    name: str
    operands: list[str]


def parse(function: str) -> list[Instruction]:
    """Returns the instructions of one function of a listing."""
    found = []
    for line in function.splitlines():
        match = LINE.match(line)
        if match is None:
            continue
        address, predicate, name, operands = match.groups()
        parts = [part.strip() for part in operands.split(",")]
        guarded = bool(predicate) or (name.startswith("BRA") and len(parts) > 1)
        found.append(Instruction(int(address, 16), guarded, name, parts))
    return found


def written(instruction: Instruction) -> range:
    """Returns the general registers that an instruction writes."""
    name, operands = instruction.name, instruction.operands
    if name.startswith(NO_REGISTER) or "SETP" in name:
        return range(0)
    for operand in operands[:2]:
        match = re.match(r"R(\d+)\b", operand)
        if match:
            first = int(match.group(1))
            wide = re.search(r"\.(128|64|WIDE|F64|M88\.[24])", name)
            count = 1
            if wide:
                count = 4 if wide.group(1) in ("128", "M88.4") else 2
            if name.startswith("CS2R") and not name.endswith(".32"):
                count = 2
            return range(first, first + count)
        if not re.match(r"!?U?P", operand):
            break
    return range(0)


def successors(code: list[Instruction], index: dict[int, int], i: int) -> Iterator[int]:
    """Yields the instructions that may follow instruction `i`."""
    here = code[i]
    if here.name.startswith("BRA"):
        target = re.search(r"0x([0-9a-f]+)", here.operands[-1])
        if target and int(target.group(1), 16) in index:
            yield index[int(target.group(1), 16)]
        if not here.conditional:
            return
    if here.name.startswith(("EXIT", "RET")) and not here.conditional:
        return
    if i + 1 < len(code):
        yield i + 1


def overwriting(code: list[Instruction], start: int) -> Iterator[Instruction]:
    """Yields the instructions that overwrite the metadata of the HGMMA.SP at `start` in flight."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    register = int(next(o for o in reversed(code[start].operands) if re.fullmatch(r"R\d+", o))[1:])
    # Groups of WGMMAs that were committed after it; -1 until its own is.
    own = 0 if "gsb0" in code[start].operands else -1
    waiting = [(i, own) for i in successors(code, index, start)]
    seen = set(waiting)
    while waiting:
        i, later = waiting.pop()
        here = code[i]
        if here.name.startswith("HGMMA") and "gsb0" in here.operands:
            later += 1
        if here.name.startswith("WARPGROUP.DEPBAR") and later >= int(here.operands[-1], 16):
            continue
        if register in written(here):
            yield here
            continue
        for state in ((after, later) for after in successors(code, index, i)):
            if state not in seen:
                seen.add(state)
                waiting.append(state)


def check(listing: str) -> tuple[int, list[str]]:
    """Returns the number of sparse WGMMAs, and a line for each that is overwritten."""
    count = 0
    errors = []
    for function in listing.split("Function : ")[1:]:
        code = parse(function)
        for i, instruction in enumerate(code):
            if not instruction.name.startswith("HGMMA.SP"):
                continue
            count += 1
            for other in overwriting(code, i):
                errors.append(
                    f"{function.splitlines()[0]}: metadata of {instruction.address:#x} is "
                    f"overwritten at {other.address:#x} by {other.name}"
                )
    return count, errors


def self_test() -> None:
    """Raises AssertionError unless a planted write is found, and only in flight."""

    def listing(before: str, after: str) -> str:
        body = [
            "HGMMA.SP.64x16x32.F32.BF16 R24, R96, gdesc[UR20], R24, UP0, R92, 0x0",
            "HGMMA.SP.64x16x32.F32.BF16 R24, R100, gdesc[UR20], R24, R93, 0x0, gsb0",
            before,
            "WARPGROUP.DEPBAR.LE gsb0, 0x0",
            after,
            "EXIT",
        ]
        lines = [f"        /*{16 * i:04x}*/  {line} ;  /* 0x0 */" for i, line in enumerate(body)]
        return "Function : f\n" + "\n".join(lines)

    harmless = "STS [R92], R93"
    assert check(listing(harmless, "LDS.128 R92, [R4]")) == (2, [])
    for write, errors in (
        ("LDS.128 R92, [R4]", 2),
        ("MOV R93, RZ", 1),
        ("LDS.64 R92, [R4]", 2),
        ("SHFL.IDX PT, R92, R1, R2, R3", 1),
        ("IMAD.WIDE R92, R1, R2, R4", 2),
        ("MOV R94, R92", 0),
        ("ISETP.NE.AND P0, PT, R92, RZ, PT", 0),
        ("@P0 BRA 0x40", 0),
    ):
        found = check(listing(write, harmless))
        assert found[0] == 2 and len(found[1]) == errors, (write, found)
    # Across a back edge, with a later group in flight.
    loop = listing("WARPGROUP.DEPBAR.LE gsb0, 0x1", "@P0 BRA 0x0")
    assert check(loop) == (2, []), check(loop)


def main() -> int:
    """Runs the check; returns the exit status."""
    self_test()
    if sys.argv[1:] == ["--self-test"]:
        return 0
    cuobjdump, *lists = sys.argv[1:]
    objects = [path for text in lists for path in text.split(";") if path]
    if not objects or cuobjdump.endswith("NOTFOUND"):
        return 77
    total = 0
    errors: list[str] = []
    for path in objects:
        run = subprocess.run([cuobjdump, "-sass", path], capture_output=True, text=True, check=True)
        count, found = check(run.stdout)
        total += count
        errors += found
    print("\n".join(errors) if errors else f"{total} sparse WGMMAs keep their metadata")
    return 1 if errors or total == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
