"""metal-sim: an endless kernel is an error at its time limit."""

from __future__ import annotations

import json
import unittest

from command_line import USAGE, CommandTestCase, run

KERNELS = """
#include <metal_stdlib>
using namespace metal;
kernel void nothing(device float* data [[buffer(0)]]) { while (true) {} }
kernel void reads(device float* data [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  while (data[i] < 1.0f) {}
}
"""
LAUNCH = ("--threads", 2, "--buffer", "0=float:2", "--runs", 1, "--time-limit", 5)


class TimeLimit(CommandTestCase):
    def test_endless_kernels(self) -> None:
        source = self.directory / "endless.metal"
        source.write_text(KERNELS)
        listed = run("metal-sim", source, "--list")
        if listed.returncode == USAGE and "needs clang" in listed.stderr + listed.stdout:
            self.skipTest("no clang++ that is new enough")
        if "no simulator" in listed.stderr:
            self.skipTest("built without the simulator")
        for kernel in ("nothing", "reads"):
            with self.subTest(kernel):
                self.refuse(USAGE, "metal-sim", source, "--kernel", kernel, *LAUNCH,
                            says=("more than 5 s", "--time-limit"))
        done = run("metal-sim", source, "--kernel", "nothing", *LAUNCH, "--json")
        self.assertEqual(done.returncode, USAGE)
        self.assertEqual(json.loads(done.stdout)["error"]["code"], "invalid_argument")


if __name__ == "__main__":
    unittest.main()
