"""Executes the graph that MLX records of a function, with its custom Metal kernels in metal-sim.

mx.export_function calls back with the full text that MLX generates for a metal_kernel - its
signature, the argument order, the template instance - and with grid and arrays, even without a GPU.
The record lacks MLX's own headers, which precede that text on a GPU, and the initial value of
outputs, which is taken from the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
from metal_marlin import _mlx_kernels
from sim_run import metal_sim

# Type names that MLX's own headers define.
PRELUDE = """#include <metal_stdlib>
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
"""
_METAL = {
    mx.uint8: "uchar",
    mx.int32: "int",
    mx.float32: "float",
    mx.float16: "half",
    mx.bfloat16: "bfloat",
}


def _bytes_of(array: mx.array) -> bytes:
    return np.array(array.reshape(-1).view(mx.uint8)).tobytes()


def _from_bytes(data: bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)


class Simulator:
    """Runs custom kernels in metal-sim; keeps a list of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernels: list[str] = []
        self.sources: list[str] = []
        # Missing in the record: init_value of the kernels to come.
        self.clears: list[float | None] = []

    def run(self, node: dict[str, Any], inputs: list[mx.array]) -> list[mx.array]:
        name, source, *numbers = node["arguments"]
        grid, threads, clear = numbers[:3], numbers[3:6], self.clears.pop(0)
        self.kernels.append(name)
        self.sources.append(source)
        file = self.folder / "kernel.metal"
        file.write_text(PRELUDE + source)
        # The simulator has one address space, unlike a GPU.
        metal_sim(file, "--type-check")
        # Arguments are numbered in the order of the signature.
        signature = re.findall(r"(\w+)&? \[\[buffer\((\d+)\)\]\]", source)
        command = ["--json", "--kernel", name, "--runs", "1", "--preemption", "0"]
        command += ["--grid-threads", _numbers(grid), "--threads", _numbers(threads)]
        for (_, index), array in zip(signature, inputs, strict=False):
            data = self.folder / f"{index}.in"
            data.write_bytes(_bytes_of(array))
            command += ["--buffer", f"{index}={_METAL[array.dtype]}:@{data}"]
        outputs = list(zip(signature[len(inputs) :], node["outputs"], strict=True))
        for (_, index), (_, shape, dtype) in outputs:
            # Outputs that MLX does not initialize may hold anything; NaNs are detected.
            data = self.folder / f"{index}.out"
            byte = b"\xff" if clear is None else b"\0"
            data.write_bytes(byte * (int(np.prod(shape)) * dtype.size))
            command += ["--buffer", f"{index}={_METAL[dtype]}:@{data}"]
            command += ["--output", f"{index}={data}"]
        assert json.loads(metal_sim(file, *command))["findings"] == []
        made = [(self.folder / f"{index}.out").read_bytes() for (_, index), _ in outputs]
        return [
            _from_bytes(data, shape, dtype)
            for data, (_, (_, shape, dtype)) in zip(made, outputs, strict=True)
        ]


def _numbers(values: list[int]) -> str:
    return ",".join(str(value) for value in values)


def evaluate(
    function: Callable[..., mx.array], arguments: list[mx.array], simulator: Simulator
) -> mx.array:
    """Evaluates function(*arguments) by its record, kernel by kernel."""
    values: dict[str, mx.array] = {}
    wanted: list[str] = []

    def visit(node: dict[str, Any]) -> None:
        kind = node["type"]
        if kind == "inputs":
            values.update(zip([n for n, *_ in node["inputs"]], arguments, strict=True))
        elif kind == "outputs":
            wanted.extend(n for n, *_ in node["outputs"])
        elif kind == "constants":
            values.update(dict(node["constants"]))
        elif kind == "primitive":
            inputs = [values[n] for n, *_ in node["inputs"]]
            if node["name"] == "CustomKernel":
                results = simulator.run(node, inputs)
            else:
                results = [_plain(node, inputs)]
            values.update(zip([n for n, *_ in node["outputs"]], results, strict=True))

    called = _mlx_kernels._Kernel.__call__

    def note(kernel: Any, *rest: Any) -> mx.array:
        simulator.clears.append(kernel._options["init_value"])
        return called(kernel, *rest)

    with mock.patch.object(_mlx_kernels._Kernel, "__call__", note):
        mx.export_function(visit, function, *arguments)
    assert simulator.clears == []
    return values[wanted[0]]


def _plain(node: dict[str, Any], inputs: list[mx.array]) -> mx.array:
    """Implements the MLX primitives around the kernels."""
    name, (_, shape, dtype) = node["name"], node["outputs"][0]
    first = inputs[0]
    if name in ("Reshape", "Flatten", "Unflatten", "Squeeze", "ExpandDims", "Copy", "Contiguous"):
        return first.reshape(shape)
    if name == "Slice":
        begin, end, strides = node["arguments"]
        return first[tuple(slice(*part) for part in zip(begin, end, strides, strict=True))]
    if name in ("Broadcast", "Full"):
        return mx.broadcast_to(first, shape).astype(dtype)
    if name == "Pad":
        axes, low, high = node["arguments"]
        assert list(axes) == [0]
        return mx.pad(first, (low[0], high[0]))
    if name == "AsType":
        return first.astype(dtype)
    if name == "Gather":
        axes, _ = node["arguments"]
        taken = mx.take(first, inputs[1], axis=axes[0])
        return mx.moveaxis(taken, axes[0], 0).reshape(shape)
    if name == "Transpose":
        return first.transpose(node["arguments"][0])
    if name == "Add":
        return first + inputs[1]
    if name in ("Minimum", "Maximum"):
        return (mx.minimum if name == "Minimum" else mx.maximum)(first, inputs[1])
    if name == "Multiply":
        return first * inputs[1]
    if name == "Hadamard":
        return mx.hadamard_transform(first, node["arguments"][0])
    raise NotImplementedError(f"{name}: {node['arguments']}")
