"""metal_record.py on stand-ins for the programs: they crash, hang, print garbage, lose the GPU, and
every kernel still has its turn."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
import textwrap
import time
import unittest
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench")]

import metal_record  # noqa: E402
import metal_steps  # noqa: E402
import watched_run  # noqa: E402
from watched_run import Limits  # noqa: E402

# Each kernel has ten cases; what a case does is in behaviour.json: {"kernel/case": action}.
CONFORMANCE = """\
    import json, os, re, signal, sys, time
    HERE = os.path.dirname(os.path.abspath(__file__))
    plan = json.load(open(HERE + "/behaviour.json"))
    arguments = sys.argv[1:]
    with open(HERE + "/calls.log", "a") as log:
        log.write(" ".join(arguments) + "\\n")
    pattern = arguments[arguments.index("--filter") + 1] if "--filter" in arguments else ""
    mode = os.environ["METAL_MARLIN_METAL_SELF_TEST"]
    cases = [(kernel, f"gemm/u4/metal/{kernel}/seed{i}") for i in range(10)
             for kernel in plan["kernels"]]
    if "--list" in arguments:
        print("\\n".join(name for _, name in cases))
        sys.exit(0)
    unavailable = "" if mode in plan["opens_with"] else f"no metal device (metal: bad {mode})"
    rows = {kernel: {"kernel": kernel, "backend": "metal", "passed": 0, "failed": 0,
                     "unsupported": 0, "mistrusted": 0, "skipped": 0, "unavailable": unavailable,
                     "worst_ratio": 0.5, "worst_case": "w"} for kernel in plan["kernels"]}
    failures, reasons, lost = [], {}, False
    for kernel, name in cases:
        if not re.search(pattern, name):
            continue
        print("case", name, file=sys.stderr, flush=True)
        action = plan.get(name.removeprefix("gemm/u4/metal/"), "pass")
        if "MTL_SHADER_VALIDATION" in os.environ:
            print("Invalid device load by", kernel, file=sys.stderr)
            action = "pass"
        if action == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if action == "hang":
            time.sleep(60)
        if action == "garbage":
            print("\\xff not JSON {")
            sys.exit(0)
        if action == "lose":
            lost = True
        if action == "uncompiled":
            rows[kernel]["unsupported"] += 1
            reasons[f"{kernel}: metal: x.metal does not compile: error: halfs"] = 1
        elif lost or action == "fail":
            rows[kernel]["failed"] += 1
            message = "device_lost: Caused GPU Timeout" if lost else "[0, 0]: got 1, expected 2"
            failures.append({"case": name, "message": message})
        else:
            rows[kernel]["passed"] += 1
    device = {"name": plan["device"], "model": "Apple M9", "features": plan["features"]}
    print(json.dumps({"devices": {} if unavailable else {"metal": device}, "failures": failures,
                      "kernels": list(rows.values()), "reasons": reasons}))
    sys.exit(1 if failures else 0)
"""
COMMAND = """\
    import json, os, sys
    HERE = os.path.dirname(os.path.abspath(__file__))
    plan = json.load(open(HERE + "/behaviour.json"))
    with open(HERE + "/calls.log", "a") as log:
        log.write(" ".join(sys.argv[1:]) + "\\n")
    if sys.argv[1] == "bench":
        print(json.dumps({"roofline": {"read_gbps": 1}, "results": [{"gbps": 7.0}]}))
    elif plan["tokens"] == "golden":
        golden = json.load(open(sys.argv[2] + "/golden.json"))
        print(json.dumps({"token_ids": golden["greedy_ids"]}))
    else:
        print(json.dumps({"token_ids": plan["tokens"]}))
"""
UNIT = """\
    import os, sys
    assert os.environ["MARLIN_TEST_DEVICE"] == "metal-sim"
    print("[ RUN      ] Norm.Works", flush=True)
    print("[       OK ] Norm.Works (0 ms)", flush=True)
    if sys.argv[1] == "decoder_test.cc":
        print("[ RUN      ] Norm.Breaks")
        print("[  FAILED  ] Norm.Breaks (0 ms)")
        sys.exit(1)
    if sys.argv[1] == "attention_test.cc":
        print("[ RUN      ] Attention.Dies", flush=True)
        os.abort()
"""


class MetalRecord(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build = pathlib.Path(folder.name)
        self.output = self.build / "record.json"
        for name, text in (("bin/marlin_conformance", CONFORMANCE), ("bin/metal-marlin", COMMAND),
                           ("tests/unit.ops", UNIT), ("tests/unit.engine", UNIT),
                           ("tests/unit.model", UNIT)):
            path = self.build / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!{sys.executable} -IS\n{textwrap.dedent(text)}")
            path.chmod(0o755)
        self.plan: dict[str, Any] = {
            "kernels": ["one", "two"], "opens_with": ["all", "", "probe", "0"],
            "device": "metal-sim", "features": [], "tokens": "golden"}
        # No compiler, here as on a Mac without Xcode.
        programs = mock.patch.dict(os.environ, {"PATH": str(self.build)})
        programs.start()
        self.addCleanup(programs.stop)

    def run_main(self, *arguments: str, device: str = "metal-sim") -> tuple[int, str]:
        (self.build / "bin" / "behaviour.json").write_text(json.dumps(self.plan))
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = metal_record.main([str(self.build), "-o", str(self.output), "--device", device,
                                      "--silence", "0.4", "--limit", "20", *arguments])
        return code, output.getvalue()

    def record(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.output.read_text())
        return document

    def row(self, kernel: str) -> dict[str, Any]:
        return next(row for row in self.record()["conformance"]["kernels"]
                    if row["kernel"] == kernel)

    def calls(self) -> list[str]:
        return (self.build / "bin" / "calls.log").read_text().splitlines()

    def test_all_is_well(self) -> None:
        code, said = self.run_main("--filter", "conformance|model|validation")
        self.assertEqual(code, 0, said)
        self.assertEqual((self.row("one")["passed"], self.row("one")["state"]), (10, "ran"))
        self.assertEqual([row["state"] for row in self.record()["model"]], ["48 tokens equal"] * 2)
        self.assertIn("Invalid device load by one", self.record()["validation"][0]["messages"])
        self.assertIn("20 passed, 0 failed, 0 skipped", said)
        self.assertEqual(self.record()["class"], "simulator")
        self.assertFalse(self.output.with_name("record.json.partial").exists())

    def test_goes_on_after_a_crash_and_names_the_case(self) -> None:
        self.plan["one/seed3"] = "crash"
        code, said = self.run_main("--filter", "conformance")
        self.assertEqual(code, 1)
        one = self.row("one")
        self.assertEqual((one["passed"], one["failed"]), (9, 1))
        self.assertEqual(one["failures"], [{"case": "gemm/u4/metal/one/seed3",
                                            "message": "crashed (SIGSEGV)"}])
        self.assertIn("ran without a case: 9 passed, 1 failed; first: gemm/u4/metal/one/seed3",
                      said)
        self.assertEqual(self.row("two")["passed"], 10)

    def test_goes_on_after_a_hang(self) -> None:
        self.plan["one/seed5"] = "hang"
        begun = time.monotonic()
        code, _ = self.run_main("--filter", "conformance")
        self.assertLess(time.monotonic() - begun, 10)
        self.assertEqual(code, 1)
        self.assertEqual(self.row("one")["failures"][0]["case"], "gemm/u4/metal/one/seed5")
        self.assertIn("hung", self.row("one")["failures"][0]["message"])
        self.assertEqual(self.row("two")["passed"], 10)

    def test_gives_a_kernel_up_that_always_crashes(self) -> None:
        self.plan |= {f"one/seed{i}": "crash" for i in range(10)}
        code, _ = self.run_main("--filter", "conformance")
        self.assertEqual(code, 1)
        self.assertEqual(self.row("one")["failed"], metal_steps.MOST_EXCLUDED)
        self.assertEqual(self.row("one")["state"], "crashed (SIGSEGV)")
        self.assertEqual(self.row("two")["passed"], 10)

    def test_garbage(self) -> None:
        self.plan["two/seed0"] = "garbage"
        code, _ = self.run_main("--filter", "conformance")
        self.assertEqual(code, 1)
        self.assertIn("printed no document", self.row("two")["failures"][0]["message"])
        self.assertEqual(self.row("two")["failures"][0]["case"], "gemm/u4/metal/two/seed0")
        self.assertEqual(self.row("one")["passed"], 10)

    def test_a_lost_gpu_costs_one_case(self) -> None:
        self.plan["one/seed2"] = "lose"
        code, _ = self.run_main("--filter", "conformance")
        self.assertEqual(code, 1)
        one = self.row("one")
        self.assertEqual((one["passed"], one["failed"]), (9, 1))
        self.assertEqual(one["failures"][0]["case"], "gemm/u4/metal/one/seed2")

    def test_a_kernel_that_does_not_compile_has_failed(self) -> None:
        self.plan["one/seed1"] = "uncompiled"
        code, said = self.run_main("--filter", "conformance")
        self.assertEqual(code, 1)
        self.assertEqual(self.row("one")["state"], "does not compile")
        self.assertIn("error: halfs", self.row("one")["compiler_errors"][0])
        self.assertIn("does not compile", said)

    def test_unit_tests_and_models(self) -> None:
        self.plan["tokens"] = [401, 0]
        code, _ = self.run_main("--filter", "unit|model")
        self.assertEqual(code, 1)
        states = {row["step"]: row["state"] for row in self.record()["unit"]}
        self.assertEqual(states["unit ops.decoder"], "1 passed, 1 failed")
        self.assertEqual(states["unit ops.attention"], "crashed (SIGABRT) in Attention.Dies")
        self.assertEqual(states["unit model.families"], "1 passed, 0 failed")
        self.assertEqual(self.record()["model"][0]["state"], "FAILED: token 1 differs")
        self.assertEqual(self.record()["unit"][0]["failures"], ["Norm.Breaks"])

    def test_a_failing_self_test_leaves_each_kernel_its_turn(self) -> None:
        self.plan["opens_with"] = ["0"]
        code, _ = self.run_main("--filter", "conformance one")
        self.assertEqual(code, 0)
        opened = self.record()["open"]
        self.assertEqual(opened["state"], "opens with no test")
        self.assertEqual([attempt["reason"] for attempt in opened["attempts"]],
                         ["no metal device (metal: bad all)", "no metal device (metal: bad probe)"])
        self.assertEqual(self.row("one")["passed"], 10)

    def test_a_device_that_does_not_open_is_recorded(self) -> None:
        self.plan["opens_with"] = []
        code, said = self.run_main()
        self.assertEqual(code, 1)
        self.assertEqual(self.record()["conformance"]["kernels"], [])
        self.assertEqual(len(self.record()["open"]["attempts"]), 3)
        self.assertEqual([row["state"] for row in self.record()["compile"]],
                         ["no compiler (xcrun metal)"] * 2)
        self.assertIn("does not open", said)

    def test_resumes(self) -> None:
        with mock.patch.object(metal_steps, "run_model", side_effect=KeyboardInterrupt):
            self.assertEqual(self.run_main()[0], 130)
        self.assertFalse(self.output.exists())
        before = sum("/one/" in call for call in self.calls())
        code, said = self.run_main("--resume", "--filter", "conformance|model")
        self.assertEqual(code, 1, said)  # The failing unit tests' results are kept.
        self.assertEqual(sum("/one/" in call for call in self.calls()), before)
        self.assertIn("goes on after", said)
        self.assertEqual(self.row("one")["passed"], 10)
        self.assertEqual(len(self.record()["model"]), 2)

    def test_another_commit_is_not_resumed(self) -> None:
        partial = self.output.with_name("record.json.partial")
        partial.write_text(json.dumps({"key": {"commit": "x"}, "results": {"open": {}}}))
        self.assertEqual(self.run_main("--resume", "--filter", "conformance one")[0], 0)

    def test_times_only_of_real_gpus(self) -> None:
        self.plan |= {"device": "metal", "features": []}
        with mock.patch.object(metal_record.platform, "system", return_value="Darwin"), \
                mock.patch.object(metal_steps, "python_with_mlx", return_value=""):
            code, _ = self.run_main("--filter", "bench", device="metal")
            self.assertEqual(code, 0)
            self.assertEqual(self.record()["class"], "apple-gpu")
            self.assertEqual(self.record()["bench"][0]["results"], [{"gbps": 7.0}])
            self.assertIn("pip install mlx", self.record()["bench"][-1]["state"])
            self.plan["features"] = ["GPU family Apple5", "virtual GPU"]
            self.assertEqual(self.run_main("--filter", "bench", device="metal")[0], 0)
        self.assertEqual(self.record()["class"], "apple-gpu-virtual")
        self.assertEqual(self.record()["bench"], [])

    def test_without_a_mac(self) -> None:
        with mock.patch.object(metal_record.platform, "system", return_value="Linux"):
            code, said = self.run_main(device="metal")
        self.assertEqual(code, 5)
        self.assertIn("no Mac", said)
        self.assertFalse(self.output.exists())

    def test_quick_is_a_tenth(self) -> None:
        self.assertEqual(self.run_main("--quick", "--filter", "conformance one")[0], 0)
        self.assertEqual(self.row("one")["passed"], 1)

    def test_compiles_with_xcode(self) -> None:
        xcrun = self.build / "xcrun"
        xcrun.write_text('#!/bin/sh\ncase "$*" in\n*--version) echo "metal 4" ;;\n'
                         '*gemv.metal*) echo "error: unknown type" >&2; exit 1 ;;\n'
                         '*) echo "warning: unused" >&2 ;;\nesac\n')
        xcrun.chmod(0o755)
        code, _ = self.run_main("--filter", "compile")
        self.assertEqual(code, 1)
        old, new = self.record()["compile"]
        self.assertIn("FAILED: kernels/gemm/batched_gemv.metal, kernels/gemm/gather_gemv.metal, "
                      "kernels/gemm/gemv.metal", old["state"])
        rows = {row["source"]: row for row in old["rows"]}
        self.assertEqual(rows["kernels/gemm/gemv.metal"]["messages"], "error: unknown type")
        self.assertEqual(rows["kernels/gemm/finish.metal"]["messages"], "warning: unused")
        self.assertIn("kernels4/gemm_matmul2d.metal", {row["source"] for row in new["rows"]})

    def test_only_compiles(self) -> None:
        code, said = self.run_main("--compile")
        self.assertEqual(code, 1)
        self.assertIn("FAILED: no compiler (xcrun metal)", said)
        xcrun = self.build / "xcrun"
        xcrun.write_text("#!/bin/sh\nexit 0\n")
        xcrun.chmod(0o755)
        self.assertEqual(self.run_main("--compile")[0], 0)
        self.assertFalse((self.build / "bin" / "calls.log").exists())

    def test_names_files(self) -> None:
        self.assertEqual(metal_record.slug("Apple M2 Pro"), "apple-m2-pro")
        self.assertEqual(metal_record.slug("../x"), "x")


class WatchedRun(unittest.TestCase):
    def run_text(self, text: str, seconds: float = 20) -> watched_run.Outcome:
        return watched_run.run([sys.executable, "-c", text], Limits(seconds))

    def test_states(self) -> None:
        self.assertEqual(self.run_text("print('a'); raise SystemExit(3)").state, "exit 3")
        self.assertEqual(self.run_text("import os; os.kill(os.getpid(), 11)").state,
                         "crashed (SIGSEGV)")
        self.assertEqual(self.run_text("import time; time.sleep(9)", 0.2).state,
                         "timed out")
        self.assertEqual(watched_run.run(["/no/such"], Limits(1)).state, "no such command")

    def test_ends_what_the_command_started(self) -> None:
        outcome = self.run_text("import subprocess, sys, time\n"
                                "p = subprocess.Popen(['sleep', '60'])\n"
                                "print(p.pid, flush=True); time.sleep(60)", 0.5)
        self.assertEqual(outcome.state, "timed out")
        pid = int(outcome.out)
        for _ in range(100):
            with contextlib.suppress(OSError, IndexError):
                # A zombie has ended, though nothing may collect it here.
                status = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if status == "Z":
                    break
                time.sleep(0.02)
                continue
            break
        else:
            self.fail("the child still runs")

    def test_endless_output(self) -> None:
        with mock.patch.object(watched_run, "MOST_BYTES", 1 << 16):
            outcome = self.run_text("while True: print('x' * 1000)")
        self.assertEqual(outcome.state, "printed too much")


if __name__ == "__main__":
    unittest.main()
