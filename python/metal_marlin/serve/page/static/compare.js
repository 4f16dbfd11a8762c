// What another model thinks of an answer, token by token, beside its own answer.

import { score, streamChat } from "./api.js";
import { requestOf } from "./answers.js";
import { announce, find, h, iconButton } from "./dom.js";

// Limits of the steps of colour. A difference is in nats: 0.7 is a factor of two, 2.3 one of ten.
const STEPS = [0.3, 1, 2.3];
const LIKELY = [0.5, 0.2, 0.05, 0.01];

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value >= 99.95 ? "100 %" : value >= 0.1 ? `${value.toPrecision(value < 1 ? 1 : 3)} %`
    : value === 0 ? "0 %" : "< 0.1 %";
};
const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "±") + Math.abs(value).toFixed(2);
const visible = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣") || "∅";

const difference = (token) => token.other.logprob - token.own.logprob;

function differenceClass(token) {
  const value = difference(token);
  const step = STEPS.filter((limit) => Math.abs(value) >= limit).length;
  return step === 0 ? "" : `${value < 0 ? "less" : "more"}-${step}`;
}

function likelyClass(token) {
  const probability = Math.exp(token.other.logprob);
  const step = LIKELY.filter((limit) => probability < limit).length;
  return step === 0 ? "" : `rare-${step}`;
}

const MODES = { difference: { label: "Difference", of: differenceClass },
  probability: { label: "Probability", of: likelyClass } };

function legend(mode, other) {
  const swatch = (name, words) => h("span", { class: "swatch-item" },
    h("span", { class: `swatch ${name}` }), words);
  if (mode === "difference") {
    return [h("span", {}, `Under ${other}:`), swatch("less-3", "10× less likely"),
      swatch("less-2", "2.7×"), swatch("less-1", "1.3×"), swatch("", "alike"),
      swatch("more-1", "1.3×"), swatch("more-2", "2.7×"), swatch("more-3", "10× more likely")];
  }
  return [h("span", {}, `Probability under ${other}:`), swatch("", "over 50 %"),
    swatch("rare-1", "20 to 50 %"), swatch("rare-2", "5 to 20 %"), swatch("rare-3", "1 to 5 %"),
    swatch("rare-4", "less")];
}

/** The words below the heading of a column. */
function verdict(tokens) {
  const mean = (of) => tokens.reduce((sum, token) => sum + of(token), 0) / tokens.length;
  const own = Math.exp(-mean((token) => token.own.logprob));
  const other = Math.exp(-mean((token) => token.other.logprob));
  const others = tokens.filter((token) => token.other.top[0].id !== token.id).length;
  return [["Tokens", tokens.length],
    ["Perplexity", `${own.toFixed(2)}, under the other ${other.toFixed(2)}`],
    ["Other first choice", others ? `${others}, underlined` : "none"]];
}

class Column {
  constructor(title, writer, other, dialog) {
    Object.assign(this, { _writer: writer, _other: other, _dialog: dialog });
    this._tokens = [];
    this._summary = h("dl", { class: "verdict" });
    this._text = h("div", { class: "tokens", role: "listbox", "aria-label": `Tokens, ${title}`,
      "aria-busy": "true" });
    this.root = h("section", { class: "column", "aria-label": title },
      h("h3", {}, title), this._summary, this._text);
    this._text.addEventListener("keydown", (event) => this._key(event));
  }

  /** Shows a text whose tokens are not known yet. */
  preview(text) {
    this._text.textContent = text;
  }

  fail(words) {
    this._text.setAttribute("aria-busy", "false");
    this._text.replaceChildren(h("p", { class: "note error", role: "alert" }, words));
  }

  show(tokens, mode) {
    this._tokens = tokens;
    this._text.setAttribute("aria-busy", "false");
    if (!tokens.length) {
      this.fail("The answer has no tokens.");
      return;
    }
    this._summary.replaceChildren(...verdict(tokens).map(([name, value]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
    this._text.replaceChildren(...tokens.map((token, i) => this._token(token, i)));
    this.colour(mode);
  }

  _token(token, i) {
    const words = `${visible(token.text)}: ${percent(token.own.logprob)} under ${this._writer}, ` +
      `${percent(token.other.logprob)} under ${this._other}`;
    const view = h("span", { class: "token", role: "option", tabindex: i ? "-1" : "0",
      "aria-selected": "false", "aria-label": words }, token.text.endsWith("\n")
      ? [token.text.slice(0, -1), h("span", { class: "newline" }, "↵"), "\n"] : token.text);
    const select = () => this._dialog.select(this, i);
    view.addEventListener("focus", select);
    view.addEventListener("pointerenter", select);
    view.addEventListener("click", () => view.focus());
    return view;
  }

  colour(mode) {
    [...this._text.querySelectorAll(".token")].forEach((view, i) => {
      const token = this._tokens[i];
      const changed = token.other.top[0].id !== token.id;
      view.className = `token ${MODES[mode].of(token)}${changed ? " changed" : ""}`;
    });
  }

  mark(i) {
    [...this._text.querySelectorAll(".token")].forEach((view, at) => {
      view.setAttribute("aria-selected", String(at === i));
      view.tabIndex = at === (i ?? 0) ? 0 : -1;
    });
  }

  detail(i) {
    const token = this._tokens[i];
    const side = (name, one) => h("div", { class: "side" }, h("h4", {}, name),
      h("p", {}, h("b", {}, percent(one.logprob)), `, log-probability ${signed(one.logprob)}`),
      h("table", {}, h("caption", { class: "visually-hidden" }, "Most likely tokens"),
        h("tbody", {}, one.top.slice(0, 5).map((each) => {
          const bar = h("span", { class: "bar" });
          bar.style.width = `${Math.max(1, 100 * Math.exp(each.logprob))}%`;
          return h("tr", { class: each.id === token.id ? "chosen" : null },
            h("th", { scope: "row" }, h("code", {}, visible(each.text))),
            h("td", { class: "bars" }, bar), h("td", {}, percent(each.logprob)));
        }))));
    return [h("div", { class: "head" }, h("code", { class: "big" }, visible(token.text)),
      h("span", {}, `token ${token.id}, ${i + 1} of ${this._tokens.length}`),
      h("span", {}, `difference ${signed(difference(token))} nats`)),
    h("div", { class: "sides" }, side(this._writer, token.own), side(this._other, token.other))];
  }

  _key(event) {
    const views = [...this._text.querySelectorAll(".token")];
    const at = views.indexOf(document.activeElement);
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: views.length - 1,
      ArrowDown: this._worse(at, 1), ArrowUp: this._worse(at, -1) };
    if (at < 0 || moves[event.key] === undefined) return;
    event.preventDefault();
    views[Math.min(Math.max(moves[event.key], 0), views.length - 1)].focus();
  }

  /** The next token, in a direction, at which the models clearly differ. */
  _worse(from, step) {
    for (let i = from + step; i >= 0 && i < this._tokens.length; i += step) {
      if (Math.abs(difference(this._tokens[i])) >= STEPS[1]) return i;
    }
    return from;
  }
}

class CompareDialog {
  constructor(models) {
    this._models = models;
    this._mode = "difference";
    this._dialog = find("#compare");
    this._control = new AbortController();
    this.columns = [
      new Column(`Answer of ${models[0]}`, models[0], models[1], this),
      new Column(`Answer of ${models[1]}`, models[1], models[0], this),
    ];
    this._legend = h("div", { class: "legend" });
    this._detail = h("section", { class: "detail", "aria-label": "The token" });
    this._build();
    this._dialog.addEventListener("close", () => this._control.abort(), { once: true });
    this._dialog.showModal();
  }

  get signal() {
    return this._control.signal;
  }

  get mode() {
    return this._mode;
  }

  _build() {
    const radios = Object.entries(MODES).map(([mode, { label }]) => h("label", {},
      h("input", { type: "radio", name: "colour", value: mode, checked: mode === this._mode,
        onchange: () => this._setMode(mode) }), h("span", {}, label)));
    this._detail.append(h("p", { class: "hint" },
      "Point at a token, or move with the arrow keys; ↑ and ↓ go to the next one at which the " +
      "models differ."));
    this._dialog.replaceChildren(
      h("div", { class: "dialog-head" },
        h("h2", { id: "compare-title" }, `${this._models[0]} beside ${this._models[1]}`),
        iconButton("close", "Close", () => this._dialog.close())),
      h("div", { class: "bar-row" },
        h("fieldset", { class: "segments" }, h("legend", { class: "visually-hidden" },
          "Colour by"), radios), this._legend),
      h("div", { class: "columns" }, this.columns.map((column) => column.root)), this._detail);
    this._setMode(this._mode);
  }

  _setMode(mode) {
    this._mode = mode;
    this.columns.forEach((column) => column.colour(mode));
    // Each column is coloured by the model that did not write it.
    this._legend.replaceChildren(...legend(mode, "the other model"));
  }

  select(column, i) {
    this.columns.forEach((one) => one.mark(one === column ? i : null));
    this._detail.replaceChildren(...column.detail(i));
  }
}

/** The tokens of a scored answer; the writer's numbers are `own`. */
async function scored(request, tokenIds, signal, swapped) {
  const { messages, tools, chat_template_kwargs } = request;
  const { tokens } = await score({ messages, tools, chat_template_kwargs, token_ids: tokenIds,
    top_logprobs: 5 }, signal);
  if (!swapped) return tokens;
  return tokens.map(({ own, other, ...rest }) => ({ ...rest, own: other, other: own }));
}

async function fill(dialog, conversation, message, request) {
  const [first, second] = dialog.columns;
  first.preview(message.content);
  first.show(await scored(request, message.token_ids, dialog.signal, false), dialog.mode);
  let text = "";
  const ids = [];
  const body = { ...request, return_token_ids: true };
  for await (const chunk of streamChat(body, dialog.signal, "compare/answer")) {
    const choice = chunk.choices?.[0];
    text += choice?.delta?.reasoning_content ?? "";
    text += choice?.delta?.content ?? "";
    ids.push(...(choice?.token_ids ?? []));
    second.preview(text);
  }
  second.show(await scored(request, ids, dialog.signal, true), dialog.mode);
  announce("Both answers are shown.");
}

/** Opens the comparison of an answer. `failed(error)` is told of a missing key. */
export async function openCompare(conversation, message, settings, info, failed) {
  const upTo = conversation.messages.indexOf(message);
  const asked = { ...conversation, messages: conversation.messages.slice(0, upTo) };
  let request;
  try {
    request = requestOf(asked, settings, info);
  } catch (error) {
    failed(error);
    return;
  }
  delete request.model;
  const dialog = new CompareDialog([info.model, info.compare.model]);
  try {
    await fill(dialog, asked, message, request);
  } catch (error) {
    if (error.name === "AbortError") return;
    dialog.columns.filter((column) => column.root.querySelector("[aria-busy=true]"))
      .forEach((column) => column.fail(error.message));
  }
}
