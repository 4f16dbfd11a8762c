"""The hardware status from made-up records: it never claims more than the records show."""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import unittest
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]

import hardware_status  # noqa: E402
import metal_record  # noqa: E402


def gpu_record(features: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns a record of two kernels, of which one never ran."""
    counts = {"failed": 0, "unsupported": 3, "mistrusted": 0, "skipped": 0, "worst_ratio": 0.25,
              "worst_case": "gemm/u4/metal/...", "state": "ran", "failures": []}
    device = {"name": "metal", "model": "Apple M9", "features": list(features)}
    results: dict[str, dict[str, Any]] = {
        "open": {"state": "opens with all tests", "device": device},
        "conformance marlin_one": {"kernel": "marlin_one", "passed": 7, **counts},
        "conformance marlin_two": {"kernel": "marlin_two", "passed": 0, **counts},
    }
    return metal_record.make_record(results, {
        "os": "macOS 20.1", "commit": "0123456789abcdef", "date": "2030-01-02", "quick": False,
        "chip": "unknown"})


class HardwareStatus(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.root = pathlib.Path(self.folder.name)
        for backend in hardware_status.BACKENDS:
            self.write(f"src/backends/{backend}/kernels.def",
                       f"// MARLIN_X_KERNEL(name)\nMARLIN_{backend.upper()}_KERNEL(marlin_one, 1)\n"
                       f"MARLIN_{backend.upper()}_KERNEL(marlin_two, 2)\n")
        (self.root / "bench" / "records").mkdir(parents=True)

    def tearDown(self) -> None:
        self.folder.cleanup()

    def write(self, path: str, content: Any) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))

    def lines(self, kernel: str) -> list[str]:
        """Returns the status of all backends: Metal, CUDA, CPU."""
        return [line.split(" | ")[1].removesuffix(" |")
                for line in hardware_status.page(self.root).splitlines()
                if line.startswith(f"| `{kernel}` ")]

    def test_every_row_has_a_source(self) -> None:
        backend = ""
        kernels = 0
        for line in (ROOT / hardware_status.PAGE).read_text().splitlines():
            titles = {f"## {title}": key
                      for key, (title, _, _) in hardware_status.BACKENDS.items()}
            backend = titles.get(line, backend)
            if not line.startswith("| `"):
                continue
            kernels += 1
            kernel = line.split("`")[1]
            found = hardware_status.source_of(backend, kernel)
            self.assertIsNotNone(found, kernel)
            assert found is not None
            name, defined = found
            paths = list((ROOT / "src" / "backends" / backend).rglob(name))
            self.assertEqual(len(paths), 1, name)
            self.assertIn(defined, paths[0].read_text(), kernel)
        self.assertGreater(kernels, 40)

    def test_what_the_host_does_is_no_row(self) -> None:
        self.write("tests/conformance/expected_counts_metal.json",
                   {"marlin_router_host": {"passed": 9}, "marlin_dequantize_metal": {"passed": 9}})
        self.assertEqual(self.lines("marlin_router_host"), [])
        self.assertEqual(self.lines("marlin_dequantize_metal"), ["`host-simulator`"])

    def test_nothing_has_run(self) -> None:
        self.assertEqual(self.lines("marlin_one"), ["`not-run`"] * 3)

    def test_pinned_counts_of_metal_are_the_simulators(self) -> None:
        self.write("tests/conformance/expected_counts_metal.json",
                   {"marlin_one": {"passed": 5}, "marlin_two": {"passed": 0}})
        self.assertEqual(self.lines("marlin_one")[0], "`host-simulator`")
        self.assertEqual(self.lines("marlin_two")[0], "`not-run`")

    def test_a_record_of_a_gpu(self) -> None:
        self.write("bench/records/metal-apple-m9.json", gpu_record())
        self.assertEqual(self.lines("marlin_one")[0],
                         "`apple-gpu:Apple M9:macOS 20.1` (7 cases, 2030-01-02, 0123456789)")
        self.assertEqual(self.lines("marlin_two")[0], "`not-run`")
        self.assertEqual(self.lines("marlin_one")[1], "`not-run`")

    def test_failures_show(self) -> None:
        record = gpu_record()
        record["conformance"]["kernels"][0]["failed"] = 2
        self.write("bench/records/metal-apple-m9.json", record)
        self.assertIn("**2 FAILED**", self.lines("marlin_one")[0])

    def test_a_kernel_that_did_not_end_shows(self) -> None:
        record = gpu_record()
        record["conformance"]["kernels"][1]["state"] = "does not compile"
        self.write("bench/records/metal-apple-m9.json", record)
        self.assertIn("(0 cases, **does not compile**, ", self.lines("marlin_two")[0])

    def test_a_virtual_gpu_is_a_class_of_its_own(self) -> None:
        record = gpu_record(("GPU family Apple5", "virtual GPU"))
        record["quick"] = True
        self.write("bench/records/metal-apple-m9.json", record)
        self.assertEqual(self.lines("marlin_one")[0],
                         "`apple-gpu-virtual:Apple M9:macOS 20.1` (7 cases of a sample, 2030-01-02,"
                         " 0123456789)")

    def test_operations_of_decoders(self) -> None:
        self.assertNotIn("Decoder operations", hardware_status.page(self.root))
        self.write("src/plan/step/decoder_operations.def",
                   '//   MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal)\n'
                   'MARLIN_DECODER_OPERATION(One, "RMS norm", kRuns, kScratch | kLoads, kRuns)\n'
                   'MARLIN_DECODER_OPERATION(Two, "RoPE", kRuns,\n             kLoads, kAbsent)\n')
        record = gpu_record()
        record["unit"] = [{"passed": 5, "failed": 1}, {"passed": 2}]
        self.write("bench/records/metal-apple-m9.json", record)
        page = hardware_status.page(self.root)
        self.assertIn("| RMS norm | `host-simulator` |\n| RoPE | no kernel: the CPU", page)
        self.assertIn("`apple-gpu:Apple M9:macOS 20.1`: 7 unit tests passed, 1 failed (", page)

    def test_a_simulators_record_does_not_count(self) -> None:
        record = gpu_record()
        record["class"] = "simulator"
        self.write("bench/records/metal-apple-m9.json", record)
        self.assertEqual(self.lines("marlin_one")[0], "`not-run`")

    def test_code_of_an_older_gpu_is_told_apart(self) -> None:
        self.assertIn("never run on those cards**, nor its conformance on another.",
                      hardware_status.page(self.root))
        counts = {"marlin_one": {"passed": 5}, "planned": {"passed": 5},
                  "marlin_two": {"passed": 5, "predicted": True}}
        self.write("tests/conformance/expected_counts_cuda_80.json", counts)
        self.assertEqual(self.lines("marlin_two")[1], "`not-run`")
        run = {"device": {"name": "cuda:0", "model": "A GPU"}, "level": "code of 8.0, forced",
               "results": [{"kernel": "marlin_two@64x1"}]}
        self.write("bench/records/forced-gpu.json", {"runs": [run]})
        self.assertEqual(self.lines("marlin_one")[1], "`nvidia-gpu, code of 8.0`")
        self.assertEqual(self.lines("marlin_two")[1], "`nvidia-gpu:A GPU, code of 8.0`")
        self.assertIn("never run on those cards**: tested as 8.0 code on Hopper.",
                      hardware_status.page(self.root))

    def test_records_of_measurements(self) -> None:
        run = {"device": {"name": "cuda:0", "model": "A GPU"},
               "results": [{"kernel": "marlin_one@64x1", "candidates": []}]}
        self.write("bench/records/gemm.json", {"runs": [run]})
        self.write("tests/conformance/expected_counts_cuda.json", {"marlin_two": {"passed": 1}})
        self.assertEqual(self.lines("marlin_one")[1], "`nvidia-gpu:A GPU`")
        self.assertEqual(self.lines("marlin_two")[1], "`nvidia-gpu`")


if __name__ == "__main__":
    unittest.main()
