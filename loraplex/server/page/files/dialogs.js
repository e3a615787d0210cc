// Dialogs: Tab stays inside, and focus goes back to where it was, also if that is gone by then.

import { $ } from "./dom.js";

const before = new Map(); // dialog -> what had focus when it was opened

/** Open a dialog, or leave it open; `first` gets the focus instead of its first field. */
export function openDialog(dialog, first = null) {
  if (!dialog.open) {
    before.set(dialog, document.activeElement);
    dialog.showModal();
  }
  first?.focus();
}

const isUsable = (element) => element !== null && element.getClientRects().length > 0 && !element.disabled;

const fieldsOf = (dialog) => [...dialog.querySelectorAll("input, select, textarea, button, a[href]")].filter(isUsable);

function stayInside(event) {
  if (event.key !== "Tab") return;
  const fields = fieldsOf(event.currentTarget);
  const [first, last] = [fields[0], fields.at(-1)];
  if (document.activeElement !== (event.shiftKey ? first : last)) return;
  event.preventDefault();
  (event.shiftKey ? last : first).focus();
}

/** The browser gives the focus back itself; but not if nothing had it, or what had it is gone. */
function giveBack(event) {
  const has = document.activeElement;
  if (has !== document.body && isUsable(has)) return;
  const tab = document.querySelector("[role=tab][aria-selected=true]");
  const had = before.get(event.currentTarget);
  [had === document.body ? null : had, $("prompt"), tab].find(isUsable)?.focus();
}

export function wire() {
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("keydown", stayInside);
    dialog.addEventListener("close", giveBack);
    for (const button of dialog.querySelectorAll("[data-close]"))
      button.addEventListener("click", () => dialog.close());
  }
}
