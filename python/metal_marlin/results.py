"""The results of calls, as frozen dataclasses.

The fields are the keys of the JSON that the command of the same name prints with `--json`. A result
can also be read like a dict: `result["text"]`, `dict(result)`; `to_dict()` is ready for json.dumps.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

_R = TypeVar("_R", bound="Record")
_SHOWN_TEXT = 60
# What stop reasons are called in the API of vLLM and OpenAI.
_FINISH_REASONS = {
    "stop_token": "stop",
    "stop_text": "stop",
    "max_tokens": "length",
    "context_full": "length",
    "stopped": "abort",
}


def _short(value: Any) -> str:
    """A value in the repr of a result: long texts are cut, lists are counted."""
    if isinstance(value, str) and len(value) > _SHOWN_TEXT:
        return repr(value[:_SHOWN_TEXT] + "...")
    if isinstance(value, list) and (len(value) > 4 or any(isinstance(v, Record) for v in value)):
        return f"[{len(value)} items]"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _typed(kind: Any, value: Any) -> Any:
    """A value of JSON as its field declares it: dicts become the dataclasses that it names."""
    if value is None:
        return None
    origin = typing.get_origin(kind)
    # Python 3.10 takes list[int] for a class.
    if origin is None and isinstance(kind, type) and issubclass(kind, Record):
        return kind.from_document(value)
    inner = [option for option in typing.get_args(kind) if option is not type(None)]
    if origin is list:
        return [_typed(inner[0], item) for item in value]
    return _typed(inner[0], value) if len(inner) == 1 else value


class Record(Mapping[str, Any]):
    """A result: its fields are attributes, and keys of a mapping that cannot be changed.

    A field that is None unless something was asked for is then no key, as in the command's JSON.
    """

    def _keys(self) -> list[str]:
        parts = fields(self)  # type: ignore[arg-type]
        return [p.name for p in parts if p.default is not None or getattr(self, p.name) is not None]

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys():
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={_short(v)}" for k, v in self.items() if v is not None)
        return f"{type(self).__name__}({shown})"

    def to_dict(self) -> dict[str, Any]:
        """The result as plain dicts and lists."""

        def plain(value: Any) -> Any:
            if isinstance(value, Record):
                return value.to_dict()
            return [plain(item) for item in value] if isinstance(value, list) else value

        return {name: plain(value) for name, value in self.items()}

    @classmethod
    def from_document(cls: type[_R], document: Mapping[str, Any]) -> _R:
        """The result that a document of the command says. Errors: TypeError for a missing key."""
        types = _types(cls)
        known = {name: value for name, value in document.items() if name in types}
        return cls(**{name: _typed(types[name], value) for name, value in known.items()})


@dataclass(frozen=True, eq=False, repr=False)
class GenerationResult(Record):
    """The text that `Model.generate` added to a prompt."""

    text: str | None
    """The text after the prompt, up to a stop string, without special tokens;
    None for a prompt of token ids without `stop` and `on_text`."""
    token_ids: list[int]
    """The new tokens, including the tokens of a stop string, without a stop token."""
    stop_reason: str
    """"max_tokens", "context_full", "stop_token", "stop_text", or "stopped" by a callback."""
    tokens_per_second: float
    """Of the tokens after the first."""
    prompt_tokens: int
    """Tokens of the prompt."""
    prefill_seconds: float
    """Time until the first token."""
    decode_seconds: float
    """Time for all tokens after the first."""
    sampling: dict[str, float]
    """How tokens were chosen: temperature, top_k, top_p, min_p, repetition_penalty."""
    drafts: dict[str, float]
    """Guesses of speculation: passes with some, tokens drafted and accepted, and mean_accepted per
    such pass."""

    @property
    def finish_reason(self) -> str:
        """stop_reason in the words of vLLM: "stop", "length", or "abort" by a callback."""
        return _FINISH_REASONS[self.stop_reason]


@dataclass(frozen=True, eq=False, repr=False)
class GenerationChunk(Record):
    """A part of a text while it is generated; the parts joined are the GenerationResult's."""

    text: str | None
    """New text: whole characters, never a part of a stop string; None where the result has none."""
    token_ids: list[int]
    """The tokens since the last chunk."""
    index: int
    """The number of the prompt in a list of prompts."""
    stop_reason: str | None
    """Why the text ended, in its last chunk; None in the others."""

    @property
    def finish_reason(self) -> str | None:
        """stop_reason in the words of vLLM: "stop", "length", "abort"; None before the end."""
        return None if self.stop_reason is None else _FINISH_REASONS[self.stop_reason]


@dataclass(frozen=True, eq=False, repr=False)
class PerplexityResult(Record):
    """How well a model predicts a text."""

    perplexity: float
    """exp(nll)."""
    nll: float
    """Mean negative log likelihood, in nats per token."""
    tokens: int
    """Predictions that count."""
    standard_error: float
    """Of the perplexity."""
    windows: int
    """Windows of the text."""


@dataclass(frozen=True, eq=False, repr=False)
class ComparedPerplexity(Record):
    """The perplexity of one of two compared models."""

    perplexity: float
    """exp(nll)."""
    nll: float
    """Mean negative log likelihood, in nats per token."""
    standard_error: float
    """Of the perplexity."""


@dataclass(frozen=True, eq=False, repr=False)
class DraftAcceptance(Record):
    """How often a layer that predicts further tokens (MTP) guesses what the model says."""

    depth: int
    """1: the guess after the model's own; 2: the one after that, and so on."""
    accepted: float
    """Fraction of positions where the guess is the model's most likely token."""
    positions: int
    """Guesses that count."""


@dataclass(frozen=True, eq=False, repr=False)
class ComparisonResult(Record):
    """A model against a reference on the same text; KL(reference || model) in nats per token."""

    model: ComparedPerplexity
    """The model's own."""
    reference: ComparedPerplexity
    """The reference's."""
    tokens: int
    """Predictions that count."""
    windows: int
    """Windows of the text."""
    perplexity_ratio: float
    """The model's perplexity over the reference's."""
    perplexity_ratio_error: float
    """Standard error of the ratio."""
    kl_mean: float
    """Mean of the KL divergence."""
    kl_median: float
    """Median of the KL divergence."""
    kl_p99: float
    """99 % of the positions have a smaller divergence."""
    kl_max: float
    """The largest divergence."""
    top1_agreement: float
    """Fraction of positions with the same most likely token."""


@dataclass(frozen=True, eq=False, repr=False)
class SkippedTensor(Record):
    """A tensor or file that was treated otherwise, and why."""

    name: str
    """Of the tensor or file."""
    reason: str
    """One line."""


@dataclass(frozen=True, eq=False, repr=False)
class ModelEnd(Record):
    """The embedding or the head of a model."""

    format: str
    """"int6/g64", as in recipes, or a type of numbers."""
    bits_per_weight: float
    """Scales included."""


@dataclass(frozen=True, eq=False, repr=False)
class ModelEnds(Record):
    """The embedding and the head of a model."""

    embedding: ModelEnd | None
    """None: there is none."""
    head: ModelEnd | None
    """The embedding if that is the head, too."""
    tied: bool
    """Whether the embedding is the head, too."""


@dataclass(frozen=True, eq=False, repr=False)
class QuantizationReport(Record):
    """Contents and sizes of a directory that `quantize_model` wrote."""

    output: str
    """The directory."""
    recipe: str
    """The name of the recipe."""
    method: str
    """"rtn", "mse", "gptq", "awq" or "awq+gptq"."""
    dry_run: bool
    """Whether nothing was written."""
    tensors: int
    """Tensors of the source."""
    parameters: int
    """Elements of all tensors of the source."""
    quantized_parameters: int
    """Those that became codes."""
    bits_per_weight: float
    """Over all parameters, scales included."""
    quantized_bits_per_weight: float
    """Codes, scales and zeros, over the quantized parameters."""
    bytes: int
    """Size of the tensors written."""
    coverage: float
    """quantized_parameters / parameters."""
    ends: ModelEnds
    """The embedding and the head as written."""
    calibrated_parameters: int
    """Elements of the matrices whose codes a calibration text decided."""
    skipped: list[SkippedTensor]
    """Tensors that were left unquantized."""
    fallbacks: list[SkippedTensor]
    """Matrices that the method had too little data for, and what was used instead."""
    unselected_experts: list[str]
    """gptq: experts that no token selects, "model.layers.2.expert 3"; the inputs of all tokens
    decided their codes."""
    notes: list[str]
    """Parts of the source that are read otherwise than they are stored."""
    zeroed_groups: int
    """Groups that became zero because their scale is too small for its type."""
    inputs: int
    """awq: inputs of layers that scales were searched for."""
    scaled_inputs: int
    """awq: those that got scales."""
    rotatable: int
    """Matrices whose recipe has Hadamard blocks."""
    rotated: int
    """Those that got them, because they lower the error."""
    runs: bool
    """Whether `load` runs models of this type."""
    seconds: float
    """Wall time."""
    predicted_kl: float | None = None
    """With target_bpw: the KL divergence that the formats are predicted to cause, summed."""
    search_seconds: float | None = None
    """With target_bpw: the time that it took to measure and to choose the formats."""


@dataclass(frozen=True, eq=False, repr=False)
class PreparationReport(Record):
    """A file that `prepare_model` wrote."""

    output: str
    """The file."""
    layout: str
    """The layout of weights and its version: "cpu_panels/1"."""
    bytes: int
    """The file's size."""
    seconds: float
    """Wall time."""


@dataclass(frozen=True, eq=False, repr=False)
class DequantizationReport(Record):
    """A directory that `dequantize_model` wrote."""

    output: str
    """The directory."""
    dtype: str
    """"bf16", "fp16" or "fp32"."""
    tensors: int
    """Tensors written."""
    bytes: int
    """Their size."""
    seconds: float
    """Wall time."""


@dataclass(frozen=True, eq=False, repr=False)
class ImportedMatrix(Record):
    """A matrix as `import_model` writes it."""

    name: str
    """Of its tensor in the source."""
    format: str
    """Its weight format here."""
    group_size: int
    """Weights along K that share a scale; 0: all of K."""
    exactness: str
    """Whether the values are the source's: "exact", "re-rounded" ..."""
    growth: float
    """Its size here over that in the source."""
    relative_error: float | None = None
    """For a re-rounded matrix: norm of the error relative to the weights."""
    max_error: float | None = None
    """Of a re-rounded matrix: the largest error of a weight."""


@dataclass(frozen=True, eq=False, repr=False)
class ImportReport(Record):
    """Contents and sizes of a directory that `import_model` wrote."""

    output: str
    """The directory."""
    method: str
    """The program or format of the source: "gptq", "gguf" ...; empty: floats."""
    dry_run: bool
    """Whether nothing was written."""
    tensors: int
    """Tensors of the source."""
    parameters: int
    """Elements of all tensors of the source."""
    quantized_parameters: int
    """Those that are codes."""
    bits_per_weight: float
    """Over all parameters, scales included."""
    bytes: int
    """Size of the tensors written."""
    source_bytes: int
    """Size of the tensors of the source."""
    coverage: float
    """quantized_parameters / parameters."""
    modules: list[ImportedMatrix]
    """The matrices."""
    skipped: list[SkippedTensor]
    """Tensors that are floats."""
    files: list[SkippedTensor]
    """Files that the model lacks here."""
    notes: list[str]
    """Parts of the source that are read otherwise than they are stored."""
    seconds: float
    """Wall time."""


@dataclass(frozen=True, eq=False, repr=False)
class ExportReport(Record):
    """A checkpoint that `export_model` wrote."""

    output: str
    """The directory or file."""
    target: str
    """The format: "gguf", "gptq" ..."""
    files: list[SkippedTensor]
    """Files that the output lacks."""
    notes: list[str]
    """Parts that are stored otherwise than in the source."""
    seconds: float
    """Wall time."""


@dataclass(frozen=True, eq=False, repr=False)
class ClassError(Record):
    """The error of all matrices of a layer class."""

    layer_class: str
    """"attention_qkv", "moe_expert" ..."""
    relative_error: float
    """Frobenius norm of the error relative to the weights."""
    sqnr_db: float | None
    """Signal to quantization noise, in dB; None without error."""
    max_error: float
    """The largest error of a weight."""
    parameters: int
    """Weights."""


@dataclass(frozen=True, eq=False, repr=False)
class TensorError(Record):
    """The error of a tensor against its source."""

    name: str
    """The source's name; "*" stands for the number of stacked experts."""
    format: str
    """Its weight format, or element type."""
    layer_class: str
    """"attention_qkv", "moe_expert" ..."""
    relative_error: float
    """Frobenius norm of the error relative to the weights."""
    sqnr_db: float | None
    """Signal to quantization noise, in dB; None without error."""
    max_error: float
    """The largest error of a weight."""
    parameters: int
    """Weights."""


@dataclass(frozen=True, eq=False, repr=False)
class VerificationReport(Record):
    """Checksums and errors of a checkpoint. A wrong checksum raises instead."""

    ok: bool
    """Whether no tensor's error exceeds max_error."""
    checksums: int = 0
    """Tensors that match their checksum; 0 for files of other programs, which have none."""
    tensors: list[TensorError] = field(default_factory=list)
    """With `against`: the error of every tensor."""
    classes: list[ClassError] = field(default_factory=list)
    """With `against`: the error of every layer class."""


@dataclass(frozen=True, eq=False, repr=False)
class PlanTotals(Record):
    """Sizes of a part of a model under a recipe."""

    tensors: int
    """Tensors."""
    parameters: int
    """Their elements."""
    quantized_parameters: int
    """Those that become codes."""
    bits_per_weight: float
    """Over all parameters, scales included."""
    bytes: int
    """Size of the tensors."""


@dataclass(frozen=True, eq=False, repr=False)
class PlannedLayer(PlanTotals):
    """Sizes of a layer."""

    name: str
    """"model.layers.0"."""


@dataclass(frozen=True, eq=False, repr=False)
class PlannedClass(PlanTotals):
    """Sizes of a layer class."""

    layer_class: str
    """"attention_qkv", "moe_expert" ..."""
    formats: dict[str, int]
    """Parameters of each format; "keep": 16 bits."""


@dataclass(frozen=True, eq=False, repr=False)
class DecodePlan(Record):
    """The bandwidth bound of decoding one token."""

    bytes_per_token: int
    """Bytes of weights that a token reads."""
    bandwidth_gbps: float
    """Memory bandwidth in GB/s."""
    bandwidth_source: str
    """"given" or "measured", on this machine."""
    tokens_per_second: float
    """At most."""
    bf16_tokens_per_second: float
    """At most, with all weights in 16 bits."""


@dataclass(frozen=True, eq=False, repr=False)
class PlacementPlan(Record):
    """The parts of a model in a device's memory, and those on the host."""

    memory_bytes: int
    """The memory."""
    context_tokens: int
    """Tokens in the KV cache."""
    fits: bool
    """Whether the model does, with experts on the host where it has any."""
    resident_bytes: int
    """Bytes that must be on the device."""
    kv_cache_bytes: int
    """The part of the KV cache."""
    state_bytes: int
    """Two recurrent states of a sequence, which it takes while it is fed."""
    expanded_bytes: int
    """Heads that prefill expands latents to."""
    experts: int
    """Experts of a layer."""
    device_experts: int
    """Those on the device."""
    host_bytes: int
    """Bytes of the others."""
    host_bytes_per_token: int
    """Bytes of them that a token reads, if all are equally frequent."""


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Record):
    """Sizes and decode speed that `plan` predicts for a recipe."""

    model_type: str
    """Of config.json."""
    recipe: str
    """The name of the recipe."""
    parameters: int
    """Of the model."""
    active_parameters: int
    """Those that a token uses."""
    embedding_parameters: int
    """Of the embedding table."""
    prediction_parameters: int
    """Of multi-token-prediction layers, which the other counts leave out."""
    quantized_parameters: int
    """Those that become codes."""
    bits_per_weight: float
    """Over all parameters, scales included."""
    ends: ModelEnds
    """Formats of the embedding and the head."""
    bytes: int
    """Size of the tensors."""
    bf16_bytes: int
    """Their size in 16 bits."""
    kv_cache: str
    """The element type of keys and values."""
    kv_cache_bytes_per_token: int | None
    """None where config.json does not say."""
    state_bytes_per_sequence: int
    """Size of a sequence's recurrent states, whatever its length."""
    decode: DecodePlan
    """The bandwidth bound of decoding."""
    layers: list[PlannedLayer]
    """Sizes of every layer."""
    outside_layers: PlanTotals
    """Sizes of embeddings, norms and lm_head."""
    classes: list[PlannedClass]
    """Sizes and formats of every layer class."""
    placement: PlacementPlan | None = None
    """With `memory`: the parts that fit it."""


@dataclass(frozen=True, eq=False, repr=False)
class InspectedTensor(Record):
    """A tensor of a checkpoint; a quantized matrix is one tensor."""

    name: str
    """The source's name; "*" stands for the number of stacked experts."""
    format: str
    """Its weight format, or element type."""
    shape: list[int]
    """[K, N] or [experts, K, N] if quantized; otherwise as stored."""
    group_size: int | None
    """Weights along K that share a scale; None if not quantized."""
    sparsity: str | None
    """"dense" or "2:4"; None if not quantized."""
    permutation: bool | None
    """Whether it is stored with a permutation along K; None if not quantized."""
    input_scale: bool | None
    """Whether products scale their inputs; None if not quantized."""
    input_hadamard: int | None
    """The size of Hadamard blocks, 0: none; None if not quantized."""
    bits_per_weight: float
    """Scales included."""
    bytes: int
    """Its size."""
    layer_class: str
    """"attention_qkv", "moe_expert" ..."""


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Record):
    """The tensors of a checkpoint, and their sizes."""

    path: str
    """The checkpoint."""
    quantized: bool
    """Whether `quantize` wrote it."""
    method: str
    """"metal_marlin", "gptq", "gguf" ...; empty if it is not quantized."""
    recipe: str | None
    """The name of the recipe; None if `quantize` did not write it."""
    notes: list[str]
    """Parts that are read otherwise than they are stored."""
    tensors: list[InspectedTensor]
    """Quantized matrices first, then the plain tensors; each in name order."""
    parameters: int
    """Elements of all tensors."""
    bits_per_weight: float
    """Over all parameters, scales included."""
    bytes: int
    """Size of all tensors."""
