"""Loading, running and quantizing models."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import numpy as np

from . import _core
from ._arrays import call, options
from ._core import Device
from ._documents import AnyPath, Progress, listening
from .chat_template import MISSING, ChatTemplate, Messages, check_variables
from .errors import FileError, InvalidArgumentError, MalformedFileError, UnsupportedError
from .generation import Emit, GenerationStream, PromptOutput, stop_strings, stop_tokens
from .hub import local_path
from .linear import open_device
from .results import (
    ComparisonResult,
    DraftAcceptance,
    GenerationChunk,
    GenerationResult,
    PerplexityResult,
    PreparationReport,
)
from .text import TextCodec

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompt = str | Sequence[int]
Prompts = list[str] | list[list[int]] | list[Prompt] | tuple[Prompt, ...]
_AUTO = -1  # kHostExpertsAuto and kGpuLayersAuto of model.h.
# The arguments of ChatTemplate.render, which chat_template_kwargs cannot set.
_TAKEN = ("self", "messages", "tools", "documents", "add_generation_prompt",
          "continue_final_message")  # fmt: skip
# What the core says of a model that asks for nothing else.
_GREEDY = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


class GenerationOptions(TypedDict, total=False):
    """The options of `Model.generate` that do not decide the type of its result."""

    stop: str | Sequence[str] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    add_special_tokens: bool
    speculate: int
    draft: Literal["lookup", "mtp"] | Model | None
    speculate_always: bool


def open_model_device(device: Device | str | None) -> Device:
    """The device to load a model for; "auto" and None are shared with other calls."""
    if isinstance(device, Device):
        return device
    return open_device(device) if device in (None, "auto") else Device(device)


def _count_or_auto(name: str, count: int | str) -> int:
    if count == "auto":
        return _AUTO
    if isinstance(count, str) or count < 0:
        raise InvalidArgumentError(f'{name}: expected a number or "auto", got {count!r}')
    return count


def _is_batch(prompt: Any) -> bool:
    """Whether a prompt is a list of prompts; a list of numbers is one."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return isinstance(prompt[0], str | list | tuple | np.ndarray | range)


def _each(name: str, value: Any, count: int) -> list[Any]:
    """An option of each of `count` prompts: one value for all, or a list of one for each."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InvalidArgumentError(f"{name}: expected {count} (prompts), got {len(value)}")
    return list(value)


class Model:
    """A decoder-only language model from a plain or quantized directory; made by `load`."""

    def __init__(
        self,
        path: AnyPath,
        device: Device | str | None = None,
        exact: bool = False,
        prepared: AnyPath | None = None,
        verbose: bool = True,
        batch_invariant: bool = False,
        gpu_memory: int | str | None = None,
        host_experts: int | str = 0,
        frequencies: AnyPath | None = None,
        kv_cache: str | None = None,
        allow_extra_tensors: bool = False,
        draft: bool = False,
        gpu_layers: int | str = "auto",
    ) -> None:
        path = local_path(path, quiet=not verbose)
        opened = open_model_device(device)
        memory = "" if gpu_memory is None else str(gpu_memory)
        cache = None if kv_cache is None else str(kv_cache)
        if frequencies is not None and host_experts == 0:
            raise InvalidArgumentError("frequencies: only with host_experts")
        self._core = call(
            _core.Model,
            path,
            opened,
            exact,
            prepared,
            (batch_invariant, allow_extra_tensors, draft),
            (
                memory,
                _count_or_auto("gpu_layers", gpu_layers),
                _count_or_auto("host_experts", host_experts),
                frequencies,
                cache,
            ),
        )
        self.path = Path(os.fsdecode(path))
        self._verbose = verbose
        asked = _core.default_device_name() if device is None else device
        if asked == "auto" and verbose:
            reason = self.device.info["passed_over"]
            why = f", since {reason}" if reason else ""
            print(f"device: {self.device}{why}", file=sys.stderr)
        if verbose and self.info["host_layers"] > 0:
            print(f"layers on the host: {self.info['host_layers']} of {self.info['layers']}, "
                  f"{self.info['host_bytes']} bytes", file=sys.stderr)
        for note in self.info["notes"] if verbose else ():
            print(f"{self.path}: {note}", file=sys.stderr)

    @functools.cached_property
    def device(self) -> Device:
        """The device that runs the model; of "auto" the first that can."""
        taken: Device = self._core.device
        return taken

    @functools.cached_property
    def info(self) -> dict[str, Any]:
        """model_type, recipe, layers, vocab_size, max_positions, parameters, bits_per_weight ..."""
        return dict(self._core.info)

    @functools.cached_property
    def tokenizer(self) -> TextCodec:
        """The tokenizer of the directory. It may have more tokens than the model. Errors:
        FileError when there is none."""
        return TextCodec(self.path)

    @functools.cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The chat templates of the directory or GGUF file; None if it has none."""
        return ChatTemplate.find(self.path)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        max_tokens: int | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        chat_template: AnyPath | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> Any:
        """Answers a conversation, a list of {"role": ..., "content": ...}: what `generate` returns,
        a GenerationResult, or with stream=True a GenerationStream. A list of conversations gives a
        list of answers.

        max_tokens None: as many as the context holds. `chat_template` is a file, the text of a
        Jinja template or the name of one of the model's; None: `Model.chat_template`. `tools` are
        JSON schemas; chat_template_kwargs are further variables of the template
        (`{"enable_thinking": False}`); add_generation_prompt and continue_final_message as for
        `ChatTemplate.render`; `options` are as for `generate`. Errors: UnsupportedError for a
        model without a chat template, as `ChatTemplate.render` and `generate`.
        """
        given = None if chat_template is None else ChatTemplate.find(self.path, chat_template)
        template = given or self.chat_template
        if template is None:
            raise UnsupportedError(f"{self.path}: {MISSING}")
        variables = check_variables("chat_template_kwargs", chat_template_kwargs or {}, _TAKEN)
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise InvalidArgumentError(
                f"messages: expected a list, got {type(messages).__name__}"
            )
        batch = bool(messages) and isinstance(messages[0], list | tuple)
        chats: list[Any] = list(messages) if batch else [messages]
        prompts = [
            template.render(
                chat,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
            for chat in chats
        ]
        if max_tokens is None:
            max_tokens = self.info["max_positions"]
        # The template has written the special tokens.
        return self.generate(
            prompts if batch else prompts[0], max_tokens, add_special_tokens=False, **options
        )

    def _ids(
        self, prompt: Prompt, name: str = "prompt", add_special_tokens: bool = True
    ) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens)
            largest = self.info["vocab_size"] - 1
            if ids and max(ids) > largest:
                raise MalformedFileError(
                    f"{self.path}: the tokenizer gives the token id {max(ids)}, "
                    f"the model has 0..{largest}"
                )
            return ids
        # Their elements are numbers, or have no order.
        if isinstance(prompt, bytes | bytearray | Mapping | Set):
            kind = type(prompt).__name__
            raise InvalidArgumentError(f"{name}: expected text or token ids, got {kind}")
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise InvalidArgumentError(f"{name}: expected text or token ids: {error}") from error
        for i, token in enumerate(ids):
            if not 0 <= token < self.info["vocab_size"]:
                raise InvalidArgumentError(
                    f"{name}: token {i} is {token}, expected 0..{self.info['vocab_size'] - 1}"
                )
        return ids

    def logits(self, prompt: Prompt, *, add_special_tokens: bool = True) -> np.ndarray:
        """float32 [tokens, vocab_size]: the logits after every token of a text or token ids."""
        ids = self._ids(prompt, add_special_tokens=add_special_tokens)
        out = np.empty((len(ids), self.info["vocab_size"]), np.float32)
        call(self._core.forward, self._core.new_sequence(), ids, True, out)
        return out

    @overload
    def generate(
        self,
        prompt: Prompt,
        max_tokens: int = 128,
        *,
        stream: Literal[False] = False,
        on_text: Callable[[str], bool | None] | None = None,
        callback: Callable[[int], bool | None] | None = None,
        seed: int = 0,
        **options: Unpack[GenerationOptions],
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        max_tokens: int | list[int] = 128,
        *,
        stream: Literal[False] = False,
        on_text: Callable[[int, str], bool | None] | None = None,
        callback: Callable[[int, int], bool | None] | None = None,
        seed: int | list[int] = 0,
        max_batch: int = 0,
        **options: Unpack[GenerationOptions],
    ) -> list[GenerationResult]: ...

    @overload
    def generate(
        self,
        prompt: Prompt | Prompts,
        max_tokens: int | list[int] = 128,
        *,
        stream: Literal[True],
        callback: Callable[..., bool | None] | None = None,
        seed: int | list[int] = 0,
        max_batch: int = 0,
        **options: Unpack[GenerationOptions],
    ) -> GenerationStream: ...

    def generate(
        self,
        prompt: Prompt | Prompts,
        max_tokens: int | list[int] = 128,
        *,
        stop: str | Sequence[str] | None = None,
        stream: bool = False,
        on_text: Callable[..., bool | None] | None = None,
        callback: Callable[..., bool | None] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int | list[int] = 0,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        add_special_tokens: bool = True,
        max_batch: int = 0,
        speculate: int = 0,
        draft: Literal["lookup", "mtp"] | Model | None = None,
        speculate_always: bool = False,
    ) -> GenerationResult | list[GenerationResult] | GenerationStream:
        """Continues a prompt, a text or token ids.

        A list of prompts gives a list of results. The texts share forward passes, `max_batch` at a
        time (0: as many as the KV cache has memory for, up to a bound), and one starts as soon as
        another has ended; `max_tokens` and `seed` may be lists with one for each prompt. For a
        model loaded with batch_invariant each text is what its prompt gives alone.

        stream=True returns a GenerationStream, an iterator of GenerationChunks as they are made; of
        a list of prompts they come interleaved, with the prompt's `index`. Otherwise `on_text` gets
        the same text, piece by piece, and `callback` every token; of a list of prompts both get the
        prompt's index first. Each stops its text by returning False. An exception in one stops all.

        The text ends before the first of the stop strings, `stop`, wherever tokens begin and end;
        nothing is streamed that could begin one. It also ends at a token of stop_token_ids, or, if
        there are none, at the model's end tokens, unless ignore_eos.

        Sampling options that are None are what generation_config.json asks for, otherwise greedy;
        a line on stderr says which, unless the model was loaded with verbose=False. The penalties
        change the logits before `temperature` divides them, and so apply to greedy decoding too;
        `repetition_penalty` also counts the tokens of the prompt, the other two only the generated
        ones. `min_p` drops tokens less likely than `min_p` times the most likely one.
        add_special_tokens: texts get the special tokens that the tokenizer adds to one (BOS).

        speculate guesses up to that many tokens (64 at most) for a pass, which verifies them; the
        texts are the same, up to rounding without batch_invariant. `draft` guesses: "lookup" (None)
        from the text so far; "mtp", the model's layer that predicts further tokens, of a model
        loaded with draft=True; or a smaller Model with the same tokenizer. How many tokens are
        guessed follows from measured times; speculate_always: `speculate` in every pass.

        Errors: InvalidArgumentError for an option out of range, a token id that the model lacks or
        a prompt longer than its context; FileError for text without a tokenizer.
        """
        batch = _is_batch(prompt)
        if not batch and max_batch != 0:
            raise InvalidArgumentError("max_batch: only with a list of prompts")
        if stream and on_text is not None:
            raise InvalidArgumentError("on_text: not with stream=True, whose chunks are the text")
        speculation = self._speculation(speculate, draft, speculate_always)
        prompts: list[Any] = list(prompt) if batch else [prompt]
        names = [f"prompts[{i}]" for i in range(len(prompts))] if batch else ["prompt"]
        stops = stop_strings(stop)
        ends, ignore_eos = self._ends(stops, stop_token_ids, ignore_eos)
        sampling = self._sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )
        texts = [
            options(
                _core.TextOptions(),
                max_tokens=most,
                **sampling,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                seed=each_seed,
                stop_token_ids=ends,
                ignore_eos=ignore_eos,
                speculation=speculation,
            )
            for most, each_seed in zip(
                _each("max_tokens", max_tokens, len(prompts)) if batch else [max_tokens],
                _each("seed", seed, len(prompts)) if batch else [seed],
                strict=True,
            )
        ]
        ids = [
            self._ids(each, name, add_special_tokens)
            for each, name in zip(prompts, names, strict=True)
        ]
        # A prompt of token ids needs no tokenizer, and has no text, unless text is asked for.
        shows_text = on_text is not None or bool(stops)
        outputs = [
            PromptOutput(
                i, self.tokenizer if shows_text or isinstance(each, str) else None, ids[i], stops
            )
            for i, each in enumerate(prompts)
        ]
        run = functools.partial(
            self._run, ids, texts, outputs, _with_index(callback, batch), max_batch, batch
        )
        if stream:
            return GenerationStream(run)
        results = run(_text_listener(_with_index(on_text, batch), outputs))
        return results if batch else results[0]

    def _speculation(self, tokens: int, draft: str | Model | None, always: bool) -> Any:
        """_core.SpeculationOptions. Errors: InvalidArgumentError for a draft that is none, or whose
        tokenizer is another one."""
        if isinstance(draft, Model):
            with contextlib.suppress(FileError):  # Token ids need no tokenizer.
                self.tokenizer.check_same("draft", draft.tokenizer, draft.path)
            draft = draft._core
        elif isinstance(draft, str) and draft not in ("lookup", "mtp"):
            raise InvalidArgumentError(
                f'draft: expected "lookup", "mtp" or a Model, got {draft!r}; load makes one'
            )
        return call(_core.SpeculationOptions, tokens, always, draft)

    def _ends(
        self, stops: list[str], stop_token_ids: Sequence[int], ignore_eos: bool
    ) -> tuple[list[int], bool]:
        """stop_token_ids and ignore_eos, with the tokens that stop strings name."""
        ends = list(stop_token_ids)
        special = stop_tokens(self.tokenizer, stops) if stops else []
        if not special:
            return ends, ignore_eos
        known = [] if ignore_eos else ends or self.info["eos_token_ids"]
        return [*known, *special], False

    def _run(
        self,
        ids: list[list[int]],
        texts: list[Any],
        outputs: list[PromptOutput],
        callback: Callable[[int, int], bool] | None,
        max_batch: int,
        batch: bool,
        emit: Emit | None,
    ) -> list[GenerationResult]:
        """Generates the texts; calls `emit` with their parts."""
        results: dict[int, GenerationResult] = {}
        waiting: list[tuple[int, dict[str, Any]]] = []
        follows = emit is not None or any(output.stops for output in outputs)

        def take(index: int, token: int) -> bool:
            output = outputs[index]
            if follows:
                chunk = output.add(token)
                if emit is not None:
                    emit(chunk)
            wanted = callback is None or callback(index, token)
            return wanted and not output.stopped

        def ended(index: int, document: dict[str, Any]) -> None:
            if emit is None:
                # Decoding text here would hold up the texts that still run.
                waiting.append((index, document))
                return
            chunk, results[index] = outputs[index].finish(document)
            emit(chunk)

        taker = take if follows or callback is not None else None
        if batch:
            call(self._core.generate_batch, ids, texts, max_batch, taker, ended)
        else:
            if taker is not None:
                texts[0].callback = functools.partial(taker, 0)
            ended(0, call(self._core.generate, ids[0], texts[0]))
        for index, document in waiting:
            results[index] = outputs[index].finish(document)[1]
        return [results[i] for i in range(len(ids))]

    def _sampling(self, **given: float | None) -> dict[str, Any]:
        """How tokens are chosen: what is given, otherwise what generation_config.json says."""
        asked = self.info["sampling"]
        sampling = {name: asked[name] if value is None else value for name, value in given.items()}
        if self._verbose and asked != _GREEDY:
            shown = ", ".join(f"{name} {value:.3g}" for name, value in sampling.items())
            print(f"sampling: {shown}", file=sys.stderr)
        ignored = self.info["ignored_generation_keys"]
        if self._verbose and ignored:
            print(f"generation_config.json: not applied: {', '.join(ignored)}", file=sys.stderr)
        return sampling

    def perplexity(
        self,
        text: Prompt,
        window: int = 256,
        stride: int = 0,
        max_windows: int = 0,
        *,
        add_special_tokens: bool = True,
        progress: Progress = None,
    ) -> PerplexityResult:
        """The perplexity of a text or token ids, in windows of `window` tokens.

        A window starts every `stride` tokens (0: `window`); if that is less than `window`, only
        the last `stride` predictions of a window count. max_windows: how many are used; 0: all.
        progress is True for a bar, or a function of (done, total) windows. Errors:
        InvalidArgumentError for fewer than two tokens, or a window longer than the context.
        """
        ids = self._ids(text, "text", add_special_tokens)
        with listening(progress, "perplexity") as listener:
            windows = (window, stride, max_windows)
            return PerplexityResult.from_document(
                call(self._core.perplexity, ids, windows, listener)
            )

    def compare(
        self,
        reference: Model,
        text: Prompt,
        window: int = 256,
        stride: int = 0,
        max_windows: int = 0,
        *,
        add_special_tokens: bool = True,
        progress: Progress = None,
    ) -> ComparisonResult:
        """How far this model diverges from `reference`, the one that it was made from.

        Both predict the same text, encoded by the reference's tokenizer, or the same token ids.
        Other arguments and errors as for `perplexity`; InvalidArgumentError for another vocabulary.
        """
        if not isinstance(reference, Model):
            kind = type(reference).__name__
            raise InvalidArgumentError(f"reference: expected a Model, got {kind}; load makes one")
        ids = reference._ids(text, "text", add_special_tokens)
        with listening(progress, "compare") as listener:
            windows = (window, stride, max_windows)
            return ComparisonResult.from_document(
                call(self._core.compare, reference._core, ids, windows, listener)
            )

    def draft_logits(
        self, prompt: Prompt, depth: int = 1, *, add_special_tokens: bool = True
    ) -> np.ndarray:
        """float32 [tokens - depth, vocab_size]: the logits of the layer that predicts further
        tokens (MTP). Row t is about token t + depth + 1, from the model's hidden state after token
        t and the text's own tokens t + 1 to t + depth. Errors: InvalidArgumentError for a model
        loaded without `draft`, or a depth that is not in 1..16 or not less than the tokens."""
        ids = self._ids(prompt, add_special_tokens=add_special_tokens)
        out = np.empty((max(len(ids) - depth, 0), self.info["vocab_size"]), np.float32)
        call(self._core.draft_logits, ids, depth, out)
        return out

    def draft_acceptance(
        self,
        text: Prompt,
        depth: int = 1,
        window: int = 256,
        stride: int = 0,
        max_windows: int = 0,
        *,
        add_special_tokens: bool = True,
        progress: Progress = None,
    ) -> list[DraftAcceptance]:
        """How often the most likely token of `draft_logits` is the model's own at that position,
        for each depth up to `depth`.

        Other arguments and errors as for `perplexity` and `draft_logits`.
        """
        ids = self._ids(text, "text", add_special_tokens)
        with listening(progress, "draft") as listener:
            windows = (window, stride, max_windows)
            depths = call(self._core.draft_acceptance, ids, depth, windows, listener)
            return [DraftAcceptance.from_document(document) for document in depths]

    def __repr__(self) -> str:
        info = self.info
        return (
            f"Model('{self.path}': {info['model_type']}, {info['parameters']:,} parameters, "
            f"{info['bits_per_weight']:.2f} bits per weight, on {self.device.name}, "
            f"context {info['max_positions']})"
        )


def _with_index(
    function: Callable[..., bool | None] | None, batch: bool
) -> Callable[[int, Any], bool] | None:
    """A caller's function with the prompt's index, which a single prompt's does not get."""
    if function is None:
        return None
    given = function

    def goes_on(index: int, value: Any) -> bool:
        answer = given(index, value) if batch else given(value)
        return bool(answer) if isinstance(answer, np.bool_) else answer is not False

    return goes_on


def _text_listener(
    on_text: Callable[[int, str], bool] | None, outputs: list[PromptOutput]
) -> Emit | None:
    """Hands the text of chunks to the caller's function, which may stop it."""
    if on_text is None:
        return None

    def emit(chunk: GenerationChunk | None) -> None:
        if chunk is not None and chunk.text and not on_text(chunk.index, chunk.text):
            outputs[chunk.index].cancel()

    return emit


def load(
    path: AnyPath,
    device: Device | str | None = None,
    exact: bool = False,
    prepared: AnyPath | None = None,
    verbose: bool = True,
    batch_invariant: bool = False,
    gpu_memory: int | str | None = None,
    host_experts: int | str = 0,
    frequencies: AnyPath | None = None,
    kv_cache: str | None = None,
    allow_extra_tensors: bool = False,
    draft: bool = False,
    gpu_layers: int | str = "auto",
) -> Model:
    """Opens a model on a device; None: METAL_MARLIN_DEVICE, otherwise "auto".

    "auto" is a supported CUDA GPU that can run the model, otherwise the CPU; a line on stderr says
    which, and more what was read otherwise than it is stored (info["notes"]), unless verbose is
    False. exact keeps activations, keys and values in float32 throughout;
    prepared is a file that `prepare_model` wrote for this directory, whose weights are mapped. With
    batch_invariant, logits depend neither on what else is in a batch nor on how a prompt is divided
    into passes, bit for bit; that is slower for many rows. gpu_memory, in bytes or as "24GB", is
    the memory of a GPU that weights and KV cache may take; None: what is free.

    gpu_layers is how many layers are on the GPU: the last ones, with the head; the CPU runs the
    others. "auto": as many as fit; info["host_layers"] says how many do not.

    For models that are larger than that, host_experts experts of every layer stay in the host's
    memory and are computed by the CPU; "auto": those that do not fit. frequencies is a file that
    `metal-marlin analyze --routing` wrote: experts that are selected often stay on the GPU.

    kv_cache is the element type of keys and values: "f32", "bf16" or "fp8_e4m3"; None: "bf16", or
    "f32" if exact. "fp8_e4m3" takes half of the bytes of "bf16"; numbers beyond 448 saturate.

    allow_extra_tensors leaves out tensors that the index of a sharded directory does not list, and
    ignores those that the model does not have; both are errors otherwise.

    draft also loads the layer that predicts further tokens (MTP), for `Model.generate`,
    `Model.draft_acceptance` and `Model.draft_logits`. Errors: UnsupportedError for a model without
    such a layer.
    """
    return Model(
        path,
        device,
        exact,
        prepared,
        verbose,
        batch_invariant,
        gpu_memory,
        host_experts,
        frequencies,
        kv_cache,
        allow_extra_tensors,
        draft,
        gpu_layers,
    )


def prepare_model(
    path: AnyPath,
    output: AnyPath,
    device: Device | str | None = None,
    *,
    overwrite: bool = False,
    progress: Progress = None,
) -> PreparationReport:
    """Writes a model's weights as a device holds them into a file that `load(path,
    prepared=output)` maps. overwrite replaces a file that an earlier call wrote; progress is True
    for a bar, or a function of (done, total) layers."""
    path = local_path(path)
    with listening(progress, "prepare") as listener:
        return PreparationReport.from_document(
            call(_core.prepare_model, path, output, open_model_device(device), overwrite, listener)
        )
