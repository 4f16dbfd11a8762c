"""The parts of the documents' site: the reference of the headers, links and lists."""

from __future__ import annotations

import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/website"))

try:
    import headers
    import links
    import lists
    import python_api
except ModuleNotFoundError:  # Python 3.10 without pip
    sys.exit(77)

HEADER = """\
// A made-up header.
#pragma once

namespace marlin {

/// A class.
class Box {
 public:
  Box() : width_(0), names_{} {}
  /// Its width.
  int width() const { return width_; }

 private:
  int width_ = 0;
};

/// Opens [k, n] values of a kBox, "a[0]" or Box::width().
/// - one
Result<int> Open(const Box& box);
Result<int> Open(int width);

inline int Twice(int a) { return a > 0 ? 2 * a : 0; }
constexpr int kMost = 3;

}  // namespace marlin
"""


class Headers(unittest.TestCase):
    def test_declarations_without_bodies_and_private_members(self) -> None:
        found = {found.name: found for found in headers.declarations(HEADER)}
        self.assertEqual(list(found), ["Box", "Open", "Twice", "kMost"])
        self.assertEqual(found["Box"].code, "class Box {\n public:\n  Box();\n  /// Its width.\n"
                                            "  int width() const;\n};")
        self.assertEqual(found["Twice"].code, "inline int Twice(int a);")
        self.assertEqual(found["Box"].comment, "A class.")

    def test_overloads_are_one_and_comments_are_literal(self) -> None:
        page = headers.page("box.h", HEADER, {"Box": "reference/cpp/box.h.md#Box"})
        self.assertEqual(page.count("## Open"), 1)
        self.assertIn("Opens `[k, n]` values of a `kBox`, `\"a[0]\"` or `Box::width()`.\n\n- one",
                      page)
        self.assertIn("Types: [`Box`](box.h.md#Box)", page)

    def test_every_public_name_is_in_the_reference(self) -> None:
        """Names are found here by their form, by the reference by scanning."""
        forms = (r"^MARLIN_C_API[^;(]*?(\w+)\(", r"^(?:class|struct|enum class)(?: \[\[\w+\]\])? "
                 r"(\w+)(?! *;)\b", r"^using (\w+)", r"^[A-Z][\w:<>&* ]* (\w+)\(")
        pages = headers.pages(ROOT)
        found = 0
        for path in sorted((ROOT / "include/marlin").glob("*.h")):
            page = pages[f"reference/cpp/{path.name}.md"]
            text = re.sub(r"^(?:class|struct) \w+;$", "", path.read_text(), flags=re.MULTILINE)
            for name in (name for form in forms for name in re.findall(form, text, re.MULTILINE)):
                self.assertRegex(page, rf"\b{name}\b", path.name)
                found += 1
        self.assertGreater(found, 350)

    def test_what_the_package_exports_is_in_the_reference(self) -> None:
        pages = python_api.pages(ROOT)
        self.assertIn("::: metal_marlin.Model\n\n::: metal_marlin.load\n",
                      pages["reference/python/models.md"])
        self.assertIn("::: metal_marlin.results.ComparedPerplexity",
                      pages["reference/python/results.md"])
        self.assertIn("::: metal_marlin.torch.linear", pages["reference/python/torch.md"])


class Links(unittest.TestCase):
    def test_links_to_pages_and_sources(self) -> None:
        text = "[a](../../README.md#use) [b](../README.md) [c](../../src/a.cc) `[d](../e.md)`\n"
        self.assertEqual(
            links.rewritten("docs/howto/x.md", text),
            "[a](../index.md#use) [b](../contents.md) [c](../src/a.cc.md) `[d](../e.md)`\n")
        self.assertEqual(links.rewritten("README.md", "[a](docs/howto/x.md) [b](#c) [d](http://e)"),
                         "[a](howto/x.md) [b](#c) [d](http://e)")
        self.assertEqual(
            links.rewritten("docs/x.md",
                            "[h](../include/marlin/moe.h) [f](../include/marlin/formats.def)"),
            "[h](reference/cpp/moe.h.md) [f](include/marlin/formats.def.md)")

    def test_links_to_a_repository(self) -> None:
        self.assertEqual(links.rewritten("docs/x.md", "[s](../src/a.cc#L3) ![p](images/p.svg)",
                                         "https://example.org/m"),
                         "[s](https://example.org/m/blob/main/src/a.cc#L3) ![p](images/p.svg)")


class Lists(unittest.TestCase):
    def test_contents_are_four_columns_from_the_mark(self) -> None:
        cases = {
            "1. a\n\n   ```text\n   b\n   ```\n": "1. a\n\n    ```text\n    b\n    ```\n",
            "- a\n  - b\n    c\n- d\n": "- a\n    - b\n        c\n- d\n",
            "a\n- b\n": "a\n\n- b\n",
            "- a\nlazy\n\nb\n": "- a\n    lazy\n\nb\n",
            "```text\n- a\n  - b\n```\n": "```text\n- a\n  - b\n```\n",
            "    - code\n": "    - code\n",
            "| `a\\|b` | c\\|d |\n": "| `a|b` | c\\|d |\n",
        }
        for text, expected in cases.items():
            self.assertEqual(lists.indented(text), expected)


if __name__ == "__main__":
    unittest.main()
