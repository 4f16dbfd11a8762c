"""Quantizing for other programs, which load the result without this library."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from . import _core
from ._arrays import call
from ._core import MixedPrecisionConfig
from .errors import InvalidArgumentError
from .hub import local_path


def quantize_for(
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
    """`models.quantize_model` with a destination; the options are the other ones of that.

    The quantized directory lies in a folder beside the output, which is removed at the end.
    """
    from .checkpoints import export_model
    from .quantization import quantize_model

    if target_bpw is not None:
        raise InvalidArgumentError("destination excludes target_bpw")
    if layout != "k_packed":
        raise InvalidArgumentError("layout: is that of the destination")
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
