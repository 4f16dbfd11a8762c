"""Large language models with 2- to 8-bit weights.

Arrays may be NumPy, PyTorch, CuPy or MLX; results have the same kind as the inputs. Importing this
package imports only NumPy of these; `metal_marlin.torch`, `.transformers`, `.mlx` and `.mlx_lm`
import theirs.
"""

from __future__ import annotations

from . import errors, kernels
from ._core import (
    Checkpoint,
    Device,
    ExpertSet,
    MixedPrecisionConfig,
    PreparedWeights,
    QuantizedWeights,
    devices,
    formats,
    supported_model_types,
)
from .errors import (
    DeviceLostError,
    FileError,
    InvalidArgumentError,
    MalformedFileError,
    MarlinError,
    NonFiniteInputError,
    OutOfMemoryError,
    UnsupportedError,
)
from .linear import (
    batched_gemm,
    default_device,
    dequantize,
    expand,
    matmul,
    open_device,
    pack_fp4_weights,
    pack_sparse_fp4,
    pack_u4_weights,
    pack_weights,
    prepare,
    prune,
    quantized_linear,
    shard,
    sparse_linear,
    unpack_weights,
    fold_input,
)
from .models import (
    Model,
    allow_extra_tensors,
    assign_formats,
    export_model,
    import_model,
    load,
    measure_importance,
    measure_sensitivity,
    prepare_model,
    quantize_model,
)
from .moe import MarlinMoE, SharedExpert, moe_experts, moe_router_topk, prepare_experts

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "Device",
    "DeviceLostError",
    "ExpertSet",
    "FileError",
    "InvalidArgumentError",
    "MalformedFileError",
    "MarlinError",
    "MarlinMoE",
    "MixedPrecisionConfig",
    "Model",
    "NonFiniteInputError",
    "OutOfMemoryError",
    "PreparedWeights",
    "QuantizedWeights",
    "SharedExpert",
    "UnsupportedError",
    "allow_extra_tensors",
    "assign_formats",
    "batched_gemm",
    "default_device",
    "dequantize",
    "devices",
    "errors",
    "expand",
    "export_model",
    "formats",
    "import_model",
    "kernels",
    "load",
    "matmul",
    "measure_importance",
    "measure_sensitivity",
    "moe_experts",
    "moe_router_topk",
    "open_device",
    "pack_fp4_weights",
    "pack_sparse_fp4",
    "pack_u4_weights",
    "pack_weights",
    "prepare",
    "prepare_experts",
    "prepare_model",
    "prune",
    "quantize_model",
    "quantized_linear",
    "shard",
    "sparse_linear",
    "supported_model_types",
    "unpack_weights",
    "fold_input",
]
