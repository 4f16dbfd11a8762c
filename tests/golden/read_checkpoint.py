#!/usr/bin/env python3
"""Reads a quantized directory as docs/formats/checkpoint.md specifies and compares every weight,
bit for bit, with a plain safetensors file of the same tensors in F32.

    read_checkpoint.py QUANTIZED_DIRECTORY PLAIN_FILE

It shares no code with the library, only the document and the format table next to it.
"""

import json
import math
import pathlib
import struct
import sys

from format_values import TABLE, as_fp32, fp8_e4m3

BITS = {"fp4_e2m1": 4, "u4": 4, "s4": 4, "nf4": 4, "codebook4": 4, "int6": 6, "u6": 6,
        "fp6_e2m3": 6, "int5": 5, "u5": 5, "nf3": 3, "int3": 3, "nf2": 2,
        "int2": 2, "fp8_e4m3": 8, "fp8_e5m2": 8, "s8": 8, "u8": 8}
CODEBOOKS = ("nf4", "nf3", "nf2", "codebook4")
SCALES = {"fp16": "F16", "bf16": "BF16", "fp32": "F32", "e8m0": "F8_E8M0", "e4m3": "F8_E4M3"}
SIZES = {"F16": 2, "BF16": 2, "F32": 4, "U32": 4, "I32": 4, "I8": 1, "F8_E8M0": 1, "F8_E4M3": 1}


def read_file(path):
    """Returns name -> (dtype, shape, bytes)."""
    image = path.read_bytes()
    (length,) = struct.unpack_from("<Q", image)
    header = json.loads(image[8:8 + length])
    header.pop("__metadata__", None)
    assert (8 + length) % 64 == 0, f"{path}: data begins at {8 + length}"
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], image[8 + length + begin:8 + length + end])
    return tensors


def numbers(dtype, data):
    count = len(data) // SIZES[dtype]
    if dtype == "U32":
        return struct.unpack(f"<{count}I", data)
    if dtype == "I32":
        return struct.unpack(f"<{count}i", data)
    if dtype == "I8":
        return struct.unpack(f"<{count}b", data)
    if dtype == "F32":
        return struct.unpack(f"<{count}f", data)
    if dtype == "F16":
        return struct.unpack(f"<{count}e", data)
    if dtype == "BF16":
        halves = struct.unpack(f"<{count}H", data)
        return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
    if dtype == "F8_E8M0":
        return [2.0 ** (byte - 127) for byte in data]
    return [fp8_e4m3(byte) for byte in data]


def code_at(words, bits, n_count, k, n):
    if 32 % bits:
        row = bits * (k // 32)
        run = sum(words[(row + i) * n_count + n] << (32 * i) for i in range(bits))
        return run >> (bits * (k % 32)) & (2**bits - 1)
    per_word = 32 // bits
    return words[k // per_word * n_count + n] >> (bits * (k % per_word)) & (2**bits - 1)


def tiled_code_at(words, n_count, k, n):
    """A code of marlin_w4, [K/32][N/32][32 lanes][4 words]: docs/formats/marlin_w4.md."""
    row, column = k % 16, n % 16
    lane = column % 8 * 4 + row % 8 // 2
    word = k % 32 // 16 * 2 + n % 32 // 16
    block = k // 32 * -(-n_count // 32) + n // 32
    # From bit 0 on: (r, c), (r + 8, c), (r, c + 8), (r + 8, c + 8), and the same of r + 1.
    place = row % 2 * 4 + column // 8 * 2 + row // 8
    return words[(block * 32 + lane) * 4 + word] >> (4 * place) & 15


def base_name(name):
    return name.removesuffix(".weight").replace(".*.", ".")


class Module:
    def __init__(self, name, facts, tensors):
        self.name, self.facts = name, facts
        self.experts = facts["shape"][0] if len(facts["shape"]) == 3 else 1
        self.k, self.n = facts["shape"][-2:]
        self.bits = BITS[facts["format"]]
        self.groups = -(-self.k // facts["group_size"])
        self.tensors = tensors

    def part(self, suffix, dtype, shape):
        found_dtype, found_shape, data = self.tensors.pop(f"{base_name(self.name)}.{suffix}")
        assert (found_dtype, found_shape) == (dtype, shape), f"{self.name}.{suffix}"
        return numbers(dtype, data)

    def matrix(self, suffix, dtype, rows):
        return self.stack(suffix, dtype, [rows, self.n])

    def stack(self, suffix, dtype, shape):
        values = self.part(suffix, dtype, self.facts["shape"][:-2] + shape)
        size = math.prod(shape)
        return [values[e * size:(e + 1) * size] for e in range(self.experts)]

    def codes(self, rows):
        """Returns the words of every expert, and code(words, k, n)."""
        if self.facts.get("layout") == "marlin_w4":
            words = self.stack("qweight", "U32", [-(-self.k // 32), -(-self.n // 32), 32, 4])
            return words, lambda expert, k, n: tiled_code_at(expert, self.n, k, n)
        words = self.matrix("qweight", "U32", rows)
        return words, lambda expert, k, n: code_at(expert, self.bits, self.n, k, n)

    def parameters(self, suffix, dtype, levels):
        """Returns [experts][groups * n] scales or biases, of one level or two."""
        if not levels:
            return self.matrix(suffix, dtype, self.groups)
        fine = self.matrix(suffix, "I8", self.groups)
        coarse = self.matrix(f"super_{suffix}", dtype, -(-self.k // levels))
        size = self.facts["group_size"]
        return [[as_fp32(coarse[e][g * size // levels * self.n + n] * fine[e][g * self.n + n])
                 for g in range(self.groups) for n in range(self.n)] for e in range(self.experts)]

    def decode(self):
        """Returns [experts][k][n] in fp32."""
        facts = self.facts
        whole_runs = self.bits * -(-self.k // 32)
        rows = whole_runs if 32 % self.bits else -(-self.k * self.bits // 32)
        metadata = None
        if facts.get("sparsity") == "2:4":
            runs = -(-self.k // 32)
            rows = runs * self.bits // 2
            metadata = self.matrix("metadata", "U32", runs)
        words, code = self.codes(rows)
        scale_type = SCALES[facts["scale_type"]]
        levels = facts.get("super_group_size")
        scales = self.parameters("scales", scale_type, levels)
        zero_type = SCALES[facts.get("zero_type", "fp16")]
        zeros = self.matrix("zeros", zero_type, self.groups) if facts["zeros"] else None
        bias_type = scale_type if SIZES[scale_type] > 1 else "F16"
        biases = self.parameters("qbias", bias_type, levels) if facts["biases"] else None
        factors = [1.0] * self.experts
        if facts["global_scale"]:
            factors = self.part("global_scale", "F32", [self.experts])
        values = [as_fp32(value) for value in TABLE[facts["format"]]]
        if facts["format"] in CODEBOOKS:
            values = self.part("codebook", "F32", [2**self.bits])

        rows_of = [list(range(self.k))] * self.experts
        if facts.get("permutation"):
            order = self.part("permutation", "I32", facts["shape"][:-2] + [self.k])
            for e in range(self.experts):
                places = {row: i for i, row in enumerate(order[e * self.k:(e + 1) * self.k])}
                rows_of[e] = [places[row] for row in range(self.k)]

        def value_at(e, k, n):
            if metadata is None:
                return values[code(words[e], k, n)]
            block = k // 4
            nibble = metadata[e][block // 8 * self.n + n] >> (4 * (block % 8)) & 15
            assert nibble in (4, 8, 9, 12, 13, 14), f"{self.name}: nibble {nibble}"
            if k % 4 not in (nibble & 3, nibble >> 2):
                return 0.0
            return values[code(words[e], 2 * block + (k % 4 == nibble >> 2), n)]

        def weight(e, k, n):
            group = k // facts["group_size"] * self.n + n
            value = value_at(e, k, n)
            scale = scales[e][group]
            scale = scale / factors[e] if facts.get("global_scale_divides") else scale * factors[e]
            # Exact up to the last rounding: 24-bit scales times codes or zeros fit a double.
            scale = as_fp32(scale)
            if zeros:
                return as_fp32(scale * value - scale * zeros[e][group])
            return as_fp32(scale * value + biases[e][group] if biases else scale * value)

        inputs = [[1.0] * self.k] * self.experts
        if facts.get("input_scale"):
            flat = self.part("input_scale", "F32", facts["shape"][:-2] + [self.k])
            inputs = [flat[e * self.k:(e + 1) * self.k] for e in range(self.experts)]
        return [self.transform(inputs[e], [[weight(e, row, n) for n in range(self.n)]
                                           for row in rows_of[e]]) for e in range(self.experts)]

    def transform(self, scale, rows):
        """Returns diag(input_scale) * H * rows in fp32."""
        size = self.facts.get("input_hadamard", 1)
        if size == 1 and scale == [1.0] * self.k:
            return rows

        def entry(k, n):
            if size == 1:
                return as_fp32(rows[k][n] * scale[k])
            first = k // size * size
            terms = [rows[first + j][n] * (-1) ** bin((k - first) & j).count("1")
                     for j in range(size)]
            return as_fp32(math.fsum(terms) / math.sqrt(size) * scale[k])

        return [[entry(k, n) for n in range(self.n)] for k in range(self.k)]

    def restore(self):
        """Returns source name -> (shape, fp32 bytes)."""
        dense = self.decode()
        matrices = []
        for expert in dense:
            rows = expert
            if self.facts["source_layout"] == "out_in":
                rows = [[expert[k][n] for k in range(self.k)] for n in range(self.n)]
            flat = [value for row in rows for value in row]
            matrices.append(struct.pack(f"<{len(flat)}f", *flat))
        shape = [self.n, self.k] if self.facts["source_layout"] == "out_in" else [self.k, self.n]
        if "*" in self.name:
            return {self.name.replace("*", str(e)): (shape, m) for e, m in enumerate(matrices)}
        if len(self.facts["shape"]) == 3:
            shape = [self.experts] + shape
        return {self.name: (shape, b"".join(matrices))}


def main():
    folder, plain_path = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "metal_marlin" and config["version"] in (1, 2, 3)
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(read_file(path))
    plain = read_file(plain_path)
    errors = []
    for name, facts in config["modules"].items():
        for source, (shape, data) in Module(name, facts, tensors).restore().items():
            if plain.pop(source, None) != ("F32", shape, data):
                errors.append(f"{source}: differs")
    for name, tensor in tensors.items():
        if plain.pop(name, None) != tensor:
            errors.append(f"{name}: differs")
    errors += [f"{name}: not found" for name in plain]
    for error in errors:
        print(error)
    print(f"{len(config['modules'])} modules, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
