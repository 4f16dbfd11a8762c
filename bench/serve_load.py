#!/usr/bin/env python3
"""Loads an OpenAI-compatible server with clients that stream completions, and reports its speed.

    bench/serve_load.py http://127.0.0.1:8000 --clients 64 --seconds 300 --disconnect 0.33 --check \
        --pid PID
    bench/serve_load.py http://127.0.0.1:8000 --clients 8 --seconds 30 --shared-words 400 --json

Each client sends one greedy streaming request after the other to /v1/completions. Every request
has a prompt of its own; all prompts begin with the same --shared-words words. A share of the
requests, --disconnect, is abandoned at a random moment.

With --check, each client has a few prompts, whose answers are first taken one at a time. Then every
stream must be the answer to its prompt, or its beginning if the client has left, so that a stream
with another's tokens is found. The server must compute batch-invariantly (`metal-marlin serve
--batch-invariant`): otherwise other requests change the rounding of a stream.

--pid PID samples the memory of the server's processes (proportional set size, Linux). At the end,
a server with vLLM's metrics must report that nothing runs or waits. Exit code 1: an error, another
text than the answer, or requests that remain in the server. Standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORDS = (
    "river stone garden window winter letter copper morning engine harbor silver meadow lantern "
    "shadow village thunder pocket ladder marble candle forest bridge orange kitchen sailor valley "
    "hammer button pepper island needle rocket carpet dragon mirror basket cotton planet violin"
).split()
PROMPTS_TO_CHECK = 2  # Prompts of each client.
TRIES = 20  # Prompts that are drawn for each one whose answer must be no other prompt's.
TOO_SLOW = "no end within"  # Beginning of the error of a request that outlasts its timeout.
IDLE_SECONDS = 10.0  # In which the server must have ended every request after the last client.


@dataclass(frozen=True)
class Target:
    """The server, and settings that all requests share."""

    host: str
    port: int
    model: str
    key: str = ""
    max_tokens: int = 64
    timeout: float = 120.0


@dataclass
class Answer:
    """The outcome of one request."""

    started: float
    text: str = ""
    times: list[float] = field(default_factory=list)  # Arrival of each chunk with text.
    tokens: int = 0  # As the server counts them; 0 where it did not.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cut: bool = False  # Left by the client.
    error: str = ""


# --- HTTP ---------------------------------------------------------------------------------------


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def send(target: Target, method: str, path: str, body: bytes = b"") -> Connection:
    """Sends a request on a connection of its own."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    key = f"Authorization: Bearer {target.key}\r\n" if target.key else ""
    head = (f"{method} {path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n")
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def head_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of a response."""
    status = await reader.readline()
    if not status.startswith(b"HTTP/"):
        raise ConnectionError(f"no HTTP status: {status[:80]!r}")
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return int(status.split()[1]), headers


async def pieces(headers: dict[str, str], reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body of a response, as it arrives."""
    if "chunked" in headers.get("transfer-encoding", ""):
        while (size := int((await reader.readline()).split(b";")[0] or b"0", 16)) > 0:
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while data := await reader.read(65536):
            yield data


async def events(headers: dict[str, str], reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """The data of the server-sent events of a response."""
    rest = b""
    async for data in pieces(headers, reader):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


async def get(target: Target, path: str) -> tuple[int, str]:
    """Status and text of a page."""
    reader, writer = await send(target, "GET", path)
    try:
        status, headers = await head_of(reader)
        return status, b"".join([data async for data in pieces(headers, reader)]).decode()
    finally:
        writer.close()


# --- requests -----------------------------------------------------------------------------------


def read_event(data: str, answer: Answer) -> bool:
    """Adds an event to the answer. Returns whether it is a chunk with text."""
    chunk = json.loads(data)
    if "error" in chunk:
        answer.error = f"in the stream: {chunk['error']}"
        return False
    if usage := chunk.get("usage"):
        answer.tokens = usage["completion_tokens"]
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    text = chunk["choices"][0].get("text") if chunk.get("choices") else None
    if not text:
        return False
    answer.text += text
    answer.times.append(time.monotonic())
    return True


BEFORE_THE_RESPONSE = -1


async def stream(target: Target, body: bytes, leave_after: int | None, answer: Answer) -> None:
    reader, writer = await send(target, "POST", "/v1/completions", body)
    try:
        if leave_after == BEFORE_THE_RESPONSE:
            answer.cut = True
            return
        status, headers = await head_of(reader)
        if status != 200:
            text = b"".join([data async for data in pieces(headers, reader)]).decode()
            answer.error = f"HTTP {status}: {text.strip()[:200]}"
            return
        if leave_after == 0:
            answer.cut = True
            return
        async for data in events(headers, reader):
            if data == "[DONE]":
                return
            if read_event(data, answer) and len(answer.times) == leave_after:
                answer.cut = True
                return
            if answer.error:
                return
        answer.error = "the stream ended without [DONE]"
    finally:
        writer.close()


async def complete(target: Target, prompt: str, leave_after: int | None = None) -> Answer:
    """Streams one completion; leaves after `leave_after` chunks with text."""
    answer = Answer(time.monotonic())
    body = json.dumps({
        "model": target.model, "prompt": prompt, "max_tokens": target.max_tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }).encode()
    try:
        await asyncio.wait_for(stream(target, body, leave_after, answer), target.timeout)
    except asyncio.TimeoutError:
        answer.error = f"{TOO_SLOW} {target.timeout:g} s"
    except (OSError, EOFError, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


# --- prompts ------------------------------------------------------------------------------------


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


@dataclass(frozen=True)
class Prompts:
    """Draws prompts of random words after a beginning that all share."""

    shared_words: int
    own_words: int

    def draw(self, name: str) -> str:
        shared = words(random.Random("shared"), self.shared_words)
        return f"{shared} {words(random.Random(name), self.own_words)}".strip()


async def known_answers(target: Target, prompts: Prompts, clients: int) -> list[dict[str, str]]:
    """For each client, prompts with the answers that they get alone, all different."""
    known: list[dict[str, str]] = []
    seen: set[str] = set()
    for client in range(clients):
        mine: dict[str, str] = {}
        for attempt in range(TRIES * PROMPTS_TO_CHECK):
            prompt = prompts.draw(f"known {client} {attempt}")
            answer = await complete(target, prompt)
            if answer.error:
                sys.exit(f"serve_load: a lone request failed: {answer.error}")
            if answer.text and answer.text not in seen:
                seen.add(answer.text)
                mine[prompt] = answer.text
            if len(mine) == PROMPTS_TO_CHECK:
                break
        if len(mine) < PROMPTS_TO_CHECK:
            sys.exit("serve_load: too many prompts get the same answer to find mixed streams")
        known.append(mine)
    return known


# --- clients ------------------------------------------------------------------------------------


@dataclass
class Load:
    """One run: the work of its clients, and their answers."""

    target: Target
    prompts: Prompts
    clients: int
    seconds: float
    disconnect: float
    known: list[dict[str, str]]  # Empty without --check.
    answers: list[Answer] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    began: float = 0.0

    async def client(self, number: int) -> None:
        draw = random.Random(f"client {number}")
        request = 0
        while time.monotonic() < self.began + self.seconds:
            if self.known:
                prompt = draw.choice(list(self.known[number]))
            else:
                prompt = self.prompts.draw(f"request {number} {request}")
            leaves = draw.random() < self.disconnect
            after = draw.randrange(BEFORE_THE_RESPONSE, self.target.max_tokens) if leaves else None
            answer = await complete(self.target, prompt, after)
            self.answers.append(answer)
            if self.known and not answer.error:
                self.compare(answer, self.known[number][prompt])
            if answer.error:
                await asyncio.sleep(0.1)  # A server that is gone must not be asked in a tight loop.
            request += 1

    def compare(self, answer: Answer, wanted: str) -> None:
        """A stream that was left may end inside a character."""
        got = answer.text.rstrip("\ufffd") if answer.cut else answer.text
        if got != wanted[: len(got)] or (not answer.cut and got != wanted):
            self.different.append(f"got {answer.text!r}, alone it is {wanted!r}")

    async def watch(self, pid: int) -> None:
        while True:
            self.memory.append(memory_of(pid))
            await asyncio.sleep(1)

    async def run(self, pid: int | None) -> None:
        watcher = asyncio.create_task(self.watch(pid)) if pid is not None else None
        self.began = time.monotonic()
        await asyncio.gather(*(self.client(number) for number in range(self.clients)))
        if watcher:
            watcher.cancel()


def memory_of(pid: int) -> int:
    """The bytes of a process and its descendants (proportional set size)."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    members = {pid}
    while more := {child for child, parent in parents.items() if parent in members} - members:
        members |= more
    total = 0
    for member in members:
        try:
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text()
        except OSError:
            continue
        found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        total += int(found[1]) * 1024 if found else 0
    return total


async def wait_until_idle(target: Target) -> dict[str, Any] | None:
    """Waits until the server's metrics report no request; None if it has no such metrics."""
    began = time.monotonic()
    while True:
        try:
            status, text = await get(target, "/metrics")
        except (OSError, EOFError, ValueError):
            return None
        found = re.findall(r"^\S*num_requests_(running|waiting)(?:\{[^}]*\})? (\S+)$", text,
                           re.MULTILINE)
        if status != 200 or not found:
            return None
        left = {name: float(value) for name, value in found}
        waited = time.monotonic() - began
        if not any(left.values()) or waited > IDLE_SECONDS:
            return {**left, "seconds": round(waited, 3)}
        await asyncio.sleep(0.05)


# --- report -------------------------------------------------------------------------------------


def percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    values = sorted(values)
    return {f"p{share}": round(values[min(len(values) - 1, len(values) * share // 100)], 6)
            for share in (50, 99)}


def speeds(load: Load) -> dict[str, Any]:
    """Times and rates of the requests that came to their end; all tokens of the run's seconds."""
    whole = [answer for answer in load.answers if not (answer.cut or answer.error)]
    counted = [answer for answer in whole if answer.tokens and answer.times]
    chunks = sum(len(answer.times) for answer in counted)
    tokens = sum(answer.tokens for answer in counted)
    per_chunk = tokens / chunks if chunks else 1.0
    end = load.began + load.seconds
    in_time = sum(when <= end for answer in load.answers for when in answer.times)
    gaps = [after - before for answer in load.answers
            for before, after in zip(answer.times, answer.times[1:], strict=False)]
    return {
        "tokens_per_second": round(in_time * per_chunk / load.seconds, 3),
        "tokens_per_chunk": round(per_chunk, 3),
        "first_token_seconds": percentiles(
            [answer.times[0] - answer.started for answer in load.answers if answer.times]
        ),
        "gap_seconds": percentiles(gaps),
        "token_seconds": percentiles(
            [(answer.times[-1] - answer.times[0]) / (answer.tokens - 1)
             for answer in counted if answer.tokens > 1]
        ),
    }


def memory(load: Load) -> dict[str, Any] | None:
    """Medians of the first and the last fifth of the samples."""
    if not load.memory:
        return None
    part = max(1, len(load.memory) // 5)
    first, last = (sorted(some)[part // 2] for some in (load.memory[:part], load.memory[-part:]))
    return {"first_bytes": first, "last_bytes": last, "most_bytes": max(load.memory),
            "growth": round(last / first - 1, 4) if first else None}


async def measure(
    target: Target,
    prompts: Prompts,
    clients: int,
    seconds: float,
    disconnect: float = 0.0,
    check: bool = False,
    pid: int | None = None,
) -> dict[str, Any]:
    """Runs one load and returns its row of a record."""
    known = await known_answers(target, prompts, clients) if check else []
    if not known:
        failed = (await complete(target, prompts.draw("first"))).error
        if failed and not failed.startswith(TOO_SLOW):  # A slow server is a result.
            sys.exit(f"serve_load: the first request failed: {failed}")
    load = Load(target, prompts, clients, seconds, disconnect, known)
    await load.run(pid)
    idle = await wait_until_idle(target)
    done = [answer for answer in load.answers if not (answer.cut or answer.error)]
    count = max(1, sum(answer.prompt_tokens > 0 for answer in done))
    return {
        "clients": clients, "seconds": seconds, "disconnect": disconnect, "checked": check,
        "max_tokens": target.max_tokens, "shared_words": prompts.shared_words,
        "own_words": prompts.own_words, "completed": len(done),
        "left": sum(answer.cut for answer in load.answers),
        "errors": dict(Counter(answer.error for answer in load.answers if answer.error)),
        "different": len(load.different), "differences": load.different[:3],
        "prompt_tokens": round(sum(answer.prompt_tokens for answer in done) / count, 1),
        "cached_tokens": round(sum(answer.cached_tokens for answer in done) / count, 1),
        **speeds(load), "memory": memory(load), "at_the_end": idle,
    }


def failures(row: dict[str, Any]) -> list[str]:
    """Describes each thing that is wrong with a run."""
    found = [f"{count} requests failed: {error}" for error, count in row["errors"].items()]
    if not row["completed"]:
        found.append("no request came to its end")
    if row["different"]:
        found.append(f"{row['different']} streams differ from the answer that their prompt gets "
                     f"alone: {row['differences'][0]}")
    left = row["at_the_end"]
    if left and any(left.get(name) for name in ("running", "waiting")):
        found.append(f"requests are left in the server after {IDLE_SECONDS:g} s: {left}")
    return found


async def first_model(target: Target) -> str:
    status, text = await get(target, "/v1/models")
    if status != 200:
        sys.exit(f"serve_load: /v1/models: HTTP {status}: {text[:200]}")
    return str(json.loads(text)["data"][0]["id"])


def target_of(url: str, model: str = "", key: str = "", **common: Any) -> Target:
    """The server at a URL, http only; without a model's name, the first that it lists."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        sys.exit(f"serve_load: {url}: expected http://HOST:PORT")
    target = Target(parts.hostname, parts.port or 80, model, key, **common)
    if not model:
        name = asyncio.run(first_model(target))
        target = Target(target.host, target.port, name, key, **common)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="http://HOST:PORT")
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--disconnect", type=float, default=0.0, help="share of the requests")
    parser.add_argument("--check", action="store_true", help="compare every stream with its answer")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--shared-words", type=int, default=0)
    parser.add_argument("--own-words", type=int, default=32)
    parser.add_argument("--timeout", type=float, default=120.0, help="of a request, in seconds")
    parser.add_argument("--pid", type=int, help="of the server: samples its memory")
    parser.add_argument("--json", action="store_true", help="print the row of a record")
    options = parser.parse_args()
    target = target_of(options.url, options.model, options.api_key,
                       max_tokens=options.max_tokens, timeout=options.timeout)
    row = asyncio.run(measure(
        target, Prompts(options.shared_words, options.own_words), options.clients, options.seconds,
        options.disconnect, options.check, options.pid,
    ))
    if options.json:
        print(json.dumps(row))
    else:
        for name, value in row.items():
            print(f"{name:20} {value}")
    found = failures(row)
    for line in found:
        print(f"serve_load: {line}", file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
