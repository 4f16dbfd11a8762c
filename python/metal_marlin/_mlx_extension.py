"""Products as a primitive of MLX: the extension module _mlx, where it was built and fits."""

from __future__ import annotations


def why_not(device: str) -> str:
    return "not there"
