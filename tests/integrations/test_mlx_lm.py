"""mlx_lm's own model classes and commands on quantized directories, on the CPU: greedy tokens are
this package's own results. The weights are random, made by mlx_lm's classes."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "examples" / "tiny-qwen3-moe"
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 95,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
# config.json of each type, in addition to the small one.
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "attention_bias": False},
    "qwen3_moe": {
        **EXPERTS,
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "swiglu_limit": 7.0,
        "attention_bias": True,
    },
}
# mlx_lm's model has a head of its own, whatever config.json says.
TYPES["gpt_oss_tied"] = {**TYPES["gpt_oss"], "model_type": "gpt_oss", "tie_word_embeddings": True}
# A type that this package's runner lacks.
OTHER = {
    "model_type": "starcoder2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "norm_epsilon": 1e-5,
    "vocab_size": 96,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
# The names that a directory has for mlx_lm's roles.
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.fixture(autouse=True, params=["extension", "copies"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    mx.set_default_device(mx.cpu)
    monkeypatch.setenv("METAL_MARLIN_MLX", request.param)
    return str(request.param)


def stored(name: str, tensor: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """A tensor of mlx_lm's model as transformers stores it; `tensors` are all of the model."""
    head, _, rest = name.partition(".switch_mlp.")
    if rest:
        role = rest.removesuffix(".weight")
        role = MIXTRAL[role] if "block_sparse_moe" in head else role
        return {f"{head}.experts.{e}.{role}.weight": each for e, each in enumerate(tensor)}
    if ".mlp.experts." not in name:
        return {name: tensor}
    # gpt_oss: [experts, in, out], with columns of gate and up in turn.
    owner, role, kind = name.rsplit(".", 2)
    end = "_bias" if kind == "bias" else ""

    def turned(array: Any) -> Any:
        return array if end else array.swapaxes(1, 2)

    if role == "down_proj":
        return {f"{owner}.down_proj{end}": turned(tensor)}
    if role == "up_proj":
        return {}
    up = tensors[f"{owner}.up_proj.{kind}"]
    both = mx.stack([turned(tensor), turned(up)], axis=-1).flatten(-2)
    return {f"{owner}.gate_up_proj{end}": both}


def make_source(case: str, folder: Path) -> Path:
    """Saves a model of mlx_lm's class with random weights as transformers would."""
    from mlx.utils import tree_flatten

    config = OTHER if case == "other" else {"model_type": case, **SMALL, **TYPES[case]}
    module = __import__(f"mlx_lm.models.{config['model_type']}", fromlist=["Model"])
    mx.random.seed(len(case))
    model = module.Model(module.ModelArgs.from_dict(config))
    named = dict(tree_flatten(model.parameters()))
    if config["tie_word_embeddings"]:
        named.pop("lm_head.weight", None)
    tensors: dict[str, Any] = {}
    for name, tensor in named.items():
        if "norm" not in name:
            # Weights large enough for logits that differ.
            scale = 0.3 if tensor.ndim == 1 else 1.5 * tensor.shape[-1] ** -0.5
            named[name] = mx.random.normal(tensor.shape) * scale
    for name, tensor in named.items():
        tensors.update(stored(name, tensor, named))
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


RECIPE = {
    "name": "small",
    "classes": {
        "attention_qkv": "s8/g32",
        "attention_out": "fp4_e2m1/g32",
        "mlp_gate": "u4/g32",
        "mlp_up": "u4/g32",
        "mlp_down": "nf4/g32",
        "moe_expert": "fp4_e2m1/g16",
        "embedding": "s8/g32",
        "lm_head": "s8/g32",
    },
}


def quantized(source: Path, out: Path, recipe: dict[str, Any] = RECIPE) -> Path:
    mm.quantize_model(source, out, mm.MixedPrecisionConfig.from_json(json.dumps(recipe)))
    return out


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    from mlx_lm.generate import generate_step

    steps = generate_step(mx.array(prompt), model, max_tokens=count)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("case", TYPES)
def test_a_type_has_the_tokens_of_the_runner(case: str, tmp_path: Path) -> None:
    from metal_marlin.mlx_lm import load_model

    out = quantized(make_source(case, tmp_path / "source"), tmp_path / "q")
    model, config = load_model(out)
    assert config["eos_token_id"] == 95
    model.set_dtype(mx.float32)
    prompt = [int(i) for i in np.random.default_rng(3).integers(2, 90, 21)]
    runner = mm.load(out, exact=True)
    want = runner.logits(prompt)
    got = np.array(model(mx.array([prompt]))[0])
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
    tokens = runner.generate(prompt, 16)["token_ids"]
    assert len(tokens) > 1 and greedy(model, prompt, len(tokens)) == tokens
    kinds = {type(module).__name__ for _, module in model.named_modules()}
    assert "MarlinEmbedding" in kinds and "QuantizedEmbedding" not in kinds


def test_a_type_that_the_runner_lacks(tmp_path: Path) -> None:
    """Against mlx_lm's own model with the dequantized weights."""
    from metal_marlin.mlx_lm import load_model
    from mlx_lm import utils

    out = quantized(make_source("other", tmp_path / "source"), tmp_path / "q")
    model, _ = load_model(out)
    mm.dequantize_model(out, tmp_path / "plain", dtype="fp32")
    plain, _ = utils.load_model(tmp_path / "plain")
    ids = mx.array([[7, 8, 9, 10, 11]])
    want = plain(ids)
    model.set_dtype(mx.float32)
    assert float(mx.abs(model(ids) - want).max()) < 1e-4 * float(mx.abs(want).max())
    assert any(type(module).__name__ == "MarlinLinear" for module in model.modules())
    change_config(out, use_bias=True, rope_turns=3)
    with pytest.raises(mm.UnsupportedError, match="rope_turns: mlx_lm's starcoder2 does not read"):
        load_model(out)


def module_of(name: str, experts: int = 1) -> dict[str, Any]:
    return {"name": name, "n": 6, "k": 4, "experts": experts}


def test_names_of_sanitize() -> None:
    from metal_marlin._mlx_lm_names import Sanitized

    class Model:
        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            made = {name.replace("old.", "new."): tensor for name, tensor in weights.items()}
            joined = [made.pop(f"new.experts.{e}.up.weight") for e in range(3)]
            made["new.up.weight"] = mx.stack(joined)
            made["new.norm.weight"] = made["new.norm.weight"] + 1
            made.pop("new.unused.weight")
            return made

    tensors = {"old.norm.weight": mx.zeros((4,)), "old.kept.weight": mx.ones((2,))}
    modules = [
        module_of("old.q.weight"),
        module_of("old.experts.*.up.weight", 3),
        module_of("old.unused.weight"),
    ]
    made = Sanitized(Model(), tensors, modules, {"old.bias": (6,)})
    assert made.module_names == {"old.q.weight": "new.q.weight", "old.bias": "new.bias"}
    assert made.changed == ["new.up.weight"]
    assert sorted(made.tensors) == ["new.kept.weight", "new.norm.weight"]
    assert made.tensors["new.norm.weight"].tolist() == [1, 1, 1, 1]
    with pytest.raises(mm.UnsupportedError, match="sanitize of .*KeyError: 'new.experts.0.up"):
        Sanitized(Model(), tensors, modules[:1], {})
    with pytest.raises(mm.UnsupportedError, match="old.b.weight: mlx_lm's models have no tensors"):
        Sanitized(Model(), {"old.b.weight": mx.zeros((2,), mx.uint8)}, [], {})


def test_modules_are_placed_where_sanitize_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from metal_marlin.mlx_lm import load_model
    from mlx_lm.models import starcoder2

    def other_names(model: Any, weights: dict[str, Any]) -> dict[str, Any]:
        return {name.replace(".layers.", ".blocks."): value for name, value in weights.items()}

    out = quantized(make_source("other", tmp_path / "source"), tmp_path / "q")
    load_model(out)
    monkeypatch.setattr(starcoder2.Model, "sanitize", other_names, raising=False)
    with pytest.raises(mm.UnsupportedError, match="mlx_lm's model has no such module"):
        load_model(out)


def test_a_step_is_compiled(path: str, tmp_path: Path) -> None:
    """Nothing of a layer of experts is read on the host."""
    from metal_marlin.mlx_lm import load_model

    if path != "extension":
        pytest.skip("copies are evaluated on the host")
    model, _ = load_model(quantized(make_source("qwen3_moe", tmp_path / "source"), tmp_path / "q"))
    ids = mx.array([[3, 4, 5]])
    # Evaluating anything while a function is traced is an error of MLX.
    assert mx.array_equal(mx.compile(model)(ids), model(ids))


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def add_tensor(path: Path, name: str) -> None:
    tensors, metadata = mx.load(str(path / "model.safetensors"), return_metadata=True)
    tensors[name] = mx.zeros((4,))
    mx.eval(tensors)
    mx.save_safetensors(str(path / "model.safetensors"), tensors, metadata)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"adapter_path": "adapters"}, "adapter_path: adapters of quantized weights"),
        ({"model_config": {"quantize_activations": True}}, "model_config: quantize_activations"),
    ],
)
def test_arguments_that_are_not_supported(options: Any, says: str, tmp_path: Path) -> None:
    from metal_marlin.mlx_lm import load

    with pytest.raises(mm.UnsupportedError, match=says):
        load(tmp_path, **options)
    unknown: dict[str, Any] = {"unknown": 1}
    with pytest.raises(TypeError, match="unknown"):
        load(tmp_path, **unknown)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda path: change_config(path, model_file="model.py"), "model_file"),
        (lambda path: change_config(path, model_type="cohere2"), "has no adapted model"),
        (lambda path: change_config(path, rope_turns=3), "rope_turns"),
        (lambda path: add_tensor(path, "model.layers.1.extra.weight"), "model.layers.1.extra"),
    ],
)
def test_what_is_not_understood_is_named(
    change: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    from metal_marlin.mlx_lm import load_model

    out = quantized(make_source("qwen3", tmp_path / "source"), tmp_path / "q")
    change(out)
    with pytest.raises(mm.MarlinError, match=says):
        load_model(out)


# --- commands -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sample") / "q"
    mm.quantize_model(SAMPLE, out, "default_moe")
    return out


def command(*arguments: str) -> list[str]:
    # On the CPU, whatever the machine has.
    code = "import sys, mlx.core as mx; mx.set_default_device(mx.cpu); "
    code += "from metal_marlin.mlx_lm import main; sys.exit(main())"
    return [sys.executable, "-c", code, *arguments]


def test_the_command_generates(sample: Path, path: str) -> None:
    options = ["--model", str(sample), "--prompt", "And God said", "--max-tokens", "12"]
    done = subprocess.run(
        command("generate", *options, "--temp", "0", "--ignore-chat-template"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    text = mm.load(sample, exact=True).generate("And God said", 12)["text"]
    assert text.strip()[:20] in done.stdout


@pytest.mark.parametrize("arguments", [["train"], []])
def test_other_commands_are_refused(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "metal_marlin.mlx_lm", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2 and "usage: python -m metal_marlin.mlx_lm" in (
        done.stderr + done.stdout
    )


@pytest.fixture
def server(sample: Path) -> Iterator[int]:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(command("server", "--model", str(sample), "--port", str(port)))
    try:
        for _ in range(300):
            if process.poll() is not None:
                raise RuntimeError("the server ended")
            try:
                with socket.create_connection(("127.0.0.1", port), 1):
                    break
            except OSError:
                time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(20)


def test_the_server_answers(server: int) -> None:
    request = {"prompt": "And God said", "max_tokens": 8, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", server, timeout=120)
    connection.request(
        "POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"}
    )
    answer = json.loads(connection.getresponse().read())
    assert len(answer["choices"][0]["text"]) > 3, answer
    assert answer["usage"]["completion_tokens"] == 8


def test_other_models_are_mlx_lms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx_lm
    from metal_marlin._mlx_lm_command import load_any

    asked: list[Any] = []
    monkeypatch.setattr(mlx_lm, "load", lambda *rest, **options: asked.append((rest, options)))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization": {"bits": 4}}')
    refused: Any = pytest.fail
    load_any(refused, str(tmp_path), return_config=True)
    load_any(refused, str(tmp_path / "none"))
    assert asked == [((str(tmp_path),), {"return_config": True}), ((str(tmp_path / "none"),), {})]
