"""Models of the Hub in place of paths, from a server on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
from hub_server import COMMIT, OTHER_COMMIT, HubServer, Repository

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "examples" / "tiny-qwen3-moe"
USAGE, IO = 1, 3


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    server = HubServer()
    server.repositories["org/tiny"] = Repository(
        {**files_of(SAMPLE), "pytorch_model.bin": b"pickle", "modeling_tiny.py": b"code"}
    )
    yield server
    server.close()


class Client:
    """Runs programs with a cache of their own, whose Hub is the server."""

    def __init__(self, cache: Path, url: str) -> None:
        self.cache = cache
        self.environment = {
            **os.environ,
            "HF_ENDPOINT": url,
            "HF_HOME": str(cache),
            "HF_HUB_CACHE": str(cache / "hub"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "METAL_MARLIN_DEVICE": "cpu",
        }
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            self.environment.pop(name, None)

    def run(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "metal_marlin.cli", *map(str, arguments)],
            env={**self.environment, **environment}, cwd=self.cache, capture_output=True,
            text=True, timeout=120, check=False,
        )

    def succeed(self, *arguments: object, **environment: str) -> tuple[str, str]:
        done = self.run(*arguments, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    def refuse(self, code: int, *arguments: object, **environment: str) -> str:
        done = self.run(*arguments, **environment)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        *before, line = done.stderr.splitlines()
        assert line.startswith("metal-marlin: error: ")
        assert all(other.startswith("downloading ") for other in before), done.stderr
        return line

    def run_all(self, commands: Sequence[Sequence[object]]) -> list[tuple[int, str, str]]:
        """The exit code, stdout and stderr of every command, in one process."""
        program = """
import json, os, sys, tempfile
from metal_marlin import cli
results = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["metal-marlin", *words]
    kept, files = [os.dup(1), os.dup(2)], [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
    for i in (0, 1):
        os.dup2(files[i].fileno(), i + 1)
    code = cli.main()
    sys.stderr.flush()
    for i in (0, 1):
        os.dup2(kept[i], i + 1)
        files[i].seek(0)
    results.append((code, *(file.read().decode() for file in files)))
print(json.dumps(results))
"""
        words = json.dumps([[str(word) for word in command] for command in commands])
        return [(code, out, error) for code, out, error in json.loads(self.python(program, words))]

    def python(self, text: str, *arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", text, *arguments], env=self.environment, cwd=self.cache,
            check=True, capture_output=True, text=True, timeout=120,
        ).stdout

    def snapshot(self, commit: str = COMMIT, name: str = "org/tiny") -> Path:
        folder = f"models--{name.replace('/', '--')}"
        return self.cache / "hub" / folder / "snapshots" / commit


@pytest.fixture
def client(tmp_path: Path, hub: HubServer) -> Client:
    (tmp_path / "cache").mkdir()
    return Client(tmp_path / "cache", hub.url)


def test_a_model_is_downloaded_once(hub: HubServer, client: Client, tmp_path: Path) -> None:
    out, error = client.succeed("quantize", "org/tiny", "-o", tmp_path / "first", "--json")
    held = sorted(path.name for path in client.snapshot().iterdir())
    wanted = sorted(name for name in files_of(SAMPLE) if name.endswith((".json", ".safetensors")))
    assert [name for name in held if not name.endswith(".txt")] == wanted
    total = sum((SAMPLE / name).stat().st_size for name in held)
    assert error == (
        f"downloading org/tiny@main: {len(held)} files, {total / 1e6:.2f} MB, to "
        f"{client.cache / 'hub'}\n"
    )
    assert json.loads(out)["tensors"] > 0
    assert not any(name.endswith((".py", ".bin", ".md")) for name in hub.downloads())
    # Again: from the cache, also without a server.
    before = len(hub.downloads())
    assert client.succeed("quantize", "org/tiny", "-o", tmp_path / "second", "-q")[1] == ""
    assert len(hub.downloads()) == before
    arguments = ("quantize", "org/tiny", "-o", tmp_path / "third", "--offline")
    assert client.succeed(*arguments)[1] == ""
    hub.close()
    error = client.succeed("quantize", "org/tiny", "-o", tmp_path / "fourth")[1]
    assert error == "org/tiny@main: from the cache, as the Hub cannot be reached\n"
    first = files_of(tmp_path / "first")
    assert b"base_model: org/tiny\n" in first.pop("README.md")
    for name in ("second", "third", "fourth"):
        files = files_of(tmp_path / name)
        assert files.pop("README.md") and files == first  # Cards name their directories.


def test_quiet_says_nothing(client: Client, tmp_path: Path) -> None:
    assert client.succeed("quantize", "org/tiny", "-o", tmp_path / "out", "-q")[1] == ""


def test_a_path_wins(hub: HubServer, client: Client) -> None:
    shutil.copytree(SAMPLE, client.cache / "org" / "tiny")
    client.succeed("inspect", "org/tiny")
    assert hub.requests == []


def test_the_sample_model_is_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of a clone, its path there names the package's copy."""
    name = "examples/tiny-qwen3-moe"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("metal_marlin.hub._PACKAGE", tmp_path / "package")
    shutil.copytree(SAMPLE, tmp_path / "package" / name)
    assert mm.hub.local_path(name) == tmp_path / "package" / name
    assert mm.hub.local_path(name.encode()) == tmp_path / "package" / name
    (tmp_path / name).mkdir(parents=True)
    assert mm.hub.local_path(name) == name


def test_every_command_that_takes_a_model(client: Client) -> None:
    """All arguments that are models resolve, in one place; offline each names the cache."""
    tokens = SAMPLE / "validation_tokens.txt"
    commands: list[tuple[object, ...]] = [
        ("quantize", "org/tiny", "-o", "out"),
        ("import", "org/tiny", "-o", "out"),
        ("dequantize", "org/tiny", "-o", "out"),
        ("export", "org/tiny", "-o", "out", "--to", "mlx"),
        ("convert", "org/tiny", "-o", "out", "--to", "mlx"),
        ("prepare", "org/tiny", "-o", "out"),
        ("inspect", "org/tiny"),
        ("plan", "org/tiny"),
        ("verify", "org/tiny"),
        ("verify", SAMPLE, "--against", "org/tiny"),
        ("perplexity", "org/tiny", "--tokens", tokens),
        ("compare", "org/tiny", "--against", SAMPLE, "--tokens", tokens),
        ("compare", SAMPLE, "--against", "org/tiny", "--tokens", tokens),
        ("analyze", "org/tiny", "--sparsity"),
        ("generate", "org/tiny", "--tokens", tokens),
        ("demo", "--model", "org/tiny"),
        ("bench", "model", "org/tiny"),
        ("tune", "--model", "org/tiny", "-o", "out"),
    ]
    names = set(re.findall(r"^  ([a-z][a-z-]*)\b", client.succeed("--help")[0], re.MULTILINE))
    helps = client.run_all([(name, "--help") for name in names])
    for name, (_, text, _) in zip(names, helps, strict=True):
        takes_model = re.search(r"^ +(?:MODEL|SRC|QUANT|PATH)\b|--model\b", text, re.MULTILINE)
        assert ("Download nothing" in text) == (takes_model is not None), name
    for code, _, error in client.run_all([(*command, "--offline") for command in commands]):
        assert code == IO
        assert f"org/tiny: is not in the cache {client.cache / 'hub'}; run once" in error
    assert os.listdir(client.cache) == []


def test_wrong_arguments_come_before_a_download(hub: HubServer, client: Client) -> None:
    client.refuse(USAGE, "perplexity", "org/tiny")
    client.refuse(USAGE, "quantize", "org/tiny", "-o", "out", "--method", "none")
    assert hub.requests == []


def test_plan_downloads_the_config(hub: HubServer, client: Client) -> None:
    ours = client.succeed("plan", SAMPLE / "config.json", "--bandwidth", "10")
    assert client.succeed("plan", "org/tiny", "--bandwidth", "10")[0] == ours[0]
    assert hub.downloads() == ["config.json"]
    line = client.refuse(IO, "quantize", "org/tiny", "-o", "out", "--offline")
    assert "no *.safetensors" in line


def test_inspect_downloads_headers(hub: HubServer, client: Client) -> None:
    out, error = client.succeed("inspect", "org/tiny", "--json")
    expected = json.loads(client.succeed("inspect", SAMPLE, "--json")[0])
    got = json.loads(out)
    assert got.pop("path").endswith("/org/tiny") and expected.pop("path")
    assert got == expected
    assert error.startswith("downloading org/tiny@main: config.json and the headers of 1 file (")
    assert not (client.snapshot() / "model.safetensors").exists()
    assert list(Path(json.loads(out)["path"]).parents[1].glob("*")) == []


def test_inspect_of_a_quantized_model(
    hub: HubServer, client: Client, tmp_path: Path
) -> None:
    mm.quantize_model(SAMPLE, tmp_path / "q", "default_moe")
    hub.repositories["org/q"] = Repository(files_of(tmp_path / "q"))
    got = json.loads(client.succeed("inspect", "org/q", "--json")[0])
    expected = json.loads(client.succeed("inspect", tmp_path / "q", "--json")[0])
    del got["path"], expected["path"]
    assert got == expected
    assert not (client.snapshot(name="org/q") / "model.safetensors").exists()
    # Another program's numbers say how they are read.
    mm.quantize_model(SAMPLE, tmp_path / "s4", "uniform:s4/g32")
    mm.export_model(tmp_path / "s4", tmp_path / "gptq", "gptq")
    hub.repositories["org/gptq"] = Repository(files_of(tmp_path / "gptq"))
    client.succeed("inspect", "org/gptq")
    assert (client.snapshot(name="org/gptq") / "model.safetensors").exists()


def test_a_revision(hub: HubServer, client: Client) -> None:
    repository = hub.repositories["org/tiny"]
    repository.revisions["v2"] = OTHER_COMMIT
    assert "downloading org/tiny@v2: 1 file" in client.succeed("plan", "org/tiny@v2")[1]
    assert client.snapshot(OTHER_COMMIT).is_dir() and not client.snapshot().exists()
    assert client.succeed("plan", "org/tiny@v2", "--offline")[1] == ""
    assert client.succeed("plan", f"org/tiny@{OTHER_COMMIT}", HF_HUB_OFFLINE="1")[1] == ""
    client.refuse(IO, "plan", "org/tiny", "--offline")
    line = client.refuse(USAGE, "plan", "org/tiny@v3")
    assert "org/tiny has no revision 'v3'" in line


def test_pickles_are_refused(hub: HubServer, client: Client) -> None:
    hub.repositories["org/pickles"] = Repository(
        {"config.json": b"{}", "pytorch_model.bin": b"x", "tokenizer.json": b"{}"}
    )
    line = client.refuse(USAGE, "quantize", "org/pickles", "-o", "out")
    assert "org/pickles: has only PyTorch pickles (pytorch_model.bin)" in line
    assert hub.downloads() == []
    hub.repositories["org/none"] = Repository({"README.md": b"x"})
    assert "no *.safetensors" in client.refuse(USAGE, "quantize", "org/none", "-o", "out")


def test_who_may_not(hub: HubServer, client: Client) -> None:
    hub.repositories["org/gated"] = Repository(files_of(SAMPLE), gated=True)
    line = client.refuse(IO, "generate", "org/gated", "--prompt", "x")
    assert "org/gated: is gated: accept its terms at" in line and "hf auth login" in line
    line = client.refuse(IO, "inspect", "org/typo")
    assert "org/typo: no such file or directory, and the Hub has no such model" in line
    hub.repositories["org/forbidden"] = Repository({}, status=403)
    assert "status 403: log in" in client.refuse(IO, "inspect", "org/forbidden")
    hub.repositories["org/broken"] = Repository({}, status=500)
    assert "cannot be reached: status 500" in client.refuse(IO, "inspect", "org/broken")


def test_without_a_network(client: Client) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    line = client.refuse(IO, "inspect", "org/tiny", HF_ENDPOINT=url)
    assert "org/tiny: no such file or directory, and the Hub cannot be reached" in line


def test_paths_stay_paths(hub: HubServer, client: Client) -> None:
    names = ("tiny", "./org/tiny", "org/tiny/", "a/b/c", "/org/tiny", "org/x.safetensors",
             "org/config.json", "../org", "org/..", "org/a--b", "org/tiny:../x", "org/tiny@")
    for code, _, error in client.run_all([("inspect", name) for name in names]):
        assert code == IO and "no such file or directory" in error and "Hub" not in error
    assert hub.requests == []


def test_an_interrupted_download(hub: HubServer, client: Client, tmp_path: Path) -> None:
    repository = hub.repositories["org/tiny"]
    repository.cut_at = 100_000
    line = client.refuse(IO, "quantize", "org/tiny", "-o", tmp_path / "out",
                         HF_HUB_DOWNLOAD_TIMEOUT="2")
    assert "org/tiny: cannot be downloaded" in line
    assert not (tmp_path / "out").exists()
    line = client.refuse(IO, "quantize", "org/tiny", "-o", tmp_path / "out", "--offline")
    assert "is not in the cache" in line or "no *.safetensors" in line
    repository.cut_at = 0
    error = client.succeed("quantize", "org/tiny", "-o", tmp_path / "out")[1]
    assert error.startswith("downloading org/tiny@main: 1 file, ")
    expected = tmp_path / "expected"
    client.succeed("quantize", SAMPLE, "-o", expected)
    assert files_of(tmp_path / "out").keys() == files_of(expected).keys()
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (expected / name).read_bytes()


def test_shards(hub: HubServer, client: Client, tmp_path: Path) -> None:
    """Those that the index lists, and no others; offline a missing one is named."""
    mm.quantize_model(SAMPLE, tmp_path / "q", "default_moe", shard_bytes=200_000)
    files = files_of(tmp_path / "q")
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    hub.repositories["org/shards"] = Repository({**files, "consolidated.safetensors": b"x"})
    client.succeed("verify", "org/shards")
    held = sorted(path.name for path in client.snapshot(name="org/shards").glob("*.safetensors"))
    assert held == shards and len(shards) > 1
    (client.snapshot(name="org/shards") / shards[1]).unlink()
    line = client.refuse(IO, "verify", "org/shards", "--offline")
    assert f"'{shards[1]}', which model.safetensors.index.json lists, is missing" in line


@pytest.mark.parametrize(
    "name", ["../evil.json", "a/../../evil.json", "/evil.json", "a\\evil.json"]
)
def test_names_that_leave_the_model(hub: HubServer, client: Client, name: str) -> None:
    hub.repositories["org/tiny"].listed = (name,)
    line = client.refuse(2, "quantize", "org/tiny", "-o", "out")
    assert "is outside of the model" in line
    assert hub.downloads() == []


def test_an_index_that_lists_other_files(hub: HubServer, client: Client) -> None:
    index = {"weight_map": {"x": "../config.json"}}
    hub.repositories["org/tiny"].files |= {
        "model.safetensors.index.json": json.dumps(index).encode(), "a.safetensors": b""
    }
    del hub.repositories["org/tiny"].files["model.safetensors"]
    line = client.refuse(2, "quantize", "org/tiny", "-o", "out")
    assert "'../config.json', which model.safetensors.index.json lists, is missing" in line


def test_one_of_several_gguf_files(hub: HubServer, client: Client, tmp_path: Path) -> None:
    mm.quantize_model(SAMPLE, tmp_path / "q", "uniform:s4/g32")
    mm.export_model(tmp_path / "q", tmp_path / "tiny.gguf", "gguf")
    mm.export_model(tmp_path / "q", tmp_path / "shards", "gguf", shard_bytes=300_000)
    content = (tmp_path / "tiny.gguf").read_bytes()
    shards = files_of(tmp_path / "shards")
    count = len(shards)
    renamed = {
        f"Q8_0/tiny-Q8_0-{name.partition('-')[2]}": data for name, data in shards.items()
    }
    hub.repositories["org/tiny-GGUF"] = Repository(
        {"tiny-Q4_K.gguf": b"x", "tiny-Q4_K_M.gguf": content, "mmproj-F16.gguf": b"x",
         "config.json": b"{}", **renamed}
    )
    line = client.refuse(USAGE, "inspect", "org/tiny-GGUF")
    assert "name one as org/tiny-GGUF:TYPE, where TYPE is Q8_0, Q4_K, Q4_K_M" in line
    assert "Q2_K" in client.refuse(USAGE, "inspect", "org/tiny-GGUF:Q2_K")
    for name in ("q4_k_m", "tiny-Q4_K_M.gguf"):
        client.succeed("inspect", f"org/tiny-GGUF:{name}")
    assert hub.downloads() == ["tiny-Q4_K_M.gguf"]
    error = client.succeed("inspect", "org/tiny-GGUF@main:Q8_0")[1]
    assert f"{count} files" in error and count > 1
    client.succeed("inspect", "org/tiny-GGUF:Q8_0", "--offline")
    hub.repositories["org/one-GGUF"] = Repository({"model.gguf": content})
    client.succeed("import", "org/one-GGUF", "-o", tmp_path / "imported")


def test_from_python(hub: HubServer, client: Client, tmp_path: Path) -> None:
    program = """
import metal_marlin as mm
model = mm.load("org/tiny", device="cpu", verbose=False)
print(model.generate("And God said", 4)["text"])
print(len(mm.Checkpoint("org/tiny").tensors))
mm.quantize_model("org/tiny", "out")
try:
    mm.load("org/typo")
except mm.FileError as error:
    print(error)
try:
    from pathlib import Path
    mm.load(Path("org/tiny"))
except mm.FileError as error:
    print(error)
"""
    text, count, unknown, path = client.python(program).splitlines()
    assert text == mm.load(SAMPLE, "cpu").generate("And God said", 4)["text"]
    assert int(count) == len(mm.Checkpoint(str(SAMPLE)).tensors)
    assert "the Hub has no such model" in unknown
    assert path.startswith("org/tiny: no such ")
    assert (client.cache / "out" / "config.json").is_file()


def test_room_on_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from metal_marlin import hub as module

    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(mm.FileError, match="0 B free, the download takes 5.00 GB"):
        module._check_room(tmp_path / "absent", 5_000_000_000)


def test_progress(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from metal_marlin.hub import _Progress

    for quiet in (False, True):
        progress: Any = _Progress(tmp_path, 100, quiet, True)
        progress._seconds = 0.01
        with progress:
            np.zeros(60, np.uint8).tofile(tmp_path / "blob.incomplete")
            while not quiet and "60 %" not in (said := capfd.readouterr().err):
                pass
        (tmp_path / "blob.incomplete").unlink()
        assert quiet or "download: 60 %, 0:0" in said
    assert "%" not in capfd.readouterr().err
