"""What `quantize --for PROGRAM` writes is loaded by that program, and continues a text as our
runner does with the same recipe.

vLLM reads what transformers reads: compressed-tensors. llama.cpp is not run: the gguf package and
transformers, for a dense model, read its file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
import torch
import transformers
from test_exporters import (
    SAMPLE,
    TYPES,
    mlx_logits,
    mlx_model,
    mlx_text,
    our_text,
    small_model,
    transformers_text,
    widened_sample,
)
from metal_marlin import _core
from metal_marlin.text import TextCodec

DESTINATIONS = ["llama.cpp", "mlx-lm", "vllm", "transformers"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return widened_sample(tmp_path_factory.mktemp("sample"))


def run(*words: object) -> None:
    arguments = [os.fsencode(str(word)) for word in ("metal-marlin", *words)]
    assert _core.run_command(arguments, TextCodec) == 0


def made_for(program: str, source: Path, folder: Path, *options: object) -> tuple[Path, Path]:
    """A directory quantized by the recipe that --for takes, and what --for writes."""
    out = folder / ("out.gguf" if program == "llama.cpp" else "out")
    recipe = folder / "recipe.json"
    run("quantize", source, "-o", out, "--for", program, "--write-recipe", recipe, *options)
    assert {path.name for path in folder.iterdir()} - {"model"} == {out.name, recipe.name}
    mm.quantize_model(source, folder / "quantized", str(recipe))
    return folder / "quantized", out


def transformers_model(out: Path) -> Any:
    if out.suffix == ".gguf":
        pytest.importorskip("gguf")
        pytest.importorskip("accelerate")
        options: dict[str, Any] = {"gguf_file": out.name}
        out = out.parent
    else:
        pytest.importorskip("compressed_tensors")
        options = {}
    return transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, **options)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("program", DESTINATIONS)
def test_the_sample_has_the_same_text(
    wide: Path, tmp_path: Path, program: str, method: str
) -> None:
    text = ("--calibration-ids", SAMPLE / "validation_tokens.txt", "--calibration-tokens", 2048)
    options = ("--method", "gptq", *text) if method == "gptq" else ()
    quantized, out = made_for(program, wide, tmp_path, *options)
    if method == "gptq":  # Other codes than those of rounding.
        run("import", out, "-o", tmp_path / "imported")
        quantized = tmp_path / "imported"
    ids, tokens = our_text(quantized)
    if program == "llama.cpp":
        gguf = pytest.importorskip("gguf")
        types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
        assert "Q4_0" in types
        assert mm.load(out, "cpu", exact=True).generate(ids, len(tokens), ignore_eos=True)[
            "token_ids"
        ] == tokens
    elif program == "mlx-lm":
        assert mlx_text(mlx_model(out), ids) == tokens
    else:
        assert transformers_text(transformers_model(out), ids) == tokens


@pytest.mark.parametrize("case", ["llama", "qwen2"])
@pytest.mark.parametrize("program", DESTINATIONS)
def test_a_dense_model_has_the_same_logits(tmp_path: Path, program: str, case: str) -> None:
    source = small_model(tmp_path, *TYPES[case])
    quantized, out = made_for(program, source, tmp_path)
    ids = [int(token) for token in np.random.default_rng(1).integers(3, 190, 24)]
    ours = mm.load(quantized, device="cpu", exact=True, verbose=False).logits(ids)
    if program == "mlx-lm":
        theirs = mlx_logits(mlx_model(out), ids)
    else:
        with torch.no_grad():
            theirs = transformers_model(out).eval()(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(ours).max()


@pytest.mark.parametrize(
    "choice",
    ["s8/g64/fp32", "int6/g128/fp32", "int5/g32/fp32", "int3/g64/fp32/sym", "int2/g32/fp32/sym",
     "u4/g32/fp32", "fp8_e4m3/gK/fp32", "fp8_e4m3/g64/fp32", "fp4_e2m1/g32/e8m0",
     "fp8_e4m3/g32/e8m0", "fp4_e2m1/g16/e4m3"],
)
@pytest.mark.parametrize("program", ["mlx-lm", "transformers"])
def test_the_other_formats(wide: Path, tmp_path: Path, program: str, choice: str) -> None:
    """Each is loaded, or refused before anything is written."""
    out = tmp_path / "out"
    try:
        mm.quantize_model(wide, out, f"uniform:{choice}", destination=program)
    except mm.UnsupportedError as error:
        assert f"{program} does not load" in str(error)
        assert not list(tmp_path.iterdir())
        return
    mm.quantize_model(wide, tmp_path / "quantized", f"uniform:{choice}")
    ids, tokens = our_text(tmp_path / "quantized")
    if program == "mlx-lm":
        assert mlx_text(mlx_model(out), ids) == tokens
    else:
        assert transformers_text(transformers_model(out), ids) == tokens
