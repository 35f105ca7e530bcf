// A text, token by token: the page of the server, and the playground of the site.
"use strict";

/** Shows tokens in an element, darker the less they were expected; one is chosen by a click or the arrow keys. */
class TokenView {
  /** `onchoose(token, view)` is called with the chosen token, or undefined; the first of more than `limit` tokens go. */
  constructor(element, { onchoose, limit = Infinity }) {
    Object.assign(this, { element, onchoose, limit });
    element.classList.add("tokens");
    element.tabIndex = 0;
    element.setAttribute("role", "group");
    element.addEventListener("keydown", (event) => this.#press(event));
    this.clear();
  }

  clear() {
    Object.assign(this, { tokens: [], chosen: -1, following: true });
    this.element.replaceChildren();
  }

  /** Append a token: its text, its surprisal in nats or null, and whatever else is to be known of it when it is chosen. */
  add({ text, loss, kind = "", ...rest }) {
    const span = Object.assign(document.createElement("span"), { textContent: text, className: kind });
    const token = { text, loss, kind, span, ...rest };
    span.addEventListener("click", () => this.choose(this.tokens.indexOf(token)));
    if (loss !== null) span.style.setProperty("--surprise", Math.min(loss / 6, 1).toFixed(3));
    const { element, tokens } = this, atEnd = element.scrollHeight - element.scrollTop - element.clientHeight < 60;
    tokens.push(token);
    element.append(span);
    while (tokens.length > this.limit) { tokens.shift().span.remove(); this.chosen -= 1; }
    if (atEnd) element.scrollTop = element.scrollHeight;
    if (this.following) this.choose(tokens.length - 1, true);
  }

  /** Choose a token; with `following`, the newest one from now on. */
  choose(place, following = false) {
    this.following = following;
    this.tokens[this.chosen]?.span.classList.remove("chosen");
    this.chosen = place in this.tokens ? place : -1;
    const token = this.tokens[this.chosen];
    token?.span.classList.add("chosen");
    if (!following) token?.span.scrollIntoView({ block: "nearest" });
    this.onchoose(token, this);
  }

  #press(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -20, ArrowDown: 20 }, last = this.tokens.length - 1;
    const from = this.chosen < 0 ? last + 1 : this.chosen;
    if (event.key in steps) this.choose(Math.max(0, Math.min(last, from + steps[event.key])));
    else if (event.key === "Home") this.choose(0);
    else if (event.key === "End") this.choose(last, true);
    else if (event.key === "Escape") this.choose(-1, true);
    else return;
    event.preventDefault();
  }
}
