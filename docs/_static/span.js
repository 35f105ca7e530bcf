// How far back a token sees: layers as rows, tokens as columns, drawn for a chosen depth and memory.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const WORDS = {
  en: {
    layers: "layers",
    memory: "memory",
    segment: "segment",
    tokens: "tokens",
    layer: (n) => `layer ${n}`,
    seen: (n) => `The last token depends on ${n} tokens, itself included.`,
  },
  "zh-CN": {
    layers: "层数",
    memory: "记忆",
    segment: "片段",
    tokens: "token",
    layer: (n) => `第 ${n} 层`,
    seen: (n) => `最后一个 token 依赖于 ${n} 个 token，包括它自己。`,
  },
};
const words = WORDS[document.documentElement.lang] || WORDS.en;

function element(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  parent.append(made);
  return made;
}

function slider(parent, name, least, most, value, changed) {
  const label = document.createElement("label");
  const input = document.createElement("input");
  Object.assign(input, { type: "range", min: least, max: most, value });
  const output = document.createElement("output");
  output.textContent = value;
  input.addEventListener("input", () => {
    output.textContent = input.value;
    changed();
  });
  label.append(`${name} `, input, " ", output);
  parent.append(label);
  return input;
}

function draw(picture, layers, memory, segment) {
  const height = 22, tokens = 48;
  picture.replaceChildren();
  picture.setAttribute("viewBox", `0 0 ${tokens * 12 + 70} ${(layers + 1) * (height + 14) + 10}`);
  const x = (token) => 70 + token * 12;
  const y = (layer) => 16 + (layers - layer) * (height + 14);
  // The tokens of each layer that the last token of the text depends on.
  let first = tokens - 1;
  const firsts = [first];
  for (let layer = layers; layer > 0; layer--) {
    const start = Math.floor(first / segment) * segment;
    first = Math.max(start - memory, 0);
    firsts.unshift(first);
  }
  for (let layer = 0; layer <= layers; layer++) {
    const name = layer ? words.layer(layer) : words.tokens;
    element("text", { x: 0, y: y(layer) + 4, class: "name" }, picture, name);
    for (let token = 0; token < tokens; token++) {
      const kind = token >= firsts[layer] ? "seen" : "unseen";
      element("circle", { cx: x(token), cy: y(layer), r: 4, class: kind }, picture);
    }
  }
  for (let token = segment; token < tokens; token += segment) {
    const at = { x1: x(token) - 6, x2: x(token) - 6, y1: 4, y2: y(0) + 10, class: "border" };
    element("line", at, picture);
  }
  return tokens - firsts[0];
}

for (const place of document.querySelectorAll("[data-span]")) {
  const controls = document.createElement("div");
  const picture = document.createElementNS(SVG, "svg");
  const said = document.createElement("p");
  picture.setAttribute("role", "img");
  said.setAttribute("aria-live", "polite");
  const update = () => {
    const seen = draw(picture, +layers.value, +memory.value, +segment.value);
    said.textContent = words.seen(seen);
    picture.setAttribute("aria-label", said.textContent);
  };
  const layers = slider(controls, words.layers, 1, 5, 3, update);
  const memory = slider(controls, words.memory, 0, 16, 4, update);
  const segment = slider(controls, words.segment, 2, 12, 4, update);
  place.append(controls, picture, said);
  update();
}
