"""The steps of metal_record.py. Each is one or a few processes with a time limit, so that what
crashes or hangs a GPU costs its own step alone, and returns what is recorded of it."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import watched_run
from watched_run import Limits, Outcome

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "src" / "backends" / "metal"
COUNTS = ("passed", "failed", "unsupported", "mistrusted", "skipped")
SELF_TEST = "METAL_MARLIN_METAL_SELF_TEST"
VIRTUAL_GPU = "virtual GPU"  # A feature that apple_driver.cc gives a virtual machine's GPU.
# Metal's own checks of API calls and of what kernels access.
VALIDATION = {"MTL_DEBUG_LAYER": "1", "MTL_SHADER_VALIDATION": "1",
              "MTL_DEBUG_LAYER_ERROR_MODE": "nslog", "MTL_DEBUG_LAYER_WARNING_MODE": "nslog"}
MOST_EXCLUDED = 3  # Cases of a kernel that crash, hang or lose the device before it is given up.
MOST_FAILURES = 20  # Recorded of a kernel.
MOST_VALIDATED = 24  # Cases of a kernel that run under Metal's validation layers.
MOST_TEXT = 20000  # Characters of messages recorded of a process.
# A tenth of the cases: every case of a row has a seed of its own.
QUICK = r"(.*/)?seed\d*0$"
COMPILER_ERRORS = ("does not compile", "no pipeline", "no function")
MODELS = ("examples/tiny-qwen3-moe", "tests/data/tiny-glm4-moe")
# Files of unit tests that take a device: of decoder operations, and of whole models of every type.
UNIT_TESTS = ("ops.decoder", "ops.attention", "ops.head_product", "ops.paged_attention",
              "ops.expand_latents", "ops.rotate_append", "ops.advance_tokens",
              "ops.log_probabilities", "ops.transformed_gemm", "ops.gated_delta", "ops.mamba2",
              "ops.short_convolution", "engine.sampling", "engine.golden", "engine.decode",
              "engine.batch_generation", "engine.latent_prefill", "model.families")
SHAPES = [f"{m},{n},{k}" for n, k in ((4096, 4096), (14336, 4096), (4096, 14336))
          for m in (1, 4, 16, 64, 512)]
# Format, group size, type of scales, and MLX's mode with as many bits, if it has one.
BENCHES = [("u4", 64, "fp16", "affine"), ("u4", 128, "fp16", "affine"),
           ("fp4_e2m1", 32, "e8m0", "mxfp4"), ("fp4_e2m1", 128, "fp16", "")]


@dataclass
class Context:
    build: Path
    device: str = "metal"  # Or "metal-sim", which only tests this script.
    quick: bool = False
    limit: float = 900  # Seconds of a process,
    silence: float = 120  # and of a test that neither ends nor gives way to the next one.
    self_test: str = ""  # The value of SELF_TEST with which the device opens.
    virtual: bool = False
    tick: Callable[[float], None] = field(default=lambda seconds: None)

    def run(self, *command: str | Path, environment: dict[str, str] | None = None,
            silence: float = 0) -> Outcome:
        more = {SELF_TEST: self.self_test, **(environment or {})}
        return watched_run.run(command, Limits(self.limit, silence), more, self.tick)

    def conformance(self, *arguments: str, environment: dict[str, str] | None = None) -> Outcome:
        program = self.build / "bin" / "marlin_conformance"
        return self.run(program, "--device", "metal", *arguments, environment=environment,
                        silence=self.silence if "--progress" in arguments else 0)

    def command(self, *arguments: str | Path) -> Outcome:
        return self.run(self.build / "bin" / "metal-marlin", *arguments)


def document_of(outcome: Outcome) -> dict[str, Any] | None:
    """The JSON object that a finished process printed, or None."""
    if not outcome.finished():
        return None
    try:
        document = json.loads(outcome.out)
    except json.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None


def state_of(outcome: Outcome) -> str:
    """The state of a process whose document is missing."""
    if not outcome.finished():
        return outcome.state
    return f"{outcome.state}, and printed no document"


def kept(text: str) -> str:
    """Messages as they are recorded: without progress, their beginning and their end."""
    lines = [line for line in text.splitlines() if not line.startswith("case ")]
    joined = "\n".join(lines).strip()
    if len(joined) <= MOST_TEXT:
        return joined
    return f"{joined[:MOST_TEXT // 2]}\n[...]\n{joined[-MOST_TEXT // 2:]}"


def messages(result: dict[str, Any], *texts: str) -> dict[str, Any]:
    """Adds what processes printed on stderr, if anything."""
    text = kept("\n".join(texts))
    return {**result, "messages": text} if text else result


# --- opening ------------------------------------------------------------------------------------


def open_device(context: Context) -> dict[str, Any]:
    """Opens the device with all of its self-test, or with less of it, so that each kernel still has
    its turn. Sets how the later steps open it."""
    result: dict[str, Any] = {"state": "does not open", "device": None, "attempts": []}
    # After all tests have passed once, later processes remember it.
    for asked, mode, name in (("all", "", "all tests"), ("probe", "probe", "probes"),
                              ("0", "0", "no test")):
        context.self_test = asked
        outcome = context.conformance("--filter", "^$", "--json")
        document = document_of(outcome)
        device = document["devices"].get("metal") if document else None
        reasons = {row["unavailable"] for row in document["kernels"]} if document else set()
        reason = "; ".join(sorted(reasons - {""})) if document else state_of(outcome)
        if not device:
            result["attempts"].append(messages({"self_test": name, "reason": reason or "no device"},
                                               outcome.error))
            continue
        context.self_test = mode
        context.virtual = VIRTUAL_GPU in device["features"]
        return {**result, "state": f"opens with {name}", "device": device, "self_test": mode}
    return result


# --- compiling ----------------------------------------------------------------------------------


def compile_sources(context: Context, standard: str) -> dict[str, Any]:
    """Compiles every source with Xcode's compiler, and keeps its messages, warnings too."""
    compiler = ["xcrun", "-sdk", "macosx", "metal"]
    found = context.run(*compiler, "--version")
    if found.state != "exit 0":
        return {"state": "no compiler (xcrun metal)", "rows": []}
    sources = sorted((KERNELS / "kernels").rglob("*.metal"))
    if standard >= "4":
        sources += sorted((KERNELS / "kernels4").glob("*.metal"))
    folders = [f"-I{folder}" for folder in (ROOT / "src", ROOT / "include",
                                            context.build / "generated")]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for source in sources:
            outcome = context.run(*compiler, f"-std=metal{standard}", "-fno-fast-math", "-Wall",
                                  *folders, "-c", source, "-o", Path(scratch) / "kernel.air")
            row = {"source": source.relative_to(KERNELS).as_posix(),
                   "state": "compiles" if outcome.state == "exit 0" else outcome.state}
            rows.append(messages(row, outcome.error, outcome.out))
    bad = [row["source"] for row in rows if row["state"] != "compiles"]
    warned = sum("warning:" in row.get("messages", "") for row in rows)
    state = (f"FAILED: {', '.join(bad)}" if bad else f"{len(rows)} compile") + (
        f", {warned} with warnings" if warned else "")
    return {"state": state, "compiler": found.out.strip(), "rows": rows}


# --- conformance --------------------------------------------------------------------------------


def list_kernels(context: Context) -> dict[str, list[str]]:
    """Returns the cases of each kernel row, by kernel. Empty: the program does not run."""
    kernels: dict[str, list[str]] = {}
    for name in context.conformance("--list").out.split():
        if found := re.search(r"(?:^|/)metal/([^/]+)/", name):
            kernels.setdefault(found[1], []).append(name)
    return kernels


def escaped(name: str) -> str:
    return re.sub(r"([.+*?()\[\]{}|^$\\])", r"\\\1", name)


def pattern_of(context: Context, kernel: str, excluded: Iterable[str]) -> str:
    """The filter of a kernel's cases without those."""
    without = "".join(f"(?!{escaped(case)}$)" for case in excluded)
    return f"^{without}[^/]+/([^/]+/)?metal/{escaped(kernel)}/" + (QUICK if context.quick else "")


def last_case(outcome: Outcome) -> str:
    cases = [line for line in outcome.error.splitlines() if line.startswith("case ")]
    return cases[-1].removeprefix("case ") if cases else ""


def losing_case(document: dict[str, Any]) -> dict[str, Any] | None:
    """The first failure that says the GPU was lost: all cases after it fail, too."""
    return next((failure for failure in document["failures"]
                 if failure["message"].lower().replace("_", " ").startswith("device lost")), None)


def find_culprit(context: Context, kernel: str, excluded: Iterable[str],
                 first: Outcome) -> tuple[Outcome, str]:
    """Runs the cases of a process that did not end well one at a time. Returns that run, and the
    case in which it ended, empty if it ended well or in none."""
    again = context.conformance("--filter", pattern_of(context, kernel, excluded), "--jobs", "1",
                                "--json", "--progress")
    if document_of(again):
        return again, ""
    return again, last_case(again) or last_case(first)


def run_kernel(context: Context, kernel: str) -> dict[str, Any]:
    """Runs the cases of one kernel. A case that crashes, hangs or loses the device is recorded as a
    failure, and the others run again without it."""
    failures: list[dict[str, str]] = []
    texts: list[str] = []
    document = None
    while document is None and len(failures) < MOST_EXCLUDED:
        excluded = [failure["case"] for failure in failures]
        outcome = context.conformance("--filter", pattern_of(context, kernel, excluded), "--jobs",
                                      "0", "--json", "--progress")
        texts.append(outcome.error)
        document = document_of(outcome)
        if document is None:
            again, culprit = find_culprit(context, kernel, excluded, outcome)
            document = document_of(again)
            texts.append(f"metal_record.py: {state_of(outcome)}; one case at a time: "
                         f"{state_of(again) if document is None else 'all cases ran'}")
            if document is None:
                texts.append(again.error)
                failures.append({"case": culprit, "message": state_of(again)})
                if not culprit:
                    break
        if document is not None and (lost := losing_case(document)):
            failures.append(lost)
            document = None
    return messages(kernel_row(kernel, document, failures), *texts)


def kernel_row(kernel: str, document: dict[str, Any] | None,
               failures: list[dict[str, str]]) -> dict[str, Any]:
    row: dict[str, Any] = {"kernel": kernel, **dict.fromkeys(COUNTS, 0), "worst_ratio": 0.0,
                           "worst_case": ""}
    declined: dict[str, int] = {}
    if document is not None:
        row.update(next(({key: found[key] for key in row} for found in document["kernels"]
                         if found["kernel"] == kernel and found["backend"] == "metal"), {}))
        declined = document.get("reasons", {})
    broken = sorted(reason for reason in declined
                    if any(error in reason for error in COMPILER_ERRORS))
    row["failed"] += len(failures)
    ended = [failure["message"] for failure in failures]
    state = "ran"
    if broken:
        state = "does not compile"
    elif ended:
        state = "; ".join(sorted(set(ended)))[:200] if document is None else "ran without a case"
    every = [*failures, *(document["failures"] if document else [])]
    return {**row, "state": state, "compiler_errors": broken, "failures": every[:MOST_FAILURES]}


def validate_kernel(context: Context, kernel: str, cases: list[str]) -> dict[str, Any]:
    """Runs a few cases of a kernel under Metal's validation layers, and keeps what they say. Most
    kernels decline most cases."""
    parts = MOST_VALIDATED - 1
    chosen = sorted({cases[at * (len(cases) - 1) // parts] for at in range(parts + 1)})
    pattern = "^(" + "|".join(map(escaped, chosen)) + ")$"
    outcome = context.conformance("--filter", pattern, "--jobs", "1", "--json", "--progress",
                                  environment=VALIDATION)
    document = document_of(outcome)
    result: dict[str, Any] = {"kernel": kernel}
    if document is None:
        result.update(state=state_of(outcome), case=last_case(outcome))
    else:
        row = kernel_row(kernel, document, [])
        result.update(state="ran", **{key: row[key] for key in COUNTS}, failures=row["failures"])
    return messages(result, outcome.error)


# --- unit tests ---------------------------------------------------------------------------------


def run_unit_tests(context: Context, name: str) -> dict[str, Any]:
    """Runs the tests of one file on the device."""
    folder, _, file = name.partition(".")
    program = context.build / "tests" / f"unit.{folder}"
    outcome = context.run(program, f"{file}_test.cc", silence=context.silence,
                          environment={"MARLIN_TEST_DEVICE": context.device})
    failed = re.findall(r"^\[  FAILED  \] (\S+) \(", outcome.out, re.MULTILINE)
    passed = len(re.findall(r"^\[       OK \]", outcome.out, re.MULTILINE))
    running = re.findall(r"^\[ RUN      \] (\S+)", outcome.out, re.MULTILINE)
    result: dict[str, Any] = {"passed": passed, "failed": len(failed), "failures": failed}
    if outcome.finished():
        state = f"{passed} passed, {len(failed)} failed"
        if outcome.state != "exit 0" and not failed:
            state = f"FAILED: {outcome.state}"
    else:
        state = f"{outcome.state} in {running[-1]}" if running else outcome.state
    said = outcome.out if state != f"{passed} passed, 0 failed" else ""
    return messages({**result, "state": state}, said, outcome.error)


# --- models -------------------------------------------------------------------------------------


def run_model(context: Context, model: str) -> dict[str, Any]:
    """Generates with a sample model, and compares the tokens with the reference's."""
    folder = ROOT / model
    golden = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
    expected = golden["greedy_ids"]
    with tempfile.TemporaryDirectory() as scratch:
        prompt = Path(scratch) / "prompt.txt"
        prompt.write_text(" ".join(map(str, golden["prompt_ids"])), encoding="utf-8")
        outcome = context.command(
            "generate", folder, "--tokens", prompt, "--max-tokens", str(len(expected)),
            "--temperature", "0", "--ignore-eos", "--exact", "--device", context.device, "--json",
            "--verbose")
    document = document_of(outcome)
    if document is None or "token_ids" not in document:
        return messages({"state": f"FAILED: {state_of(outcome)}"}, outcome.error)
    got = document["token_ids"]
    least = min(len(got), len(expected))
    same = next((i for i in range(least) if got[i] != expected[i]), least)
    equal = got == expected
    state = f"{len(expected)} tokens equal" if equal else f"FAILED: token {same} differs"
    return messages({"state": state, "tokens": len(expected), "equal_tokens": same}, outcome.error)


# --- speed --------------------------------------------------------------------------------------


def run_bench(context: Context, bench: tuple[str, int, str, str]) -> dict[str, Any]:
    form, group, scale, _ = bench
    shapes = SHAPES[:5] if context.quick else SHAPES
    outcome = context.command(
        "bench", "gemm", "--device", context.device, "--json", "--format", form, "--group-size",
        str(group), "--scale-dtype", scale, "--max-time", "1",
        *(part for shape in shapes for part in ("--shape", shape)))
    document = document_of(outcome)
    if document is None:
        return messages({"state": f"FAILED: {state_of(outcome)}"}, outcome.error)
    rows = document["results"]
    best = max((row.get("gbps", 0) for row in rows), default=0)
    return messages({"state": f"{len(rows)} measured, at most {best:.0f} GB/s",
                     "roofline": document.get("roofline"), "results": rows}, outcome.error)


def has_mlx(python: str) -> bool:
    outcome = watched_run.run([python, "-c", "import mlx.core"], Limits(60))
    return outcome.state == "exit 0"


@functools.cache
def python_with_mlx() -> str:
    """A Python that imports MLX: this one, or of an environment of ./dev. Empty: none."""
    candidates = [sys.executable, *(str(ROOT / folder / "bin" / "python")
                                    for folder in (".venv-integrations", ".venv"))]
    return next((python for python in candidates if shutil.which(python) and has_mlx(python)), "")


def run_mlx(context: Context) -> dict[str, Any]:
    """Times MLX's products of the shapes of run_bench."""
    python = python_with_mlx()
    if not python:
        return {"state": "no MLX: \"python3 -m venv .venv-integrations && .venv-integrations/bin/"
                         "pip install mlx\", then --resume, compares with it",
                "again": True}
    shapes = SHAPES[:5] if context.quick else SHAPES
    problems = [f"{shape}:{mode}:{group}" for _, group, _, mode in BENCHES if mode
                for shape in shapes]
    outcome = context.run(python, "-B", ROOT / "bench" / "mlx_gemm.py", *problems)
    document = document_of(outcome)
    if document is None:
        return messages({"state": f"FAILED: {state_of(outcome)}"}, outcome.error)
    return messages({"state": f"{len(document['results'])} products of MLX {document['version']}",
                     **document}, outcome.error)


# --- all of them --------------------------------------------------------------------------------

Step = tuple[str, Callable[[], dict[str, Any]]]


def compile_steps(context: Context) -> list[Step]:
    return [(f"compile {standard}", functools.partial(compile_sources, context, standard))
            for standard in ("3.1", "4.0")]


def device_steps(context: Context) -> list[Step]:
    """The steps of a device that opens. What finds faults comes before what measures."""
    steps: list[Step] = []
    kernels = list_kernels(context)
    if not kernels:
        steps.append(("conformance", lambda: {"state": "FAILED: lists no cases"}))
    steps += [(f"conformance {kernel}", functools.partial(run_kernel, context, kernel))
              for kernel in kernels]
    steps += [(f"unit {name}", functools.partial(run_unit_tests, context, name))
              for name in UNIT_TESTS]
    steps += [(f"model {Path(model).name}", functools.partial(run_model, context, model))
              for model in MODELS]
    if not context.virtual and context.device == "metal":
        steps += [(f"bench {bench[0]} g{bench[1]} {bench[2]}",
                   functools.partial(run_bench, context, bench)) for bench in BENCHES]
        steps.append(("bench MLX", functools.partial(run_mlx, context)))
    steps += [(f"validation {kernel}", functools.partial(validate_kernel, context, kernel, cases))
              for kernel, cases in kernels.items()]
    return steps
