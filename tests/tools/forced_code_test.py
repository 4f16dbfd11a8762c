"""The comparison of a forced build with the GPU's own, on made-up measurements."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench")]

import forced_code  # noqa: E402

# A metal-marlin with a made-up GPU, on which cuBLAS takes a second.
COMMAND = """\
#!{python}
import json, sys
words = sys.argv[1:]
if words[0] == "devices":
    devices = [{{"backend": "cpu", "features": []}},
               {{"backend": "cuda", "features": ["sm_90", "code of {code}"]}}]
    print(json.dumps({{"devices": devices}}))
    sys.exit()
row = {{"format": words[words.index("--format") + 1], "kernel": "marlin_made_up", "seconds": {time},
       "sparsity": "2:4" if "2:4" in words else "dense"}}
if "--against" in words:
    row["peers"] = [{{"name": "cublas_bf16", "speedup": 1 / {time}}}]
shapes = [words[i + 1].split(",") for i, word in enumerate(words) if word == "--shape"]
print(json.dumps({{"results": [dict(row, m=int(m), n=int(n), k=int(k)) for m, n, k in shapes]}}))
"""


class ForcedCode(unittest.TestCase):
    def run_with(self, time: float) -> tuple[list[str], dict[str, Any]]:
        """Returns the lines and the record of a forced build that takes `time`, its own half."""
        with tempfile.TemporaryDirectory() as folder:
            commands = []
            for code, seconds in (("8.0", time), ("9.0", 0.5)):
                command = pathlib.Path(folder) / code
                command.write_text(COMMAND.format(python=sys.executable, code=code, time=seconds))
                command.chmod(0o755)
                commands.append(str(command))
            record = pathlib.Path(folder) / "record.json"
            line = [sys.executable, str(ROOT / "bench" / "forced_code.py"), *commands]
            done = subprocess.run([*line, "--commit", "abc", "--quick", "-o", str(record)],
                                  capture_output=True, text=True, check=True)
            return done.stdout.splitlines(), json.loads(record.read_text())

    def test_says_what_is_below_the_wanted_speed(self) -> None:
        lines, record = self.run_with(0.5)
        self.assertEqual(lines[-1], "0 below what is wanted")
        self.assertEqual([run["level"] for run in record["runs"]],
                         3 * ["code of 8.0, forced"] + 3 * ["best"])
        self.assertEqual(len(lines), 2 + 3 * len(forced_code.ROWS))
        lines, _ = self.run_with(0.7)
        below = [line for line in lines if "  < " in line]
        # One row: 0.71 of its own; 16 to 64: 1.43 of cuBLAS.
        self.assertEqual(len(below), 3 * 4)
        self.assertIn("< 0.85 of own", below[0])
        self.assertIn("< 1.5 of cuBLAS", below[1])
        self.assertEqual(lines[-1], "12 below what is wanted")


if __name__ == "__main__":
    unittest.main()
