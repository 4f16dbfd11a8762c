"""Makes the GGUF files of this folder with the `gguf` package (0.19.0), which also computes the
values that the tests expect.

Usage: make.py [FOLDER]   (needs gguf, numpy and safetensors)
"""

import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors.numpy import save_file

# The byte offsets of the fp16 numbers of a block: random bits there would be NaN now and then.
HALVES = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
    Type.MXFP4: (),
    Type.NVFP4: (),
    Type.IQ1_S: (0,),
    Type.IQ1_M: (),
    Type.IQ2_XXS: (0,),
    Type.IQ2_XS: (0,),
    Type.IQ2_S: (0,),
    Type.IQ3_XXS: (0,),
    Type.IQ3_S: (0,),
}
SHAPES = {"a": (3, 512), "b": (2, 3, 256), "c": (1, 256), "v": (256,)}


def random_halves(rng: np.random.Generator, count: int) -> np.ndarray:
    """Finite fp16 numbers, some of them zero, subnormal or negative."""
    scales = (rng.standard_normal(count) * 0.05).astype(np.float16)
    scales[::7] = 0
    scales[1::11] = 3e-7
    return scales


def random_blocks(rng: np.random.Generator, kind: Type, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of random codes with finite scales."""
    elements, size = GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // elements
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = random_halves(rng, count).view(np.uint8).reshape(count, 2)
    if kind == Type.IQ1_M:
        # Four bits of the fp16 are the upper ones of each of the four last words.
        words = blocks[:, -8:].view(np.uint16)
        digits = random_halves(rng, count).view(np.uint16)[:, None] >> np.arange(0, 16, 4)
        blocks[:, -8:] = ((words & 0x0FFF) | (digits << 12).astype(np.uint16)).view(np.uint8)
    if kind == Type.NVFP4:
        # 0xff is no scale of E4M3.
        blocks[:, :4] = np.where(blocks[:, :4] == 0xFF, 0x7F, blocks[:, :4])
    if kind == Type.MXFP4:
        blocks[:, 0] = rng.integers(0, 250, count)
        # Values below the normal range of fp32 differ in packages that flush them to zero.
        blocks[blocks[:, 0] < 4, 0] = 4
    return blocks.reshape(*shape[:-1], shape[-1] // elements * size)


def make_all_types(folder: Path) -> None:
    """Every block type in every shape."""
    rng = np.random.default_rng(20261124)
    writer = gguf.GGUFWriter(folder / "all_types.gguf", "llama")
    writer.add_string("test.text", "\u00e4")
    writer.add_array("test.texts", ["a", "", "\u00e4"])
    writer.add_float64("test.real", 1.5)
    writer.add_bool("test.bool", True)
    expected = {}
    for kind in HALVES:
        for prefix, shape in SHAPES.items():
            name = f"{prefix}.{kind.name}.weight"
            blocks = random_blocks(rng, kind, shape)
            writer.add_tensor(name, blocks, raw_shape=blocks.shape, raw_dtype=kind)
            expected[name] = dequantize(blocks, kind).reshape(shape).astype(np.float32)
    # NVFP4 with factors: one for each expert, one for all; that of activations is not used.
    for name, shape, count in (("d", (37, 64), 1), ("e", (2, 3, 64), 2)):
        blocks = random_blocks(rng, Type.NVFP4, shape)
        scale = (rng.random(count) + 0.5).astype(np.float32)
        writer.add_tensor(f"{name}.weight", blocks, raw_shape=blocks.shape, raw_dtype=Type.NVFP4)
        writer.add_tensor(f"{name}.scale", scale)
        writer.add_tensor(f"{name}.input_scale", np.array([0.25], np.float32))
        # The product of scale and factor is rounded before it meets the code.
        elements = np.repeat(nvfp4_scales(blocks), 16, axis=-1)
        factors = scale.reshape(-1, *[1] * (len(shape) - 1)) if count > 1 else scale
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = np.where(elements == 0, 0, dequantize(blocks, Type.NVFP4) / elements)
        expected[f"{name}.weight"] = ((elements * factors) * codes).astype(np.float32)
    dense = rng.standard_normal((3, 5)).astype(np.float32)
    for name, dtype in (("f32", np.float32), ("f16", np.float16), ("i16", np.int16)):
        writer.add_tensor(f"dense.{name}", dense.astype(dtype))
        expected[f"dense.{name}"] = dense.astype(dtype).astype(np.float32)
    write(writer)
    save_file(expected, folder / "all_types.expected.safetensors")


def nvfp4_scales(blocks: np.ndarray) -> np.ndarray:
    """The scales of groups of 16, as fp32."""
    raw = blocks.reshape(*blocks.shape[:-1], -1, 36)[..., :4]
    return 2 * gguf.quants.NVFP4.ue4m3_to_fp32(raw).reshape(*blocks.shape[:-1], -1).astype(
        np.float32
    )


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    make_all_types(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
