"""Layers that predict further tokens (MTP) against transformers' own layer classes.

transformers does not run these layers, so that the reference is made here, as vLLM's
DeepSeekMultiTokenPredictorLayer and Qwen3NextMultiTokenPredictor have it: the layer's input is the
projection of [norm(embedding), norm(hidden)], where `hidden` is the model's hidden state after its
final norm. A further draft takes the layer's own hidden state after its norm, as SGLang's
DeepseekModelNextN and vLLM's Qwen3NextMultiTokenPredictor do.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

IDS = torch.randint(3, 190, (1, 14), generator=torch.Generator().manual_seed(1))
TOKENS = IDS[0].tolist()
LAYERS = 2  # The next one predicts.
SMALL = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
ROUTED = {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "q_lora_rank": 40,
}
DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}
QWEN_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
# Each type: its class, its keys, and the keys of all layers but the last.
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3", {**LATENT, "first_k_dense_replace": 1}),
    "deepseek_v32": (
        "DeepseekV32",
        {
            **LATENT,
            "first_k_dense_replace": 1,
            "index_topk": 64,
            "index_n_heads": 2,
            "index_head_dim": 24,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**ROUTED, "head_dim": 16, "use_qk_norm": True, "first_k_dense_replace": 1},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT),
    "qwen3_next": ("Qwen3Next", {**DELTA, **QWEN_EXPERTS}),
    "qwen3_5_text": ("Qwen3_5Text", DELTA),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", {**DELTA, **QWEN_EXPERTS}),
}
# The modules next to a layer: the norms of embedding and hidden state, the projection, the norm.
FOLLOWING = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MODULE = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


class Reference:
    """A random model whose last layer predicts further tokens, and its directory."""

    def __init__(self, kind: str, folder: Path, seed: int = 0) -> None:
        name, keys = TYPES[kind]
        torch.manual_seed(seed)
        config = getattr(transformers, f"{name}Config")(**{**SMALL, **keys})
        made = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
        self.model = made.model
        self.head = made.lm_head
        norm = type(self.model.norm)
        self.embedding_norm, self.hidden_norm, self.norm = (norm(64, 1e-5) for _ in range(3))
        self.join = torch.nn.Linear(128, 64, bias=False)
        for module in (made, self.embedding_norm, self.hidden_norm, self.norm, self.join):
            self._fill(module)
        made.save_pretrained(folder)
        self._rename(kind, folder)
        # The predicting layer runs as a model of one layer, which gives it mask and positions.
        self.layer = copy.deepcopy(self.model)
        self.layer.layers = torch.nn.ModuleList([self.model.layers[LAYERS]])
        self.layer.norm = self.norm
        self.model.layers = self.model.layers[:LAYERS]
        for part, layers in ((self.model, LAYERS), (self.layer, 1)):
            part.config = copy.deepcopy(config)
            part.config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                part.config.layer_types = (
                    config.layer_types[-1:] if layers == 1 else (config.layer_types[:layers])
                )

    @staticmethod
    @torch.no_grad()
    def _fill(module: torch.nn.Module) -> None:
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if "inv_freq" in key:
                continue
            if tensor.dim() == 1 and ("norm" in key or key == "weight"):
                tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
            elif "bias" in key:
                tensor.copy_(0.3 * torch.randn_like(tensor))
            else:
                tensor.copy_(0.15 * torch.randn_like(tensor))

    def _rename(self, kind: str, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        own, after = f"model.layers.{LAYERS}.", f"model.layers.{LAYERS}."
        names = FOLLOWING
        if kind.startswith("qwen"):
            after, names = "mtp.", MODULE
            for key in [key for key in tensors if key.startswith(own)]:
                tensors["mtp.layers.0." + key.removeprefix(own)] = tensors.pop(key)
        parts = (self.embedding_norm, self.hidden_norm, self.join, self.norm)
        for name, part in zip(names, parts, strict=True):
            tensors[f"{after}{name}.weight"] = part.weight.detach().clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["num_hidden_layers"] = LAYERS
        for key in ("layer_types", "mlp_layer_types", "indexer_types"):
            if isinstance(config.get(key), list):
                config[key] = config[key][:LAYERS]
        if not kind.startswith("qwen"):
            config["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        """The model's, [tokens, vocab]."""
        return self.head(self.model(IDS, use_cache=False).last_hidden_state)[0]

    @torch.no_grad()
    def draft_logits(self, depth: int) -> torch.Tensor:
        """[tokens - depth, vocab]: those about token t + depth + 1."""
        hidden = self.model(IDS, use_cache=False).last_hidden_state[0]
        first = self._joined(IDS[0, 1:], hidden[:-1])
        rows = []
        for t in range(len(TOKENS) - depth):
            inputs = first[: t + 1]
            out = self._run(inputs)
            for at in range(2, depth + 1):
                inputs = torch.cat([inputs, self._joined(IDS[0, t + at : t + at + 1], out)])
                out = self._run(inputs)
            rows.append(self.head(out)[0])
        return torch.stack(rows)

    def _joined(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding_norm(self.model.embed_tokens(ids))
        return self.join(torch.cat([embedded, self.hidden_norm(hidden)], dim=-1))

    def _run(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer's hidden state after its last input, normalized."""
        done = self.layer(inputs_embeds=inputs[None], use_cache=False)
        return done.last_hidden_state[0, -1:]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("kind", TYPES)
def test_logits_are_those_of_transformers_layers(kind: str, tmp_path: Path) -> None:
    reference = Reference(kind, tmp_path)
    model = mm.load(tmp_path, "cpu", exact=True, verbose=False, draft=True)
    assert np.abs(model.logits(TOKENS) - reference.logits().numpy()).max() < 1e-3
    said = reference.logits().argmax(-1)
    accepted = model.draft_acceptance(TOKENS, depth=3, window=len(TOKENS) - 1)
    for depth in (1, 2, 3):
        expected = reference.draft_logits(depth)
        logits = model.draft_logits(TOKENS, depth)
        assert logits.shape == tuple(expected.shape)
        assert np.abs(logits - expected.numpy()).max() < 1e-3
        guesses = expected.argmax(-1)[: len(TOKENS) - 1 - depth]
        same = (guesses == said[depth : len(TOKENS) - 1]).double().mean()
        assert accepted[depth - 1].depth == depth
        assert accepted[depth - 1].positions == len(guesses)
        assert accepted[depth - 1].accepted == pytest.approx(float(same))


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "metal_marlin.cli", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_compare_reports_the_acceptance_of_a_quantized_model(tmp_path: Path) -> None:
    source, quantized = tmp_path / "source", tmp_path / "quantized"
    Reference("glm4_moe", source)
    report = mm.quantize_model(source, quantized, "uniform:s8/g32")
    assert report.quantized_parameters > 0
    modules = json.loads((quantized / "config.json").read_text())["quantization_config"]["modules"]
    assert f"model.layers.{LAYERS}.self_attn.q_proj.weight" in modules
    tokens = tmp_path / "tokens.txt"
    tokens.write_text(" ".join(map(str, TOKENS * 3)))
    words = ("compare", quantized, "--against", source, "--tokens", tokens, "--window", 12)
    done = command(*words, "--draft", 2, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    depths = json.loads(done.stdout)["draft_acceptance"]
    model = mm.load(quantized, "cpu", verbose=False, draft=True)
    expected = model.draft_acceptance(TOKENS * 3, depth=2, window=12)
    assert depths == [vars(depth) for depth in expected]
    assert "draft_acceptance" not in json.loads(command(*words, "--json").stdout)
    text = command(*words, "--draft", 2, "--device", "cpu").stdout
    assert "draft 1           accepted at " in text, text
    refused = command(*words[:1], source.parent / "source", *words[2:], "--draft", 99)
    assert refused.returncode == 1
    assert "--draft" in refused.stderr


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    Reference("qwen3_5_text", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    some = {key: tensor for key, tensor in tensors.items() if key != "mtp.fc.weight"}
    save_file(some, path, metadata={"format": "pt"})
    with pytest.raises(mm.MalformedFileError, match=r"mtp\.fc\.weight"):
        mm.load(tmp_path, "cpu", verbose=False, draft=True)
    none = {key: tensor for key, tensor in tensors.items() if not key.startswith("mtp.")}
    save_file(none, path, metadata={"format": "pt"})
    with pytest.raises(mm.UnsupportedError, match=r"has no layer that predicts further tokens"):
        mm.load(tmp_path, "cpu", verbose=False, draft=True)
    model = mm.load(tmp_path, "cpu", verbose=False)
    with pytest.raises(mm.InvalidArgumentError, match="opened without"):
        model.draft_logits(TOKENS)
