"""How a request's wish to think, or how much, reaches a chat template: by the variables it has."""

from __future__ import annotations

import re
from typing import Any

# What templates call the switch, and a bound of tokens, where they have them.
_SWITCHES = ("enable_thinking", "thinking")
_BUDGETS = ("thinking_budget", "thinking_budget_tokens")
_EFFORT = "reasoning_effort"
# The efforts that models were trained with, for those that the APIs have besides.
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _has(template: str, name: str) -> bool:
    """Whether a template reads a variable: not a member, a key, or a word of its text."""
    return re.search(rf"(?<![\w.'\"\[<]){name}\b(?!['\"\]>:]| *=[^=])", template) is not None


def thinking_variables(
    template: str,
    *,
    enabled: bool | None = None,
    effort: str | None = None,
    budget: int | None = None,
) -> dict[str, Any]:
    """The variables of a template for a wish; those that it does not read are left out.

    `effort` "none" switches thinking off, any other one on. A template without a switch belongs to
    a model that always thinks, or never does.
    """
    if enabled is None and effort is not None:
        enabled = effort != "none"
    found: dict[str, Any] = {}
    if enabled is not None:
        found.update({name: enabled for name in _SWITCHES if _has(template, name)})
    if effort not in (None, "none") and _has(template, _EFFORT):
        found[_EFFORT] = _EFFORTS.get(effort or "", effort)
    if budget is not None and enabled:
        found.update({name: budget for name in _BUDGETS if _has(template, name)})
    return found
