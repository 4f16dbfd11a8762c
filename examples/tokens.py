"""Text to token ids and back, by the tokenizer of a model: what run-c and run-cpp read and print.

Usage: tokens.py encode MODEL TEXT | tokens.py decode MODEL < token ids

Needs the package `tokenizers`. `decode` prints text as the ids arrive.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def main() -> None:
    command, model, *text = sys.argv[1:]
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    if command == "encode":
        print(*tokenizer.encode(text[0]).ids)
        return
    stream = DecodeStream(skip_special_tokens=True)
    for line in sys.stdin:
        for token in line.split():
            print(stream.step(tokenizer, int(token)) or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
