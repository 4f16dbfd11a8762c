"""Settings of a text to generate, the same for all endpoints."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from .. import _core
from .._arrays import options

_FROM_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Settings:
    """How a text is generated. None: what generation_config.json of the model says."""

    max_tokens: int | None = None
    """None: as many as the context holds."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """None: another one for every request."""
    stop: tuple[str, ...] = ()
    """Texts before which the text ends."""
    stop_token_ids: tuple[int, ...] = ()
    """In place of the model's end tokens, if there are any."""
    ignore_eos: bool = False
    logprobs: int = -1
    """How many of the most likely tokens are reported with each token's log-probability; -1: not
    even that."""
    prompt_logprobs: bool = False
    cache_salt: str = ""
    """Only requests with the same salt share cached prompts."""
    visible_special_tokens: tuple[str, ...] = ()
    """Special tokens that the text has, for an output parser."""

    def text_options(self, model: dict[str, Any], ends: list[int], room: int, copy: int) -> Any:
        """_core.TextOptions. `model` is `sampling` of a model's info, `ends` the stop tokens,
        `room` the most tokens; each `copy` of a request has a seed of its own."""
        sampling = {
            name: model[name] if getattr(self, name) is None else getattr(self, name)
            for name in _FROM_MODEL
        }
        seed = secrets.randbits(63) if self.seed is None else (self.seed + copy) % 2**64
        return options(
            _core.TextOptions(),
            **sampling,
            max_tokens=room if self.max_tokens is None else min(self.max_tokens, room),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=seed,
            stop_token_ids=ends,
            ignore_eos=self.ignore_eos,
        )
