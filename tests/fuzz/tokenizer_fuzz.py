#!/usr/bin/env python3
"""A model's tokenizer.json through the package: every text round-trips, or an error is raised.

Usage: tokenizer_fuzz.py SECONDS [SEED] [--keep FOLDER]

Needs the Python package. Tokenizers are mutations of a working one: JSON values are replaced by
others of other types and sizes, and parts are repeated or removed. Each is tried in a child process
with limits on time and memory, so that crashes are reported as such. Prints the attempts and `N
passed, M failed`; inputs that failed are kept in FOLDER (default: the current one).
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import resource
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SEED_FILE = ROOT / "examples" / "tiny-qwen3-moe" / "tokenizer.json"
TEXT = "In the beginning, 12 times: na\u00efve \U0001f600 <|endoftext|>\n\tdef f(x): return x"
SECONDS_EACH = 10
MEMORY = 2 << 30
OK, REFUSED = "ok", "refused"

NUMBERS = [0, 1, -1, 4, 64, 10_000, 100_000_000, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 10**12,
           1.5, 1e400]
STRINGS = ["", "a", " ", "\u0120", "\ufffd", "x" * 10_000, "BPE", "WordPiece", "Unigram",
           "Sequence", "Replace", "ByteLevel", "Left", "(a*)*b", "[[:alpha:]]+", "<|endoftext|>"]
SETTINGS: list[tuple[str, Any]] = [
    ("truncation", {"direction": "Right", "max_length": 4, "strategy": "LongestFirst",
                    "stride": 0}),
    ("padding", {"strategy": {"Fixed": 100}, "direction": "Right", "pad_to_multiple_of": None,
                 "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}),
    ("normalizer", {"type": "Replace", "pattern": {"String": "e"}, "content": "eeeeeeeeee"}),
    ("normalizer", {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 30}] * 3}),
    ("normalizer", {"type": "NFKC"}),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a*)*b"}, "behavior": "Isolated",
                       "invert": False}),
    ("pre_tokenizer", None),
    ("decoder", None),
    ("post_processor", None),
]


# --- the child: reads names of folders, answers one line each -------------------------------------

def try_one(folder: str, errors: Any, codec_class: Any) -> str:
    """Returns "ok", "refused", or an error."""
    try:
        codec = codec_class(folder)
        tokens = codec.encode(TEXT)
        text = codec.decode(tokens)
        codec.decode([0, max(0, codec.vocab_size - 1), 2**31 - 1])
    except errors.MarlinError as error:
        return REFUSED if "\n" not in str(error) else f"a message of several lines: {error!r}"
    if not all(0 <= token < 2**31 for token in tokens):
        return f"an invalid token id: {[t for t in tokens if not 0 <= t < 2**31][0]}"
    if not isinstance(text, str):
        return f"decoded to {type(text).__name__}"
    # Neither truncated nor padded: as many tokens as without those settings.
    path = Path(folder) / "tokenizer.json"
    document = json.loads(path.read_bytes())
    if document.get("truncation") or document.get("padding"):
        document.update(truncation=None, padding=None)
        path.write_text(json.dumps(document))
        plain = codec_class(folder).encode(TEXT)
        if plain != tokens:
            return f"{len(tokens)} tokens, without truncation and padding {len(plain)}"
    return OK


def child() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from metal_marlin import errors  # After the limits, which also bind the package.
    from metal_marlin.text import TextCodec

    for line in sys.stdin:
        try:
            answer = try_one(line.rstrip("\n"), errors, TextCodec)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)
    return 0


class Child:
    """The process that tries tokenizers; replaced by a new one whenever it ends."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
        return subprocess.Popen([sys.executable, "-B", __file__, "--child"], env=environment,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL)

    def ask(self, folder: str) -> str:
        if self.process is None:
            self.process = self.start()
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(folder.encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], SECONDS_EACH)
        line = process.stdout.readline() if ready else b""
        if line:
            answer: str = json.loads(line)
            return answer
        process.kill()
        code = process.wait()
        self.process = None
        return f"took over {SECONDS_EACH} s" if not ready else f"ended with {code}"

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


# --- mutations ------------------------------------------------------------------------------------

def places(value: Any) -> list[tuple[Any, Any]]:
    """Returns (container, key) of every value; a sample for long lists and tables."""
    found: list[tuple[Any, Any]] = []
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    for key in keys[:40] + keys[-3:] if len(keys) > 60 else keys:
        found.append((value, key))
        found += places(value[key])
    return found


def mutate(document: dict[str, Any], rng: random.Random) -> None:
    """Makes one random change."""
    if rng.random() < 0.4:
        key, setting = rng.choice(SETTINGS)
        document[key] = copy.deepcopy(setting)
        return
    container, key = rng.choice(places(document))
    old = container[key]
    kind = rng.randrange(6)
    if kind == 0 and isinstance(container, dict):
        del container[key]
    elif kind == 1 and isinstance(old, list) and old:
        container[key] = old * rng.choice([2, 50]) if len(old) < 100 else old[: len(old) // 2]
    elif kind == 2 and isinstance(old, (dict, list)):
        nested: Any = old
        for _ in range(rng.choice([1, 10, 200])):
            nested = {"type": "Sequence", "normalizers": [nested], "pretokenizers": [nested],
                      "processors": [nested], "decoders": [nested]}
            if len(json.dumps(nested)) > 200_000:
                break
        container[key] = nested
    elif isinstance(old, bool):
        container[key] = not old
    elif isinstance(old, (int, float)) or (old is None and kind == 3):
        container[key] = rng.choice(NUMBERS)
    elif isinstance(old, str):
        container[key] = rng.choice(STRINGS)
    else:
        container[key] = rng.choice([None, {}, [], 0, ""])


def damage(text: bytes, rng: random.Random) -> bytes:
    """Removes or changes bytes: rarely, since most results are refused as JSON."""
    position = rng.randrange(len(text))
    if rng.random() < 0.5:
        return text[:position]
    return text[:position] + bytes([rng.randrange(256)]) + text[position + 1:]


def make_input(seed: dict[str, Any], rng: random.Random) -> bytes:
    document = copy.deepcopy(seed)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        mutate(document, rng)
    text = json.dumps(document).encode("utf-8", "surrogatepass")
    return damage(text, rng) if rng.random() < 0.03 else text


def fuzz(seconds: float, rng: random.Random, keep: Path) -> int:
    seed = json.loads(SEED_FILE.read_bytes())
    worker = Child()
    counts = {OK: 0, REFUSED: 0}
    failures: dict[str, int] = {}
    end = time.monotonic() + seconds
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_bytes(SEED_FILE.read_bytes())
        first = worker.ask(folder)
        if first != OK:
            raise SystemExit(f"the unmodified tokenizer: {first}")
        while time.monotonic() < end:
            text = make_input(seed, rng)
            path.write_bytes(text)
            answer = worker.ask(folder)
            if answer in counts:
                counts[answer] += 1
                continue
            kind = re.sub(r"\d+", "N", answer.split(":")[0])
            failures[kind] = failures.get(kind, 0) + 1
            if failures[kind] == 1:
                kept = keep / f"tokenizer_fuzz-{len(failures)}.json"
                kept.write_bytes(text)
                print(f"{answer[:300]}\n  in {kept}", flush=True)
    worker.end()
    for kind, count in failures.items():
        print(f"{count} times: {kind[:120]}")
    print(f"{counts[OK]} encoded, {counts[REFUSED]} refused")
    print(f"{sum(counts.values())} passed, {sum(failures.values())} failed")
    return 1 if failures or counts[OK] == 0 else 0


def main(arguments: list[str]) -> int:
    if arguments == ["--child"]:
        return child()
    keep = Path()
    if "--keep" in arguments:
        at = arguments.index("--keep")
        keep = Path(arguments[at + 1])
        del arguments[at:at + 2]
    seconds, seed = float(arguments[0]), int((arguments[1:] or ["1"])[0])
    return fuzz(seconds, random.Random(seed), keep)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
