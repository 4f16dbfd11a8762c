#!/usr/bin/env python3
"""The faults of the CPU kernels' mutation test, and the script that writes those of one source into
a copy of it: each becomes a choice at run time, so that one build holds all of them.

Usage: cpu_mutants.py SOURCE COPY
       cpu_mutants.py --list
The expression of a fault becomes a conditional on marlin::kActiveMutant (active_mutant.h), which
holds the fault's number: its place in the table, from 1. run_mutants.py runs the program that is
built from the copies. --list prints the files of which it needs copies: those that hold a fault and
the sources that include one of them, by way of other headers or not. Every other source compiles to
what it is without faults, so that the program takes the library's object of it.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple


SRC = Path(__file__).resolve().parents[2] / "src"
FOLDERS = ("backends/cpu", "plan")  # Those of SRC with sources that have faults.


class Mutant(NamedTuple):
    what: str
    file: str
    before: str  # An expression.
    after: str
    within: str = ""  # Text that occurs once in the file and holds `before` once; empty: `before`.


MUTANTS = [
    # Decoding.
    Mutant("fp8 subnormals are halved", "decode.inl.h", "Add(rest, rest)", "rest"),
    Mutant("e8m0 of 0 is zero", "decode.inl.h", "0x00400000", "0"),
    Mutant("no global scale", "decode.inl.h", "factor", "1.0f", "Set(factor)"),
    Mutant("scales of the first chunks for all", "decode.inl.h", "first_group", "0",
           "first = (block * w.groups + first_group) * 16"),
    Mutant("no third part of the 3-bit codes", "decode.inl.h", "Or(second, third)", "second"),
    Mutant("one group's parameters for both halves", "decode.inl.h", "high", "low",
           "SplitSet(values[low], values[high], part)"),
    Mutant("the first group's parameters for all", "decode.inl.h", "16", "0",
           "if (scaled) offset += 16"),
    Mutant("a block's first bias for every row", "decode.inl.h", "index",
           "index - index % kBlockRows", "parameters.bias[index]"),
    # Packing of weights.
    Mutant("a table without its last value", "prepared_panels.cc", "values.size()",
           "values.size() - 1", "values[(i ^ flips) % values.size()]"),
    Mutant("no last column at the edge", "pack_panels.cc", "columns", "columns - 1",
           "static_cast<size_t>(columns * element_bytes)"),
    Mutant("3-bit codes joined one bit off", "pack_panels.cc", "8 * i", "8 * i - 1",
           "word << (8 * i)"),
    Mutant("nibbles of another slice", "pack_panels.cc", "1", "2", "| (slices[1] & mask) << 4"),
    Mutant("no last row at the edge", "pack_panels.cc", "inside", "inside - 1", "row < inside"),
    Mutant("the last half of the groups is not packed", "pack_panels.cc", "groups",
           "groups - groups / 2", "group < groups"),
    # 2:4 weights.
    Mutant("2:4: the first half's codes for both", "pack_sparse.cc", "kHalf + i", "i",
           "tile.values[kHalf + i]"),
    Mutant("2:4: codes of value 0 are not 0", "pack_sparse.cc", "zero_code * 0x11111111u", "0u",
           "flips = zero_code * 0x11111111u"),
    Mutant("2:4: the table is not permuted", "prepared_panels.cc", "i ^ flips", "i",
           "values[(i ^ flips)"),
    Mutant("2:4: the first chunk's metadata for all", "pack_columns.cc",
           "chunk * kSparseTileMetadata", "0"),
    Mutant("2:4: positions 0, 3 are expanded to 0, 2", "simd_avx512.h", "9", "5",
           "4, 12, 9, 10, 12, 8"),
    Mutant("2:4: the first half's metadata for both", "simd_avx2.h",
           "kMetadataBytes / 2 + 2 * part", "2 * part"),
    Mutant("2:4: the first row's metadata for all", "decode.inl.h", "kMetadataBytes * r", "0"),
    Mutant("2:4 gemv: the first half's activations for both", "sparse_avx512bf16.cc",
           "from + kChunkBytes / 2", "from", "from + kChunkBytes / 2, kept.places[1]"),
    Mutant("2:4 gemv: one scale for two groups of 32 k", "sparse_avx512bf16.cc", "scale(2)",
           "scale(0)", "SplitSet(scale(0), scale(2), 0)"),
    Mutant("2:4 gemv: one scale for two groups of 16 k", "sparse_avx512bf16.cc", "scale(3)",
           "scale(2)", "_mm_set_ss(scale(3))"),
    Mutant("2:4: pruned weights lose the NaN of 0 * Inf", "sparse_rows.inl.h", "flag == 0",
           "flag != 0xdeadbeef"),
    Mutant("2:4: one group of 128 k for all of 32 k", "sparse_rows.inl.h",
           "w.group_size % kChunkK == 0", "w.group_size % kSliceK == 0"),
    Mutant("2:4 gemv: activations of the first pass for all", "sparse_avx512bf16.cc",
           "chunk * kChunkBytes", "0", "x + chunk * kChunkBytes"),
    Mutant("2:4 gemm: indices of the first half for both", "sparse_avx2.cc", "kStep / kHalfSteps",
           "0", "chunk.places[quad][kStep / kHalfSteps]"),
    Mutant("2:4 gemm: all rows: the first kept weight's index for both", "sparse_avx2.cc", "kKept",
           "0", "chunk.indices[quad][kStep][kKept]"),
    Mutant("2:4 gemm: one scale for two groups of 32 k", "sparse_avx2.cc", "4 * kHalf + 2",
           "4 * kHalf", "_mm256_set_m128(scales(4 * kHalf + 2), scales(4 * kHalf))"),
    Mutant("2:4 gemm: one scale for two groups of 16 k", "sparse_avx2.cc", "4 * kHalf + kPart",
           "4 * kHalf", "scales(4 * kHalf + kPart)"),
    Mutant("2:4 gemm: one scale for two groups of 128 k", "sparse_avx2.cc", "groups[c]",
           "groups[0]"),
    Mutant("2:4 gemm: scales of the first columns for all", "sparse_avx2.cc",
           "quad * kQuadColumns", "0", "quad * kQuadColumns);"),
    Mutant("2:4 gemm: activations of the first pass for all", "sparse_avx2.cc", "first + c", "c",
           "(first + c) * kChunkK"),
    Mutant("2:4 gemm: the last row of A left out", "sparse_avx2.cc", "m == 1", "m == 17"),
    Mutant("2:4 gemm: the low lane's sums for both", "sparse_avx2.cc",
           "_mm256_extractf128_ps(sums, 1)", "_mm256_castps256_ps128(sums)"),
    # The exact GEMM.
    Mutant("the last row of A left out", "exact_kernel.inl.h", "m", "m - 1", "for (; i < m; ++i)"),
    Mutant("activations of the first pass for all", "exact_kernel.inl.h", "chunk", "0",
           "rows{activations + chunk *"),
    Mutant("sums do not begin at zero", "exact_kernel.inl.h", "Zero()", "Set(0x1p-20f)",
           "Store(lanes + i * kLanes, Zero())"),
    # The GEMV.
    Mutant("gemv: no low bytes of values", "byte_planes_avx2.inl.h", "bits[code] & 0xff", "0"),
    Mutant("gemv: scales of the first column for all", "gemv_avx2.cc", "scale[c]", "scale[0]",
           "Set(scale[c])"),
    Mutant("gemv: the second half's group for both", "gemv_avx2.cc", "part", "1",
           "GroupMode::kHalf ? part : 0"),
    Mutant("gemv: no zero points", "gemv_avx2.cc", "parameters.zero[index]", "0.0f"),
    Mutant("gemv: no biases", "gemv_avx2.cc", "parameters.bias[index]", "0.0f"),
    Mutant("gemv: the last row of A left out", "gemv_avx2.cc", "i < m", "i < m - 1",
           "for (int64_t i = 0; i < m; ++i)"),
    Mutant("gemv: activations of the first pass for all", "gemv_avx2.cc", "chunk", "0",
           "static_cast<const float*>(x) + chunk * kChunkK"),
    # Elements, rows and epilogues.
    Mutant("the last element of a row is not loaded", "conversions.inl.h", "count - i",
           "count - i - 1", "(from) + i * size,\n" + 19 * " " + "static_cast<size_t>((count - i)"),
    Mutant("relu turns NaN into 0", "activation.inl.h", "v[i] < 0.0f", "!(v[i] > 0.0f)",
           "v[i] = v[i] < 0.0f"),
    Mutant("exp underflows below -20", "activation.inl.h", "-104.0f", "-20.0f",
           "clamped > -104.0f"),
    Mutant("GELU with a wrong constant", "activation.inl.h", "0.044715f", "0.0447f"),
    Mutant("biases of the up half's first columns", "rows.inl.h", "first + i", "i",
           "row.up_bias[first + i]"),
    Mutant("the last element of a row is not stored", "conversions.inl.h", "count - i",
           "count - i - 1", "i * size, tail,\n" + 19 * " " + "static_cast<size_t>((count - i)"),
    Mutant("bf16 ties away from even", "simd_avx2.h", "0x7fff", "0x8000"),
    # AMX.
    Mutant("no low parts of split activations", "kernel_amx.cc", "p.low", "nullptr",
           "if (p.low == nullptr) return;\n  const uint16_t* rest"),
    Mutant("sums of the k blocks before are lost", "kernel_amx.cc", "plan.zero",
           "plan.zero || plan.load", "if (plan.zero)"),
    Mutant("the low part of Inf is NaN", "bf16_operands.inl.h", "finite", "__mmask16{0xffff}",
           "_mm512_maskz_sub_ps(finite,"),
    Mutant("one group's table for both halves", "bf16_operands.inl.h", "_mm256_set1_epi16(16)",
           "_mm256_setzero_si256()"),
    Mutant("the gate's blocks for the up half", "amx_job.cc", "task.count", "0",
           "task.up_first = task.count"),
    Mutant("no last row of A in a tile", "kernel_amx.cc", "rows", "rows - 1",
           "if (m < rows && k0 < k)"),
    # bf16 dot products.
    Mutant("dot: no low parts of split activations", "bf16_avx512bf16.cc", "kTerms", "1",
           "term < kTerms"),
    Mutant("dot: the last row of A left out", "bf16_avx512bf16.cc", "m", "m - 1",
           "if (i < m) MultiplyRows<1>"),
    Mutant("dot: the first column of a pair twice", "bf16_avx512bf16.cc", "row + 1", "row",
           "c, row + 1"),
    Mutant("dot: activations of the first pass for all", "bf16_avx512bf16.cc",
           "term * w.chunks + chunk", "term * w.chunks"),
    Mutant("dot: the first half's weights for both", "bf16_avx512bf16.cc", "half", "0",
           "p.panel + half * kHalfStride"),
    # Tasks and experts.
    Mutant("tasks begin at the first column of a block", "rows_job.cc",
           "columns.first % kBlockRows", "0"),
    Mutant("rows of the first MC block for all", "gemm_job.cc", "first", "0",
           "RowsOf(call, first"),
    Mutant("every chunk dequantized to the first rows", "cpu_backend.cc", "chunk", "0",
           "StoreElement(out, chunk *"),
    Mutant("scales of the first expert for all", "prepared_panels.cc", "expert", "0",
           "base + scales_offset_ + expert *"),
    # W4A8.
    Mutant("int8: no correction for the codes' offset", "unsigned_codes.inl.h", "-offset", "0.0f"),
    Mutant("int8: no correction for the activations' offset", "w4a8_vnni.cc",
           "_mm512_sub_epi32(SetWord(0), sum)", "SetWord(0)"),
    Mutant("int8: no zero points", "w4a8_kernel.inl.h", "activations.sum", "0.0f",
           "Mul(zero, Set(activations.sum))"),
    Mutant("int8: the first activation scale of a row", "w4a8_kernel.inl.h",
           "x[i * x_stride + slice]", "x[i * x_stride]"),
    Mutant("int8: scales of the first group for all", "w4a8_kernel.inl.h",
           "group - parameters.first_group", "0"),
    Mutant("int8: the last row of A left out", "w4a8_kernel.inl.h", "m", "m - 1",
           "for (; i < m; ++i)"),
    # The router.
    Mutant("router: a chosen expert can be chosen again", "cpu_router.cc", "kNever", "0.0",
           "choice_[best] = kNever"),
    Mutant("router: ties drop the earlier group", "cpu_router.cc", "sum <= worst_sum",
           "sum < worst_sum"),
    Mutant("router: a group's score is its best expert", "cpu_router.cc", "best + second", "best"),
    Mutant("router: a large guard against sums of 0", "cpu_router.cc", "1e-20", "1e-2"),
    Mutant("router: no guard against sums of 0", "cpu_router.cc", "divide ? sum : 1.0",
           "divide ? sum - 1e-20 : 1.0"),
    Mutant("router: no scaling factor", "cpu_router.cc", "options_.scaling_factor", "1.0F"),
    Mutant("router: softmax without its sum", "cpu_router.cc", "sum", "1.0",
           "if (!sigmoid) score_[e] /= sum"),
    Mutant("router: -Inf is an error", "cpu_router.cc", "logit > 0", "logit < 0"),
    Mutant("router: the last token of a task left out", "cpu_router.cc", "(task + 1) * per_task",
           "(task + 1) * per_task - 1"),
    Mutant("router: the bias of the first expert for all", "cpu_router.cc", "bias[e]", "bias[0]",
           "static_cast<double>(bias[e])"),
    Mutant("router: the last expert is no candidate", "cpu_router.cc", "choice_ + experts_",
           "choice_ + experts_ - 1", "std::max_element(choice_, choice_ + experts_)"),
    # The experts of a layer.
    Mutant("experts: gathers rows of the first expert", "cpu_experts.cc", "first", "0",
           "pass.slots.token + first"),
    Mutant("experts: gathers rows of the first MC block", "cpu_experts.cc", "first", "0",
           "rows.gather = gather + first"),
    Mutant("experts: the first matrix of a stack", "cpu_experts.cc", "matrix.index", "0",
           "gemm.expert = matrix.index;\n      gemm.a = pass.call.x"),
    Mutant("experts: no biases of gate and up", "cpu_experts.cc", "matrix.bias", "nullptr",
           "gemm.epilogue.bias = matrix.bias;\n      return"),
    Mutant("experts: up at the place of the largest expert", "cpu_experts.cc", "expert.inner()",
           "inner_", "inner + expert.inner()"),
    Mutant("experts: the gate for up", "cpu_experts.cc", "gate + width", "gate"),
    Mutant("experts: the shared gate's sigmoid of -x", "cpu_experts.cc", "-weight", "weight",
           "std::exp(-weight)"),
    Mutant("experts: weights of the first expert", "cpu_experts.cc", "first", "0",
           "gemm.epilogue.row_weight = pass.slots.weight + first"),
    Mutant("experts: half of the second result", "cpu_experts.cc", "1.0F", "0.5F",
           "add_scaled(row, 1.0F"),
    Mutant("experts: no last selection", "cpu_experts.cc", "problem_.top_k", "problem_.top_k - 1",
           "for (int64_t s = 0; s < problem_.top_k; ++s)"),
    Mutant("experts: half of a row without experts", "cpu_experts.cc", "hidden * size", "hidden",
           "std::fill(out, out + hidden * size"),
    Mutant("experts: ids of the first pass for all", "cpu_experts.cc", "first", "0",
           "part.ids += first"),
    Mutant("experts: the first output rows for every pass", "cpu_experts.cc", "first", "0",
           "static_cast<std::byte*>(call.out) + first"),
    # Their selections, sorted.
    Mutant("selections: weights of the first", "expert_slots.cc", "selections.weights[i]",
           "selections.weights[0]"),
    Mutant("selections: the number of experts is an id", "expert_slots.cc", "id >= slots.experts",
           "id > slots.experts"),
    Mutant("selections: errors count tokens of a pass", "expert_slots.cc", "selections.first", "0",
           "selections.first + i"),
    Mutant("selections: missing experts have rows", "expert_slots.cc",
           "present(id) ? begin[id]++ : -1", "begin[id]++"),
    Mutant("selections: the first token for the shared expert", "expert_slots.cc",
           "static_cast<int32_t>(t)", "0"),
]


class Omission(NamedTuple):
    file: str
    before: str
    after: str


# Instantiations that the copies do without, since a third of the compile time is theirs: callers
# take more general ones instead, and whatever a fault is in has others. Modes of groups: that of
# half slices fits all sizes; 4 bits, dense and 2:4, keep the others. Rows: 8 serve for 2 to 4.
OMISSIONS = [
    Omission("decode.inl.h",
             "if (w.group_size % kChunkK == 0) return body(bits, kind, kChunkMode);",
             "if constexpr (CodeBits(decltype(bits)::value) == 4) {\n"
             "      if (w.group_size % kChunkK == 0) return body(bits, kind, kChunkMode);\n"
             "    }"),
    Omission("decode.inl.h", "(CodeBits(decltype(bits)::value) <= 6)",
             "(CodeBits(decltype(bits)::value) == 4)"),
    Omission("gemv_avx2.cc", "m == 1 ? 1 : m <= 4 ? 4 : 8", "m == 1 ? 1 : 8"),
    Omission("gemv_avx2.cc", """      case 4:
        AddRows<kBits, kMode, kShift, 4>(pass, rows, stride, m, lanes);
        break;
""", ""),
]


def place(text: str, mutant: Mutant) -> tuple[int, int]:
    """Returns where the expression of a fault begins and ends in the text of its file."""
    where = f"{mutant.file}: fault '{mutant.what}'"
    within = mutant.within or mutant.before
    if text.count(within) != 1:
        raise SystemExit(f"{where}: expected once, found {text.count(within)} times: {within!r}")
    if within.count(mutant.before) != 1:
        raise SystemExit(f"{where}: expected once in {within!r}, found "
                         f"{within.count(mutant.before)} times: {mutant.before!r}")
    begin = text.index(within) + within.index(mutant.before)
    return begin, begin + len(mutant.before)


def with_faults(text: str, file: str) -> str:
    """Returns the text of a file with a choice in place of the expression of each of its faults."""
    edits = sorted((*place(text, mutant), number, mutant)
                   for number, mutant in enumerate(MUTANTS, 1) if mutant.file == file)
    parts = []
    at = 0
    for begin, end, number, mutant in edits:
        if begin < at:
            raise SystemExit(f"{file}: fault '{mutant.what}': overlaps another fault")
        choice = f"(::marlin::kActiveMutant == {number} ? ({mutant.after}) : ({mutant.before}))"
        parts += [text[at:begin], choice]
        at = end
    return "".join(parts) + text[at:]


def without_omissions(text: str, file: str) -> str:
    """Returns the text of a file that instantiates less."""
    for omission in OMISSIONS:
        if omission.file == file:
            if text.count(omission.before) != 1:
                raise SystemExit(f"{file}: expected once: {omission.before!r}")
            text = text.replace(omission.before, omission.after)
    return text


def included(path: Path) -> set[Path]:
    """Returns a source and the files of the project that it includes, by way of others or not."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        names = re.findall(r'^#include "(.*)"', file.read_text(encoding="utf-8"), re.MULTILINE)
        waiting += [SRC / name for name in names if (SRC / name).is_file()]
    return found


def files_to_copy() -> list[Path]:
    """Returns the files with faults and the sources whose objects depend on one of them."""
    files = [path for folder in FOLDERS for path in sorted((SRC / folder).rglob("*.*"))]
    faulty = {path for path in files if path.name in {mutant.file for mutant in MUTANTS}}
    for mutant in MUTANTS:
        if mutant.file not in {path.name for path in faulty}:
            raise SystemExit(f"{mutant.file}: fault '{mutant.what}': no such source")
    headers = {path for path in faulty if path.suffix == ".h"}
    for path in SRC.rglob("*.cc"):
        inside = any(path.is_relative_to(SRC / folder) for folder in FOLDERS)
        if not inside and included(path) & headers:
            raise SystemExit(f"{path}: includes a header with faults, and is not in {FOLDERS}")
    return [path for path in files
            if path in headers or path.suffix == ".cc" and included(path) & faulty]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("copy", type=Path, nargs="?")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        print("\n".join(str(path.relative_to(SRC)) for path in files_to_copy()))
        return 0
    if options.copy is None:
        parser.error("expected SOURCE COPY or --list")
    text = with_faults(options.source.read_text(encoding="utf-8"), options.source.name)
    text = without_omissions(text, options.source.name)
    # An unchanged copy keeps its time, so that a change of the table recompiles only its file.
    if not options.copy.exists() or options.copy.read_text(encoding="utf-8") != text:
        options.copy.parent.mkdir(parents=True, exist_ok=True)
        options.copy.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
