// The messages of a conversation: what was said, thought and called, and what can be done with it.

import { copy, h, icon, iconButton } from "./dom.js";
import { codeBlock, MarkdownView } from "./markdown.js";
import { textOf } from "./store.js";

const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // Not complete yet, or no JSON.
  }
};

/** The fields of a call where they are few and short, otherwise its JSON. */
function argumentsView(text) {
  let value = null;
  try {
    value = JSON.parse(text);
  } catch {
    // Shown as it is.
  }
  const rows = value && typeof value === "object" && !Array.isArray(value)
    ? Object.entries(value) : null;
  const short = ([, one]) => one === null || typeof one !== "object" && String(one).length < 200;
  if (!rows || !rows.length || rows.length > 12 || !rows.every(short)) {
    return codeBlock(pretty(text), "json");
  }
  return h("dl", { class: "arguments" },
    rows.map(([name, one]) => [h("dt", {}, name), h("dd", {}, String(one))]));
}

const seconds = (value) => (value < 9.95 ? value.toFixed(1) : Math.round(value).toString());

/** What to say below an answer that did not end by itself. */
function noteOf(message) {
  if (message.error) return { class: "note error", text: message.error };
  if (message.stopped) return { class: "note", text: "Stopped." };
  if (message.finish === "length") {
    return { class: "note", text: "Cut: the answer reached the maximum of its tokens." };
  }
  if (message.finish === "content_filter") return { class: "note", text: "Ended by a filter." };
  return null;
}

class MessageView {
  constructor(message, thread) {
    this.message = message;
    this._thread = thread;
    const name = { user: "You", assistant: "Answer", tool: "Tool result", system: "System" };
    this.root = h("article", { class: `message ${message.role}` },
      h("h2", { class: "visually-hidden" }, name[message.role]));
    this._body = h("div", { class: "body" });
    this.root.append(this._body);
    this._build();
  }

  _build() {
    const { message } = this;
    this._body.replaceChildren();
    if (message.role === "assistant") this._buildAnswer();
    else if (message.role === "tool") this._buildResult();
    else this._body.append(h("div", { class: "bubble" }, textOf(message)));
    this._actions = h("div", { class: "actions", role: "group", "aria-label": "Actions" },
      this._buttons());
    this._body.append(this._actions);
    this.update();
  }

  _buildAnswer() {
    this._thought = h("div", { class: "thought" });
    this._thoughtSummary = h("span", {});
    this._reasoning = h("details", { class: "reasoning", hidden: true },
      h("summary", {}, icon("chevron"), this._thoughtSummary), this._thought);
    this._markdown = new MarkdownView();
    this._calls = h("div", { class: "calls" });
    this._waiting = h("div", { class: "waiting", role: "img", "aria-label": "Waiting" },
      h("span"), h("span"), h("span"));
    this._note = h("p", { class: "note", hidden: true });
    this._body.append(this._reasoning, this._markdown.root, this._calls, this._waiting, this._note);
  }

  _buildResult() {
    const named = this._thread.callName(this.message.tool_call_id);
    this._body.append(h("details", { class: "call" },
      h("summary", {}, icon("chevron"), h("span", {}, "Result", named ? " of " : "",
        named ? h("code", {}, named) : null)),
      codeBlock(pretty(textOf(this.message)), "")));
  }

  _buttons() {
    const { message } = this;
    const actions = this._thread.actions;
    const buttons = [];
    if (message.role === "tool") return buttons;
    const copier = iconButton("copy", "Copy", () => copy(textOf(message), copier));
    copier.append(icon("check"));
    buttons.push(copier, iconButton("edit", "Edit", () => this.edit()));
    if (message.role === "assistant") {
      buttons.push(iconButton("retry", "Answer again", () => actions.retry(message)));
      if (actions.canCompare(message)) {
        buttons.push(h("button", { type: "button", class: "chip",
          onclick: () => actions.compare(message) }, icon("compare"), h("span", {}, "Compare")));
      }
    }
    return buttons;
  }

  /** Shows what can be done with the message now. */
  refresh() {
    this._actions.replaceChildren(...this._buttons());
    this.update();
  }

  /** Shows what the message has now. */
  update() {
    const { message } = this;
    const pending = Boolean(message.pending);
    this.root.setAttribute("aria-busy", String(pending));
    this._actions.hidden = pending || this._thread.busy();
    if (message.role !== "assistant") return;
    const text = textOf(message);
    const calls = message.tool_calls ?? [];
    this._markdown.update(text);
    this._markdown.root.classList.toggle("streaming", pending && text !== "");
    this._updateReasoning(pending && text === "" && calls.length === 0);
    this._updateCalls(calls);
    this._waiting.hidden = !pending || Boolean(text || message.reasoning_content || calls.length);
    const note = pending ? null : noteOf(message);
    this._note.hidden = note === null;
    this._note.className = note?.class ?? "note";
    this._note.textContent = note?.text ?? "";
  }

  _updateReasoning(thinking) {
    const { message } = this;
    const text = message.reasoning_content ?? "";
    this._reasoning.hidden = text === "";
    this._reasoning.classList.toggle("thinking", thinking);
    const took = message.thought_seconds;
    this._thoughtSummary.textContent = thinking ? "Thinking…"
      : took ? `Thought for ${seconds(took)} s` : "Thoughts";
    this._thought.textContent = text.trim();
  }

  _updateCalls(calls) {
    while (this._calls.children.length > calls.length) this._calls.lastChild.remove();
    calls.forEach((call, i) => {
      const text = call.function?.arguments ?? "";
      const old = this._calls.children[i];
      const key = `${call.function?.name}\n${text}`;
      if (old && old.dataset.key === key) return;
      const open = old ? old.open : true;
      const view = h("details", { class: "call", open, "data-key": key },
        h("summary", {}, icon("chevron"), icon("tool"),
          h("span", {}, "Calls ", h("code", {}, call.function?.name ?? "?"))),
        argumentsView(text || "{}"));
      if (old) old.replaceWith(view);
      else this._calls.append(view);
    });
  }

  /** Puts a text field in place of the message. */
  edit() {
    const { message } = this;
    const user = message.role === "user";
    const field = h("textarea", { "aria-label": user ? "Your message" : "The answer", rows: "3" });
    field.value = textOf(message);
    const done = () => {
      this._build();
      this._actions.querySelector("button")?.focus();
    };
    const save = () => {
      if (user && field.value.trim() === "") return;
      this._thread.actions.edit(message, field.value);
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") {
        event.stopPropagation();
        done();
      } else if (event.key === "Enter" && (user ? !event.shiftKey : event.ctrlKey)) {
        event.preventDefault();
        save();
      }
    });
    const buttons = h("div", { class: "edit-buttons" },
      h("button", { type: "button", onclick: done }, "Cancel"),
      h("button", { type: "button", class: "primary", onclick: save }, user ? "Send" : "Save"));
    this._body.replaceChildren(h("div", { class: "editor" }, field, buttons));
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

/** The form for the results of calls that nobody has answered yet. */
function resultForm(calls, send) {
  const fields = calls.map((call, i) => h("textarea", { rows: "2", id: `result-${i}`,
    placeholder: "What the tool returns" }));
  const form = h("form", { class: "results", "aria-label": "Results of the calls" },
    calls.map((call, i) => [
      h("label", { for: `result-${i}` }, "Result of ", h("code", {}, call.function?.name ?? "?")),
      fields[i]]),
    h("div", { class: "edit-buttons" },
      h("button", { type: "submit", class: "primary" }, "Send results")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(calls.map((call, i) => ({ role: "tool", tool_call_id: call.id,
      content: fields[i].value })));
  });
  return form;
}

export class Thread {
  /** actions: retry(message), edit(message, text), sendResults(messages), compare(message),
      canCompare(message), busy(). */
  constructor(root, actions) {
    this.actions = actions;
    this._root = root;
    this._views = [];
    this._conversation = null;
  }

  busy() {
    return this.actions.busy();
  }

  callName(id) {
    for (const message of this._conversation.messages) {
      const call = (message.tool_calls ?? []).find((one) => one.id === id);
      if (call) return call.function?.name;
    }
    return null;
  }

  /** Messages that are shown already keep their elements, and so the reader's place in them. */
  show(conversation) {
    this._conversation = conversation;
    const known = new Map(this._views.map((view) => [view.message, view]));
    this._views = conversation.messages.map((message) => {
      const view = known.get(message);
      view?.refresh();
      return view ?? new MessageView(message, this);
    });
    const last = conversation.messages.at(-1);
    const calls = last?.role === "assistant" && !last.pending ? last.tool_calls ?? [] : [];
    this._place([...this._views.map((view) => view.root),
      ...(calls.length ? [resultForm(calls, this.actions.sendResults)] : [])]);
  }

  _place(wanted) {
    let at = this._root.firstChild;
    for (const element of wanted) {
      if (element === at) at = at.nextSibling;
      else this._root.insertBefore(element, at);
    }
    while (at !== null) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  }

  /** Shows a message that grew; false if it is not one of those shown. */
  update(message) {
    const view = this._views.find((one) => one.message === message);
    view?.update();
    return view !== undefined;
  }

  /** Begins to edit the last message of the user; false if there is none. */
  editLast() {
    const view = this._views.findLast((one) => one.message.role === "user");
    view?.edit();
    return view !== undefined;
  }
}
