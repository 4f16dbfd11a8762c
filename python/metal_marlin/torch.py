"""PyTorch: operators, and modules whose weights are quantized, on the CPU and on NVIDIA GPUs.

`MarlinLinear` is a linear layer, `MarlinMoE` a mixture-of-experts block, `MarlinExperts` its
experts after a router of PyTorch. Their operators, `metal_marlin::linear`, `::moe` and
`::experts`, have fake implementations (torch.compile); on a GPU they enqueue on the current stream,
never synchronize, and take all memory from PyTorch, so that CUDA graphs can capture them.
"""

from __future__ import annotations

from ._torch_experts import experts, moe
from ._torch_linear import KeptMatrix, MarlinLinear, MarlinStack, linear, register
from ._torch_moe import MarlinExperts, MarlinMoE, PreparedExperts

__all__ = [
    "KeptMatrix",
    "MarlinExperts",
    "MarlinLinear",
    "MarlinMoE",
    "MarlinStack",
    "PreparedExperts",
    "experts",
    "linear",
    "moe",
    "register",
]
