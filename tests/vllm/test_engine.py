"""vLLM's engine generates the tokens of this library's runner, with one worker and with two.

vLLM computes in float32 here, so that only the order of sums differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import metal_marlin as mm
import pytest
from vllm_models import FOREIGN, make, make_foreign

KINDS = ("dense", "experts", "mixed")
PROMPTS = [[296, 385, 388], [5, 17, 300, 44, 9, 120]]
TOKENS = 12


def run_engine(
    models: Sequence[Path], environment: dict[str, str] | None = None, **options: Any
) -> list[dict[str, Any]]:
    task = {
        "models": [str(model) for model in models],
        "prompts": PROMPTS,
        "tokens": TOKENS,
        "options": {"dtype": "float32", **options},
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("run_engine.py")],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make(kind, folder) for kind in KINDS}


def expected(model: Path) -> list[list[int]]:
    own = mm.load(model, "cpu", exact=True)
    return [own.generate(ids, max_tokens=TOKENS)["token_ids"] for ids in PROMPTS]


def check(models: Sequence[Path], results: list[dict[str, Any]]) -> None:
    for model, result in zip(models, results, strict=True):
        assert result == {"tokens": expected(model)}, model.name


def two_workers() -> dict[str, str]:
    # vLLM binds each worker to a NUMA node unless it is told the processors.
    processors = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": f"{processors[0]}|{processors[-1]}"}


def test_one_worker(models: dict[str, Path], tmp_path: Path) -> None:
    paths = [*models.values(), make("shared", tmp_path)]
    check(paths, run_engine(paths))


def test_tensor_parallel(models: dict[str, Path]) -> None:
    paths = list(models.values())
    check(paths, run_engine(paths, two_workers(), tensor_parallel_size=2))


def test_expert_parallel(models: dict[str, Path]) -> None:
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    paths = [models["experts"]]
    check(paths, run_engine(paths, two_workers(), **options))


def test_other_programs_checkpoints_by_name(tmp_path: Path) -> None:
    paths = [make_foreign(kind, tmp_path) for kind in FOREIGN]
    check(paths, run_engine(paths, quantization="metal_marlin"))
