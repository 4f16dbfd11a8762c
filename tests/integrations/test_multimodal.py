"""The text model of multimodal checkpoints: logits, quantized copies, keys and names."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import metal_marlin as mm
import metal_marlin.transformers  # noqa: F401
import numpy as np
import pytest
import torch
import transformers
from metal_marlin import _core
from metal_marlin.text import TextCodec
from safetensors.torch import load_file, save_file

IDS = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(1))
TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Encoders of Qwen and GLM count their layers under another name.
DEEP = {**VISION, "depth": 1, "embed_dim": 32, "out_hidden_size": 64, "num_position_embeddings": 16}
WIDE = {**VISION, "num_hidden_layers": 1}
SECTIONS = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3]}

# Each whole type: its class, keys of the text model, of the encoder, and of the whole.
TYPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", {"rope_parameters": SECTIONS}, DEEP, {}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"rope_parameters": SECTIONS},
        {**DEEP, "fullatt_block_indexes": [0]},
        {},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"head_dim": 16, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
        {**DEEP, "deepstack_visual_indexes": [0]},
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {"head_dim": 16, "num_experts": 4, **EXPERTS, "rope_parameters": SECTIONS},
        {**DEEP, "deepstack_visual_indexes": [0]},
        {},
    ),
    "glm4v": (
        "Glm4v",
        {"rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        DEEP,
        {},
    ),
    "glm4v_moe": (
        "Glm4vMoe",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 2]},
        },
        DEEP,
        {},
    ),
    "llava": ("Llava", {"model_type": "llama"}, {**WIDE, "model_type": "clip_vision_model"}, {}),
    "llava_onevision": (
        "LlavaOnevision",
        {"model_type": "qwen2"},
        {**WIDE, "model_type": "siglip_vision_model"},
        {},
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        {**WIDE, "head_dim": 16, "model_type": "pixtral"},
        {"tie_word_embeddings": False},
    ),
    "internvl": ("InternVL", {"model_type": "qwen2"}, {**WIDE, "image_size": [28, 28]}, {}),
    "smolvlm": ("SmolVLM", {"model_type": "llama"}, WIDE, {}),
    "lighton_ocr": (
        "LightOnOcr",
        {"model_type": "qwen3", "head_dim": 16},
        {**WIDE, "head_dim": 16},
        {},
    ),
}
HYBRID = {
    "num_hidden_layers": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_interleaved": True},
}
TYPES["qwen3_5"] = ("Qwen3_5", HYBRID, DEEP, {})
TYPES["qwen3_5_moe"] = (
    "Qwen3_5Moe",
    {**HYBRID, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    DEEP,
    {},
)
WINDOWS = {
    "head_dim": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
TYPES["gemma3"] = (
    "Gemma3",
    WINDOWS,
    {**WIDE, "model_type": "siglip_vision_model"},
    {"mm_tokens_per_image": 4},
)
PATCHES = {**WIDE, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64}
TYPES["gemma4"] = (
    "Gemma4",
    {
        **WINDOWS,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 99,
        "pad_token_id": 0,  # For images in the layers' own embeddings.
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    PATCHES,
    {},
)
LATE = {
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
SIGLIP = {**WIDE, "model_type": "siglip_vision_model"}
TYPES["llama4"] = (
    "Llama4",
    {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 80,
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 5,
        "floor_scale": 4,
    },
    {
        **WIDE,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "intermediate_size": 128,
    },
    {},
)
TYPES["kimi_k25"] = (
    "Kimi_K25",
    {"model_type": "deepseek_v3", **LATE},
    {**WIDE, "pos_emb_height": 4, "pos_emb_width": 4},
    {"projection_hidden_size": 32, "tie_word_embeddings": False},
)
TYPES["cohere2_vision"] = (
    "Cohere2Vision",
    {"model_type": "cohere2", "sliding_window": 6, "sliding_window_pattern": 2},
    SIGLIP,
    {"alignment_intermediate_size": 64},
)
TYPES["aya_vision"] = (
    "AyaVision",
    {"model_type": "cohere2", "sliding_window": 6, "sliding_window_pattern": 2},
    {**SIGLIP, "vision_use_head": False},
    {},
)
TYPES["exaone4_5"] = (
    "Exaone4_5_",
    {
        "model_type": "exaone4_5_text",
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    {**DEEP, "num_key_value_heads": 1, "fullatt_block_indexes": [0]},
    {},
)
TYPES["idefics3"] = ("Idefics3", {"model_type": "llama"}, WIDE, {"pad_token_id": None})
TYPES["glm46v"] = (
    "Glm46V",
    {
        "model_type": "glm4v_text",
        "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
    },
    {**DEEP, "model_type": "glm4v_vision"},
    {},
)
TYPES["llava_next"] = (
    "LlavaNext",
    {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    {**WIDE, "model_type": "clip_vision_model"},
    {},
)
FLAT = ("qwen2_vl", "qwen2_5_vl")


def save_model(kind: str, folder: Path) -> Any:
    """A random model of a whole type, saved; returns transformers'."""
    transformers.logging.set_verbosity_error()
    name, text, vision, whole = TYPES[kind]
    made = transformers.CONFIG_MAPPING[kind]
    config = made(text_config={**TEXT, **text}, vision_config=vision, **whole)
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if tensor.dim() == 1 and "norm" in key:
                tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
            elif "bias" in key:
                tensor.copy_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    if kind == "kimi_k25":
        restore_layers(folder)
    return model


def restore_layers(folder: Path) -> None:
    """transformers renames the text model's layers with the encoder's blocks when it writes them;
    published files have layers."""
    path = folder / "model.safetensors"
    blocks, layers = "language_model.model.blocks.", "language_model.model.layers."
    tensors = {name.replace(blocks, layers): x for name, x in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def logits_of(model: Any) -> np.ndarray:
    if isinstance(model, transformers.Llama4ForConditionalGeneration):
        model = model.language_model  # The whole's forward fails on what this returns.
    # The classes of Cohere's whole models leave out the factor of their text models.
    factor = getattr(model.config.get_text_config(), "logit_scale", 1.0)
    with torch.no_grad():
        return factor * model(IDS).logits[0].numpy()


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    assert float(np.abs(got - want).max() / np.abs(want).max()) < 1e-3


def run(*words: object) -> None:
    arguments = [os.fsencode(str(word)) for word in ("metal-marlin", *words)]
    assert _core.run_command(arguments, TextCodec) == 0


def edit(folder: Path, change: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("kind", TYPES)
def test_logits_are_those_of_the_text_model(kind: str, tmp_path: Path) -> None:
    want = logits_of(save_model(kind, tmp_path))
    model = mm.load(tmp_path, exact=True, verbose=False)
    ids = IDS[0].tolist()
    assert_close(model.logits(ids), want)
    assert model.info["layers"] == TEXT["num_hidden_layers"]


def test_a_text_model_of_mistral4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which transformers has in mistral3 only."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "llama_4_scaling_beta": 0.5,
    }
    name, _, vision, whole = TYPES["mistral3"]
    for changed in ({}, {"n_group": 2, "norm_topk_prob": False, "rope_interleave": False}):
        text = {**LATE, **changed, "model_type": "mistral4", "rope_parameters": dict(rope)}
        monkeypatch.setitem(TYPES, "mistral3", (name, text, vision, whole))
        want = logits_of(save_model("mistral3", tmp_path))
        model = mm.load(tmp_path, exact=True, verbose=False)
        assert_close(model.logits(IDS[0].tolist()), want)


@pytest.mark.parametrize("kind", TYPES)
def test_a_quantized_copy_is_a_model_of_the_whole_type(kind: str, tmp_path: Path) -> None:
    """Other parts keep their values and names, and transformers loads the directory."""
    save_model(kind, tmp_path / "source")
    report = mm.quantize_model(tmp_path / "source", tmp_path / "quantized", "uniform:s8/g16")
    before = load_file(tmp_path / "source" / "model.safetensors")
    after = load_file(tmp_path / "quantized" / "model.safetensors")
    parts = ("vis", "multi_modal_projector", "image_newline", "model.vis", "model.connector")
    others = [name for name in before if name.startswith(parts)]
    assert others
    for name in others:
        assert torch.equal(before[name], after[name]), name
    assert {*others} >= {entry["name"] for entry in report["skipped"] if ".vis" in entry["name"]}
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    assert config["model_type"] == kind
    assert "vision_config" in config
    for name in config["quantization_config"]["modules"]:
        assert name.replace(".*.", ".0.") in before or ".experts." in name, name
    model = mm.load(tmp_path / "quantized", exact=True, verbose=False)
    run("dequantize", tmp_path / "quantized", "-o", tmp_path / "plain", "--dtype", "fp32")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert plain.keys() == before.keys()
    loaded = getattr(transformers, f"{TYPES[kind][0]}ForConditionalGeneration").from_pretrained(
        tmp_path / "plain"
    )
    assert_close(model.logits(IDS[0].tolist()), logits_of(loaded.eval()))


@pytest.mark.parametrize("kind", TYPES)
def test_a_quantized_copy_runs_in_transformers(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path / "source")
    mm.quantize_model(tmp_path / "source", tmp_path / "quantized", "uniform:s8/g16")
    made = getattr(transformers, f"{TYPES[kind][0]}ForConditionalGeneration")
    if kind == "qwen3_vl_moe":  # Its stacks of experts are transposed when they are loaded.
        with pytest.raises(mm.UnsupportedError, match="experts.*transposes"):
            made.from_pretrained(tmp_path / "quantized")
        return
    if kind == "llama4":  # Its experts take inputs that are multiplied by their weights.
        with pytest.raises(mm.UnsupportedError, match="experts are not supported"):
            made.from_pretrained(tmp_path / "quantized")
        return
    loaded = made.from_pretrained(tmp_path / "quantized")
    want = mm.load(tmp_path / "quantized", exact=True, verbose=False).logits(IDS[0].tolist())
    assert_close(logits_of(loaded.eval()), want)


def exchange_stacks(folder: Path) -> None:
    """Stores experts as published files do, [experts, in, out]; transformers 5 writes [out, in]."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    stacks = [name for name in tensors if name.endswith(("experts.gate_up_proj", ".down_proj"))]
    for name in stacks:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    assert stacks
    save_file(tensors, path, metadata={"format": "pt"})


def keeping(stack: str) -> mm.MixedPrecisionConfig:
    """A recipe that leaves one of the two stacks as it is."""
    content = json.loads(mm.MixedPrecisionConfig.uniform("s8/g16").to_json())
    content["overrides"] = [{"glob": f"*.experts.{stack}", "choice": "keep"}]
    return mm.MixedPrecisionConfig.from_json(json.dumps(content))


# 32: gate and up of one expert are square; 64: down is.
@pytest.mark.parametrize("inner", [32, 48, 64])
def test_stacks_of_experts_are_read_in_both_layouts(
    inner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, text, *others = TYPES["qwen3_vl_moe"]
    changed = (name, {**text, "moe_intermediate_size": inner}, *others)
    monkeypatch.setitem(TYPES, "qwen3_vl_moe", changed)
    want = logits_of(save_model("qwen3_vl_moe", tmp_path / "written"))
    shutil.copytree(tmp_path / "written", tmp_path / "published")
    exchange_stacks(tmp_path / "published")
    ids = IDS[0].tolist()
    for folder in ("written", "published"):
        assert_close(mm.load(tmp_path / folder, exact=True, verbose=False).logits(ids), want)
    recipes: list[str | mm.MixedPrecisionConfig] = ["uniform:s8/g16"]
    recipes += [keeping("down_proj"), keeping("gate_up_proj")]
    for number, recipe in enumerate(recipes):
        made = {}
        for folder in ("written", "published"):
            output = tmp_path / f"{folder}{number}"
            mm.quantize_model(tmp_path / folder, output, recipe)
            made[folder] = mm.load(output, exact=True, verbose=False).logits(ids)
        assert np.array_equal(made["written"], made["published"])
        # A router may choose another expert for a token.
        assert np.linalg.norm(made["written"] - want) < 0.1 * np.linalg.norm(want)


def test_stacks_of_experts_that_fit_no_layout_are_named(tmp_path: Path) -> None:
    save_model("qwen3_vl_moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    tensors[name] = tensors[name][:, :, :-1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(mm.MalformedFileError, match="layers.1.mlp.experts.down_proj.*neither"):
        mm.load(tmp_path, exact=True, verbose=False)
    report = mm.quantize_model(tmp_path, tmp_path / "quantized", "uniform:s8/g16")
    skipped = [entry for entry in report["skipped"] if ".layers.1.mlp.exp" in entry["name"]]
    assert len(skipped) == 2 and all("neither" in entry["reason"] for entry in skipped)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"])
def test_gguf_holds_the_text_model(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    want = logits_of(save_model(kind, tmp_path / "source"))
    run("export", tmp_path / "source", "-o", tmp_path / "model.gguf", "--to", "gguf")
    assert "gguf holds the text model" in "".join(capfd.readouterr())
    model = mm.load(tmp_path / "model.gguf", exact=True, verbose=False)
    assert_close(model.logits(IDS[0].tolist()), want)


def test_mlx_refuses_what_has_other_parts(tmp_path: Path) -> None:
    mlx_lm = pytest.importorskip("metal_marlin.mlx_lm")
    save_model("qwen3_vl", tmp_path / "source")
    mm.quantize_model(tmp_path / "source", tmp_path / "quantized", "uniform:s8/g16")
    with pytest.raises(mm.UnsupportedError, match="qwen3_vl"):
        mlx_lm.load(tmp_path / "quantized")


@pytest.mark.parametrize("kind", FLAT)
def test_keys_of_the_text_model_may_stand_at_the_top(kind: str, tmp_path: Path) -> None:
    want = logits_of(save_model(kind, tmp_path))

    def flatten(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        config.update({key: text[key] for key in text if key != "model_type"})
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope["rope_theta"]
        config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}

    edit(tmp_path, flatten)
    assert_close(mm.load(tmp_path, exact=True, verbose=False).logits(IDS[0].tolist()), want)


def test_missing_keys_have_the_defaults_of_the_text_model(tmp_path: Path) -> None:
    want = logits_of(save_model("lighton_ocr", tmp_path))
    edit(tmp_path, lambda config: config["text_config"].pop("rms_norm_eps"))
    assert_close(mm.load(tmp_path, exact=True, verbose=False).logits(IDS[0].tolist()), want)
    edit(tmp_path, lambda config: config["text_config"].pop("vocab_size"))
    with pytest.raises(mm.MalformedFileError, match="embed_tokens"):
        mm.load(tmp_path, exact=True, verbose=False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("logit_scale", 0.5, "logit_scale"),
        ("hidden_size", 32, "hidden_size.*text_config"),
        ("head_dim", 32, "head_dim.*text_config"),
        ("text_config", 3, "text_config: expected an object"),
        ("text_config", None, "text_config"),
    ],
)
def test_keys_beside_the_text_model_are_read_or_refused(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    save_model("lighton_ocr", tmp_path)
    edit(tmp_path, lambda config: config.update({key: value}))
    with pytest.raises((mm.UnsupportedError, mm.MalformedFileError), match=message):
        mm.load(tmp_path, exact=True, verbose=False)


@pytest.mark.parametrize("where", ["both", "whole", "text", "neither"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_tied_as_in_transformers(where: str, tied: bool, tmp_path: Path) -> None:
    """transformers reads tie_word_embeddings of the whole model."""
    save_model("qwen3_vl" if tied else "qwen2_vl", tmp_path)

    def place(config: dict[str, Any]) -> None:
        for values, wanted in (
            (config, ("both", "whole")),
            (config["text_config"], ("both", "text")),
        ):
            values.pop("tie_word_embeddings", None)
            if where in ("both", wanted):
                values["tie_word_embeddings"] = tied

    edit(tmp_path, place)
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path, output_loading_info=True
    )
    if info["missing_keys"]:
        with pytest.raises((mm.MalformedFileError, mm.UnsupportedError), match="lm_head"):
            mm.load(tmp_path, exact=True, verbose=False)
        return
    got = mm.load(tmp_path, exact=True, verbose=False).logits(IDS[0].tolist())
    assert_close(got, logits_of(model.eval()))


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_layers_that_predict_further_tokens_are_kept(kind: str, tmp_path: Path) -> None:
    """In "mtp": quantized by the recipe, named, and never run."""
    want = logits_of(save_model(kind, tmp_path / "source"))
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    extra = {
        f"mtp.layers.0.{name}": tensors[f"model.language_model.layers.1.{name}"].clone()
        for name in ("self_attn.q_proj.weight", "self_attn.q_norm.weight")
    }
    extra["mtp.fc.weight"] = torch.randn(64, 128)
    extra["mtp.pre_fc_norm_hidden.weight"] = torch.zeros(64)
    if kind == "qwen3_5_moe":
        extra["mtp.layers.0.mlp.experts.0.up_proj.weight"] = torch.randn(32, 64)
    save_file({**tensors, **extra}, path, metadata={"format": "pt"})
    ids = IDS[0].tolist()
    assert_close(mm.load(tmp_path / "source", exact=True, verbose=False).logits(ids), want)
    mm.quantize_model(tmp_path / "source", tmp_path / "quantized", "uniform:s8/g16")
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    modules = config["quantization_config"]["modules"]
    assert "mtp.layers.0.self_attn.q_proj.weight" in modules
    after = load_file(tmp_path / "quantized" / "model.safetensors")
    assert torch.equal(after["mtp.fc.weight"], extra["mtp.fc.weight"])
    model = mm.load(tmp_path / "quantized", exact=True, verbose=False)
    loaded = getattr(transformers, f"{TYPES[kind][0]}ForConditionalGeneration").from_pretrained(
        tmp_path / "quantized"
    )
    assert_close(logits_of(loaded.eval()), model.logits(ids))


def test_a_head_of_its_own_beside_a_tied_table_is_used(tmp_path: Path) -> None:
    save_model("qwen3_vl", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = torch.randn(99, 64) * 0.15
    save_file(tensors, path, metadata={"format": "pt"})
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    got = mm.load(tmp_path, exact=True, verbose=False).logits(IDS[0].tolist())
    assert_close(got, logits_of(model.eval()))


def test_a_tensor_of_no_part_is_named(tmp_path: Path) -> None:
    save_model("qwen3_vl", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.language_model.extra.weight"] = torch.zeros(3)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(mm.MalformedFileError, match="extra"):
        mm.load(tmp_path, exact=True, verbose=False)
