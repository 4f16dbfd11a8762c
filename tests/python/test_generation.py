"""generate: streams, stop strings, callbacks of text, and consumers that stop."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest

SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"
PROMPT = "And God said, Let the"
LONG = 900


@pytest.fixture(scope="module")
def model() -> mm.Model:
    return mm.load(SAMPLE, "cpu", verbose=False)


def joined(chunks: list[mm.GenerationChunk]) -> tuple[str, list[int]]:
    return (
        "".join(chunk.text or "" for chunk in chunks),
        [token for chunk in chunks for token in chunk.token_ids],
    )


def no_generation_runs() -> bool:
    return all(thread.name != "metal_marlin.generate" for thread in threading.enumerate())


def test_chunks_are_the_result(model: mm.Model) -> None:
    whole = model.generate(PROMPT, 40, temperature=1.0, seed=3)
    stream = model.generate(PROMPT, 40, temperature=1.0, seed=3, stream=True)
    chunks = list(stream)
    assert joined(chunks) == (whole.text, whole.token_ids)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].stop_reason, chunks[-1].finish_reason) == ("max_tokens", "length")
    (result,) = stream.results
    assert (result.text, result.token_ids) == (whole.text, whole.token_ids)
    assert no_generation_runs()


def test_a_batch_streams_with_an_index(model: mm.Model) -> None:
    prompts = [PROMPT, "In the beginning", "Thou"]
    options: dict[str, Any] = {"max_tokens": [12, 3, 8], "ignore_eos": True}
    whole = model.generate(prompts, **options)
    chunks = list(model.generate(prompts, stream=True, **options))
    for index, result in enumerate(whole):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert joined(own) == (result.text, result.token_ids)
        assert [chunk.finish_reason for chunk in own if chunk.finish_reason] == ["length"]
    # A text that has ended says so while the others go on.
    ends = [i for i, chunk in enumerate(chunks) if chunk.stop_reason]
    assert chunks[ends[0]].index == 1 and ends[0] < len(chunks) - 2


def test_stop_strings_across_tokens(model: mm.Model) -> None:
    whole = model.generate(PROMPT, 40, ignore_eos=True)
    assert whole.text is not None
    for begin in range(0, 24, 3):
        for length in (1, 2, 5, 9):
            stop = whole.text[begin : begin + length]
            want = whole.text[: whole.text.index(stop)]
            got = model.generate(PROMPT, 40, stop=[stop, "never"], ignore_eos=True)
            assert (got.text, got.stop_reason, got.finish_reason) == (want, "stop_text", "stop")
            chunks = list(model.generate(PROMPT, 40, stop=stop, stream=True, ignore_eos=True))
            shown = ""
            for chunk in chunks:
                shown += chunk.text or ""
                assert want.startswith(shown)
            assert (shown, chunks[-1].finish_reason) == (want, "stop")
            assert joined(chunks)[1] == got.token_ids == whole.token_ids[: len(got.token_ids)]


def test_a_stop_string_that_only_begins_is_shown_at_the_end(model: mm.Model) -> None:
    whole = model.generate(PROMPT, 6, ignore_eos=True)
    assert whole.text
    stop = whole.text[-3:] + "?"
    chunks = list(model.generate(PROMPT, 6, stop=stop, stream=True, ignore_eos=True))
    assert joined(chunks) == (whole.text, whole.token_ids)
    assert not (chunks[-2].text or "").endswith(whole.text[-3:])
    assert (chunks[-1].text or "").endswith(whole.text[-3:])


def test_stop_strings_are_the_commands(model: mm.Model) -> None:
    words = ["generate", SAMPLE, "--prompt", PROMPT, "--max-tokens", "30", "--stop", "nd", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "metal_marlin.cli", *map(str, words)], capture_output=True, text=True
    )
    document = json.loads(done.stdout)
    got = model.generate(PROMPT, 30, stop="nd")
    assert set(got) == set(document)
    assert [got[key] for key in ("text", "token_ids", "stop_reason", "prompt_tokens")] == [
        document[key] for key in ("text", "token_ids", "stop_reason", "prompt_tokens")
    ]


def test_a_special_token_is_a_stop_string(tmp_path: Path) -> None:
    """It has no text of its own: the token ends generation."""
    directory = tmp_path / "model"
    shutil.copytree(SAMPLE, directory)
    document = json.loads((SAMPLE / "tokenizer.json").read_text())
    comma = document["model"]["vocab"][","]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document["added_tokens"].append({"id": comma, "content": ",", "special": True, **flags})
    (directory / "tokenizer.json").write_text(json.dumps(document))
    model = mm.load(directory, "cpu", verbose=False)
    free = model.generate(PROMPT, 20, ignore_eos=True)
    for ignore_eos in (True, False):
        ended = model.generate(PROMPT, 20, stop=",", ignore_eos=ignore_eos)
        assert ended.token_ids == free.token_ids[: free.token_ids.index(comma)]
        assert (ended.stop_reason, ended.finish_reason) == ("stop_token", "stop")


def test_on_text_and_callback(model: mm.Model) -> None:
    pieces: list[str] = []
    tokens: list[int] = []
    result = model.generate(PROMPT, 12, on_text=pieces.append, callback=tokens.append)
    assert ("".join(pieces), tokens) == (result.text, result.token_ids)
    assert all(pieces)
    texts = {0: "", 1: ""}

    def add(index: int, piece: str) -> bool:
        texts[index] += piece
        return index != 1

    first, second = model.generate([PROMPT, "Thou"], 12, on_text=add, ignore_eos=True)
    assert (texts[0], texts[1]) == (first.text, second.text)
    assert (len(second.token_ids), second.stop_reason, second.finish_reason) == (
        1, "stopped", "abort",
    )
    # A prompt of token ids has text where it is asked for, and only then.
    ids = model.tokenizer.encode(PROMPT)
    assert model.generate(ids, 4).text is None
    assert [chunk.text for chunk in model.generate(ids, 2, stream=True)] == [None] * 3
    assert model.generate(ids, 4, on_text=pieces.append).text == model.generate(PROMPT, 4).text


@pytest.mark.parametrize("how", ["break", "close", "with", "exception", "forget"])
@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "Thou"] * 20])
def test_a_consumer_that_stops(model: mm.Model, how: str, prompt: str | list[str]) -> None:
    seen: list[int] = []
    stream = model.generate(
        prompt, LONG, stream=True, ignore_eos=True, callback=lambda *token: seen.append(token[-1])
    )
    if how == "with":
        with stream as chunks:
            next(chunks)
    elif how == "exception":
        with pytest.raises(ZeroDivisionError), stream:
            for _ in stream:
                _ = 1 / 0
    else:
        for _ in stream:
            break
        if how == "close":
            stream.close()
    if how in ("break", "forget"):
        del stream
        gc.collect()
    assert no_generation_runs()
    assert len(seen) < LONG
    # Nothing is left that could not be used again.
    assert len(model.generate(PROMPT, 2, ignore_eos=True).token_ids) == 2


def test_errors_reach_the_consumer(model: mm.Model) -> None:
    def fail(token: int) -> None:
        raise RuntimeError("of the callback")

    with pytest.raises(RuntimeError, match="of the callback"):
        list(model.generate(PROMPT, 4, stream=True, callback=fail))
    with pytest.raises(mm.InvalidArgumentError, match="top_p"):
        list(model.generate(PROMPT, 4, stream=True, top_p=2.0))
    wrong: list[Any] = ["", [""], [3]]
    for stop in wrong:
        with pytest.raises(mm.InvalidArgumentError, match="stop: expected texts, got"):
            model.generate(PROMPT, 4, stop=stop)
    with pytest.raises(mm.InvalidArgumentError, match="on_text: not with stream"):
        model.generate(PROMPT, 4, stream=True, on_text=print)  # type: ignore[call-overload]
    assert no_generation_runs()


@pytest.mark.parametrize("kept", ["stream", "_"])
def test_the_interpreter_ends_with_an_open_stream(kept: str) -> None:
    """Ctrl-C while waiting, and the end of a program that never read to the end."""
    code = f"""
import atexit, os, signal, threading, time, metal_marlin as mm
seen = []
def see(*token):
    seen.append(token)
    time.sleep(0.005)  # A slow machine must not be at the end before the signal comes.
atexit.register(lambda: print(len(seen) < {LONG}))
model = mm.load({str(SAMPLE)!r}, "cpu", verbose=False)
{kept} = model.generate([[1], [2]], {LONG}, stream=True, ignore_eos=True,
                        callback=see)
next({kept})
if {kept == "_"}:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        for chunk in {kept}:
            threading.Event().wait(0.01)
    except KeyboardInterrupt:
        print("interrupted")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    # The thread ended before the program did, and long before its texts.
    assert done.stdout == ("interrupted\n" if kept == "_" else "") + "True\n"


def test_false_of_numpy_stops_as_well(model: mm.Model) -> None:
    for name in ("on_text", "callback"):
        stops: dict[str, Any] = {name: lambda _: np.False_}
        goes_on: dict[str, Any] = {name: lambda _: np.True_}
        assert model.generate(PROMPT, 20, **stops).stop_reason == "stopped"
        assert len(model.generate(PROMPT, 5, **goes_on).token_ids) == 5


@pytest.mark.parametrize("stop", [b"a", 5, [5], [b"a"], "\ud800", ["a", ""]])
def test_stop_strings_are_texts(model: mm.Model, stop: Any) -> None:
    with pytest.raises(mm.InvalidArgumentError):
        model.generate(PROMPT, 5, stop=stop)
