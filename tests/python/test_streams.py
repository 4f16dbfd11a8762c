"""TextStream, whose pieces joined are TextCodec.continuation, for tokenizers of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from metal_marlin.text import TextCodec, TextStream
from tokenizers import AddedToken, Tokenizer, decoders, models

SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"
FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
TEXTS = ["In the beginning", " God said, Let there be:", "\n\n", "naïve façade", f"🙂{FAMILY}",
         "東京", "a  b "]
SPECIAL = "<end>"


def with_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As of Llama 2: pieces with a leading mark for the space, and a token for every byte."""
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁the", "▁God", "light", "é"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [],
                                     unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])
    return with_special(tokenizer)


def metaspace() -> Tokenizer:
    """As of T5: the decoder drops the mark of the first piece."""
    names = ["<unk>", "▁", "▁the", "▁God", "s", "▁said", ","]
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in names], 0))
    tokenizer.decoder = decoders.Metaspace()
    return with_special(tokenizer)


def word_piece() -> Tokenizer:
    """As of BERT: the decoder puts spaces between words and takes them away before punctuation."""
    names = ["[UNK]", "the", "##re", "god", "do", "n't", "n", "'", "t", ".", ",", "!", "'s"]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)},
                                           unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece("##", cleanup=False)
    return with_special(tokenizer)


def word_ends() -> Tokenizer:
    """As of the first GPT: a mark at the end of words, which the last one of a text loses."""
    names = ["<unk>", "the</w>", "god</w>", "sa", "id</w>", ".</w>"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return with_special(tokenizer)


def byte_level() -> Tokenizer:
    return Tokenizer.from_file(str(SAMPLE / "tokenizer.json"))


@pytest.fixture(params=[byte_level, byte_fallback, metaspace, word_piece, word_ends])
def codec(request: pytest.FixtureRequest, tmp_path: Path) -> TextCodec:
    make: Callable[[], Tokenizer] = request.param
    make().save(str(tmp_path / "tokenizer.json"))
    return TextCodec(tmp_path)


def pieces_of(codec: TextCodec, prompt: list[int], tokens: list[int]) -> list[str]:
    stream = codec.stream(prompt)
    assert isinstance(stream, TextStream)
    return [*(stream.add(token) for token in tokens), stream.finish()]


def units_of(codec: TextCodec) -> list[list[int]]:
    """What random texts are made of: any tokens, but of byte tokens whole characters. Their decoder
    makes U+FFFD of all bytes around an invalid one, also of those that were characters before."""
    single = [[token] for token in range(codec.vocab_size)]
    if codec.decode([0x41 + 1]) != "A":
        return single
    characters = [codec.encode(text, add_special_tokens=False) for text in "éä東🙂"]
    return [*characters, *(ids for ids in single if "\ufffd" not in codec.decode(ids))]


def test_pieces_are_the_continuation(codec: TextCodec) -> None:
    """Random tokens, among them incomplete characters and special ones, after random prompts."""
    draw = random.Random(7)
    units = units_of(codec)
    for _ in range(400):
        prompt, tokens = (
            [token for unit in draw.choices(units, k=draw.randrange(most)) for token in unit]
            for most in (6, 12)
        )
        got = "".join(pieces_of(codec, prompt, tokens))
        assert got == codec.continuation(prompt, tokens), (prompt, tokens)


def test_every_piece_is_of_whole_characters(codec: TextCodec) -> None:
    for text in TEXTS:
        ids = codec.encode(text, add_special_tokens=False)
        for split in range(len(ids) + 1):
            prompt, tokens = ids[:split], ids[split:]
            pieces = pieces_of(codec, prompt, tokens)
            assert "".join(pieces) == codec.continuation(prompt, tokens)
            if "\ufffd" not in codec.continuation(prompt, tokens):
                assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_of_several_tokens_comes_at_once() -> None:
    codec = TextCodec(SAMPLE)
    prompt, smile = codec.encode("a"), codec.encode("🙂")
    assert len(smile) > 1
    assert pieces_of(codec, prompt, smile) == [*[""] * (len(smile) - 1), "🙂", ""]
    # What never becomes a character is shown at the end.
    assert pieces_of(codec, prompt, smile[:-1])[-1] == codec.continuation(prompt, smile[:-1]) != ""
    # A character that the prompt began.
    assert pieces_of(codec, [*prompt, smile[0]], smile[1:])[-2] == "🙂"


def test_a_text_that_changes_is_shown_on(tmp_path: Path) -> None:
    """A decoder that takes back the space before a full stop; DecodeStream alone raises there."""
    tokenizer = word_piece()
    tokenizer.decoder = decoders.Sequence([
        decoders.WordPiece("##", cleanup=False), decoders.Fuse(), decoders.Replace("god .", "GOD."),
    ])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path)
    (god,), (stop,), (the,) = (tokenizer.encode(word).ids for word in ("god", ".", "the"))
    assert codec.continuation([the], [god, stop]) == " GOD."
    assert pieces_of(codec, [the], [god, stop, the])[0] == " god"
    assert pieces_of(codec, [the], [god, stop, the])[-2] == " the"
