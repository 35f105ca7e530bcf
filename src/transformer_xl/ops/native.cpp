// One token of each stream through all layers of a Transformer-XL, on a CPU.
//
// Decoding is bound by memory bandwidth in large models and by the cost of calls and barriers in small
// ones. So a step is one call: weights, keys, values and position keys are read once, in the precision
// in which they are stored, and everything is accumulated in float (or in double, for the compressor).
//
// The work of a layer is four phases, each of them divided into chunks that threads take one by one:
//
//   1 by heads   queries, keys and values of a head; keys and values into their slots; attention
//   2 by rows    output projection, and the residual connection
//   3 by rows    feed-forward: inner projection and activation
//   4 by rows    feed-forward: outer projection, and the residual connection
//
// A phase begins when all chunks of the one before are done, not when all threads have arrived: a thread
// that the system has suspended delays nothing, unless it holds a chunk. Every number is computed by the
// same instructions whichever thread does it, so results do not depend on the number of threads.
//
// Normalization is repeated by each thread, from sums that all of them see, instead of being a phase.
//
// Plain C interface, with neither Python nor torch: the library is loaded by ctypes. It is compiled once
// for each level of vector instructions (setup.py).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "native_products.h"
#include "native_threads.h"
#include "native_vectors.h"

namespace {

constexpr int VERSION = 11;  // of the structures below and of what they mean

enum Activation : int32_t { RELU = 0, RELU_SQUARED = 1, GELU = 2, GEGLU = 3, SWIGLU = 4 };

}  // namespace

extern "C" {

struct Layer {
    Matrix qkv, o, inner, outer;
    const void *attention_norm, *attention_norm_bias, *feed_forward_norm, *feed_forward_norm_bias;
    const void *q_norm, *k_norm;              // or null
    const void *query_growth;                 // (H): queries grow with the number of keys; or null
    const void *content_bias, *position_bias; // (H, K)
    const void *r;                            // position keys, the farthest first, or null
    const void *distance_bias;                // of the rows of r, or null
    void *keys, *values;                      // (H, B, capacity, K), the oldest first
    int64_t r_row, r_head, bias_row, bias_head;  // strides
    int64_t attn_len;                         // how many keys a query sees at most
    double embedding_own, embedding_first;    // factors of the input, and of the normalized embedding
    double growth_from;                       // queries that see more keys grow
};

struct Step {
    const Layer *layers;
    const void *final_norm, *final_norm_bias;  // or null
    void *x;                                   // (B, D): embedded tokens, then the output of the layers
    const int64_t *n_keys;                     // how many keys each stream has, its own included
    void *scratch;
    int64_t newest, capacity, n_positions;     // slot of the token; number of slots; rows of r
    double eps;
    int32_t n_layer, B, D, H, K, F;
    int32_t kind, cache_kind;                  // of the computation; of keys and values
    int32_t activation, norm_first, is_rms, n_threads;
    int32_t n_offset;                          // how many features of a key are those of the position before
};
}

namespace {

template <class R> void normalize(const R *x, R *out, int D, const void *w, const void *b, double eps, bool is_rms) {
    const R *weight = static_cast<const R *>(w), *bias = static_cast<const R *>(b);
    constexpr int L = Lanes<R>::n;
    R mean = 0;
    Vec<R> sums = {};
    int i = 0;
    if (!is_rms) {
        for (; i + L <= D; i += L) sums += load(x + i);
        mean = sum<R>(sums);
        for (; i < D; ++i) mean += x[i];
        mean /= D;
    }
    sums = Vec<R>{};
    for (i = 0; i + L <= D; i += L) {
        Vec<R> apart = load(x + i) - mean;
        sums += apart * apart;
    }
    R square = sum<R>(sums);
    for (; i < D; ++i) square += (x[i] - mean) * (x[i] - mean);
    const R scale = 1 / std::sqrt(square / D + R(eps));
    for (i = 0; i < D; ++i) {
        const R y = (x[i] - mean) * scale;
        out[i] = y * weight[i] + (bias ? bias[i] : R(0));
    }
}

template <class R> inline R activated(R x, Activation kind) {
    if (kind == RELU || kind == RELU_SQUARED) {
        x = x > 0 ? x : R(0);
        return kind == RELU ? x : x * x;
    }
    if (kind == SWIGLU) return x / (1 + std::exp(-x));
    return R(0.5) * x * (1 + std::erf(x * R(M_SQRT1_2)));
}

constexpr int AHEAD = 16;  // rows of keys and values that are fetched before they are read

// Asks for n numbers in a row, which need not exist.
template <class C> inline void fetch(const C *x, int n) {
    for (const char *at = reinterpret_cast<const char *>(x); at < reinterpret_cast<const char *>(x + n); at += 64)
        __builtin_prefetch(at);
}

// Scores of n keys in a row; `nearest` is behind the last of them. Returns the highest.
template <class R, class C>
R scores_of(const R *q_content, const R *q_position, const C *k, const C *r, int64_t r_row, const C *bias,
            int64_t bias_row, R scale, int K, int64_t n, R *out) {
    constexpr int L = Lanes<R>::n, N = 4;
    R highest = R(-INFINITY);
    int64_t i = 0;
    for (; i < n; i += N) {
        const int many = int(std::min<int64_t>(N, n - i));
        Vec<R> acc[N] = {};
        const C *keys[N], *positions[N];
        for (int j = 0; j < N; ++j) {
            const int64_t at = i + std::min(j, many - 1);
            keys[j] = k + at * K;
            positions[j] = r ? r + at * r_row : nullptr;
        }
        fetch(k + (i + AHEAD) * K, N * K);
        int e = 0;
        for (; e + L <= K; e += L) {
            const Vec<R> a = load(q_content + e), b = load(q_position + e);
            for (int j = 0; j < N; ++j) {
                acc[j] += a * load(keys[j] + e);
                if (r) acc[j] += b * load(positions[j] + e);
            }
        }
        if (e < K) {
            const Vec<R> a = load_first<R>(q_content + e, K - e), b = load_first<R>(q_position + e, K - e);
            for (int j = 0; j < N; ++j) {
                acc[j] += a * load_first<R>(keys[j] + e, K - e);
                if (r) acc[j] += b * load_first<R>(positions[j] + e, K - e);
            }
        }
        for (int j = 0; j < many; ++j) {
            R score = sum<R>(acc[j]);
            if (bias) score += scale * as_real(bias[(i + j) * bias_row]);
            out[i + j] = score;
            highest = std::max(highest, score);
        }
    }
    return highest;
}

template <class R> R exponentials(R *score, int64_t n, R highest) {
    constexpr int L = Lanes<R>::n;
    R total = 0;
    int64_t i = 0;
    if constexpr (std::is_same_v<R, float>) {
        Vec<R> sums = {};
        for (; i + L <= n; i += L) {
            const Vec<R> weight = exp_of(load(score + i) - highest);
            store(score + i, weight);
            sums += weight;
        }
        if (i < n) {
            R rest[L];
            std::fill(rest, rest + L, R(-1e30));
            for (int64_t j = i; j < n; ++j) rest[j - i] = score[j] - highest;
            store(rest, exp_of(load(rest)));
            for (int64_t j = i; j < n; ++j) total += score[j] = rest[j - i];
        }
        return total + sum<R>(sums);
    }
    for (; i < n; ++i) total += score[i] = std::exp(score[i] - highest);
    return total;
}

// Adds the weighted values of n keys in a row.
template <class R, class C> void add_values(const R *weight, const C *v, int K, int64_t n, R *out) {
    constexpr int L = Lanes<R>::n, N = 4;
    int e = 0;
    // Several vectors at once, so that rows are read as they lie in memory.
    for (; e + N * L <= K; e += N * L) {
        Vec<R> acc[2][N] = {};
        int64_t i = 0;
        for (; i + 2 <= n; i += 2) {
            fetch(v + (i + AHEAD) * K + e, N * L);
            fetch(v + (i + 1 + AHEAD) * K + e, N * L);
            for (int j = 0; j < 2; ++j)
                for (int c = 0; c < N; ++c) acc[j][c] += weight[i + j] * load(v + (i + j) * K + e + c * L);
        }
        for (; i < n; ++i)
            for (int c = 0; c < N; ++c) acc[0][c] += weight[i] * load(v + i * K + e + c * L);
        for (int c = 0; c < N; ++c) store(out + e + c * L, load(out + e + c * L) + (acc[0][c] + acc[1][c]));
    }
    for (; e + L <= K; e += L) {
        Vec<R> acc[N] = {};
        int64_t i = 0;
        for (; i + N <= n; i += N)
            for (int j = 0; j < N; ++j) acc[j] += weight[i + j] * load(v + (i + j) * K + e);
        for (; i < n; ++i) acc[0] += weight[i] * load(v + i * K + e);
        store(out + e, load(out + e) + ((acc[0] + acc[1]) + (acc[2] + acc[3])));
    }
    if (e < K) {
        Vec<R> acc = {};
        for (int64_t i = 0; i < n; ++i) acc += weight[i] * load_first<R>(v + i * K + e, K - e);
        for (int j = 0; j < K - e; ++j) out[e + j] += acc[j];
    }
}

// The buffers of a step; those of a thread come once for each.
template <class R> struct Buffers {
    R *before, *middle, *attended, *inner;
    static int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }
    static int64_t shared_size(const Step &s) {
        const int64_t B = s.B, Bp = padded_streams<R>(s.B);
        return padded(B * s.D) * 2 + padded(Bp * s.H * s.K) + padded(Bp * s.F);
    }
    explicit Buffers(const Step &s) {
        const int64_t B = s.B, Bp = padded_streams<R>(s.B);
        before = static_cast<R *>(s.scratch);
        middle = before + padded(B * s.D);
        attended = middle + padded(B * s.D);
        inner = attended + padded(Bp * s.H * s.K);
        // Attended values and inner units are read by products.
        column = lanes_for<R>(s.B) ? Bp : 1;
    }
    int64_t column;
    int64_t place(int b, int row, int width) const { return column > 1 ? row * column + b : int64_t(b) * width + row; }
};

// What a thread has computed for itself; the memory is kept from call to call.
template <class R> struct Private {
    std::vector<R> x, normalized, transposed, q, score, attended, values;
    const R *read() const { return transposed.empty() ? normalized.data() : transposed.data(); }
    uint64_t step = UINT64_MAX;
    int state = -1;  // what x and normalized were made from: 2 * layer, and 1 more after attention
    void fit(const Step &s, uint64_t number) {
        if (step == number) return;
        step = number, state = -1;
        const auto ensure = [](std::vector<R> &buffer, size_t size) {
            if (buffer.size() < size) buffer.resize(size);
        };
        ensure(x, size_t(s.B) * s.D);
        ensure(normalized, size_t(s.B) * s.D);
        if (lanes_for<R>(s.B)) ensure(transposed, size_t(padded_streams<R>(s.B)) * s.D);
        else transposed.clear();
        ensure(attended, s.K);
        ensure(q, (size_t(s.B) * 3 + 2) * s.K);
        ensure(score, size_t(s.capacity) + 64);
    }
};

// Mixes the input of a layer with the embedded tokens, normalized without a weight.
template <class R> void mix_embedding(const Layer &l, const R *embedded, R *x, int D, double eps) {
    R sum = 0;
    for (int i = 0; i < D; ++i) sum += embedded[i] * embedded[i];
    const R own = R(l.embedding_own), first = R(l.embedding_first) / std::sqrt(sum / D + R(eps));
    for (int i = 0; i < D; ++i) x[i] = own * x[i] + first * embedded[i];
}

// x is the residual stream before a block, and normalized what the block reads.
template <class R> void enter(const Step &s, Buffers<R> &buffers, Private<R> &own, int layer, bool is_after) {
    const int state = 2 * layer + is_after;
    if (own.state == state) return;
    own.state = state;
    const Layer &l = s.layers[layer];
    const R *sums = is_after ? buffers.middle : buffers.before;
    // Post-norm: the norm behind the block before this one; pre-norm: the norm of this block.
    const Layer *before = layer > 0 ? &s.layers[layer - 1] : nullptr;
    const void *w = nullptr, *b = nullptr;
    if (s.norm_first) {
        w = is_after ? l.feed_forward_norm : l.attention_norm;
        b = is_after ? l.feed_forward_norm_bias : l.attention_norm_bias;
    } else if (is_after) {
        w = l.attention_norm, b = l.attention_norm_bias;
    } else if (before) {
        w = before->feed_forward_norm, b = before->feed_forward_norm_bias;
    }
    const size_t width = size_t(s.B) * s.D;
    const bool is_mixed = !is_after && (l.embedding_own != 1 || l.embedding_first != 0);
    std::memcpy(own.x.data(), sums, width * sizeof(R));
    for (int n = 0; n < s.B; ++n) {
        const int64_t row = int64_t(n) * s.D;
        R *x = own.x.data() + row;
        if (w && !s.norm_first) normalize(x, x, s.D, w, b, s.eps, s.is_rms);
        // The embedded tokens are overwritten after the last layer.
        if (is_mixed) mix_embedding(l, static_cast<const R *>(s.x) + row, x, s.D, s.eps);
        if (s.norm_first) normalize(x, own.normalized.data() + row, s.D, w, b, s.eps, s.is_rms);
    }
    if (!s.norm_first) std::memcpy(own.normalized.data(), own.x.data(), width * sizeof(R));
    if (!own.transposed.empty()) transpose(own.normalized.data(), s.B, s.D, own.transposed.data());
}

template <class R, class C>
void attend(const Step &s, Buffers<R> &buffers, Private<R> &own, int layer, int h) {
    const Layer &l = s.layers[layer];
    const int K = s.K, width = s.H * s.K;
    const R scale = 1 / std::sqrt(R(K));
    R *qkv = own.q.data();
    for (int part = 0; part < 3; ++part) {
        const int first = part * width + h * K;
        product(l.qkv, first, first + K, own.read(), s.B, Out<R>{qkv + part * K, 1, 3 * K});
    }
    R *q_content = qkv + int64_t(s.B) * 3 * K, *q_position = q_content + K;
    const R *u = static_cast<const R *>(l.content_bias) + h * K;
    const R *v = l.position_bias ? static_cast<const R *>(l.position_bias) + h * K : nullptr;
    for (int b = 0; b < s.B; ++b) {
        R *q = qkv + int64_t(b) * 3 * K, *k = q + K, *value = k + K;
        const int64_t seen = std::min(s.n_keys[b], l.attn_len);
        if (l.q_norm) {
            normalize(q, q, K, l.q_norm, nullptr, s.eps, true);
            normalize(k, k, K, l.k_norm, nullptr, s.eps, true);
        }
        if (l.query_growth) {
            const R growth = static_cast<const R *>(l.query_growth)[h];
            const R factor = 1 + growth * std::log(std::max(R(1), R(seen) / R(l.growth_from)));
            for (int e = 0; e < K; ++e) q[e] *= factor;
        }
        for (int e = 0; e < K; ++e) {
            q_content[e] = (q[e] + u[e]) * scale;
            q_position[e] = (q[e] + (v ? v[e] : R(0))) * scale;
        }
        const int64_t base = (int64_t(h) * s.B + b) * s.capacity * K;
        C *keys = static_cast<C *>(l.keys) + base, *values = static_cast<C *>(l.values) + base;
        // Features with an offset are put into the slot of the next position.
        const int own_features = K - s.n_offset;
        C *newest = keys + s.newest * K, *next = newest + K;
        for (int e = 0; e < K; ++e) {
            if (e < own_features) put(newest + e, k[e]);
            put(values + s.newest * K + e, value[e]);
        }
        const int64_t start = s.newest + 1 - seen;
        const C *r = l.r ? static_cast<const C *>(l.r) + h * l.r_head + (s.n_positions - seen) * l.r_row : nullptr;
        const C *bias = nullptr;
        if (l.distance_bias)
            bias = static_cast<const C *>(l.distance_bias) + h * l.bias_head + (s.n_positions - seen) * l.bias_row;
        R *score = own.score.data();
        const R highest = scores_of(q_content, q_position, keys + start * K, r, l.r_row, bias, l.bias_row, scale, K,
                                    seen, score);
        const R total = exponentials(score, seen, highest);
        R *out = own.attended.data();
        std::fill(out, out + K, R(0));
        add_values(score, values + start * K, K, seen, out);
        for (int e = own_features; e < K; ++e) put(next + e, k[e]);
        for (int e = 0; e < K; ++e) buffers.attended[buffers.place(b, h * K + e, width)] = out[e] / total;
    }
}

constexpr int N_PHASES = 4;  // of a layer

inline int rows_of(const Step &s, int phase) {
    return phase == 0 ? s.H : phase == 2 ? s.F : s.D;
}

template <class R, class C>
void chunk(const Step &s, Buffers<R> &buffers, Private<R> &own, int layer, int phase, int start, int stop) {
    const Layer &l = s.layers[layer];
    enter(s, buffers, own, layer, phase >= 2);
    if (phase == 0) {
        for (int h = start; h < stop; ++h) attend<R, C>(s, buffers, own, layer, h);
    } else if (phase == 2) {
        const auto kind = Activation(s.activation);
        const Out<R> out{buffers.inner + buffers.place(0, start, s.F), buffers.place(0, 1, s.F), buffers.place(1, 0, s.F)};
        product(l.inner, start, stop, own.read(), s.B, out);
        R *values = nullptr;
        if (kind >= GEGLU) {
            // The first F rows are gates of the others.
            if (own.values.size() < size_t(s.B) * (stop - start)) own.values.resize(size_t(s.B) * (stop - start));
            values = own.values.data();
            product(l.inner, s.F + start, s.F + stop, own.read(), s.B, Out<R>{values, s.B, 1});
        }
        for (int f = 0; f < stop - start; ++f)
            for (int b = 0; b < s.B; ++b) {
                R &unit = out.at(f, b);
                unit = activated(unit, kind) * (values ? values[int64_t(f) * s.B + b] : R(1));
            }
    } else {
        R *sums = phase == 1 ? buffers.middle : buffers.before;
        product(phase == 1 ? l.o : l.outer, start, stop, phase == 1 ? buffers.attended : buffers.inner, s.B,
                Out<R>{sums + start, 1, s.D});
        for (int b = 0; b < s.B; ++b)
            for (int64_t i = int64_t(b) * s.D + start; i < int64_t(b) * s.D + stop; ++i) sums[i] += own.x[i];
    }
}

template <class R, class C> void step(Step &s) {
    if (!s.B) return;
    struct Context {
        Step &s;
        Buffers<R> buffers;
        int at_once[N_PHASES];
    };
    Context context{s, Buffers<R>(s), {}};
    int n_chunks[N_PHASES];
    for (int phase = 0; phase < N_PHASES; ++phase) {
        const int rows = rows_of(s, phase);
        const int64_t columns = phase == 1 ? s.H * s.K : phase == 3 ? s.F : s.D;
        context.at_once[phase] = phase == 0 ? 1 : rows_at_once(rows, columns * s.B, s.n_threads);
        n_chunks[phase] = (rows + context.at_once[phase] - 1) / context.at_once[phase];
    }
    Task task;
    task.n_phases = N_PHASES * s.n_layer;
    for (int phase = 0; phase < task.n_phases; ++phase) task.n_chunks.push_back(n_chunks[phase % N_PHASES]);
    task.argument = &context;
    task.run = [](const void *argument, uint64_t number, int phase, int index) {
        const Context &context = *static_cast<const Context *>(argument);
        static thread_local Private<R> own;
        own.fit(context.s, number);
        const int part = phase % N_PHASES, rows = rows_of(context.s, part), size = context.at_once[part];
        chunk<R, C>(context.s, const_cast<Buffers<R> &>(context.buffers), own, phase / N_PHASES, part,
                    index * size, std::min(rows, (index + 1) * size));
    };
    std::memcpy(context.buffers.before, s.x, sizeof(R) * s.B * s.D);
    pool().run(task, s.n_threads);
    const Layer &last = s.layers[s.n_layer - 1];
    const void *w = s.norm_first ? s.final_norm : last.feed_forward_norm;
    const void *b = s.norm_first ? s.final_norm_bias : last.feed_forward_norm_bias;
    R *out = static_cast<R *>(s.x);
    for (int64_t n = 0; n < s.B; ++n) {
        R *x = context.buffers.before + n * s.D;
        if (w) normalize(x, x, s.D, w, b, s.eps, s.is_rms);
        if (!s.norm_first && s.final_norm) normalize(x, x, s.D, s.final_norm, s.final_norm_bias, s.eps, s.is_rms);
        std::memcpy(out + n * s.D, x, sizeof(R) * s.D);
    }
}

}  // namespace

extern "C" {

// Bytes of scratch that a step needs.
int64_t txl_scratch_size(const Step *s) {
    return s->kind == DOUBLE ? 8 * Buffers<double>::shared_size(*s) : 4 * Buffers<float>::shared_size(*s);
}

// Changes with the structures above: a library of another version is not used.
int64_t txl_layout() { return (int64_t(VERSION) << 32) | (sizeof(Step) << 16) | sizeof(Layer); }

// Returns 0; 1 for a combination of precisions that is not there; 2 if there is not enough memory.
int32_t txl_step(Step *s) {
    try {
        if (s->kind == DOUBLE && s->cache_kind == DOUBLE) step<double, double>(*s);
        else if (s->kind == FLOAT && s->cache_kind == FLOAT) step<float, float>(*s);
        else if (s->kind == FLOAT && s->cache_kind == BF16) step<float, bf16>(*s);
        else return 1;
    } catch (const std::bad_alloc &) {
        return 2;
    }
    return 0;
}

// out (B, rows) = x (B, columns) times the matrix; x and out in FLOAT or DOUBLE. Returns what txl_step does.
int32_t txl_product(const Matrix *m, const void *x, void *out, int32_t kind, int32_t B, int32_t n_threads) {
    try {
        if (kind == DOUBLE && m->kind == DOUBLE)
            whole_product(*m, static_cast<const double *>(x), static_cast<double *>(out), B, n_threads);
        else if (kind == FLOAT && m->kind != DOUBLE)
            whole_product(*m, static_cast<const float *>(x), static_cast<float *>(out), B, n_threads);
        else return 1;
    } catch (const std::bad_alloc &) {
        return 2;
    }
    return 0;
}
}
