"""Runs a command that may crash, hang or print without end, and says what became of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MOST_BYTES = 64 << 20  # A command that prints more is stopped.
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Limits:
    seconds: float
    silence: float = 0  # Seconds without output; 0: any number.


@dataclass
class Outcome:
    """`state` is "exit N", "crashed (SIGSEGV)", "timed out", "hung (silent for N s)", "printed too
    much" or "no such command"; outputs are what the command had printed by then."""

    state: str
    code: int
    out: str
    error: str
    seconds: float

    def finished(self) -> bool:
        return self.state.startswith("exit ")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it started; it leads a group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MOST_BYTES).decode("utf-8", errors="replace")


def wait(process: subprocess.Popen[bytes], limits: Limits, outputs: Sequence[IO[bytes]],
         tick: Callable[[float], None]) -> str:
    """Waits for the end of a process, and returns the state."""
    started = printed = time.monotonic()
    size = 0
    while process.poll() is None:
        now = time.monotonic()
        before, size = size, sum(os.fstat(file.fileno()).st_size for file in outputs)
        if size != before:
            printed = now
        if now - started > limits.seconds:
            return "timed out"
        if limits.silence and now - printed > limits.silence:
            return f"hung (silent for {limits.silence:.0f} s)"
        if size > MOST_BYTES:
            return "printed too much"
        tick(now - started)
        time.sleep(POLL_SECONDS)
    code = process.returncode
    if code >= 0:
        return f"exit {code}"
    try:
        return f"crashed ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed (signal {-code})"


def run(command: Sequence[str | Path], limits: Limits, environment: dict[str, str] | None = None,
        tick: Callable[[float], None] = lambda seconds: None) -> Outcome:
    """Runs a command, with additions to the environment. `tick` is called with the seconds so far
    while it runs."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        try:
            process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=out, stderr=error,
                env={**os.environ, **(environment or {})}, start_new_session=True)
        except OSError as reason:
            return Outcome("no such command", 127, "", str(reason), 0)
        try:
            state = wait(process, limits, (out, error), tick)
        finally:
            stop(process)
        return Outcome(state, process.returncode, text_of(out), text_of(error),
                       time.monotonic() - started)
