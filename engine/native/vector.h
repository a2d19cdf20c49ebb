// Vectors of 16 floats and what the decoder's parts do with them. AVX-512 with VNNI is required; BF16 is used if there.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <utility>

namespace farthing {

constexpr float LOG2_E = 1.44269504088896341f;

// f(0), f(1), … f(N - 1), with each number known when compiling: arrays of vectors indexed by it stay in registers, where
// a loop that is unrolled later leaves them in memory.
template <int N, class F>
__attribute__((always_inline)) inline void each(F f) {
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
        (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, N>{});
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// 2^x, relative error below 2e-7 for x > -126; 0 below -126. The polynomial is 2^f's Taylor series on |f| <= 1/2.
inline __m512 exp2(__m512 x) {
    const __m512 low = _mm512_set1_ps(-126.0f);
    const __mmask16 alive = _mm512_cmp_ps_mask(x, low, _CMP_GE_OQ);
    x = _mm512_max_ps(x, low);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_mul_ps(_mm512_sub_ps(x, whole), _mm512_set1_ps(0.693147180559945f));
    __m512 sum = _mm512_set1_ps(1.0f / 5040);
    for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = _mm512_fmadd_ps(sum, f, _mm512_set1_ps(c));
    return _mm512_maskz_scalef_ps(alive, sum, whole);
}

// The same to 3e-6, and down to 0: enough for what is rounded to bfloat16. The polynomial is the best of its degree.
inline __m512 exp2_short(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-200.0f));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(0.00957010128f);
    for (const float c : {0.0559178591f, 0.240247443f, 0.693121791f, 0.999999285f})
        sum = _mm512_fmadd_ps(sum, f, _mm512_set1_ps(c));
    return _mm512_scalef_ps(sum, whole);
}

// 1 / x by one step of Newton's method from 14 good bits: a division takes ten times as long.
inline __m512 inverse(__m512 x) {
    const __m512 guess = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(guess, _mm512_fnmadd_ps(x, guess, _mm512_set1_ps(2.0f)));
}

// tanh(x) = 1 - 2 / (1 + e^(2x))
inline __m512 tanh(__m512 x) {
    x = _mm512_min_ps(x, _mm512_set1_ps(20.0f));
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 power = exp2(_mm512_mul_ps(x, _mm512_set1_ps(2 * LOG2_E)));
    return _mm512_fnmadd_ps(_mm512_set1_ps(2.0f), inverse(_mm512_add_ps(one, power)), one);
}

// x / (1 + e^-x), relative error below 4e-6: it is rounded to eight bits next
inline __m512 silu(__m512 x) {
    const __m512 power = exp2_short(_mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-80.0f)), _mm512_set1_ps(-LOG2_E)));
    return _mm512_mul_ps(x, inverse(_mm512_add_ps(_mm512_set1_ps(1.0f), power)));
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel, 2016)
inline __m512 gelu(__m512 x) {
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    const __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
    const __m512 bent = tanh(_mm512_mul_ps(inner, _mm512_set1_ps(0.797884560802865f)));
    return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), _mm512_add_ps(bent, _mm512_set1_ps(1.0f)));
}

// 16 floats to bfloat16, to nearest, ties to even. Not for NaN.
inline __m256i narrow(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}

// The same with one instruction where there is one. It takes numbers below 2^-126 for 0.
inline __m256i narrow_weight(__m512 values) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(values);
#else
    return narrow(values);
#endif
}

// The first `count` of 16 lanes.
inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>(count >= 16 ? 0xffff : (1 << count) - 1); }

// acc + a.low * b.low + a.high * b.high, for 16 lanes of bfloat16 pairs.
__attribute__((always_inline)) inline __m512 dot_pairs(__m512 acc, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
#else
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), acc);
#endif
}

// acc + the dot products of 16 fours of bytes. Assembly, because with the intrinsic gcc 12 copies every sum to the stack
// and back in each round of loops around it, which makes them three times as slow.
__attribute__((always_inline)) inline __m512i dot(__m512i acc, __m512i weights, __m512i values) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(weights), "v"(values));
    return acc;
}

}  // namespace farthing
