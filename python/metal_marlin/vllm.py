"""vLLM: the quantization method `metal_marlin`.

vLLM finds `register` through the entry point `vllm.general_plugins` and calls it in each of its
processes; nothing has to be imported. The method loads this library's quantized directories, and,
with `--quantization metal_marlin`, and checkpoints of other programs that the library reads.
"""

from __future__ import annotations


def register() -> None:
    """Registers the method. May be called any number of times."""
    from . import _vllm_layers  # noqa: F401


__all__ = ["register"]
