"""The quantization method as vLLM sees it."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import metal_marlin as mm
import pytest
import torch
from metal_marlin import _vllm_layers, vllm
from metal_marlin._vllm_layers import METHOD, MetalMarlinConfig, gate_options
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm_models import SAMPLE


def test_the_method_is_registered_once() -> None:
    vllm.register()
    vllm.register()
    assert get_quantization_config(METHOD) is MetalMarlinConfig


def test_other_methods_are_taken_only_by_name() -> None:
    theirs = {"quant_method": "gptq"}
    assert MetalMarlinConfig.override_quantization_method(theirs, METHOD) == METHOD
    for user in (None, "gptq_marlin"):
        assert MetalMarlinConfig.override_quantization_method(theirs, user) is None


def test_workers_open_the_checkpoint_themselves() -> None:
    config = MetalMarlinConfig.from_config({"quant_method": METHOD, "version": 1})
    config.maybe_update_config(str(SAMPLE))
    assert config.weights() is config.weights()
    copy = pickle.loads(pickle.dumps(config))
    assert copy._weights is None and copy.content == config.content
    assert copy.weights().directory == str(SAMPLE)


def test_a_name_of_the_hub_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["revision"], options["cache_dir"]))
        return str(SAMPLE)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    current = SimpleNamespace(load_config=SimpleNamespace(download_dir="cache"))
    monkeypatch.setattr(_vllm_layers, "get_current_vllm_config", lambda: current)
    config = MetalMarlinConfig()
    config.maybe_update_config("someone/model", revision="main")
    assert config.weights().directory == str(SAMPLE)
    assert asked == [("someone/model", "main", "cache")]


def layer(activation: MoEActivation, **options: Any) -> SimpleNamespace:
    clamp = {"swiglu_limit": None, "swiglu_alpha": None, "swiglu_beta": None, **options}
    return SimpleNamespace(activation=activation, layer_name="mlp.experts", **clamp)


def test_activations_of_experts() -> None:
    assert gate_options(layer(MoEActivation.SILU)) == {"activation": "silu"}
    assert gate_options(layer(MoEActivation.GELU_TANH)) == {"activation": "gelu_tanh"}
    clamped = {"limit": 7.0, "alpha": 1.702}
    assert gate_options(layer(MoEActivation.SWIGLUOAI)) == clamped
    others = (
        layer(MoEActivation.GELU),
        layer(MoEActivation.SILU, swiglu_limit=7.0),
        layer(MoEActivation.SWIGLUOAI, swiglu_beta=0.5),
    )
    for other in others:
        with pytest.raises(mm.UnsupportedError, match="mlp.experts: experts with activation"):
            gate_options(other)


def test_types_of_activations() -> None:
    types = MetalMarlinConfig().get_supported_act_dtypes()
    assert {*types} == {torch.bfloat16, torch.float16, torch.float32}
