// Colours for code of any language: comments, strings, numbers and the words that most languages
// share. One pattern for all is wrong in places, and always leaves the text as it is.

import { h } from "./dom.js";

const LONGEST = 20000; // Characters; longer code is shown plain.
const HASH = new Set(["python", "py", "bash", "sh", "shell", "zsh", "console", "ruby", "rb", "yaml",
  "yml", "toml", "r", "perl", "make", "makefile", "dockerfile", "cmake", "elixir", "julia"]);
const DASHES = new Set(["sql", "lua", "haskell", "hs", "ada"]);
const PLAIN = new Set(["", "text", "txt", "plain", "plaintext", "output", "markdown", "md", "diff"]);
const WORDS = new Set(("abstract and as assert async await auto bool boolean break case catch char " +
  "class const constexpr continue def default defer del delete do double elif else end enum " +
  "except export extends extern false False final finally float fn for from func function go " +
  "if impl implements import in include inline int interface is lambda let long loop match mod " +
  "module mut namespace new nil None nonlocal not null nullptr of or override package pass " +
  "print private protected pub public raise return self short signed sizeof static string struct " +
  "super switch template then this throw trait true True try type typedef typename union " +
  "unsigned use using var virtual void where while with yield").split(" "));
const SQL = new Set(("select from where insert into values update set delete create table drop alter " +
  "join left right inner outer full on group by order having limit offset as and or not null is in " +
  "union all distinct primary key foreign references index view with case when then else end").split(" "));

function pattern(language) {
  const comment = HASH.has(language) ? "#[^\\n]*"
    : DASHES.has(language) ? "--[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)"
      : language === "json" ? "(?!)" : "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)|<!--[\\s\\S]*?(?:-->|$)";
  const text = "\"\"\"[\\s\\S]*?(?:\"\"\"|$)|'''[\\s\\S]*?(?:'''|$)|\"(?:\\\\.|[^\"\\\\\\n])*\"?" +
    "|'(?:\\\\.|[^'\\\\\\n])*'|`(?:\\\\.|[^`\\\\])*`?";
  return new RegExp(`(?<comment>${comment})|(?<string>${text})` +
    "|(?<number>\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b)" +
    "|(?<word>[A-Za-z_$][\\w$]*)", "g");
}

/** The text as strings and spans. */
export function highlight(text, language = "") {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || text.length > LONGEST) return [text];
  const pieces = [];
  let end = 0;
  for (const found of text.matchAll(pattern(name))) {
    const { comment, string, number, word } = found.groups;
    let kind = comment ? "comment" : string ? "string" : number ? "number" : null;
    if (word) {
      const known = name === "sql" ? SQL.has(word.toLowerCase()) : WORDS.has(word);
      const called = text[found.index + word.length] === "(";
      kind = known ? "keyword" : called ? "call" : null;
    }
    if (kind === null) continue;
    pieces.push(text.slice(end, found.index), h("span", { class: `c-${kind}` }, found[0]));
    end = found.index + found[0].length;
  }
  pieces.push(text.slice(end));
  return pieces;
}
