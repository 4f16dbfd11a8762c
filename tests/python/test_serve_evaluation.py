"""What lm-eval's `local-completions` sends and reads, against the perplexity of the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from metal_marlin.models import Model
from serving import NAME, SAMPLE, app_of, make_engine, make_folder, open_model, served

WINDOW = 96  # Predictions, of the token after each of as many.
COUNT = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(make_folder(tmp_path_factory.mktemp("evaluation")))


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[httpx.Client]:
    with served(app_of(make_engine(model), Path(model.path))) as client:
        yield client


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    words = (SAMPLE / "validation_tokens.txt").read_text().split()
    return [int(word) for word in words[: COUNT * WINDOW + 1]]


def log_likelihoods(
    client: httpx.Client, prompts: list[Any], contexts: list[int]
) -> list[tuple[float, bool]]:
    """The sum of the log-probabilities after each context, and whether each was the most likely,
    as `LocalCompletionsAPI.parse_logprobs` computes them."""
    answer = client.post("/v1/completions", json={
        "model": NAME, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1,
        "seed": 1234, "echo": True,
    })  # fmt: skip
    assert answer.status_code == 200, answer.text
    found = []
    choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
    for choice, context in zip(choices, contexts, strict=True):
        logprobs = choice["logprobs"]
        tokens = logprobs["token_logprobs"][context:-1]
        tops = logprobs["top_logprobs"][context:-1]
        greedy = all(token == max(top.values()) for token, top in zip(tokens, tops, strict=True))
        found.append((sum(tokens), greedy))
    return found


def test_perplexity(client: httpx.Client, model: Model, tokens: list[int]) -> None:
    windows = [tokens[i * WINDOW : (i + 1) * WINDOW + 1] for i in range(COUNT)]
    found = log_likelihoods(client, windows, [1] * COUNT)
    for window, (likelihood, greedy) in zip(windows, found, strict=True):
        want = model.perplexity(window, window=WINDOW)
        assert want.tokens == WINDOW and not greedy
        assert -likelihood / WINDOW == pytest.approx(want.nll, abs=1e-3)
    want = model.perplexity(tokens, window=WINDOW)
    mean = -sum(likelihood for likelihood, _ in found) / (COUNT * WINDOW)
    assert math.exp(mean) == pytest.approx(want.perplexity, rel=1e-3)


def test_a_choice_of_answers(client: httpx.Client, model: Model, tokens: list[int]) -> None:
    """The likelihood of a continuation, and that the model's own is the most likely."""
    context = tokens[:32]
    greedy: list[int] = list(model.generate(context, 6)["token_ids"])
    other = tokens[WINDOW : WINDOW + 6]
    found = log_likelihoods(client, [context + greedy, context + other], [len(context)] * 2)
    assert found[0][1] and not found[1][1] and found[0][0] > found[1][0]
    for continuation, (likelihood, _) in zip((greedy, other), found, strict=True):
        whole, before = context + continuation, model.perplexity(context, window=len(context))
        after = model.perplexity(whole, window=len(whole))
        want = before.nll * before.tokens - after.nll * after.tokens
        assert likelihood == pytest.approx(want, abs=1e-3 * after.tokens)


def test_a_text(client: httpx.Client, model: Model) -> None:
    """A prompt as text, and an answer up to a stop string: `generate_until`."""
    text = "And God said, Let there be light"
    (found,) = log_likelihoods(client, [text], [1])
    want = model.perplexity(text)
    assert -found[0] / want.tokens == pytest.approx(want.nll, abs=1e-3)
    body = {"model": NAME, "prompt": [text], "max_tokens": 12, "temperature": 0, "stop": ["\n"],
            "seed": 1234}  # fmt: skip
    made = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert made == model.generate(text, 12, stop="\n")["text"]
