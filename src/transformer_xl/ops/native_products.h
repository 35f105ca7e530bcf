// Products of a matrix with the states of one or many streams.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "native_threads.h"
#include "native_vectors.h"

namespace {

enum Kind : int32_t { FLOAT = 0, BF16 = 1, INT8 = 2, DOUBLE = 3 };

}  // namespace

extern "C" {

// A matrix of `rows` rows; vectors that come with it are in the precision of the computation.
struct Matrix {
    const void *weight;
    const void *scales;  // of the rows, for INT8, in that precision
    const void *bias;    // or null
    int32_t kind, rows, columns, stride;
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
                for (; e + L <= E; e += L) store(row + e, load(weight + n * stride + e));
                for (; e < E; ++e) row[e] = as_real(weight[n * stride + e]);
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
    else product_by_sums<R, W>(m, start, stop, x, B, out);
}

// The rows from start to stop of a matrix times x, which is (B, columns), or with many streams (columns,
// padded B); out begins at the first of them.
template <class R> void product(const Matrix &m, int start, int stop, const R *x, int B, Out<R> out) {
    if constexpr (std::is_same_v<R, double>) product_of<double, double>(m, start, stop, x, B, out);
    else if (m.kind == BF16) product_of<float, bf16>(m, start, stop, x, B, out);
    else if (m.kind == INT8) product_of<float, int8_t>(m, start, stop, x, B, out);
    else product_of<float, float>(m, start, stop, x, B, out);
    const R *scales = static_cast<const R *>(m.scales), *bias = static_cast<const R *>(m.bias);
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
