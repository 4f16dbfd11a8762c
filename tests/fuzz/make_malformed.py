#!/usr/bin/env python3
"""Writes malformed/*.safetensors and malformed/manifest.json, or with --check compares them.

Every case is one file that a reader must refuse with the given code and a part of the given
message. The files follow from the format's rules alone, not from this project's writer.
"""

import json
import pathlib
import struct
import sys

MALFORMED = "malformed file"
UNSUPPORTED = "unsupported"

CASES: dict[str, tuple[bytes, str, str]] = {}


def add(name, image, message, code=MALFORMED):
    if name in CASES:
        raise ValueError(f"two cases are called {name}")
    CASES[name] = (image, code, message)


def image(header, data=b"", length=None):
    if isinstance(header, str):
        header = header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(dtype="F32", shape="[2]", offsets="[0,8]"):
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


def one(body, data=bytes(8)):
    return image('{"t":' + body + "}", data)


def header_cases():
    add("empty", b"", "0 bytes, a safetensors file has at least 8")
    for size in range(1, 8):
        add(f"length_cut_{size}", bytes(size), f"{size} bytes, a safetensors file has at least 8")
    add("length_zero", bytes(8), "does not begin with '{'")
    add("length_zero_with_data", bytes(16), "does not begin with '{'")
    add("length_past_end", image("{}", length=3), "header of 3 bytes, the file has 2")
    add("length_far_past_end", image("{}", length=99_999_999), "header of 99999999 bytes")
    add("length_over_cap", image("{}", length=100_000_001),
        "header of 100000001 bytes, at most 100000000")
    add("length_2_63", image("{}", length=1 << 63), "header of 9223372036854775808 bytes")
    add("length_all_ones", image("{}", length=(1 << 64) - 1), "header of 18446744073709551615")
    add("length_big_endian", struct.pack(">Q", 2) + b"{}", "header of 144115188075855872 bytes")
    add("length_cuts_json", image('{"t":' + entry() + "}", bytes(8), length=20),
        "does not end with '}'")
    add("length_takes_data", image('{"t":' + entry() + "}", bytes(8), length=62),
        "does not end with '}'")
    add("byte_order_mark", image(b"\xef\xbb\xbf{}"), "does not begin with '{'")
    add("leading_space", image(" {}"), "does not begin with '{'")
    add("leading_newline", image("\n{}"), "does not begin with '{'")
    add("trailing_newline", image("{}\n"), "does not end with '}' and spaces")
    add("trailing_nul", image("{}\0"), "does not end with '}' and spaces")
    add("trailing_letters", image("{}x"), "does not end with '}' and spaces")
    add("two_objects", image("{}{}"), "header: ")
    add("array", image("[]"), "does not begin with '{'")
    add("number", image("12"), "does not begin with '{'")
    add("string", image('"{}"'), "does not begin with '{'")
    add("only_spaces", image("        "), "does not begin with '{'")
    add("open_brace", image("{"), "does not end with '}'")
    add("brace_and_spaces", image("{       "), "does not end with '}'")
    add("data_without_tensors", image("{}", bytes(8)), "the tensors end at 0, the data at 8")
    add("utf16", image("{}".encode("utf-16-le")), "does not end with '}'")


def json_cases():
    add("bad_utf8", image(b'{"\xff":' + entry().encode() + b"}", bytes(8)), "header: ")
    add("overlong_utf8", image(b'{"\xc0\x80":' + entry().encode() + b"}", bytes(8)), "header: ")
    add("lone_surrogate", image('{"\\ud800":' + entry() + "}", bytes(8)), "header: ")
    add("control_character", image(b'{"a\x01":' + entry().encode() + b"}", bytes(8)), "header: ")
    add("comment", image("{/* */}"), "header: ")
    add("trailing_comma", image('{"t":' + entry() + ",}", bytes(8)), "header: ")
    add("missing_comma", image('{"a":' + entry() + ' "b":' + entry() + "}", bytes(8)), "header: ")
    add("missing_colon", image('{"t"' + entry() + "}", bytes(8)), "header: ")
    add("single_quotes", image("{'t':1}"), "header: ")
    add("bare_key", image("{t:1}"), "header: ")
    add("unclosed_header", image('{"t":' + entry(), bytes(8)), "header: ")
    add("unclosed_entry", image('{"t":{"dtype":"F32"}'), 'tensor "t": no shape')
    add("unclosed_string", image('{"t}'), "header: ")
    add("nan_literal", one('{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}'), "header: ")
    add("deep_arrays", image('{"t":' + "[" * 1000 + "]" * 1000 + "}"),
        'tensor "t": expected an object, got an array')
    add("deep_objects", image('{"t":' * 500 + "1" + "}" * 500), 'unknown key "t"')
    add("deep_shape", one(entry(shape="[" * 64 + "2" + "]" * 64)),
        "shape: expected non-negative integers, got an array")
    add("deep_metadata", image('{"__metadata__":' + '{"a":' * 40 + "1" + "}" * 40 + "}"),
        "got an object")


def metadata_cases():
    for name, value, got in (
            ("number", "1", "the number 1"), ("array", "[]", "an array"),
            ("string", '"x"', 'the string "x"'),
            ("boolean", "true", "a boolean")):
        add(f"metadata_{name}", image('{"__metadata__":' + value + "}"),
            f"__metadata__: expected an object, got {got}")
    for name, value, got in (
            ("number", "1", "the number 1"), ("negative", "-1", "the negative number -1"),
            ("float", "1.5", "the number 1.5"), ("null", "null", "null"),
            ("array", "[]", "an array"), ("object", "{}", "an object"),
            ("boolean", "false", "a boolean")):
        add(f"metadata_value_{name}", image('{"__metadata__":{"k":' + value + "}}"),
            f'__metadata__: "k": expected a string, got {got}')
    add("metadata_twice", image('{"__metadata__":{},"__metadata__":{}}'),
        'duplicate key "__metadata__"')
    add("metadata_key_twice", image('{"__metadata__":{"k":"a","k":"b"}}'), 'duplicate key "k"')


def entry_cases():
    for name, value, got in (
            ("null", "null", "null"), ("number", "7", "the number 7"),
            ("string", '"F32"', 'the string "F32"'), ("array", "[]", "an array"),
            ("boolean", "true", "a boolean"), ("float", "1e3", "the number 1e3")):
        add(f"entry_{name}", image('{"t":' + value + "}"),
            f'tensor "t": expected an object, got {got}')
    add("entry_empty", image('{"t":{}}'), 'tensor "t": no dtype')
    add("no_dtype", one('{"shape":[2],"data_offsets":[0,8]}'), 'tensor "t": no dtype')
    add("no_shape", one('{"dtype":"F32","data_offsets":[0,8]}'), 'tensor "t": no shape')
    add("no_offsets", one('{"dtype":"F32","shape":[2]}'), 'tensor "t": no data_offsets')
    add("unknown_key", one('{"dtype":"F32","shape":[2],"data_offsets":[0,8],"stride":[1]}'),
        'tensor "t": unknown key "stride"')
    add("dtype_twice", one('{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}'),
        'tensor "t": duplicate key "dtype"')
    add("shape_twice", one('{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}'),
        'tensor "t": duplicate key "shape"')
    add("offsets_twice",
        one('{"dtype":"F32","shape":[2],"data_offsets":[0,8],"data_offsets":[0,8]}'),
        'tensor "t": duplicate key "data_offsets"')
    for name, dtype in (("lower", "f32"), ("empty", ""), ("unknown", "F128"), ("space", "F32 "),
                        ("torch", "torch.float32"), ("fp8", "F8_E3M4")):
        add(f"dtype_{name}", one(entry(dtype=dtype)), f'tensor "t": unknown dtype "{dtype}"')
    for dtype in ("F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"):
        add(f"dtype_{dtype.lower()}", one(entry(dtype=dtype)),
            f'tensor "t": dtype {dtype} is not supported', UNSUPPORTED)
    add("dtype_number", one('{"dtype":9,"shape":[2],"data_offsets":[0,8]}'),
        "dtype: got the number 9")
    add("dtype_null", one('{"dtype":null,"shape":[2],"data_offsets":[0,8]}'), "dtype: got null")
    add("dtype_array", one('{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}'),
        "dtype: got an array")


def shape_cases():
    for name, shape, got in (
            ("negative", "[-2]", "the negative number -2"),
            ("minus_one", "[-1,2]", "the negative number -1"),
            ("float", "[2.0]", "the number 2.0"), ("exponent", "[2e0]", "the number 2e0"),
            ("string", '["2"]', 'the string "2"'), ("null", "[null]", "null"),
            ("boolean", "[true]", "a boolean"), ("object", "[{}]", "an object"),
            ("past_u64", "[18446744073709551616]", "the number 18446744073709551616")):
        add(f"shape_{name}", one(entry(shape=shape)),
            f'tensor "t": shape: expected non-negative integers, got {got}')
    add("shape_is_number", one(entry(shape="2")), "shape: got the number 2")
    add("shape_is_object", one(entry(shape="{}")), "shape: got an object")
    add("shape_u64_max", one(entry(shape="[18446744073709551615]")),
        "dimension 18446744073709551615 is too large")
    add("shape_2_63", one(entry(shape="[9223372036854775808]")),
        "dimension 9223372036854775808 is too large")
    add("shape_2_62", one(entry(shape="[4611686018427387904]")), "overflows")
    add("shape_2_32_squared", one(entry(shape="[4294967296,4294967296]")), "overflows")
    add("shape_wraps_to_8", one(entry(shape="[4611686018427387906]")), "overflows")
    add("shape_overflows_then_zero",
        one(entry(shape="[4294967296,4294967296,0]", offsets="[0,0]"), b""), "overflows")
    add("shape_nine_dimensions", one(entry(shape="[2,1,1,1,1,1,1,1,1]")),
        "shape: more than 8 dimensions")
    add("shape_too_small", one(entry(shape="[1]")), "needs 4 bytes, data_offsets [0, 8] hold 8")
    add("shape_too_large", one(entry(shape="[3]")), "needs 12 bytes, data_offsets [0, 8] hold 8")
    add("shape_zero_with_data", one(entry(shape="[0]")), "needs 0 bytes")
    add("shape_scalar_with_8", one(entry(shape="[]")), "needs 4 bytes")


def offset_cases():
    for name, offsets, got in (
            ("negative", "[-8,0]", "the negative number -8"),
            ("float", "[0,8.0]", "the number 8.0"), ("string", '[0,"8"]', 'the string "8"'),
            ("null", "[null,8]", "null"), ("nested", "[[0,8]]", "an array")):
        add(f"offsets_{name}", one(entry(offsets=offsets)),
            f'tensor "t": data_offsets: expected non-negative integers, got {got}')
    add("offsets_none", one(entry(offsets="[]")), "data_offsets: expected 2 numbers, got 0")
    add("offsets_one", one(entry(offsets="[8]")), "data_offsets: expected 2 numbers, got 1")
    add("offsets_three", one(entry(offsets="[0,4,8]")), "data_offsets: more than 2 numbers")
    add("offsets_is_number", one(entry(offsets="8")), "data_offsets: got the number 8")
    add("offsets_reversed", one(entry(offsets="[8,0]")), "the end comes before the begin")
    add("offsets_u64_max", one(entry(offsets="[0,18446744073709551615]")),
        "18446744073709551615 is too large")
    add("offsets_2_63", one(entry(offsets="[9223372036854775808,9223372036854775816]")),
        "9223372036854775808 is too large")
    add("offsets_near_2_63",
        one(entry(offsets="[9223372036854775799,9223372036854775807]")),
        "[9223372036854775799, 9223372036854775807] pass the end of the data, 8 bytes")
    add("offsets_past_end", one(entry(offsets="[8,16]")), "pass the end of the data, 8 bytes")
    add("data_missing", one(entry(), b""), "pass the end of the data, 0 bytes")
    add("data_short", one(entry(), bytes(7)), "pass the end of the data, 7 bytes")
    add("data_long", one(entry(), bytes(9)), "the tensors end at 8, the data at 9")


def layout_cases():
    def two(first, second, size):
        return image('{"a":' + first + ',"b":' + second + "}", bytes(size))

    add("same_name", image('{"t":' + entry() + ',"t":' + entry(offsets="[8,16]") + "}", bytes(16)),
        'duplicate key "t"')
    add("same_name_same_data", image('{"t":' + entry() + ',"t":' + entry() + "}", bytes(8)),
        'duplicate key "t"')
    add("same_name_escaped",
        image('{"t":' + entry() + ',"\\u0074":' + entry(offsets="[8,16]") + "}", bytes(16)),
        'duplicate key "t"')
    add("same_empty_name",
        image('{"":' + entry() + ',"":' + entry(offsets="[8,16]") + "}", bytes(16)),
        'duplicate key ""')
    add("same_data", two(entry(), entry(), 8), "overlap the tensor before, which ends at 8")
    add("overlap_by_4", two(entry(), entry(offsets="[4,12]"), 12),
        'tensor "b": data_offsets [4, 12] overlap the tensor before, which ends at 8')
    add("inside_another", two(entry(shape="[4]", offsets="[0,16]"), entry(offsets="[4,12]"), 16),
        'tensor "b": data_offsets [4, 12] overlap')
    add("hole_first", one(entry(offsets="[4,12]"), bytes(12)), "leave a hole after 0")
    add("hole_between", two(entry(), entry(offsets="[12,20]"), 20),
        'tensor "b": data_offsets [12, 20] leave a hole after 8')
    add("hole_of_alignment", two(entry(), entry(offsets="[64,72]"), 72), "leave a hole after 8")
    add("empty_tensor_past_end", two(entry(), entry(shape="[0]", offsets="[9,9]"), 8),
        'tensor "b": data_offsets [9, 9] pass the end of the data, 8 bytes')
    add("empty_tensor_inside", two(entry(), entry(shape="[0]", offsets="[4,4]"), 8),
        'tensor "b": data_offsets [4, 4] overlap')
    add("name_too_long", image('{"' + "n" * 1025 + '":' + entry() + "}", bytes(8)),
        "tensor name of 1025 bytes, at most 1024")
    add("name_with_newline", image('{"a\\nb":' + entry(shape="[3]") + "}", bytes(8)),
        'tensor "a\\x0ab": f32 [3] needs 12 bytes')


def foreign_cases():
    add("gguf_inside", b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "a GGUF file", UNSUPPORTED)
    add("zip_inside", b"PK\x03\x04" + bytes(26), "a PyTorch pickle", UNSUPPORTED)
    add("pickle_inside", b"\x80\x02}q\x00." + bytes(4), "a PyTorch pickle", UNSUPPORTED)


def main():
    for cases in (header_cases, json_cases, metadata_cases, entry_cases, shape_cases,
                  offset_cases, layout_cases, foreign_cases):
        cases()
    folder = pathlib.Path(__file__).parent / "malformed"
    manifest = [{"file": f"{name}.safetensors", "code": code, "message": message}
                for name, (_, code, message) in CASES.items()]
    files = {f"{name}.safetensors": content for name, (content, _, _) in CASES.items()}
    files["manifest.json"] = (json.dumps(manifest, indent=1) + "\n").encode()
    if sys.argv[1:] == ["--check"]:
        present = {path.name: path.read_bytes() for path in folder.iterdir()}
        wrong = sorted(name for name in files.keys() | present.keys()
                       if files.get(name) != present.get(name))
        for name in wrong:
            print(f"{name}: differs from what make_malformed.py writes")
        return 1 if wrong else 0
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    print(f"{len(CASES)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
