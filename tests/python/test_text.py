"""Texts: special tokens, end tokens, sampling defaults, what generation adds to a prompt."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import metal_marlin as mm
import pytest
from metal_marlin.text import TextCodec

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "examples" / "tiny-qwen3-moe"
PROMPT = "And God said"
END = "<|endoftext|>"  # Token 0 of the sample.


def template(*parts: str) -> dict[str, Any]:
    """A post-processor: special tokens, and "$" for the text."""
    ids = {END: 0, "<start>": 1}
    return {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}}
            if part == "$"
            else {"SpecialToken": {"id": part, "type_id": 0}}
            for part in parts
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            part: {"id": part, "ids": [ids[part]], "tokens": [part]}
            for part in parts
            if part != "$"
        },
    }


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """Copies the sample model and changes its tokenizer.json; other files are replaced."""

    def make(change: Callable[[dict[str, Any]], object] | None = None, **files: Any) -> Path:
        directory = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        shutil.copytree(SAMPLE, directory)
        document = json.loads((SAMPLE / "tokenizer.json").read_text())
        if change is not None:
            change(document)
        (directory / "tokenizer.json").write_text(json.dumps(document))
        for name, content in files.items():
            (directory / f"{name}.json").write_text(json.dumps(content))
        return directory

    return make


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "metal_marlin.cli", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def command_json(*arguments: object) -> dict[str, Any]:
    done = command(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    "processor, config, before, after",
    [
        (None, {}, [], []),
        (template("$"), {"add_bos_token": True, "bos_token": END}, [], []),
        (template(END, "$"), {}, [0], []),
        (template(END, "$"), {"add_bos_token": False, "bos_token": END}, [0], []),
        (template("<start>", "$", END), {}, [1], [0]),
        ({"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False,
             "use_regex": True}, template(END, "$")]}, {}, [0], []),
        (None, {"add_bos_token": True, "bos_token": END}, [0], []),
        (None, {"add_bos_token": True, "bos_token": {"content": END}}, [0], []),
        (None, {"add_eos_token": True, "eos_token": END}, [], [0]),
        (None, {"add_bos_token": True, "bos_token": "absent"}, [], []),
        (None, {"add_bos_token": True}, [], []),
        ({"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False,
          "use_regex": True}, {"add_bos_token": True, "bos_token": END}, [0], []),
    ],
)
def test_special_tokens_around_a_text(
    changed: Callable[..., Path], processor: Any, config: Any, before: list[int], after: list[int]
) -> None:
    directory = changed(
        lambda document: document.update(post_processor=processor), tokenizer_config=config
    )
    codec = TextCodec(directory)
    plain = TextCodec(SAMPLE).encode(PROMPT)
    assert codec.encode(PROMPT) == before + plain + after
    assert codec.encode(PROMPT, add_special_tokens=False) == plain


def test_every_door_adds_them(changed: Callable[..., Path], tmp_path: Path) -> None:
    directory = changed(lambda document: document.update(post_processor=template(END, "$")))
    text = tmp_path / "text.txt"
    text.write_text(PROMPT * 40)
    model = mm.load(directory, exact=True, verbose=False)
    plain = TextCodec(SAMPLE).encode(PROMPT)
    count = len(plain)
    prompt = ["generate", directory, "--prompt", PROMPT, "--max-tokens", "5", "--exact"]
    assert command_json(*prompt)["prompt_tokens"] == count + 1
    assert command_json(*prompt, "--no-special-tokens")["prompt_tokens"] == count
    with_it = model.generate([0, *plain], 5, ignore_eos=True)["token_ids"]
    without = model.generate(plain, 5, ignore_eos=True)["token_ids"]
    assert model.generate(PROMPT, 5, ignore_eos=True)["token_ids"] == with_it
    options: dict[str, Any] = {"add_special_tokens": False, "ignore_eos": True}
    assert model.generate(PROMPT, 5, **options)["token_ids"] == without
    assert model.generate([PROMPT] * 2, 5, **options)[1]["token_ids"] == without
    assert model.logits(PROMPT).shape[0] == count + 1
    assert model.logits(PROMPT, add_special_tokens=False).shape[0] == count
    windows = ["perplexity", directory, "--text", text, "--window", "8", "--exact"]
    with_start = model.perplexity(text.read_text(), 8)
    assert command_json(*windows)["nll"] == with_start["nll"]
    without_start = model.perplexity(text.read_text(), 8, add_special_tokens=False)
    assert command_json(*windows, "--no-special-tokens")["nll"] == without_start["nll"]
    assert with_start["nll"] != without_start["nll"]


def test_a_larger_tokenizer(changed: Callable[..., Path], tmp_path: Path) -> None:
    vocabulary = mm.load(SAMPLE, verbose=False).info["vocab_size"]

    def add(document: dict[str, Any]) -> None:
        token = {"content": "<pad>", "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, "special": True}
        document["added_tokens"].append({"id": vocabulary, **token})

    directory = changed(add)
    model = mm.load(directory, exact=True, verbose=False)
    assert model.tokenizer.vocab_size == vocabulary + 1
    want = mm.load(SAMPLE, exact=True, verbose=False).generate(PROMPT, 6)
    assert model.generate(PROMPT, 6)["token_ids"] == want["token_ids"]
    with pytest.raises(mm.MalformedFileError, match=f"gives the token id {vocabulary}, the model"):
        model.generate("a <pad>", 6)
    text = tmp_path / "text.txt"
    text.write_text(PROMPT * 40)
    assert command("generate", directory, "--prompt", PROMPT, "--max-tokens", "2").returncode == 0
    assert command("perplexity", directory, "--text", text, "--window", "8").returncode == 0
    done = command("generate", directory, "--prompt", "a <pad>")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"gives the token id {vocabulary}, the model has 0..{vocabulary - 1}" in done.stderr


def test_text_is_what_is_added(changed: Callable[..., Path]) -> None:
    def pieces(document: dict[str, Any]) -> None:
        """A decoder that drops the first space of a text."""
        document["decoder"] = {"type": "Sequence", "decoders": [
            document["decoder"],
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]}

    directory = changed(pieces)
    model = mm.load(directory, exact=True, verbose=False)
    codec = model.tokenizer
    space = codec.encode(" and", add_special_tokens=False)
    assert codec.decode(space) == "and"
    assert codec.continuation(codec.encode("x"), space) == " and"
    assert codec.continuation([], space) == "and"
    # A character whose first bytes are those of the prompt.
    first, *rest = codec.encode("\u20ac")
    assert rest and codec.continuation([first], rest) == "\u20ac"
    made = model.generate(PROMPT, 12, ignore_eos=True)
    whole = codec.decode(codec.encode(PROMPT) + made["token_ids"])
    assert PROMPT + made["text"] == whole
    shown = command_json("generate", directory, "--prompt", PROMPT, "--max-tokens", "12",
                         "--ignore-eos", "--exact")
    assert shown["text"] == made["text"]


def test_special_tokens_have_no_text() -> None:
    codec = TextCodec(SAMPLE)
    ids = [*codec.encode("a"), 0, *codec.encode("b")]
    assert codec.decode(ids) == "ab"
    assert codec.decode(ids, skip_special_tokens=False) == f"a{END}b"


def test_end_tokens_of_all_files(changed: Callable[..., Path]) -> None:
    directory = changed(
        generation_config={"eos_token_id": [7, 8]}, tokenizer_config={"eos_token": END}
    )
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": 9}))
    assert mm.load(directory, verbose=False).info["eos_token_ids"] == [7, 8, 9, 0]


def test_sampling_that_the_model_asks_for(
    changed: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"do_sample": True, "temperature": 0.75, "top_k": 20, "top_p": 0.5}
    directory = changed(generation_config={**asked, "no_repeat_ngram_size": 2})
    model = mm.load(directory, device="cpu", exact=True)
    capsys.readouterr()
    made = model.generate(PROMPT, 12, seed=3)
    lines = capsys.readouterr().err
    assert "sampling: temperature 0.75, top_k 20, top_p 0.5" in lines
    assert "not applied: no_repeat_ngram_size" in lines
    want = {"temperature": 0.75, "top_k": 20, "top_p": 0.5, "min_p": 0.0, "repetition_penalty": 1}
    assert made["sampling"] == want
    plain = mm.load(SAMPLE, device="cpu", exact=True, verbose=False)
    given: dict[str, Any] = {"temperature": 0.75, "top_k": 20, "top_p": 0.5}
    assert plain.generate(PROMPT, 12, seed=3, **given)["token_ids"] == made["token_ids"]
    greedy = plain.generate(PROMPT, 12)["token_ids"]
    assert model.generate(PROMPT, 12, temperature=0)["token_ids"] == greedy
    assert model.generate([PROMPT], 12, temperature=0)[0]["token_ids"] == greedy
    words = ["generate", directory, "--prompt", PROMPT, "--max-tokens", "12", "--exact"]
    shown = command_json(*words, "--seed", "3")
    assert shown["token_ids"] == made["token_ids"] and shown["sampling"] == want
    assert command_json(*words, "--temperature", "0")["token_ids"] == greedy
    assert command_json("generate", SAMPLE, *words[2:])["sampling"] == {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    }
