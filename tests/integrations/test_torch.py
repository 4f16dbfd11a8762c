"""metal_marlin.torch and metal_marlin.transformers."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import metal_marlin as mm
import metal_marlin._torch_linear as mt
import numpy as np
import pytest
import torch
from metal_marlin import _core
from metal_marlin.torch import MarlinLinear, linear

ROOT = Path(__file__).resolve().parents[2]
MODELS = [ROOT / "examples" / "tiny-qwen3-moe", ROOT / "tests" / "data" / "tiny-glm4-moe"]


def make(format: str = "fp4_e2m1", bias: bool = True, group_size: int = 32) -> MarlinLinear:
    torch.manual_seed(0)
    return MarlinLinear.from_linear(torch.nn.Linear(96, 40, bias=bias), format, group_size)


@pytest.mark.parametrize("format", [f for f in mm.formats() if f not in ("bf16", "fp16", "fp32")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_is_the_product_with_the_dequantized_weight(
    format: str, dtype: torch.dtype
) -> None:
    module = make(format)
    x = torch.randn(2, 3, 96).to(dtype)
    dense = torch.from_numpy(mm.dequantize(module.quantized()))
    want = x.float() @ dense + module.bias
    got = module(x)
    assert got.dtype == dtype and got.shape == (2, 3, 40)
    assert (got.float() - want).abs().max() < 0.05


def test_opcheck() -> None:
    module = make()
    x = torch.randn(4, 96, requires_grad=True)
    bias = torch.randn(40, requires_grad=True)
    torch.library.opcheck(linear, (x, bias, module.handle(), 0, 40))
    torch.library.opcheck(linear, (x.detach(), None, module.handle(), 0, 40))


def test_compile_without_graph_breaks() -> None:
    module = make()
    module.handle()
    x = torch.randn(5, 96)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), module(x))


def test_gradient_of_the_input() -> None:
    module = make(bias=False)
    x = torch.randn(3, 96, requires_grad=True)
    grad = torch.randn(3, 40)
    module(x).backward(grad)
    dense = torch.from_numpy(mm.dequantize(module.quantized()))
    assert torch.allclose(x.grad, grad @ dense.T, atol=1e-5)


def test_state_copies_and_types() -> None:
    module = make("nf3", group_size=64)
    x = torch.randn(1, 96)
    want = module(x)
    other = MarlinLinear(96, 40, format="nf3", group_size=64)
    other.load_state_dict(module.state_dict())
    for same in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(same(x), want)
    half = copy.deepcopy(module).half()
    assert half.scales.dtype == torch.float16 and half.codebook.dtype == torch.float32
    assert torch.equal(half.qweight, module.qweight)


@pytest.mark.parametrize("scale_type, group_size", [("e8m0", 32), ("e4m3", 16)])
def test_scales_of_8_bits(scale_type: str, group_size: int) -> None:
    """Their type says that they are not bytes; states of earlier versions hold them as bytes."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 40)
    module = MarlinLinear.from_linear(layer, "fp4_e2m1", group_size, scale_type)
    parts = {"scale_type": scale_type, "global_scale": scale_type == "e4m3"}
    x = torch.randn(2, 96)
    want, state = module(x), module.state_dict()
    assert state["scales"].dtype.is_floating_point and state["scales"].itemsize == 1
    for saved in (state, {**state, "scales": state["scales"].view(torch.uint8)}):
        other = MarlinLinear(96, 40, True, "fp4_e2m1", group_size, **parts)
        other.load_state_dict(saved)
        assert torch.equal(other(x), want)
    for same in (copy.deepcopy(module).half().float(), pickle.loads(pickle.dumps(module))):
        assert same.scales.dtype == state["scales"].dtype
        assert (same(x) - want).abs().max() < 1e-3


def test_strides() -> None:
    module = make()
    wide = torch.randn(6, 240)
    for x in (
        wide[:, 8:104], wide[:, 1:97], wide[:, :192:2], torch.randn(96, 6).T,
        wide[:1, :96].expand(5, 96), wide[0, :96], wide[:0, :96], torch.randn(2, 3, 4, 96)[:, :, 0],
    ):
        assert torch.equal(module(x), module(x.clone(memory_format=torch.contiguous_format)))


def test_weights_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make()
    x = torch.randn(2, 96)
    want, handle, count = module(x), module.handle(), len(mt.weights_of)
    calls: list[str] = []
    prepare = mt.prepare

    def counted(weights: mm.QuantizedWeights, device: mm.Device) -> mm.PreparedWeights:
        calls.append(device.name)
        return prepare(weights, device)

    monkeypatch.setattr(mt, "prepare", counted)
    module.cpu().to("cpu").double().float()
    assert torch.equal(module(x), want) and module.device == torch.device("cpu")
    assert calls == [] and module.handle() == handle
    module.refresh()
    assert calls == ["cpu"] and len(mt.weights_of) == count
    with pytest.raises(mm.InvalidArgumentError, match=f"handle: {handle} is not valid"):
        linear(x, None, handle, 0, 40)
    empty = MarlinLinear(96, 40, group_size=32).to("meta")
    with pytest.raises(mm.UnsupportedError, match="on the meta device"):
        empty(x)


def test_errors() -> None:
    with pytest.raises(mm.InvalidArgumentError, match=r"expected \[\.\.\., 96\]"):
        make()(torch.randn(2, 95))
    with pytest.raises(mm.InvalidArgumentError):
        make()(torch.randn(2, 96).double())
    with pytest.raises(mm.InvalidArgumentError, match="x: on meta, but the weights are on cpu"):
        make()(torch.randn(2, 96, device="meta"))
    ready = mm.prepare(make().quantized())
    with pytest.raises(mm.InvalidArgumentError, match="array: on meta, which no device can access"):
        mm.matmul(torch.randn(2, 96, device="meta"), ready)
    module = make()
    with pytest.raises(mm.InvalidArgumentError, match="bfloat16, got float8_e4m3fn"):
        linear(torch.randn(2, 96).to(torch.float8_e4m3fn), None, module.handle(), 0, 40)


def test_apple_gpus_that_are_not_here() -> None:
    from metal_marlin._torch_prepared import check_preparable

    if torch.backends.mps.is_available():
        pytest.skip("an Apple GPU is here")
    with pytest.raises(mm.UnsupportedError, match="metal_marlin.mlx has the others for that GPU"):
        check_preparable(torch.device("mps"))
    layer = make()
    with pytest.raises(mm.UnsupportedError, match="mps needs an Apple GPU"):
        mt.register(layer, layer.quantized(), torch.device("mps"))


def test_numpy_functions_take_tensors() -> None:
    weight = torch.randn(64, 24)
    packed, scales = mm.pack_fp4_weights(weight, 32)
    assert isinstance(packed, torch.Tensor) and scales.dtype == torch.float16
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    y = mm.quantized_linear(x, packed, scales, 32)
    assert y.dtype == torch.bfloat16
    want = x.float() @ torch.as_tensor(mm.unpack_weights(packed, scales, 32))
    assert (y.float() - want).abs().max() < 0.1


@pytest.mark.parametrize("source", MODELS, ids=lambda p: p.name)
@pytest.mark.parametrize("recipe", ["default_moe", "uniform:nf3/g64"])
def test_transformers_generates_what_the_runner_does(
    source: Path, recipe: str, tmp_path: Path
) -> None:
    import metal_marlin.transformers  # noqa: F401
    from transformers import AutoModelForCausalLM

    mm.quantize_model(source, tmp_path / "q", recipe)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    prompt = json.loads((source / "golden.json").read_text())["prompt_ids"]
    out = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)
    got = out[0, len(prompt):].tolist()
    want = mm.load(tmp_path / "q", exact=True).generate(prompt, 32)["token_ids"]
    assert got == want
    model.save_pretrained(tmp_path / "again")
    again = mm.load(tmp_path / "again", exact=True)
    assert again.generate(prompt, 32)["token_ids"] == want


def test_transformers_dequantizes_a_tied_table(tmp_path: Path) -> None:
    import metal_marlin.transformers  # noqa: F401
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    source.mkdir()
    config = json.loads((MODELS[0] / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(MODELS[0] / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    mm.quantize_model(source, tmp_path / "q", "default_moe")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    table = model.model.embed_tokens
    assert type(table) is torch.nn.Embedding and model.lm_head.weight is table.weight
    assert not dict(table.named_buffers())
    prompt = [296, 385, 388]
    out = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    want = mm.load(tmp_path / "q", exact=True).generate(prompt, 16)["token_ids"]
    assert out[0, len(prompt):].tolist() == want
    model.save_pretrained(tmp_path / "again")
    again = mm.load(tmp_path / "again", exact=True)
    assert again.info["ends"]["head"]["format"] == "f32" and again.info["ends"]["tied"]
    assert again.generate(prompt, 16)["token_ids"] == want


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import metal_marlin, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_arrays_of_all_kinds_agree() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    prepared = mm.prepare(mm.pack_weights(weight, "s4", 32))
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    assert np.array_equal(mm.matmul(torch.from_numpy(x), prepared).numpy(), mm.matmul(x, prepared))


def test_permutations_are_buffers() -> None:
    rng = np.random.default_rng(0)
    weight, order = rng.standard_normal((96, 40)).astype(np.float32), rng.permutation(96)
    packed = mm.pack_weights(weight[order], "u4", 32)
    parts = _core.WeightsParts()
    parts.format, parts.k, parts.n, parts.group_size = "u4", 96, 40, 32
    parts.codes, parts.scales, parts.zeros = packed.codes, packed.scales, packed.zeros
    parts.permutation = order.astype(np.int32)
    weights = mm.QuantizedWeights.from_parts(parts)
    stack = mt.MarlinStack.from_weights(weights)
    assert stack.state_dict()["permutation"].dtype == torch.int32
    assert np.array_equal(mm.dequantize(stack.quantized()), mm.dequantize(weights))
    again = mt.MarlinStack(96, 40, "u4", 32, zeros=True, permutation=True)
    again.load_state_dict(stack.state_dict())
    assert np.array_equal(mm.dequantize(again.quantized()), mm.dequantize(weights))
    x = torch.from_numpy(rng.standard_normal((3, 96)).astype(np.float32))
    y = linear(x, None, again.handle(), 0, 40)
    dense = torch.from_numpy(mm.dequantize(weights))
    assert torch.allclose(y, x @ dense, atol=1e-2)


def test_input_transforms_are_buffers() -> None:
    rng = np.random.default_rng(0)
    packed = mm.pack_weights(rng.standard_normal((96, 40)).astype(np.float32), "u4", 32)
    parts = _core.WeightsParts()
    parts.format, parts.k, parts.n, parts.group_size = "u4", 96, 40, 32
    parts.codes, parts.scales, parts.zeros = packed.codes, packed.scales, packed.zeros
    parts.input_scale = rng.standard_normal(96).astype(np.float32)
    parts.input_hadamard = 32
    weights = mm.QuantizedWeights.from_parts(parts)
    stack = mt.MarlinStack.from_weights(weights)
    assert stack.state_dict()["input_scale"].dtype == torch.float32
    again = mt.MarlinStack(96, 40, "u4", 32, zeros=True, input_scale=True, input_hadamard=32)
    again.load_state_dict(stack.state_dict())
    assert np.array_equal(mm.dequantize(again.quantized()), mm.dequantize(weights))
    x = torch.from_numpy(rng.standard_normal((3, 96)).astype(np.float32))
    y = linear(x, None, again.handle(), 0, 40)
    dense = torch.from_numpy(mm.dequantize(weights))
    assert torch.allclose(y, x @ dense, atol=2e-2)


def test_two_levels_of_scales_are_buffers() -> None:
    rng = np.random.default_rng(0)
    parts = _core.WeightsParts()
    parts.format, parts.k, parts.n, parts.group_size, parts.super_group_size = "u5", 96, 40, 16, 64
    parts.codes = rng.integers(0, 2**32, (15, 40), np.uint32)
    parts.scales = rng.integers(-128, 128, (6, 40)).astype(np.int8)
    parts.biases = rng.integers(-128, 128, (6, 40)).astype(np.int8)
    parts.super_scales = rng.standard_normal((2, 40)).astype(np.float16)
    parts.super_biases = rng.standard_normal((2, 40)).astype(np.float16)
    weights = mm.QuantizedWeights.from_parts(parts)
    stack = mt.MarlinStack.from_weights(weights)
    assert stack.state_dict()["scales"].dtype == torch.int8
    again = mt.MarlinStack(96, 40, "u5", 16, biases=True, super_group_size=64)
    again.load_state_dict(stack.state_dict())
    assert np.array_equal(mm.dequantize(again.quantized()), mm.dequantize(weights))
    x = torch.from_numpy(rng.standard_normal((3, 96)).astype(np.float32))
    y = linear(x, None, again.handle(), 0, 40)
    dense = torch.from_numpy(mm.dequantize(weights))
    assert torch.allclose(y, x @ dense, rtol=1e-2, atol=1e-2 * float(dense.abs().max()))


def test_sparse_weights_are_buffers() -> None:
    weight = np.random.default_rng(0).standard_normal((96, 40)).astype(np.float32)
    sparse = mm.pack_weights(weight, "s4", 32, sparsity="2:4")
    stack = mt.MarlinStack.from_weights(sparse)
    shapes = {name: tuple(value.shape) for name, value in stack.state_dict().items()}
    assert shapes == {"qweight": (6, 40), "metadata": (3, 40), "scales": (3, 40)}
    assert np.array_equal(mm.dequantize(stack.quantized()), mm.dequantize(sparse))
