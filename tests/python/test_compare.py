"""`serve --compare`: what another model thinks of an answer."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")

import serving
from metal_marlin.chat_template import ChatTemplate
from metal_marlin.errors import InvalidArgumentError
from metal_marlin.serve import compare
from metal_marlin.serve.chat_service import ChatService
from metal_marlin.serve.token_texts import TokenTexts
from metal_marlin.text import TextCodec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.make_folder(tmp_path_factory.mktemp("compare"))


@pytest.fixture(scope="module")
def other_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with 4 bits."""
    import metal_marlin as mm

    made = tmp_path_factory.mktemp("quantized") / "tiny-u4"
    mm.quantize_model(folder, made, recipe="uniform:u4/g64")
    return made


def wanted(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probabilities by the logits of the whole text."""
    logits = model.logits([*prompt, *answer])[len(prompt) - 1 : -1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return [float(row[token]) for row, token in zip(rows, answer, strict=True)]


def test_both_models_score_an_answer(folder: Path, other_folder: Path) -> None:
    models = [serving.open_model(folder), serving.open_model(other_folder)]
    engines = [serving.make_engine(model) for model in models]
    template = ChatTemplate.find(folder)
    other = ChatService(engines[1], template)
    app = serving.app_of(engines[0], folder)
    scorers = compare.Scorer(models[0]._core), compare.Scorer(models[1]._core)
    compare.register(app, other, scorers, "tiny")
    asked = {"messages": [serving.USER], "max_tokens": 8, "temperature": 0, "stream": True,
             "return_token_ids": True}  # fmt: skip
    with serving.served(app) as client:
        info = client.get("/info").json()
        assert info["compare"] == {"model": "tiny"} and info["context"] == 1024
        assert client.get("/").text.startswith("<!doctype html>")
        answers = []
        for path in ("/v1/chat/completions", "/compare/answer"):
            chunks = serving.events(client.post(path, json=asked).text)
            choices = list(itertools.chain.from_iterable(chunk["choices"] for chunk in chunks))
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            # The first chunk has the role alone.
            ids = [token for choice in choices[1:] for token in choice["token_ids"]]
            answers.append((ids, text))
        prompt = client.post("/tokenize", json={"messages": [serving.USER]}).json()["tokens"]
        for model, (ids, text) in zip(models, answers, strict=True):
            alone = model.generate(prompt, 8, temperature=0)
            assert ids == alone["token_ids"]
            assert text == model.chat([serving.USER], 8, temperature=0)["text"]
            scores = client.post("/compare/score", json={
                "messages": [serving.USER], "token_ids": ids, "top_logprobs": 3})  # fmt: skip
            assert scores.status_code == 200, scores.text
            tokens = scores.json()["tokens"]
            assert [token["id"] for token in tokens] == ids
            assert "".join(token["text"] for token in tokens) == text
            for name, each in zip(("own", "other"), models, strict=True):
                got = [token[name]["logprob"] for token in tokens]
                assert got == pytest.approx(wanted(each, prompt, ids), abs=1e-3)
                for token in tokens:
                    tops = [top["logprob"] for top in token[name]["top"]]
                    assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        for field, body in (
            ("token_ids", {"messages": [serving.USER], "token_ids": []}),
            ("token_ids", {"messages": [serving.USER], "token_ids": [10**6]}),
            ("messages", {"token_ids": [1]}),
            ("top_k", {"messages": [serving.USER], "token_ids": [1], "top_k": 1}),
        ):
            refused = client.post("/compare/score", json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["message"].startswith(f"{field}")


def test_the_tokenizers_are_the_same(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    compare.check_same_tokenizer(TextCodec(folder), TextCodec(other), other)
    document = json.loads((other / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InvalidArgumentError, match="--compare: .*other has another tokenizer: tok"):
        compare.check_same_tokenizer(TextCodec(folder), TextCodec(other), other)


def test_what_cannot_occur_has_a_number(folder: Path) -> None:
    scored = compare.Score(-math.inf, [(65, -0.5)])
    texts = TokenTexts(TextCodec(folder))
    assert compare._document(scored, texts) == {
        "logprob": -9999.0, "top": [{"id": 65, "text": texts(65)[0], "logprob": -0.5}]}
