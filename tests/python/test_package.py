"""The package with NumPy alone: packing, GEMMs, models, errors, the command."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "examples" / "tiny-qwen3-moe"
GOLDEN = json.loads((SAMPLE / "golden.json").read_text())


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_importing_is_light_and_silent() -> None:
    out = run_python(
        "import sys, time; import numpy; t = time.perf_counter(); import metal_marlin; "
        "print([m for m in ('torch', 'mlx', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    assert out == "[]\n"


@pytest.mark.parametrize("group_size", [16, 32, 128])
def test_fp4_packs_unpacks_and_multiplies(group_size: int) -> None:
    weight = gaussian(256, 72)
    packed, scales = mm.pack_fp4_weights(weight, group_size)
    assert (packed.shape, packed.dtype) == ((32, 72), np.uint32)
    assert (scales.shape, scales.dtype) == ((256 // group_size, 72), np.float16)
    dense = mm.unpack_weights(packed, scales, group_size)
    assert np.abs(dense - weight).max() < 1.0
    x = gaussian(2, 3, 256, seed=1)
    y = mm.quantized_linear(x, packed, scales, group_size)
    assert (y.shape, y.dtype) == ((2, 3, 72), np.float32)
    assert np.abs(y - x @ dense).max() < 0.15  # Weights may be rounded to bfloat16.
    exact = mm.matmul(x, mm.prepare(mm.pack_weights(weight, "fp4_e2m1", group_size)),
                      accuracy="exact")
    assert np.abs(exact - x @ dense).max() < 1e-3


def test_u4_has_zeros() -> None:
    weight = gaussian(128, 40) + 1.0
    packed, scales, zeros = mm.pack_u4_weights(weight, 64)
    assert zeros.shape == scales.shape == (2, 40)
    dense = mm.unpack_weights(packed, scales, 64, zeros, "u4")
    assert np.abs(dense - weight).max() < 0.5
    y = mm.quantized_linear(gaussian(1, 128), packed, scales, 64, zeros, "u4")
    assert np.abs(y - gaussian(1, 128) @ dense).max() < 1e-3


@pytest.mark.parametrize("name", mm.formats())
def test_every_format_round_trips_through_its_parts(name: str) -> None:
    weights = mm.pack_weights(gaussian(96, 33), name, 32)
    assert (weights.k, weights.n, weights.format) == (96, 33, name)
    dense = mm.dequantize(weights)
    y = mm.matmul(np.eye(96, dtype=np.float32), mm.prepare(weights), accuracy="exact")
    assert np.array_equal(y, dense)


def test_strides_experts_and_half_precision() -> None:
    weight = gaussian(3, 40, 64).transpose(0, 2, 1)
    weights = mm.pack_weights(weight, "nf4", 32)
    assert weights.experts == 3
    dense = mm.dequantize(weights)
    prepared = mm.prepare(weights)
    x = gaussian(5, 128)[:, ::2].astype(np.float16)
    for expert in range(3):
        y = mm.matmul(x, prepared, expert=expert)
        assert y.dtype == np.float16
        assert np.abs(y - x.astype(np.float32) @ dense[expert]).max() < 0.1


def test_shards_are_parts_of_the_whole() -> None:
    weight = np.random.default_rng(5).standard_normal((2, 96, 12), dtype=np.float32)
    whole = mm.pack_weights(weight, "int3", 16)
    dense = mm.dequantize(whole)
    for world in (1, 2, 3):
        rows = [mm.dequantize(mm.shard(whole, "k", rank, world)) for rank in range(world)]
        columns = [mm.dequantize(mm.shard(whole, "n", rank, world)) for rank in range(world)]
        np.testing.assert_array_equal(np.concatenate(rows, 1), dense)
        np.testing.assert_array_equal(np.concatenate(columns, 2), dense)
    for arguments, message in (
        (("k", 0, 4), "shard: k=96 in 4 shards of 24 is no multiple of group_size=16"),
        (("n", 0, 5), "shard: n=12 cannot be cut into 5 equal shards"),
        (("m", 0, 2), 'axis: expected "k" or "n", got "m"'),
        (("n", 2, 2), "rank: expected 0 to 1, got 2"),
    ):
        with pytest.raises(mm.InvalidArgumentError) as error:
            mm.shard(whole, *arguments)
        assert str(error.value) == message
    with pytest.raises(mm.InvalidArgumentError, match="shard: unsupported argument types"):
        mm.shard(weight, "n", 0, 2)  # type: ignore[arg-type]


def test_errors_are_typed_one_liners() -> None:
    with pytest.raises(mm.InvalidArgumentError, match="format: unknown name 'fp5'"):
        mm.pack_weights(gaussian(32, 32), "fp5")
    with pytest.raises(ValueError, match=r"x: expected \[\.\.\., 32\], got \[2, 31\]"):
        mm.matmul(gaussian(2, 31), mm.prepare(mm.pack_weights(gaussian(32, 8))))
    with pytest.raises(mm.InvalidArgumentError, match="x: expected float32"):
        mm.matmul(np.ones((1, 32), np.int64), mm.prepare(mm.pack_weights(gaussian(32, 8))))
    with pytest.raises(mm.NonFiniteInputError, match="NaN"):
        mm.pack_weights(np.full((32, 4), np.nan, np.float32))
    with pytest.raises(OSError, match="no such directory"):
        mm.load("nowhere")
    with pytest.raises(mm.UnsupportedError, match="reads marlin_w4"):
        mm.prepare(mm.pack_weights(gaussian(32, 8)), "cpu", marlin_w4=True)
    with pytest.raises(mm.UnsupportedError, match="a GPU kernel that no device here has"):
        _ = mm.kernels.marlin_gemm_w4
    with pytest.raises(AttributeError):
        _ = mm.kernels.no_such_kernel


def test_devices_by_name() -> None:
    names = [info["name"] for info in mm.devices()]
    assert names[0] == "cpu" and len(set(names)) == len(names)
    device = mm.Device("cpu")
    assert device.name == "cpu" and device.info["backend"] == "cpu"
    device.synchronize()
    device.synchronize(1)
    assert mm.open_device("cpu") is mm.default_device()
    with pytest.raises(mm.InvalidArgumentError, match="known: cpu, cuda, cuda:N, metal"):
        mm.Device("tpu")
    with pytest.raises(mm.UnsupportedError, match="^cuda:999: "):
        mm.Device("cuda:999")


def test_auto_is_a_gpu_where_one_is_listed() -> None:
    backends = {info["backend"] for info in mm.devices()}
    best = mm.Device("auto")
    assert best.info["backend"] == ("cuda" if "cuda" in backends else "cpu")
    assert mm.open_device("auto") is mm.open_device("auto")
    if best.name == "cpu":
        assert mm.open_device("auto") is mm.open_device("cpu")
    assert str(mm.Device("cpu", threads=2)).endswith(", 2 threads)")


def test_a_model_says_which_device_auto_took(capfd: pytest.CaptureFixture[str]) -> None:
    for device in (None, "auto"):
        model = mm.load(SAMPLE, device)
        assert capfd.readouterr() == ("", f"device: {model.device}\n")
    mm.load(SAMPLE, verbose=False)
    mm.load(SAMPLE, "cpu")
    mm.load(SAMPLE, mm.Device("auto"))
    assert capfd.readouterr() == ("", "")


def test_the_environment_names_the_default_device(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("METAL_MARLIN_DEVICE", "cpu")
    assert mm.Device().name == mm.open_device().name == mm.load(SAMPLE).device.name == "cpu"
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("METAL_MARLIN_DEVICE", "tpu")
    for call in (mm.Device, mm.open_device, mm.default_device, lambda: mm.load(SAMPLE)):
        with pytest.raises(mm.InvalidArgumentError, match="^METAL_MARLIN_DEVICE: .*'tpu'"):
            call()
    assert mm.load(SAMPLE, "cpu").device.name == "cpu"


def test_weights_know_their_device() -> None:
    weights = mm.pack_weights(gaussian(64, 32))
    x = gaussian(2, 64)
    own = mm.prepare(weights, mm.Device("cpu", threads=1))
    assert own.device.info["threads"] == 1
    assert np.array_equal(mm.matmul(x, own), mm.matmul(x, mm.prepare(weights, "cpu"), stream=7))
    with pytest.raises(mm.InvalidArgumentError, match="weights: prepared for another device"):
        mm.matmul(x, own, device=mm.default_device())


def test_arguments_of_the_core_are_checked() -> None:
    from metal_marlin import _core

    ready = mm.prepare(mm.pack_weights(gaussian(64, 32)))
    x, out, options = gaussian(2, 64), np.empty((2, 32), np.float32), _core.ProductOptions()

    def view(offset: int = 0, device: str = "cpu", strides: tuple[int, ...] = (64, 1)) -> Any:
        return _core.ArrayView(
            x, x.ctypes.data + offset, "float32", x.shape, strides, device, 3
        )

    def run(a: Any, to: Any) -> None:
        _core.gemm(ready.device, a, ready, to, options)

    run(view(), out)
    assert np.array_equal(out, mm.matmul(x, ready))
    wrong = [
        (lambda: run(view(device="cuda"), out), "x: expected an array on cpu, got one on cuda:3"),
        (lambda: run(view(2), out), "x: data is not aligned to its element of 4 bytes"),
        (lambda: run("text", out), "x: expected an array, got str"),
        (lambda: run(x, b"constant"), "out: expected a writable array, got bytes"),
        (lambda: view(strides=(1,)), "array: 2 dimensions but 1 strides"),
        (lambda: view(device="mps"), "array: on mps, which no device can access"),
    ]
    for call, message in wrong:
        with pytest.raises(mm.InvalidArgumentError, match=f"^{message}"):
            call()
    memory: list[int] = []

    def allocate(count: int) -> np.ndarray:
        memory.append(count)
        whole = np.empty(count + 64, np.uint8)
        begin = -whole.ctypes.data % 64
        return whole[begin : begin + count]

    options.allocate = allocate
    options.bias = gaussian(32, seed=5)
    run(x, out)
    assert len(memory) == 1 and memory[0] >= 1
    assert np.array_equal(out, mm.matmul(x, ready, options.bias))


def test_packed_arrays_are_prepared_once_and_forgotten() -> None:
    from metal_marlin import linear

    packed, scales = mm.pack_fp4_weights(gaussian(64, 32), 32)
    x = gaussian(1, 64)
    first = mm.quantized_linear(x, packed, scales, 32)
    count = len(linear._prepared)
    assert np.array_equal(first, mm.quantized_linear(x, packed, scales, 32))
    assert len(linear._prepared) == count
    del packed, scales
    assert len(linear._prepared) == count - 1


def test_threads_share_a_device() -> None:
    prepared = mm.prepare(mm.pack_weights(gaussian(512, 256)))
    x = gaussian(4, 512)
    want = mm.matmul(x, prepared)
    results: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: results.append(mm.matmul(x, prepared))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(np.array_equal(r, want) for r in results)


def test_the_sample_model_gives_its_golden_text() -> None:
    model = mm.load(SAMPLE, exact=True)
    result = model.generate(GOLDEN["prompt"], 48, ignore_eos=True)
    assert result["token_ids"] == GOLDEN["greedy_ids"]
    assert result["text"] == GOLDEN["greedy_text"]
    seen: list[int] = []

    def collect(token: int) -> bool:
        seen.append(token)
        return len(seen) < 5

    model.generate(GOLDEN["prompt_ids"], 48, callback=collect)
    assert seen == GOLDEN["greedy_ids"][:5]
    logits = model.logits(GOLDEN["prompt_ids"])
    assert np.abs(logits[:, :8] - np.array(GOLDEN["prompt_logits_first8_tokens"])).max() < 1e-3
    text = (SAMPLE / "validation.txt").read_text()
    got = model.perplexity(text)
    assert abs(got["perplexity"] / GOLDEN["validation_perplexity"] - 1) < 1e-3


def test_a_list_of_prompts_gives_a_list_of_texts() -> None:
    model = mm.load(SAMPLE, batch_invariant=True)
    prompts = [GOLDEN["prompt"], "In the beginning", "And", "In the beginning"]
    tokens, seeds = [12, 5, 0, 9], [1, 2, 3, 4]
    want = [
        model.generate(prompt, count, temperature=0.9, seed=seed, ignore_eos=True)
        for prompt, count, seed in zip(prompts, tokens, seeds, strict=True)
    ]
    for max_batch in (0, 1, 2):
        seen: list[list[int]] = [[] for _ in prompts]
        got = model.generate(
            prompts, tokens, temperature=0.9, seed=seeds, ignore_eos=True, max_batch=max_batch,
            callback=lambda index, token, seen=seen: seen[index].append(token),
        )
        assert isinstance(got, list) and len(got) == len(want)
        for result, alone, called in zip(got, want, seen, strict=True):
            assert list(result) == list(alone)
            assert result["token_ids"] == alone["token_ids"] == called
            assert (result["text"], result["stop_reason"]) == (alone["text"], alone["stop_reason"])
    ids = [GOLDEN["prompt_ids"], [5, 6], range(3), np.array([7, 8])]
    greedy = model.generate(ids, 6, ignore_eos=True)
    assert [result["text"] for result in greedy] == [None] * 4
    for prompt, result in zip(ids, greedy, strict=True):
        assert model.generate(prompt, 6, ignore_eos=True)["token_ids"] == result["token_ids"]
    mixed = model.generate(("And God", [5, 6]), 6, ignore_eos=True)
    assert mixed[0]["text"] is not None and mixed[1]["token_ids"] == greedy[1]["token_ids"]
    # A callback ends its text alone.
    ended = model.generate(ids, 6, ignore_eos=True, callback=lambda index, token: index != 1)
    assert [len(result["token_ids"]) for result in ended] == [6, 1, 6, 6]
    assert ended[1]["stop_reason"] == "stopped"


def test_every_sampling_option_counts() -> None:
    model = mm.load(SAMPLE, exact=True)
    prompt: list[int] = GOLDEN["prompt_ids"]

    def ids(**named: Any) -> list[int]:
        result: list[int] = model.generate(prompt, 24, ignore_eos=True, **named)["token_ids"]
        return result

    greedy = GOLDEN["greedy_ids"][:24]
    defaults = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
                "frequency_penalty": 0.0}
    assert ids(**defaults) == greedy and len(set(greedy)) < 24
    drawn = ids(temperature=1.5, seed=3)
    assert ids(temperature=1.5, seed=3, **defaults) == drawn != greedy
    assert ids(temperature=1.5, seed=3, min_p=1.0) == greedy
    assert ids(temperature=1.5, seed=3, min_p=0.5) not in (drawn, greedy)
    assert len(set(ids(presence_penalty=1e6))) == len(set(ids(frequency_penalty=1e6))) == 24
    assert set(ids(presence_penalty=-1e6)) == {greedy[0]}
    both = ids(presence_penalty=-1e6, frequency_penalty=3e5)
    assert [both.count(token) for token in both] == [4] * 24
    assert len({*ids(repetition_penalty=1000), *prompt}) == 24 + len(set(prompt))
    for name, value in {"min_p": 1.5, "repetition_penalty": 0.0, "presence_penalty": np.inf,
                        "frequency_penalty": np.nan}.items():
        with pytest.raises(mm.InvalidArgumentError, match=f"^{name}: expected "):
            ids(**{name: value})


def test_prepared_weights_are_mapped(tmp_path: Path) -> None:
    file = tmp_path / "prepared"
    report = mm.prepare_model(SAMPLE, file)
    assert report["bytes"] == file.stat().st_size and report["output"] == str(file)
    prompt = [5, 17, 4, 99]
    loaded, mapped = mm.load(SAMPLE), mm.load(SAMPLE, prepared=file)
    assert loaded.info == mapped.info
    assert np.array_equal(loaded.logits(prompt), mapped.logits(prompt))
    with pytest.raises(mm.InvalidArgumentError, match="exists already"):
        mm.prepare_model(SAMPLE, file)
    mm.prepare_model(SAMPLE, file, overwrite=True)
    with pytest.raises(mm.MalformedFileError, match="is not a file of prepared weights"):
        mm.load(SAMPLE, prepared=SAMPLE / "config.json")


def test_a_batch_invariant_model_gives_the_same_bits_in_pieces() -> None:
    tokens = [5, 17, 4, 99, 40, 7, 300, 21, 8, 61]
    model = mm.load(SAMPLE, batch_invariant=True)
    whole = model.logits(tokens)
    for count in (1, 6):
        assert np.array_equal(model.logits(tokens[:count]), whole[:count])


def test_keys_and_values_in_fp8() -> None:
    text = (SAMPLE / "validation_tokens.txt").read_text()
    tokens = [int(token) for token in text.split()[:100]]
    default, fp8 = mm.load(SAMPLE), mm.load(SAMPLE, kv_cache="fp8_e4m3")
    assert (default.info["kv_cache"], fp8.info["kv_cache"]) == ("bf16", "fp8_e4m3")
    assert default.info["kv_cache_bytes_per_token"] == 2 * fp8.info["kv_cache_bytes_per_token"]
    assert mm.load(SAMPLE, exact=True).info["kv_cache"] == "f32"
    # Logits of a few tokens move by more, where other experts are selected.
    difference = np.abs(default.logits(tokens) - fp8.logits(tokens)).mean()
    assert 0 < difference < 0.5
    for name in ("fp8", "", 8):
        with pytest.raises(
            mm.InvalidArgumentError,
            match=f"^kv_cache: expected f32, bf16 or fp8_e4m3, got '{name}'$",
        ):
            mm.load(SAMPLE, kv_cache=name)  # type: ignore[arg-type]


def test_other_quantizations_are_refused_by_name(tmp_path: Path) -> None:
    for file in SAMPLE.glob("*.safetensors"):
        shutil.copyfile(file, tmp_path / file.name)
    config = json.loads((SAMPLE / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "quip"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = 'quant_method "quip" is not supported; supported: metal_marlin'
    for attempt in (mm.load, mm.Checkpoint, lambda path: mm.quantize_model(path, tmp_path / "q")):
        with pytest.raises(mm.UnsupportedError, match=message):
            attempt(tmp_path)


def test_importing_a_file_of_another_program(tmp_path: Path) -> None:
    source = ROOT / "tests" / "golden" / "gguf_types" / "all_types.gguf"
    seen: list[tuple[int, int]] = []
    assert mm.import_model(source, tmp_path / "dry", dry_run=True)["coverage"] > 0.9
    assert not (tmp_path / "dry").exists()
    report = mm.import_model(
        source, tmp_path / "q", progress=lambda done, total: seen.append((done, total))
    )
    assert {module["exactness"] for module in report["modules"]} == {"exact"}
    assert seen[-1][0] == seen[-1][1] == report["parameters"]
    original, imported = mm.Checkpoint(source), mm.Checkpoint(tmp_path / "q")
    assert original.quant_method == "gguf" and imported.quantized
    imported.verify_checksums()
    for module in original.modules:
        name = module["name"]
        before, after = original.weights(name), imported.weights(name)
        assert np.array_equal(mm.dequantize(before), mm.dequantize(after)), name
    with pytest.raises(mm.InvalidArgumentError, match="nothing to import"):
        mm.import_model(SAMPLE, tmp_path / "none")


def test_exporting_to_other_programs(tmp_path: Path) -> None:
    mm.quantize_model(SAMPLE, tmp_path / "q", "uniform:s4/g32")
    seen: list[tuple[int, int]] = []
    file = tmp_path / "q.gguf"
    report = mm.export_model(
        tmp_path / "q", file, "gguf", progress=lambda done, total: seen.append((done, total))
    )
    assert report["output"] == str(file) and report["files"] == []
    assert seen[-1][0] == seen[-1][1]
    quantized, exported = mm.Checkpoint(tmp_path / "q"), mm.Checkpoint(file)
    for module in quantized.modules:
        name = module["name"]
        before, after = quantized.weights(name), exported.weights(name)
        assert np.array_equal(mm.dequantize(before), mm.dequantize(after)), name
    with pytest.raises(mm.InvalidArgumentError, match="exists already"):
        mm.export_model(tmp_path / "q", file, "gguf")
    with pytest.raises(mm.InvalidArgumentError, match="known: plain, compressed-tensors"):
        mm.export_model(tmp_path / "q", tmp_path / "out", "exl3")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mm.export_model(tmp_path / "q", tmp_path / "other.gguf", "gguf", progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q", "q.gguf"]


def test_quantizing_a_directory(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = mm.quantize_model(
        SAMPLE, tmp_path / "q", mm.MixedPrecisionConfig.aggressive_moe(),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert report["coverage"] > 0.8 and seen[-1][0] == seen[-1][1]
    checkpoint = mm.Checkpoint(str(tmp_path / "q"))
    checkpoint.verify_checksums()
    names = [m["name"] for m in checkpoint.modules]
    assert "model.layers.0.mlp.experts.*.up_proj.weight" in names
    codes: Any = checkpoint.weights(names[0]).codes
    assert codes.dtype == np.uint32
    model = mm.load(tmp_path / "q")
    assert model.info["recipe"] == "aggressive_moe"
    assert len(model.generate("And God said", 8)["token_ids"]) <= 8


def recipe_of(directory: Path) -> str:
    config = json.loads((directory / "config.json").read_text())
    return str(config["quantization_config"]["recipe"])


def test_the_default_recipe_is_the_commands(tmp_path: Path) -> None:
    dense = tmp_path / "dense.safetensors"
    header = json.dumps({"model.layers.0.mlp.up_proj.weight": {
        "dtype": "F32", "shape": [64, 128], "data_offsets": [0, 64 * 128 * 4]}}).encode()
    values = np.random.default_rng(0).standard_normal((64, 128), np.float32)
    dense.write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    for source, recipe in ((dense, "default_dense"), (SAMPLE, "default_moe")):
        assert mm.quantize_model(source, tmp_path / "q", overwrite=True)["runs"]
        assert recipe_of(tmp_path / "q") == recipe


def test_a_target_that_no_format_meets_is_refused_before_measuring(tmp_path: Path) -> None:
    for target, says in ((1.5, "1.5 bits per weight, the smallest formats take 2.5"),
                         (0, "expected a positive number"), (float("nan"), "positive number")):
        with pytest.raises(mm.InvalidArgumentError, match=says):
            mm.quantize_model(SAMPLE, tmp_path / "q", target_bpw=target, device="cpu")
    assert not (tmp_path / "q").exists()


def test_quantizing_with_a_text(tmp_path: Path) -> None:
    text = (SAMPLE / "validation.txt").read_text()
    few: dict[str, Any] = {"method": "gptq", "calibration_tokens": 1536, "device": "cpu"}
    recipe = mm.MixedPrecisionConfig.uniform("nf3/g64")
    report = mm.quantize_model(SAMPLE, tmp_path / "q", recipe, calibration=text, **few)
    assert report["fallbacks"] == []
    # Whether a token selects a rare expert depends on the processor's rounding.
    assert all(re.fullmatch(r"model\.layers\.\d+\.expert \d+", name)
               for name in report["unselected_experts"])
    ids = mm.load(SAMPLE, verbose=False).tokenizer.encode(text)
    mm.quantize_model(SAMPLE, tmp_path / "ids", recipe, calibration=ids, **few)
    files = [tmp_path / name / "model.safetensors" for name in ("q", "ids")]
    assert files[0].read_bytes() == files[1].read_bytes()
    report = mm.quantize_model(
        SAMPLE, tmp_path / "awq", recipe, calibration=ids, **(few | {"method": "awq"})
    )
    assert report["inputs"] == 44 and 0 <= report["scaled_inputs"] <= 44
    for wrong, message in (
        ({"calibration": ""}, "has no tokens"),
        ({"calibration": [1, "2"]}, "text or token ids"),
        ({"calibration": [1, 10**6]}, "token 1 is 1000000"),
        ({"calibration": [1, 2], "method": "mse"}, "uses no calibration"),
    ):
        with pytest.raises(mm.InvalidArgumentError, match=message):
            mm.quantize_model(SAMPLE, tmp_path / "no", recipe, **(few | wrong))


def test_formats_for_a_number_of_bits(tmp_path: Path) -> None:
    text = (SAMPLE / "validation.txt").read_text()[20000:24000]
    seen: list[tuple[int, int]] = []
    sensitivity = mm.measure_sensitivity(
        SAMPLE, ["nf3/g64", "s8/g64"], calibration=text, calibration_tokens=256,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert len(sensitivity["matrices"]) == 112 and seen[-1] == (224, 224)
    recipe = mm.assign_formats(SAMPLE, sensitivity, 5)
    assert set(json.loads(recipe.to_json())["tensors"].values()) == {"nf3/g64", "s8/g64"}
    file = tmp_path / "sensitivity.json"
    file.write_text(json.dumps(sensitivity))
    reports = [
        mm.quantize_model(SAMPLE, tmp_path / name, target_bpw=5, **given)
        for name, given in (
            ("dict", {"sensitivity": sensitivity}),
            ("file", {"sensitivity": file}),
            ("measured", {"formats": ["nf3/g64", "s8/g64"], "calibration": text,
                          "calibration_tokens": 256}),
        )
    ]
    mm.quantize_model(SAMPLE, tmp_path / "recipe", recipe)
    files = [tmp_path / name / "model.safetensors" for name in
             ("dict", "file", "measured", "recipe")]
    assert len({path.read_bytes() for path in files}) == 1
    assert all(4.9 < report["quantized_bits_per_weight"] <= 5 for report in reports)
    for wrong, message in (
        ({"target_bpw": 2.0, "sensitivity": file}, "2 bits per weight"),
        ({"sensitivity": file}, "need target_bpw"),
        ({"formats": ["nf3/g64"]}, "need target_bpw"),
        ({"target_bpw": 5, "recipe": "default_moe"}, "target_bpw excludes"),
        ({"target_bpw": 5, "sparsity": "2:4"}, "target_bpw excludes"),
        ({"target_bpw": 5, "sensitivity": file, "calibration": text}, "uses no calibration"),
        ({"target_bpw": 5, "sensitivity": file, "formats": ["u4/g64"]}, "was not measured"),
    ):
        with pytest.raises(mm.InvalidArgumentError, match=message):
            mm.quantize_model(SAMPLE, tmp_path / "no", **wrong)
    with pytest.raises(mm.FileError, match="absent"):
        mm.quantize_model(SAMPLE, tmp_path / "no", target_bpw=5, sensitivity=tmp_path / "absent")


def test_the_command_has_a_tokenizer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "metal_marlin.cli"]

    def run(*arguments: str | bytes) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)

    done = run("generate", str(SAMPLE), "--prompt", GOLDEN["prompt"], "--max-tokens", "48",
               "--exact", "--ignore-eos", "--json")
    assert json.loads(done.stdout)["text"] == GOLDEN["greedy_text"]
    done = run("generate", str(SAMPLE), "--prompt", "x", "--top-p", "2")
    assert done.returncode == 1 and "--top-p" in done.stderr
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"In the \xff beginning")
    done = run("perplexity", str(SAMPLE), "--text", str(broken))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "broken.txt: " in done.stderr and "can't decode byte 0xff" in done.stderr
    done = run("generate", str(SAMPLE), "--prompt", b"\xff")
    assert done.returncode == 2 and "--prompt: " in done.stderr
    done = run("generate", str(SAMPLE), "--prompt", "And", "--stop", "d", "--seed", "1", "--json")
    assert "d" not in json.loads(done.stdout)["text"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in (
        {"prompt": GOLDEN["prompt"]}, {"prompt": "In\nthe", "max_tokens": 3}, {"tokens": [5]})))
    rows = [json.loads(row) for row in run("generate", str(SAMPLE), "--prompts", str(prompts),
                                           "--max-tokens", "48", "--exact", "--ignore-eos",
                                           "--batch-invariant", "--json").stdout.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3]
    assert rows[0]["text"] == GOLDEN["greedy_text"] and len(rows[1]["token_ids"]) == 3
    prompts.write_bytes(b"And\n\xff\n")
    done = run("generate", str(SAMPLE), "--prompts", str(prompts))
    assert done.returncode == 2 and "prompts.jsonl: line 2: " in done.stderr
    assert done.stdout == "" and done.stderr.count("\n") == 1
    demo = json.loads(run("demo", "--model", str(SAMPLE), "--json").stdout)
    for result in (demo["before"], *(row["after"] for row in demo["recipes"])):
        assert len(result["sentence"].split()) > 3
    (tmp_path / "config.json").write_text((SAMPLE / "config.json").read_text())
    shutil.copyfile(SAMPLE / "model.safetensors", tmp_path / "model.safetensors")
    done = run("generate", str(tmp_path), "--prompt", "x")
    assert done.returncode == 3 and "no tokenizer" in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "tokenizer.json").symlink_to(SAMPLE / "tokenizer.json")
    done = run("generate", str(tmp_path), "--prompt", "x")
    assert done.returncode == 1 and "tokenizer.json: is a link to" in done.stderr


@pytest.fixture
def metal_sim() -> mm.Device:
    try:
        return mm.Device("metal-sim")
    except mm.UnsupportedError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("format", ["fp4_e2m1", "u4", "nf3", "s8"])
def test_kernels_of_apple_gpus_in_the_simulator(metal_sim: mm.Device, format: str) -> None:
    weights = mm.pack_weights(gaussian(160, 40), format, 32)
    exact = mm.dequantize(weights)
    prepared = mm.prepare(weights, metal_sim)
    for rows in (1, 5, 20, 70):
        x = gaussian(rows, 160, seed=rows)
        np.testing.assert_allclose(mm.matmul(x, prepared), x @ exact, rtol=1e-4, atol=1e-4)
    if format == "fp4_e2m1":
        x = gaussian(70, 160)
        for kernel in ("marlin_gemm_fp4", "marlin_gemm_fp4_striped", "marlin_gemm_fused_fp4"):
            product = getattr(mm.kernels, kernel)(x, prepared)
            np.testing.assert_allclose(product, x @ exact, rtol=1e-4, atol=1e-4)


def test_a_model_in_the_simulator(metal_sim: mm.Device) -> None:
    model = mm.load(SAMPLE, metal_sim)
    generated = model.generate(GOLDEN["prompt"], max_tokens=3)
    assert generated["token_ids"] == GOLDEN["greedy_ids"][:3]


def test_measures_an_importance_matrix(tmp_path: Path) -> None:
    file, seen = tmp_path / "imatrix.gguf", []
    ids = [i * i % 250 for i in range(300)]
    summary = mm.measure_importance(
        SAMPLE, file, calibration=ids, progress=lambda *step: seen.append(step)
    )
    rows = {row["name"]: row for row in summary["inputs"]}
    assert rows["blk.0.attn_q.weight"]["counts"] == [256] and seen[-1] == (4, 4)
    report = mm.quantize_model(
        SAMPLE, tmp_path / "a", "uniform:int3/g64", method="mse", imatrix=file
    )
    assert all("layers" not in row["name"] or "no token" in row["reason"]
               for row in report["fallbacks"])
    with pytest.raises(mm.FileError, match="cannot be written"):
        mm.measure_importance(SAMPLE, tmp_path / "absent" / "file", calibration=ids)
    with pytest.raises(mm.InvalidArgumentError, match="is quantized already"):
        mm.measure_importance(tmp_path / "a", file, calibration=ids)


def test_quantizes_with_an_importance_matrix(tmp_path: Path) -> None:
    name = b"blk.0.attn_q.weight"
    values = [1e4 if i % 8 == 0 else 1e-2 for i in range(128)]
    file = tmp_path / "imatrix.dat"
    file.write_bytes(struct.pack(f"<ii{len(name)}sii128f", 1, len(name), name, 1, 128, *values))
    recipe = "uniform:int3/g64"
    report = mm.quantize_model(SAMPLE, tmp_path / "a", recipe, method="mse", imatrix=file)
    unweighted = {row["name"] for row in report["fallbacks"]}
    assert "model.layers.0.self_attn.k_proj.weight" in unweighted
    assert "model.layers.0.self_attn.q_proj.weight" not in unweighted
    with pytest.raises(mm.InvalidArgumentError, match="uses no importance matrix"):
        mm.quantize_model(SAMPLE, tmp_path / "b", recipe, imatrix=file)
    with pytest.raises(mm.FileError, match="absent"):
        mm.quantize_model(SAMPLE, tmp_path / "b", recipe, method="mse", imatrix=tmp_path / "absent")
