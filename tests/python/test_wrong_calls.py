"""Wrong calls of the package: each works or raises one of its exceptions with one line."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "examples" / "tiny-qwen3-moe"
COMMAND = Path(sys.executable).parent / "metal-marlin"


@pytest.fixture(scope="module")
def model() -> mm.Model:
    return mm.load(SAMPLE)


@pytest.fixture(scope="module")
def weights() -> mm.PreparedWeights:
    rng = np.random.default_rng(0)
    return mm.prepare(mm.pack_weights(rng.standard_normal((64, 48), np.float32)))


def refuse(kind: type[Exception], call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """Returns the message of the exception that a call must raise."""
    with pytest.raises(kind) as caught:
        call(*arguments, **named)
    assert isinstance(caught.value, mm.MarlinError)
    text = str(caught.value)
    assert text and text.isprintable() or "\ufffd" in text, repr(text)
    assert len(text.splitlines()) == 1
    return text


# --- arrays -------------------------------------------------------------------------------------


def test_logits_of_any_stride(model: mm.Model) -> None:
    vocab, ids = model.info["vocab_size"], [1, 2, 3]
    wanted = model.logits(ids)

    def forward(out: np.ndarray) -> None:
        model._core.forward(model._core.new_sequence(), ids, True, out)

    for memory, view in (
        (m := np.zeros((3, 2 * vocab), np.float32), m[:, ::2]),
        (m := np.zeros((6, vocab), np.float32), m[::2]),
        (m := np.zeros((vocab, 3), np.float32), m.T),
        (m := np.zeros((vocab, 7), np.float32), m.T[::3]),
    ):
        forward(view)
        assert (view == wanted).all()
        assert np.count_nonzero(memory) <= np.count_nonzero(wanted)
    memory = np.zeros((6, vocab), np.float32)
    for view in (memory[:3, ::-1], memory[2::-1], memory[2::-1, ::-1]):
        assert "negative" in refuse(mm.InvalidArgumentError, forward, view)
    overlapping = np.lib.stride_tricks.as_strided(memory, (3, vocab), (4, 4))
    refuse(mm.InvalidArgumentError, forward, overlapping)
    assert not memory.any()


def test_x_may_lie_anyhow(weights: mm.PreparedWeights) -> None:
    rng = np.random.default_rng(1)
    base = rng.standard_normal((10, 128), np.float32)
    misaligned = np.frombuffer(b"\0" + base.tobytes(), np.float32, 640, offset=1).reshape(10, 64)
    read_only = base[:, :64].copy()
    read_only.flags.writeable = False
    for x in (
        base[:, ::2],
        base[:, 64:],
        base[::-1, :64],
        base[:, 63::-1],
        base.T[:64].T,
        np.asfortranarray(base[:, :64]),
        np.broadcast_to(base[0, :64], (7, 64)),
        np.broadcast_to(np.float32(0.5), (3, 64)),
        base.reshape(2, 5, 128)[:, ::-2, ::2],
        base[:0, :64],
        misaligned,
        read_only,
        np.asarray(base[:, :64].tolist(), np.float32),
    ):
        assert np.array_equal(mm.matmul(x, weights), mm.matmul(np.array(x, order="C"), weights))
    rows = base[:2, :64].tolist()
    assert np.array_equal(mm.matmul(rows, weights), mm.matmul(np.float32(rows), weights))
    assert mm.matmul(base[0, :64], weights).shape == (48,)
    bias = rng.standard_normal(96, np.float32)[::2]
    assert np.array_equal(
        mm.matmul(base[:, :64], weights, bias), mm.matmul(base[:, :64], weights, bias.copy())
    )


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 64)),
        np.zeros((2, 64), np.int32),
        np.zeros((2, 64), ">f4"),
        np.zeros((2, 64), np.complex64),
        np.zeros((2, 64), object),
        np.zeros((2, 63), np.float32),
        np.float32(1),
        [[1.0, 2.0], [3.0]],
        ["x"] * 64,
        "x",
        None,
        object(),
        {},
        5,
        [],
    ],
    ids=lambda x: f"{type(x).__name__}-{getattr(x, 'dtype', '')}-{getattr(x, 'shape', '')}",
)
def test_x_that_is_none_is_named(weights: mm.PreparedWeights, x: Any) -> None:
    assert refuse(mm.InvalidArgumentError, mm.matmul, x, weights).startswith("x: ")


def test_weights_that_are_none() -> None:
    refuse(mm.InvalidArgumentError, mm.pack_weights, [[1.0, 2.0], [3.0]])
    refuse(mm.InvalidArgumentError, mm.pack_weights, np.zeros((64, 64), np.int64))
    refuse(mm.InvalidArgumentError, mm.pack_weights, np.zeros((64, 64), np.float32), group_size="x")
    refuse(mm.InvalidArgumentError, mm.pack_weights, np.zeros((64, 64), np.float32), format=5)
    refuse(mm.InvalidArgumentError, mm.unpack_weights, np.zeros(5, np.uint32), np.zeros((1, 1)))
    refuse(mm.InvalidArgumentError, mm.unpack_weights, None, None)
    refuse(mm.InvalidArgumentError, mm.quantized_linear, 5, 5, 5)
    packed = mm.pack_weights(np.ones((64, 16), np.float32).tolist(), group_size=32)
    assert packed.k == 64


@pytest.mark.parametrize("scale_type", ["fp16", "bf16", "fp32", "e8m0"])
def test_a_global_scale_belongs_to_e4m3(scale_type: str) -> None:
    from metal_marlin import _core

    packed = mm.pack_weights(np.ones((64, 16), np.float32), "s4", 32, scale_type)
    parts = _core.WeightsParts()
    parts.format, parts.k, parts.n, parts.group_size = "s4", 64, 16, 32
    parts.scale_type, parts.codes, parts.scales = scale_type, packed.codes, packed.scales
    assert mm.QuantizedWeights.from_parts(parts).k == 64
    parts.global_scale = np.ones(1, np.float32)
    assert "global_scale" in refuse(
        mm.InvalidArgumentError, mm.QuantizedWeights.from_parts, parts
    )


# --- lifetimes ----------------------------------------------------------------------------------


def test_a_sequence_of_a_dead_model() -> None:
    for _ in range(20):
        first = mm.load(SAMPLE)
        out = np.zeros((1, first.info["vocab_size"]), np.float32)
        sequence = first._core.new_sequence()
        first._core.forward(sequence, [1, 2], False, out)
        del first
        gc.collect()
        second = mm.load(SAMPLE)
        text = refuse(
            mm.InvalidArgumentError, second._core.forward, sequence, [1, 2], False, out
        )
        assert "destroyed" in text


def test_a_sequence_in_two_threads(model: mm.Model) -> None:
    sequence = model._core.new_sequence()
    errors: list[BaseException] = []

    def run() -> None:
        out = np.zeros((1, model.info["vocab_size"]), np.float32)
        for _ in range(50):
            try:
                model._core.forward(sequence, [1], False, out)
            except BaseException as error:  # Checked below.
                errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(error, mm.InvalidArgumentError) for error in errors)
    assert sequence.length == 100 - len(errors)


# --- paths --------------------------------------------------------------------------------------


def test_a_path_with_a_nul(tmp_path: Path) -> None:
    hidden = tmp_path / ".config"
    hidden.mkdir()
    (hidden / "keep").write_text("kept")
    for name in (f"{tmp_path}/config\0b", f"{tmp_path}/config\0b".encode(), f"{tmp_path}/\0"):
        for call in (
            lambda name=name: mm.quantize_model(SAMPLE, name),
            lambda name=name: mm.quantize_model(name, tmp_path / "out"),
            lambda name=name: mm.quantize_model(SAMPLE, tmp_path / "out", name),
            lambda name=name: mm.load(name),
            lambda name=name: mm.Checkpoint(name),
            lambda name=name: mm.inspect(name),
            lambda name=name: mm.export_model(SAMPLE, name, "gguf"),
            lambda name=name: mm.MixedPrecisionConfig.from_file(name),
        ):
            assert "NUL" in refuse(mm.InvalidArgumentError, call)
    assert [p.name for p in tmp_path.iterdir()] == [".config"]
    assert (hidden / "keep").read_text() == "kept"


def test_paths_that_are_no_utf8(tmp_path: Path) -> None:
    name = os.path.join(os.fsencode(tmp_path), b"m\xff\xe9")
    shutil.copytree(SAMPLE, os.fsdecode(name))
    for path in (name, os.fsdecode(name), Path(os.fsdecode(name))):
        assert mm.load(path).generate("And", 2)["text"] is not None
        assert not mm.Checkpoint(path).quantized
        report = mm.quantize_model(path, name + b"-q", overwrite=True)
        assert os.fsencode(report["output"]) == name + b"-q"
    done = subprocess.run(
        [COMMAND, "perplexity", name, "--text", SAMPLE / "validation.txt", "--max-windows", "1"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = refuse(mm.FileError, mm.load, name + b"-gone")
    assert "gone" in text


@pytest.mark.parametrize("path", [5, None, 1.5, [], object()])
def test_paths_that_are_none(path: Any) -> None:
    assert "path" in refuse(mm.InvalidArgumentError, mm.load, path)
    assert "path" in refuse(mm.InvalidArgumentError, mm.Checkpoint, path)
    refuse(mm.InvalidArgumentError, mm.quantize_model, path, "out")
    refuse(mm.InvalidArgumentError, mm.quantize_model, SAMPLE, path)


# --- exceptions ---------------------------------------------------------------------------------


class Mine(Exception):
    pass


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Mine, GeneratorExit, MemoryError])
def test_exceptions_of_progress_come_through(tmp_path: Path, kind: type[BaseException]) -> None:
    mine = kind("mine")

    def progress(done: int, total: int) -> None:
        raise mine

    with pytest.raises(kind) as caught:
        mm.quantize_model(SAMPLE, tmp_path / "out", progress=progress)
    assert caught.value is mine
    assert list(tmp_path.iterdir()) == []
    calls: list[tuple[int, int]] = []
    mm.quantize_model(SAMPLE, tmp_path / "out", progress=lambda d, t: calls.append((d, t)))
    assert calls[-1][0] == calls[-1][1] > 0


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Mine])
def test_exceptions_of_a_token_callback_come_through(
    model: mm.Model, kind: type[BaseException]
) -> None:
    mine = kind("mine")

    def callback(token: int) -> None:
        raise mine

    with pytest.raises(kind) as caught:
        model.generate([1, 2], 5, callback=callback)
    assert caught.value is mine

    def of_batch(index: int, token: int) -> None:
        if index == 1:
            raise mine

    with pytest.raises(kind) as caught:
        model.generate([[1, 2], [3], [4]], 5, callback=of_batch)
    assert caught.value is mine


@pytest.mark.parametrize("call", ["quantize", "generate", "generate_batch", "perplexity"])
def test_an_interrupt_ends_a_call(tmp_path: Path, call: str) -> None:
    body = {
        "quantize": f"mm.quantize_model({str(SAMPLE)!r}, {str(tmp_path / 'out')!r})",
        "generate": "model.generate([1], 100000, ignore_eos=True)",
        "generate_batch": "model.generate([[1], [2] * 900], 100000, ignore_eos=True)",
        "perplexity": "model.perplexity([1, 2] * 100000)",
    }[call]
    code = f"""
import shutil, signal, metal_marlin as mm
model = mm.load({str(SAMPLE)!r})
signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
signal.setitimer(signal.ITIMER_REAL, 0.02)
try:
    while True:
        {body}
        shutil.rmtree({str(tmp_path / "out")!r}, ignore_errors=True)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          check=False)
    assert done.stdout == "interrupted\n", done.stderr


def test_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    header = b'{"a\xff\xe9": 1}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    refuse(mm.MalformedFileError, mm.Checkpoint, path)
    for text in (b'{"model_type": "m\xff"}', b"\xff\xfe", b'{"model_type":"\\u2028\\n\x85"}'):
        (tmp_path / "config.json").write_bytes(text)
        shutil.copy(SAMPLE / "model.safetensors", tmp_path)
        refuse(mm.MarlinError, mm.load, tmp_path)
    recipe = tmp_path / "r.json"
    recipe.write_bytes(b'{"name": "\xff"}')
    refuse(mm.MarlinError, mm.MixedPrecisionConfig.from_file, recipe)


def test_prompts_that_are_none(model: mm.Model) -> None:
    vocab = model.info["vocab_size"]
    for prompt in ([vocab], [-1], [2**31], [2**70], [1, "x"], [1.5], 5, None, [], object(), [None],
                   [[]], [[1], 2], [[1], [vocab]], [[1], ["x"]], [[[1]]], [[1], None], [""],
                   ["a", 5], [b"a"], b"ab", bytearray(b"a"), {1: 2}, {1, 2}, "\ud800"):
        refuse(mm.InvalidArgumentError, model.generate, prompt, 2)
    for prompt, says in (([[1], [vocab]], f"prompts[1]: token 0 is {vocab}, expected 0.."),
                         ([[1], []], "prompts[1]: no tokens"),
                         ([[1], 2], "prompts[1]: expected text or token ids: "),
                         ([[1] * 2000], "prompts[0]: 2000 tokens do not fit in a context of")):
        assert says in refuse(mm.InvalidArgumentError, model.generate, prompt, 2)
    wrong: dict[str, Any]
    for wrong in ({"max_tokens": [1]}, {"seed": [1, 2, 3]}, {"max_tokens": [1, -1]},
                  {"seed": [1, "x"]}, {"max_batch": -1}, {"max_batch": "x"}, {"temperature": -1}):
        refuse(mm.InvalidArgumentError, model.generate, [[1], [2]], **wrong)
    for wrong in ({"max_batch": 2}, {"max_tokens": [1]}, {"seed": [1]}):
        refuse(mm.InvalidArgumentError, model.generate, [1, 2], **wrong)
    for named in ({"max_tokens": -1}, {"max_tokens": 2**70}, {"max_tokens": "x"}, {"top_k": -1},
                  {"temperature": float("nan")}, {"top_p": "x"}, {"seed": -1}, {"min_p": 1.5},
                  {"min_p": -0.1}, {"min_p": "x"}, {"repetition_penalty": 0.0},
                  {"repetition_penalty": float("inf")}, {"repetition_penalty": [1]},
                  {"presence_penalty": float("nan")}, {"presence_penalty": 1e300},
                  {"frequency_penalty": float("-inf")}, {"frequency_penalty": "x"},
                  {"stop_token_ids": ["x"]}, {"stop_token_ids": [2**40]}):
        refuse(mm.InvalidArgumentError, model.generate, [1], **named)
    refuse(mm.InvalidArgumentError, model.perplexity, [1, 2], window="x")
    refuse(mm.InvalidArgumentError, model.perplexity, [1, 2], window=0)


def test_every_exit_code_of_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-B", ROOT / "tests" / "cli" / "exit_codes_test.py"],
        env={**os.environ, "METAL_MARLIN": str(COMMAND)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- tokenizers ---------------------------------------------------------------------------------


class Tokenizers:
    """Copies of the sample model whose tokenizer.json is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.good = json.loads((SAMPLE / "tokenizer.json").read_text())
        (folder / "text").write_text("hello world, in the beginning " * 4)

    def model(self, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
        directory = self.folder / name
        directory.mkdir()
        for file in ("config.json", "model.safetensors", "generation_config.json"):
            shutil.copyfile(SAMPLE / file, directory / file)
        document = json.loads(json.dumps(self.good))
        changed = change(document)
        text = changed if isinstance(changed, str) else json.dumps(document)
        (directory / "tokenizer.json").write_text(text)
        return directory

    def run(self, directory: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, "perplexity", directory, "--text", self.folder / "text", "--window", "4",
             "--json"],
            capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "RUST_BACKTRACE": "1"},
        )


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Tokenizers:
    return Tokenizers(tmp_path_factory.mktemp("tokenizers"))


@pytest.mark.parametrize(
    "name, section",
    [
        ("truncation", {"max_length": 4, "strategy": "LongestFirst", "stride": 0,
                        "direction": "Right"}),
        *(("padding", {"strategy": {"Fixed": count}, "direction": "Right",
                       "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                       "pad_token": "x"}) for count in (10_000, 10**12)),
    ],
)
def test_a_text_is_neither_cut_nor_filled(
    tokenizers: Tokenizers, tmp_path_factory: pytest.TempPathFactory, name: str, section: Any
) -> None:
    wanted = json.loads(tokenizers.run(SAMPLE).stdout)
    fresh = Tokenizers(tmp_path_factory.mktemp(name))
    directory = fresh.model("m", lambda document: document.update({name: section}))
    done = fresh.run(directory)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == wanted
    text = (fresh.folder / "text").read_text()
    assert mm.load(directory).perplexity(text, 4)["tokens"] == wanted["tokens"]


def replace(count: int, content: str, pattern: dict[str, str]) -> dict[str, Any]:
    part = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [part] * count}


def moved_ids(by: int) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        vocab = document["model"]["vocab"]
        document["model"]["vocab"] = {word: i + by for word, i in vocab.items()}

    return change


@pytest.mark.parametrize(
    "name, change",
    [
        ("grows", lambda d: d.update(normalizer=replace(6, "a" * 20, {"String": "a"}))),
        ("grows-anywhere", lambda d: d.update(normalizer=replace(9, "e", {"Regex": ""}))),
        ("ids-past-31-bits", moved_ids(2**31)),
        ("ids-past-the-model", moved_ids(5000)),
        ("negative-ids", moved_ids(-100000)),
        ("ids-past-32-bits", moved_ids(2**40)),
        ("not-json", lambda d: "{"),
        ("nothing", lambda d: ""),
        ("a-list", lambda d: "[]"),
        ("deep", lambda d: '{"model":' + "[" * 100000),
        ("no-model", lambda d: d.pop("model")),
        ("no-vocabulary", lambda d: d["model"].update(vocab={})),
        ("bad-expression", lambda d: d.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated",
                           "invert": False})),
        ("bad-template", lambda d: d.update(
            post_processor={"type": "TemplateProcessing", "single": [
                {"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [], "special_tokens": {}})),
        ("no-text", lambda d: d.update(
            post_processor={"type": "TemplateProcessing", "single": [], "pair": [],
                            "special_tokens": {}})),
        ("many-texts", lambda d: d.update(
            post_processor={"type": "TemplateProcessing", "single": [
                {"Sequence": {"id": "A", "type_id": 0}}] * 5000, "pair": [],
                "special_tokens": {}})),
        ("word-pieces", lambda d: d.update(
            model={"type": "WordPiece", "vocab": {}, "unk_token": "?", "max_input_chars_per_word":
                   5, "continuing_subword_prefix": "#"})),
        ("unigram", lambda d: d.update(model={"type": "Unigram", "unk_id": 9, "vocab": []})),
        ("unigram-without-unknown", lambda d: d.update(
            model={"type": "Unigram", "unk_id": None, "vocab": [["q", 0.0]]})),
    ],
)
def test_a_tokenizer_that_is_none(
    tokenizers: Tokenizers, name: str, change: Callable[[dict[str, Any]], object]
) -> None:
    directory = tokenizers.model(name, change)
    done = tokenizers.run(directory)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("metal-marlin: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    model = mm.load(directory)
    refuse(mm.MalformedFileError, lambda: model.perplexity("hello world", 4))


def test_a_tokenizer_too_large(tokenizers: Tokenizers) -> None:
    directory = tokenizers.model("large", lambda d: None)
    with (directory / "tokenizer.json").open("ab") as file:
        file.truncate((64 << 20) + 1)
    done = tokenizers.run(directory)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "67108865 bytes, at most 67108864" in done.stderr
    model = mm.load(directory)
    refuse(mm.MalformedFileError, lambda: model.perplexity("hello world", 4))


def test_a_text_that_is_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"hello \xff")
    done = subprocess.run([COMMAND, "perplexity", SAMPLE, "--text", tmp_path / "text"],
                          capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_values_of_options(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for call in (
        lambda: mm.export_model(SAMPLE, out, ""),
        lambda: mm.export_model(SAMPLE, "", "gguf"),
        lambda: mm.verify(SAMPLE, ""),
        lambda: mm.dequantize_model(SAMPLE, out, dtype=""),
        lambda: mm.plan(SAMPLE, "", bandwidth=1.0),
    ):
        assert "expected a value, got ''" in refuse(mm.InvalidArgumentError, call)
    scalars: dict[str, Any] = {"bandwidth": np.float32(100), "memory": np.int64(1 << 30)}
    assert mm.plan(SAMPLE, **scalars) == mm.plan(SAMPLE, bandwidth=100, memory=1 << 30)
    overwrite: Any = np.True_
    assert mm.export_model(SAMPLE, out, "gguf", overwrite=overwrite)


def test_gpu_memory_is_a_size() -> None:
    for size in ("1x", 0, -4, "GB"):
        text = refuse(mm.InvalidArgumentError, mm.load, SAMPLE, "cpu", gpu_memory=size)
        assert text == f"gpu_memory: expected a size such as 5GB, got '{size}'"


def test_gpu_layers_are_a_number_or_auto() -> None:
    for count in ("some", -2):
        text = refuse(mm.InvalidArgumentError, mm.load, SAMPLE, "cpu", gpu_layers=count)
        assert text == f'gpu_layers: expected a number or "auto", got {count!r}'
    text = refuse(mm.InvalidArgumentError, mm.load, SAMPLE, "cpu", gpu_layers=9)
    assert text == "gpu_layers: expected 0..4 (the model's layers), got 9"
    text = refuse(mm.InvalidArgumentError, mm.load, SAMPLE, "cpu", gpu_layers=2)
    assert text == "gpu_layers: cpu is the host and runs all layers"
    model = mm.load(SAMPLE, "cpu")
    assert model.info["host_layers"] == model.info["host_bytes_per_token"] == 0


def test_host_experts_are_a_number_or_auto() -> None:
    for count in ("all", -1):
        text = refuse(mm.InvalidArgumentError, mm.load, SAMPLE, "cpu", host_experts=count)
        assert text == f'host_experts: expected a number or "auto", got {count!r}'
    text = refuse(mm.InvalidArgumentError, mm.load, SAMPLE, "cpu", host_experts=9)
    assert text == "host_experts: expected 0..8 (the model's experts), got 9"
    text = refuse(mm.InvalidArgumentError, mm.load, SAMPLE, "cpu", frequencies="routing.json")
    assert text == "frequencies: only with host_experts"


def test_experts_on_the_host_write_the_same_tokens() -> None:
    want = mm.load(SAMPLE, "cpu", exact=True).generate([296, 385], 8)["token_ids"]
    model = mm.load(SAMPLE, "cpu", exact=True, host_experts=4)
    assert model.info["host_experts"] == 16 and model.info["host_bytes"] > 0
    assert model.generate([296, 385], 8)["token_ids"] == want


def test_a_process_leaves_no_folder_behind(tmp_path: Path) -> None:
    """The simulator's sources and programs are in temporary folders; interpreters destroy little
    of what modules hold."""
    program = (
        "import numpy as np, metal_marlin as mm\n"
        "device = mm.open_device('metal-sim')\n"
        "ready = mm.prepare(mm.pack_weights(np.ones((64, 32), np.float32)), device)\n"
        "mm.matmul(np.ones((1, 64), np.float32), ready)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "UnsupportedError" in done.stderr:
        pytest.skip("no simulator")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
