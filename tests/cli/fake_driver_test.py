"""Builds with CUDA where the driver, which fake_driver.c plays, is too old or finds no GPU."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import unittest

from command_line import QWEN, USAGE, CommandTestCase, run

SOURCE = pathlib.Path(__file__).with_name("fake_driver.c")
COMPILER = shutil.which("cc")


def has_cuda() -> bool:
    done = run("doctor", "--json", "--offline")
    return any(each["name"].startswith("cuda") and "this build: CUDA" in each["found"]
               for each in json.loads(done.stdout)["findings"])


@unittest.skipUnless(COMPILER and os.uname().sysname == "Linux", "no C compiler, or no Linux")
class FakeDriver(CommandTestCase):
    def setUp(self) -> None:
        super().setUp()
        if not has_cuda():
            self.skipTest("a build without CUDA")
        subprocess.run([str(COMPILER), "-shared", "-fPIC", SOURCE, "-o",
                        self.directory / "libcuda.so.1"], check=True)

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items()
                if name not in ("METAL_MARLIN_DEVICE", "CUDA_VISIBLE_DEVICES")}
        return {**kept, "LD_LIBRARY_PATH": str(self.directory), **variables}

    def row(self, **variables: str) -> dict[str, str]:
        """The row "cuda" of doctor, which is no error."""
        done = run("doctor", "--json", "--offline", env=self.environment(**variables))
        self.assertEqual(done.returncode, 0, done.stderr)
        rows: list[dict[str, str]] = json.loads(done.stdout)["findings"]
        return next(each for each in rows if each["name"] == "cuda")

    def test_doctor_says_that_the_driver_is_too_old(self) -> None:
        # Clusters set the variable on all machines: it is not the reason here.
        for hidden in ({}, {"CUDA_VISIBLE_DEVICES": "0"}):
            row = self.row(FAKE_VERSION="11080", **hidden)
            self.assertEqual(row["state"], "warning")
            self.assertIn("the driver is for CUDA 11.8, this build for ", row["found"])
            self.assertIn("update NVIDIA's driver to one for CUDA ", row["advice"])

    def test_doctor_says_that_no_device_is_found(self) -> None:
        row = self.row(FAKE_VERSION="99000")
        self.assertEqual(row["state"], "warning")
        self.assertIn("no CUDA-capable device is detected", row["found"])
        self.assertIn("nvidia-smi", row["advice"])
        row = self.row(FAKE_VERSION="99000", CUDA_VISIBLE_DEVICES="")
        self.assertIn("CUDA_VISIBLE_DEVICES=''", row["advice"])

    def test_models_run_on_the_cpu(self) -> None:
        tokens = self.directory / "tokens"
        tokens.write_text("1 2 3")
        prompt = ("generate", QWEN, "--tokens", tokens, "--max-tokens", "2")
        old = self.environment(FAKE_VERSION="11080")
        done = run(*prompt, env=old)
        self.assertEqual(done.returncode, 0, done.stderr)
        done = run(*prompt, "--device", "cuda", env=old)
        self.assertEqual(done.returncode, USAGE)
        self.assertRegex(done.stderr, r"^metal-marlin: error: cuda: no CUDA device \([^\n]*\)\n$")


if __name__ == "__main__":
    unittest.main()
