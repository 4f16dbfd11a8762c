// Elements, icons and short notices. Text enters the page as text alone: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element; properties that begin with "on" are listeners, null and false ones are left out. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** One of the symbols of index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A button with an icon and a name that is spoken, and shown when the pointer rests on it. */
export function iconButton(name, label, onclick, properties = {}) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label,
    onclick, ...properties }, icon(name));
}

export const find = (selector) => document.querySelector(selector);

/** Says something to screen readers without showing it. */
export function announce(text) {
  find("#status").textContent = text;
}

let toastTimer = 0;

/** A notice that goes away; `undo` gives it a button. */
export function toast(text, undo = null) {
  const box = find("#toast");
  const hide = () => {
    box.hidden = true;
  };
  box.replaceChildren(h("span", {}, text));
  if (undo) {
    const button = h("button", { type: "button", class: "link" }, "Undo");
    button.addEventListener("click", () => {
      hide();
      undo();
    });
    box.append(button);
  }
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(hide, undo ? 10000 : 5000);
}

/** Copies text, and shows on the button that it did. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without https the clipboard is closed to scripts, but the old command still works.
    const area = h("textarea", { class: "visually-hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    button.focus();
    if (!copied) {
      toast("The browser does not allow copying here.");
      return;
    }
  }
  announce("Copied");
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), 1500);
}

/** A file for the user to save. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** The text of a file that the user chooses; null if none is chosen. */
export function chooseFile() {
  return new Promise((resolve) => {
    const input = h("input", { type: "file", accept: ".json,application/json" });
    input.addEventListener("change", async () => {
      resolve(input.files.length ? await input.files[0].text() : null);
    });
    input.addEventListener("cancel", () => resolve(null));
    input.click();
  });
}
