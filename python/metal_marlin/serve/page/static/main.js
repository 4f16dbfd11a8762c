// The page: connects the conversations, the list of them, the messages and the server.

import { Answers } from "./answers.js";
import { ApiError, serverInfo } from "./api.js";
import { openCompare } from "./compare.js";
import { announce, find, h, toast } from "./dom.js";
import { Thread } from "./messages.js";
import { askForKey, openSettings, summary } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { loadSettings, saveSettings, Store, textOf, titleOf } from "./store.js";

const THEMES = ["auto", "light", "dark"];
const NEAR_END = 80; // Pixels from the end within which the view follows an answer.

const store = new Store();
const settings = loadSettings();
let info = null;
let conversation = store.create();
let following = true;
let frame = 0;

const scroll = find("#scroll");
const field = find("#message");
const running = () => answers.isRunning(conversation.id);

function save(one) {
  if (!store.conversations.has(one.id) && !one.messages.length) return;
  try {
    store.save(one);
  } catch (error) {
    toast(error.message);
  }
}

function failed(error, message = null) {
  if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
    askForKey(error.message, () => {
      connect();
      if (message && conversation.messages.includes(message)) thread.actions.retry(message);
    });
  } else if (message === null) {
    toast(error.message);
  }
}

const answers = new Answers({ save, failed, changed: (one, message, ended) => {
  if (!store.conversations.has(one.id)) answers.stop(one.id);
  if (one !== conversation) {
    if (ended) sidebar.show(conversation.id);
    return;
  }
  if (ended) {
    showConversation();
    refreshInfo();
    announce(message.error ? `Error: ${message.error}`
      : `Answer complete. ${textOf(message).slice(0, 2000)}`);
  } else {
    showSoon(message);
  }
} });

const thread = new Thread(find("#thread"), {
  busy: running,
  retry: (message) => change("The answer is replaced.", () => {
    conversation.messages.length = conversation.messages.indexOf(message);
    // Without a seed of the user's the server draws another one for each request.
    const fixed = settings.sampling.seed;
    const seed = fixed === undefined ? {} : { seed: fixed + 1 + Math.floor(Math.random() * 1000) };
    answers.run(conversation, settings, info, seed);
  }),
  edit: (message, text) => change("What followed the message is removed.", () => {
    const at = conversation.messages.indexOf(message);
    conversation.messages.length = at + 1;
    conversation.messages[at] = message.role === "user" ? { role: "user", content: text }
      : { role: message.role, content: text };
    if (message.role === "user") answers.run(conversation, settings, info);
  }),
  sendResults: (messages) => {
    conversation.messages.push(...messages);
    answers.run(conversation, settings, info);
  },
  canCompare: (message) => Boolean(info?.compare && message.token_ids?.length),
  compare: (message) => openCompare(conversation, message, settings, info, failed),
});

const sidebar = new Sidebar(store, { failed, create, open, removed: (id) => {
  answers.stop(id);
  if (id === conversation.id) create();
  else sidebar.show(conversation.id);
} });

/** Changes the messages so that the user can undo it. */
function change(words, action) {
  const target = conversation;
  const before = structuredClone(target.messages);
  const removes = () => before.length > target.messages.length ||
    before.some((message, i) => textOf(message) !== textOf(target.messages[i]));
  following = true;
  action();
  save(target);
  showConversation();
  if (!removes()) return;
  toast(words, () => {
    answers.stop(target.id);
    target.messages = before;
    save(target);
    if (target === conversation) showConversation();
  });
}

function create() {
  conversation = store.create();
  history.replaceState(null, "", "#");
  following = true;
  showConversation();
  field.focus();
}

function open(id, { focus = true } = {}) {
  conversation = store.conversations.get(id) ?? store.create();
  history.replaceState(null, "", store.conversations.has(id) ? `#${id}` : "#");
  following = true;
  showConversation();
  scroll.scrollTop = scroll.scrollHeight;
  if (focus && window.matchMedia("(hover: hover)").matches) field.focus();
}

function showConversation() {
  const { messages } = conversation;
  thread.show(conversation);
  const empty = messages.length === 0;
  find("#welcome").hidden = !empty;
  document.body.classList.toggle("empty", empty);
  find("#title").textContent = titleOf(conversation);
  document.title = empty ? "Metal Marlin" : `${titleOf(conversation)} – Metal Marlin`;
  find("#chips").replaceChildren(...summary(conversation, settings).map((words) =>
    h("button", { type: "button", class: "chip", onclick: settingsDialog }, words)));
  sidebar.show(conversation.id);
  showButtons();
  showStatistics();
  follow();
}

function showButtons() {
  find("#stop").hidden = !running();
  find("#send").hidden = running();
  find("#send").disabled = field.value.trim() === "";
}

/** Shows an answer that grows at most once per frame. */
function showSoon(message) {
  if (frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    if (!thread.update(message)) showConversation();
    showButtons();
    follow();
  });
}

function follow() {
  if (following) scroll.scrollTop = scroll.scrollHeight;
  find("#to-end").hidden = following || conversation.messages.length === 0;
}

const count = (value) => value.toLocaleString("en");
const rounded = (value) => (value >= 99.5 ? count(Math.round(value)) : value.toPrecision(3));
const duration = (value) => (value < 0.9995 ? `${Math.round(value * 1000)} ms`
  : `${value.toPrecision(3)} s`);

function showStatistics() {
  const last = conversation.messages.findLast((message) => message.statistics);
  const of = last?.statistics;
  const items = [];
  const add = (label, value) => items.push(h("span", { class: "item" },
    h("span", { class: "label" }, label), " ", h("span", { class: "value" }, value)));
  if (of?.rate) add("Speed", `${rounded(of.rate)} tokens/s`);
  if (of?.first) add("First token", duration(of.first));
  if (of?.prompt) {
    add("Tokens", `${count(of.prompt)} + ${count(of.tokens)}`);
    add("Cached", count(of.cached ?? 0));
  }
  const cache = info?.kv_cache;
  if (cache?.tokens) {
    add("KV cache", `${Math.round((100 * cache.used_tokens) / cache.tokens)} %`);
  }
  find("#statistics").replaceChildren(...items);
}

async function refreshInfo() {
  try {
    info = await serverInfo();
  } catch (error) {
    if (error.status) throw error;
    return; // The error of the answer says it.
  }
  showStatistics();
}

async function connect() {
  try {
    info = await serverInfo();
    find("#model").textContent = info.model;
    showWelcome();
    showConversation();
  } catch (error) {
    showWelcome(error);
    failed(error);
  }
}

function showWelcome(error = null) {
  const words = [h("h2", {}, error ? "Not connected" : "What is on your mind?")];
  if (error) {
    words.push(h("p", {}, error.message), h("button", { type: "button", class: "primary",
      onclick: connect }, "Try again"));
  } else {
    words.push(h("p", {}, h("b", {}, info.model), " runs on this server, with a context of ",
      `${count(info.context)} tokens. Conversations are kept in this browser alone.`));
    if (info.compare) {
      words.push(h("p", {}, "Answers can be compared with ", h("b", {}, info.compare.model), "."));
    }
  }
  find("#welcome").replaceChildren(...words);
}

function send() {
  const text = field.value.trim();
  if (!text || running()) return;
  field.value = "";
  grow();
  following = true;
  conversation.messages.push({ role: "user", content: text });
  save(conversation);
  history.replaceState(null, "", `#${conversation.id}`);
  answers.run(conversation, settings, info);
  showConversation();
}

/** The field is as high as its text; CSS limits it. */
function grow() {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
  showButtons();
}

function settingsDialog() {
  openSettings(conversation, settings, info, () => {
    save(conversation);
    if (info === null) connect();
    showConversation();
  });
}

function showTheme() {
  document.documentElement.dataset.theme = settings.theme;
  const next = THEMES[(THEMES.indexOf(settings.theme) + 1) % THEMES.length];
  const button = find("#theme");
  const names = { auto: "as the system has it", light: "light", dark: "dark" };
  const label = `Colours: ${names[settings.theme]}. Change to ${names[next]}`;
  button.setAttribute("aria-label", label);
  button.title = label;
  button.replaceChildren();
  const svg = find("#open-settings svg").cloneNode(true);
  svg.firstElementChild.setAttribute("href", `#i-${settings.theme}`);
  button.append(svg);
}

find("#theme").addEventListener("click", () => {
  settings.theme = THEMES[(THEMES.indexOf(settings.theme) + 1) % THEMES.length];
  saveSettings(settings);
  showTheme();
});
find("#open-settings").addEventListener("click", settingsDialog);
find("#stop").addEventListener("click", () => answers.stop(conversation.id));
find("#to-end").addEventListener("click", () => {
  following = true;
  follow();
});
find("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
field.addEventListener("input", grow);
field.addEventListener("keydown", (event) => {
  if (event.isComposing) return; // Enter chooses a character then.
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && field.value === "" && !running()) {
    if (thread.editLast()) event.preventDefault();
  }
});
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") answers.stop(conversation.id);
  if (!event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.code === "KeyN") create();
  else if (event.code === "KeyS") settingsDialog();
  else return;
  event.preventDefault();
});
scroll.addEventListener("scroll", () => {
  following = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_END;
  find("#to-end").hidden = following || conversation.messages.length === 0;
}, { passive: true });
window.addEventListener("pagehide", () => {
  if (running()) save(conversation);
  answers.stopAll();
});
store.watch((id) => {
  if (id !== conversation.id) sidebar.show(conversation.id);
  else if (!running()) open(id, { focus: false });
});

// An answer that a closed page left behind is not going on.
for (const one of store.conversations.values()) {
  for (const message of one.messages.filter((each) => each.pending)) {
    delete message.pending;
    message.stopped = true;
  }
}
showTheme();
open(location.hash.slice(1));
connect();
