"""Replacements for layers of mlx_lm that compute something else than the decoder runner."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Rotary(nn.Module):  # type: ignore[misc]
    """RoPE with the runner's frequencies; same interface as mlx_lm's."""

    def __init__(self, decoder: dict[str, Any]) -> None:
        super().__init__()
        inverse = mx.array(decoder["inverse_frequencies"], dtype=mx.float32)
        self._freqs, self._dims = 1.0 / inverse, 2 * inverse.size
        self._factor, self._traditional = decoder["rotary_factor"], decoder["interleaved_rotary"]

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if self._factor != 1.0:
            rotated, rest = mx.split(x, [self._dims], axis=-1)
            x = mx.concatenate([rotated * self._factor, rest], axis=-1)
        return mx.fast.rope(
            x, self._dims, traditional=self._traditional, base=None, scale=1.0, offset=offset,
            freqs=self._freqs,
        )


class TiedHead(nn.Module):  # type: ignore[misc]
    """A head that is the embeddings, for models whose head is always a module of its own."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._multiply = embedding.as_linear  # A method: the embeddings are no module of this one.

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self._multiply(x)
        return y


class SlidingAttention(nn.Module):  # type: ignore[misc]
    """An attention block of mlx_lm with a sliding window."""

    def __init__(self, attention: nn.Module, window: int) -> None:
        super().__init__()
        self.attention, self._window = attention, window

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        from mlx_lm.models.base import create_attention_mask

        own = create_attention_mask(x, cache, window_size=self._window)
        return self.attention(x, own, cache)


class GroupedGate(nn.Module):  # type: ignore[misc]
    """A router with a score-correction bias. mlx_lm's own gives experts outside of the top groups a
    score of 0, which may exceed negative corrected scores."""

    def __init__(self, gate: nn.Module, decoder: dict[str, Any]) -> None:
        super().__init__()
        self.weight, self.e_score_correction_bias = gate.weight, gate.e_score_correction_bias
        self._top_k, self._scale = decoder["top_k"], decoder["choice_scale"]
        self._groups, self._top_groups = decoder["groups"], decoder["top_groups"]
        self._normalizes = decoder["normalizes_choice"]

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        # In float32: a rounded score could change the top-k selection.
        logits = x.astype(mx.float32) @ self.weight.astype(mx.float32).T
        chosen, weights = _choose(
            logits, self.e_score_correction_bias, self._top_k, self._groups, self._top_groups,
            self._normalizes,
        )
        return chosen, weights * self._scale


@mx.compile  # type: ignore[untyped-decorator,unused-ignore]
def _choose(
    logits: mx.array, bias: mx.array, top_k: int, groups: int, top_groups: int, normalizes: bool
) -> tuple[mx.array, mx.array]:
    """Selects experts [..., top_k] and their weights."""
    scores = mx.sigmoid(logits)
    choice = scores + bias
    dropped = groups - top_groups
    if dropped > 0:
        grouped = mx.unflatten(choice, -1, (groups, -1))
        best = mx.topk(grouped, min(2, grouped.shape[-1]), axis=-1).sum(axis=-1, keepdims=True)
        worst = mx.argpartition(best, kth=dropped - 1, axis=-2)[..., :dropped, :]
        grouped = mx.put_along_axis(grouped, worst, mx.array(-float("inf")), axis=-2)
        choice = mx.flatten(grouped, -2, -1)
    chosen = mx.argpartition(-choice, kth=top_k - 1, axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    if normalizes:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return chosen, weights


__all__ = ["GroupedGate", "Rotary", "SlidingAttention", "TiedHead"]
