// Conversations and settings in the browser's storage. One entry per conversation, so that two tabs
// overwrite each other at most where both write the same one.

const PREFIX = "metal-marlin/conversation/";
const SETTINGS = "metal-marlin/settings";
const KEY = "metal-marlin/api-key";
const ROLES = ["system", "user", "assistant", "tool"];
const UNTITLED = "New chat";

/** What is said when the storage is full or closed; the page goes on without. */
export class StorageError extends Error {}

/** The browser's storage, or where it is closed to the page one that lasts until the page ends. */
function storage(name) {
  try {
    window[name].getItem("");
    return window[name];
  } catch {
    const values = new Map();
    return { get length() { return values.size; }, key: (i) => [...values.keys()][i] ?? null,
      getItem: (key) => values.get(key) ?? null, setItem: (key, value) => values.set(key, value),
      removeItem: (key) => values.delete(key) };
  }
}

const local = storage("localStorage");
const session = storage("sessionStorage");

function write(key, value) {
  try {
    local.setItem(key, JSON.stringify(value));
  } catch (error) {
    throw new StorageError(error.name === "QuotaExceededError"
      ? "The browser's storage is full: export and delete some conversations."
      : "The browser does not let this page store conversations.");
  }
}

function read(key) {
  try {
    return JSON.parse(local.getItem(key));
  } catch {
    return null; // Not written by this page.
  }
}

/** A name that is free in this browser; crypto.randomUUID is missing without https. */
function freshId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The first words of the first message, until the user gives a name. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.messages.find((message) => message.role === "user");
  const text = textOf(first).trim().replace(/\s+/g, " ");
  if (!text) return UNTITLED;
  return text.length > 48 ? `${text.slice(0, 47).trimEnd()}…` : text;
}

/** The text of a message whose content is a text or a list of parts. */
export function textOf(message) {
  const content = message?.content ?? "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return JSON.stringify(content);
  return content.map((part) => part?.text ?? `[${part?.type ?? "part"}]`).join("");
}

export class Store {
  constructor() {
    this.conversations = new Map();
    this._removed = new Set();
    for (let i = 0; i < local.length; i += 1) this._take(local.key(i));
  }

  /** Reads an entry that another tab wrote; false for one that is no conversation. */
  _take(key) {
    if (!key?.startsWith(PREFIX)) return false;
    const id = key.slice(PREFIX.length);
    const value = read(key);
    if (!value || !Array.isArray(value.messages)) return this.conversations.delete(id);
    this.conversations.set(id, { title: "", system: "", schema: "", tools: "", updated: 0, ...value,
      id });
    return true;
  }

  /** Calls `changed(id)` when another tab has written or deleted a conversation. */
  watch(changed) {
    window.addEventListener("storage", (event) => {
      if (!event.key?.startsWith(PREFIX)) return;
      this._take(event.key);
      changed(event.key.slice(PREFIX.length));
    });
  }

  /** All conversations, the latest first. */
  list() {
    return [...this.conversations.values()].sort((a, b) => b.updated - a.updated);
  }

  /** A new conversation, which is stored with its first message. */
  create(values = {}) {
    return { id: freshId(), title: "", system: "", schema: "", tools: "", messages: [], ...values,
      updated: Date.now() };
  }

  /** Stores a conversation, except one that was removed while its answer came. Errors:
      StorageError. */
  save(conversation, { touch = true } = {}) {
    if (this._removed.has(conversation.id)) return;
    if (touch) conversation.updated = Date.now();
    this.conversations.set(conversation.id, conversation);
    const { id, ...value } = conversation;
    write(PREFIX + id, value);
  }

  /** Takes back `remove`. */
  restore(conversation) {
    this._removed.delete(conversation.id);
    this.save(conversation, { touch: false });
  }

  remove(id) {
    this._removed.add(id);
    this.conversations.delete(id);
    local.removeItem(PREFIX + id);
  }
}

/** A conversation as /save of `metal-marlin chat` writes it. */
export function toDocument(conversation) {
  const system = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  const kept = ["role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"];
  const messages = conversation.messages.map((message) => Object.fromEntries(
    kept.filter((name) => message[name] !== undefined && message[name] !== null)
      .map((name) => [name, message[name]])));
  return { title: titleOf(conversation), messages: [...system, ...messages] };
}

/** The conversations of a file: one document, a list of messages, or {"conversations": [...]}.
    Errors: Error with a text for the user. */
export function fromDocument(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  const many = Array.isArray(value?.conversations) ? value.conversations : [value];
  return many.map((one) => {
    const messages = Array.isArray(one) ? one : one?.messages;
    if (!Array.isArray(messages)) throw new Error('The file has no list "messages".');
    messages.forEach((message, i) => {
      if (!ROLES.includes(message?.role)) {
        throw new Error(`Message ${i + 1} of the file has none of the roles ${ROLES.join(", ")}.`);
      }
    });
    const system = messages[0]?.role === "system" ? textOf(messages[0]) : "";
    return { title: typeof one.title === "string" ? one.title : "", system,
      messages: messages.slice(messages[0]?.role === "system" ? 1 : 0) };
  });
}

/** The settings of all conversations: sampling, theme, template variables. */
export const loadSettings = () => ({ sampling: {}, theme: "auto", variables: "",
  ...(read(SETTINGS) ?? {}) });
export const saveSettings = (settings) => write(SETTINGS, settings);

/** The API key is kept until the tab is closed. */
export const apiKey = () => session.getItem(KEY) ?? "";
export const setApiKey = (key) => session.setItem(KEY, key);
