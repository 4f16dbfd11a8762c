#!/usr/bin/env python3
"""Makes the checkpoints of this folder with a version of compressed-tensors that wrote 2:4 formats.

Usage: make.py (with compressed-tensors 0.12.2, torch 2.13.0 and safetensors 0.8.0)

Each folder is a checkpoint; NAME.expected.safetensors has its dense weights. For marlin-24, which
the package writes and does not read, these are the codes before they were packed, in int8, and
their scales; for the others, what the package decompresses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import Sparse24BitMaskConfig, SparsityCompressionConfig
from compressed_tensors.config.sparse_bitmask import BitmaskConfig
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.semi_structured_conversions import mask_creator
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
Tensors = dict[str, torch.Tensor]


def sparse_weight(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """A 2:4 weight with a row of zeros, and blocks with fewer than two numbers."""
    values = torch.randn(n, k)
    values = values * mask_creator(values)
    values[0] = 0
    values[1, 0:8] = torch.tensor([0, 1, 0, 0, 0, 0, 0, -1])
    return values.to(dtype)


def scheme_of(kind: str, **arguments: Any) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments),
                              format=kind)


def scales_of(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    rows = weight.float()
    if args.strategy == "group":
        rows = rows.unflatten(-1, (-1, args.group_size))
        low, high = rows.amin(-1), rows.amax(-1)
    else:
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    return calculate_qparams(low, high, args)[0]


def write(name: str, tensors: Tensors, expected: Tensors, kind: str | None,
          scheme: QuantizationScheme | None, sparsity: SparsityCompressionConfig | None) -> None:
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()},
              folder / "model.safetensors")
    config: dict[str, Any] = {"version": compressed_tensors.__version__,
                              "quant_method": "compressed-tensors", "transform_config": {}}
    config["sparsity_config"] = {} if sparsity is None else sparsity.model_dump()
    if scheme is not None:
        groups = QuantizationConfig(config_groups={"group_0": scheme}, format=kind,
                                    quantization_status="compressed")
        config.update(groups.model_dump(exclude={"quant_method"}))
    text = json.dumps({"quantization_config": config}, indent=1, default=str)
    (folder / "config.json").write_text(text + "\n")
    save_file({key: value.contiguous() for key, value in expected.items()},
              HERE / f"{name}.expected.safetensors")


def marlin(name: str, bits: int, shapes: dict[str, tuple[int, int]], **arguments: Any) -> None:
    scheme = scheme_of("marlin-24", num_bits=bits, symmetric=True, **arguments)
    state: Tensors = {}
    expected: Tensors = {}
    for module, shape in shapes.items():
        weight = sparse_weight(*shape, torch.float16)
        scale = scales_of(weight, scheme.weights).to(torch.float16)
        zero = torch.zeros_like(scale, dtype=torch.int8)
        state[f"{module}.weight"] = weight
        state[f"{module}.weight_scale"] = scale
        state[f"{module}.weight_zero_point"] = zero
        codes = quantize(x=weight, scale=scale, zero_point=zero, args=scheme.weights)
        expected[f"{module}.codes"] = codes.to(torch.int8)
        expected[f"{module}.scales"] = scale
    state["norm.weight"] = torch.arange(64, dtype=torch.float16)
    compressor = BaseCompressor.load_from_registry("marlin-24")
    tensors = compressor.compress(state, dict.fromkeys(shapes, scheme))
    write(name, tensors, expected, "marlin-24", scheme, None)


def decompressed(compressor: BaseCompressor, tensors: Tensors) -> Tensors:
    return dict(compressor.decompress_from_state_dict(dict(tensors)))


def main() -> None:
    torch.manual_seed(24)
    # The writer stores the scales of groups in another order from k = 288 on.
    marlin("marlin4_groups", 4, {"a": (64, 384), "b": (128, 256)}, strategy="group",
           group_size=128)
    marlin("marlin4_channel", 4, {"a": (128, 96)}, strategy="channel")
    marlin("marlin8_groups", 8, {"a": (64, 384)}, strategy="group", group_size=128)
    marlin("marlin8_channel", 8, {"a": (192, 32)}, strategy="channel")

    # Masks of 12 and 36 end within a byte; blocks of 10 cross rows.
    plain = {"crossing.weight": sparse_weight(6, 10, torch.float16),
             "half.weight": sparse_weight(6, 12, torch.float16),
             "brain.weight": sparse_weight(5, 32, torch.bfloat16),
             "full.weight": sparse_weight(4, 36, torch.float32)}
    compressor = BaseCompressor.load_from_registry("sparse-24-bitmask",
                                                   config=Sparse24BitMaskConfig())
    tensors = compressor.compress(plain)
    tensors["norm.weight"] = torch.ones(12)
    write("sparse24", tensors, decompressed(compressor, tensors), None, None, compressor.config)

    any_zeros = {"a.weight": torch.randn(7, 13).relu().to(torch.float16),
                 "norm.weight": torch.tensor([0, 1, 0, 3, 4, 0, 6, 0, 8, 9, 0.5]),
                 "cube.weight": torch.randn(2, 3, 5).relu().to(torch.bfloat16)}
    any_zeros["a.weight"][3] = torch.arange(1, 14)
    compressor = BaseCompressor.load_from_registry("sparse-bitmask", config=BitmaskConfig())
    tensors = compressor.compress(any_zeros)
    write("bitmask", tensors, decompressed(compressor, tensors), None, None, compressor.config)
    # Version 0.3 and older kept the whole name of a tensor.
    named = {key.replace(".", ".weight.", 1): value for key, value in tensors.items()}
    write("bitmask_named", named, decompressed(compressor, tensors), None, None,
          compressor.config)

    for kind, name, more in (("float-quantized", "sparse24_fp8", {"type": "float"}),
                             ("int-quantized", "sparse24_int8", {"type": "int"})):
        scheme = scheme_of(kind, num_bits=8, symmetric=True, strategy="channel", **more)
        weight = sparse_weight(8, 40, torch.bfloat16)
        scale = scales_of(weight, scheme.weights).to(torch.bfloat16)
        state = {"a.weight": weight, "a.weight_scale": scale,
                 "a.weight_zero_point": torch.zeros_like(scale, dtype=torch.int8)}
        state = BaseCompressor.load_from_registry(kind).compress(state, {"a": scheme})
        compressor = BaseCompressor.load_from_registry("sparse-24-bitmask",
                                                       config=Sparse24BitMaskConfig())
        tensors = compressor.compress(state)
        dense = decompressed(compressor, tensors)
        codes = dense["a.weight"]
        expected = {"a.weight": codes.float() * scale.float()}
        write(name, tensors, expected, kind, scheme, compressor.config)


if __name__ == "__main__":
    main()
