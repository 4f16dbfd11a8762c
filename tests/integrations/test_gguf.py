"""GGUF files that the `gguf` package writes: values, perplexity, tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

import metal_marlin as mm  # noqa: E402
from gguf import GGMLQuantizationType as Type  # noqa: E402
from gguf.quants import dequantize, quantize  # noqa: E402
from gguf_delta import converted, write_delta_gguf  # noqa: E402
from gguf_files import check_gguf, read_tensors, stack_experts, write_gguf  # noqa: E402
from metal_marlin import _core  # noqa: E402
from metal_marlin.text import TextCodec  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

ROOT = Path(__file__).parents[2]
QWEN = ROOT / "examples" / "tiny-qwen3-moe"
GLM = ROOT / "tests" / "data" / "tiny-glm4-moe"
TOKENS = [int(t) for t in (QWEN / "validation_tokens.txt").read_text().split()][:1024]
# The types that the package can quantize to, whose blocks divide this model's rows.
KINDS = [
    Type.F16,
    Type.BF16,
    Type.Q4_0,
    Type.Q4_1,
    Type.Q5_0,
    Type.Q5_1,
    Type.Q8_0,
    Type.MXFP4,
]


def run(*words: object) -> None:
    arguments = [os.fsencode(str(word)) for word in ("metal-marlin", *words)]
    assert _core.run_command(arguments, TextCodec) == 0


def dequantized(source: Path, folder: Path) -> Path:
    """The source as fp32, through the command."""
    run("dequantize", source, "-o", folder, "--dtype", "fp32")
    return folder


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_value_is_that_of_the_package(kind: Type, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    expected = write_gguf(QWEN, file, lambda name: None if "inp" in name else kind)
    plain = dequantized(file, tmp_path / "plain")
    actual = stack_experts(read_tensors(plain))
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(actual[name], values), name


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q5_1, Type.MXFP4], ids=lambda kind: kind.name)
def test_perplexity_is_that_of_the_values(kind: Type, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(QWEN, file, lambda name: kind)
    report = mm.import_model(file, tmp_path / "imported")
    assert {module["exactness"] for module in report["modules"]} == {"exact"}
    assert report["coverage"] > 0.99
    plain = dequantized(file, tmp_path / "plain")
    losses = [
        mm.load(path, exact=True, verbose=False).perplexity(TOKENS, window=256)["nll"]
        for path in (file, tmp_path / "imported", plain)
    ]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)


@pytest.mark.parametrize("source", [QWEN, GLM], ids=lambda source: source.name)
def test_models_are_those_that_were_converted(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(source, file, lambda name: Type.BF16)
    got = mm.load(file, exact=True, verbose=False)
    want = mm.load(source, exact=True, verbose=False)
    assert got.info["model_type"] == want.info["model_type"]
    assert np.array_equal(got.logits(TOKENS[:64]), want.logits(TOKENS[:64]))


def random_llama(folder: Path, experts: int) -> Path:
    """A random directory of the llama kind, whose q and k the converters reorder."""
    rng = np.random.default_rng(3)
    hidden, width, heads, kv_heads, head, layers, vocabulary = 64, 96, 4, 2, 16, 2, 96
    config = {
        "model_type": "mixtral" if experts else "llama",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
    }
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": 2}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attn.q_proj.weight"] = (heads * head, hidden)
        shapes[prefix + "self_attn.k_proj.weight"] = (kv_heads * head, hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (kv_heads * head, hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, heads * head)
        if experts:
            shapes[prefix + "block_sparse_moe.gate.weight"] = (experts, hidden)
            for expert in range(experts):
                block = f"{prefix}block_sparse_moe.experts.{expert}."
                shapes[block + "w1.weight"] = (width, hidden)
                shapes[block + "w3.weight"] = (width, hidden)
                shapes[block + "w2.weight"] = (hidden, width)
        else:
            shapes[prefix + "mlp.gate_proj.weight"] = (width, hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (width, hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (hidden, width)
    folder.mkdir()
    save_file(
        {
            name: (1 + rng.standard_normal(shape) * 0.1).astype(np.float16)
            if len(shape) == 1
            else (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float16)
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0], ids=lambda kind: kind.name)
def test_heads_of_llama(experts: int, kind: Type, tmp_path: Path) -> None:
    source = random_llama(tmp_path / "source", experts)
    file = tmp_path / "model.gguf"
    expected = write_gguf(source, file, lambda name: kind)
    plain = dequantized(file, tmp_path / "plain")
    actual = stack_experts(read_tensors(plain))
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(actual[name], values), name
    prompt = list(range(1, 40))
    got = mm.load(file, exact=True, verbose=False).logits(prompt)
    want = mm.load(plain, exact=True, verbose=False).logits(prompt)
    assert np.allclose(got, want, rtol=1e-4, atol=1e-4)
    if kind == Type.F16:
        original = mm.load(source, exact=True, verbose=False).logits(prompt)
        assert np.array_equal(got, original)


def test_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(QWEN, file, lambda name: Type.Q8_0)
    text = "And God said, Let the\n\n  waters\u00e4 bring 1234 forth"
    want = TextCodec(QWEN).encode(text)
    assert TextCodec(file).encode(text) == want
    mm.import_model(file, tmp_path / "imported")
    codec = TextCodec(tmp_path / "imported")
    assert codec.encode(text) == want
    assert codec.decode(want) == TextCodec(QWEN).decode(want)
    (tmp_path / "folder").mkdir()
    file.rename(tmp_path / "folder" / "model.gguf")
    model = mm.load(tmp_path / "folder", verbose=False)
    assert model.generate("And God said", max_tokens=5)["text"]


def test_grids_are_those_of_the_package() -> None:
    script = ROOT / "tools" / "gguf_grids.py"
    made = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    committed = ROOT / "src" / "checkpoint" / "readers" / "gguf" / "gguf_grids.cc"
    assert made.stdout == committed.read_text()


# Choices of `quantize`, and the type that each becomes.
EXPORTS = {
    "s4/g32": "Q4_0",
    "int5/g32": "Q5_0",
    "int6/g32": "Q8_0",
    "s8/g64": "Q8_0",
    "codebook4/g32": "IQ4_NL",
    "fp4_e2m1/g32/e8m0": "MXFP4",
    "fp4_e2m1/g16/e4m3": "NVFP4",
}


def experts_as_stacks(folder: Path) -> dict[str, np.ndarray]:
    return stack_experts(read_tensors(folder))


@pytest.mark.parametrize(
    ("choice", "model"),
    [
        (choice, model)
        for choice in EXPORTS
        for model in ("qwen", "llama")
        # Rows of 96 are no blocks of NVFP4.
        if (choice, model) != ("fp4_e2m1/g16/e4m3", "llama")
    ],
)
def test_the_package_reads_what_is_exported(choice: str, model: str, tmp_path: Path) -> None:
    source = QWEN if model == "qwen" else random_llama(tmp_path / "source", 0)
    quantized = tmp_path / "quantized"
    run("quantize", source, "-o", quantized, "--recipe", f"uniform:{choice}")
    file = tmp_path / "model.gguf"
    run("export", quantized, "-o", file, "--to", "gguf")
    expected = experts_as_stacks(dequantized(quantized, tmp_path / "plain"))
    config = json.loads((source / "config.json").read_text())
    types = check_gguf(file, config, expected)
    assert EXPORTS[choice] in types
    again = experts_as_stacks(dequantized(file, tmp_path / "again"))
    assert again.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(again[name], values), name
    if model == "qwen":
        text = "And God said, Let the waters"
        assert TextCodec(file).encode(text) == TextCodec(source).encode(text)
        losses = [
            mm.load(path, exact=True, verbose=False).perplexity(TOKENS, window=256)["nll"]
            for path in (file, quantized)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    "kind",
    [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4, Type.BF16],
    ids=lambda kind: kind.name,
)
def test_what_is_imported_can_be_exported(kind: Type, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    expected = write_gguf(QWEN, file, lambda name: kind)
    mm.import_model(file, tmp_path / "imported")
    run("export", tmp_path / "imported", "-o", tmp_path / "again.gguf", "--to", "gguf")
    config = json.loads((QWEN / "config.json").read_text())
    assert kind.name in check_gguf(tmp_path / "again.gguf", config, expected)


@pytest.mark.parametrize("recipe", [None, "uniform:s8/g32"])
@pytest.mark.parametrize("case", ["gpt_oss", "deepseek_v3", "glm4_moe"])
def test_models_of_transformers_are_exported(case: str, recipe: str | None, tmp_path: Path) -> None:
    """Names are those that the package knows for the architecture; logits are the same."""
    pytest.importorskip("transformers")
    from test_architectures import make_model

    source = tmp_path / "source"
    make_model(case).save_pretrained(source)
    if recipe is not None:
        # Rows of these are no whole blocks in models this small.
        kept = "(o_proj|down_proj|q_b_proj)[.]weight=keep"
        quantized = tmp_path / "quantized"
        run("quantize", source, "-o", quantized, "--recipe", recipe, "--override", kept)
        source = quantized
    file = tmp_path / "model.gguf"
    run("export", source, "-o", file, "--to", "gguf")
    reader = gguf.GGUFReader(file)
    shards = tmp_path / "shards"
    run("export", source, "-o", shards, "--to", "gguf", "--shard-size", "100KB")
    readers = [gguf.GGUFReader(path) for path in sorted(shards.iterdir())]
    for number, shard in enumerate(readers):
        counts = [
            shard.get_field(f"split.{key}").contents() for key in ("no", "count", "tensors.count")
        ]
        assert counts == [number, len(readers), len(reader.tensors)]
    parts = [tensor for shard in readers for tensor in shard.tensors]
    assert len(readers) > 1
    assert [tensor.name for tensor in parts] == [tensor.name for tensor in reader.tensors]
    for part, tensor in zip(parts, reader.tensors, strict=True):
        assert part.tensor_type == tensor.tensor_type
        assert np.array_equal(part.data, tensor.data), part.name
    name = reader.get_field("general.architecture").contents()
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    known = {
        gguf.TENSOR_NAMES[kind].format(bid=layer)
        for kind in gguf.MODEL_TENSORS[architecture]
        for layer in range(8)
    }
    stems = {tensor.name.rsplit(".", 1)[0] for tensor in reader.tensors}
    assert stems <= known, stems - known
    prompt = list(range(1, 40))
    got = mm.load(file, exact=True, verbose=False).logits(prompt)
    want = mm.load(source, exact=True, verbose=False).logits(prompt)
    assert np.allclose(got, want, rtol=1e-4, atol=1e-4)


# Families of one way of storing each: class, and the keys beyond the small ones.
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {"sliding_window": 7}),
    "phi3 with longrope": (
        "Phi3",
        {
            "rope_parameters": {**LONG, "partial_rotary_factor": 0.75},
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 64,
        },
    ),
    "seed_oss": ("SeedOss", {"head_dim": 24, "attention_out_bias": True, "mlp_bias": False}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 8.0,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    ),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4 with windows": (
        "Exaone4",
        {"num_hidden_layers": 64, "sliding_window": 5, "sliding_window_pattern": 4},
    ),
    "cohere2": (
        "Cohere2",
        {
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "logit_scale": 0.3,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 16}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"head_dim": 16, "num_experts": 8, "moe_topk": 3}),
    "dots1": (
        "Dots1",
        {
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "n_group": 4,
            "topk_group": 2,
            "sliding_window": None,
            "num_key_value_heads": 4,
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "num_key_value_heads": 4,
        },
    ),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": True}),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model of a family."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from test_architectures import SMALL

    name, keys = FAMILIES[request.param]
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, "pad_token_id": None, **keys})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 1:
                tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def logits(path: Path) -> np.ndarray:
    return mm.load(path, exact=True, verbose=False).logits(list(range(1, 40)))


def test_families_as_their_converters_write_them(family: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(family, file, lambda name: None)
    got, want = logits(file), logits(family)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def test_families_are_exported(family: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    run("export", family, "-o", file, "--to", "gguf")
    config = json.loads((family / "config.json").read_text())
    check_gguf(file, config, stack_experts(read_tensors(family)))
    got, want = logits(file), logits(family)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


@pytest.fixture(params=["Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText"])
def delta_net(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model with gated delta nets, more value heads than key heads."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from test_architectures import SMALL

    keys = {**SMALL, "pad_token_id": None, "hidden_size": 64, **DELTA}
    if request.param != "Qwen3_5Text":
        keys.update(EXPERTS)
    torch.manual_seed(1)
    config = getattr(transformers, f"{request.param}Config")(**keys)
    name = request.param.removesuffix("Text")
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 1:
                tensor.copy_(tensor + 0.2 * torch.randn_like(tensor))
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_delta_nets_as_their_converters_write_them(delta_net: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_delta_gguf(delta_net, file)
    got, want = logits(file), logits(delta_net)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def test_delta_nets_are_exported(delta_net: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    run("export", delta_net, "-o", file, "--to", "gguf")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    expected = converted(delta_net)
    assert stored.keys() == expected.keys()
    for name, values in expected.items():
        data = stored[name].data
        assert data.shape == values.shape, name
        assert np.allclose(data, values, rtol=3e-7, atol=0), name
    got, want = logits(file), logits(delta_net)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("choice", ["s4/g32", "int5/g32"])
def test_quantized_delta_nets_are_exported(delta_net: Path, choice: str, tmp_path: Path) -> None:
    """Columns of quantized matrices change their order by groups."""
    quantized, file = tmp_path / "quantized", tmp_path / "model.gguf"
    run("quantize", delta_net, "-o", quantized, "--recipe", f"uniform:{choice}")
    run("export", quantized, "-o", file, "--to", "gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.ssm_out.weight"] == EXPORTS[choice]
    got, want = logits(file), logits(quantized)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
    mm.import_model(file, tmp_path / "imported")
    assert np.array_equal(logits(tmp_path / "imported"), got)


def random_q4_k(rows: int, columns: int) -> np.ndarray:
    """Blocks of 256 columns: two fp16 factors, 12 bytes of scales, 128 bytes of codes."""
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (rows, columns // 256, 144), np.uint8)
    factors = (rng.random((rows, columns // 256, 2)) * 1e-3).astype(np.float16)
    blocks[..., :4] = factors.view(np.uint8).reshape(rows, columns // 256, 4)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("delta_net", ["Qwen3_5Text"], indirect=True)
@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q8_0], ids=lambda kind: kind.name)
def test_columns_of_value_heads_in_blocks(delta_net: Path, kind: Type, tmp_path: Path) -> None:
    """Blocks of 256 columns cover several heads, which have another order elsewhere."""
    config = json.loads((delta_net / "config.json").read_text())
    heads = config["linear_num_value_heads"]
    name, shape = "blk.0.ssm_out.weight", (64, heads * config["linear_value_head_dim"])
    rng = np.random.default_rng(2)
    blocks = (
        random_q4_k(*shape)
        if kind == Type.Q4_K
        else quantize(rng.standard_normal(shape).astype(np.float32), kind)
    )
    file = tmp_path / "model.gguf"
    write_delta_gguf(delta_net, file, {name: (blocks, kind)})
    stored = dequantize(blocks, kind).reshape(64, 2, 2, -1)
    expected = stored.swapaxes(1, 2).reshape(shape)
    plain = read_tensors(dequantized(file, tmp_path / "plain"))
    assert np.array_equal(plain["model.layers.0.linear_attn.out_proj.weight"], expected)
    mm.import_model(file, tmp_path / "imported")
    got = logits(tmp_path / "plain")
    for path in (file, tmp_path / "imported"):
        assert np.abs(logits(path) - got).max() < 1e-4 * np.abs(got).max()
    run("export", tmp_path / "imported", "-o", tmp_path / "again.gguf", "--to", "gguf")
    again = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "again.gguf").tensors}
    assert again[name].tensor_type == kind
    assert np.array_equal(dequantize(again[name].data, kind), dequantize(blocks, kind))
