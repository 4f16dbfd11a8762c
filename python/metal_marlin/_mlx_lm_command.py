"""The commands of mlx_lm with the directories of this package: `python -m metal_marlin.mlx_lm`."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import MarlinError
from .hub import local_path

# Those that load a model through a name `load` of their own.
COMMANDS = ("generate", "server", "chat", "benchmark", "cache_prompt", "evaluate", "perplexity")
_USAGE = f"usage: python -m metal_marlin.mlx_lm {{{','.join(COMMANDS)}}} [options of mlx_lm]"


def hub_name(path: str | Path, revision: str | None) -> Any:
    """A path, or the name of a model on the Hub with its revision."""
    return path if revision is None or Path(path).exists() else f"{path}@{revision}"


def is_quantized_here(name: str, revision: str | None = None) -> bool:
    """Whether this package quantized a directory, or a repository on the Hub."""
    try:
        path = local_path(hub_name(name, revision), part="config", quiet=True)
        config = json.loads((Path(path) / "config.json").read_text())
        quantization = config.get("quantization_config") or {}
        return bool(quantization.get("quant_method") == "metal_marlin")
    except (OSError, ValueError, AttributeError, MarlinError):
        return False  # mlx_lm says what is wrong.


def load_any(load: Callable[..., Any], path_or_hf_repo: str, **options: Any) -> Any:
    """Loads by `load` if this package quantized the model, and by mlx_lm.load otherwise."""
    import mlx_lm

    ours = is_quantized_here(str(path_or_hf_repo), options.get("revision"))
    return (load if ours else mlx_lm.load)(path_or_hf_repo, **options)


def run_command(given: Sequence[str], load: Callable[..., Any]) -> int:
    """Runs a command of mlx_lm, which loads models by load_any. Returns the exit status."""
    if not given or given[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if given else 2
    if given[0] not in COMMANDS:
        print(f"{given[0]}: not a command here\n{_USAGE}", file=sys.stderr)
        return 2
    command: Any = importlib.import_module(f"mlx_lm.{given[0]}")
    if not callable(getattr(command, "load", None)):
        print(f"{given[0]}: this mlx_lm does not load models as expected", file=sys.stderr)
        return 1
    command.load = functools.partial(load_any, load)
    before = sys.argv
    sys.argv = [f"mlx_lm.{given[0]}", *given[1:]]
    try:
        command.main()
    except MarlinError as error:
        print(f"metal-marlin: {error}", file=sys.stderr)
        return 1
    finally:
        sys.argv = before
    return 0
