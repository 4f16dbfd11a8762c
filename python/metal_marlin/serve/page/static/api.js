// Calls of the server. Addresses are relative, so that a proxy may serve the page below a folder.

import { apiKey } from "./store.js";

/** An error in words for the user; `status` is that of HTTP, 0 if nothing answered. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const WORDS = {
  401: "The server wants an API key.",
  403: "The server refuses this API key.",
  404: "The server does not know this address.",
  413: "The conversation is too large for the server.",
  429: "The server is busy: its queue is full. Try again in a moment.",
  500: "The server failed.",
  503: "The server is not ready, or its device is lost.",
};

async function failure(response) {
  let said = "";
  try {
    const body = await response.json();
    said = body?.error?.message ?? body?.detail ?? "";
  } catch {
    // A proxy answers with its own pages.
  }
  const words = WORDS[response.status] ?? (said ? "" : `The server answered ${response.status}.`);
  const plain = typeof said === "string" ? said : JSON.stringify(said);
  return new ApiError([words, plain].filter(Boolean).join(" "), response.status);
}

async function call(address, { body = null, signal = null } = {}) {
  const headers = {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(address, { method: body === null ? "GET" : "POST", headers, signal,
      body: body === null ? null : JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

/** What the page shows of the server: model, defaults, KV cache. */
export async function serverInfo() {
  return (await call("info")).json();
}

export async function score(body, signal) {
  return (await call("compare/score", { body, signal })).json();
}

/** The lines of a stream, each without its end. */
async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = parts.pop();
      yield* parts;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The chunks of a streamed answer. Errors: ApiError; AbortError when `signal` stops it. */
export async function* streamChat(body, signal, address = "v1/chat/completions") {
  const response = await call(address, { body: { ...body, stream: true,
    stream_options: { include_usage: true } }, signal });
  let ended = false;
  try {
    for await (const line of lines(response.body)) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") {
        ended = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message ?? "The server failed.", 500);
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection was lost before the answer was complete.");
  }
  if (!ended) throw new ApiError("The connection was lost before the answer was complete.");
}
