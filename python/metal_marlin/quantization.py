"""Quantizing models: checkpoints to directories, what quantizing costs, calibration texts."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import _core
from ._arrays import call, options
from ._core import Device, MixedPrecisionConfig
from ._documents import AnyPath, Progress, listening
from .checkpoints import export_model
from .errors import FileError, InvalidArgumentError
from .hub import local_path
from .models import Prompt, open_model_device
from .results import QuantizationReport
from .text import TextCodec


def quantize_model(
    source: AnyPath,
    output: AnyPath,
    recipe: MixedPrecisionConfig | AnyPath | None = None,
    *,
    target_bpw: float | None = None,
    sensitivity: dict[str, Any] | AnyPath | None = None,
    formats: Sequence[str] = (),
    method: str = "rtn",
    calibration: Prompt | None = None,
    calibration_tokens: int = 0,
    seed: int = 0,
    sparsity: str | None = None,
    pruning: str | None = None,
    imatrix: AnyPath | None = None,
    device: Device | str | None = None,
    overwrite: bool = False,
    strict: bool = False,
    resume: bool = False,
    model_card: bool = True,
    allow_extra_tensors: bool = False,
    shard_bytes: int = 5 << 30,
    layout: str = "k_packed",
    destination: str | None = None,
    progress: Progress = None,
) -> QuantizationReport:
    """Quantizes a checkpoint to a directory that appears complete or not at all.

    method is "rtn", "mse", "gptq", "awq" or "awq+gptq". The last three run the model on `device`
    over `calibration`, a text or token ids; without one the model writes the text itself, from
    `seed`. calibration_tokens: how many of its tokens are used; 0: 16384 or more. `fallbacks` of
    the result lists matrices with too few tokens, or that the model does not run, and
    `calibrated_parameters` counts the others; `scaled_inputs` of `inputs` got scales by awq,
    which are multiplied into the tensors around them; of `rotatable` matrices, whose recipe has
    Hadamard blocks, `rotated` got them. imatrix is an importance matrix of llama.cpp,
    in either of its forms, for method "mse": errors are weighted by the inputs that it measured.

    sparsity "2:4" or "dense" replaces the sparsity of every class of the recipe. pruning, for
    methods with gptq, says which two of four weights are kept: "magnitude", "weighted" (by the
    inputs) or "compensated", the default; other methods prune by magnitude.

    `recipe` is a MixedPrecisionConfig, a preset's name, "uniform:FORMAT/gN" or a JSON file; None:
    "default_moe" for a model with experts, otherwise "default_dense". With target_bpw, every
    matrix gets one of `formats`: together they have at most that many bits per weight, scales
    included, and move the predictions least: according to `sensitivity`, what measure_sensitivity
    returned or a file of it; None: measured first, on `device` over `calibration`.

    layout "marlin_w4" stores dense 4-bit codes in tiles for programs that read these. With
    destination "llama.cpp", "mlx-lm", "vllm" or "transformers" the output is what that program
    loads, a file (.gguf) for the first; the recipe is its own, or checked against what it loads.

    progress is True for a bar, or a function of (done,
    total) parameters. With model_card the directory gets a README.md; one that somebody wrote or
    changed in a directory that is replaced is kept. An exception raised by `progress` aborts the
    call and propagates; no output is left then. allow_extra_tensors as for `load`.
    """
    if destination is not None:
        return _quantize_for(**locals())
    source = local_path(source)
    start = time.perf_counter()
    predicted: dict[str, float] = {}
    measures = target_bpw is not None and sensitivity is None
    runs_model = _core.needs_calibration(method) or measures
    if not runs_model and (calibration is not None or calibration_tokens or seed):
        raise InvalidArgumentError(f"method {method}: uses no calibration")
    # Other methods run no model.
    runner = open_model_device(device if runs_model else "cpu")
    ids = _calibration_ids(source, calibration)
    if target_bpw is None:
        if sensitivity is not None or formats:
            raise InvalidArgumentError("sensitivity and formats: need target_bpw")
        if recipe is None:
            recipe = call(_core.default_recipe, source)
        elif not isinstance(recipe, MixedPrecisionConfig):
            recipe = MixedPrecisionConfig.from_name_or_file(recipe)
    elif recipe is not None or sparsity is not None:
        raise InvalidArgumentError("target_bpw excludes recipe and sparsity")
    elif not 0 < target_bpw < math.inf:
        raise InvalidArgumentError(f"target_bpw: expected a positive number, got {target_bpw}")
    else:
        if sensitivity is None:
            text = _text_options(source, ids or None, calibration_tokens, seed, None)
            sensitivity = _measured(source, formats, text, runner, target_bpw)
        recipe, predicted_kl = _assigned(source, sensitivity, target_bpw, formats)
        predicted["predicted_kl"] = predicted_kl
        predicted["search_seconds"] = time.perf_counter() - start
    assert isinstance(recipe, MixedPrecisionConfig)
    if sparsity is not None:
        recipe = call(recipe.with_sparsity, sparsity)
    directory = options(
        _core.DirectoryOptions(),
        method=method,
        overwrite=overwrite,
        strict=strict,
        resume=resume,
        model_card=model_card,
        allow_extra_tensors=allow_extra_tensors,
        shard_bytes=shard_bytes,
        layout=layout,
        calibration=ids,
        calibration_tokens=calibration_tokens,
        seed=seed,
        pruning=pruning or "compensated",
        imatrix=imatrix,
    )
    if pruning is not None:
        call(_core.check_pruning, pruning, method)
    with listening(progress, "quantize") as listener:
        options(directory, progress=listener)
        report = call(_core.quantize_model, source, output, recipe, directory, runner)
    seconds = time.perf_counter() - start
    return QuantizationReport.from_document({**report, **predicted, "seconds": seconds})


def _quantize_for(
    destination: str,
    source: Any,
    output: Any,
    recipe: Any,
    *,
    target_bpw: float | None,
    overwrite: bool,
    layout: str,
    **options: Any,
) -> Any:
    """quantize_model with a destination; `options` are its other arguments.

    The quantized directory lies in a folder next to the output, which is removed at the end.
    """
    if target_bpw is not None:
        raise InvalidArgumentError("destination excludes target_bpw")
    if call(_core.is_tiled_layout, layout):
        raise InvalidArgumentError("layout: the destination has its own")
    source = local_path(source)
    if recipe is not None and not isinstance(recipe, MixedPrecisionConfig):
        recipe = MixedPrecisionConfig.from_name_or_file(recipe)
    recipe = call(_core.destination_recipe, destination, source, recipe)
    target, folder = call(_core.destination_output, destination, output, overwrite)
    try:
        report = quantize_model(source, folder.quantized, recipe, overwrite=True, **options)
        written = {key: options[key] for key in ("model_card", "shard_bytes", "progress")}
        export_model(folder.quantized, output, target, overwrite=overwrite, **written)
    finally:
        folder.remove()
    path = os.fsdecode(output)
    if dataclasses.is_dataclass(report):
        return dataclasses.replace(report, output=path)
    return {**report, "output": path}


def _text_options(
    source: AnyPath,
    calibration: Prompt | None,
    tokens: int,
    seed: int,
    progress: Callable[[int, int], object] | None,
) -> _core.DirectoryOptions:
    """Options for a measurement: its text, and the callable that hears of its progress."""
    return options(
        _core.DirectoryOptions(),
        calibration=_calibration_ids(source, calibration),
        calibration_tokens=tokens,
        seed=seed,
        progress=progress,
    )


def measure_sensitivity(
    source: AnyPath,
    formats: Sequence[str] = (),
    *,
    calibration: Prompt | None = None,
    calibration_tokens: int = 0,
    seed: int = 0,
    device: Device | str | None = None,
    progress: Progress = None,
) -> dict[str, Any]:
    """Quantizes each matrix of a model alone, in each format, and measures the KL divergence of the
    predictions, in nats per token.

    formats: "nf3/g64", ...; none: int2/g64/frac, nf3/g64, nf4/g64 and s8/g64. The text is
    `calibration`, or written by the model; calibration_tokens: how many tokens are used, 0: 2048.
    progress is True for a bar, or a function of (done, total). Returns the JSON of
    `metal-marlin analyze --sensitivity --json`.
    """
    source = local_path(source)
    with listening(progress, "measure") as listener:
        text = _text_options(source, calibration, calibration_tokens, seed, listener)
        return _measured(source, formats, text, open_model_device(device))


def _measured(
    source: AnyPath,
    formats: Sequence[str],
    text: _core.DirectoryOptions,
    device: Device,
    target_bpw: float = 0.0,
) -> dict[str, Any]:
    """The sensitivity of a model; an error, before it is measured, if no choice of the formats has
    so few bits per weight."""
    measured = call(
        _core.measure_sensitivity, source, list(formats), text, device, float(target_bpw)
    )
    return dict(json.loads(measured))


def measure_importance(
    source: AnyPath,
    output: AnyPath,
    *,
    calibration: Prompt | None = None,
    calibration_tokens: int = 0,
    seed: int = 0,
    device: Device | str | None = None,
    progress: Progress = None,
) -> dict[str, Any]:
    """Measures the mean square of every input of every matrix of a model, for experts over the
    tokens that select them, and writes them to `output` as an importance matrix of llama.cpp, GGUF,
    which `imatrix` of quantize_model takes.

    The text is `calibration`, or written by the model; calibration_tokens: how many tokens are
    used, 0: 16384. progress is True for a bar, or a function of (done, total) layers. Returns the
    JSON of `metal-marlin analyze --importance --json`. Errors: FileError for a file that cannot be
    written, found before the model runs; InvalidArgumentError for a quantized model.
    """
    source = local_path(source)
    path = Path(os.fsdecode(output))
    _check_writable(path)
    with listening(progress, "measure") as listener:
        file, summary = call(
            _core.measure_importance,
            source,
            "calibration" if calibration is not None else f"sampled from the model, seed {seed}",
            _text_options(source, calibration, calibration_tokens, seed, listener),
            open_model_device(device),
        )
    try:
        path.write_bytes(file)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}") from error
    return dict(json.loads(summary))


def _check_writable(path: Path) -> None:
    """Raises FileError for a file that cannot be written; leaves one that is there as it is."""
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}") from error


def assign_formats(
    source: AnyPath,
    sensitivity: dict[str, Any] | AnyPath,
    target_bpw: float,
    formats: Sequence[str] = (),
) -> MixedPrecisionConfig:
    """A recipe with at most target_bpw bits per weight for the matrices of a sensitivity, a dict or
    a file. formats: which of the measured ones may be chosen; none: all."""
    source = local_path(source)
    return _assigned(source, sensitivity, target_bpw, formats)[0]


def _assigned(
    source: AnyPath,
    sensitivity: dict[str, Any] | AnyPath,
    target_bpw: float,
    formats: Sequence[str],
) -> tuple[MixedPrecisionConfig, float]:
    """A recipe, and the KL divergence that it is predicted to cause."""
    given = isinstance(sensitivity, dict)
    text = json.dumps(sensitivity) if given else ""
    file = None if given else sensitivity
    recipe, kl = call(_core.assign_formats, source, file, text, target_bpw, list(formats))
    return recipe, float(kl)


def _calibration_ids(source: AnyPath, calibration: Prompt | None) -> list[int]:
    """The token ids of a calibration text; none: the model writes it."""
    if calibration is None:
        return []
    if isinstance(calibration, str):
        ids = TextCodec(source).encode(calibration) if calibration else []
    else:
        try:
            ids = [operator.index(token) for token in calibration]
        except TypeError as error:
            raise InvalidArgumentError(
                f"calibration: expected text or token ids: {error}"
            ) from error
    if not ids:
        raise InvalidArgumentError("calibration: has no tokens")
    return ids
