// Requests of answers: one at a time per conversation, which may go on while another is shown.

import { streamChat } from "./api.js";
import { requestFields } from "./settings.js";
import { textOf } from "./store.js";

const CLOSING = 100; // Milliseconds.
const SAVE_EVERY = 2000; // Milliseconds, so that a page that is closed loses little.

/** Whether a message says anything: an answer that failed at once does not. */
const hasContent = (message) => message.role !== "assistant" || Boolean(message.content) ||
  Boolean(message.tool_calls?.length);

/** The messages of a request: what the API has fields for. Messages of the user that follow each
    other, because an answer failed, are one: many templates want the roles in turn. */
function apiMessages(conversation) {
  const said = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  const kept = ["role", "content", "tool_calls", "tool_call_id"];
  for (const message of conversation.messages.filter(hasContent)) {
    const last = said.at(-1);
    if (message.role === "user" && last?.role === "user") {
      last.content = `${textOf(last)}\n\n${textOf(message)}`;
      continue;
    }
    said.push(Object.fromEntries(kept.filter((name) => message[name] !== undefined)
      .map((name) => [name, message[name]])));
  }
  return said;
}

/** A request for the next message of a conversation. Errors: Error, for a setting that is no JSON. */
export function requestOf(conversation, settings, info) {
  return { model: info?.model, messages: apiMessages(conversation),
    ...requestFields(conversation, settings) };
}

function addCall(message, piece) {
  message.tool_calls ??= [];
  const call = message.tool_calls[piece.index ?? 0] ??= { id: "", type: "function",
    function: { name: "", arguments: "" } };
  if (piece.id) call.id = piece.id;
  call.function.name += piece.function?.name ?? "";
  call.function.arguments += piece.function?.arguments ?? "";
}

/** Adds a chunk to the message; true if it has a part of the answer. */
function addChunk(message, chunk) {
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return false;
  if (choice.finish_reason) message.finish = choice.finish_reason;
  if (choice.token_ids) message.token_ids = [...(message.token_ids ?? []), ...choice.token_ids];
  const delta = choice.delta ?? {};
  if (delta.content) message.content += delta.content;
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) message.reasoning_content = (message.reasoning_content ?? "") + thought;
  for (const piece of delta.tool_calls ?? []) addCall(message, piece);
  return Boolean(delta.content || thought || delta.tool_calls?.length);
}

/** Times of an answer as the browser sees it, in milliseconds. */
class Clock {
  constructor() {
    this._start = performance.now();
    this._first = null;
    this._last = null;
    this._thought = null;
  }

  tick(message) {
    this._last = performance.now();
    this._first ??= this._last;
    if (message.reasoning_content && message.content && this._thought === null) {
      this._thought = this._last;
      message.thought_seconds = (this._thought - this._first) / 1000;
    }
  }

  statistics(usage) {
    const seconds = this._first === null ? 0 : (this._last - this._first) / 1000;
    const tokens = usage?.completion_tokens ?? 0;
    return { first: this._first === null ? null : (this._first - this._start) / 1000,
      rate: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null, tokens,
      prompt: usage?.prompt_tokens ?? null,
      cached: usage?.prompt_tokens_details?.cached_tokens ?? null };
  }
}

export class Answers {
  /** changed(conversation, message, ended) is called for each piece, save(conversation) to store
      it, failed(error) for an error. */
  constructor({ changed, save, failed }) {
    Object.assign(this, { _changed: changed, _save: save, _failed: failed });
    this._running = new Map();
  }

  isRunning(id) {
    return this._running.has(id);
  }

  stop(id) {
    this._running.get(id)?.abort();
  }

  /** Stops all: the page is closed. */
  stopAll() {
    for (const control of this._running.values()) control.abort();
  }

  /** Adds the answer to the messages of the conversation. `extra` are fields of the request. */
  async run(conversation, settings, info, extra = {}) {
    let body;
    try {
      body = { ...requestOf(conversation, settings, info), ...extra };
    } catch (error) {
      this._failed(error);
      return;
    }
    if (info?.compare) body.return_token_ids = true;
    const control = new AbortController();
    const message = { role: "assistant", content: "", pending: true };
    conversation.messages.push(message);
    this._running.set(conversation.id, control);
    this._save(conversation);
    this._changed(conversation, message, false);
    await this._receive(conversation, message, body, control);
    delete message.pending;
    delete message.usage;
    this._running.delete(conversation.id);
    this._save(conversation);
    this._changed(conversation, message, true);
  }

  async _receive(conversation, message, body, control) {
    const clock = new Clock();
    let saved = performance.now();
    try {
      for await (const chunk of streamChat(body, control.signal)) {
        if (!addChunk(message, chunk)) continue;
        clock.tick(message);
        this._changed(conversation, message, false);
        if (performance.now() - saved > SAVE_EVERY) {
          saved = performance.now();
          this._save(conversation);
        }
      }
    } catch (error) {
      // A page that is closed loses the connection a moment before it is told that it ends.
      await new Promise((resolve) => {
        setTimeout(resolve, CLOSING);
      });
      if (control.signal.aborted) message.stopped = true;
      else {
        message.error = error.message;
        this._failed(error, message);
      }
    }
    message.statistics = clock.statistics(message.usage);
  }
}
