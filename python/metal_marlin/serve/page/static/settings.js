// The dialog of the settings, and what of them goes into a request.

import { find, h, iconButton } from "./dom.js";
import { apiKey, saveSettings, setApiKey } from "./store.js";

// Name of the API, label, what it does, limits of the field.
const NUMBERS = [
  ["temperature", "Temperature", "0 always takes the most likely token", { min: 0, step: 0.05 }],
  ["top_p", "Top p", "Tokens that together have this probability", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top k", "The number of tokens to choose from; 0 for all", { min: 0, step: 1 }],
  ["min_p", "Min p", "Relative to the most likely token", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", "Repetition penalty", "1 is none", { min: 0, step: 0.01 }],
  ["presence_penalty", "Presence penalty", "Per token that occurred; 0 is none",
    { min: -2, max: 2, step: 0.05 }],
  ["frequency_penalty", "Frequency penalty", "Per occurrence; 0 is none",
    { min: -2, max: 2, step: 0.05 }],
  ["seed", "Seed", "The same seed draws the same tokens", { min: 0, step: 1 }],
  ["max_tokens", "Max tokens", "Of an answer", { min: 1, step: 1 }],
];
const WHOLE = new Set(["top_k", "seed", "max_tokens"]);

/** The fields of a request for the conversation. Errors: Error, for a field that is no JSON. */
export function requestFields(conversation, settings) {
  const fields = { ...settings.sampling };
  if (conversation.schema.trim()) {
    fields.response_format = { type: "json_schema",
      json_schema: { name: "answer", strict: true,
        schema: parsed("The JSON schema", conversation.schema, "object") } };
  }
  if (conversation.tools.trim()) fields.tools = parsed("Tools", conversation.tools, "array");
  if (settings.variables.trim()) {
    fields.chat_template_kwargs = parsed("Template variables", settings.variables, "object");
  }
  return fields;
}

function parsed(name, text, kind) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
  const is = Array.isArray(value) ? "array" : value === null ? "null" : typeof value;
  if (is !== kind) {
    throw new Error(`${name}: expected ${kind === "array" ? "a list" : "an object"} of JSON`);
  }
  return value;
}

/** What differs from the defaults, in words, for the line below the message. */
export function summary(conversation, settings) {
  const words = NUMBERS.filter(([name]) => settings.sampling[name] !== undefined)
    .map(([name, label]) => `${label.toLowerCase()} ${settings.sampling[name]}`);
  if (conversation.system) words.unshift("system prompt");
  if (conversation.schema.trim()) words.push("JSON schema");
  if (conversation.tools.trim()) words.push("tools");
  if (settings.variables.trim()) words.push("template variables");
  return words;
}

function numberField([name, label, hint, limits], value, initial) {
  const input = h("input", { type: "number", id: `set-${name}`, inputmode: "decimal", ...limits,
    step: "any", placeholder: initial ?? "", "aria-describedby": `hint-${name}` });
  input.value = value ?? "";
  const shown = initial === undefined || initial === "" ? hint : `${hint}. Default ${initial}`;
  return { name, limits, input, root: h("div", { class: "field" },
    h("label", { for: input.id }, label), input,
    h("p", { class: "hint", id: `hint-${name}` }, shown)) };
}

function textField(id, label, hint, value, kind) {
  const area = h("textarea", { id, rows: "2", spellcheck: kind ? "false" : null,
    class: kind ? "mono" : null, "aria-describedby": `${id}-hint` });
  area.value = value;
  return { area, kind, label, root: h("div", { class: "field wide" },
    h("label", { for: id }, label), area, h("p", { class: "hint", id: `${id}-hint` }, hint)) };
}

const tidy = (value) => (typeof value === "number" ? Number(value.toPrecision(6)) : value);

/** Marks a field that cannot be used, and says why. */
function refuse(input, words) {
  const old = input.parentElement.querySelector(".problem");
  old?.remove();
  input.removeAttribute("aria-invalid");
  if (words === null) return true;
  input.setAttribute("aria-invalid", "true");
  input.after(h("p", { class: "problem", role: "alert" }, words));
  return false;
}

function readNumber({ name, limits, input }, sampling) {
  if (input.value.trim() === "" && !input.validity.badInput) return refuse(input, null);
  const value = Number(input.value);
  if (input.validity.badInput || !Number.isFinite(value)) return refuse(input, "Not a number.");
  if (WHOLE.has(name) && !Number.isInteger(value)) return refuse(input, "Not a whole number.");
  if (value < limits.min || value > (limits.max ?? Infinity)) {
    return refuse(input, limits.max === undefined ? `${limits.min} or more.`
      : `From ${limits.min} to ${limits.max}.`);
  }
  sampling[name] = value;
  return refuse(input, null);
}

function readText({ area, kind, label }) {
  if (!kind || !area.value.trim()) return refuse(area, null);
  try {
    parsed(label, area.value, kind);
  } catch (error) {
    return refuse(area, error.message);
  }
  return refuse(area, null);
}

/** Opens the dialog; calls `changed()` after the settings were stored. */
export function openSettings(conversation, settings, info, changed) {
  const dialog = find("#settings");
  const defaults = { ...(info?.sampling ?? {}), max_tokens: "as the context holds", seed: "" };
  const numbers = NUMBERS.map((row) => numberField(row, settings.sampling[row[0]],
    tidy(defaults[row[0]])));
  const system = textField("set-system", "System prompt",
    "What the model is to be, before the first message.", conversation.system, null);
  const schema = textField("set-schema", "JSON schema of the answer",
    'The answer is JSON of this form: {"type": "object", "properties": …}', conversation.schema,
    "object");
  const tools = textField("set-tools", "Tools",
    'A list of functions that the model may call: [{"type": "function", "function": …}]. You give ' +
    "the results.", conversation.tools, "array");
  const variables = textField("set-variables", "Template variables",
    'For models that have them: {"enable_thinking": false}', settings.variables, "object");
  const key = h("input", { type: "password", id: "set-key", autocomplete: "off" });
  key.value = apiKey();
  const texts = [system, schema, tools, variables];

  const save = () => {
    const sampling = {};
    const good = [...numbers.map((one) => readNumber(one, sampling)), ...texts.map(readText)];
    if (good.includes(false)) {
      dialog.querySelector("[aria-invalid]")?.focus();
      return;
    }
    Object.assign(conversation, { system: system.area.value.trim(), schema: schema.area.value,
      tools: tools.area.value });
    Object.assign(settings, { sampling, variables: variables.area.value });
    setApiKey(key.value);
    dialog.close();
    saveSettings(settings);
    changed();
  };
  const reset = () => numbers.forEach(({ input }) => {
    input.value = "";
    refuse(input, null);
  });
  const form = h("form", { method: "dialog", novalidate: true },
    h("div", { class: "dialog-head" }, h("h2", { id: "settings-title" }, "Settings"),
      iconButton("close", "Close without saving", () => dialog.close())),
    h("div", { class: "dialog-body" },
      h("h3", {}, "This conversation"),
      h("div", { class: "fields" }, system.root, schema.root, tools.root),
      h("h3", {}, "All conversations"),
      h("div", { class: "fields numbers" }, numbers.map((one) => one.root)),
      h("div", { class: "fields" }, variables.root,
        h("div", { class: "field wide" }, h("label", { for: "set-key" }, "API key"), key,
          h("p", { class: "hint" }, info?.needs_key === false
            ? "This server wants none." : "Kept until this tab is closed."))),
      h("h3", {}, "Keys"),
      h("dl", { class: "keys" },
        [["Enter", "sends"], ["Shift+Enter", "begins a new line"], ["Esc", "stops the answer"],
          ["↑", "in an empty field: edits your last message"], ["Alt+N", "new chat"],
          ["Alt+S", "settings"]].map(([keys, what]) => [h("dt", {}, h("kbd", {}, keys)),
          h("dd", {}, what)]))),
    h("div", { class: "dialog-foot" },
      h("button", { type: "button", onclick: reset }, "Defaults"),
      h("span", { class: "grow" }),
      h("button", { type: "submit", class: "primary" }, "Save")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    save();
  });
  dialog.replaceChildren(form);
  dialog.showModal();
}

/** Asks for the key that the server wants; `entered()` is called with the stored key. */
export function askForKey(words, entered) {
  const dialog = find("#key-dialog");
  const key = h("input", { type: "password", id: "ask-key", autocomplete: "off", required: true });
  const form = h("form", { method: "dialog" },
    h("div", { class: "dialog-body" }, h("h2", { id: "key-title" }, "API key"),
      h("p", {}, words), h("div", { class: "field wide" },
        h("label", { for: "ask-key" }, "Key"), key,
        h("p", { class: "hint" }, "Kept until this tab is closed."))),
    h("div", { class: "dialog-foot" }, h("span", { class: "grow" }),
      h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
      h("button", { type: "submit", class: "primary" }, "Use this key")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    setApiKey(key.value.trim());
    dialog.close();
    entered();
  });
  dialog.replaceChildren(form);
  if (!dialog.open) dialog.showModal();
}
