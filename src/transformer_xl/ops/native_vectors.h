// Vectors of the width that the compiler is told to use, conversions to float, sums and exponentials.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

struct bf16 {
    uint16_t bits;
};
struct int4 {
    uint8_t pair;  // of two numbers, each 8 more than it is worth
};

template <class R> struct Lanes;
template <> struct Lanes<float> {
    static constexpr int n = BYTES / 4;
    typedef float vec __attribute__((vector_size(BYTES)));
    typedef int32_t ints __attribute__((vector_size(BYTES)));
};
template <> struct Lanes<double> {
    static constexpr int n = BYTES / 8;
    typedef double vec __attribute__((vector_size(BYTES)));
    typedef int64_t ints __attribute__((vector_size(BYTES)));
};
template <class R> using Vec = typename Lanes<R>::vec;

template <class R> inline Vec<R> load(const R *p) {
    Vec<R> v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Conversions that compilers do not find in vector extensions by themselves; casts keep the bits.
#if defined(__AVX512F__)
inline Vec<float> load(const bf16 *p) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return (Vec<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}
inline Vec<float> load(const int8_t *p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return (Vec<float>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
#elif defined(__AVX2__)
inline Vec<float> load(const bf16 *p) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
}
inline Vec<float> load(const int8_t *p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    return (Vec<float>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
#else
inline Vec<float> load(const bf16 *p) {
    typedef uint16_t halves __attribute__((vector_size(BYTES / 2)));
    typedef uint32_t words __attribute__((vector_size(BYTES)));
    halves h;
    std::memcpy(&h, p, sizeof h);
    return (Vec<float>)(__builtin_convertvector(h, words) << 16);
}
inline Vec<float> load(const int8_t *p) {
    typedef int8_t quarter __attribute__((vector_size(BYTES / 4)));
    quarter q;
    std::memcpy(&q, p, sizeof q);
    return __builtin_convertvector(__builtin_convertvector(q, Lanes<float>::ints), Vec<float>);
}
#endif

// The first n values; the others are zero.
template <class R, class W> inline Vec<R> load_first(const W *p, int n) {
    W values[Lanes<R>::n] = {};
    for (int i = 0; i < n; ++i) values[i] = p[i];
    return load(values);
}
#if defined(__AVX512F__)
template <> inline Vec<float> load_first<float, float>(const float *p, int n) {
    return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
}
template <> inline Vec<double> load_first<double, double>(const double *p, int n) {
    return _mm512_maskz_loadu_pd(__mmask8((1u << n) - 1), p);
}
#endif

template <class R> inline void store(R *p, Vec<R> v) { std::memcpy(p, &v, sizeof v); }

// Sums of the lanes, by halves.
typedef float float4 __attribute__((vector_size(16)));
typedef float float8 __attribute__((vector_size(32)));
typedef float float16 __attribute__((vector_size(64)));
typedef double double2 __attribute__((vector_size(16)));
typedef double double4 __attribute__((vector_size(32)));
typedef double double8 __attribute__((vector_size(64)));
inline float total(float4 v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline double total(double2 v) { return v[0] + v[1]; }
// GCC has __builtin_shufflevector since version 12 only.
template <class Half, class Whole> inline Half halves(const Whole &v) {
    Half part[2];
    std::memcpy(part, &v, sizeof v);
    return part[0] + part[1];
}
#if defined(__AVX2__)
inline float total(float8 v) { return total(halves<float4>(v)); }
inline double total(double4 v) { return total(halves<double2>(v)); }
#endif
#if defined(__AVX512F__)
inline float total(float16 v) { return total(halves<float8>(v)); }
inline double total(double8 v) { return total(halves<double4>(v)); }
#endif
template <class R> inline R sum(Vec<R> v) { return total(v); }

inline float as_real(float x) { return x; }
inline double as_real(double x) { return x; }
inline float as_real(bf16 x) {
    uint32_t word = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &word, 4);
    return out;
}
inline float as_real(int8_t x) { return x; }

inline void put(float *p, float x) { *p = x; }
inline void put(double *p, double x) { *p = x; }
inline void put(bf16 *p, float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    // Round to nearest, ties to even, which would turn some NaN into a number.
    word = x == x ? word + 0x7fff + ((word >> 16) & 1) : 0x7fc00000;
    p->bits = uint16_t(word >> 16);
}

// Sums of products of integers, two neighbors at once where there are instructions for it. They are exact: numbers
// in 8 bits times such in 13 need a row of 16,000 of them to overflow.
#if defined(__AVX512BW__)
typedef __m512i Sums;
constexpr int STEP = 32;
inline Sums integers(const int16_t *p) { return _mm512_loadu_si512(p); }
inline Sums integers(const int8_t *p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
inline Sums add_products(Sums sums, Sums w, Sums x) { return _mm512_add_epi32(sums, _mm512_madd_epi16(w, x)); }
inline Vec<float> as_reals(Sums sums) { return (Vec<float>)_mm512_cvtepi32_ps(sums); }
#elif defined(__AVX2__)
typedef __m256i Sums;
constexpr int STEP = 16;
inline Sums integers(const int16_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
inline Sums integers(const int8_t *p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
inline Sums add_products(Sums sums, Sums w, Sums x) { return _mm256_add_epi32(sums, _mm256_madd_epi16(w, x)); }
inline Vec<float> as_reals(Sums sums) { return (Vec<float>)_mm256_cvtepi32_ps(sums); }
#else
typedef Lanes<float>::ints Sums;
constexpr int STEP = Lanes<float>::n;
template <class W> inline Sums integers(const W *p) {
    typedef W part __attribute__((vector_size(STEP * sizeof(W))));
    part q;
    std::memcpy(&q, p, sizeof q);
    return __builtin_convertvector(q, Sums);
}
inline Sums add_products(Sums sums, Sums w, Sums x) { return sums + w * x; }
inline Vec<float> as_reals(Sums sums) { return __builtin_convertvector(sums, Vec<float>); }
#endif

constexpr int GROUP = 32;  // numbers in 4 bits with one scale: the first half in the low bits of 16 bytes

// The numbers of a group.
inline void unpack(const int4 *p, int8_t *out) {
    for (int i = 0; i < GROUP / 2; ++i) {
        out[i] = int8_t((p[i].pair & 15) - 8);
        out[i + GROUP / 2] = int8_t((p[i].pair >> 4) - 8);
    }
}

inline void integers_of_group(const int4 *p, Sums (&out)[GROUP / STEP]) {
#if defined(__AVX2__)
    const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)), low = _mm_set1_epi8(15);
    const __m128i first = _mm_and_si128(pairs, low), second = _mm_and_si128(_mm_srli_epi16(pairs, 4), low);
#if defined(__AVX512BW__)
    out[0] = _mm512_sub_epi16(_mm512_cvtepu8_epi16(_mm256_set_m128i(second, first)), _mm512_set1_epi16(8));
#else
    out[0] = _mm256_sub_epi16(_mm256_cvtepu8_epi16(first), _mm256_set1_epi16(8));
    out[1] = _mm256_sub_epi16(_mm256_cvtepu8_epi16(second), _mm256_set1_epi16(8));
#endif
#else
    int8_t numbers[GROUP];
    unpack(p, numbers);
    for (int i = 0; i < GROUP / STEP; ++i) out[i] = integers(numbers + i * STEP);
#endif
}

// e^x for x <= 0, with a relative error of about 1e-7 (Cephes' polynomial).
inline Vec<float> exp_of(Vec<float> x) {
    using V = Vec<float>;
    using I = Lanes<float>::ints;
    const V low = V{} - 87.0f;
    x = x < low ? low : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    V shifted = x * 1.44269504f + magic;
    V n = shifted - magic;
    V r = x - n * 0.693359375f + n * 2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    I power = (__builtin_convertvector(n, I) + 127) << 23;
    return p * (V)power;
}

}  // namespace
