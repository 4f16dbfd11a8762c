"""Runs the examples of the documents with the installed package: the Python blocks of each page in
one process and directory, and every console block with the package's command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(f"docs/howto/{n}.md" for n in (
    "python", "pytorch", "mlx", "experts", "import", "export"))]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert blocks
    if page.endswith("mlx.md"):
        pytest.importorskip("mlx.core")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    code = "\n".join(blocks)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_commands_of_the_package_run() -> None:
    """Runs the ctest of the plain command with the command that has a tokenizer."""
    done = subprocess.run(
        [sys.executable, "-B", ROOT / "tests/examples/documents_test.py"],
        env={**os.environ, "METAL_MARLIN": str(Path(sys.executable).parent / "metal-marlin")},
        capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
