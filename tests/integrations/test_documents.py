"""Runs the Python examples of the documents, each page in one process and directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(f"docs/howto/{n}.md" for n in ("python", "pytorch", "mlx"))]


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
