"""Speculation in Python and in the command: the same texts, counts, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import metal_marlin as mm
import pytest

SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"
PROMPT = "And God said, Let the"


@pytest.fixture(scope="module")
def model() -> mm.Model:
    return mm.load(SAMPLE, "cpu", batch_invariant=True, verbose=False)


@pytest.fixture(scope="module")
def twin() -> mm.Model:
    return mm.load(SAMPLE, "cpu", batch_invariant=True, verbose=False)


def test_texts_are_those_without_guesses(model: mm.Model, twin: mm.Model) -> None:
    samplings: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 4}]
    drafts: list[Any] = [None, "lookup", twin]
    for sampling in samplings:
        plain = model.generate(PROMPT, 24, ignore_eos=True, **sampling)
        assert plain.drafts == {"passes": 0, "drafted": 0, "accepted": 0, "mean_accepted": 0.0}
        for draft in drafts:
            made = model.generate(PROMPT, 24, ignore_eos=True, speculate=3, draft=draft, **sampling)
            assert made.text == plain.text and made.token_ids == plain.token_ids
        made = model.generate(
            PROMPT, 24, ignore_eos=True, speculate=3, draft=twin, speculate_always=True, **sampling
        )
        assert made.token_ids == plain.token_ids
        # 23 tokens, four in a pass.
        assert made.drafts["accepted"] == made.drafts["drafted"] == 17
        assert made.drafts["mean_accepted"] == pytest.approx(17 / 6)
    both = model.generate([PROMPT, "In the"], 9, speculate=2, draft=twin, speculate_always=True)
    assert [text.text for text in both] == [
        text.text for text in model.generate([PROMPT, "In the"], 9)
    ]
    assert all(text.drafts["accepted"] > 0 for text in both)


def test_what_cannot_guess_is_refused(model: mm.Model, tmp_path: Path) -> None:
    with pytest.raises(mm.InvalidArgumentError, match=r"speculation\.tokens: expected 0\.\.64"):
        model.generate(PROMPT, speculate=65)
    with pytest.raises(mm.InvalidArgumentError, match='draft: expected "lookup", "mtp" or a Model'):
        model.generate(PROMPT, speculate=2, draft="magic")  # type: ignore[call-overload]
    with pytest.raises(mm.InvalidArgumentError, match="opened without the option"):
        model.generate(PROMPT, speculate=2, draft="mtp")
    with pytest.raises(mm.InvalidArgumentError, match=r"is the model itself"):
        model.generate(PROMPT, speculate=2, draft=model)
    shutil.copytree(SAMPLE, tmp_path / "other")
    tokenizer = tmp_path / "other" / "tokenizer.json"
    document = json.loads(tokenizer.read_text())
    vocabulary = document["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    tokenizer.write_text(json.dumps(document))
    other = mm.load(tmp_path / "other", "cpu", verbose=False)
    with pytest.raises(mm.InvalidArgumentError, match="draft: .*other has another tokenizer: tok"):
        model.generate(PROMPT, speculate=2, draft=other)


def command(*words: object) -> subprocess.CompletedProcess[str]:
    program = "import sys; from metal_marlin.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command(tmp_path: Path) -> None:
    words = ("generate", SAMPLE, "--prompt", PROMPT, "--max-tokens", 12, "--device", "cpu",
             "--batch-invariant", "--json")  # fmt: skip
    shutil.copytree(SAMPLE, tmp_path / "draft")
    plain = json.loads(command(*words).stdout)
    made = command(*words, "--speculate", 3, "--speculate-always", "--draft", tmp_path / "draft")
    assert made.returncode == 0, made.stderr
    document = json.loads(made.stdout)
    assert document["token_ids"] == plain["token_ids"]
    assert document["drafts"]["accepted"] == document["drafts"]["drafted"] > 0
    assert plain["drafts"]["drafted"] == 0
    refused = command(*words, "--draft")
    assert refused.returncode == 1 and "--draft: only with --speculate" in refused.stderr
    refused = command(*words, "--speculate", 2, "--draft", "lookpu")
    assert refused.returncode == 3 and "expected lookup, mtp or a model" in refused.stderr
    refused = command(*words, "--speculate", 2, "--draft")
    assert refused.returncode == 1 and "no layer that predicts further tokens" in refused.stderr
