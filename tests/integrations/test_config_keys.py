"""The keys of config.json that the runner reads, against transformers' configuration classes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from metal_marlin._core import describe_decoder, key_treatment, type_defaults
from transformers import CONFIG_MAPPING, PreTrainedConfig

RUN = (
    "cohere2",
    "deepseek_v3",
    "exaone4",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granite",
    "granitemoe",
    "helium",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
)
PLANNED = ("deepseek_v2",)
ABSENT = object()


def own_default(kind: str, key: str) -> Any:
    """The value that the class of a type takes for a missing key; ABSENT if it reads none."""
    made = CONFIG_MAPPING[kind]
    if key == "rope_theta":
        return made.default_theta
    if key == "partial_rotary_factor":
        return made().rope_parameters.get(key, ABSENT)
    if key == "rope_parameters":
        return own_rope(made)
    fields = {field.name: field.default for field in dataclasses.fields(made)}
    if key not in fields:
        names = [name for name, target in made.attribute_map.items() if target == key]
        key = next((name for name in names if name in fields), key)
    return fields.get(key, ABSENT)


def own_rope(made: Any) -> dict[str, Any]:
    """The parameters of a class, but no repetitions."""
    config = made()
    rope = dict(config.rope_parameters)
    if rope["rope_theta"] == made.default_theta:
        del rope["rope_theta"]
    if rope.get("type") == rope["rope_type"]:
        del rope["type"]
    if rope.get("max_position_embeddings") == config.max_position_embeddings:
        del rope["max_position_embeddings"]
    return rope


def sizes(kind: str) -> dict[str, Any]:
    """The keys that every config.json must have."""
    config = CONFIG_MAPPING[kind]()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    return {"model_type": kind, **{name: getattr(config, name) for name in (*names, "vocab_size")}}


@pytest.mark.parametrize("kind", RUN + PLANNED)
def test_defaults_are_those_of_the_class(kind: str) -> None:
    defaults = json.loads(type_defaults(kind))
    assert len(defaults) > 10
    for key, value in defaults.items():
        own = own_default(kind, key)
        if own is ABSENT:
            # Read from every model of its kind, or honoured wherever a config gives it.
            others = ("head_dim", "num_nextn_predict_layers", "sliding_window_pattern")
            assert key in others and not value, key
        else:
            assert value == own and type(value) is type(own), f"{key}: {value}, {own}"


@pytest.mark.parametrize("kind", RUN)
def test_every_key_of_the_class_is_known(kind: str) -> None:
    made = CONFIG_MAPPING[kind]
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    for field in dataclasses.fields(made):
        expected = ("read", "harmless", "guarded") if field.name in common else ("read", "harmless")
        assert key_treatment(kind, field.name) in expected, field.name


@pytest.mark.parametrize("kind", RUN)
def test_a_default_config_is_read_without_notes(kind: str) -> None:
    config = CONFIG_MAPPING[kind]()
    decoder = describe_decoder(json.dumps({**config.to_dict(), "dtype": "bfloat16"}))
    assert decoder["notes"] == []
    assert decoder["layers"] == config.num_hidden_layers
    # Everything is a default, so nothing changes without any of it.
    assert describe_decoder(json.dumps(sizes(kind))) == decoder


@pytest.mark.parametrize("kind", RUN)
def test_null_is_what_it_is_in_the_class(kind: str) -> None:
    """A null of a key that may be null is not a missing key."""
    made = CONFIG_MAPPING[kind]
    for field in dataclasses.fields(made):
        if field.name == "sliding_window" and "None" in str(field.type):
            text = {**sizes(kind), "sliding_window": None}
            assert set(describe_decoder(json.dumps(text))["windows"]) == {0}
        if field.name == "norm_topk_prob" and "None" in str(field.type):
            text = {**sizes(kind), "norm_topk_prob": None}
            assert not describe_decoder(json.dumps(text))["normalizes_choice"]
