"""bench/serve_load.py finds mixed streams, errors, answers without an end and requests that stay,
in servers that are made with these faults."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import sys
import unittest
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import serve_load  # noqa: E402


class Server:
    """Answers a prompt with eight words of its own, two a chunk, and counts what is open."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.running = 0
        self.answered = 0

    def words(self, prompt: str) -> list[str]:
        return [f"{prompt.split()[-1]}{prompt.split()[-2]}{i} " for i in range(8)]

    def chunks(self, body: dict[str, Any]) -> list[bytes]:
        words = self.words(body["prompt"])
        # The lone requests are answered well.
        if self.fault == "mixed" and self.answered > 12:
            words[5] = "other "
        texts = ["".join(words[i : i + 2]) for i in range(0, 8, 2)]
        rows: list[Any] = [{"choices": [{"text": text, "finish_reason": None}]} for text in texts]
        rows.append({"choices": [], "usage": {"completion_tokens": 8, "prompt_tokens": 32}})
        if self.fault == "error" and self.answered > 12:
            rows.insert(2, {"error": {"message": "no room"}})
        return [f"data: {json.dumps(row)}\n\n".encode() for row in rows]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            left = self.running + (self.fault == "stays")
            text = (f'vllm:num_requests_running{{model="x"}} {left}.0\n'
                    "vllm:num_requests_waiting 0\n")
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            writer.close()
            return
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.answered += 1
        self.running += 1
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            end = b"" if self.fault == "cut" and self.answered > 12 else b"data: [DONE]\n\n"
            data = b"".join(self.chunks(body)) + end
            for i in range(0, len(data), 50):  # Chunks of HTTP end anywhere in an event.
                part = data[i : i + 50]
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except ConnectionError:
            pass  # The client has left.
        finally:
            self.running -= 1
            writer.close()


async def loaded(fault: str = "", **options: Any) -> dict[str, Any]:
    """The row of a short load of six clients."""
    server = await asyncio.start_server(Server(fault).answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    target = serve_load.Target("127.0.0.1", port, "made", max_tokens=4, timeout=20)
    async with server:
        return await serve_load.measure(target, serve_load.Prompts(0, 8), 6, 0.3, **options)


class ServeLoad(unittest.TestCase):
    def test_a_good_server(self) -> None:
        row = asyncio.run(loaded(disconnect=0.3, check=True))
        self.assertEqual(serve_load.failures(row), [])
        self.assertGreater(row["completed"], 6)
        self.assertGreater(row["left"], 0)
        self.assertEqual((row["tokens_per_chunk"], row["prompt_tokens"]), (2.0, 32.0))
        self.assertEqual(row["at_the_end"]["running"], 0)

    def test_faults(self) -> None:
        for fault, found in (("mixed", "streams differ"), ("error", "no room"),
                             ("cut", "without [DONE]")):
            with self.subTest(fault):
                row = asyncio.run(loaded(fault, check=True))
                self.assertIn(found, " ".join(serve_load.failures(row)))

    def test_requests_that_stay(self) -> None:
        before, serve_load.IDLE_SECONDS = serve_load.IDLE_SECONDS, 0.1
        try:
            row = asyncio.run(loaded("stays"))
        finally:
            serve_load.IDLE_SECONDS = before
        self.assertIn("requests are left in the server", " ".join(serve_load.failures(row)))

    def test_a_server_that_is_not_there(self) -> None:
        target = serve_load.Target("127.0.0.1", 1, "made")
        answer = asyncio.run(serve_load.complete(target, "a prompt"))
        self.assertIn("Error", answer.error)

    @unittest.skipUnless(pathlib.Path("/proc/self/smaps_rollup").exists(), "needs Linux")
    def test_memory(self) -> None:
        self.assertGreater(serve_load.memory_of(os.getpid()), 5 << 20)


if __name__ == "__main__":
    unittest.main()
