"""Results, whose fields are the keys of the command's JSON; docstrings and types of the API."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
from metal_marlin.results import ImportedMatrix, Record

SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"
TOKENS = SAMPLE / "validation_tokens.txt"
# Keys that a document has in some cases alone; the others must all be there.
OPTIONAL = {"placement", "predicted_kl", "search_seconds", "relative_error", "max_error"}


def document(*words: object) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "metal_marlin.cli", *map(str, words), "--json"],
        capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_keys(kind: type[Record], said: Mapping[str, Any], path: str = "") -> None:
    """Compares keys, also of the parts that are results themselves."""
    types = typing.get_type_hints(kind)
    missing = set(types) - set(said)
    assert set(said) - set(types) == set() and missing <= OPTIONAL, (path, missing)
    for name, hint in types.items():
        # Python 3.10 takes list[int] for a class.
        records = [
            t for t in (hint, *typing.get_args(hint))
            if isinstance(t, type) and typing.get_origin(t) is None
        ]
        value = said.get(name)
        for record in records:
            if issubclass(record, Record) and value:
                part = value[0] if isinstance(value, list) else value
                assert_keys(record, part, f"{path}.{name}")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("results") / "q"
    mm.quantize_model(SAMPLE, output, "default_moe")
    return output


def test_fields_are_the_keys_of_the_command(quantized: Path, tmp_path: Path) -> None:
    few = ("--tokens", TOKENS, "--max-windows", 1)
    config = SAMPLE / "config.json"
    mm.quantize_model(SAMPLE, tmp_path / "s4", "uniform:s4/g32")
    exported = document("export", tmp_path / "s4", "-o", tmp_path / "e", "--to", "gptq")
    said: list[tuple[type[Record], Any]] = [
        (mm.QuantizationReport, document("quantize", SAMPLE, "-o", tmp_path / "q")),
        (mm.VerificationReport, document("verify", quantized, "--against", SAMPLE)),
        (mm.Inspection, document("inspect", quantized)),
        (mm.Plan, document("plan", config, "--bandwidth", 25, "--memory", "1GB")),
        (mm.DequantizationReport, document("dequantize", quantized, "-o", tmp_path / "d")),
        (mm.PreparationReport, document("prepare", quantized, "-o", tmp_path / "p",
                                        "--device", "cpu")),
        (mm.ExportReport, exported),
        (mm.ImportReport, document("import", tmp_path / "e", "-o", tmp_path / "i")),
        (mm.PerplexityResult, document("perplexity", quantized, *few)),
        (mm.ComparisonResult, document("compare", quantized, "--against", SAMPLE, *few)),
        (mm.GenerationResult, document("generate", quantized, "--prompt", "A", "--max-tokens", 2)),
    ]
    for kind, of_command in said:
        assert_keys(kind, of_command, kind.__name__)


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in ("seconds", "output")}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def test_values_are_the_commands(quantized: Path, tmp_path: Path) -> None:
    config = SAMPLE / "config.json"
    recipe = mm.MixedPrecisionConfig.aggressive_moe()
    plan = mm.plan(config, recipe, bandwidth=25, memory="1GB", context=512)
    words = ("--recipe", "aggressive_moe", "--bandwidth", 25, "--memory", "1GB", "--context", 512)
    assert plan.to_dict() == document("plan", config, *words)
    assert mm.plan(json.loads(config.read_text()), "aggressive_moe", bandwidth=25, memory="1GB",
                   context=512) == plan
    assert mm.inspect(quantized).to_dict() == document("inspect", quantized)
    verified = mm.verify(quantized, SAMPLE)
    assert verified.to_dict() == document("verify", quantized, "--against", SAMPLE)
    assert verified.ok and not mm.verify(quantized, SAMPLE, max_error=1e-6).ok
    written = mm.dequantize_model(quantized, tmp_path / "mine", dtype="fp16")
    said = document("dequantize", quantized, "-o", tmp_path / "its", "--dtype", "fp16")
    assert without_times(written.to_dict()) == without_times(said)
    assert "f16" in {tensor.format for tensor in mm.inspect(tmp_path / "mine").tensors}
    assert written.output == str(tmp_path / "mine")
    model, reference = (mm.load(p, "cpu", exact=True, verbose=False) for p in (quantized, SAMPLE))
    ids = [int(token) for token in TOKENS.read_text().split()]
    corpus = ("--tokens", TOKENS, "--max-windows", 1, "--exact", "--device", "cpu")
    assert model.compare(reference, ids, max_windows=1).to_dict() == document(
        "compare", quantized, "--against", SAMPLE, *corpus)


def test_records_read_like_dicts() -> None:
    result = mm.PerplexityResult(12.5, 2.5257, 512, 0.5, 2)
    assert result["perplexity"] == result.perplexity == 12.5
    assert dict(result) == result.to_dict() == json.loads(json.dumps(result.to_dict()))
    assert {**result} == result and "nll" in result and result.get("text") is None
    assert len(result) == len(fields(result)) == 5
    with pytest.raises(KeyError):
        result["to_dict"]
    matrix = ImportedMatrix("w", "s4", 32, "exact", 1.0)
    assert "max_error" not in matrix and matrix.max_error is None and len(matrix) == 5
    with pytest.raises(FrozenInstanceError):
        result.tokens = 3  # type: ignore[misc]
    assert repr(result) == (
        "PerplexityResult(perplexity=12.5, nll=2.5257, tokens=512, standard_error=0.5, windows=2)"
    )


def test_wrong_calls_name_the_argument(quantized: Path, tmp_path: Path) -> None:
    config = SAMPLE / "config.json"
    for call, says in [
        (lambda: mm.plan(config, bandwidth=-1), "bandwidth: expected more than 0"),
        (lambda: mm.plan(config, memory="much"), "memory: expected a size"),
        (lambda: mm.plan(config, context=3), "context: needs memory"),
        (lambda: mm.plan(config, kv_cache="x"), "kv_cache: "),
        (lambda: mm.verify(quantized, max_error=0.1), "max_error needs against"),
        (lambda: mm.verify(SAMPLE), "is not a quantized checkpoint"),
        (lambda: mm.dequantize_model(quantized, tmp_path / "d", dtype="int3"), "dtype: unknown"),
        (lambda: mm.inspect(None), "path: expected a path"),  # type: ignore[arg-type]
        (lambda: mm.verify(quantized, SAMPLE, progress=3), "progress: "),  # type: ignore[arg-type]
        (lambda: mm.load(quantized, verbose=False).compare(str(SAMPLE), [1, 2]),  # type: ignore
         "reference: expected a Model"),
    ]:
        with pytest.raises(mm.InvalidArgumentError) as error:
            call()
        assert says in str(error.value) and "--" not in str(error.value)


@pytest.mark.parametrize("name", [b"--json", b"[x]", b"a=b 'c'", b"\xff\xfe"])
def test_paths_of_every_kind(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(quantized, os.fsdecode(name))
    assert os.fsencode(mm.inspect(name).path) == name
    assert os.fsencode(mm.dequantize_model(name, name + b"-d").output) == name + b"-d"
    assert mm.verify(name, name + b"-d").checksums > 0


def test_progress_and_interrupts(quantized: Path, tmp_path: Path) -> None:
    for against in (None, SAMPLE):
        heard: list[int] = []
        left: list[int] = []

        def hear(done: int, total: int, heard: list[int] = heard, left: list[int] = left) -> None:
            heard.append(done)
            left.append(total - done)

        mm.verify(quantized, against, progress=hear)
        assert len(heard) > 1 and heard[-1] > 0 and left[-1] == 0

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    model = mm.load(quantized, "cpu", verbose=False)
    for call in (
        lambda: mm.verify(quantized, progress=interrupt),
        lambda: mm.dequantize_model(quantized, tmp_path / "d", progress=interrupt),
        lambda: model.perplexity([1, 2, 3], progress=interrupt),
        lambda: model.compare(model, [1, 2, 3], progress=interrupt),
        lambda: mm.prepare_model(quantized, tmp_path / "p", "cpu", progress=interrupt),
        lambda: mm.export_model(quantized, tmp_path / "e", "plain", progress=interrupt),
    ):
        with pytest.raises(KeyboardInterrupt):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_bar_is_shown_only_when_asked(quantized: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mm.verify(quantized)
    assert capfd.readouterr() == ("", "")
    mm.verify(quantized, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "verify: 100%" in err


def test_wrong_checksums_raise(quantized: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(quantized, broken)
    file = next(broken.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(mm.MalformedFileError, match="checksum"):
        mm.verify(broken)


def test_reprs(quantized: Path) -> None:
    assert re.fullmatch(
        r"Model\('.*': qwen3_moe, 2,037,120 parameters, 4\.57 bits per weight, on cpu, "
        r"context 1024\)", repr(mm.load(quantized, "cpu", verbose=False)))
    weight = np.ones((2, 64, 32), np.float32)
    assert repr(mm.pack_weights(weight, "fp4_e2m1", 32)) == (
        "QuantizedWeights(fp4_e2m1/g32, k=64, n=32, experts=2, 2.30 kB)")
    assert repr(mm.MixedPrecisionConfig.uniform("s4/g64")).startswith(
        "MixedPrecisionConfig('uniform:s4/g64': attention_qkv s4/g64, ")


def said(thing: Any) -> str:
    """A docstring without the signatures that nanobind writes."""
    lines = (inspect.getdoc(thing) or "").splitlines()
    return "\n".join(line for line in lines if not re.fullmatch(r"\w*\(.*\) -> .+", line)).strip()


def test_every_public_name_has_a_docstring() -> None:
    missing = [name for name in mm.__all__ if not said(getattr(mm, name))]
    for name in mm.__all__:
        kind = getattr(mm, name)
        if not inspect.isclass(kind) or issubclass(kind, Exception):
            continue
        for member in dir(kind):
            value = inspect.getattr_static(kind, member)
            described = callable(value) or inspect.isdatadescriptor(value)
            if member.startswith("_") or not described or member in getattr(
                kind, "__dataclass_fields__", {}
            ):
                continue
            if not said(getattr(kind, member)):
                missing.append(f"{name}.{member}")
    assert missing == []


def test_every_field_of_a_result_is_described() -> None:
    """Fields have docstrings in the source alone: a string behind each."""
    source = inspect.getsource(sys.modules[Record.__module__])
    for line in re.finditer(r"^    (\w+): [^\n]+\n(?!    \"\"\")", source, re.MULTILINE):
        raise AssertionError(f"{line[1]}: no docstring")


def test_help_reads_well() -> None:
    assert mm.__doc__ and "quantize_model" in mm.__doc__ and "generate" in mm.__doc__
    shown = str(inspect.signature(mm.Model.generate))
    assert "stream: 'bool' = False" in shown and "options" not in shown


USER_CODE = """
import metal_marlin as mm

model: mm.Model = mm.load("m")
text: str | None = model.generate("a", stop=["b"]).text
batch: list[mm.GenerationResult] = model.generate(["a"], max_tokens=[3])
for chunk in model.generate("a", stream=True, temperature=0.5):
    reason: str | None = chunk.finish_reason
stream: mm.GenerationStream = model.generate(["a"], stream=True)
errors: list[float] = [tensor.relative_error for tensor in mm.verify("m", "s").tensors]
speed: float = mm.plan("config.json", bandwidth=25).decode.tokens_per_second
ratio: float = model.compare(model, "text", progress=True).perplexity_ratio
size: int = mm.quantize_model("s", "q").bytes + mm.inspect("q").tensors[0].bytes
model.generate("a", stream=True).text  # E: "GenerationStream" has no attribute "text"
model.generate("a", on_text=3)  # E: call-overload
mm.inspect("q").tensor  # E: "Inspection" has no attribute "tensor"
"""


def test_types_for_users(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    file = tmp_path / "user.py"
    file.write_text(USER_CODE)
    settings = tmp_path / "mypy.ini"
    settings.write_text(f"[mypy]\nstrict = True\nmypy_path = {SAMPLE.parents[1] / 'python'}\n"
                        "[mypy-metal_marlin._core]\nignore_missing_imports = True\n")
    out, _, _ = api.run([str(file), "--config-file", str(settings), "--cache-dir", str(tmp_path),
                         "--follow-imports", "silent"])
    found = {int(line.split(":")[1]): line for line in out.splitlines() if str(file) in line
             and "error" in line}
    wrong = {number: line.split("# E: ")[1] for number, line in
             enumerate(USER_CODE.splitlines(), 1) if "# E: " in line}
    assert set(found) == set(wrong), out
    assert all(says in found[number] for number, says in wrong.items()), out
