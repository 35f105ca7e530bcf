// Products of a matrix with the states of one or many streams.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "native_threads.h"
#include "native_vectors.h"

namespace {

enum Kind : int32_t { FLOAT = 0, BF16 = 1, INT8 = 2, DOUBLE = 3, INT4 = 4 };

}  // namespace

extern "C" {

// A matrix of `rows` rows; vectors that come with it are in the precision of the computation.
struct Matrix {
    const void *weight;
    const void *scales;  // INT8: of the rows, in that precision; INT4: of the groups of each row, in BF16
    const void *bias;    // or null
    int32_t kind, rows, columns, stride;  // stride in numbers, of INT4 in pairs
};
}

namespace {

// Dot products of some rows with some streams.
template <int Rows, int Streams, class R, class W>
inline void tile(const W *w, int64_t stride, const R *x, int64_t x_stride, int E, R (&out)[Rows][Streams]) {
    constexpr int L = Lanes<R>::n;
    Vec<R> acc[Rows][Streams] = {};
    int e = 0;
    for (; e + L <= E; e += L) {
        Vec<R> xs[Streams];
        for (int c = 0; c < Streams; ++c) xs[c] = load(x + c * x_stride + e);
        for (int n = 0; n < Rows; ++n) {
            // The rows that come next: a row is too short for the processor to see a pattern.
            __builtin_prefetch(w + (Rows + n) * stride + e);
            Vec<R> row = load(w + n * stride + e);
            for (int c = 0; c < Streams; ++c) acc[n][c] += row * xs[c];
        }
    }
    if (e < E) {
        for (int n = 0; n < Rows; ++n) {
            Vec<R> row = load_first<R>(w + n * stride + e, E - e);
            for (int c = 0; c < Streams; ++c) acc[n][c] += row * load_first<R>(x + c * x_stride + e, E - e);
        }
    }
    for (int n = 0; n < Rows; ++n)
        for (int c = 0; c < Streams; ++c) out[n][c] = sum<R>(acc[n][c]);
}

// Where the product of a row and a stream is written.
template <class R> struct Out {
    R *data;
    int64_t row, stream;  // strides
    R &at(int r, int b) const { return data[r * row + b * stream]; }
};

template <int N, class R, class W>
inline void rows_by_streams(const W *w, const Matrix &m, const R *x, int B, Out<R> out) {
    constexpr int WIDE = BYTES == 64 ? 4 : 2;
    int b = 0;
    if constexpr (N <= 4) {
        for (; b + WIDE <= B; b += WIDE) {
            R found[N][WIDE];
            tile<N, WIDE>(w, m.stride, x + int64_t(b) * m.columns, m.columns, m.columns, found);
            for (int n = 0; n < N; ++n)
                for (int c = 0; c < WIDE; ++c) out.at(n, b + c) = found[n][c];
        }
    }
    for (; b < B; ++b) {
        R found[N][1];
        tile<N, 1>(w, m.stride, x + int64_t(b) * m.columns, m.columns, m.columns, found);
        for (int n = 0; n < N; ++n) out.at(n, b) = found[n][0];
    }
}

template <class R, class W>
void product_by_sums(const Matrix &m, int start, int stop, const R *x, int B, Out<R> out) {
    const W *w = static_cast<const W *>(m.weight);
    const int64_t stride = m.stride;
    int f = start;
    const auto from = [&](int row) { return Out<R>{out.data + (row - start) * out.row, out.row, out.stream}; };
    // One stream needs more rows at once to hide the latency of its sums.
    for (; B == 1 && f + 8 <= stop; f += 8) rows_by_streams<8>(w + f * stride, m, x, B, from(f));
    for (; f + 4 <= stop; f += 4) rows_by_streams<4>(w + f * stride, m, x, B, from(f));
    for (; f < stop; ++f) rows_by_streams<1>(w + f * stride, m, x, B, from(f));
}

// Integers: the states, too, are rounded to integers of 13 bits, so that nothing is converted but sums.

// States of a few streams as integers, and what they are worth.
struct Rounded {
    static constexpr int LARGEST = 4095;
    std::vector<int16_t> values;
    float worth[4];
    int64_t width;  // of a stream: whole groups, the last one filled up with zeros
    Rounded &of(const float *x, int B, int E) {
        width = (E + GROUP - 1) / GROUP * GROUP;
        values.assign(B * width, 0);
        for (int b = 0; b < B; ++b) {
            const float *from = x + int64_t(b) * E;
            float largest = 0;
            for (int e = 0; e < E; ++e) largest = std::max(largest, std::fabs(from[e]));
            worth[b] = largest / LARGEST;
            // Of the smallest numbers there is no inverse: they count as zeros.
            const float inverse = largest > 1e-30f ? LARGEST / largest : 0;
            int16_t *to = values.data() + b * width;
            for (int e = 0; e < E; ++e) to[e] = int16_t(int32_t(from[e] * inverse + (from[e] < 0 ? -0.5f : 0.5f)));
        }
        return *this;
    }
};

// Dot products of some rows with some streams, without the worth of the streams.
template <int Rows, int Streams>
inline void integer_tile(const int8_t *w, const Matrix &m, int, const int16_t *x, int64_t width, float (&out)[Rows][Streams]) {
    Sums acc[Rows][Streams] = {};
    int e = 0;
    for (; e + STEP <= m.columns; e += STEP) {
        Sums xs[Streams];
        for (int c = 0; c < Streams; ++c) xs[c] = integers(x + c * width + e);
        for (int n = 0; n < Rows; ++n) {
            __builtin_prefetch(w + (Rows + n) * int64_t(m.stride) + e);
            const Sums row = integers(w + n * int64_t(m.stride) + e);
            for (int c = 0; c < Streams; ++c) acc[n][c] = add_products(acc[n][c], row, xs[c]);
        }
    }
    for (int n = 0; n < Rows; ++n)
        for (int c = 0; c < Streams; ++c) {
            int32_t lanes[sizeof(Sums) / 4], total = 0;
            std::memcpy(lanes, &acc[n][c], sizeof(Sums));
            for (int32_t lane : lanes) total += lane;
            for (int i = e; i < m.columns; ++i) total += w[n * int64_t(m.stride) + i] * x[c * width + i];
            out[n][c] = float(total);
        }
}

template <int Rows, int Streams>
inline void integer_tile(const int4 *w, const Matrix &m, int first, const int16_t *x, int64_t width, float (&out)[Rows][Streams]) {
    Vec<float> acc[Rows][Streams] = {};
    const int64_t n_groups = width / GROUP;
    const bf16 *scales = static_cast<const bf16 *>(m.scales) + first * n_groups;
    for (int64_t g = 0; g < n_groups; ++g) {
        for (int n = 0; n < Rows; ++n) {
            const int4 *pairs = w + n * int64_t(m.stride) + g * (GROUP / 2);
            if (g % 4 == 0) __builtin_prefetch(pairs + Rows * int64_t(m.stride));
            Sums row[GROUP / STEP];
            integers_of_group(pairs, row);
            const float scale = as_real(scales[n * n_groups + g]);
            for (int c = 0; c < Streams; ++c) {
                Sums sums = {};
                for (int i = 0; i < GROUP / STEP; ++i)
                    sums = add_products(sums, row[i], integers(x + c * width + g * GROUP + i * STEP));
                acc[n][c] += as_reals(sums) * scale;
            }
        }
    }
    for (int n = 0; n < Rows; ++n)
        for (int c = 0; c < Streams; ++c) out[n][c] = sum<float>(acc[n][c]);
}

template <int N, int Streams, class W>
inline void integer_rows(const W *w, const Matrix &m, int first, const Rounded &x, int b, Out<float> out) {
    float found[N][Streams];
    integer_tile<N, Streams>(w, m, first, x.values.data() + b * x.width, x.width, found);
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < Streams; ++c) out.at(n, b + c) = found[n][c] * x.worth[b + c];
}

template <class W> void product_of_integers(const Matrix &m, int start, int stop, const float *x, int B, Out<float> out) {
    static thread_local Rounded rounded;
    rounded.of(x, B, m.columns);
    const W *w = static_cast<const W *>(m.weight);
    const auto from = [&](int row) { return Out<float>{out.data + (row - start) * out.row, out.row, out.stream}; };
    for (int b = 0; b < B;) {
        const bool is_pair = b + 2 <= B;
        int f = start;
        for (; f + 4 <= stop; f += 4) {
            if (is_pair) integer_rows<4, 2>(w + f * int64_t(m.stride), m, f, rounded, b, from(f));
            else integer_rows<4, 1>(w + f * int64_t(m.stride), m, f, rounded, b, from(f));
        }
        for (; f < stop; ++f) {
            if (is_pair) integer_rows<1, 2>(w + f * int64_t(m.stride), m, f, rounded, b, from(f));
            else integer_rows<1, 1>(w + f * int64_t(m.stride), m, f, rounded, b, from(f));
        }
        b += is_pair ? 2 : 1;
    }
}

// Many streams: a lane for each. No sums over lanes, and each weight is read once for all of them.

// How many streams are computed together; 0: so few that sums over lanes are faster.
template <class R> int lanes_for(int B) {
    constexpr int L = Lanes<R>::n;
    if (B <= 4) return 0;
    return B <= L / 2 ? L / 2 : L;
}

// Streams with those that fill up the lanes.
template <class R> int padded_streams(int B) {
    const int lanes = lanes_for<R>(B);
    return lanes ? (B + lanes - 1) / lanes * lanes : B;
}

template <int Width, int Rows, class R>
void rows_by_lanes(const R *w, int64_t stride, int E, const R *x, int B, Out<R> out) {
    typedef R vec __attribute__((vector_size(Width * sizeof(R))));
    constexpr int LINE = 64 / sizeof(R);  // of the cache
    const int Bp = padded_streams<R>(B);
    for (int b = 0; b < Bp; b += Width) {
        vec acc[Rows] = {};
        const R *column = x + b;
        for (int e = 0; e < E; ++e, column += Bp) {
            if (b == 0 && e % LINE == 0)
                for (int n = 0; n < Rows; ++n) __builtin_prefetch(w + (Rows + n) * stride + e);
            vec xs;
            std::memcpy(&xs, column, sizeof xs);
            for (int n = 0; n < Rows; ++n) acc[n] += w[n * stride + e] * xs;
        }
        for (int n = 0; n < Rows; ++n)
            for (int i = 0; i < std::min(Width, B - b); ++i) out.at(n, b + i) = acc[n][i];
    }
}

template <int N, class R>
inline void rows_by_any_lanes(const R *w, int64_t stride, int E, const R *x, int B, Out<R> out) {
    constexpr int L = Lanes<R>::n;
    if (lanes_for<R>(B) < L) rows_by_lanes<L / 2, N>(w, stride, E, x, B, out);
    else rows_by_lanes<L, N>(w, stride, E, x, B, out);
}

template <class R, class W>
void product_by_lanes(const Matrix &m, int start, int stop, const R *x, int B, Out<R> out) {
    constexpr int N = 8, L = Lanes<R>::n;
    const int E = m.columns;
    static thread_local std::vector<R> converted;
    for (int f = start; f < stop; f += N) {
        const int many = std::min(N, stop - f);
        const W *weight = static_cast<const W *>(m.weight) + f * int64_t(m.stride);
        int64_t stride = m.stride;
        const R *w;
        if constexpr (std::is_same_v<R, W>) {
            w = weight;
        } else {
            if (converted.size() < size_t(N) * E) converted.resize(size_t(N) * E);
            for (int n = 0; n < many; ++n) {
                R *row = converted.data() + int64_t(n) * E;
                int e = 0;
                if constexpr (std::is_same_v<W, int4>) {
                    const int n_groups = (E + GROUP - 1) / GROUP;
                    const bf16 *scales = static_cast<const bf16 *>(m.scales) + int64_t(f + n) * n_groups;
                    int8_t numbers[GROUP];
                    for (; e < E; ++e) {
                        if (e % GROUP == 0) unpack(weight + n * stride + e / 2, numbers);
                        row[e] = numbers[e % GROUP] * as_real(scales[e / GROUP]);
                    }
                } else {
                    for (; e + L <= E; e += L) store(row + e, load(weight + n * stride + e));
                    for (; e < E; ++e) row[e] = as_real(weight[n * stride + e]);
                }
            }
            w = converted.data(), stride = E;
        }
        const Out<R> here{out.data + (f - start) * out.row, out.row, out.stream};
        if (many == N) {
            rows_by_any_lanes<N>(w, stride, E, x, B, here);
        } else {
            for (int n = 0; n < many; ++n)
                rows_by_any_lanes<1>(w + n * stride, stride, E, x, B, Out<R>{&here.at(n, 0), 0, out.stream});
        }
    }
}

template <class R> inline void transpose(const R *x, int B, int E, R *out) {
    const int Bp = padded_streams<R>(B);
    for (int e = 0; e < E; ++e) {
        for (int b = 0; b < B; ++b) out[int64_t(e) * Bp + b] = x[int64_t(b) * E + e];
        for (int b = B; b < Bp; ++b) out[int64_t(e) * Bp + b] = 0;
    }
}

template <class R, class W>
void product_of(const Matrix &m, int start, int stop, const R *x, int B, Out<R> out) {
    if (lanes_for<R>(B)) product_by_lanes<R, W>(m, start, stop, x, B, out);
    else if constexpr (std::is_same_v<W, int8_t> || std::is_same_v<W, int4>)
        product_of_integers<W>(m, start, stop, x, B, out);
    else product_by_sums<R, W>(m, start, stop, x, B, out);
}

// The rows from start to stop of a matrix times x, which is (B, columns), or with many streams (columns,
// padded B); out begins at the first of them.
template <class R> void product(const Matrix &m, int start, int stop, const R *x, int B, Out<R> out) {
    if constexpr (std::is_same_v<R, double>) product_of<double, double>(m, start, stop, x, B, out);
    else if (m.kind == BF16) product_of<float, bf16>(m, start, stop, x, B, out);
    else if (m.kind == INT8) product_of<float, int8_t>(m, start, stop, x, B, out);
    else if (m.kind == INT4) product_of<float, int4>(m, start, stop, x, B, out);
    else product_of<float, float>(m, start, stop, x, B, out);
    const R *scales = m.kind == INT8 ? static_cast<const R *>(m.scales) : nullptr, *bias = static_cast<const R *>(m.bias);
    if (!scales && !bias) return;
    for (int b = 0; b < B; ++b)
        for (int f = start; f < stop; ++f) {
            R &value = out.at(f - start, b);
            value = value * (scales ? scales[f] : R(1)) + (bias ? bias[f] : R(0));
        }
}

// Rows of a matrix that a thread takes at once.
int rows_at_once(int rows, int64_t row_work, int n_threads) {
    if (n_threads <= 1) return rows;
    // A chunk costs about a tenth of a microsecond, so small ones do not pay.
    const int64_t least = std::max<int64_t>(8, 16384 / std::max<int64_t>(row_work, 1));
    const int64_t even = (rows + 4 * n_threads - 1) / (4 * n_threads);
    return int((std::max(least, even) + 7) / 8 * 8);
}

// out, which is (B, rows), becomes the product of a matrix with x, which is (B, columns).
template <class R> void whole_product(const Matrix &m, const R *x, R *out, int B, int n_threads) {
    struct Context {
        const Matrix &m;
        const R *x;
        R *out;
        int B, at_once;
    };
    std::vector<R> turned;
    if (lanes_for<R>(B)) {
        turned.resize(int64_t(m.columns) * padded_streams<R>(B));
        transpose(x, B, m.columns, turned.data());
        x = turned.data();
    }
    const int at_once = rows_at_once(m.rows, int64_t(m.columns) * B, n_threads);
    Context context{m, x, out, B, at_once};
    Task task;
    task.n_phases = 1;
    task.n_chunks.push_back((m.rows + at_once - 1) / at_once);
    task.argument = &context;
    task.run = [](const void *argument, uint64_t, int, int index) {
        const Context &c = *static_cast<const Context *>(argument);
        const int start = index * c.at_once, stop = std::min(c.m.rows, start + c.at_once);
        product(c.m, start, stop, c.x, c.B, Out<R>{c.out + start, 1, c.m.rows});
    };
    pool().run(task, n_threads);
}

}  // namespace
