"""Tokenizers of GGUF files: token ids are those of the models' own tokenizer.json, spelled out here
as they were published, and those of transformers where it knows the cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf")

from metal_marlin.text import TextCodec  # noqa: E402
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, trainers  # noqa: E402
from tokenizers import pre_tokenizers as pre  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

# Numbers, runs of spaces, line ends, letters with marks, scripts without spaces, emoji, code.
TEXT = (
    "Hello World's ABCdefGHi  it'S we'll x=1234567, 12.5 \u0663\u0664\u0665 \u00b2\u2167!\n"
    "na\u00efve CAF\u00c9 \u00e9te\u0301 \u0130stanbul \u03a9\u03bc\u03ad\u03b3\u03b1 "
    "\u041c\u043e\u0441\u043a\u0432\u0430 \u0939\u093f\u0928\u094d\u0926\u0940 \u0627\u0644\u0639"
    "\u0631\u0628\u064a\u0629\u060c \u0e44\u0e17\u0e22 \u6771\u4eac\u90fd\u306e\u30ab\u30bf\u30ab"
    "\u30ca\u65e5\u672c\uff0c\uff01 \ud55c\uad6d\uc5b4 \u3105\u3106 \u2026 \u201cq\u201d \U0001f600"
    "\U0001f44d\U0001f3fd\r\n\r\n\n\n    def f(x, y=3):\n\treturn x**2 // 3 != y  # {a}[b]`c`\n"
    "  \n   ends <sentinel:12>  100000000 7 \t\n  "
)

SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 = rf"{SUFFIX}|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"
QWEN2 = rf"{SUFFIX}|{WORD}|\p{{N}}|{SYMBOLS}|{SPACES}"
QWEN35 = (
    rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
O200K_WORDS = f"{LEAD}{UPPER}*{LOWER}+{SUFFIX}?|{LEAD}{UPPER}+{LOWER}*{SUFFIX}?"
O200K = rf"{O200K_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
TEKKEN = (
    f"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
HAN_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
HAN_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI = (
    rf"[\p{{Han}}]+|{LEAD}{HAN_UPPER}*{HAN_LOWER}+{SUFFIX}?|{LEAD}{HAN_UPPER}+{HAN_LOWER}*"
    rf"{SUFFIX}?|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"
)
CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
WIDE_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
    "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+"
)
DEEPSEEK_V3 = DEEPSEEK_WORDS + "[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
# Letters with two cases in Latin, Greek, Cyrillic: of the published class, what TEXT has.
CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-"
    "\u03f5\u03f7-\u0481\u048a-\u052f"
)
MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
    "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
AFMOE_CJK = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
JAIS2 = rf"{SUFFIX}|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}|\s*[\r\n]+|" + "".join(
    rf"\s{{{count}}}(?!\S)|" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
) + r"\s{1}"


def split(pattern: str) -> Any:
    return pre.Split(Regex(pattern), behavior="isolated")


def digits() -> Any:
    return pre.Digits(individual_digits=True)


def gpt2() -> Any:
    return pre.ByteLevel(add_prefix_space=False, use_regex=True)


def raw() -> Any:
    return pre.ByteLevel(add_prefix_space=False, use_regex=False)


# The steps before the bytes; the last of those with GPT-2's pattern makes the bytes itself.
CUTS: dict[str, Callable[[], list[Any]]] = {
    "gpt-2 phi-2 exaone4 jais trillion mpt olmo roberta-bpe": lambda: [gpt2()],
    "smollm starcoder refact codeshell exaone minerva-7b mellum2 command-r": lambda: [
        digits(), gpt2()],
    "llama-bpe llama3 llama-v3 falcon3 lfm2 pixtral smaug-bpe dbrx glm4 chatglm-bpe": lambda: [
        split(LLAMA3), raw()],
    "minicpm5": lambda: [
        split(r"\p{N}{1,3}"), split(LLAMA3.replace("{1,3}", "+")), raw()],
    "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan grok-2": lambda: [split(QWEN2), raw()],
    "qwen35": lambda: [split(QWEN35), raw()],
    "ufakzeka": lambda: [split(QWEN2.removeprefix(SUFFIX + "|")), raw()],
    "laguna": lambda: [
        pre.Split(Regex(r"(?:\r?\n)+(?!\r?\n)"), behavior="merged_with_next"),
        split(QWEN2), raw()],
    "gpt-4o llama4 kanana2 minimax-m2 granite-embed-multi-97m": lambda: [split(O200K), raw()],
    "tekken": lambda: [split(TEKKEN), raw()],
    "tiny_aya cohere2moe": lambda: [
        split(r"\d{1,3}(?=(?:\d{3})*\b)"), split(O200K), raw()],
    "youtu": lambda: [
        split(YOUTU), split(O200K.replace(r"\p{N}{1,3}", r"\p{N}")), raw()],
    "kimi-k2": lambda: [split(KIMI), raw()],
    "deepseek-llm": lambda: [
        split("[\r\n]"), split(rf"\s?[{CASED}]+"), split(rf"\s?[{MARKS}]+"), split(r"\s+$"),
        split(WIDE_CJK), digits(), raw()],
    "deepseek-coder": lambda: [
        split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split(WIDE_CJK), digits(),
        raw()],
    "deepseek-v3 hunyuan-dense joyai-llm": lambda: [
        split(r"\p{N}{1,3}"), split(CJK), split(DEEPSEEK_V3), raw()],
    "spark2_5": lambda: [
        split(r"\p{N}{1,3}"), split(CJK),
        split(DEEPSEEK_WORDS + "|[\r\n]|\\s+(?!\\S)|\\s+"), digits(), raw()],
    "afmoe": lambda: [
        split(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"), split(AFMOE_CJK), split(DEEPSEEK_V3),
        raw()],
    "jais-2": lambda: [split(JAIS2), raw()],
    "bloom poro-chat gpt3-finnish": lambda: [split(BLOOM), raw()],
    "viking": lambda: [split(BLOOM), digits(), raw()],
    "superbpe": lambda: [split(r"\p{N}+"), split(r"(?=(\d{3})+(?!\d))"), raw()],
    "bailingmoe bailingmoe2 llada-moe": lambda: [
        split(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
              r"|\s*[\r\n]|\s+(?!\S)|\s+"), raw()],
    "seed-coder": lambda: [
        split(rf"{SUFFIX}|{WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}" + "\r\n]+|\\s*[\r\n]+"
              r"|\s+(?!\S)|\s+"), raw()],
    "exaone-moe": lambda: [
        split(rf"{SUFFIX}|{LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
              r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"), raw()],
    "default": lambda: [
        split(r"[\p{P}$+<=>^~|]+"),
        split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
        pre.Digits(individual_digits=False), split("[0-9][0-9][0-9]"), raw()],
    "chameleon": lambda: [
        split("<sentinel:[0-9]+>"), split("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
        split(r"([\t\n]|    |  )"), digits(), split(r"[\p{P}!-/:-@\[-`{-~]"), gpt2()],
}
COMPOSED = {"qwen2", "deepseek-r1-qwen", "megrez", "qwen35", "command-r", "olmo", "mpt"}
NAMES = [(name, steps) for names, steps in CUTS.items() for name in names.split()]
# transformers composes no letters, so it is compared where there are none to compose.
KNOWN_TO_TRANSFORMERS = [
    "gpt-2", "llama-bpe", "llama3", "falcon3", "pixtral", "lfm2", "dbrx", "smaug-bpe", "tekken",
    "qwen2", "deepseek-r1-qwen", "megrez", "qwen35", "gpt-4o", "llama4", "kanana2", "minimax-m2",
]


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """A byte-level BPE whose merges cross every border of words, so that ids show the cut."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = raw()
    lines = [TEXT, *TEXT.splitlines(keepends=True), *(TEXT[i:] for i in range(0, 200, 7))]
    made.train_from_iterator(lines, trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>"], max_token_length=6))
    return dict(json.loads(made.to_str()))


def write(path: Path, trained: dict[str, Any], name: str) -> Path:
    vocabulary = trained["model"]["vocab"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_tokenizer_model("gpt2")
    if name:
        writer.add_tokenizer_pre(name)
    writer.add_token_list([token.encode() for token in sorted(vocabulary, key=vocabulary.get)])
    writer.add_token_types([3] + [1] * (len(vocabulary) - 1))
    writer.add_token_merges([" ".join(merge) for merge in trained["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_tensor("token_embd.weight", gguf.np.zeros((len(vocabulary), 32), "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name, steps", NAMES, ids=[name for name, _ in NAMES])
def test_cuts(
    name: str, steps: Callable[[], list[Any]], trained: dict[str, Any], tmp_path: Path
) -> None:
    want = Tokenizer.from_str(json.dumps(trained))
    want.decoder = decoders.ByteLevel()
    want.pre_tokenizer = pre.Sequence(steps())
    if name in COMPOSED:
        want.normalizer = normalizers.NFC()
    codec = TextCodec(write(tmp_path / "model.gguf", trained, "" if name == "default" else name))
    for text in (TEXT, TEXT[::-1], *TEXT.splitlines()):
        ids = codec.encode(text)
        assert ids == want.encode(text).ids, text
        whole = normalizers.NFC().normalize_str(text) if name in COMPOSED else text
        assert codec.decode(ids) == whole


@pytest.mark.parametrize("name", KNOWN_TO_TRANSFORMERS)
def test_ids_of_transformers(name: str, trained: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", trained, name)
    other = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    text = normalizers.NFC().normalize_str(TEXT)
    assert TextCodec(file).encode(text) == other(text).input_ids


@pytest.mark.parametrize("name", ["gemma4", "sarvam-moe", "whitespace"])
def test_cuts_of_characters(name: str, tmp_path: Path) -> None:
    """Merges of characters with bytes for those that are no token."""
    pieces = ["a", "b", "\u2581", "ab", "\u2581a", "\n", "\n\n"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("a", "b"), ("\u2581", "a")] + ([("\n", "\n")] if name == "sarvam-moe" else [])
    trained = {"model": {"vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges}}
    codec = TextCodec(write(tmp_path / "model.gguf", trained, name))
    start = 257
    ids = {piece: start + i for i, piece in enumerate(pieces)}
    space = [ids["\u2581"]] if name != "whitespace" else [1 + 0x20]
    text = "ab b\n\n\u00e9"
    want = [ids["ab"], *space, ids["b"], ids["\n\n"]]
    if name == "whitespace":  # A run of spaces is no word, and has no merges.
        want[-1:] = [ids["\n"], ids["\n"]]
    want += [1 + 0xC3, 1 + 0xA9]
    assert codec.encode(text, add_special_tokens=False) == want
    assert codec.decode(want) == text


def test_pieces_with_bytes(tmp_path: Path) -> None:
    """SentencePiece: ids of a LlamaTokenizer, BOS included."""
    words = ["\u2581", "t", "h", "e", "c", "a", "th", "the", "\u2581the", "\u2581c", "at",
             "\u2581cat", "\u00e9", "12", "1", "2"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_block_count(1)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token.encode() for token in tokens])
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(words))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_tensor("token_embd.weight", gguf.np.zeros((len(tokens), 32), "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    codec = TextCodec(tmp_path / "model.gguf")
    other = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    text = "the cat 12\u00e9\u6771\U0001f600\n the  cat"
    ids = codec.encode(text)
    assert ids[0] == 1 and ids == other(text).input_ids
    assert codec.encode(text, add_special_tokens=False) == ids[1:]
    assert codec.decode(ids) == text
