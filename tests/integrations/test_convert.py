"""Checkpoints that `metal-marlin convert` wrote, read by the packages whose formats they are in.

Every weight is compared with the exact fp32 weights that `convert --to plain` writes. Packages
return 16-bit weights for 16-bit scales, so scales are widened to fp32 first.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHOICES = [
    "u4/g32",
    "s4/g64",
    "u8/g32",
    "s8/g64",
    "int2/g32",
    "int3/g64",
    "int5/g32",
    "u5/g64",
    "int6/g64",
    "u6/g32",
    "fp6_e2m3/g32/e8m0",
    "fp4_e2m1/g32/e8m0",
    "fp8_e4m3/g64",
    "fp8_e4m3/g32/e8m0",
]


def run(*arguments: object) -> None:
    command = [sys.executable, "-m", "metal_marlin.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def converted(directory: Path, choice: str, target: str) -> tuple[Path, Path]:
    """The sample model in the target's format, and in plain fp32."""
    source = directory / "source"
    run("quantize", EXAMPLES / "tiny-qwen3-moe", "-o", source, "--recipe", f"uniform:{choice}")
    run("convert", source, "-o", directory / "out", "--to", target)
    run("convert", source, "-o", directory / "plain", "--to", "plain")
    return directory / "out", directory / "plain"


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def compare_compressed_tensors(out: Path, plain: Path) -> int:
    """Compares the weights of every module; returns the number of modules."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    tensors = load_file(out / "model.safetensors")
    dense = load_file(plain / "model.safetensors")
    config = QuantizationConfig.model_validate(config_of(out)["quantization_config"])
    modules = 0
    bases = {name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")}
    for scheme in config.config_groups.values():
        patterns = [t.removeprefix("re:") for t in scheme.targets if t.startswith("re:")]
        matched = {name for name in bases for pattern in patterns if re.match(pattern, name)}
        for name in matched | {t for t in scheme.targets if not t.startswith("re:")}:
            modules += 1
            start = f"{name}."
            parts = {k[len(start) :]: v for k, v in tensors.items() if k.startswith(start)}
            expected = dense[f"{name}.weight"]
            if "fp4" in str(scheme.format):
                # The package decompresses to bf16; its codes and scales give the fp32 weights.
                values = unpack_fp4_from_uint8(
                    parts["weight_packed"], *expected.shape, dtype=torch.float32
                )
                scale = parts["weight_scale"]
                if scale.dtype == torch.uint8:
                    scale = torch.exp2(scale.float() - 127)
                else:
                    scale = scale.float() / parts["weight_global_scale"]
                group = expected.shape[1] // scale.shape[1]
                weight = values * scale.float().repeat_interleave(group, dim=1)
            elif "fp8" in str(scheme.format) or "float" in str(scheme.format):
                scale = parts["weight_scale"]
                if scale.dtype == torch.uint8:
                    scale = torch.exp2(scale.float() - 127)
                group = expected.shape[1] // scale.shape[1]
                weight = parts["weight"].float() * scale.float().repeat_interleave(group, dim=1)
            else:
                parts["weight_scale"] = parts["weight_scale"].float()
                compressor = BaseCompressor.get_value_from_registry(str(scheme.format))
                weight = compressor.decompress(parts, scheme)["weight"]
            assert torch.equal(weight.float(), expected), name
    return modules


def compare_mlx(out: Path, plain: Path) -> int:
    """The same for MLX."""
    import mlx.core as mx

    tensors = mx.load(str(out / "model.safetensors"))
    dense = mx.load(str(plain / "model.safetensors"))
    modules = 0
    for name, settings in config_of(out)["quantization"].items():
        if not isinstance(settings, dict):
            continue
        modules += 1
        scales, biases = tensors[f"{name}.scales"], tensors.get(f"{name}.biases")
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        weight = np.array(
            mx.dequantize(tensors[f"{name}.weight"], scales, biases, **settings).astype(mx.float32)
        )
        stack = weight if weight.ndim == 3 else weight[None]
        for expert, matrix in enumerate(stack):
            own = name.replace("switch_mlp.", f"experts.{expert}.")
            assert np.array_equal(matrix, np.array(dense[f"{own}.weight"])), own
    return modules


@pytest.mark.parametrize("choice", [*CHOICES, "fp4_e2m1/g16/e4m3"])
def test_compressed_tensors_reads_its_format(tmp_path: Path, choice: str) -> None:
    pytest.importorskip("compressed_tensors")
    if choice.endswith("e4m3"):
        # A global scale that multiplies has no exact inverse.
        source = tmp_path / "source"
        run("quantize", EXAMPLES / "tiny-qwen3-moe", "-o", source, "--recipe", f"uniform:{choice}")
        command = ["convert", source, "-o", tmp_path / "out", "--to", "compressed-tensors"]
        done = subprocess.run(
            [sys.executable, "-m", "metal_marlin.cli", *map(str, command)],
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0
        assert "cannot hold the global scale" in done.stderr
        return
    assert compare_compressed_tensors(*converted(tmp_path, choice, "compressed-tensors")) > 0


@pytest.mark.parametrize(
    "choice", ["s4/g64", "int5/g64", "int6/g64", "s8/g64", "fp4_e2m1/g32/e8m0"]
)
def test_mlx_reads_its_format(tmp_path: Path, choice: str) -> None:
    pytest.importorskip("mlx.core")
    assert compare_mlx(*converted(tmp_path, choice, "mlx")) > 0


def test_mlx_reads_nvfp4(tmp_path: Path) -> None:
    """MLX's layers take no global scale, so the codes come from MLX, which writes none."""
    mx = pytest.importorskip("mlx.core")
    mx.set_default_device(mx.cpu)
    sample, source = EXAMPLES / "tiny-qwen3-moe", tmp_path / "source"
    tensors, dense = {}, mx.load(str(sample / "model.safetensors"))
    for name in [name for name in dense if ".experts.0." in name]:
        # Stacked, as mlx_lm stores them.
        names = [name.replace("experts.0.", f"experts.{i}.") for i in range(8)]
        stack = [dense.pop(each) for each in names]
        dense[name.replace("experts.0.", "switch_mlp.")] = mx.stack(stack)
    for name, tensor in dense.items():
        if name.endswith("_proj.weight"):
            scales = name.removesuffix("weight") + "scales"
            tensors[name], tensors[scales] = mx.quantize(tensor, mode="nvfp4")[:2]
        else:
            tensors[name] = tensor
    source.mkdir()
    # Without metadata: MLX writes null in its place.
    mx.save_safetensors(str(source / "model.safetensors"), tensors)
    settings = {"mode": "nvfp4", "bits": 4, "group_size": 16}
    config = {**config_of(sample), "quantization": settings}
    (source / "config.json").write_text(json.dumps(config))
    run("convert", source, "-o", tmp_path / "out", "--to", "mlx")
    run("convert", source, "-o", tmp_path / "plain", "--to", "plain")
    assert compare_mlx(tmp_path / "out", tmp_path / "plain") == 28
