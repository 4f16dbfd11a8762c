"""doctor: its table and document, what settings break, and that secrets stay unprinted."""

from __future__ import annotations

import json
import os
import re
import unittest
from typing import Any

from command_line import USAGE, CommandTestCase, run

OURS = re.compile(r"(METAL_)?MARLIN_|METAL_SIM_|METAL_MARLIN$")
CLEAN = {name: value for name, value in os.environ.items()
         if not OURS.match(name) and name != "CUDA_VISIBLE_DEVICES"}


class Doctor(CommandTestCase):
    def examine(self, *options: str, code: int = 0, **variables: str) -> dict[str, Any]:
        """The findings by name, of a run with these variables of this project and no others."""
        done = run("doctor", "--json", *options, env={**CLEAN, **variables})
        self.assertEqual(done.returncode, code, done.stderr)
        return self.by_name(done.stdout, code)

    def by_name(self, text: str, code: int) -> dict[str, Any]:
        document = json.loads(text)
        self.assertEqual(document["ok"], code == 0)
        for finding in document["findings"]:
            self.assertEqual(list(finding), ["group", "name", "state", "found", "advice"])
            self.assertIn(finding["state"], ("ok", "warning", "missing", "broken"))
            self.assertTrue(finding["found"], finding)
        return {finding["name"]: finding for finding in document["findings"]}

    def test_the_table_has_the_rows_of_the_document(self) -> None:
        found = self.examine()
        text = run("doctor", env=CLEAN).stdout
        for name, finding in found.items():
            self.assertRegex(text, rf"\n  {finding['state']} +{re.escape(name)} +\S")
        for group in ("This machine", "GPUs", "Settings", "Python package"):
            self.assertRegex(text, rf"(^|\n){group}\n")
        self.assertRegex(text, r"\n\d+ ok(, \d+ (warning|missing))+\n$")
        self.assertLessEqual(max(map(len, text.splitlines())), 100)

    def test_it_agrees_with_devices(self) -> None:
        found = self.examine()
        devices = self.document("devices")["devices"]
        self.assertIn(devices[0]["model"], found["processor"]["found"])
        self.assertIn(" ".join(devices[0]["features"]).replace(" ", ", "),
                      found["processor"]["found"])
        gpus = {name for name, each in found.items()
                if name.startswith("cuda:") and each["state"] != "missing"
                and "this build has code" not in each["found"]}
        self.assertEqual({"cpu", *gpus}, {each["name"] for each in devices} - {"metal"})
        self.assertIn(f"{devices[0]['threads']} of ", found["threads"]["found"])

    def test_the_program_without_tokenizers_says_so(self) -> None:
        package = self.examine()["package"]
        self.assertEqual(package["state"], "missing")
        self.assertIn("pip install", package["advice"])

    def test_what_was_asked_for_and_does_not_work_is_an_error(self) -> None:
        missing = str(self.directory / "none")
        wrong = self.directory / "wrong"
        wrong.write_text("no table")
        for name, value, row in (("METAL_MARLIN_DEVICE", "cuda:99", "device"),
                                 ("METAL_MARLIN_DEVICE", "gpu", "device"),
                                 ("METAL_MARLIN_CPU", "avx3", "processor"),
                                 ("METAL_MARLIN_TUNING", missing, "tuning"),
                                 ("MARLIN_TUNING", str(wrong), "tuning")):
            found = self.examine(code=USAGE, **{name: value})
            self.assertEqual(found[row]["state"], "broken", name)
            self.assertIn(value, found[row]["found"])
            self.assertTrue(found[row]["advice"])
        found = self.examine("--device", "cuda:99", code=USAGE, METAL_MARLIN_DEVICE="cpu")
        self.assertIn("--device", found["device"]["advice"])
        done = run("doctor", "--device", "cuda:99", env=CLEAN)
        self.assertEqual(done.returncode, USAGE)
        self.assertEqual(done.stderr, "metal-marlin: error: doctor: asked for and broken: device\n")
        self.assertIn("broken", done.stdout)

    def test_a_device_that_works(self) -> None:
        self.assertRegex(self.examine("--device", "cpu")["device"]["found"], r"^--device names cpu")
        found = self.examine(METAL_MARLIN_DEVICE="cpu")
        self.assertRegex(found["device"]["found"], r"^METAL_MARLIN_DEVICE names cpu \(")
        self.assertEqual(found["METAL_MARLIN_DEVICE"]["found"], "cpu")

    def test_names_that_nothing_reads(self) -> None:
        found = self.examine(METAL_MARLIN_DEVIEC="cpu", METAL_MARLIN_API_KEY="topsecret",
                             METAL_MARLIN_APIKEY="topsecret")
        self.assertEqual(found["METAL_MARLIN_DEVIEC"]["state"], "warning")
        self.assertIn("'METAL_MARLIN_DEVICE'", found["METAL_MARLIN_DEVIEC"]["found"])
        self.assertNotIn("topsecret", str(found))
        self.assertNotIn("variables", found)

    def test_wrong_use(self) -> None:
        self.refuse(USAGE, "doctor", "--ofline", says=("did you mean '--offline'?",))
        self.refuse(USAGE, "docter", says=("did you mean 'doctor'?",))


if __name__ == "__main__":
    unittest.main()
