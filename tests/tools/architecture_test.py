"""docs/architecture.md against the sources: the names, the picture of the layers, the glossary."""

from __future__ import annotations

import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_layers  # noqa: E402
import check_paths  # noqa: E402
import check_words  # noqa: E402
import layer_picture  # noqa: E402

PAGE = (ROOT / "docs" / "architecture.md").read_text()
GLOSSARY = PAGE.split("\n## Glossary\n", 1)[1]
SOURCES = ("include", "src", "python", "metal_sim", "tests", "tools")


def rows() -> list[list[str]]:
    """The cells of the glossary's entries: word, meaning, identifiers, words that are not used."""
    found = [[cell.strip() for cell in line.strip("|").split(" | ")]
             for line in GLOSSARY.splitlines() if line.startswith("| ")]
    return [row for row in found[1:] if not row[0].startswith("**")]


def words_of_sources() -> set[str]:
    words: set[str] = set()
    for path in check_paths.project_files(ROOT):
        parts = path.relative_to(ROOT).parts
        if parts[0] in SOURCES and path.suffix in check_paths.TEXT and path.is_file():
            # This test and the words that are refused prove nothing.
            if path.name not in ("architecture_test.py", "check_words.py"):
                words.update(re.findall(r"\w+", path.read_text(errors="replace")))
    return words


class Architecture(unittest.TestCase):
    def test_names_exist(self) -> None:
        used = PAGE.split("\n## Glossary\n", 1)[0] + "\n".join(" ".join(row[:3]) for row in rows())
        words = words_of_sources()
        names = set(re.findall(r"`([^`]+)`", used))
        self.assertGreater(len(names), 150)
        paths = {name for name in names if "/" in name or re.search(r"\.\w+$", name)}
        identifiers = {part for name in names - paths for part in re.findall(r"\w{3,}", name)}
        self.assertEqual(sorted(identifiers - words), [], "no such names")

    def test_files_exist(self) -> None:
        files = [path.relative_to(ROOT).as_posix() for path in check_paths.project_files(ROOT)]
        missing = []
        for name in re.findall(r"`([\w./*]+(?:/|\.(?:cc|cuh?|h|def|py|md)))`", PAGE):
            pattern = re.compile(r"(?:.*/)?" + re.escape(name).replace(r"\*", "[^/]*"))
            if not any(pattern.match(file) for file in files):
                missing.append(name)
        self.assertEqual(missing, [])

    def test_the_picture_is_the_table(self) -> None:
        self.assertEqual(layer_picture.PICTURE.read_text(),
                         layer_picture.draw(check_layers.MAY_INCLUDE),
                         "run tools/layer_picture.py")

    def test_every_layer_of_the_table_is_drawn_once(self) -> None:
        picture = layer_picture.draw(check_layers.MAY_INCLUDE)
        for layer in check_layers.MAY_INCLUDE:
            self.assertEqual(picture.count(f">{layer}</text>"), 1, layer)

    def test_a_layer_without_a_place_is_an_error(self) -> None:
        with self.assertRaises(KeyError):
            layer_picture.draw({**check_layers.MAY_INCLUDE, "gadgets": ("base",)})

    def test_an_arrow_that_points_up_is_an_error(self) -> None:
        with self.assertRaisesRegex(ValueError, "arrow"):
            layer_picture.draw({"ops": (), "base": ("ops",)})

    def test_the_glossary_has_the_words_of_the_check(self) -> None:
        refused = {row[0]: re.findall(r"`([^`]+)`", row[3]) for row in rows() if row[3]}
        written = {word: terms for words, terms in refused.items() for word in words.split(", ")
                   if word in check_words.TERMS}
        self.assertEqual(written, {word: list(terms) for word, terms in check_words.TERMS.items()})
        self.assertEqual(sum(map(len, refused.values())), sum(map(len, written.values())))

    def test_entries_have_four_cells_and_a_meaning(self) -> None:
        for row in rows():
            self.assertEqual(len(row), 4, row)
            self.assertTrue(row[1], row)


if __name__ == "__main__":
    unittest.main()
