"""Large language models with 2- to 8-bit weights: quantize them, measure them, run them.

    quantize_model      a checkpoint to a quantized directory
    load                a directory to a Model: generate, perplexity, compare, logits
    plan, inspect       what a recipe makes of a model, what is in a checkpoint
    verify              checksums, and the error against the source
    dequantize_model, import_model, export_model    to and from other formats
    pack_weights, prepare, matmul                   single matrices of NumPy, PyTorch or MLX
    MarlinMoE, moe_experts                          layers of experts

Arrays may be NumPy, PyTorch, CuPy or MLX; results have the same kind as the inputs. Importing this
package imports only NumPy of these; `metal_marlin.torch`, `.transformers`, `.mlx` and `.mlx_lm`
import theirs. Errors are subclasses of MarlinError, with a message of one line.
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
    WeightsParts,
    devices,
    formats,
    supported_model_types,
)
from ._core import version as _version
from .checkpoints import dequantize_model, export_model, import_model, inspect, plan, verify
from .errors import (
    DeviceLostError,
    FileError,
    InvalidArgumentError,
    MalformedFileError,
    MarlinError,
    NonFiniteInputError,
    OutOfMemoryError,
    QueueFullError,
    UnsupportedError,
)
from .generation import GenerationStream
from .linear import (
    TiledWeights,
    batched_gemm,
    default_device,
    dequantize,
    expand,
    fold_input,
    from_marlin_w4,
    matmul,
    open_device,
    pack_fp4_weights,
    pack_sparse_fp4,
    pack_u4_weights,
    pack_weights,
    prepare,
    prune,
    quantized_linear,
    quantized_linear_striped,
    shard,
    sparse_linear,
    stacked_experts,
    to_marlin_w4,
    unpack_weights,
)
from .models import Model, load, prepare_model
from .moe import (
    ExpertCache,
    MarlinMoE,
    SharedExpert,
    moe_experts,
    moe_router_topk,
    prepare_experts,
)
from .quantization import (
    assign_formats,
    measure_importance,
    measure_sensitivity,
    quantize_model,
)
from .results import (
    ComparisonResult,
    DequantizationReport,
    DraftAcceptance,
    ExportReport,
    GenerationChunk,
    GenerationResult,
    ImportReport,
    Inspection,
    PerplexityResult,
    Plan,
    PreparationReport,
    QuantizationReport,
    VerificationReport,
)
from .text import TextCodec

__version__: str = _version()

__all__ = [
    "Checkpoint",
    "ComparisonResult",
    "DequantizationReport",
    "Device",
    "DeviceLostError",
    "DraftAcceptance",
    "ExpertCache",
    "ExpertSet",
    "ExportReport",
    "FileError",
    "GenerationChunk",
    "GenerationResult",
    "GenerationStream",
    "ImportReport",
    "Inspection",
    "InvalidArgumentError",
    "MalformedFileError",
    "MarlinError",
    "MarlinMoE",
    "MixedPrecisionConfig",
    "Model",
    "NonFiniteInputError",
    "OutOfMemoryError",
    "PerplexityResult",
    "Plan",
    "PreparationReport",
    "PreparedWeights",
    "QuantizationReport",
    "QuantizedWeights",
    "QueueFullError",
    "SharedExpert",
    "TextCodec",
    "TiledWeights",
    "UnsupportedError",
    "VerificationReport",
    "WeightsParts",
    "assign_formats",
    "batched_gemm",
    "default_device",
    "dequantize",
    "dequantize_model",
    "devices",
    "errors",
    "expand",
    "export_model",
    "fold_input",
    "formats",
    "from_marlin_w4",
    "import_model",
    "inspect",
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
    "plan",
    "prepare",
    "prepare_experts",
    "prepare_model",
    "prune",
    "quantize_model",
    "quantized_linear",
    "quantized_linear_striped",
    "shard",
    "sparse_linear",
    "stacked_experts",
    "supported_model_types",
    "to_marlin_w4",
    "unpack_weights",
    "verify",
]
