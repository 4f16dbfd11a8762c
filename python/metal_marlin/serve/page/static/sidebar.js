// The list of conversations: open, rename, delete, export, import.

import { announce, chooseFile, download, find, h, iconButton, toast } from "./dom.js";
import { fromDocument, titleOf, toDocument } from "./store.js";

const DAY = 86400000;
const narrow = window.matchMedia("(max-width: 50rem)");

function groupOf(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  return time >= today - 7 * DAY ? "Last 7 days" : "Earlier";
}

const fileName = (title) => `${title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat"}.json`;

export class Sidebar {
  /** open(id) shows a conversation, create() a new one; removed(id) is told of a deleted one. */
  constructor(store, { open, create, removed, failed }) {
    Object.assign(this, { _store: store, _open: open, _removed: removed, _failed: failed });
    this._current = null;
    this._renaming = false;
    this._list = find("#conversations");
    find("#new-chat").addEventListener("click", () => {
      create();
      this.toggle(false);
    });
    find("#open-side").addEventListener("click", () => this.toggle(true));
    find("#close-side").addEventListener("click", () => this.toggle(false));
    find("#scrim").addEventListener("click", () => this.toggle(false));
    find("#side").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && narrow.matches) this.toggle(false);
    });
    find("#export-all").addEventListener("click", () => this._exportAll());
    find("#import").addEventListener("click", () => this._import());
    narrow.addEventListener("change", () => this.toggle(false));
    this.toggle(false);
  }

  /** On a narrow screen the list lies over the page. */
  toggle(shown) {
    const over = narrow.matches && shown;
    const wasOver = document.body.classList.contains("side-shown");
    document.body.classList.toggle("side-shown", over);
    find("#scrim").hidden = !over;
    find("main").inert = over;
    find("#side").inert = narrow.matches && !over;
    find("#open-side").setAttribute("aria-expanded", String(over));
    if (over) find("#close-side").focus();
    else if (wasOver && narrow.matches) find("#open-side").focus();
  }

  show(current) {
    this._current = current;
    if (this._renaming) return;
    let group = "";
    const rows = this._store.list().flatMap((conversation) => {
      const own = groupOf(conversation.updated);
      const heading = own === group ? [] : [h("li", { class: "group" }, h("h2", {}, own))];
      group = own;
      return [...heading, this._row(conversation)];
    });
    this._list.replaceChildren(...rows);
  }

  _row(conversation) {
    const title = titleOf(conversation);
    const here = conversation.id === this._current;
    const row = h("li", { class: here ? "row current" : "row" });
    row.append(
      h("button", { type: "button", class: "open", title, "aria-current": here ? "page" : null,
        onclick: () => {
          this._open(conversation.id);
          this.toggle(false);
        } }, title),
      h("span", { class: "row-actions" },
        iconButton("edit", `Rename ${title}`, () => this._rename(conversation, row)),
        iconButton("export", `Export ${title}`, () => download(fileName(title),
          `${JSON.stringify(toDocument(conversation), null, 2)}\n`)),
        iconButton("trash", `Delete ${title}`, () => this._remove(conversation))));
    return row;
  }

  _rename(conversation, row) {
    const field = h("input", { type: "text", "aria-label": "Name of the conversation",
      maxlength: "120" });
    field.value = titleOf(conversation);
    this._renaming = true;
    let ended = false;
    const end = (keep) => {
      if (ended) return;
      ended = true;
      this._renaming = false;
      if (keep && field.value.trim() !== titleOf(conversation)) {
        conversation.title = field.value.trim();
        this._save(conversation);
      }
      this._open(this._current, { focus: false });
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        end(false);
      }
    });
    field.addEventListener("blur", () => end(true));
    row.replaceChildren(field);
    field.select();
    field.focus();
  }

  _save(conversation, options = { touch: false }) {
    try {
      this._store.save(conversation, options);
    } catch (error) {
      this._failed(error);
    }
  }

  _remove(conversation) {
    const index = [...this._list.querySelectorAll(".row")].findIndex(
      (row) => row.contains(document.activeElement));
    this._store.remove(conversation.id);
    this._removed(conversation.id);
    const rows = this._list.querySelectorAll(".row .open");
    (rows[Math.min(Math.max(index, 0), rows.length - 1)] ?? find("#new-chat")).focus();
    announce("Conversation deleted");
    toast(`“${titleOf(conversation)}” is deleted.`, () => {
      try {
        this._store.restore(conversation);
      } catch (error) {
        this._failed(error);
      }
      this._open(conversation.id);
    });
  }

  _exportAll() {
    const all = this._store.list();
    if (!all.length) {
      toast("There is no conversation to export.");
      return;
    }
    download("conversations.json",
      `${JSON.stringify({ conversations: all.map(toDocument) }, null, 2)}\n`);
  }

  async _import() {
    const text = await chooseFile();
    if (text === null) return;
    try {
      const read = fromDocument(text).map((one) => this._store.create(one));
      read.forEach((one) => this._store.save(one));
      if (read.length) this._open(read[0].id);
      toast(read.length === 1 ? "Imported a conversation."
        : `Imported ${read.length} conversations.`);
    } catch (error) {
      this._failed(error);
    }
  }
}
