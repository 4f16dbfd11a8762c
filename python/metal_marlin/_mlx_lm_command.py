"""The commands of mlx_lm with the directories of this package: `python -m metal_marlin.mlx_lm`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from .errors import MarlinError
from .hub import local_path
from .mlx_lm import hub_name, load

# Those that load a model through a name `load` of their own.
COMMANDS = ("generate", "server", "chat", "benchmark", "cache_prompt", "evaluate", "perplexity")
_USAGE = f"usage: python -m metal_marlin.mlx_lm {{{','.join(COMMANDS)}}} [options of mlx_lm]"


def is_quantized_here(name: str, revision: str | None = None) -> bool:
    """Whether this package quantized a directory, or a repository on the Hub."""
    try:
        path = local_path(hub_name(name, revision), part="config", quiet=True)
        config = json.loads((Path(path) / "config.json").read_text())
        quantization = config.get("quantization_config") or {}
        return bool(quantization.get("quant_method") == "metal_marlin")
    except (OSError, ValueError, AttributeError, MarlinError):
        return False  # mlx_lm says what is wrong.


def load_any(path_or_hf_repo: str, *arguments: Any, **options: Any) -> Any:
    """mlx_lm.load, by this package's loader for what this package quantized."""
    import mlx_lm

    ours = is_quantized_here(str(path_or_hf_repo), options.get("revision"))
    return (load if ours else mlx_lm.load)(path_or_hf_repo, *arguments, **options)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command of mlx_lm."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if given else 2
    if given[0] not in COMMANDS:
        print(f"{given[0]}: not a command here\n{_USAGE}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"mlx_lm.{given[0]}")
    if not callable(getattr(command, "load", None)):
        print(f"{given[0]}: this mlx_lm does not load models as expected", file=sys.stderr)
        return 1
    command.load = load_any  # type: ignore[attr-defined]
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
