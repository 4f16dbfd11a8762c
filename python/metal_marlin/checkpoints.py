"""Inspection, prediction, verification and conversion of checkpoints, by the command's code."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ._core import MixedPrecisionConfig
from ._documents import AnyPath, Progress, path_bytes, path_text, recipe_path, run_command
from .results import (
    DequantizationReport,
    ExportReport,
    ImportReport,
    Inspection,
    Plan,
    VerificationReport,
)


def verify(
    path: AnyPath,
    against: AnyPath | None = None,
    *,
    max_error: float | None = None,
    progress: Progress = None,
) -> VerificationReport:
    """Checks the checksums of a quantized checkpoint, or of a file that `prepare_model` wrote.

    With `against`, the checkpoint that it was made from, the report has the error of every tensor.
    `ok` is False if the relative error of one exceeds max_error. progress is True for a bar, or a
    function of (done, total). Errors: MalformedFileError naming the first tensor whose checksum or
    values are wrong; InvalidArgumentError for a checkpoint that is not quantized.
    """
    document = run_command(
        "verify", {"path": path}, progress, against=against, max_error=max_error
    )
    return VerificationReport.from_document(document)


def plan(
    config: AnyPath | dict[str, Any],
    recipe: MixedPrecisionConfig | AnyPath | None = None,
    *,
    bandwidth: float | None = None,
    memory: int | str | None = None,
    context: int | None = None,
    kv_cache: str | None = None,
) -> Plan:
    """Predicts what a recipe makes of a model: sizes, bits per weight, the speed of decoding.

    No weights are read: `config` is a config.json, its content as a dict, a directory or a
    .safetensors file. `recipe` is as for `quantize_model`. bandwidth is the memory bandwidth in
    GB/s; None: measured on this machine, which takes a moment. With memory, in bytes or as "24GB",
    `placement` says what fits next to a KV cache of `context` tokens (None: 4096) of type kv_cache
    ("f32", "bf16" or "fp8_e4m3"; None: "bf16"). Errors: UnsupportedError for an unknown
    architecture.
    """
    with TemporaryDirectory(prefix="metal-marlin-") as folder, recipe_path(recipe) as chosen:
        source: AnyPath = Path(folder) / "config.json"
        if isinstance(config, dict):
            Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        else:
            source = config
        document = run_command(
            "plan",
            {"config": source},
            recipe=chosen,
            bandwidth=bandwidth,
            memory=memory,
            context=context,
            kv_cache=kv_cache,
        )
    return Plan.from_document(document)


def inspect(path: AnyPath, *, allow_extra_tensors: bool = False) -> Inspection:
    """Lists the tensors of a checkpoint: a directory, a .safetensors or a GGUF file.

    allow_extra_tensors is as for `load`. Errors: MalformedFileError, FileError.
    """
    document = run_command("inspect", {"path": path}, allow_extra_tensors=allow_extra_tensors)
    return Inspection.from_document({**document, "path": path_text(path)})


def dequantize_model(
    source: AnyPath,
    output: AnyPath,
    *,
    dtype: str = "bf16",
    overwrite: bool = False,
    progress: Progress = None,
) -> DequantizationReport:
    """Writes a quantized checkpoint, also of another program, as a plain one.

    dtype is "bf16", "fp16" or "fp32". The directory `output` appears complete or not at all;
    overwrite replaces one that exists. progress is as for `verify`.
    """
    document = run_command(
        "dequantize",
        {"source": source},
        progress,
        output=output,
        dtype=dtype,
        overwrite=overwrite,
    )
    return DequantizationReport.from_document({**document, "output": path_text(output)})


def import_model(
    source: AnyPath,
    output: AnyPath,
    *,
    allow_requantize: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    model_card: bool = True,
    allow_extra_tensors: bool = False,
    shard_bytes: int = 5 << 30,
    progress: Progress = None,
) -> ImportReport:
    """Converts a checkpoint of another program, keeping its codes, to a directory of this one.

    `source` is a file (GGUF, ONNX) or a directory. `modules` of the report has the exactness of
    each matrix. With `allow_requantize`, matrices that no format of codes holds become s8 in groups
    of 32, and have `relative_error` and `max_error`; otherwise they become floats. shard_bytes is
    the largest file to write; model_card is as for `quantize_model`, allow_extra_tensors as for
    `load`. progress is True for a bar, or a function of (done, total) bytes; an exception that it
    raises propagates, and no output is left then.
    """
    document = run_command(
        "import",
        {"source": source},
        progress,
        output=output,
        allow_requantize=allow_requantize,
        overwrite=overwrite,
        dry_run=dry_run,
        no_model_card=not model_card,
        allow_extra_tensors=allow_extra_tensors,
        shard_bytes=shard_bytes,
    )
    return ImportReport.from_document({**document, "output": path_text(output)})


def export_model(
    source: AnyPath,
    output: AnyPath,
    to: str,
    *,
    overwrite: bool = False,
    model_card: bool = True,
    allow_extra_tensors: bool = False,
    shard_bytes: int = 5 << 30,
    progress: Progress = None,
) -> ExportReport:
    """Writes a checkpoint in the format of another program, keeping its codes.

    `to` is "gguf" (then `source` may be unquantized, and `output` is a file if it ends in ".gguf",
    otherwise a directory of shards), "compressed-tensors", "gptq", "awq", "mlx" or "plain".
    shard_bytes: the largest safetensors file, or the most bytes of tensors in a shard. Errors:
    UnsupportedError naming the first matrix that the format cannot hold. model_card as for
    `quantize_model`, for directories; allow_extra_tensors as for `load`, progress as for
    `import_model`.
    """
    one_file = to == "gguf" and path_bytes("output", output).endswith(b".gguf")
    document = run_command(
        "export",
        {"source": source},
        progress,
        output=output,
        to=to,
        overwrite=overwrite,
        no_model_card=not model_card,
        allow_extra_tensors=allow_extra_tensors,
        shard_bytes=None if one_file else shard_bytes,
    )
    return ExportReport.from_document({**document, "output": path_text(output)})
