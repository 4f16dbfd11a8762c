#!/usr/bin/env python3
"""The value of every code of every weight format with at most 8 bits, from the definitions.

This table is written by hand and shares no code with src/formats: the exhaustive tests compare the
codecs with it. Without arguments it prints the table (format, code, value as a hexadecimal float);
--check compares that with format_values.txt and verifies the normal-float quantiles against their
construction.
"""

import pathlib
import statistics
import struct
import sys

# OCP FP4 E2M1, from the table of the MX specification.
FP4_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]

# QLoRA's NF4 as published with bitsandbytes.
NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]

# llama.cpp's IQ4_NL.
IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def normal_float(bits):
    """Returns QLoRA's quantiles: 2^(b-1) positive ones, one fewer negative ones, and 0."""
    half = 2 ** (bits - 1)
    # The mean of the outermost probabilities that the two sides would have individually.
    offset = 0.5 * ((1 - 1 / (4 * half)) + (1 - 1 / (4 * half - 2)))
    quantile = statistics.NormalDist().inv_cdf
    positive = [quantile(offset + (0.5 - offset) * i / half) for i in range(half)]
    negative = [-quantile(offset + (0.5 - offset) * i / (half - 1)) for i in range(half - 1)]
    largest = max(positive)
    return sorted(x / largest for x in positive + negative + [0.0])


def float8(code, exponent_bits, mantissa_bits, bias):
    """Decodes an 8-bit float by its definition; the caller handles the special codes."""
    sign = -1.0 if code >> 7 else 1.0
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    fraction = (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def fp6_e2m3(code):
    """OCP FP6 E2M3: one sign bit, two exponent bits with bias 1, three mantissa bits."""
    sign = -1.0 if code >> 5 else 1.0
    exponent = code >> 3 & 3
    fraction = (code & 7) / 8
    return sign * (fraction if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - 1))


def fp8_e4m3(code):
    return float("nan") if code & 0x7F == 0x7F else float8(code, 4, 3, 7)


def fp8_e5m2(code):
    if code & 0x7F > 0x7C:
        return float("nan")
    if code & 0x7F == 0x7C:
        return float("-inf") if code >> 7 else float("inf")
    return float8(code, 5, 2, 15)


TABLE = {
    "fp4_e2m1": FP4_E2M1,
    "u4": list(range(16)),
    "s4": list(range(-8, 8)),
    "nf4": NF4,
    "nf3": normal_float(3),
    "nf2": normal_float(2),
    "codebook4": IQ4_NL,
    "int6": list(range(-32, 32)),
    "u6": list(range(64)),
    "fp6_e2m3": [fp6_e2m3(code) for code in range(64)],
    "int5": list(range(-16, 16)),
    "u5": list(range(32)),
    "int3": [-4, -3, -2, -1, 0, 1, 2, 3],
    "int2": [-2, -1, 0, 1],
    "fp8_e4m3": [fp8_e4m3(code) for code in range(256)],
    "fp8_e5m2": [fp8_e5m2(code) for code in range(256)],
    "s8": list(range(0, 128)) + list(range(-128, 0)),
    "u8": list(range(256)),
}


def as_fp32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def lines():
    for name, values in TABLE.items():
        for code, value in enumerate(values):
            yield f"{name} {code} {float(as_fp32(value)).hex()}"


def check():
    errors = []
    stored = pathlib.Path(__file__).with_name("format_values.txt").read_text().splitlines()
    wanted = list(lines())
    if len(stored) != len(wanted):
        errors.append(f"format_values.txt: expected {len(wanted)} lines, got {len(stored)}")
    for got, want in zip(stored, wanted, strict=False):
        if got != want:
            errors.append(f"format_values.txt: expected '{want}', got '{got}'")
    # bitsandbytes computed its table in fp32, hence the tolerance.
    for code, (published, built) in enumerate(zip(NF4, normal_float(4), strict=True)):
        if abs(published - built) > 5e-7:
            errors.append(f"nf4 {code}: published {published}, constructed {built}")
    return errors


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        found = check()
        print("\n".join(found) if found else "format_values.txt matches")
        sys.exit(1 if found else 0)
    print("\n".join(lines()))
