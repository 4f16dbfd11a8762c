#!/usr/bin/env python3
"""Installs a wheel or a source distribution in a clean environment of each Python, and runs what a
new user runs: the demo, quantize and generate, a server that answers a request, Python, and
uninstalling.

Usage: try_wheel.py FILE [PYTHON...]    (default: the Python that runs this)

Prints the seconds of each step, and last "N passed, N failed".
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

MODEL = Path(__file__).resolve().parents[1] / "examples" / "tiny-qwen3-moe"
PROMPT = "And God said, Let the"
USE = """
import numpy, metal_marlin as mm
print(mm.__version__, mm.__file__)
model = mm.load("tiny-fp4")
assert model.generate("And God said", max_tokens=4).text
"""


class Trial:
    """An environment of one Python, in a folder that is not the checkout."""

    def __init__(self, package: Path, python: str, folder: Path) -> None:
        self.package, self.python, self.folder = package, python, folder
        self.bin = folder / "venv" / "bin"
        # Neither the checkout nor the user's packages are found.
        self.environment = {name: value for name, value in os.environ.items()
                            if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}

    def run(self, *words: str | Path) -> str:
        command = [str(word) for word in words]
        done = subprocess.run(command, check=False, text=True, cwd=self.folder,
                              env=self.environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        if done.returncode != 0:
            raise ValueError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
        return done.stdout

    def marlin(self, *words: str | Path) -> str:
        return self.run(self.bin / "metal-marlin", *words)

    def make(self) -> None:
        self.run(self.python, "-m", "venv", self.folder / "venv")

    def install(self) -> None:
        pip = self.bin / "python", "-m", "pip", "--disable-pip-version-check"
        self.run(*pip, "install", f"{self.package}[serve]")
        self.run(*pip, "check")

    def demo(self) -> None:
        expect("default_moe", self.marlin("demo"))

    def generate(self) -> None:
        self.marlin("quantize", MODEL, "-o", "tiny-fp4")
        expect("God", self.marlin("generate", "tiny-fp4", "--prompt", PROMPT, "--max-tokens", "24"))

    def serve(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with server(self, port) as process:
            body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
            answer = request(process, f"http://127.0.0.1:{port}/v1/completions", body)
            expect("text", json.dumps(answer["choices"][0]))

    def use(self) -> None:
        expect(str(self.folder), self.run(self.bin / "python", "-c", USE))

    def uninstall(self) -> None:
        self.run(self.bin / "python", "-m", "pip", "uninstall", "-q", "-y", "metal-marlin")
        left = sorted(path for path in (self.folder / "venv").glob("lib/python*/site-packages/*")
                      if path.name.startswith("metal_marlin"))
        if left or (self.bin / "metal-marlin").exists():
            raise ValueError(f"uninstalling left {', '.join(map(str, left)) or 'the command'}")


def expect(text: str, output: str) -> None:
    if text not in output:
        raise ValueError(f"expected {text!r} in:\n{output}")


@contextlib.contextmanager
def server(trial: Trial, port: int) -> Iterator[subprocess.Popen[str]]:
    log = (trial.folder / "serve.log").open("w+")
    process = subprocess.Popen([str(trial.bin / "metal-marlin"), "serve", "tiny-fp4", "--port",
                                str(port)], cwd=trial.folder, env=trial.environment, text=True,
                               stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    except ValueError as error:
        log.seek(0)
        raise ValueError(f"{error}\n{log.read()}") from error
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def request(process: subprocess.Popen[str], address: str, body: dict[str, object]) -> dict:
    """Sends a request as soon as the server takes it."""
    call = urllib.request.Request(address, json.dumps(body).encode(),
                                  {"Content-Type": "application/json"})
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(call, timeout=60) as reply:
                return json.load(reply)
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ValueError(f"no answer from {address}: {error}") from error
            time.sleep(0.1)


def try_python(package: Path, python: str) -> list[bool]:
    """Runs the steps, each of which needs those before it."""
    with tempfile.TemporaryDirectory(prefix="try-wheel-") as folder:
        trial = Trial(package, python, Path(folder).resolve())
        steps: list[Callable[[], None]] = [trial.make, trial.install, trial.demo, trial.generate,
                                           trial.serve, trial.use, trial.uninstall]
        for number, step in enumerate(steps):
            began = time.monotonic()
            try:
                step()
            except (OSError, ValueError, KeyError) as error:
                print(f"{python}: {step.__name__}: {error}", flush=True)
                return [True] * number + [False]
            print(f"{python}: {step.__name__:<10}{time.monotonic() - began:6.1f} s", flush=True)
        return [True] * len(steps)


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 64
    package = Path(arguments[0]).resolve()
    if not package.is_file():
        print(f"try_wheel.py: {package} is no file", file=sys.stderr)
        return 1
    results = []
    for name in arguments[1:] or [sys.executable]:
        results += try_python(package, shutil.which(name) or name)
    print(f"{results.count(True)} passed, {results.count(False)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
