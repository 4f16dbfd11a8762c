#!/usr/bin/env python3
"""Translates CUDA sources so that a C++ compiler for the host compiles them, line by line:

    asm("add.u32 %0, ..." : "=r"(a) : "r"(b));   ::cuda_emulation::ptx::add_u32("...", a, b);
    extern __shared__ float memory[];            a pointer to the block's dynamic shared memory
    __shared__ float sums[4];                    a reference into the block's shared memory
    Kernel<T><<<grid, threads>>>(arguments);     ::cuda_emulation::OnGrid(Kernel<T>, ...)(...);
    reinterpret_cast<const void*>(&Kernel<T>)    ::cuda_emulation::Untyped(&Kernel<T>)

An instruction that ptx.h does not emulate becomes ptx::Unknown, a finding where it runs.

Usage: translate_device_code.py PTX_HEADER SOURCE_ROOT OUTPUT_ROOT FOLDER...
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ASM = re.compile(r"\basm\b\s*(?:volatile\b)?\s*(?=\()")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
OPERAND = re.compile(r'"[=+]?[a-z]"\s*\(')
TARGS = r"<[^;{}]*?>"
LAUNCH = re.compile(rf"([A-Za-z_][\w:]*(?:{TARGS})?)<<<(.*?)>>>\s*\(", re.DOTALL)
UNTYPED = re.compile(r"reinterpret_cast<const void\*>\((?=\s*&)")
ALIGNMENT = r"(?:__align__|alignas)\((\d+)\)"
DYNAMIC_SHARED = re.compile(rf"extern\s+__shared__\s+(?:{ALIGNMENT}\s+)?([\w:]+)\s+(\w+)\[\];")
STATIC_SHARED = re.compile(
    rf"__shared__\s+(?:{ALIGNMENT}\s+)?((?:typename\s+)?[\w:]+(?:<[^;]*?>)?[\s*]+)"
    r"(\w+)((?:\[[^;]*?\])*);")
# The braces around the instruction of a block.
AROUND = ("{", "}", ".reg", "setp", "selp", "@")


def closing(text: str, begin: int) -> int:
    """The place of the parenthesis that closes the one at `begin`."""
    depth = 0
    i = begin
    while i < len(text):
        if text[i] == '"':
            found = STRING.match(text, i)
            assert found
            i = found.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
        i += 1
    raise ValueError("an asm statement without an end")


def sections(text: str) -> list[str]:
    """What lies between the colons outside of strings and parentheses."""
    parts = [""]
    i = 0
    while i < len(text):
        end = i + 1
        if text[i] == '"':
            found = STRING.match(text, i)
            assert found
            end = found.end()
        elif text[i] == "(":
            end = closing(text, i) + 1
        if text[i] == ":":
            parts.append("")
        else:
            parts[-1] += text[i:end]
        i = end
    return parts


def operands(section: str) -> list[str]:
    found = []
    place = 0
    while match := OPERAND.search(section, place):
        end = closing(section, match.end() - 1)
        found.append(section[match.end():end].strip())
        place = end + 1
    return found


def main_instruction(text: str) -> str:
    """The instruction of a statement. One whose predicate is an operand has a name with "if."."""
    lines = [line.strip().removeprefix("{").strip()
             for line in text.replace("\\n", ";").replace("\\t", " ").split(";")]
    for line in lines:
        if line and not line.startswith(AROUND) and not line.endswith(":"):
            return line
    for line in lines:
        if line.startswith("@"):
            return "if." + line.split(maxsplit=1)[1]
    return ""


def translate_asm(statement: str, known: set[str]) -> str | None:
    """What follows `asm`, in parentheses. None: nothing to translate."""
    parts = sections(statement)
    if re.sub(STRING, "", parts[0]).strip():
        return '::cuda_emulation::ptx::Unknown("an instruction made by macros")'
    instruction = main_instruction("".join(STRING.findall(parts[0])))
    if not instruction:
        return None
    name = re.sub(r"[.:]+", "_", instruction.split()[0])
    arguments = [f'"{instruction}"'] + [o for part in parts[1:3] for o in operands(part)]
    if name not in known:
        name = "Unknown"
    return f"::cuda_emulation::ptx::{name}({', '.join(arguments)})"


def translate_shared(found: re.Match[str]) -> str:
    alignment, of, name, dimensions = found.groups()
    return (f"static char {name}_key; auto& {name} = ::cuda_emulation::StaticShared"
            f"<{of.strip()}{dimensions}, {alignment or 1}>(&{name}_key);")


def keep_lines(original: str, translated: str) -> str:
    lines = original.count("\n") - translated.count("\n")
    return translated + ("\\\n" if "\\\n" in original else "\n") * lines


def translate(text: str, known: set[str]) -> str:
    out = []
    place = 0
    while match := ASM.search(text, place):
        end = closing(text, match.end())
        translated = translate_asm(text[match.end() + 1:end], known)
        original = text[match.start():end + 1]
        out += [text[place:match.start()],
                original if translated is None else keep_lines(original, translated)]
        place = end + 1
    text = "".join(out) + text[place:]
    text = DYNAMIC_SHARED.sub(
        r"\2* const \3 = static_cast<\2*>(::cuda_emulation::DynamicShared());", text)
    text = STATIC_SHARED.sub(translate_shared, text)
    text = UNTYPED.sub("::cuda_emulation::Untyped(", text)
    return LAUNCH.sub(
        lambda m: keep_lines(m[0], f"::cuda_emulation::OnGrid({m[1]}, {m[2]})("), text)


def main() -> None:
    known = set(re.findall(r"^(?:inline \w+ |CUDA_EMULATION_\w+\(\s*)(\w+)[(,]",
                           Path(sys.argv[1]).read_text(), re.MULTILINE))
    root, output = Path(sys.argv[2]), Path(sys.argv[3])
    for folder in sys.argv[4:]:
        for path in sorted((root / folder).rglob("*.cu*")):
            if path.suffix not in (".cu", ".cuh"):
                continue
            # Warnings are the compiler's of the device.
            text = f'#pragma GCC system_header\n#line 1 "{path}"\n'
            text += translate(path.read_text(), known)
            to = output / path.relative_to(root)
            if not to.exists() or to.read_text() != text:
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_text(text)


if __name__ == "__main__":
    main()
