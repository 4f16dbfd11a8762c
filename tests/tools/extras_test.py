"""The packages that the Python package needs, as scripts read them and as a page explains them."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

try:
    import extras
except ModuleNotFoundError:  # Python 3.10 without pip
    sys.exit(77)


def listed(*names: str) -> list[str]:
    done = subprocess.run([sys.executable, "-B", ROOT / "tools/extras.py", *names],
                          capture_output=True, text=True, check=True)
    return done.stdout.split()


class Extras(unittest.TestCase):
    def test_packages_of_an_extra(self) -> None:
        chat, serve = listed("chat"), listed("serve")
        self.assertTrue(any(package.startswith("rich>=") for package in chat))
        self.assertTrue(any(package.startswith("fastapi>=") for package in serve))
        self.assertEqual(listed("serve", "chat"), serve + chat)

    def test_an_unknown_extra_is_an_error(self) -> None:
        done = subprocess.run([sys.executable, "-B", ROOT / "tools/extras.py", "serv"],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("'serv' is not one of the extras", done.stderr)

    def test_every_package_has_a_line_with_its_reason(self) -> None:
        page = (ROOT / "docs/decisions/dependencies.md").read_text()
        project = extras.tomllib.loads(extras.PROJECT.read_text())["project"]
        groups = [project["dependencies"], *project["optional-dependencies"].values()]
        for package in (name for group in groups for name in group):
            name = re.split(r"[><=\[]", package)[0]
            self.assertIn(f"`{name}`", page)


if __name__ == "__main__":
    unittest.main()
