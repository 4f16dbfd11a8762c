"""The tables of sources and targets in the documents list every reader and every writer."""

from __future__ import annotations

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def rows(table: str, macro: str) -> list[str]:
    """Returns the first argument of every row of a .def file, without its dot."""
    text = (ROOT / "src" / "checkpoint" / table).read_text()
    return [name.removeprefix(".") for name in re.findall(rf'^{macro}\("([^"]+)"', text, re.M)]


def cells(page: str) -> str:
    """Returns the first column of all tables of a page."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return "\n".join(line.split("|")[1] for line in lines if line.startswith("|"))


class CheckpointDocs(unittest.TestCase):
    def test_import_lists_every_reader(self) -> None:
        methods = [name for name in rows("readers.def", "MARLIN_QUANT_METHOD")
                   if name != "metal_marlin"]
        containers = [name for name in rows("readers.def", "MARLIN_CONTAINER")
                      if name != "safetensors"]
        self.assertIn("gptq", methods)
        self.assertEqual(containers, ["gguf", "onnx"])
        sources = cells("howto/import.md")
        for name in methods:
            self.assertIn(f"`{name}`", sources)
        for name in containers:
            self.assertIn(f"`.{name}`", sources)
            self.assertTrue((ROOT / "docs" / "formats" / f"{name}.md").exists(), name)
        found = re.findall(r"`([^`.]+)`", sources[sources.index("directories of"):])
        self.assertEqual(sorted(found), sorted(methods))

    def test_foreign_lists_every_method(self) -> None:
        first = cells("formats/foreign.md").replace("MLX's `quantization`", "`mlx`")
        for name in rows("readers.def", "MARLIN_QUANT_METHOD"):
            if name != "metal_marlin":
                self.assertIn(f"`{name}`", first)

    def test_export_lists_every_writer(self) -> None:
        targets = re.findall(r"^ `([^`]+)` $", cells("howto/export.md"), re.M)
        writers = [*rows("writers.def", "MARLIN_WRITER"),
                   *rows("writers.def", "MARLIN_CONTAINER_WRITER"), "plain"]
        self.assertEqual(sorted(set(targets) & set(writers)), sorted(writers))


if __name__ == "__main__":
    unittest.main()
