#!/usr/bin/env python3
"""Checks the code of the CUDA kernels of a build: what it is for, and that devices can run it.

Usage: cuda_objects_test.py CUOBJDUMP CODES OBJECT[;OBJECT]... | --self-test
CODES are the build's CMAKE_CUDA_ARCHITECTURES ("80-real,100"), or "forced:80" for MARLIN_CUDA_ARCH.
Every kernel of the objects has code or PTX for all of them; none has an instruction of a later
capability, or more static shared memory than a launch may have. Skipped (77) without CUOBJDUMP or
OBJECT.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

# The least capability, times ten, of instructions, by the start of a name or a part of one.
MACHINE = {
    90: ("UBLK", "UTMA", "SYNCS", "HGMMA", "IGMMA", "QGMMA", "BGMMA", "WARPGROUP", "ELECT",
         "ACQBULK", "PREEXIT", "UCGABAR", "STSM", "MAPA", "USETMAXREG", "FENCE.VIEW.ASYNC",
         "HADD2.BF16", "HMUL2.BF16"),
    89: ("QMMA", ".E4M3", ".E5M2"),
}
PTX = {
    90: ("wgmma.", "cp.async.bulk", "cp.reduce.async.bulk", "barrier.cluster", "mapa.", "elect.",
         "griddepcontrol", "stmatrix", "setmaxnreg", "st.async", "red.async", "multimem.",
         "fence.proxy", "mbarrier.try_wait", "mbarrier.expect_tx", "mbarrier.arrive.expect_tx",
         "mul.bf16", "mul.rn.bf16", "sub.bf16", "sub.rn.bf16", "add.bf16", "add.rn.bf16",
         ".shared::cluster"),
    89: (".e4m3", ".e5m2"),
}  # fmt: skip
MOST_STATIC_SHARED = 48 * 1024
SASS_NAME = re.compile(r"^ +/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
PTX_NAME = re.compile(
    r"^[ \t]*(?:@!?%\w+\s+)?\{?[ \t]*([a-z][a-z0-9_.:]*[a-z0-9])[\s;]", re.MULTILINE
)


class Code(NamedTuple):
    """What a build compiles: code of a capability for a machine, or PTX."""

    capability: int
    machine: str  # "sm_80"; empty: PTX.


def wanted(codes: str) -> list[Code]:
    """Returns the codes that every kernel should have."""
    found = []
    if codes.startswith("forced:"):
        return [Code(int(codes[len("forced:") :]), "any")]
    for code in codes.split(","):
        match = re.fullmatch(r"(\d+)([a-z]?)(-real|-virtual)?", code)
        if match is None:
            raise ValueError(f"codes: '{code}' is not a number with -real or -virtual")
        number, suffix, kind = match.groups()
        if kind != "-virtual":
            found.append(Code(int(number), f"sm_{number}{suffix}"))
        if kind != "-real":
            found.append(Code(int(number), ""))
    return found


def too_new(names: set[str], table: dict[int, tuple[str, ...]], capability: int) -> list[str]:
    """Returns the instructions that devices of a capability lack."""
    found = []
    for least, starts in table.items():
        if least > capability:
            found += [
                name
                for name in sorted(names)
                if any(start in name if start.startswith(".") else name.startswith(start)
                       for start in starts)
            ]  # fmt: skip
    return found


def sass_errors(listing: str, machine: str) -> list[str]:
    """Returns a line for each kernel of a listing of machine code that has a later instruction."""
    capability = int(re.sub(r"\D", "", machine))
    errors = []
    for function in listing.split("Function : ")[1:]:
        if later := too_new(set(SASS_NAME.findall(function)), MACHINE, capability):
            errors.append(f"{function.split(chr(10), 1)[0]}: {machine} has no {', '.join(later)}")
    return errors


def ptx_errors(listing: str) -> list[str]:
    """Returns a line for each part of a listing of PTX that has an instruction later than its
    target."""
    errors = []
    for part in re.split(r"^\.target ", listing, flags=re.MULTILINE)[1:]:
        target = part.split("\n", 1)[0].split(",")[0]
        if later := too_new(set(PTX_NAME.findall(part)), PTX, int(re.sub(r"\D", "", target))):
            errors.append(f"PTX of {target} has {', '.join(later)}")
    return errors


def usage_errors(listing: str) -> list[str]:
    """Returns a line for each kernel of a listing of resources with too much shared memory, or
    without code for a machine that another kernel has code for."""
    machines: dict[str, set[str]] = {}
    errors = []
    machine = name = ""
    is_machine_code = False
    for line in listing.splitlines():
        if line.startswith("Fatbin "):
            is_machine_code = line.startswith("Fatbin elf code")
        elif is_machine_code and (match := re.match(r"arch = (\w+)", line)):
            machine = match.group(1)
            machines.setdefault(machine, set())
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match.group(1)
            machines[machine].add(name)
        elif (match := re.search(r"SHARED:(\d+)", line)) and name:
            if int(match.group(1)) > MOST_STATIC_SHARED:
                errors.append(f"{name}: {match.group(1)} bytes of static shared memory")
    every = set().union(*machines.values()) if machines else set()
    for machine, names in machines.items():
        errors += [f"{name}: no code for {machine}" for name in sorted(every - names)]
    return errors


def list_errors(listing: str, codes: list[Code]) -> list[str]:
    """Returns a line for each code that an object lacks, given a listing of its parts."""
    errors = []
    for code in codes:
        if code.machine == "any":
            continue
        ending = f".{code.machine}.cubin" if code.machine else f".sm_{code.capability}"
        parts = re.findall(r"(?:ELF|PTX) file\s+\d+: (\S+)", listing)
        if code.machine and not any(part.endswith(ending) for part in parts):
            errors.append(f"no code for {code.machine}")
        if not code.machine and not any(re.search(rf"\.sm_{code.capability}[a-z]?\.ptx$", part)
                                        for part in parts):  # fmt: skip
            errors.append(f"no PTX of {code.capability}")
    return errors


def forced_errors(listing: str, capability: int) -> list[str]:
    """Returns a line if machine code of a listing was not compiled from PTX of the capability."""
    found = set(re.findall(r"EF_CUDA_VIRTUAL_SM\(EF_CUDA_SM(\d+)\)", listing))
    if found == {str(capability)}:
        return []
    return [f"compiled as for {sorted(found)}, not {capability}"]


def check(cuobjdump: str, path: str, codes: list[Code]) -> list[str]:
    """Returns a line for each error of an object."""

    def output(*options: str) -> str:
        command = [cuobjdump, *options, path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    errors = list_errors(output("-lelf") + output("-lptx"), codes)
    errors += usage_errors(output("-res-usage"))
    for code in codes:
        if code.machine == "any":
            errors += forced_errors(output("-sass"), code.capability)
        elif code.machine and code.capability < 90:
            errors += sass_errors(output("-sass", "-arch", code.machine), code.machine)
        elif not code.machine and code.capability < 90:
            errors += ptx_errors(output("-ptx"))
    return [f"{os.path.basename(path)}: {error}" for error in errors]


def self_test() -> None:
    """Raises AssertionError unless planted lines are found."""
    assert wanted("80-real,90a-real,100") == [
        Code(80, "sm_80"), Code(90, "sm_90a"), Code(100, "sm_100"), Code(100, "")]  # fmt: skip
    assert wanted("forced:80") == [Code(80, "any")]

    def sass(line: str) -> str:
        return f"\t\tFunction : f\n        /*0010*/               {line} ;  /* 0x0 */\n"

    for line in ("LDGSTS.E.BYPASS.128 [R1], [R2.64]", "HMMA.16816.F32.BF16 R4, R8, R2, R4",
                 "@!P0 BRA 0x10", "HFMA2.BF16_V2 R1, R2, R3, R4", "ARRIVES.LDGSTSBAR.64 [UR4]",
                 "F2FP.BF16.PACK_AB R1, R2, R3"):  # fmt: skip
        assert not sass_errors(sass(line), "sm_80"), line
    for line in ("UBLKCP [UR8], [UR4], UR7", "@P0 SYNCS.ARRIVE.TRANS64 RZ, [UR4], R2",
                 "@!UP0 UTMALDG.2D [UR8], [UR4]", "HGMMA.64x16x16.F32 R24, gdesc[UR4], R24",
                 "ELECT P0, URZ, PT", "ACQBULK", "UCGABAR_ARV", "STSM.16.M88.4 [R1], R4",
                 "HMUL2.BF16_V2 R1, R2, R3", "QMMA.16832.F32.E4M3.E4M3 R4, R8, R2, R4",
                 "F2FP.F16.E4M3.UNPACK_B R1, R2"):  # fmt: skip
        assert len(sass_errors(sass(line), "sm_80")) == 1, line
    assert not sass_errors(sass("QMMA.16832.F32.E4M3.E4M3 R4, R8, R2, R4"), "sm_89")

    def ptx(line: str) -> str:
        return f".version 9.0\n.target sm_80\n.visible .entry f()\n{{\n\t{line};\n}}\n"

    for line in ("cp.async.cg.shared.global [%r1], [%rd1], 16", "ret", "mov.u32 %r1, %tid.x",
                 "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1]", "fma.rn.bf16x2 %r1,%r2,%r3,%r4",
                 "mbarrier.arrive.shared.b64 %rd1, [%r1]"):  # fmt: skip
        assert not ptx_errors(ptx(line)), line
    for line in ("cp.async.bulk.shared::cluster.global.mbarrier [%r1], [%rd1], %r2, [%r3]",
                 "@%p1 wgmma.fence.sync.aligned", "{ griddepcontrol.wait", "elect.sync %r1|%p1, -1",
                 "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2", "mul.bf16x2 %r1, %r2, %r3",
                 "cvt.rn.f16x2.e4m3x2 %r1, %rs1"):  # fmt: skip
        assert len(ptx_errors(ptx(line))) == 1, line

    usage = ("Fatbin elf code:\narch = sm_80\nResource usage:\n Function f:\n"
             "  REG:40 STACK:0 SHARED:{0} LOCAL:0\n Function g:\n  REG:8 STACK:0 SHARED:0\n"
             "Fatbin elf code:\narch = sm_89\nResource usage:\n{1} Function g:\n  REG:8 SHARED:0\n")
    whole = " Function f:\n  REG:8 SHARED:0\n"
    assert not usage_errors(usage.format(48 * 1024, whole))
    assert len(usage_errors(usage.format(48 * 1024 + 4, whole))) == 1
    assert usage_errors(usage.format(0, "")) == ["f: no code for sm_89"]
    assert not usage_errors(usage.format(0, whole) + "Fatbin ptx code:\narch = sm_90a\n")

    listing = "ELF file    1: f.1.sm_80.cubin\nPTX file    1: f.1.sm_90a.ptx\n"
    assert not list_errors(listing, wanted("80-real,90a-virtual"))
    assert list_errors(listing, wanted("80")) == ["no PTX of 80"]
    assert list_errors(listing, wanted("80-real,89-real")) == ["no code for sm_89"]

    flags = '\t.headerflags\t@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM{})"\n'
    assert not forced_errors(flags.format(80), 80)
    assert forced_errors(flags.format(80) + flags.format(90), 80)
    assert forced_errors("", 80)


def main() -> int:
    """Runs the check; returns the exit status."""
    self_test()
    if sys.argv[1:] == ["--self-test"]:
        return 0
    cuobjdump, codes, *lists = sys.argv[1:]
    objects = [path for text in lists for path in text.split(";") if path]
    if not objects or cuobjdump.endswith("NOTFOUND"):
        return 77
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda path: check(cuobjdump, path, wanted(codes)), objects)
        errors = [error for part in found for error in part]
    print("\n".join(errors) if errors else f"{len(objects)} objects have the code of {codes}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
