// The playground of the first page: a model that writes in the browser, and what it looked at.
"use strict";

(() => {
  const BASE = new URL(".", document.currentScript.src).href;
  const LENGTH = 400;
  const MODELS = {
    shakespeare: { language: "en", prompt: "ROMEO:\n", temperature: 0.75, topP: 0.95 },
    "tang-poems": { language: "zh", prompt: "春日登高\n", temperature: 0.8, topP: 1 },
  };
  const MEM_LENS = [0, 32, 128];
  const TEXTS = {
    en: {
      form: "Playground", model: "Model", prompt: "Beginning", memory: "Memory, characters", temperature: "Temperature",
      seed: "Seed", write: "Write", stop: "Stop", loading: "Loading the model …",
      shakespeare: "Shakespeare", "tang-poems": "Tang poems",
      hint: "The darker a character, the less the model expected it. Choose one to see which characters the model looked at when it predicted it.",
      chosen: (bits, n) => `${bits.toFixed(1)} bits; it looked at ${n} characters`,
      unknown: (characters) => `The model does not know ${characters.join(" ")}, and reads the rest.`,
      output: "The text; the arrow keys choose a character",
    },
    zh: {
      form: "试用", model: "模型", prompt: "开头", memory: "记忆长度（字）", temperature: "温度",
      seed: "随机种子", write: "写作", stop: "停止", loading: "正在加载模型……",
      shakespeare: "莎士比亚（英文）", "tang-poems": "唐诗",
      hint: "颜色越深，模型越没有预料到这个字。点选一个字，可以看到模型预测它时注意了哪些字。",
      chosen: (bits, n) => `${bits.toFixed(1)} 比特；注意了 ${n} 个字`,
      unknown: (characters) => `模型不认识 ${characters.join(" ")}，只读其余的字。`,
      output: "文本；用方向键选择一个字",
    },
  };

  function element(tag, attributes = {}, ...children) {
    const node = Object.assign(document.createElement(tag), attributes);
    node.append(...children);
    return node;
  }

  const models = new Map();

  /** Return a model; each is loaded once. */
  function load(name) {
    if (!models.has(name)) models.set(name, read(name).catch((error) => { models.delete(name); throw error; }));
    return models.get(name);
  }

  /** Read a model that a script of this folder has, as a page opened from a file can read no other. */
  async function read(name) {
    const src = `${BASE}${name}.js`;
    await new Promise((resolve, reject) => {
      const onerror = () => reject(new Error(`${src} is missing: make docs writes it`));
      document.head.append(element("script", { src, onload: resolve, onerror }));
    });
    const { config, tokenizer, weights } = TransformerXL.models[name];
    const packed = new Blob([Uint8Array.from(atob(weights), (x) => x.charCodeAt(0))]);
    const unpacked = new Response(packed.stream().pipeThrough(new DecompressionStream("gzip")));
    return TransformerXL.Model.read({ config, tokenizer, weights: new Uint8Array(await unpacked.arrayBuffer()) });
  }

  function start(root) {
    const language = document.documentElement.lang.startsWith("zh") ? "zh" : "en";
    const texts = TEXTS[language];
    const field = (label, control) => element("label", {}, element("span", { textContent: label }), control);
    const model = element("select", { name: "model" });
    for (const name of Object.keys(MODELS)) model.append(element("option", { value: name, textContent: texts[name] }));
    model.value = language === "zh" ? "tang-poems" : "shakespeare";
    const prompt = element("textarea", { name: "prompt", rows: 2, maxLength: 1000, spellcheck: false });
    const memory = element("input", { type: "range", min: 0, max: 2, step: 1, value: 2, name: "memory" });
    const length = element("output");
    const temperature = element("input", { type: "number", required: true, min: 0.1, max: 2, step: "any", name: "temperature" });
    const seed = element("input", { type: "number", required: true, min: 0, max: 2 ** 32 - 1, step: 1, value: 1, name: "seed" });
    const button = element("button", { type: "submit", textContent: texts.write });
    const output = element("div", { className: "text", ariaLabel: texts.output });
    const status = element("p", { className: "status", textContent: texts.hint });
    status.setAttribute("role", "status");
    const form = element(
      "form", { ariaLabel: texts.form }, field(texts.model, model), field(texts.prompt, prompt),
      field(texts.memory, element("span", { className: "memory" }, memory, length)),
      field(texts.temperature, temperature), field(texts.seed, seed), button,
    );
    root.append(form, output, status);

    let run = 0, isWriting = false, hasTold = false, marked = [];
    const view = new TokenView(output, { onchoose: tell });

    const memLen = () => MEM_LENS[Number(memory.value)];
    const show = () => { length.textContent = memLen(); memory.setAttribute("aria-valuetext", memLen()); };

    function defaults() {
      prompt.value = MODELS[model.value].prompt;
      temperature.value = MODELS[model.value].temperature;
      output.lang = MODELS[model.value].language;
    }

    /** Mark what the model looked at before a chosen token, and say how much it was surprised. */
    function tell(token, { tokens, chosen, following }) {
      for (const { span } of marked) span.style.removeProperty("--looked");
      marked = [];
      const isChosen = !following && token && token.loss !== null;
      if (isChosen || hasTold) status.textContent = texts.hint;
      hasTold = isChosen;
      if (!isChosen) return;
      const { looked } = token, most = Math.max(...looked);
      marked = tokens.slice(Math.max(chosen - looked.length, 0), chosen);
      marked.forEach(({ span }, j) => {
        span.style.setProperty("--looked", (looked[looked.length - marked.length + j] / most).toFixed(3));
      });
      status.textContent = texts.chosen(token.loss / Math.LN2, looked.length);
    }

    function stop() {
      run++;
      isWriting = false;
      button.textContent = texts.write;
      status.textContent = texts.hint;
    }

    async function write() {
      if (!form.reportValidity()) return;
      const thisRun = ++run;
      isWriting = true;
      button.textContent = texts.stop;
      view.clear();
      hasTold = false;
      status.textContent = texts.loading;
      try {
        const network = await load(model.value);
        if (thisRun !== run) return;
        const { tokens, unknown } = network.encode(prompt.value || "\n");
        if (unknown.length) status.textContent = texts.unknown(unknown);
        else status.textContent = texts.hint;
        const stream = new TransformerXL.Stream(network), steps = Math.max(tokens.length, 1) + LENGTH;
        const random = TransformerXL.randomNumbers(Number(seed.value)), remembered = memLen();
        const sampling = { temperature: Number(temperature.value), topP: MODELS[model.value].topP };
        let token = tokens[0] ?? network.tokens.get("\n");
        view.add({ text: network.symbols[token], loss: null });
        for (let n = 1; n < steps; n++) {
          const { logits, looked } = stream.read(token, remembered);
          token = tokens[n] ?? TransformerXL.draw(logits, sampling, random);
          const loss = -Math.log(TransformerXL.softmax(logits)[token]);
          view.add({ text: network.symbols[token], loss, looked });
          if (n % 4 === 0) {
            await new Promise((resolve) => setTimeout(resolve));
            if (thisRun !== run) return;
          }
        }
        isWriting = false;
        button.textContent = texts.write;
      } catch (error) {
        if (thisRun !== run) return;
        stop();
        status.textContent = error.message;
      }
    }

    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (isWriting) stop(); else write();
    });
    model.addEventListener("change", () => { defaults(); show(); write(); });
    memory.addEventListener("input", () => { show(); write(); });
    defaults();
    show();
    write();
  }

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".playground").forEach(start));
})();
