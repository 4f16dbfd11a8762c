"""metal-sim: running and checking kernels, the page that explains it, and wrong input."""

from __future__ import annotations

import re
import shlex
import struct
import unittest

from command_line import IO, MALFORMED, ROOT, USAGE, CommandTestCase, run

PAGE = ROOT / "docs/howto/metal-sim.md"

SCALE = """
#include <metal_stdlib>
using namespace metal;
constant float factor [[function_constant(0)]];
kernel void scale(device float* data [[buffer(0)]], constant uint& count [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  if (i < count) data[i] *= factor;
}
kernel void fill(device half* out [[buffer(3)]], uint i [[thread_position_in_grid]]) {
  out[i] = half(i) / 4;
}
"""
LAUNCH = ("--kernel", "scale", "--grid", 2, "--threads", 32, "--buffer", "0=float:50:iota",
          "--value", "1=uint:50", "--constant", "0=float:0.5")


class MetalSim(CommandTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.source = self.directory / "scale.metal"
        self.source.write_text(SCALE)
        listed = run("metal-sim", self.source, "--list")
        if listed.returncode == USAGE and "needs clang" in listed.stderr + listed.stdout:
            self.skipTest("no clang++ that is new enough")
        if "no simulator" in listed.stderr:
            self.skipTest("built without the simulator")

    def test_lists_kernels(self) -> None:
        kernels = self.document("metal-sim", self.source, "--list")["kernels"]
        self.assertEqual([kernel["name"] for kernel in kernels], ["scale", "fill"])
        self.assertEqual([a["index"] for a in kernels[0]["arguments"]], [0, 1])

    def test_runs(self) -> None:
        out = self.directory / "out.bin"
        document = self.document("metal-sim", self.source, *LAUNCH, "--print", 0,
                                 "--output", f"0={out}")
        self.assertEqual(document["findings"], [])
        self.assertEqual(document["buffers"][0]["values"][:4], ["0", "0.5", "1", "1.5"])
        self.assertEqual(struct.unpack("<50f", out.read_bytes()), tuple(i / 2 for i in range(50)))
        again = self.document("metal-sim", self.source, *LAUNCH[:6], "--buffer", f"0=float:@{out}",
                              *LAUNCH[8:], "--print", 0)
        self.assertEqual(again["buffers"][0]["values"][4], "1")

    def test_writes_the_buffer_that_was_asked_for(self) -> None:
        out = self.directory / "out.bin"
        self.document("metal-sim", self.source, "--kernel", "fill", "--buffer", "0=float:50:iota",
                      "--buffer", "3=half:32:none", "--output", f"3={out}")
        self.assertEqual(struct.unpack("<32e", out.read_bytes()), tuple(i / 4 for i in range(32)))

    def test_page(self) -> None:
        """The page's source and commands produce the output that it shows."""
        blocks = re.findall(r"```(metal|console)\n(.*?)```", PAGE.read_text(), re.DOTALL)
        self.assertGreaterEqual(len(blocks), 2)
        for kind, text in blocks:
            if kind == "metal":
                (self.directory / "sum.metal").write_text(text)
                continue
            command, _, shown = text.partition("\n")
            words = shlex.split(command.removeprefix("$ metal-marlin "))
            done = run(*words, cwd=self.directory)
            self.assertEqual((done.stdout + done.stderr).strip(), shown.strip())

    def test_finds_what_is_wrong(self) -> None:
        done = run("metal-sim", self.source, *LAUNCH[:6], "--buffer", "0=float:40", *LAUNCH[8:])
        self.assertEqual(done.returncode, MALFORMED)
        self.assertIn("scale.metal:7: ", done.stdout)
        self.assertIn("1 finding", done.stderr)

    def test_checks_address_spaces(self) -> None:
        self.assertEqual(run("metal-sim", self.source, "--type-check").returncode, 0)
        self.source.write_text("float f(threadgroup float* x) { return x[0]; }\n"
                               "kernel void g(device float* x) { x[1] = f(x); }\n")
        done = run("metal-sim", self.source, "--type-check")
        self.assertEqual(done.returncode, MALFORMED)
        self.assertIn("scale.metal:2:41: error: no matching function", done.stdout)
        self.assertIn("scale.metal: 1 finding", done.stderr)

    def test_refuses(self) -> None:
        def refuse(*arguments: object, says: str) -> None:
            self.refuse(USAGE, "metal-sim", self.source, *arguments, says=(says,))

        refuse(says="--kernel")
        refuse("--kernel", "none", says="there are: scale, fill")
        refuse("--kernel", "fill", says="(buffer 3) is not bound")
        refuse("--buffer", "0=floaty:3", says="expected one of float")
        refuse("--buffer", "zero=float:3", says="INDEX=")
        refuse("--buffer", "0=float:0", says="a count from 1")
        refuse("--buffer", "0=float:3:threes", says="zeros, ones")
        refuse("--value", "0=uchar:256", says="from 0 to 255")
        refuse("--grid", "0", says="--grid")
        refuse("--threads", "1,2,3,4", says="--threads")
        refuse("--print", "5", says="the index of a --buffer")
        refuse("--runs", 0, says="--runs")
        refuse("--preemption", 2, says="--preemption")
        refuse("--msl", 3, says="--msl")
        refuse(*LAUNCH, "--constant", "4=int:1", says="function constant 4")
        self.refuse(IO, "metal-sim", self.directory / "none.metal", says=("no such file",))
        self.source.write_text("kernel void f(device float* x) { x[0] = y; }")
        refuse(says="scale.metal:1")


if __name__ == "__main__":
    unittest.main()
