// A Transformer-XL that reads a token at a time, in plain JavaScript: for the playground.
//
// It computes what `transformer_xl.model.Decoder` does, with the weights of a model folder, in
// float32. Names are those of the paper (Dai et al., 2019), section 3.3.
"use strict";

// Settings that must have these values; those that may have any, of which the second line is about
// training. All others must be off.
const FIXED = {
  kind: "transformer_xl", activation: "relu", gate: "none", norm: "layer", norm_first: true,
  tie_embeddings: true, div_val: 1,
};
const FREE = new Set(`
  vocab_size n_layer d_model n_head d_head d_inner mem_len norm_eps qk_norm key_offset tie_biases final_norm
  dropout attn_dropout embed_dropout input_dropout ff_dropout output_dropout init_std proj_init_std
  sample_softmax proj_same_dim model_type format_version transformers architectures auto_map dtype eval
  measured
`.trim().split(/\s+/));

function requireSupported(config) {
  for (const name of new Set([...Object.keys(FIXED), ...Object.keys(config)])) {
    const value = config[name] ?? null, isOff = [null, false, 0, "empty"].includes(value) || value.length === 0;
    if (name in FIXED ? value !== FIXED[name] : !isOff && !FREE.has(name)) {
      throw new Error(`${name}=${JSON.stringify(value)} is not implemented here`);
    }
  }
}

/** Read the tensors of a safetensors file: float32, or 8 bits with a scale for each row beside them. */
function readTensors(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
  delete header.__metadata__;
  const part = ({ data_offsets: [start, end] }) => bytes.slice(8 + length + start, 8 + length + end).buffer;
  const tensors = {};
  for (const [name, about] of Object.entries(header)) {
    if (about.dtype === "F32") tensors[name] = new Float32Array(part(about));
    else if (about.dtype === "I8") {
      const scales = new Float32Array(part(header[`${name}.scale`])), width = about.shape[1];
      tensors[name] = Float32Array.from(new Int8Array(part(about)), (x, i) => x * scales[Math.floor(i / width)]);
    } else throw new Error(`${name} is ${about.dtype}, not F32 or I8`);
  }
  return tensors;
}

/** Return W x + b, for W with a row of each output. */
function linear(weight, x, bias, first = 0, rows = weight.length / x.length - first) {
  const out = new Float32Array(rows), width = x.length;
  for (let i = 0; i < rows; i++) {
    let sum = bias ? bias[first + i] : 0;
    const start = (first + i) * width;
    for (let j = 0; j < width; j++) sum += weight[start + j] * x[j];
    out[i] = sum;
  }
  return out;
}

function layerNorm(x, weight, bias, eps) {
  let mean = 0, variance = 0;
  for (const value of x) mean += value / x.length;
  for (const value of x) variance += (value - mean) ** 2 / x.length;
  const scale = 1 / Math.sqrt(variance + eps);
  return x.map((value, i) => (value - mean) * scale * weight[i] + bias[i]);
}

/** Divide each head by its root mean square, in place (QK-norm). */
function normalizeHeads(x, weight, eps) {
  const width = weight.length;
  for (let start = 0; start < x.length; start += width) {
    let square = 0;
    for (let i = 0; i < width; i++) square += x[start + i] ** 2 / width;
    const scale = 1 / Math.sqrt(square + eps);
    for (let i = 0; i < width; i++) x[start + i] *= scale * weight[i];
  }
}

function softmax(x) {
  const most = x.reduce((a, b) => Math.max(a, b), -Infinity);
  let sum = 0;
  const out = x.map((value) => { const e = Math.exp(value - most); sum += e; return e; });
  return out.map((value) => value / sum);
}

function add(x, y) {
  return x.map((value, i) => value + y[i]);
}

/** The settings, weights and symbols of a model. */
class Model {
  /**
   * @param config The content of config.json.
   * @param tensors The weights, by name.
   * @param symbols The text of each token.
   */
  constructor(config, tensors, symbols) {
    requireSupported(config);
    Object.assign(this, { config, tensors, symbols });
    this.tokens = new Map(symbols.map((symbol, token) => [symbol, token]));
    this.headWidth = config.d_head ?? config.d_model / config.n_head;
    // Keys of the distances 0, 1, ... of each layer, as far as they were needed.
    this.positionKeys = Array.from({ length: config.n_layer }, () => []);
  }

  /** Read a model folder: the texts of config.json and tokenizer.json, and the weights. */
  static read({ config, tokenizer, weights }) {
    const symbols = [];
    for (const [symbol, token] of Object.entries(tokenizer.model.vocab)) symbols[token] = symbol;
    return new Model(config, readTensors(weights), symbols);
  }

  /** Return a weight of a layer, or of the model. */
  weight(name, layer = null) {
    return this.tensors[layer === null ? name : `layers.${layer}.${name}`];
  }

  /** Return W_{k,R} R_d: the key of a distance in a layer. */
  positionKey(layer, distance) {
    const keys = this.positionKeys[layer], D = this.config.d_model;
    while (keys.length <= distance) {
      const encoding = new Float32Array(D);
      for (let m = 0; m < D / 2; m++) {
        const angle = Math.fround(keys.length * Math.fround(10000 ** (-2 * m / D)));
        encoding[m] = Math.sin(angle);
        encoding[D / 2 + m] = Math.cos(angle);
      }
      keys.push(linear(this.weight("attention.r_proj.weight", layer), encoding));
    }
    return keys[distance];
  }

  /** Return the tokens of a text, and the characters that the model does not know. */
  encode(text) {
    const characters = Array.from(text), isKnown = (x) => this.tokens.has(x);
    return {
      tokens: characters.filter(isKnown).map((x) => this.tokens.get(x)),
      unknown: [...new Set(characters.filter((x) => !isKnown(x)))],
    };
  }
}

/** A text that a model reads: the keys and values of what it remembers. */
class Stream {
  constructor(model) {
    this.model = model;
    this.layers = Array.from({ length: model.config.n_layer }, () => ({ keys: [], values: [], last: null }));
  }

  /**
   * Read a token.
   * @param token The token.
   * @param memLen How many tokens before it are remembered.
   * @returns The logits of the next token, and the weight of each remembered token, the token
   *   itself last: the mean over layers and heads.
   */
  read(token, memLen = this.model.config.mem_len) {
    const { model } = this, { config } = model, D = config.d_model, eps = config.norm_eps;
    const scale = Math.sqrt(D);
    let x = model.weight("embedding.weight").subarray(token * D, (token + 1) * D).map((e) => e * scale);
    let looked = null;
    this.layers.forEach((state, n) => {
      const norm = (part, y) => layerNorm(y, model.weight(`${part}_norm.weight`, n), model.weight(`${part}_norm.bias`, n), eps);
      const { output, weights } = this.attend(n, state, norm("attention", x), memLen);
      x = add(x, output);
      const inner = linear(model.weight("feed_forward.inner.weight", n), norm("feed_forward", x), model.weight("feed_forward.inner.bias", n));
      x = add(x, linear(model.weight("feed_forward.outer.weight", n), inner.map((y) => Math.max(y, 0)), model.weight("feed_forward.outer.bias", n)));
      looked = looked ? add(looked, weights) : weights;
    });
    if (config.final_norm) x = layerNorm(x, model.weight("final_norm.weight"), model.weight("final_norm.bias"), eps);
    return {
      logits: linear(model.weight("embedding.weight"), x, model.weight("softmax.bias")),
      looked: looked.map((y) => y / this.layers.length),
    };
  }

  /** Attend in a layer from a token to those before it and to itself. */
  attend(n, state, x, memLen) {
    const { model } = this, { config } = model, H = config.n_head, K = model.headWidth, width = H * K;
    const projection = model.weight("attention.qkv_proj.weight", n), eps = config.norm_eps;
    const [q, k, v] = [0, 1, 2].map((part) => linear(projection, x, null, part * width, width));
    if (config.qk_norm) {
      normalizeHeads(q, model.weight("attention.q_norm.weight", n), eps);
      normalizeHeads(k, model.weight("attention.k_norm.weight", n), eps);
    }
    state.keys.push(config.key_offset ? this.offset(state, k, K) : k);
    state.values.push(v);
    // With a key offset, the oldest position is but a part of the next key.
    const most = Math.max(memLen + 1 - Boolean(config.key_offset), 1);
    state.keys.splice(0, state.keys.length - most);
    state.values.splice(0, state.values.length - most);

    const S = state.keys.length, biases = n * width * !config.tie_biases;
    const u = model.weight("content_bias"), w = model.weight("position_bias");
    const output = new Float32Array(width), looked = new Float32Array(S);
    for (let h = 0; h < H; h++) {
      const scores = new Float32Array(S);
      for (let j = 0; j < S; j++) {
        const key = state.keys[j], r = model.positionKey(n, S - 1 - j);
        let score = 0;
        for (let i = h * K; i < (h + 1) * K; i++) {
          score += (q[i] + u[biases + i]) * key[i] + (q[i] + w[biases + i]) * r[i];
        }
        scores[j] = score / Math.sqrt(K);
      }
      softmax(scores).forEach((weight, j) => {
        for (let i = h * K; i < (h + 1) * K; i++) output[i] += weight * state.values[j][i];
        looked[j] += weight / H;
      });
    }
    return { output: linear(model.weight("attention.o_proj.weight", n), output), weights: looked };
  }

  /** Return a key whose second half, in each head, is that of the token before. */
  offset(state, k, K) {
    const own = K >> 1;
    const key = k.map((value, i) => (i % K < own ? value : state.last ? state.last[i] : 0));
    state.last = k;
    return key;
  }
}

/** Random numbers from 0 to 1 that depend on a seed alone (mulberry32). */
function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Draw a token from logits, of the fewest that have the probability topP together. */
function draw(logits, { temperature, topP = 1 }, random) {
  const probabilities = softmax(logits.map((x) => x / temperature));
  const tokens = [...probabilities.keys()].sort((a, b) => probabilities[b] - probabilities[a]);
  let n = 0, total = 0;
  while (n < tokens.length && (n === 0 || total < topP)) total += probabilities[tokens[n++]];
  let left = random() * total;
  return tokens.slice(0, n).find((token) => (left -= probabilities[token]) < 0) ?? tokens[n - 1];
}

const TransformerXL = { Model, Stream, draw, randomNumbers, readTensors, softmax };
if (typeof module !== "undefined") module.exports = TransformerXL;
else globalThis.TransformerXL = TransformerXL;
