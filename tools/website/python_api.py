"""Reference pages of the Python package: what `metal_marlin` exports, a page per module, and the
modules of other frameworks. mkdocstrings fills them from docstrings and stubs."""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = "reference/python"
# Modules that users import by name; their pages list what `__all__` does, or all that is public.
MODULES = ("kernels", "errors", "torch", "transformers", "mlx", "mlx_lm", "vllm")
_CORE = "devices and weights"


def exported(init: str) -> dict[str, list[str]]:
    """The exported names of a package's __init__.py, by the module that defines them."""
    tree = ast.parse(init)
    names = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
                 and getattr(node.targets[0], "id", "") == "__all__")
    origin = {alias.asname or alias.name: node.module or "" for node in tree.body
              if isinstance(node, ast.ImportFrom) and node.level == 1 for alias in node.names}
    found: dict[str, list[str]] = {}
    for name in names:
        if module := origin[name]:
            found.setdefault(module, []).append(name)
    return found


def _members(module: str) -> list[str]:
    """The public functions and classes of a module that has no `__all__`, in order."""
    tree = ast.parse(module)
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not node.name.startswith("_")]


def _named_types(module: str, exported_names: list[str]) -> list[str]:
    """The other public classes of a module that annotations of its exported ones name."""
    classes = {node.name: node for node in ast.parse(module).body if isinstance(node, ast.ClassDef)}
    annotations = [part.annotation for name in exported_names if name in classes
                   for part in classes[name].body if isinstance(part, ast.AnnAssign)]
    named = {node.id for annotation in annotations for node in ast.walk(annotation)
             if isinstance(node, ast.Name)}
    return [name for name in classes if name in named and name not in exported_names]


def _summary(module: str) -> str:
    return (ast.get_docstring(ast.parse(module)) or "").split("\n\n")[0]


def pages(root: Path) -> dict[str, str]:
    """The reference pages, by their address in the site."""
    package = root / "python/metal_marlin"
    found = {}
    for module, names in exported((package / "__init__.py").read_text()).items():
        if module in MODULES:
            continue
        text = "" if module == "_core" else (package / f"{module}.py").read_text()
        title = module if text else _CORE
        entries = [f"metal_marlin.{name}" for name in names]
        entries += [f"metal_marlin.{module}.{name}" for name in _named_types(text, names)]
        found[f"{FOLDER}/{title.replace(' ', '-')}.md"] = _page(
            title, "metal_marlin", _summary(text), entries)
    for module in MODULES:
        text = (package / f"{module}.py").read_text()
        found[f"{FOLDER}/{module}.md"] = _page(
            module, f"metal_marlin.{module}", _summary(text),
            [f"metal_marlin.{module}.{name}" for name in _members(text)])
    return found


def _page(title: str, module: str, summary: str, names: list[str]) -> str:
    heading = module if module.endswith(title) else f"{module}: {title}"
    entries = (f"::: {name}" for name in names)
    parts = [f"---\ntitle: {title}\n---", f"# {heading}", summary, *entries]
    return "\n\n".join(part for part in parts if part) + "\n"
