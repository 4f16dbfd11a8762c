#!/usr/bin/env python3
"""Writes the seeds, dictionaries and options of every fuzz target.

Usage: make_seeds.py FOLDER | --check

For each tests/fuzz/<target>.cc FOLDER gets <target>/ (seeds), <target>.dict and <target>.options
(libFuzzer's, one per line). Seeds are valid inputs as users have them, and inputs of extreme depth
or size, which take megabytes and are therefore not in the repository. Inputs found by fuzzing are
kept in corpus/. --check only reports whether every target has a row here.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

TEXT = 2 << 20  # For inputs where depth, or quadratic time, may matter.
STRUCTURE = 64 << 10
SMALL = 4 << 10

Seeds = dict[str, bytes]

DIVIDER = "\n-8<-\n"  # As in checkpoint_fuzz.
BITS = {"fp4_e2m1": 4, "u4": 4, "s8": 8, "nf3": 3}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "eos_token_id": 0,
}


def text_of(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def deep(count: int, before: str = '{"x":', opening: str = "[", closing: str = "]",
         after: str = "}") -> bytes:
    """Returns nested brackets."""
    return (before + opening * count + closing * count + after).encode()


def json_shapes() -> Seeds:
    """Returns extreme JSON: depth, counts, long names and numbers."""
    return {
        "depth-10": deep(10),
        "depth-2000": deep(2000),
        "depth-100000": deep(100_000),
        "depth-100000-objects": deep(100_000, '{"x":', '{"a":', "}", "}").replace(b":}", b":0}"),
        "depth-open": b'{"x":' + b"[" * 500_000,
        "objects-30000": b'{"x":[' + b"{}," * 30_000 + b"{}]}",
        "objects-300000": b'{"x":[' + b"{}," * 300_000 + b"{}]}",
        "keys-30000": text_of({f"key{i}": {} for i in range(30_000)}),
        "key-long": text_of({"k" * 500_000: 1}),
        "string-long": text_of({"model_type": "m" * 1_000_000}),
        "number-long": b'{"hidden_size":' + b"1" * 500_000 + b"}",
        "escapes": text_of({"a": "\u0000\u001b\u009b\u202e\ud83d\ude00\n"}),
        "not-utf8": b'{"a\xff":"\xc3"}',
    }


def configs() -> Seeds:
    """Returns config.json of models, of every family and kind of rotary embedding."""
    seeds = {f.stem: f.read_bytes() for f in sorted((ROOT / "tests/data/configs").glob("*.json"))}
    for kind in ("linear", "llama3", "yarn"):
        scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 32,
                   "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                   "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        seeds[f"llama-{kind}"] = text_of({**LLAMA, "rope_scaling": scaling})
    for kind in ("mistral", "phi3", "qwen2", "qwen3", "glm4"):
        seeds[kind] = text_of({**LLAMA, "model_type": kind, "sliding_window": 16,
                               "layer_types": ["sliding_attention"], "use_sliding_window": True})
    seeds["qwen2_moe"] = text_of({
        **LLAMA, "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1, "mlp_only_layers": [0]})
    return seeds


def config_shapes() -> Seeds:
    seeds = {**configs(), **json_shapes()}
    start = text_of(LLAMA).decode()[:-1]
    seeds["llama-depth-200"] = deep(200, start + ',"x":')
    seeds["hidden-size-deep"] = deep(100_000, '{"model_type":"llama","hidden_size":')
    return seeds


def generation_configs() -> Seeds:
    return {
        "one": b'{"eos_token_id":2,"temperature":0.6,"top_p":0.95}',
        "sampled": b'{"do_sample":true,"top_k":20,"min_p":0.1,"repetition_penalty":1.1}',
        "ignored": b'{"no_repeat_ngram_size":3,"num_beams":4,"suppress_tokens":[1,2]}',
        "several": b'{"eos_token_id":[1,2,3],"bos_token_id":0}',
        "eos-depth-200": deep(200, '{"eos_token_id":'),
        "eos-depth-100000": deep(100_000, '{"eos_token_id":{"a":', after="}}"),
        "tokens-100000": text_of({"eos_token_id": list(range(100_000))}),
        **json_shapes(),
    }


def recipes() -> Seeds:
    def of(key: str, pattern: str) -> bytes:
        return text_of({"overrides": [{key: pattern, "choice": "s8/g32"}]})

    return {
        "glob": of("glob", "model.layers.*.mlp.?ate_proj.weight"),
        "regex": of("regex", r"layers\.(0|1|2[0-9])\..*_proj"),
        "regex-depth": of("regex", "(" * 16_000 + ")" * 16_000),
        "regex-stars": of("regex", "(.*)*!"),
        "regex-long": of("regex", "a" * 100_000),
        "hot-experts": text_of({"hot_experts": {"choice": "s8/g32", "model_type": "a", "layers": [
            {"layer": 0, "experts": 8, "hot": [1, 6]}, {"layer": 3, "experts": 8, "hot": []}]}}),
        "hot-experts-file": text_of({"hot_experts": {"choice": "s8/g32", "fraction": 0.5,
                                                     "frequencies": "absent.json"}}),
        **json_shapes(),
    }


def routing_files() -> Seeds:
    line = text_of({"layers": [{"layer": 0, "experts": [3, 6]}, {"layer": 2, "experts": [1]}]})
    return {
        "frequencies": text_of({"model_type": "a", "tokens": 3, "top_k": 2, "layers": [
            {"layer": 0, "counts": [3, 0, 2, 1]}, {"layer": 7, "counts": [6]}]}),
        "sum-overflows": text_of({"model_type": "a", "tokens": 2**62, "top_k": 4, "layers": [
            {"layer": 0, "counts": [2**63 - 2, 2**63 - 2]}]}),
        "trace": line + b"\n" + line + b"\n",
        "trace-1000": (line + b"\n") * 1000,
        **json_shapes(),
    }


def sensitivities() -> Seeds:
    matrix = {"name": "model.layers.0.mlp.up_proj.weight", "experts": 1, "k": 64, "n": 96,
              "kl": [0.5, 1e-3]}
    stack = {"name": "model.layers.1.mlp.experts.down_proj", "experts": 8, "k": 96, "n": 64,
             "kl": [2, 0]}
    whole = {"model_type": "a", "identity": "0", "tokens": 2048, "formats": ["nf3/g64", "s8/g64"]}
    return {
        "two": text_of({**whole, "matrices": [matrix, stack]}),
        "twice": text_of({**whole, "matrices": [matrix, matrix]}),
        "many": text_of({**whole, "matrices": [{**matrix, "name": str(i)} for i in range(1000)]}),
        "overflows": text_of({**whole, "matrices": [
            {**matrix, "experts": 2**31, "k": 2**31, "n": 2**31}]}),
        "fused": text_of({**whole, "formats": ["int2/gK/frac", "fp4_e2m1/g16/e4m3"],
                          "matrices": [{**stack, "k": 2**31, "n": 1}]}),
        **json_shapes(),
    }


def importance_matrices() -> Seeds:
    name = b"blk.0.attn_q.weight"
    entry = struct.pack(f"<i{len(name)}sii4f", len(name), name, 2, 4, 1.0, 0.0, 0.5, 1e-30)
    return {
        "binary": struct.pack("<i", 1) + entry + struct.pack("<ii4s", 2, 4, b"text"),
        "twice": struct.pack("<i", 2) + entry + entry,
        "short": struct.pack("<i", 2) + entry,
        "many": struct.pack("<i", 2**31 - 1) + entry,
        "long-name": struct.pack("<ii", 1, 2**31 - 1),
        "gguf": gguf_file({"general.type": "imatrix", "imatrix.datasets": ["a"],
                           "imatrix.chunk_count": 4, "imatrix.chunk_size": 512}, {
            "blk.0.attn_q.weight.in_sum2": ((8, 1), 0), "blk.0.attn_q.weight.counts": ((1, 1), 0),
            "blk.0.ffn_up_exps.weight.in_sum2": ((8, 2), 0),
            "blk.0.ffn_up_exps.weight.counts": ((1, 2), 0)}),
    }


def patterns() -> Seeds:
    names = "\n".join(["model.layers.0.self_attn.q_proj", "model.layers.10.mlp.experts.3.up_proj",
                       "lm_head", "a" * 200])
    return {name: (pattern + "\n" + names).encode() for name, pattern in {
        "glob": "g*.mlp.*.up_proj.weight",
        "glob-stars": "g" + "*a" * 50 + "b",
        "glob-marks": "gmodel.layers.?.*",
        "regex-anchors": r"r^model\.layers\.[0-9]+\.(mlp|self_attn)\..*_proj\.weight$",
        "regex-classes": r"r[[:alpha:]]+\d{1,3}(?:x|y)?\b(?=a)",
        "regex-reference": r"r(a|b)\1+?",
        "regex-repeats": "ra{1,100}{1,10}",
        "regex-depth-50": "r" + "(" * 50 + "a" + ")" * 50,
        "regex-depth": "r" + "(" * 16_000 + ")" * 16_000,
        "regex-long": "r" + "a" * 100_000,
        "regex-stars": "r(.*)*!",
        "regex-name-stars": "r([a-z_.0-9]+)*!",
    }.items()}


def token_files() -> Seeds:
    return {
        "plain": b"1 2 3\n4,5\t6\r\n",
        "array": b"[1, 2, 3]",
        "extremes": b"2147483647 -2147483648 0",
        "beyond": b"1 2147483648",
        "open": b"[1, 2",
        "behind": b"[1] 2",
        "many": b"7 " * 500_000,
        "brackets": b"[" * 500_000,
        "word-long": b"1" * 500_000,
        "nul": b"1\x002",
    }


def prompt_files() -> Seeds:
    return {
        "text": b"And God said\n\nIn the beginning\r\n \t\n",
        "json": b'{"prompt":"And"}\n\n{"tokens":[1,2],"max_tokens":3,"seed":4}\r\n',
        "escapes": b'{"prompt":"\\ud83d\\udc1f\\u0000\\n"}',
        "extremes": b'{"tokens":[2147483647,0],"seed":9223372036854775807,"max_tokens":0}',
        "beyond": b'{"tokens":[2147483648]}',
        "both": b'{"tokens":[1],"prompt":"a"}',
        "other-key": b'{"tokens":[1],"top_k":1}',
        "not-all-json": b'{"tokens":[1]}\nAnd',
        "many": b'{"tokens":[1]}\n' * 20_000,
        "bytes": b"\xff\xfe\n\x00\n",
        **json_shapes(),
    }


def argument_lines() -> Seeds:
    lines = [
        ["--override", "layers.0=s8/g32", "--recipe", "default_moe", "--strict"],
        ["-o", "out", "--shard-size", "1MB", "--format", "fp4_e2m1", "--group-size", "64"],
        ["-o", "out", "--shard-size", "99999999999GB"],
        ["--json"],
        ["--bandwidth", "400", "--override", "(.*)=keep", "--device", "cpu"],
        ["--against", "missing", "--max-error", "1e400"],
        ["-o", "out", "--dtype", "fp16", "--overwrite"],
        ["--tokens", "config.json", "--max-tokens", "", "--top-k", "99999999999999999999"],
        ["--tokens", "config.json", "--window", "4", "--stride", "0x10"],
        ["--against", "missing", "--tokens", "config.json", "--max-windows", "-1"],
        ["1,4096,4096", "4611686018427387904,4,4", "9223372036854775807,1,1"],
        ["1,2305843009213693952,4", "1,4,9223372036854775807"],
        ["--format", "nf4", "--scale-dtype", "e4m3", "--activations", "f32", "--copies", "1"],
        ["fp4_e2m1/g128", "u4/gK/sym", "s8/g16/e8m0", "keep", "bf16", "nan", "-0.0"],
        ["--tokens", "config.json", "--min-p", "1e-400", "--repetition-penalty", "0",
         "--presence-penalty", "-1e6", "--frequency-penalty", "1e400"],
    ]
    return {f"line{i}": (chr(i % 8) + "\n".join(rest)).encode()
            for i, rest in enumerate(lines)}


def layouts() -> Seeds:
    words = bytes(range(256))
    seeds = {f"small{i}": bytes([i % 13, i % 3 + 64 * (i % 2), 17 + i, 5 + i]) + words
             for i in range(13)}
    seeds["whole-tiles"] = bytes([0, 1, 64, 64]) + words
    largest = 2**63 - 1
    for name, k, n in (("overflow", 2**62, 4), ("negative", -1, 7), ("largest", largest, largest),
                       ("empty", 0, largest), ("thin", 2**61, 0)):
        seeds[name] = struct.pack("<BBBqBq", 0, 0, 255, k, 255, n) + words
    return seeds


def metal_sources() -> Seeds:
    """Returns kernels without their directives, as after preprocessing."""
    seeds = {}
    folder = ROOT / "src/backends/metal/kernels"
    for file in sorted([*folder.rglob("*.metal"), *folder.rglob("*.h")]):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        seeds[file.name] = (f'# 1 "{file.name}"\n' + "\n".join(lines) + "\n").encode()
    seeds["brackets"] = b"(" * 20_000 + b")" * 20_000
    seeds["angles"] = b"a<" * 20_000
    seeds["attributes"] = b"[[a(" * 15_000
    seeds["strings"] = b'kernel void f(device float* x [[buffer(0)]]) { R"x(")")x"; }'
    return seeds


def module(fmt: str, shape: list[int], **more: Any) -> dict[str, Any]:
    return {"format": fmt, "shape": shape, "group_size": 16, "scale_type": "fp16",
            "zeros": fmt == "u4", "biases": False, "global_scale": False,
            "layer_class": "mlp_up", "source_layout": "out_in", **more}


def sparse_module(fmt: str, shape: list[int]) -> dict[str, Any]:
    return module(fmt, shape, zero_type="fp16", global_scale_divides=False, sparsity="2:4")


def permuted_module(fmt: str, shape: list[int]) -> dict[str, Any]:
    return module(fmt, shape, zero_type="fp16", global_scale_divides=False, permutation=True)


def rotated_module(fmt: str, shape: list[int]) -> dict[str, Any]:
    return module(fmt, shape, zero_type="fp16", global_scale_divides=False, input_scale=True,
                  input_hadamard=16)


def quantization(modules: dict[str, Any]) -> dict[str, Any]:
    """Returns a quantization_config as in config.json; targets correct the checksum."""
    version = 2 if any("zero_type" in one for one in modules.values()) else 1
    return {"quant_method": "metal_marlin", "version": version, "recipe": "r",
            "recipe_document": {}, "method": "rtn", "layout": "k_packed", "modules": modules,
            "checksum": ""}


def quantization_configs() -> Seeds:
    golden = json.loads((ROOT / "tests/golden/checkpoint_v1/config.json").read_text())
    return {
        "golden": text_of(golden["quantization_config"]),
        "experts": text_of(quantization({
            "a.experts.*.w.weight": module("nf3", [2, 16, 8], layer_class="moe_expert")})),
        "sparse": text_of(quantization({"w.weight": sparse_module("s4", [33, 8])})),
        "permuted": text_of(quantization({"w.weight": permuted_module("u4", [33, 8])})),
        "rotated": text_of(quantization({"w.weight": rotated_module("u4", [32, 8])})),
        "modules-5000": text_of(quantization(
            {f"layers.{i}.up_proj.weight": module("s8", [16, 8]) for i in range(5000)})),
        **json_shapes(),
    }


def prepared_indices() -> Seeds:
    """Returns indices of prepared weight files, whose parts are in a data section of 192 bytes."""
    def part(**more: Any) -> dict[str, Any]:
        return {"format": "bf16", "k": 4, "n": 8, "group_size": 4, "scale_type": "fp16",
                "zeros": False, "biases": False, "global_scale": False, "bytes": 64,
                "checksum": "xxh3:0123456789abcdef", **more}

    def index(*projections: list[dict[str, Any]]) -> bytes:
        return text_of({"layout": "cpu_panels/1", "source": "0123456789abcdef", "projections": [
            {"name": f"p{i}", "parts": parts} for i, parts in enumerate(projections)]})

    return {
        "one": index([part(bytes=192)]),
        "two": index([part(), part(format="u4", zeros=True, group_size=16)], [part(bytes=3)]),
        "none": index(),
        "past": index([part(bytes=193)]),
        "permuted": index([part(format="s4", k=32, group_size=16, zero_type="fp16",
                                global_scale_divides=False, permutation=True, bytes=192)]),
        "scaled": index([part(format="s4", k=16, group_size=16, zero_type="fp16",
                              global_scale_divides=False, input_scale=True, input_hadamard=16,
                              bytes=192)]),
        "permutation-past": index([part(format="s4", k=64, group_size=16, zero_type="fp16",
                                        global_scale_divides=False, permutation=True, bytes=192)]),
        "huge": index([part(bytes=2**64 - 1)], [part(k=2**31 - 1, n=2**31 - 1)]),
        **json_shapes(),
    }


def parts_of(folder: Path) -> bytes:
    """Returns a directory in the input format of checkpoint_fuzz."""
    index = folder / "model.safetensors.index.json"
    parts = [(folder / "config.json").read_bytes(), index.read_bytes() if index.exists() else b""]
    for file in sorted(folder.glob("*.safetensors")):
        image = file.read_bytes()
        (length,) = struct.unpack_from("<Q", image)
        parts += [image[8:8 + length], image[8 + length:]]
    return DIVIDER.encode().join(parts)


def header(tensors: dict[str, tuple[str, list[int], int]]) -> str:
    """Lays tensors out contiguously: name -> type, shape, bytes."""
    entries, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return json.dumps(entries, separators=(",", ":"))


def checkpoints() -> Seeds:
    def quantized(modules: dict[str, Any], own_header: str = "", data: str = "\x11<") -> bytes:
        config = {"model_type": "llama", "quantization_config": quantization(modules)}
        return DIVIDER.join([json.dumps(config), "", own_header, data]).encode()

    def plain(tensors: dict[str, tuple[str, list[int], int]], config: dict[str, Any]) -> bytes:
        return DIVIDER.join([json.dumps(config), "", header(tensors), "\x01<\x7f>0<"]).encode()

    experts = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": ("BF16", [7, 16], 224)
               for e in range(3)}
    seeds = {
        "golden": parts_of(ROOT / "tests/golden/checkpoint_v1"),
        "permuted": parts_of(ROOT / "tests/golden/checkpoint_permuted"),
        "inputs": parts_of(ROOT / "tests/golden/checkpoint_inputs"),
        "levels": parts_of(ROOT / "tests/golden/checkpoint_levels"),
        "plain": plain({"model.embed_tokens.weight": ("F32", [8, 16], 512),
                        "model.layers.0.mlp.up_proj.weight": ("F16", [16, 32], 1024),
                        "model.norm.weight": ("BF16", [16], 32)}, LLAMA),
        "plain-experts": plain(experts, {**LLAMA, "num_experts_per_tok": 2}),
        "plain-input-first": plain({"h.0.attn.c_attn.weight": ("F32", [16, 48], 3072)},
                                   {"model_type": "gpt2"}),
        "plain-fused": plain({"model.layers.0.mlp.experts.gate_up_proj": ("BF16", [2, 16, 8], 512)},
                             {"model_type": "gpt_oss", "num_experts_per_tok": 2}),
        "two-shards": DIVIDER.join([
            "{}", json.dumps({"weight_map": {"a.weight": "model-00001-of-00002.safetensors",
                                             "b.weight": "model-00002-of-00002.safetensors"}}),
            header({"a.weight": ("F32", [4, 16], 256)}), "\x01<",
            header({"b.weight": ("F32", [4, 16], 256)}), "\x02<"]).encode(),
        "stack": quantized({"a.experts.*.w.weight":
                            module("fp4_e2m1", [3, 16, 8], layer_class="moe_expert")}),
        "stack-empty": quantized({"a.experts.*.w.weight":
                                  module("fp4_e2m1", [3, 16, 0], layer_class="moe_expert")}),
        "fused-stack": quantized({"a.experts.w": module("s8", [2, 16, 8],
                                                        layer_class="moe_expert")}),
        # The data repeats a byte that is two valid nibbles.
        "sparse": quantized({"a.up_proj.weight": sparse_module("s4", [40, 8]),
                             "a.experts.*.w.weight": sparse_module("fp8_e4m3", [2, 32, 8])},
                            data="D"),
        "kept": quantized({"a.up_proj.weight": module("u4", [16, 8])},
                          header({"a.up_proj.qweight": ("U32", [2, 8], 64),
                                  "a.up_proj.scales": ("F16", [1, 8], 16),
                                  "a.up_proj.zeros": ("F16", [1, 8], 16),
                                  "norm.weight": ("F32", [4], 16)})),
    }
    for name in BITS:
        seeds[f"module-{name}"] = quantized({"a.up_proj.weight": module(name, [32, 8])})
    return seeds


def foreign_checkpoints() -> Seeds:
    """Returns one module per format of other programs, in the input format of foreign_fuzz."""
    def words(*values: int, size: int = 4) -> bytes:
        return b"".join(value.to_bytes(size, "little", signed=True) for value in values)

    def file(config: dict[str, Any], tensors: dict[str, tuple[str, list[int], bytes | int]],
             key: str = "quantization_config") -> bytes:
        sizes, data = {}, b""
        for name, (dtype, shape, content) in tensors.items():
            part = b"\x2c" * content if isinstance(content, int) else content
            sizes[name] = (dtype, shape, len(part))
            data += part
        text = DIVIDER.join([json.dumps({key: config}), header(sizes), ""])
        return text.encode() + data

    def ct(bits: int, more: dict[str, Any]) -> dict[str, Any]:
        return {"quant_method": "compressed-tensors", "version": "0.20.0", "config_groups": {
            "group_0": {"targets": ["Linear", "re:.*m"], "weights": {"num_bits": bits, **more}}}}

    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": [2, 96],
                        "nested_blocksize": 256, "nested_offset": 0.25}).encode()
    seeds = {
        "awq-fast": file({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, {
            "m.qweight": ("I16", [1, 64], 128), "m.scales": ("F16", [16, 4], 128),
            "m.qzeros": ("F16", [16, 4], 128)}),
        "awq-gemm": file({"quant_method": "awq", "bits": 4, "group_size": 16}, {
            "m.qweight": ("I32", [16, 1], 64), "m.scales": ("BF16", [1, 8], 16),
            "m.qzeros": ("I32", [1, 1], 4)}),
        "awq-gemv": file({"quant_method": "awq", "bits": 4, "group_size": 32}, {
            "m.qweight": ("I32", [3, 4], 48), "m.scales": ("F16", [3, 32], 192),
            "m.qzeros": ("I32", [3, 4], 48)}),
        "bnb-int8": file({"load_in_8bit": True}, {
            "m.weight": ("I8", [2, 16], 32), "m.SCB": ("F32", [2], 8)}),
        "bnb-nested": file({"load_in_4bit": True}, {
            "m.weight": ("U8", [96, 1], 96), "m.weight.quant_map": ("F32", [16], 64),
            "m.weight.absmax": ("U8", [3], 3), "m.weight.nested_absmax": ("F32", [1], 4),
            "m.weight.nested_quant_map": ("F32", [256], 1024),
            "m.weight.quant_state.bitsandbytes__nf4": ("U8", [len(state)], state)}),
        "ct-block": file(ct(8, {"block_structure": [16, 16]}), {
            "m.weight": ("F8_E4M3", [20, 40], 800), "m.weight_scale": ("BF16", [2, 3], 12)}),
        "ct-mxfp6": file(ct(6, {}), {
            "m.weight_packed": ("U8", [2, 24], 48), "m.weight_scale": ("U8", [2, 1], 2)}),
        "ct-nvfp4": file(ct(4, {}), {
            "m.weight_packed": ("U8", [2, 16], 32), "m.weight_scale": ("F8_E4M3", [2, 2], 4),
            "m.weight_global_scale": ("F32", [1], 4)}),
        "ct-packed-3": file(ct(3, {}), {
            "m.weight_packed": ("I32", [4, 4], 64), "m.weight_scale": ("F16", [4, 1], 8),
            "m.weight_zero_point": ("I32", [1, 1], 4),
            "m.weight_shape": ("I64", [2], words(4, 40, size=8))}),
        "ct-packed-6": file(ct(6, {}), {
            "m.weight_packed": ("I32", [2, 6], 48), "m.weight_scale": ("F16", [2, 2], 8),
            "m.weight_shape": ("I64", [2], words(2, 32, size=8))}),
        "ct-marlin-24": file(ct(4, {}), {
            "m.meta": ("I16", [1, 128], b"\x4e" * 256),
            "m.scale_packed": ("F16", [1, 64], 128), "m.weight_packed": ("I32", [1, 128], 512)}),
        "ct-sparse-24": file(ct(8, {}) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, {
            "m.bitmask": ("U8", [2, 2], b"\x35" * 4), "m.compressed": ("F8_E4M3", [2, 6], 12),
            "m.shape": ("I64", [2, 1], words(2, 12, size=8)), "m.weight_scale": ("BF16", [2, 1], 4),
            "p.bitmask": ("U8", [2, 1], b"\x13\x1a"), "p.compressed": ("F16", [2, 3], 12),
            "p.shape": ("I64", [2, 1], words(2, 6, size=8))}),
        "ct-sparse": file(ct(8, {}) | {"sparsity_config": {"format": "sparse-bitmask"}}, {
            "m.bitmask": ("U8", [2, 1], b"\x07\x10"), "m.compressed": ("I8", [4], 4),
            "m.row_offsets": ("I64", [2], words(0, 3, size=8)),
            "m.shape": ("I64", [2], words(2, 5, size=8)), "m.weight_scale": ("BF16", [2, 1], 4),
            "p.weight.bitmask": ("U8", [1], b"\x07"), "p.weight.compressed": ("F32", [3], 12),
            "p.weight.row_offsets": ("I64", [], words(0, size=8)),
            "p.weight.shape": ("I64", [1], words(5, size=8))}),
        "fp8": file({"quant_method": "fp8", "weight_block_size": [16, 16]}, {
            "m.weight": ("F8_E4M3", [20, 40], 800), "m.weight_scale_inv": ("F32", [2, 3], 24),
            "e.weight": ("I8", [2, 16], 32), "e.scale": ("F8_E8M0", [2, 1], 2)}),
        "gptq-act-order": file({"quant_method": "gptq", "bits": 4, "group_size": 16}, {
            "m.qweight": ("I32", [4, 8], 128), "m.qzeros": ("I32", [2, 1], 8),
            "m.scales": ("F16", [2, 8], 32),
            "m.g_idx": ("I32", [32], words(*(i % 2 for i in range(32))))}),
        "gptq-3": file({"quant_method": "gptq", "bits": 3, "group_size": -1,
                        "checkpoint_format": "gptq_v2"}, {
            "m.qweight": ("I32", [3, 32], 384), "m.qzeros": ("I32", [1, 3], 12),
            "m.scales": ("F16", [1, 32], 64)}),
        "gptq-planes": file({"quant_method": "gptq", "bits": 6, "group_size": -1,
                             "checkpoint_format": "gptq_p"}, {
            "m.qweight": ("I32", [6, 32], 768), "m.qzeros": ("I32", [1, 6], 24),
            "m.scales": ("F16", [1, 32], 64)}),
        "gpt-oss": file({"quant_method": "mxfp4"}, {
            "e.gate_up_proj_blocks": ("U8", [2, 4, 1, 16], 128),
            "e.gate_up_proj_scales": ("U8", [2, 4, 1], 8)}),
        "mlx": file({"bits": 5, "group_size": 32, "m": {"bits": 4, "group_size": 64},
                     "f": {"mode": "nvfp4", "bits": 4, "group_size": 16}}, {
            "m.weight": ("U32", [2, 8], 64), "m.scales": ("F16", [2, 1], 4),
            "m.biases": ("F16", [2, 1], 4), "a.switch_mlp.up_proj.weight": ("U32", [2, 2, 5], 80),
            "a.switch_mlp.up_proj.scales": ("F32", [2, 2, 1], 16),
            "a.switch_mlp.up_proj.biases": ("F32", [2, 2, 1], 16),
            "f.weight": ("U32", [2, 4], 32), "f.scales": ("U8", [2, 2], 4)}, "quantization"),
        "modelopt": file({"quant_method": "modelopt"}, {
            "m.weight": ("U8", [2, 16], 32), "m.weight_scale": ("F8_E4M3", [2, 2], 4),
            "m.weight_scale_2": ("F32", [], 4), "i.weight": ("U8", [2, 32], 64),
            "i.weight_scale": ("BF16", [4, 2], 16), "f.weight": ("F8_E4M3", [4, 32], 128),
            "f.weight_scale": ("F32", [1, 1, 1, 1], 4)}),
    }
    for name, bits, axis, rows in (("0", 4, 0, [8, 4]), ("1", 4, 1, [2, 16]),
                                   ("bytes", 6, 1, [4, 16])):
        seeds[f"hqq-{name}"] = file({"quant_method": "hqq"}, {
            "m.W_q": ("U8", rows, rows[0] * rows[1]),
            "m.scale": ("F16", [4], 8), "m.zero": ("F16", [4], 8),
            "m.nbits": ("I32", [], words(bits)), "m.axis": ("I32", [], words(axis)),
            "m.group_size": ("I32", [], words(16)),
            "m.shape": ("I64", [2], words(2, 32, size=8))})
    return seeds


def safetensors() -> Seeds:
    many = header({f"layers.{i}.weight": ("U8", [0], 0) for i in range(5000)}).encode()
    return {"many": struct.pack("<Q", len(many)) + many}


def nothing() -> Seeds:
    return {}


@dataclass(frozen=True)
class Target:
    """Settings of one fuzz target."""

    max_len: int
    seeds: Callable[[], Seeds] = nothing
    words: tuple[str, ...] = ()  # Sources whose string literals make the dictionary.
    more: tuple[str, ...] = field(default=())  # Words in none of them.
    options: tuple[str, ...] = ()  # Options of libFuzzer.


CONFIG_SOURCES = ("src/recipe/model_config.cc", "src/recipe/decoder_shape.cc",
                  "src/recipe/families.def", "src/recipe/architecture.cc",
                  "src/model/decoder_config.cc", "src/model/rotary.cc")
RECIPE_SOURCES = ("src/recipe/recipe_json.cc", "src/recipe/layer_class.cc",
                  "src/recipe/format_choice.cc", "src/formats/format_table.cc",
                  "include/marlin/formats.def")
CHECKPOINT_SOURCES = ("src/checkpoint/module_tensors.cc", "src/checkpoint/open.cc",
                      "src/checkpoint/files/safetensors.cc", "src/formats/format_table.cc",
                      "src/recipe/layer_class.cc", "include/marlin/formats.def")
JSON_WORDS = ("[[", "]]", "{}", "{},", '":', ",", "null", "true", "-1", "0", "1e400",
              "18446744073709551615", "9223372036854775807", "2147483647", "\\u0000", "\\ud800")

def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_value(value: Any) -> tuple[int, bytes]:
    """Returns the type number and the bytes of a metadata value."""
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, gguf_text(value)
    kind = gguf_value(value[0])[0]
    return 9, struct.pack("<IQ", kind, len(value)) + b"".join(gguf_value(v)[1] for v in value)


def gguf_file(values: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int]]) -> bytes:
    """Returns a file; tensors have a shape, contiguous dimension first, and F32 (0) or Q8_0 (8)."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    for key, value in values.items():
        kind, content = gguf_value(value)
        header += gguf_text(key) + struct.pack("<I", kind) + content
    data = b""
    for name, (shape, kind) in tensors.items():
        header += gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind,
                                                len(data))
        elements = 1
        for size in shape:
            elements *= size
        data += bytes(elements * 4 if kind == 0 else elements // 32 * 34)
        data += bytes(-len(data) % 32)
    return header + bytes(-len(header) % 32) + data


def gguf_files() -> Seeds:
    """Returns files of every block type, and models of several architectures."""
    folder = ROOT / "tests" / "golden" / "gguf_types"
    seeds = {"all-types": (folder / "all_types.gguf").read_bytes()}
    for name in ("llama", "qwen3moe", "glm4moe", "gpt-oss", "deepseek2"):
        values: dict[str, Any] = {
            "general.architecture": name, "general.alignment": 32,
            **{f"{name}.{key}": number for key, number in {
                "block_count": 2, "embedding_length": 32, "feed_forward_length": 64,
                "context_length": 128, "attention.head_count": 2, "attention.head_count_kv": 1,
                "expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32,
                "attention.sliding_window": 16, "attention.kv_lora_rank": 16,
                "rope.dimension_count": 8, "nextn_predict_layers": 1}.items()},
            f"{name}.rope.freq_base": 10000.0, f"{name}.rope.scaling.type": "yarn",
            f"{name}.rope.scaling.factor": 4.0, f"{name}.expert_weights_norm": True,
            "tokenizer.ggml.model": "llama" if name == "llama" else "gpt2",
            "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": ["a", "b", "ab", "<end>"],
            "tokenizer.ggml.token_type": [1, 1, 1, 3], "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.scores": [0.0, -1.0, -2.0, 0.0], "tokenizer.ggml.eos_token_id": 3,
        }
        seeds[name] = gguf_file(values, {
            "token_embd.weight": ((32, 4), 8), "output_norm.weight": ((32,), 0),
            "rope_freqs.weight": ((4,), 0), "blk.0.attn_q.weight": ((32, 32), 8),
            "blk.0.attn_k.weight": ((32, 16), 0), "blk.0.attn_q.bias": ((32,), 0),
            "blk.0.ffn_gate_exps.weight": ((32, 32, 2), 8),
            "blk.0.ffn_up_exps.weight": ((32, 32, 2), 8),
            "blk.0.ffn_gate_exps.bias": ((32, 2), 0), "blk.0.ffn_up_exps.bias": ((32, 2), 0),
            "blk.0.ffn_down_exps.weight": ((32, 32, 2), 0)})
    return seeds


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def onnx_field(number: int, value: int | str | bytes) -> bytes:
    """Returns one field of a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def onnx_tensor(name: str, kind: int, shape: tuple[int, ...], data: bytes, field: int = 9) -> bytes:
    return (b"".join(onnx_field(1, size) for size in shape) + onnx_field(2, kind)
            + onnx_field(8, name) + onnx_field(field, data))


def onnx_node(kind: str, inputs: tuple[str, ...], **integers: int) -> bytes:
    node = b"".join(onnx_field(1, name) for name in inputs) + onnx_field(2, "d")
    for name, value in integers.items():
        node += onnx_field(5, onnx_field(1, name) + onnx_field(3, value))
    return node + onnx_field(4, kind)


def onnx_files() -> Seeds:
    """Returns a graph for each way in which weights are quantized."""
    def model(nodes: list[bytes], tensors: list[bytes]) -> bytes:
        graph = b"".join(onnx_field(1, node) for node in nodes)
        return onnx_field(7, graph + b"".join(onnx_field(5, tensor) for tensor in tensors))

    scales = onnx_tensor("s", 1, (3, 2), bytes(24))
    seeds = {}
    for bits in (2, 4, 8):
        seeds[f"nbits-{bits}"] = model(
            [onnx_node("MatMulNBits", ("x", "m_Q4", "s", "z"), K=32, N=3, block_size=16,
                       bits=bits)],
            [onnx_tensor("m_Q4", 2, (3, 2, 2 * bits), bytes(12 * bits)), scales,
             onnx_tensor("z", 2, (3, max(1, bits // 4)), bytes(3 * max(1, bits // 4)))])
    for kind, size in ((2, 8), (3, 8), (17, 8), (19, 8), (21, 4), (22, 4), (23, 4), (25, 2)):
        seeds[f"linear-{kind}"] = model(
            [onnx_node("DequantizeLinear", ("w", "s", "z"), axis=0, block_size=16),
             onnx_node("Transpose", ("d",))],
            [onnx_tensor("w", kind, (32, 2), bytes(8 * size)),
             onnx_tensor("s", 1, (2, 2), bytes(16)),
             onnx_tensor("z", kind, (2, 2), bytes(size // 2))])
    for bits, block in ((2, 32), (4, 0), (8, 16)):
        row = 4 * bits  # Bytes of 32 codes.
        groups = 32 // block if block else 1
        scale_shape = (2, 32, groups) if block else (2, 32)
        zero_shape = (2, 32, -(-groups * bits // 8)) if block else (2, 4 * bits)
        zero_bytes = bytes(64 * -(-groups * bits // 8) if block else 8 * bits)
        seeds[f"experts-{bits}"] = model(
            [onnx_node("QMoE", ("x", "r", "a", "as", "", "b", "bs", "", "", "", "", "az", "bz"),
                       expert_weight_bits=bits, block_size=block, weights_prepacked=0)],
            [onnx_tensor(name, 2, (2, 32, row), bytes(64 * row)) for name in ("a", "b")]
            + [onnx_tensor(name, 1, scale_shape, bytes(256 * groups)) for name in ("as", "bs")]
            + [onnx_tensor(name, 2, zero_shape, zero_bytes) for name in ("az", "bz")])
    seeds["values"] = model(
        [onnx_node("DequantizeLinear", ("w", "s", "z"), axis=1)],
        [onnx_tensor("w", 3, (2, 2, 3), bytes(12)), onnx_tensor("s", 10, (2,), bytes(4)),
         onnx_tensor("z", 3, (2,), bytes(2), 5)])
    for name, nodes in (("matmul", [onnx_node("MatMul", ("x", "w"))]),
                        ("gemm", [onnx_node("Gemm", ("x", "w"), transB=1)]),
                        ("transposed", [onnx_node("Transpose", ("w",)),
                                        onnx_node("MatMul", ("x", "d"))])):
        seeds[f"plain-{name}"] = model(nodes, [onnx_tensor("w", 1, (2, 3), bytes(24))])
    seeds["external"] = model([], [onnx_tensor("w", 1, (2,), onnx_field(1, "location")
                                               + onnx_field(2, "data.bin"), 13)
                                   + onnx_field(14, 1)])
    return seeds


TARGETS = {
    "arguments_fuzz": Target(
        STRUCTURE, argument_lines, ("src/cli/**/*.cc", *RECIPE_SOURCES),
        ("--", "=", "4611686018427387904", "1e400", "gK"),
        # An allocation that is too large returns a null pointer.
        ("-malloc_limit_mb=1048576", "-close_fd_mask=3")),
    "checkpoint_fuzz": Target(STRUCTURE, checkpoints, (*CHECKPOINT_SOURCES, *CONFIG_SOURCES),
                              (DIVIDER, *JSON_WORDS)),
    "foreign_fuzz": Target(STRUCTURE, foreign_checkpoints,
                           ("src/checkpoint/readers/**/*.cc", "src/checkpoint/module_reader.cc",
                            "src/checkpoint/files/safetensors.cc"), (DIVIDER, *JSON_WORDS)),
    "generation_config_fuzz": Target(TEXT, generation_configs, CONFIG_SOURCES, JSON_WORDS),
    "gguf_fuzz": Target(STRUCTURE, gguf_files, ("src/checkpoint/readers/gguf/*.cc",),
                        ("GGUF", "split.count", ".scale", "llama.", "attention.head_count_kv")),
    "importance_fuzz": Target(STRUCTURE, importance_matrices,
                              ("src/checkpoint/convert/importance_file.cc",
                               "src/checkpoint/readers/gguf/gguf_file.cc"), ("GGUF", "imatrix")),
    "json_fuzz": Target(TEXT, json_shapes, (), JSON_WORDS),
    "layout_fuzz": Target(SMALL, layouts),
    "model_config_fuzz": Target(TEXT, config_shapes, CONFIG_SOURCES, JSON_WORDS),
    "msl_fuzz": Target(16 << 10, metal_sources, ("metal_sim/src/metal_sim/msl_*.cc",)),
    "onnx_fuzz": Target(STRUCTURE, onnx_files, ("src/checkpoint/readers/onnx/*.cc",)),
    "pattern_fuzz": Target(TEXT, patterns, ("src/recipe/layer_class.cc", "src/recipe/regex.cc"),
                           ("(?:", "(?=", "(?!", ")*", ")+", "{1,", "[[:alpha:]]", "\\b", "\\1",
                            ".*", "|", "^", "$", "[^", "*?")),
    "prepared_fuzz": Target(SMALL, prepared_indices, ("src/model/prepared_file.cc",), JSON_WORDS),
    "prompt_lines_fuzz": Target(TEXT, prompt_files, ("src/cli/arguments/prompt_lines.cc",),
                                JSON_WORDS),
    "quantization_config_fuzz": Target(TEXT, quantization_configs, CHECKPOINT_SOURCES, JSON_WORDS),
    "recipe_fuzz": Target(1 << 20, recipes, RECIPE_SOURCES, JSON_WORDS),
    "routing_fuzz": Target(TEXT, routing_files, ("src/recipe/routing_files.cc",), JSON_WORDS),
    "safetensors_fuzz": Target(TEXT, safetensors, ("src/checkpoint/files/safetensors.cc",),
                               JSON_WORDS),
    "sensitivity_fuzz": Target(TEXT, sensitivities, ("src/recipe/sensitivity_file.cc",),
                               JSON_WORDS),
    "token_file_fuzz": Target(256 << 10, token_files),
    "tuning_fuzz": Target(STRUCTURE, nothing, ("src/plan/gemm/tuning_table.cc",)),
}

LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
WORD = re.compile(r"[\w.,:/*?\[\]=@-]{2,40}")
FORMAT = re.compile(r"^MARLIN_FORMAT\(\w+, *(\w+)", re.MULTILINE)


def dictionary(target: Target) -> str:
    """Returns the names that the readers compare with, so that no second list goes stale."""
    words = dict.fromkeys(target.more)
    for pattern in target.words:
        files = sorted(ROOT.glob(pattern))
        if not files:
            raise SystemExit(f"no such source: {pattern}")
        for file in files:
            text = re.sub(r"^#include.*$", "", file.read_text(), flags=re.MULTILINE)
            found = LITERAL.findall(text) + FORMAT.findall(text)
            words.update(dict.fromkeys(w for w in found if WORD.fullmatch(w)))
    quoted = []
    for word in words:
        escaped = "".join(c if 32 <= ord(c) < 127 and c not in '"\\' else f"\\x{ord(c):02x}"
                          for c in word)
        quoted.append(f'"{escaped}"')
    return "\n".join(quoted) + "\n"


def check() -> int:
    there = {file.stem for file in HERE.glob("*_fuzz.cc")}
    for name in sorted(there ^ set(TARGETS)):
        print(f"tests/fuzz: {name}: {'no row in make_seeds.py' if name in there else 'no source'}")
    return 1 if there != set(TARGETS) else 0


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        return check()
    folder = Path(arguments[0])
    for name, target in TARGETS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for seed, content in target.seeds().items():
            (folder / name / seed).write_bytes(content[:target.max_len])
        (folder / f"{name}.dict").write_text(dictionary(target))
        options = [f"-max_len={target.max_len}", *target.options]
        (folder / f"{name}.options").write_text("\n".join(options) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
