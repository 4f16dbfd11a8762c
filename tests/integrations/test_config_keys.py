"""The keys of config.json that the runner reads, against transformers' configuration classes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from metal_marlin._core import describe_decoder, key_treatment, type_defaults
from test_random_configs import TYPES
from transformers import CONFIG_MAPPING, PreTrainedConfig

# Types whose class has another name.
CLASSES = {"kimi_k2": "deepseek_v3", "mistral4": "mistral4"}
RUN = sorted({*TYPES, *CLASSES})
# Parts of a class that are refused unless the key says that there are none.
REFUSED = (
    ("cohere", "use_qk_norm"),
    ("gemma", "use_bidirectional_attention"),
    ("hy_v3", "mlp_bias"),
    ("hyperclovax", "use_post_norm"),
    ("mellum", "mlp_layer_types"),
    ("gemma2", "use_bidirectional_attention"),
    ("gemma3_text", "use_bidirectional_attention"),
    ("gemma3_text", "attn_logit_softcapping"),
    ("gemma4_text", "use_bidirectional_attention"),
    ("nemotron_h", "moe_latent_size"),
    ("nemotron_h", "sliding_window"),
)
# Defaults of keys that only the classes' constructors know.
INNER = {
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
    "sliding_window_pattern": 6,
}
INNER_OF = {("cohere2", "sliding_window_pattern"): None}
ABSENT = object()
# Keys that a model needs and that its class leaves out.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
}
# Keys that a class has by another name, without an attribute_map that says so.
OWN_NAMES = {
    ("ernie4_5_moe", "n_shared_experts"): "moe_num_shared_experts",
    ("exaone_moe", "n_shared_experts"): "num_shared_experts",
    ("hy_v3", "n_shared_experts"): "num_shared_experts",
    ("hy_v3", "routed_scaling_factor"): "router_scaling_factor",
    ("hyperclovax", "logit_scale"): "logits_scaling",
    ("lfm2", "rms_norm_eps"): "norm_eps",
    ("lfm2_moe", "rms_norm_eps"): "norm_eps",
    ("lfm2_moe", "first_k_dense_replace"): "num_dense_layers",
    ("nemotron_h", "rms_norm_eps"): "layer_norm_epsilon",
    ("nemotron_h", "mamba_n_heads"): "mamba_num_heads",
    ("nemotron_h", "mamba_n_groups"): "n_groups",
    ("nemotron_h", "mamba_d_state"): "ssm_state_size",
    ("nemotron_h", "mamba_d_head"): "mamba_head_dim",
    ("nemotron_h", "mamba_d_conv"): "conv_kernel",
    ("nemotron_h", "mamba_conv_bias"): "use_conv_bias",
    ("gemma4_text", "num_experts_per_tok"): "top_k_experts",
}
# Keys that classes do not have, which are read from every model of a kind, or honoured wherever a
# config gives them.
BEYOND = (
    "head_dim",
    "hybrid_override_pattern",
    "index_skip_topk_offset",
    "index_topk_freq",
    "index_topk_pattern",
    "num_nextn_predict_layers",
    "rotary_dim",
    "sliding_window_pattern",
)


def class_of(kind: str) -> Any:
    """transformers' configuration class of a type."""
    return CONFIG_MAPPING[CLASSES.get(kind, kind)]


def own_default(kind: str, key: str) -> Any:
    """The value that the class of a type takes for a missing key; ABSENT if it reads none."""
    made = class_of(kind)
    if key in ("rope_theta", "rope_local_base_freq") and isinstance(made.default_theta, dict):
        return made.default_theta["global" if key == "rope_theta" else "local"]
    if key == "rope_theta":
        return made.default_theta
    if key == "partial_rotary_factor":
        return made().rope_parameters.get(key, ABSENT)
    if key == "rope_parameters":
        return own_rope(made)
    if key == "full_attention_interval":
        return made().layer_types.index("full_attention") + 1
    fields = {field.name: field.default for field in dataclasses.fields(made)}
    key = OWN_NAMES.get((kind, key), made.attribute_map.get(key, key))
    if key not in fields:
        names = [name for name, target in made.attribute_map.items() if target == key]
        key = next((name for name in names if name in fields), key)
    default = fields.get(key, INNER_OF.get((kind, key), INNER.get(key, ABSENT)))
    return made._encode_special_floats(default) if isinstance(default, tuple) else default


def own_rope(made: Any) -> dict[str, Any]:
    """The parameters of a class without those that say nothing next to the others."""
    config = made()
    rope = dict(config.rope_parameters)
    if "full_attention" in rope:
        return rope
    if rope["rope_theta"] == made.default_theta:
        del rope["rope_theta"]
    if rope.get("type") == rope["rope_type"]:
        del rope["type"]
    if hasattr(config, "qk_rope_head_dim"):
        rope.pop("partial_rotary_factor", None)  # The sizes say it.
    if rope.get("max_position_embeddings") == config.max_position_embeddings:
        del rope["max_position_embeddings"]
    return rope


def sizes(kind: str) -> dict[str, Any]:
    """The keys that every config.json must have."""
    config = class_of(kind)(**NEEDED.get(kind, {}))
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    have = [name for name in (*names, "vocab_size") if hasattr(config, name)]
    found = {name: getattr(config, name) for name in have}
    return {"model_type": kind, **found, **NEEDED.get(kind, {})}


@pytest.mark.parametrize("kind", RUN)
def test_defaults_are_those_of_the_class(kind: str) -> None:
    defaults = json.loads(type_defaults(kind))
    assert len(defaults) > 10
    for key, value in defaults.items():
        own = own_default(kind, key)
        if own is ABSENT:
            assert key in BEYOND and not value, key
        else:
            assert value == own and type(value) is type(own), f"{key}: {value}, {own}"


@pytest.mark.parametrize("kind", RUN)
def test_every_key_of_the_class_is_known(kind: str) -> None:
    made = class_of(kind)
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    for field in dataclasses.fields(made):
        expected = ("read", "harmless", "guarded") if field.name in common else ("read", "harmless")
        if (kind, field.name) in REFUSED:
            expected = ("guarded", "suspect")
        assert key_treatment(kind, field.name) in expected, field.name


@pytest.mark.parametrize("kind", RUN)
def test_a_default_config_is_read_without_notes(kind: str) -> None:
    config = class_of(kind)(**NEEDED.get(kind, {}))
    text = {**config.to_dict(), "model_type": kind, "dtype": "bfloat16"}
    decoder = describe_decoder(json.dumps(text))
    limited = [note for note in decoder["notes"] if "index_topk: the context is limited" in note]
    assert decoder["notes"] == limited and len(limited) == ("index_topk" in text)
    assert decoder["layers"] == config.num_hidden_layers
    # Everything is a default, so nothing changes without any of it.
    assert describe_decoder(json.dumps(sizes(kind))) == decoder


@pytest.mark.parametrize("kind", RUN)
def test_null_is_what_it_is_in_the_class(kind: str) -> None:
    """A null of a key that may be null is not a missing key."""
    made = class_of(kind)
    for field in dataclasses.fields(made):
        if field.name == "sliding_window" and "None" in str(field.type):
            text = {**sizes(kind), "sliding_window": None}
            assert set(describe_decoder(json.dumps(text))["windows"]) == {0}
        if field.name == "norm_topk_prob" and "None" in str(field.type):
            text = {**sizes(kind), "norm_topk_prob": None}
            assert not describe_decoder(json.dumps(text))["normalizes_choice"]
