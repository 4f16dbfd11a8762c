// Markdown as DOM nodes. The tokens are marked's; what an answer says becomes text of the elements
// below and nothing else, so HTML in it is shown, not run, and a link has one of three schemes.

import { Lexer } from "./marked/Lexer.js";
import { copy, h, icon } from "./dom.js";
import { highlight } from "./highlight.js";

const OPTIONS = { gfm: true, breaks: false, mangle: false };
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", hellip: "…",
  ndash: "–", mdash: "—", copy: "©", reg: "®", times: "×", deg: "°", larr: "←", rarr: "→",
  le: "≤", ge: "≥", ne: "≠", euro: "€", middot: "·", bull: "•" };
const DEEPEST = 40; // Of lists and quotations within each other; deeper ones are shown as text.

/** The characters that entities stand for: the lexer writes them for < and &, and answers do. */
function decode(text) {
  return text.replace(/&(#\d{1,7}|#x[\da-f]{1,6}|\w+);/gi, (whole, name) => {
    if (name[0] !== "#") return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    const hex = name[1] === "x" || name[1] === "X";
    const code = parseInt(name.slice(hex ? 2 : 1), hex ? 16 : 10);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  });
}

/** An address that a link may have, or null. */
export function safeAddress(text) {
  try {
    const url = new URL(text);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null; // Relative addresses would be of this server.
  }
}

function link(token, children) {
  const address = safeAddress(decode(token.href));
  if (address === null) return h("span", { class: "no-link", title: "not a link" }, children);
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer",
    title: token.title ? decode(token.title) : null }, children);
}

// Formulas are written \(...\) and \[...\]: there the backslash is no escape to be removed.
const escaped = (token) => (/^\\[()[\]]/.test(token.raw) ? token.raw : decode(token.text));

const INLINE = {
  text: (t, depth) => (t.tokens ? inline(t.tokens, depth) : decode(t.text)),
  escape: (t) => escaped(t),
  strong: (t, depth) => h("strong", {}, inline(t.tokens, depth)),
  em: (t, depth) => h("em", {}, inline(t.tokens, depth)),
  del: (t, depth) => h("del", {}, inline(t.tokens, depth)),
  codespan: (t) => h("code", {}, decode(t.text)),
  br: () => h("br"),
  html: (t) => (/^<br\s*\/?>$/i.test(t.raw) ? h("br") : t.raw),
  link: (t, depth) => link(t, inline(t.tokens, depth)),
  // A picture would tell its server who reads this: it is a link.
  image: (t) => link(t, [decode(t.text) || "picture"]),
};

function inline(tokens, depth) {
  if (depth > DEEPEST) return tokens.map((token) => token.raw);
  return tokens.map((t) => (Object.hasOwn(INLINE, t.type) ? INLINE[t.type](t, depth + 1) : t.raw));
}

/** A block of code with its language and a button that copies it. */
export function codeBlock(text, language) {
  const button = h("button", { type: "button", class: "copy-code", "aria-label": "Copy code" },
    icon("copy"), h("span", {}, "Copy"));
  button.addEventListener("click", () => copy(text, button));
  return h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, language || "text"), button),
    h("pre", { tabindex: "0", "aria-label": language ? `Code, ${language}` : "Code" },
      h("code", {}, highlight(text, language))));
}

function listItem(item, loose, depth) {
  const children = blocks(item.tokens, depth, loose);
  if (!item.task) return h("li", {}, children);
  const box = h("input", { type: "checkbox", disabled: true, checked: item.checked,
    "aria-label": item.checked ? "done" : "to do" });
  return h("li", { class: "task" }, box, h("div", {}, children));
}

function list(token, depth) {
  const start = token.ordered && token.start !== 1 ? token.start : null;
  return h(token.ordered ? "ol" : "ul", { start },
    token.items.map((item) => listItem(item, token.loose, depth)));
}

function table(token, depth) {
  const cell = (tag, one, i) => h(tag, { class: token.align[i] ? `align-${token.align[i]}` : null,
    scope: tag === "th" ? "col" : null }, inline(one.tokens, depth));
  return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    h("table", {},
      h("thead", {}, h("tr", {}, token.header.map((one, i) => cell("th", one, i)))),
      h("tbody", {}, token.rows.map((row) => h("tr", {},
        row.map((one, i) => cell("td", one, i)))))));
}

const BLOCKS = {
  space: () => null,
  def: () => null,
  // An answer's headings are below the page's own.
  heading: (t, depth) => h(`h${Math.min(t.depth + 2, 6)}`, { class: `level-${t.depth}` },
    inline(t.tokens, depth)),
  paragraph: (t, depth) => h("p", {}, inline(t.tokens, depth)),
  code: (t) => codeBlock(t.text, (t.lang || "").split(/\s/)[0].slice(0, 30)),
  blockquote: (t, depth) => h("blockquote", {}, blocks(t.tokens, depth, true)),
  list: (t, depth) => list(t, depth),
  table: (t, depth) => table(t, depth),
  hr: () => h("hr"),
  html: (t) => h("p", { class: "raw" }, t.raw.trimEnd()),
};

/** `loose`: texts of their own line are paragraphs. */
function blocks(tokens, depth, loose) {
  if (depth > DEEPEST) return tokens.map((token) => token.raw);
  return tokens.map((t) => {
    if (Object.hasOwn(BLOCKS, t.type)) return BLOCKS[t.type](t, depth + 1);
    const content = t.tokens ? inline(t.tokens, depth + 1) : [decode(t.text ?? t.raw)];
    return loose ? h("p", {}, content) : content;
  }).flat();
}

/** Shows a text that grows: blocks that did not change keep their nodes, and so the selection. */
export class MarkdownView {
  constructor() {
    this.root = h("div", { class: "markdown" });
    this._blocks = [];
  }

  update(text) {
    let tokens;
    try {
      tokens = new Lexer(OPTIONS).lex(text);
    } catch {
      tokens = [{ type: "html", raw: text }]; // Shown as it is.
    }
    tokens = tokens.filter((token) => token.type !== "space");
    let same = 0;
    while (same < tokens.length && same < this._blocks.length &&
           tokens[same].raw === this._blocks[same].raw) same += 1;
    for (const old of this._blocks.splice(same)) old.nodes.forEach((node) => node.remove());
    for (const token of tokens.slice(same)) {
      const nodes = blocks([token], 0, true)
        .filter((node) => node !== null)
        .map((node) => (typeof node === "string" ? document.createTextNode(node) : node));
      this.root.append(...nodes);
      this._blocks.push({ raw: token.raw, nodes });
    }
  }
}
