"""GEMMs by torch.mps.compile_shader: the text for PyTorch's compiler, run in the simulator and
compared bit for bit with the device "metal-sim". Nothing here runs on a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
from metal_marlin import linear

torch = pytest.importorskip("torch")
pytest.importorskip("metal_marlin._torch_mps")

# Properties of the simulator, and tensors that it can read.
SIMULATED = {"cores": 2, "known_fragments": True, "place": "cpu"}


class Library:
    """torch.mps.compile_shader's result, with the kernels in the simulator."""

    def __init__(self, folder: Path, text: str) -> None:
        self._folder, self._file = folder, folder / "kernel.metal"
        self._text = text

    def __getattr__(self, name: str) -> Any:
        from sim_run import bytes_of, metal_sim

        def run(*tensors: Any, threads: list[int], group_size: list[int]) -> None:
            self._file.write_text(self._text)
            metal_sim(self._file, "--type-check")
            command = ["--json", "--kernel", name, "--runs", "1", "--preemption", "0"]
            command += ["--grid-threads", ",".join(map(str, threads))]
            command += ["--threads", ",".join(map(str, group_size))]
            *_, out = tensors
            for index, tensor in enumerate(tensors):
                data = self._folder / f"{index}.in"
                data.write_bytes(bytes_of(tensor))
                command += ["--buffer", f"{index}=uchar:@{data}"]
            written = self._folder / "out"
            command += ["--output", f"{len(tensors) - 1}={written}"]
            assert '"findings": []' in re.sub(r"\s+", " ", metal_sim(self._file, *command))
            made = torch.from_numpy(np.fromfile(written, np.uint8))
            out.view(torch.uint8).view(-1).copy_(made)

        return run


@pytest.fixture
def simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were compiled."""
    from metal_marlin import _torch_mps

    try:
        linear.open_device("metal-sim")
    except mm.UnsupportedError as error:
        pytest.skip(str(error))
    texts: list[str] = []

    def compile_shader(text: str) -> Library:
        texts.append(text)
        return Library(tmp_path, text)

    _torch_mps._compiled.cache_clear()
    monkeypatch.setattr(torch.mps, "compile_shader", compile_shader)
    return texts


def check(format: str, m: int, dtype: Any, bias: bool, group_size: int = 32) -> None:
    from metal_marlin._torch_mps import MpsWeights

    rng = np.random.default_rng(m)
    values = rng.standard_normal((3, 320, 44)).astype(np.float32)
    weights = mm.pack_weights(values, format, group_size)
    x = torch.from_numpy(rng.standard_normal((m, 320)).astype(np.float32)).to(dtype)
    added = torch.from_numpy(rng.standard_normal(44).astype(np.float32)) if bias else None
    got = MpsWeights(weights, **SIMULATED).matmul(x, added, expert=2)
    host = None if added is None else added.numpy()
    ready = linear.prepare(weights, "metal-sim")
    want = linear.matmul(x, ready, host, expert=2)
    assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("format", ["fp4_e2m1", "u4", "nf3", "bf16"])
def test_formats(simulator: list[str], format: str) -> None:
    for m in (1, 20):
        check(format, m, torch.float32, bias=m == 20)
    assert all("kernel void marlin_" in text for text in simulator)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types(simulator: list[str], dtype: Any) -> None:
    check("u4", 3, dtype, bias=True)


def test_partial_sums(simulator: list[str]) -> None:
    """Split-K: a second kernel finishes."""
    from metal_marlin._torch_mps import MpsWeights

    rng = np.random.default_rng(1)
    weights = mm.pack_weights(rng.standard_normal((2048, 64)).astype(np.float32), "u4", 64)
    x = torch.from_numpy(rng.standard_normal((20, 2048)).astype(np.float32))
    got = MpsWeights(weights, **SIMULATED).matmul(x)
    assert torch.equal(got, linear.matmul(x, linear.prepare(weights, "metal-sim")))
    assert any("kernel void marlin_finish" in text for text in simulator)


def test_nothing_to_do(simulator: list[str]) -> None:
    from metal_marlin._torch_mps import MpsWeights

    weights = mm.pack_weights(np.ones((32, 8), np.float32), "u4", 32)
    assert MpsWeights(weights, **SIMULATED).matmul(torch.zeros(2, 0, 32)).shape == (2, 0, 8)
    assert simulator == []
