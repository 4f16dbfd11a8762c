#!/usr/bin/env python3
"""Mutation test of the Metal conformance cases: introduces one fault at a time into the kernel
sources and requires that the conformance program, which runs them in the simulator, fails; for the
kernels of experts and parts of those of routers, that their unit test does.

Usage: metal_mutants.py PROGRAM UNIT_TEST [--only I]... [--every N] [--jobs N]
PROGRAM is marlin_conformance of a build with the simulator, UNIT_TEST its unit.backends.metal, of
which the suites Simulated* run. With the environment variable MARLIN_MUTANTS=all,
--every is ignored: each fault compiles kernels for seconds, so `./dev test` tries a sample and
the nightly stage `mutants` all.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# The folders of the kernels' files, whose names differ.
FOLDERS = (Path("backends/metal/kernels"), Path("plan/integers"))

# Cases that cover one kernel family: a few formats with every systematic shape.
FEW_ROWS = r"^gemm/(fp4_e2m1|u4|int3)/metal/marlin_gemv(_wide)?/"
DIRECT = r"^gemm/(u4|int3)/metal/marlin_gemm_(split_k|fused)"
STAGED = r"^gemm/fp4_e2m1/metal/marlin_gemm_fp4"
FEW_ROWS_BIASED = r"^gemm/u4/metal/marlin_gemv(_wide)?/.*bias"
TABLES = r"^gemm/(nf3|nf4)/metal/marlin_gemv(_wide)?/"
FEW_ROWS_GATED = r"^gemm/(fp4_e2m1|u4)/metal/marlin_gemv(_wide)?/.*gated"
DIRECT_GATED = r"^gemm/(u4|int3)/metal/marlin_gemm_(split_k|fused).*gated"
FINISHED = r"^gemm/(u4|nf3|fp8_e4m3)/metal/marlin_gemv_wide/"
DECODED = r"^(gemm/.*/metal/marlin_gemv_wide|dequantize/.*)/"
SPARSE = r"^gemm/(s4|nf4)/metal/marlin_gemv(_wide)?/.*_sparse/"
DEQUANTIZED = r"^dequantize/(u4|int3)/"

SORT_BARRIER = ("metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup | "
                "metal::mem_flags::mem_device);")
# Tests of the kernels of experts and routers, as filters of googletest.
UNIT_TESTS = "Simulated"
EXPERTS = "SimulatedExperts.*"
ROUTERS = "SimulatedRouter.*"
FUSED_ROUTERS = "SimulatedFusedRouter.*"
ROWS = "SimulatedRows.*"
BATCHES = "SimulatedBatch.*"
TWO_STRIPS = "SimulatedCounters.TwoStrips*"
SAMPLERS = "SimulatedSampler.*"
RECURRENT = "SimulatedRecurrent.*"
ATTENTION = "SimulatedAttention.*"
HEAD_PRODUCTS = "SimulatedHeadProduct.*"
GATHERED = "SimulatedGather.*"

ROUTED = r"^router/metal/.*/tokens37/"
ROUTED_WIDE = r"^router/metal/.*/wide/"
ROUTED_PADDED = r"^router/metal/.*/padded/"
ROUTED_ERRORS = r"^router/metal/.*/(nan|inf|none_finite|nan_bias)/"

SIMDGROUP_BARRIER = "metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);"

BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"


class Mutant(NamedTuple):
    what: str
    file: str
    before: str
    after: str
    cases: str
    which: int = 0  # Which occurrence of `before`.


MUTANTS = [
    # GEMV.
    Mutant("no barrier after the table is filled", "gemv.h", BARRIER, "", TABLES, 0),
    Mutant("no barrier before sums take the table's place", "gemv.h",
           "if (KeepsTable()) " + BARRIER, "", TABLES),
    Mutant("no barrier before sums are read", "gemv.h", BARRIER, "", FEW_ROWS, 2),
    Mutant("a barrier of the simdgroup only", "gemv.h", "threadgroup_barrier(",
           "simdgroup_barrier(", FEW_ROWS, 2),
    Mutant("a barrier of device memory only", "gemv.h", "mem_flags::mem_threadgroup",
           "mem_flags::mem_device", FEW_ROWS, 2),
    Mutant("a barrier that orders nothing", "gemv.h", "mem_flags::mem_threadgroup",
           "mem_flags::mem_none", FEW_ROWS, 2),
    Mutant("both codes of a pair of the table's first", "gemv.h", "table[i >> bits]",
           "table[i & ((1 << bits) - 1)]", TABLES),
    Mutant("sums of a group that are not scaled", "gemv.h", "fma(at.group[i].scale, sum,",
           "fma(1.0f, sum,", FEW_ROWS),
    Mutant("sums of the group before", "gemv.h", "at.part[i][r] = float2(0.0f)",
           "at.part[i][r] = s == 0 ? float2(0.0f) : at.part[i][r]", FEW_ROWS),
    Mutant("integer zeros ignored", "gemv.h", "IntegerBias(strip, j) + group.extra",
           "IntegerBias(strip, j)", FEW_ROWS),
    Mutant("biases without the scale", "gemv.h", "fma(factors.pair[j], group.scale,",
           "fma(factors.pair[j], 1.0f,", FEW_ROWS_BIASED),
    Mutant("strips beyond the last are read", "gemv.h", "metal::min(strip, last_strip)", "strip",
           TWO_STRIPS),
    Mutant("every simdgroup adds all chunks", "gemv.h", "{first_row, first_chunk,",
           "{first_row, 0,", FEW_ROWS),
    Mutant("every other chunk of a simdgroup left out", "gemv.h", "chunk += own.step)",
           "chunk += 2 * own.step)", FEW_ROWS),
    Mutant("reduction over the wrong lanes", "gemv.h", "ushort(16)", "ushort(8)", FEW_ROWS),
    Mutant("half of the lanes left out of the reduction", "gemv.h",
           "sum += metal::simd_shuffle_xor(sum, ushort(4));", "", FEW_ROWS),
    Mutant("several lanes store a sum", "gemv.h", "(place.lane & kRowBits) == 0",
           "(place.lane & 2) == 0", FEW_ROWS),
    Mutant("a simdgroup's sum left out", "gemv.h", "int i = 1", "int i = 2", FEW_ROWS),
    Mutant("the wrong activations", "gemv.h", "quad + s * (kBlockK / 4)",
           "quad + s * (kBlockK / 8)", FEW_ROWS),
    Mutant("rows of the wrong threadgroup", "gemv.h", "int(group.y) * kRows", "int(group.y)",
           r"^(batch_invariant/.*/metal/marlin_gemv_wide|batch_invariant/.*/metal/planned)/"),
    # Activations.
    Mutant("rows beyond m are read", "activations.h", "!whole_m && row >= p.m", "false",
           DIRECT),
    Mutant("a vector load across the end of k", "activations.h", "k + 4 <= p.k", "k <= p.k",
           FEW_ROWS),
    Mutant("elements beyond k are read", "activations.h", "whole_k || k + i < p.k", "true",
           FEW_ROWS),
    Mutant("rows are contiguous", "activations.h", "long(stored) * p.input_stride",
           "long(stored) * p.k", FEW_ROWS),
    Mutant("rows are not gathered", "activations.h", "gathered ? input.gather[row] : row", "row",
           EXPERTS),
    # Decoders.
    Mutant("the first group's scale for all groups", "decode.h",
           "whole_k ? index : metal::min(index, strip.groups - 1)", "0", DECODED),
    Mutant("scales of a group beyond the last", "decode.h",
           "whole_k ? index : metal::min(index, strip.groups - 1)", "index", DECODED),
    Mutant("groups of 64 as of 32", "decode.h", "s >> (group_log2 - 5)", "s", DECODED),
    Mutant("groups of 16 as of 32", "decode.h", "2 * s + FragmentRow(lane) / 4", "2 * s", DECODED),
    Mutant("scales of a neighbour", "decode.h", "uint(FragmentColumn(lane) / 2)",
           "uint(FragmentColumn(lane) / 2 ^ 1)", DECODED),
    Mutant("no global scale", "decode.h", "strip.global_scale * factor", "factor", DECODED),
    Mutant("zeros ignored", "decode.h", "value -= group.extra", "value -= 0.0f", DECODED),
    Mutant("zeros subtracted after the scale", "decode.h", "group_extra == kExtraZeros) value -=",
           "group_extra == kExtraZeros) value -= group.scale *", DECODED),
    Mutant("biases ignored", "decode.h", "value += group.extra", "value += 0.0f", DECODED),
    Mutant("global scale always multiplies", "decode.h", "if (global_divides)", "if (false)",
           DECODED),
    Mutant("biases always f16", "decode.h", "PairAt(strip.extras, extra_type, at)",
           "PairAt(strip.extras, kElementF16, at)", DECODED),
    Mutant("nibbles in the wrong order", "decode.h", "codes.low[s] >> (4 * j)",
           "codes.low[s] >> (4 * (3 - j))", DECODED),
    Mutant("no third bit", "decode.h", "0x00010001u) << 2", "0x00000000u) << 2", DECODED),
    Mutant("the third bit of another block", "decode.h", "codes.low.z >> (4 * s + j)",
           "codes.low.z >> (4 * j + s)", DECODED),
    Mutant("two bits of another block", "decode.h", "8 * (s % 2) + 2 * j)) & 0x00030003u;",
           "2 * j)) & 0x00030003u;", DECODED),
    Mutant("the low words of 8 bits twice", "decode.h", "s < 2 ? codes.low : codes.high",
           "s < 2 ? codes.low : codes.low", DECODED),
    Mutant("fp4 without its sign", "decode.h", "signs & 0x80008000u", "signs & 0x80000000u",
           DECODED),
    Mutant("integers without their offset", "decode.h", "(1024 >> place) + strip.code_offset",
           "1024 >> place", DECODED),
    Mutant("integers in place with one bias", "decode.h", "1024 >> place", "1024", DECODED),
    Mutant("e4m3 by a power too few", "decode.h", "256.0f", "128.0f", DECODED),
    Mutant("both codes look up the first value", "decode.h", "strip.table[pair >> 16]",
           "strip.table[pair & 0xffffu]", DECODED),
    Mutant("16-bit weights of the first block", "decode.h", "words[s * kLanes + lane]",
           "words[lane]", DECODED),
    Mutant("32-bit pairs swapped", "decode.h", "values.pair[1] = low.zw", "values.pair[1] = low.wz",
           DECODED),
    Mutant("codes of the next strip", "decode.h", "weights.codes + strip *",
           "weights.codes + (strip + 1) *", DECODED),
    Mutant("2:4: the first output's positions for both", "decode.h", "(metadata >> 4) & 12u",
           "metadata & 12u", SPARSE),
    Mutant("2:4: position 3 is 2", "decode.h", "<< (metadata & 12u);", "<< (metadata & 8u);",
           SPARSE),
    Mutant("2:4: pruned integers are the least", "decode.h",
           "if (code_kind == kCodesInteger) codes.low ^=", "if (false) codes.low ^=", SPARSE),
    Mutant("2:4: the metadata of the first block for all", "decode.h", "metadata >> (8 * s)",
           "metadata", SPARSE),
    # Elements and the epilogue.
    Mutant("bf16 rounded down", "elements.h", "0x7fffu + ((bits >> 16) & 1u)", "0u", DECODED),
    Mutant("bf16 ties away from even", "elements.h", "0x7fffu + ((bits >> 16) & 1u)", "0x8000u",
           DECODED),
    Mutant("e8m0 off by one", "elements.h", "uint(bits) << 23", "uint(bits + 1) << 23", DECODED),
    Mutant("gated rows beyond m are stored", "epilogue.h", "row >= p.m || ", "", DIRECT_GATED),
    Mutant("rows beyond m are stored", "epilogue.h", "row >= p.m || ", "", DIRECT, 1),
    Mutant("columns beyond n are stored", "epilogue.h", " || column >= p.n", "", FEW_ROWS),
    Mutant("rows of the output are contiguous", "epilogue.h", "row) * p.output_stride",
           "row) * p.n", FINISHED),
    Mutant("bias after the activation", "epilogue.h",
           "Activate(Biased(output, column, sum))", "Biased(output, column, Activate(sum))",
           r"^gemm/.*/metal/marlin_gemv_wide/.*bias.*(relu|silu|gelu)"),
    Mutant("the bias of the first column", "epilogue.h", "bias_type, column)", "bias_type, 0)",
           FINISHED),
    Mutant("the weight of the first row", "epilogue.h", "output.row_weight[row]",
           "output.row_weight[0]", FINISHED),
    Mutant("GELU with a wrong constant", "epilogue.h", "0.044715f", "0.0447f",
           r"^gemm/.*/metal/marlin_gemv_wide/.*gelu"),
    # Split-K reduction.
    Mutant("a split-K partial left out", "finish.h", "int split = 1", "int split = 2", DIRECT),
    Mutant("the gate's sum for the up half", "finish.h", "partials, at + columns, p)",
           "partials, at, p)", FINISHED),
    Mutant("the gate's bias for the up half", "epilogue.h",
           "Biased(output, column + columns", "Biased(output, column",
           r"^gemm/.*/metal/planned/.*bias.*gated"),
    Mutant("gated columns beyond the last are stored", "epilogue.h", " || column >= columns", "",
           DIRECT_GATED),
    Mutant("the gate's strip for the up half", "gemv.h",
           "(i > 0 || !is_gate ? half_strips : 0)", "0", FEW_ROWS_GATED),
    Mutant("the gate's simdgroups for the up half", "gemv.h",
           "apart ? simdgroups * kOfSimdgroup : kOfStrip", "0", FEW_ROWS_GATED),
    Mutant("the gate's strips for the up half", "gemm_direct.h", " + j / run * half_strips", "",
           DIRECT_GATED),
    Mutant("the gate's fragments for the up half", "gemm_direct.h",
           "sums.fragment[i][j + kStrips / 2]", "sums.fragment[i][j]", DIRECT_GATED),
    Mutant("all split-K partials in one place", "epilogue.h", "(long(split) * p.m + row)",
           "(long(row))", DIRECT),
    # Kernels that load fragments directly from device memory.
    Mutant("strips beyond the last are read", "gemm_direct.h",
           "metal::min(strip + j % run, last_strip)", "strip + j % run", DIRECT),
    Mutant("chunks beyond the last are read", "gemm_direct.h",
           "metal::min(first_chunk + p.steps_of_split, p.chunks)",
           "first_chunk + p.steps_of_split", DIRECT),
    Mutant("every split begins at the first chunk", "gemm_direct.h",
           "int(group.z) * p.steps_of_split", "0", DIRECT),
    Mutant("columns of A swapped", "gemm_direct.h",
           "float2(a.block[i].first[f], a.block[i].second[f])",
           "float2(a.block[i].second[f], a.block[i].first[f])", DIRECT),
    Mutant("rows of a fragment in another order", "gemm_direct.h", "row + FragmentRow(lane), first",
           "row + (FragmentRow(lane) ^ 1), first", DIRECT),
    Mutant("both columns from one element", "gemm_direct.h", "column + 1, sum.y",
           "column + 1, sum.x", DIRECT),
    Mutant("one row of fragments for all", "gemm_direct.h", "row + i * kSide, chunk",
           "row, chunk", DIRECT),
    # Tiles in threadgroup memory.
    Mutant("no barrier after the first tile", "gemm_staged.h", BARRIER, "", STAGED, 2),
    Mutant("no barrier between k-iterations", "gemm_staged.h", BARRIER, "", STAGED, 3),
    Mutant("single buffer: no barrier before the MMA", "gemm_staged.h", BARRIER, "", STAGED, 0),
    Mutant("single buffer: no barrier after the MMA", "gemm_staged.h", BARRIER, "", STAGED, 1),
    Mutant("no barrier before a tile is stored", "gemm_staged.h", BARRIER, "", STAGED, 4),
    Mutant("no barrier after a stored tile", "gemm_staged.h", BARRIER, "", STAGED, 5),
    Mutant("barriers of the simdgroup only", "gemm_staged.h", "metal::threadgroup_barrier(",
           "metal::simdgroup_barrier(", STAGED, 3),
    Mutant("the next tile into the same buffer", "gemm_staged.h", "(1 - buffer) * kBufferQuads",
           "buffer * kBufferQuads", STAGED),
    Mutant("one chunk's codes for all chunks", "gemm_staged.h", "step % kBlocksOfChunk != 0",
           "step != 0", STAGED),
    Mutant("the first block of a chunk for all", "gemm_staged.h",
           "chunk, step % kBlocksOfChunk, lane", "chunk, 0, lane", STAGED),
    Mutant("simdgroups multiply the same outputs", "gemm_staged.h",
           "kInputBytes / 4 +\n                                     simdgroup % 2 *",
           "kInputBytes / 4 +\n                                     0 *", STAGED),
    Mutant("simdgroups store in one place", "gemm_staged.h",
           "simdgroup / 2 * kFragments * kSide * kTile +", "0 * kTile +", STAGED),
    Mutant("tile rows and columns swapped", "gemm_staged.h",
           "tile % row_tiles * kTile, tile / row_tiles * kTileStrips",
           "tile / row_tiles * kTile, tile % row_tiles * kTileStrips", STAGED),
    Mutant("a split continues past its end", "gemm_staged.h",
           "metal::min(end_split * p.steps_of_split, steps)", "steps", STAGED),
    Mutant("partial sums are not cleared", "gemm_staged.metal", "] = 0.0f", "] += 0.0f", STAGED),
    Mutant("every partial sum is cleared late", "gemm_staged.metal",
           "unit % p.units_of_group == 0", "unit % p.units_of_group != 0", STAGED),
    # Dequantization.
    Mutant("k beyond the end is stored", "dequantize.metal", "if (k >= p.k) continue;", "",
           DEQUANTIZED),
    Mutant("chunks beyond the last are decoded", "dequantize.metal",
           "if (chunk >= p.chunks) return;", "", DEQUANTIZED),
    Mutant("the second output of a pair twice", "dequantize.metal", "w.pair[j].x", "w.pair[j].y",
           DEQUANTIZED),
    # Sort of the selections by expert.
    # Rows with matrices of their own.
    Mutant("the codes of the first matrix", "gather_gemv.h", "matrix * p.codes_bytes", "0",
           GATHERED),
    Mutant("the scales of the first matrix", "gather_gemv.h", "matrix * p.scales_bytes", "0",
           GATHERED),
    Mutant("the zeros of the first matrix", "gather_gemv.h", "matrix * p.extras_bytes", "0",
           GATHERED),
    Mutant("the global scale of the first matrix", "gather_gemv.h", "global_scales[id]",
           "global_scales[0]", GATHERED),
    Mutant("a matrix beyond the stack", "gather_gemv.h", "id < p.matrices", "id <= p.matrices",
           GATHERED),
    Mutant("a matrix before the stack", "gather_gemv.h", "id >= 0 && ", "", GATHERED),
    Mutant("every id has a row of its own", "gather_gemv.h", "row / p.ids_of_row", "row",
           GATHERED),
    Mutant("columns beyond the last stored", "gather_gemv.h", " || column >= p.product.n", "",
           GATHERED),
    Mutant("no barrier before ranks are counted", "sort_experts.h", SORT_BARRIER, "", EXPERTS),
    Mutant("a barrier of threadgroup memory before counts", "sort_experts.h",
           "mem_threadgroup | metal::mem_flags::mem_device", "mem_threadgroup", EXPERTS),
    Mutant("no barrier between scan and scatter", "sort_experts.metal",
           "threadgroup_barrier(mem_flags::mem_device);", "", EXPERTS),
    Mutant("no barrier between ranks and scan", "sort_experts.metal",
           "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);", "", EXPERTS),
    Mutant("no barrier before the least is read", "sort_experts.h", BARRIER, "", EXPERTS, 0),
    Mutant("no barrier before the scan's sums are read", "sort_experts.h", BARRIER, "", EXPERTS, 1),
    Mutant("no barrier after the scan's sums are read", "sort_experts.h", BARRIER, "", EXPERTS, 2),
    Mutant("ranks count the selection itself", "sort_experts.h", "other < thread_index",
           "other <= thread_index", EXPERTS),
    Mutant("the first selection counts for all", "sort_experts.h", "after == 0", "before == 0",
           EXPERTS),
    Mutant("counts are not cleared", "sort_experts.h", "counts[e] = 0;", "continue;", EXPERTS),
    Mutant("blocks without offsets", "sort_experts.h", "*count = sum;", "*count = 0;", EXPERTS),
    Mutant("256 experts begin anew", "sort_experts.h",
           "carried += scratch->of_simdgroup[i];", "", EXPERTS),
    Mutant("no slots for the shared expert", "sort_experts.h", "rows = p.tokens;", "rows = 0;",
           EXPERTS),
    Mutant("ids beyond the last expert", "sort_experts.h", "if (id < 0 || id >= p.experts)",
           "if (id < 0)", EXPERTS),
    Mutant("negative ids", "sort_experts.h", "if (id < 0 || id >= p.experts)",
           "if (id >= p.experts)", EXPERTS),
    Mutant("negative ids are not reported", "sort_experts.h", "memory.ids[selection] < 0 || ", "",
           EXPERTS),
    Mutant("wrong selections of 256 blocks only", "sort_experts.h",
           "block < blocks; block += kSortThreads",
           "block < metal::min(blocks, kSortThreads); block += kSortThreads", EXPERTS),
    Mutant("absent experts have slots", "sort_experts.h", "== kNoKind ? -1 : id", "== 99 ? -1 : id",
           EXPERTS),
    Mutant("tiles count from the first expert", "sort_experts.h", "(tile - first_tiles[expert])",
           "tile", EXPERTS),
    Mutant("the GEMV's tiles for the GEMM", "sort_experts.h", "memory.begin + 2 * ends, tile",
           "memory.begin + ends, tile", EXPERTS),
    # GEMMs of experts.
    Mutant("matrices of every kind", "expert_gemm.h", " || tile.matrix->kind != OwnKind()", "",
           EXPERTS),
    Mutant("tiles that do not exist", "expert_gemm.h", "place.x < 0 || ", "", EXPERTS),
    Mutant("the GEMV's tiles for every launch", "expert_gemm.h", "p.first_tile + int(group.y)",
           "int(group.y)", EXPERTS),
    Mutant("tokens of the first expert", "expert_gemm.h", "buffers.tokens + first_slot",
           "buffers.tokens", EXPERTS),
    Mutant("rows of the first expert", "expert_gemm.h", "gathered ? 0 : first_slot * p.input",
           "gathered ? 0 : 0 * p.input", EXPERTS),
    Mutant("results of the first expert", "expert_gemm.h", "buffers.out + first_slot *",
           "buffers.out + 0 *", EXPERTS),
    Mutant("up in the gate's place", "expert_gemm.h", "long(group.z) * parts[kPartDown].k", "0",
           EXPERTS),
    Mutant("rows beyond the expert's are stored", "expert_gemm.h", "row >= tile.rows || ", "",
           EXPERTS),
    Mutant("columns beyond the matrix are stored", "expert_gemm.h", " || column >= tile.matrix->n",
           "", EXPERTS),
    Mutant("strips beyond the matrix", "expert_gemm.h", " || first_column >= tile.matrix->n", "",
           EXPERTS),
    Mutant("strips of a simdgroup beyond the matrix", "expert_gemm.h",
           "metal::min(strip + j % run, last_strip)", "strip + j % run", EXPERTS),
    Mutant("the gate's weights for up: GEMV", "expert_gemm.h", "*tile.matrix : *tile.up;",
           "*tile.matrix : *tile.matrix;", EXPERTS),
    Mutant("the gate's weights for up: GEMM", "expert_gemm.h", "*tile.matrix : *tile.up,",
           "*tile.matrix : *tile.matrix,", EXPERTS),
    Mutant("the gate's bias for up", "expert_gemm.h", "WithBias(tile.up,", "WithBias(tile.matrix,",
           EXPERTS),
    Mutant("the bias of the first column", "expert_gemm.h", "matrix->bias[column]",
           "matrix->bias[0]", EXPERTS),
    Mutant("up begins at a later chunk", "expert_gemm.h", "place.simdgroup - simdgroups;",
           "place.simdgroup;", EXPERTS),
    Mutant("the gate's sums for up", "expert_gemm.h", "sums + i + simdgroups * kStride", "sums + i",
           EXPERTS),
    Mutant("the gate's fragments for up", "expert_gemm.h", "(j + kStrips / 2) % kStrips", "j",
           EXPERTS),
    Mutant("fragments beyond the gate's are stored", "expert_gemm.h",
           "if (gated && j >= kStrips / 2) continue;", "", EXPERTS),
    Mutant("rows of the first simdgroup", "expert_gemm.h",
           "tile.row + simdgroup / kSimdgroupColumns * (kRowFragments * kSide)", "tile.row",
           EXPERTS),
    Mutant("the scale of another matrix", "expert_gemm.h", "= matrix.global_scale", "= 2.0f",
           EXPERTS),
    # Activation and sum of experts.
    Mutant("up clamped from above only", "expert_gate.h", "AtMost(-AtMost(-up, limit),",
           "AtMost(up,", EXPERTS),
    Mutant("the gate is not clamped", "expert_gate.h", "AtMost(gate, limit)", "gate",
           EXPERTS),
    Mutant("clamped NaNs", "expert_gate.h", "!IsNan(x) && x > limit", "!(x <= limit)", EXPERTS),
    Mutant("the clamped gate without alpha", "expert_gate.h", "alpha * g", "g", EXPERTS),
    Mutant("the activation twice", "combine_experts.h", "if (is_done || ", "if (", EXPERTS),
    Mutant("the activation of other experts' rows", "combine_experts.h",
           "metal::min(tile.y + p.tile_rows, rows)", "tile.y + p.tile_rows", EXPERTS),
    Mutant("the gate times itself", "combine_experts.h", "gate[inner]", "gate[0]", EXPERTS),
    Mutant("the weight of another selection", "combine_experts.h", "buffers.weights[selection]",
           "buffers.weights[token * p.top_k]", EXPERTS),
    Mutant("slots of absent experts are added", "combine_experts.h", "if (slot < 0) continue;", "",
           EXPERTS),
    Mutant("the shared expert without its gate", "combine_experts.h",
           "TimesSigmoid(value, buffers.scores[slot])", "value", EXPERTS),
    Mutant("the shared expert of the first token", "combine_experts.h",
           "buffers.begin[p.experts]) + token", "buffers.begin[p.experts])", EXPERTS),
    Mutant("unsorted: slots of absent experts are added", "combine_experts.h",
           "== kNoKind ? -1 : selection", "== kNoKind ? selection : selection", EXPERTS),
    Mutant("rows of the sum are contiguous", "combine_experts.h", "token * p.output_stride",
           "token * p.columns", EXPERTS),
    # Few tokens without sorting.
    Mutant("unsorted: matrices of every kind", "expert_decode.h",
           "matrix->kind != OwnKind() || ", "", EXPERTS),
    Mutant("unsorted: strips beyond the matrix", "expert_decode.h",
           " || first_column >= matrix->n", "", EXPERTS),
    Mutant("unsorted: ids beyond the experts", "expert_decode.h",
           "(id < 0 || id >= p.experts)) return nullptr", "id < 0) return nullptr", EXPERTS),
    Mutant("unsorted: a wrong id is not reported", "expert_decode.h", "first = i;", "", EXPERTS),
    Mutant("unsorted: the token of another selection", "expert_decode.h", "slot / p.top_k :",
           "slot % p.top_k :", EXPERTS),
    Mutant("unsorted: up without its bias", "expert_decode.h", "WithBias(matrix + 1, column, up)",
           "up", EXPERTS),
    Mutant("unsorted: the gate's sums for up", "expert_decode.h",
           "sums + kStripOutputs + place.lane", "sums + place.lane", EXPERTS),
    Mutant("unsorted: a part of k left out", "expert_decode.h", "part = 1; part <",
           "part = 2; part <", EXPERTS),
    Mutant("unsorted: no barrier before results are added", "expert_decode.h", BARRIER, "",
           EXPERTS),
    Mutant("unsorted: the weight of the first selection", "expert_decode.h",
           "buffers.weights[slot]", "buffers.weights[0]", EXPERTS),
    Mutant("unsorted: the shared expert without its gate", "expert_decode.h",
           "TimesSigmoid(value, buffers.scores[slot])", "value", EXPERTS),
    Mutant("unsorted: results of other kinds", "expert_decode.h",
           " || parts[kPartDown].kind != OwnKind()", "", EXPERTS),
    Mutant("unsorted: columns beyond the last are stored", "expert_decode.h",
           " || column >= p.columns", "", EXPERTS),
    # Double precision on integers.
    Mutant("products without a carry", "soft_double.h", " + (carried >> 32)", "", ROUTED),
    Mutant("reciprocals in fp32", "soft_double.h", "step < 2; ++step", "step < 0; ++step", ROUTED),
    Mutant("a wrong term of the exponential", "soft_double.h", "kTopBit / 24 -", "kTopBit / 25 -",
           ROUTED),
    Mutant("the exponential without its power of two", "soft_double.h",
           "-int(binary >> kRestBits)", "0", ROUTED),
    Mutant("the exponential's eighth", "soft_double.h", "i < 3; ++i", "i < 2; ++i", ROUTED),
    Mutant("subnormal weights with all digits", "soft_double.h",
           "metal::max(least - a.exponent, 0)", "0", ROUTED_WIDE),
    Mutant("a weight of 0 has an exponent", "soft_double.h", "if (a.mantissa == 0) return 0;", "",
           ROUTERS),
    Mutant("doubles of different signs are added", "soft_double.h",
           "differ ? 0ul - aligned : aligned", "aligned", ROUTED),
    Mutant("negative doubles are large", "soft_double.h", "? ~bits : bits | kTopBit",
           "? bits : bits | kTopBit", ROUTED),
    Mutant("zeros differ", "soft_double.h", "if (bits << 1 == 0) return kTopBit;", "", ROUTERS),
    # Routers.
    Mutant("+Inf is routed", "route.h", "bits != kFloatInfinity && ", "", ROUTED_ERRORS),
    Mutant("NaN is routed", "route.h", " && magnitude <= kFloatInfinity) continue", ") continue",
           ROUTED_ERRORS),
    Mutant("NaN is reported as Inf", "route.h", "(bits == kFloatInfinity ? 1u : 0u)", "1u",
           ROUTED_ERRORS),
    Mutant("a row of -Inf is routed", "route.h", "if (!metal::simd_any(is_finite))", "if (false)",
           ROUTED_ERRORS),
    Mutant("the last error", "route.h", "atomic_fetch_min_explicit", "atomic_fetch_max_explicit",
           ROUTED_ERRORS),
    Mutant("errors of the first token", "route.h", "uint(row.row) * uint(RouterKeys(p.experts))",
           "0u", ROUTED_ERRORS),
    Mutant("a NaN bias is used", "route.h", "HasNanBias(row, lane, p)) return;", "false) return;",
           ROUTED_ERRORS),
    Mutant("no barrier before other lanes' logits", "route.h", SIMDGROUP_BARRIER, "", ROUTED, 3),
    Mutant("no barrier before a group's keys", "route.h", SIMDGROUP_BARRIER, "", ROUTED, 0),
    Mutant("no barrier before groups are compared", "route.h", SIMDGROUP_BARRIER, "", ROUTED, 1),
    Mutant("no barrier after groups are dropped", "route.h", SIMDGROUP_BARRIER, "", ROUTED, 2),
    Mutant("ties go to the higher expert", "route.h", "b.expert < a.expert", "b.expert > a.expert",
           ROUTED),
    Mutant("a group has its best expert alone", "route.h",
           "if (size == 1 || best_of_group == 1) return best;", "return best;", ROUTED),
    Mutant("one group too many", "route.h", "before < p.top_groups", "before <= p.top_groups",
           ROUTED),
    Mutant("ties keep the higher group", "route.h", "sum == mine && other < group",
           "sum == mine && other > group", ROUTED),
    Mutant("an expert is selected twice", "route.h", "scratch.keys[best.expert] = 0;", "", ROUTED),
    Mutant("a lane has one expert", "route.h", "      of_lane = BestOfLane(scratch, lane, p);", "",
           ROUTED),
    Mutant("the choice bias is ignored", "route.h", "if (p.has_choice_bias) choice =",
           "if (false) choice =", ROUTED),
    Mutant("the choice bias in the weights", "route.h",
           "ScaledBits(Multiply(score, factor), scale)",
           "ScaledBits(Multiply(score, factor), as_type<uint>(row.choice_bias[0]))", ROUTED),
    Mutant("scores of 0 are divided by 0", "route.h", "Add(sum, Wide{0xbce5086492111800ul, -67})",
           "sum", ROUTED),
    Mutant("weights are not normalized", "route.h", "p.normalize || of_chosen", "of_chosen",
           ROUTED),
    Mutant("weights are always normalized", "route.h", "p.normalize || of_chosen", "true", ROUTED),
    Mutant("weights are not scaled", "route.h", "= WideOfFloat(p.scaling_factor)",
           "= Wide{kTopBit, 0}", ROUTED),
    Mutant("the scale's sign", "route.h", " ^ sign)", ")", ROUTERS),
    Mutant("the selected softmax relative to 0", "route.h", "if (of_chosen) softmax.largest",
           "if (false) softmax.largest", ROUTED),
    Mutant("sigmoids beyond double precision", "route.h",
           "RoundedShift(sum.mantissa, kDropped), sum.exponent + kDropped",
           "sum.mantissa, sum.exponent", ROUTERS),
    Mutant("sigmoids of exponents beyond double precision", "route.h",
           "if (is_negative && y > kLargestExponent) return Wide{0, 0};", "", ROUTERS),
    Mutant("large logits are far apart", "route.h", "distance < 1024.0f ? FixedOf(distance) : kFar",
           "kFar", ROUTERS),
    Mutant("negative logits are positive", "route.h", "(of_largest >> 31) != 0 ? 0ul - from : from",
           "from", ROUTERS),
    Mutant("rows of ids are contiguous", "route.metal", "row) * p.ids_stride", "row) * p.top_k",
           ROUTED_PADDED),
    Mutant("rows of weights are contiguous", "route.metal", "row) * p.weights_stride",
           "row) * p.top_k", ROUTED_PADDED),
    Mutant("rows of logits are contiguous", "route.metal", "row) * p.logits_stride",
           "row) * p.experts", ROUTED_PADDED),
    Mutant("every simdgroup has all chunks", "route.metal", "chunk += step", "chunk += 1",
           FUSED_ROUTERS),
    Mutant("no barrier before logits are read", "route.metal",
           "threadgroup_barrier(mem_flags::mem_threadgroup);", "", FUSED_ROUTERS),
    Mutant("the first part of a sum alone", "route.metal", "part = 1; part < parts",
           "part = 1; part < 1", FUSED_ROUTERS),
    Mutant("logits without their bias", "route.metal", "has_bias ? sum +", "false ? sum +",
           FUSED_ROUTERS),
    Mutant("several lanes store a logit", "route.metal", "(lane & kRowBits) != 0",
           "(lane & 2) != 0", FUSED_ROUTERS),
    Mutant("the first strip for all", "route.metal", "StripAt(i % strips,", "StripAt(0,",
           FUSED_ROUTERS),
    Mutant("the first row for all", "route.metal", "int(row), i / strips", "0, i / strips",
           FUSED_ROUTERS),
    # Operations on rows.
    Mutant("ids are 32 bits", "rows_elements.h", "return p.wide ?", "return false ?", ROWS),
    Mutant("ids have no limit", "rows_elements.h", "index >= 0 && index < p.limit",
           "index < p.limit", ROWS),
    Mutant("the last id is reported", "rows_elements.h", "int at = 0;", "int at = p.count - 1;",
           ROWS),
    Mutant("outputs begin at the buffer's first byte", "rows_elementwise.metal",
           "out += p.out.first;", "", ROWS, 1),
    Mutant("the slot of another token", "rows_elementwise.metal", "slot_of[group.z]",
           "slot_of[0]", ROWS),
    Mutant("the limit of gates is their factor", "rows_elementwise.metal",
           "p.gate_limit, p.gate_alpha", "p.gate_alpha, p.gate_limit", ROWS),
    Mutant("sums over lanes lose a step", "rows_norm.h", "step = kLanes / 2", "step = kLanes / 4",
           ROWS),
    Mutant("a sum that is not finite has two parts", "rows_norm.h",
           "IsFinite(sum.x) ? sum.x + sum.y : sum.x", "sum.x + sum.y", ROWS),
    Mutant("no barrier between simdgroups of a row", "rows_norm.metal",
           "threadgroup_barrier(mem_flags::mem_threadgroup);", "", ROWS),
    Mutant("every simdgroup has the first columns", "rows_norm.metal",
           "simdgroup * kLanes + lane", "lane", ROWS),
    Mutant("angles without the exponent's bits", "rows_rotary.h", "zeros - kQuarterBits",
           "zeros + 1 - kQuarterBits", ROWS),
    Mutant("angles of the first quadrant", "rows_rotary.h", "quadrant == 1 || quadrant == 2",
           "quadrant == 1", ROWS),
    Mutant("frequencies have no sign", "rows_rotary.h", "!= (as_type<uint>(frequency) >> 31 != 0)",
           "!= false", ROWS),
    Mutant("features after RoPE are left", "rows_rotary.h", "2 * head.pairs + lane",
           "2 * head.pairs + kLanes + lane", ROWS),
    Mutant("lanes write before all have read", "rows_rotary.h",
           "metal::simdgroup_barrier(metal::mem_flags::mem_device);", "", ROWS),
    Mutant("rows out of order are stored", "rows_append.metal",
           "row < begin || position != long(memory.positions[begin]) + (row - begin)",
           "row < begin", ROWS),
    Mutant("blocks beyond the table", "rows_append.metal", "block >= pages.blocks",
           "block > pages.blocks", ROWS),
    Mutant("values in the place of keys", "rows_append.metal", "p.cache.first_value + ", "", ROWS),
    Mutant("e4m3 does not saturate", "elements.h", "metal::min(code, kMost)", "(code & 0x7fu)",
           ROWS),
    Mutant("e4m3 without ties to even", "elements.h", "0x7ffffu + (bits >> 20 & 1u)", "0x80000u",
           ROWS),
    Mutant("the last wrong row is reported", "rows_advance.metal", "first = metal::min(first",
           "first = metal::max(first", ROWS),
    Mutant("no barrier in a Hadamard block", "rows_transform.metal",
           "threadgroup_barrier(mem_flags::mem_threadgroup);", "", ROWS),
    Mutant("scales before the columns move", "rows_transform.metal", "source) * scale[other]",
           "source) * scale[c]", ROWS),
    Mutant("groups by their two best experts", "route.h", "|| best_of_group == 1", "", ROUTERS),
    Mutant("no least sum", "route.h", "if (!of_chosen) sum = LargerWide",
           "if (false) sum = LargerWide", ROUTERS),
    Mutant("an expert's scale without its sign", "route.h", "bits ^ (scale & 0x80000000u)", "bits",
           ROUTERS),
    Mutant("the scale of the selection's number", "route.h", "row.scales[row.ids[i]]",
           "row.scales[i]", ROUTERS),
    # Sampling.
    Mutant("ties go to the higher token", "sample_keys.h", "uint(~id)", "uint(id)", SAMPLERS),
    Mutant("zeros differ", "sample_keys.h", "if (logit << 1 == 0) return 0x80000000u;", "",
           SAMPLERS),
    Mutant("no barrier before words are written", "sample_keys.h", BARRIER, "", SAMPLERS, 0),
    Mutant("no barrier before words are read", "sample_keys.h", BARRIER, "", SAMPLERS, 1),
    Mutant("sums of lower halves", "sample_search.h", "if (high == 0) return;", "return;",
           SAMPLERS),
    Mutant("no barrier before bins are read", "sample_search.h", BARRIER, "", SAMPLERS, 1),
    Mutant("the target may be reached", "sample_search.h", "target - before >= BinAt",
           "target - before > BinAt", SAMPLERS),
    Mutant("tokens below a level's prefix", "sample_search.h",
           "(level > 0 && key >> left != prefix)", "false", SAMPLERS),
    Mutant("a cut keeps all ties", "sample_search.h", "key == cut.key && id <= cut.id",
           "key == cut.key", SAMPLERS),
    Mutant("the first tie", "sample_search.h", "before == left", "before == 0", SAMPLERS),
    Mutant("no mask", "sample_search.h", "!row.masked ||", "true ||", SAMPLERS),
    Mutant("top-k keeps one more", "sample_tokens.h", "ulong(options.top_k) - 1",
           "ulong(options.top_k)", SAMPLERS),
    Mutant("top-p keeps all", "sample_tokens.h", "ShareOf(options.top_p,", "ShareOf(1.0f,",
           SAMPLERS),
    Mutant("no min-p", "sample_tokens.h", "ShareOf(options.min_p, 1ul << scale.bits)", "0",
           SAMPLERS),
    Mutant("tokens are not counted", "sample_tokens.h", "seen[token] += 2", "seen[token] += 0",
           SAMPLERS),
    Mutant("a wrong draft goes on", "sample_tokens.h", "goes_on && token == draft", "goes_on",
           SAMPLERS),
    Mutant("states of another vocabulary", "sample_tokens.h", "state->vocab == p.vocab", "true",
           SAMPLERS),
    Mutant("no barrier before the next row", "sample_tokens.h",
           "metal::threadgroup_barrier(metal::mem_flags::mem_device);  // The next", "// The next",
           SAMPLERS),
    Mutant("tokens beyond the vocabulary in a prompt", "sample_tokens.metal",
           "id < 0 || id >= p.vocab", "id < 0", SAMPLERS),
    Mutant("prompts leave no marks", "sample_tokens.metal", "(seen + id), 1u", "(seen + id), 0u",
           SAMPLERS),
    Mutant("half of the sum", "sample_log_probabilities.h", "32 - zeros}", "31 - zeros}", SAMPLERS),
    Mutant("the winner again", "sample_log_probabilities.h", "if (key < winner) next",
           "if (key <= winner) next", SAMPLERS),
    Mutant("probabilities of NaN", "sample_log_probabilities.h", "softmax.valid && softmax.largest",
           "softmax.largest", SAMPLERS),
    Mutant("random words of the last round", "sampler_state.h", "words[at] = word;", "", SAMPLERS),
    Mutant("a random number of 64 bits", "sample_weights.h", "random >> 11 << 11", "random << 11",
           SAMPLERS),
    Mutant("shares are rounded down", "sample_weights.h", "(exact ? 0ul : 1ul)", "0ul", SAMPLERS),
    Mutant("half of a quotient", "sample_weights.h", "+ 63 - 39", "+ 63 - 40", SAMPLERS),
    Mutant("logarithms of half their bits", "soft_double.h", "bit < kBits", "bit < 20", SAMPLERS),
    # Recurrent mixers.
    Mutant("the newest input twice", "recurrent_sequences.h", "before = row - 1", "before = row",
           RECURRENT),
    Mutant("rows that take no part are convolved", "recurrent_sequences.h",
           "if (taking[before] < 0) continue;", "", RECURRENT),
    Mutant("the oldest inputs of a state", "recurrent_sequences.h", "tap + found) * conv.channels]",
           "tap) * conv.channels]", RECURRENT),
    Mutant("windows do not move", "recurrent_sequences.h", "rows.from[long(slot + found)",
           "rows.from[long(slot)", RECURRENT),
    Mutant("a wrong page before is no error", "recurrent_sequences.h",
           "rows.from == nullptr && before != -1", "false", RECURRENT),
    Mutant("rows may descend", "recurrent_sequences.h", "row < first_rows[sequence - 1] ||", "",
           RECURRENT),
    Mutant("no decay of what is known", "recurrent_scan.h", "value - decay * known",
           "value - known", RECURRENT),
    Mutant("queries without the row's key", "recurrent_scan.h",
           "decay * read + product * delta", "decay * read", RECURRENT),
    Mutant("no skip", "recurrent_scan.h", "float4(memory.skips[place.head])", "float4(0.0f)",
           RECURRENT),
    Mutant("steps without limits", "recurrent_scan.h",
           "metal::min(metal::max(before, p.min_step), p.max_step)", "before", RECURRENT),
    Mutant("columns beyond the last are stored", "recurrent_scan.h", "if (columns > 1) to[1]",
           "to[1]", RECURRENT),
    Mutant("keys of the first group", "recurrent_scan.h", "key_head * p.state_rows + state_row",
           "state_row", RECURRENT),
    Mutant("no barrier before squares are read", "recurrent_finish.metal",
           "threadgroup_barrier(mem_flags::mem_threadgroup);", "", RECURRENT),
    Mutant("the gate before every norm", "recurrent_finish.metal",
           "!p.has_norm || !p.norm_before_gate", "true", RECURRENT),
    Mutant("the first head's norm for all", "recurrent_finish.metal", "p.shares_norm ? column :",
           "true ? column :", RECURRENT),
    # Attention.
    Mutant("no barrier before maxima are read", "attend.h", BARRIER, "", ATTENTION, 0),
    Mutant("no barrier before the second half of the sums", "attend.h", BARRIER, "(void)0;",
           ATTENTION, 1),
    Mutant("no barrier before sums are read", "attend.h", BARRIER, "", ATTENTION, 2),
    Mutant("no barrier between segments", "attend.h", BARRIER, "(void)0;", ATTENTION, 3),
    Mutant("keys before the window", "attend.h", "key >= row.first && ", "", ATTENTION),
    Mutant("every simdgroup has all keys", "attend.h", "begin + kKeysAtOnce * place.simdgroup",
           "begin", ATTENTION),
    Mutant("sums are not rescaled", "attend.h", "value[i] *= of_head;", "value[i] *= 1.0f;",
           ATTENTION),
    Mutant("simdgroups have their own maxima", "attend.h", "value[i] *= factor;",
           "value[i] *= 1.0f;", ATTENTION),
    Mutant("results replace queries too early", "attend_rows.h", "p.query_offset >= 0", "false",
           ATTENTION),
    Mutant("no sinks", "attend_rows.h", "p.has_sinks == 0", "true", ATTENTION),
    Mutant("the first page of a sequence", "attend_rows.h", "p.pages.blocks + number",
           "p.pages.blocks", ATTENTION),
    Mutant("a window instead of chunks", "attend_rows.h", "return p.chunked ?", "return false ?",
           ATTENTION),
    Mutant("no cap", "attend_rows.h", "p.softcap == 0.0f", "true", ATTENTION),
    Mutant("no barrier before scores are read", "attend_tile.h", BARRIER, "", ATTENTION, 0),
    Mutant("no barrier before weights are read", "attend_tile.h", BARRIER, "", ATTENTION, 1),
    Mutant("no barrier after weights are read", "attend_tile.h", BARRIER, "", ATTENTION, 2),
    Mutant("no barrier before factors are read", "attend_tile.h", BARRIER, "", ATTENTION, 3),
    Mutant("no barrier after factors are read", "attend_tile.h", BARRIER, "", ATTENTION, 4),
    Mutant("no barrier before queries are read", "attend_tile.h", BARRIER, "", ATTENTION, 5),
    Mutant("no barrier before totals are read", "attend_tile.h", BARRIER, "", ATTENTION, 6),
    Mutant("infinite values reach all rows", "attend_tile.h",
           "block.masked && ClearInfinities(pair)", "false", ATTENTION),
    Mutant("infinite values are lost", "attend_tile.h", "!metal::simd_any(infinite)", "true",
           ATTENTION),
    Mutant("negative positions", "check_rows.h", "origin < 0", "false", ATTENTION),
    Mutant("no barrier before the first error is read", "check_rows.h", BARRIER, "", ATTENTION, 0),
    Mutant("no barrier after the first error is read", "check_rows.h", BARRIER, "", ATTENTION, 1),
    Mutant("the first head's weights", "head_product.metal", "head * p.weight_head_stride",
           "0 * p.weight_head_stride", HEAD_PRODUCTS),
    Mutant("the latent's features instead of RoPE", "head_product.metal", "p.latent + feature",
           "feature", HEAD_PRODUCTS),
    Mutant("more tokens than a page has", "head_product.metal", "tokens[i] > p.page_tokens",
           "false", HEAD_PRODUCTS),
    Mutant("an output beyond the last one", "head_product.h", "output + 1 < target.outputs",
           "true", HEAD_PRODUCTS),
    # Batches.
    Mutant("the first matrix's codes", "batch.h", "weights.codes + i * batch.codes",
           "weights.codes", BATCHES),
    Mutant("the first matrix's scales", "batch.h", "weights.scales + i * batch.scales",
           "weights.scales", BATCHES),
    Mutant("the first matrix's zero points", "batch.h", "weights.extras + i * batch.extras",
           "weights.extras", BATCHES),
    Mutant("the first matrix's activations", "batch.h", "input + i * batch.input", "input",
           BATCHES),
    Mutant("the first matrix's output", "batch.h", "first.data + i * batch.output", "first.data",
           BATCHES),
    Mutant("the first matrix's bias", "batch.h", "first.bias + i * batch.bias", "first.bias",
           BATCHES),
    Mutant("the first matrix's row weights", "batch.h", "i * batch.row_weight)", "0)", BATCHES),
    Mutant("the first matrix's global scale", "batch.h", "batch.global_scales[matrix]",
           "batch.global_scales[0]", BATCHES),
    Mutant("the first matrix's partials", "batched_finish.metal",
           "long(position.z) * batch.partials", "0", BATCHES),
    Mutant("a split takes the place of a matrix", "batched_gemm_direct.metal",
           "group.z / splits", "group.z", BATCHES),
    Mutant("every matrix is its first split", "batched_gemm_direct.metal", "group.z % splits", "0u",
           BATCHES),
]


def find(root: Path, name: str) -> Path:
    return next(path for folder in FOLDERS for path in (root / folder).rglob(name))


def replace(text: str, mutant: Mutant) -> str:
    parts = text.split(mutant.before)
    if len(parts) < mutant.which + 2:
        raise SystemExit(f"{mutant.file}: no source text for '{mutant.what}': {mutant.before}")
    at = mutant.which + 1
    return mutant.before.join(parts[:at]) + mutant.after + mutant.before.join(parts[at:])


class Programs(NamedTuple):
    conformance: Path
    unit_test: Path


def run_test(program: Path, tests: str, environment: dict[str, str]) -> tuple[bool, str]:
    """Returns whether a program of googletest passed, and its first failure."""
    command = [str(program), f"--gtest_filter={tests}", "--gtest_fail_fast"]
    result = subprocess.run(command, env=environment, timeout=900, capture_output=True, text=True,
                            check=False)
    if result.returncode == 0:
        count = result.stdout.count("[       OK ]")
        return True, f"{count} cases passed, {result.stdout.count('[  SKIPPED ]')} skipped"
    failure = result.stdout.partition(": Failure\n")[2].partition("\n[")[0].strip().splitlines()
    return False, failure[-1] if failure else f"exit code {result.returncode}"


def run(programs: Programs, cases: str, sources: Path) -> tuple[bool, str]:
    """Returns whether the program passed, and its first message."""
    environment = dict(os.environ, MARLIN_METAL_SIM_SOURCES=str(sources))
    if cases.startswith(UNIT_TESTS):
        return run_test(programs.unit_test, cases, environment)
    command = [str(programs.conformance), "--device", "metal", "--stop", "--json", "--filter",
               cases]
    result = subprocess.run(command, env=environment, timeout=900, capture_output=True, text=True,
                            check=False)
    try:
        report = json.loads(result.stdout)
    except json.JSONDecodeError:
        return False, f"no report, exit code {result.returncode}"
    if result.returncode == 0:
        return True, f"{report['passed']} cases passed, {report['skipped']} skipped"
    failures = report["failures"]
    return False, failures[0]["message"] if failures else f"exit code {result.returncode}"


def try_mutant(programs: Programs, mutant: Mutant) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as directory:
        for folder in FOLDERS:
            shutil.copytree(ROOT / "src" / folder, Path(directory) / folder)
        file = find(Path(directory), mutant.file)
        file.write_text(replace(file.read_text(), mutant))
        return run(programs, mutant.cases, Path(directory))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("unit_test", type=Path)
    parser.add_argument("--only", type=int, action="append", help="numbers from 1")
    parser.add_argument("--every", type=int, default=1, help="try one of so many mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    programs = Programs(options.program, options.unit_test)
    for mutant in MUTANTS:
        replace(find(ROOT / "src", mutant.file).read_text(), mutant)

    every = 1 if os.environ.get("MARLIN_MUTANTS") == "all" else options.every
    chosen = options.only or list(range(1, len(MUTANTS) + 1, every))

    started = time.monotonic()
    patterns = sorted({MUTANTS[number - 1].cases for number in chosen})
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        without_fault = list(pool.map(lambda cases: run(programs, cases, ROOT / "src"), patterns))
    for cases, (healthy, what) in zip(patterns, without_fault, strict=True):
        if "skipped" in what and what.startswith("0 cases"):
            print("skipped: no metal device (no simulator, or no clang++ for it)")
            return 77
        if not healthy:
            print(f"fails without a fault, so mutants prove nothing: {cases}: {what}")
            return 1
    killed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        tried = [(number, MUTANTS[number - 1]) for number in chosen]
        outcomes = pool.map(lambda one: try_mutant(programs, one[1]), tried)
        for (number, mutant), (survived, what) in zip(tried, outcomes, strict=True):
            verdict = "SURVIVED" if survived else "killed"
            print(f"{number:3d} {verdict:8s} {mutant.what}: {what}", flush=True)
            killed += not survived
    print(f"{killed} of {len(tried)} mutants killed in {time.monotonic() - started:.0f} s")
    print(f"{killed} passed, {len(tried) - killed} failed, 0 skipped")
    return 0 if killed == len(tried) else 1


if __name__ == "__main__":
    sys.exit(main())
