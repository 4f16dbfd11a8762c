"""The server over the real scheduler: shared prompts, log-probabilities, forms and many clients."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from metal_marlin.models import Model
from metal_marlin.serve.engine import Engine
from metal_marlin.serve.settings import Settings
from serving import app_of, make_engine, make_folder, open_model, served

CHAT = "/v1/chat/completions"
LONG = "And God said, Let there be light: and there was light. " * 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return open_model(folder)


@pytest.fixture(scope="module")
def client(folder: Path, model: Model) -> Iterator[httpx.Client]:
    with served(app_of(make_engine(model), folder)) as client:
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt_that_was_fed_before(client: httpx.Client, model: Model) -> None:
    def ask(**more: Any) -> tuple[str, int]:
        made = post(client, "/v1/completions", prompt=LONG, max_tokens=8, **more)
        details = made["usage"]["prompt_tokens_details"]
        return made["choices"][0]["text"], details["cached_tokens"]

    want = model.generate(LONG, 8)["text"]
    first, again = ask(), ask()
    assert first == (want, 0) and again[0] == want and again[1] >= 256
    assert ask(cache_salt="another") == (want, 0)
    assert ask(cache_salt="another")[1] == again[1]
    metrics = client.get("/metrics").text
    hits = [line for line in metrics.splitlines() if line.startswith("metal_marlin:prefix_cache_h")]
    assert float(hits[0].split()[-1]) == 2 * again[1]


def test_many_texts_of_which_some_are_cancelled(folder: Path, model: Model) -> None:
    random_of = random.Random(3)
    asked = [(f"And {word}", random_of.randrange(1, 40)) for word in LONG.split()[:40]]
    wanted = model.generate([prompt for prompt, _ in asked], [count for _, count in asked])

    async def text(engine: Engine, prompt: str, count: int) -> str:
        ids = await engine.encode(prompt)
        chunks = engine.generate(ids, Settings(max_tokens=count, temperature=0.0))
        return "".join([chunk.text async for chunk in chunks])

    async def cancelled(engine: Engine, prompt: str) -> None:
        ids = await engine.encode(prompt)
        chunks = engine.generate(ids, Settings(max_tokens=900, ignore_eos=True))
        async for _ in chunks:
            break
        await chunks.aclose()  # type: ignore[attr-defined]

    async def run() -> list[str]:
        engine = make_engine(model)
        engine.start()
        try:
            texts = [text(engine, *each) for each in asked]
            gone = [cancelled(engine, prompt) for prompt, _ in asked[::3]]
            made = await asyncio.gather(*texts, *gone)
            # The last cancellations take effect in the next pass.
            await text(engine, "And", 2)
            assert engine.statistics["running"] == engine.statistics["waiting"] == 0
            assert engine.statistics["pages_used"] == 0
            return [each for each in made if each is not None]
        finally:
            await engine.stop()

    assert asyncio.run(run()) == [each["text"] for each in wanted]
