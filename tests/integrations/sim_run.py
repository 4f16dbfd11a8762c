"""Runs kernels of frameworks in the simulator by the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any


def metal_sim(file: Path, *arguments: str) -> str:
    """The output of `metal-marlin metal-sim` on a file."""
    command = [sys.executable, "-m", "metal_marlin.cli", "metal-sim", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{file}\n{done.stderr}\n{done.stdout[-4000:]}"
    return done.stdout


def bytes_of(tensor: Any) -> bytes:
    """The bytes of a contiguous PyTorch tensor."""
    import torch

    data: bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return data
