"""metal_marlin.mlx and metal_marlin.mlx_lm on MLX's CPU device."""

from __future__ import annotations

import json
from pathlib import Path

import metal_marlin as mm
import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")

ROOT = Path(__file__).resolve().parents[2]
MODELS = [ROOT / "examples" / "tiny-qwen3-moe", ROOT / "tests" / "data" / "tiny-glm4-moe"]


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(dtype: str, bias: bool) -> None:
    from metal_marlin.mlx import MarlinLinear

    mx.random.seed(0)
    module = nn.Linear(96, 40, bias=bias)
    made = MarlinLinear.from_linear(module, "nf4", 32)
    x = mx.random.normal((2, 3, 96)).astype(getattr(mx, dtype))
    got = made(x)
    dense = mm.dequantize(mm.pack_weights(np.array(module.weight).T, "nf4", 32))
    want = x.astype(mx.float32) @ mx.array(dense)
    if bias:
        want = want + module.bias
    assert got.dtype == x.dtype and got.shape == (2, 3, 40)
    assert float(mx.abs(got.astype(mx.float32) - want).max()) < 0.05


def test_quantized_linear() -> None:
    from metal_marlin.mlx import quantized_linear

    weight = mx.random.normal((64, 24))
    packed, scales = mm.pack_fp4_weights(weight, 32)
    assert isinstance(packed, mx.array) and packed.dtype == mx.uint32
    x = mx.random.normal((4, 64))
    want = x @ mm.unpack_weights(packed, scales, 32)
    assert float(mx.abs(quantized_linear(x, packed, scales, 32) - want).max()) < 1e-3


def test_errors() -> None:
    from metal_marlin.mlx import MarlinLinear

    made = MarlinLinear.from_linear(nn.Linear(64, 8))
    with pytest.raises(mm.InvalidArgumentError, match=r"expected \[\.\.\., 64\]"):
        made(mx.zeros((2, 63)))
    with pytest.raises(mm.InvalidArgumentError):
        made(mx.zeros((2, 64), dtype=mx.int32))


@pytest.mark.parametrize("source", MODELS, ids=lambda p: p.name)
def test_mlx_lm_generates_what_the_runner_does(source: Path, tmp_path: Path) -> None:
    from metal_marlin.mlx_lm import load
    from mlx_lm.generate import generate_step

    mm.quantize_model(source, tmp_path / "q", "default_moe")
    model, _ = load(tmp_path / "q")
    model.set_dtype(mx.float32)
    prompt = json.loads((source / "golden.json").read_text())["prompt_ids"]
    steps = generate_step(mx.array(prompt), model, max_tokens=24)
    got = [int(token) for token, _ in steps]
    assert got == mm.load(tmp_path / "q", exact=True).generate(prompt, 24)["token_ids"]


def test_mlx_lm_generate_makes_text(tmp_path: Path) -> None:
    from metal_marlin.mlx_lm import load
    from mlx_lm import generate

    mm.quantize_model(MODELS[0], tmp_path / "q", "default_moe")
    model, tokenizer = load(tmp_path / "q")
    text = generate(model, tokenizer, prompt="And God said", max_tokens=12)
    assert isinstance(text, str) and len(text) > 5
