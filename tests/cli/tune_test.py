"""tune: the table that it writes, how the library uses it, and hostile tables."""

from __future__ import annotations

import os
import pathlib
import unittest
from typing import Any
from unittest import mock

from command_line import IO, MALFORMED, QWEN, USAGE, CommandTestCase

SMALL = ("--device", "cpu", "--copies", 1)


class Tune(CommandTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.file = self.directory / "folder" / "tuning.txt"
        patch = mock.patch.dict(os.environ, {"XDG_CONFIG_HOME": str(self.directory / "config")})
        patch.start()
        self.addCleanup(patch.stop)
        os.environ.pop("METAL_MARLIN_TUNING", None)

    def use(self, path: object) -> None:
        os.environ["METAL_MARLIN_TUNING"] = str(path)

    def cpu(self) -> Any:
        (device,) = [d for d in self.document("devices")["devices"] if d["backend"] == "cpu"]
        return device

    def has_choice(self) -> bool:
        exact = [k for k in self.cpu()["kernels"] if k["available"] and "w4a8" not in k["name"]]
        return len(exact) > 1

    def write(self, *lines: str) -> pathlib.Path:
        path = self.directory / "t.txt"
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def test_writes_and_reads(self) -> None:
        if not self.has_choice():
            self.skipTest("one kernel")
        document = self.document("tune", *SMALL, "--shape", "2,128,256", "--shape", "16,128,256",
                                 "--format", "nf4", "-o", self.file, "--commit", "abc")
        self.assertEqual([row["m"] for row in document["results"]], [2, 16])
        for row in document["results"]:
            names = [kernel["kernel"] for kernel in row["kernels"]]
            self.assertIn(row["fastest"], names)
            self.assertEqual(sum(kernel["planned"] for kernel in row["kernels"]), 1)
            for kernel in row["kernels"]:
                self.assertGreater(kernel["seconds"], 0)
        lines = self.file.read_text().splitlines()
        self.assertEqual(lines[0], "metal-marlin tuning 2")
        self.assertEqual(os.listdir(self.file.parent), ["tuning.txt"])
        entry = "nf4 128 fp16 none bf16 bf16 plain 128 256 "
        self.assertEqual(sum(line.startswith(entry) for line in lines), 2)
        self.use(self.file)
        device = self.cpu()
        self.assertEqual((device["measured_products"], device["tuning_file"]),
                         (2, str(self.file)))
        self.assertIn(str(self.file), self.succeed("devices"))

    def test_keeps_what_is_not_measured_anew(self) -> None:
        if not self.has_choice():
            self.skipTest("one kernel")
        self.file.parent.mkdir()
        self.file.write_text("metal-marlin tuning 1\ndevice Another\n"
                             "u4 128 bf16 plain 64 64 1 some_kernel@3x4 17\n")
        for m in (1, 4):
            self.succeed("tune", *SMALL, "--shape", f"{m},64,64", "-o", self.file)
        text = self.file.read_text()
        self.assertIn("some_kernel@3x4 17", text)
        self.assertNotIn("64 64 1 marlin", text)  # The entries of a matrix are replaced as a whole.
        self.assertIn("64 64 4 marlin", text)

    def test_default_place(self) -> None:
        if not self.has_choice():
            self.skipTest("one kernel")
        self.succeed("tune", *SMALL, "--shape", "1,64,64")
        path = self.directory / "config/metal-marlin/tuning.txt"
        self.assertTrue(path.exists())
        self.assertEqual(self.cpu()["tuning_file"], str(path))
        self.use("")
        self.assertEqual(self.cpu()["tuning_file"], "")

    def test_the_table_chooses(self) -> None:
        scalar = [k for k in self.cpu()["kernels"] if k["name"] == "marlin_gemm_scalar"]
        self.assertTrue(scalar[0]["available"])

        def chosen(*lines: str) -> str:
            self.use(self.write("metal-marlin tuning 1", f"device {self.cpu()['model']}", *lines))
            document = self.document("bench", "gemm", "--device", "cpu", "--shape", "1,64,64",
                                     "--copies", 1)
            os.environ.pop("METAL_MARLIN_TUNING")
            return str(document["results"][0]["kernel"])

        entry = "fp4_e2m1 128 bf16 plain 64 64 1 {} 5"
        ruled = chosen()
        self.assertEqual(chosen(entry.format("marlin_gemm_scalar")), "marlin_gemm_scalar")
        for name in ("marlin_gemm_absent", "marlin_gemm_scalar@32x1", "marlin_gemm_w4a8_scalar"):
            self.assertEqual(chosen(entry.format(name)), ruled)
        self.assertEqual(chosen("device Another", entry.format("marlin_gemm_scalar")), ruled)

    def test_hostile_tables(self) -> None:
        shape = ("bench", "gemm", "--device", "cpu", "--shape", "1,64,64", "--copies", 1)
        for text, says in (
                ("", "expected 'metal-marlin tuning 2'"),
                ("metal-marlin tuning 7\n", "version '7', and this library reads 1 and 2"),
                ('{"version": 1}', "expected 'metal-marlin tuning 2'"),
                ("\0" * 5000, "line 1: expected"),
                ("metal-marlin tuning 1\ndevice a\nfp4_e2m1 1 2\n", "line 3: expected format"),
                ("metal-marlin tuning 1\n" + "x" * 100000 + "\n", "line 2: expected a device"),
        ):
            path = self.directory / "hostile.txt"
            path.write_text(text)
            self.use(path)
            self.refuse(MALFORMED, *shape, says=(says, str(path)))
            # An unreadable table is not overwritten either.
            self.refuse(MALFORMED, "tune", *SMALL, "--shape", "1,64,64", "-o", path, says=(says,))
        for path, says in ((self.directory / "absent", "no such tuning file"),
                           (self.directory, "is not a regular file"),
                           (pathlib.Path("/dev/zero"), "is not a regular file")):
            self.use(path)
            self.refuse(IO, *shape, says=(says,))

    def test_wrong_use(self) -> None:
        for arguments, says in (
                (("--shape", "1,2"), "--shape: expected M,N,K"),
                (("--shape", "1,64,64", "--model", QWEN), "expected --shape or --model, got both"),
                (("--gated",), "--gated: belongs to --shape"),
                (("--format", "fp5"), "fp5"),
                (("--threads", "0"), "--threads: expected 1..4096"),
                (("--shape", "1,64,64", "--group-size", "7"), "--group-size"),
        ):
            self.refuse(USAGE, "tune", *SMALL, *arguments, "-o", self.file, says=(says,))
        self.refuse(IO, "tune", *SMALL, "--shape", "1,64,64", "-o", "/dev/null/tuning.txt")
        self.refuse(IO, "tune", *SMALL, "--shape", "1,64,64", "-o", self.directory,
                    says=("regular file",))
        self.assertFalse(self.file.exists())

    def test_nothing_to_choose(self) -> None:
        with mock.patch.dict(os.environ, {"MARLIN_CPU": "scalar"}):
            self.refuse(USAGE, "tune", *SMALL, "--shape", "1,64,64", "-o", self.file,
                        says=("one kernel for each of these GEMMs",))
        self.assertFalse(self.file.exists())
        self.assertEqual(os.listdir(self.file.parent), [])

    def test_a_model(self) -> None:
        if not self.has_choice():
            self.skipTest("one kernel")
        document = self.document("tune", *SMALL, "--model", QWEN, "-o", self.file)
        shapes = {(row["n"], row["k"], row["gated"]) for row in document["results"]}
        self.assertTrue(any(gated for _, _, gated in shapes))
        self.assertTrue(any(not gated for _, _, gated in shapes))
        self.assertEqual({row["m"] for row in document["results"]}, {1, 2, 4, 8, 16, 32, 64, 128})


if __name__ == "__main__":
    unittest.main()
