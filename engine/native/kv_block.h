// How a block of the KV cache lies in memory, and how a token's key and value get there.
//
// A block holds 16 tokens of every key head, laid out for dot products. In bfloat16 these are of pairs: keys
// [dim / 2][16 tokens][2], so that 16 scores come of one pass over a query, and values [8 pairs of tokens][dim][2]. In
// int8 they are of fours: keys [dim / 4][16 tokens][4], unsigned around 128, and values [4 fours of tokens][dim][4],
// signed, each followed by a float32 scale a token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vector.h"

namespace farthing {

constexpr int64_t BLOCK_TOKENS = 16;

struct KvShape {
    int64_t kv_heads, dim, int8;  // int8: 1 or 0

    int64_t wide_dim() const { return ceil_div(dim, 16) * 16; }
    int64_t quads() const { return ceil_div(dim, 4); }
    int64_t key_bytes() const { return int8 ? (quads() + 1) * BLOCK_TOKENS * 4 : dim * BLOCK_TOKENS * 2; }
    int64_t value_bytes() const { return int8 ? (wide_dim() + 4) * BLOCK_TOKENS : wide_dim() * BLOCK_TOKENS * 2; }
    int64_t head_bytes() const { return ceil_div(key_bytes() + value_bytes(), 64) * 64; }
    int64_t block_bytes() const { return kv_heads * head_bytes(); }
};

// [dim] floats to int8; returns the size of a step. `out` has room for whole vectors.
inline float quantise_head(const float* x, int64_t dim, float factor, int8_t* out) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += 16)
        most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_maskz_loadu_ps(first_lanes(dim - d), x + d)));
    const float largest = _mm512_reduce_max_ps(most);
    const __m512 steps = _mm512_set1_ps(largest > 0 ? 127 / largest : 0);
    for (int64_t d = 0; d < dim; d += 16) {
        const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(first_lanes(dim - d), x + d), steps);
        _mm_storeu_si128((__m128i*)(out + d), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(scaled)));
    }
    return largest / 127 * factor;
}

// x times a Hadamard matrix over its length (fast Walsh-Hadamard transform), over the largest power of two that divides
// `dim`, for each part of that size. Orthogonal, so products of two turned vectors are those of the vectors; but a few
// large channels, as keys have them, are spread over all, and int8 loses less (Ashkboos et al., 2024, "QuaRot").
inline void spread(float* x, int64_t dim) {
    const int64_t size = dim & -dim;
    const __m512 length = _mm512_set1_ps(1 / std::sqrt(static_cast<float>(size)));
    // Sums and differences of lanes 1, 2, 4 and 8 apart: each with its partner, the upper of the two negated.
    const auto turn = [](__m512 v, __m512 partner, __mmask16 upper) {
        return _mm512_mask_sub_ps(_mm512_add_ps(v, partner), upper, partner, v);
    };
    for (int64_t i = 0; i < dim; i += 16) {
        const __mmask16 some = first_lanes(dim - i);
        __m512 v = _mm512_maskz_loadu_ps(some, x + i);
        if (size > 1) v = turn(v, _mm512_permute_ps(v, 0xb1), 0xaaaa);
        if (size > 2) v = turn(v, _mm512_permute_ps(v, 0x4e), 0xcccc);
        if (size > 4) v = turn(v, _mm512_shuffle_f32x4(v, v, 0xb1), 0xf0f0);
        if (size > 8) v = turn(v, _mm512_shuffle_f32x4(v, v, 0x4e), 0xff00);
        _mm512_mask_storeu_ps(x + i, some, size > 16 ? v : _mm512_mul_ps(v, length));
    }
    for (int64_t half = 16; half < size; half *= 2)
        for (int64_t i = 0; i < dim; i += 16) {
            if (i & half) continue;
            const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + half);
            const __m512 factor = 2 * half < size ? _mm512_set1_ps(1) : length;
            _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_add_ps(a, b), factor));
            _mm512_storeu_ps(x + i + half, _mm512_mul_ps(_mm512_sub_ps(a, b), factor));
        }
}

constexpr int64_t LARGEST_DIM = 1024;

inline void store_token_int8(const KvShape& shape, uint8_t* block, int64_t token, const float* key, const float* value) {
    int8_t rounded[LARGEST_DIM];
    uint8_t* values = block + shape.key_bytes();
    float* scales = reinterpret_cast<float*>(block + shape.quads() * BLOCK_TOKENS * 4);
    scales[token] = quantise_head(key, shape.dim, 1, rounded);
    for (int64_t q = 0; q < shape.quads(); q++)
        for (int64_t i = 0; i < 4; i++)
            block[(q * BLOCK_TOKENS + token) * 4 + i] = static_cast<uint8_t>(rounded[4 * q + i] + 128);
    scales = reinterpret_cast<float*>(values + shape.wide_dim() * BLOCK_TOKENS);
    scales[token] = quantise_head(value, shape.dim, 1, rounded);
    uint8_t* line = values + token / 4 * shape.wide_dim() * 4 + token % 4;
    for (int64_t d = 0; d < shape.dim; d++) line[4 * d] = static_cast<uint8_t>(rounded[d]);
}

// Store one token's key and value [dim] of one head. `block`: that head's part of its block.
inline void store_token(const KvShape& shape, uint8_t* block, int64_t token, const float* key, const float* value) {
    if (shape.int8) return store_token_int8(shape, block, token, key, value);
    uint8_t* values = block + shape.key_bytes();
    uint32_t* pairs = reinterpret_cast<uint32_t*>(block) + token;
    uint16_t* line = reinterpret_cast<uint16_t*>(values) + token / 2 * shape.wide_dim() * 2 + token % 2;
    for (int64_t d = 0; d < shape.dim; d += 16) {
        const int64_t count = std::min<int64_t>(16, shape.dim - d);
        alignas(32) uint16_t keys[16], halves[16];
        _mm256_store_si256((__m256i*)keys, narrow(_mm512_maskz_loadu_ps(first_lanes(count), key + d)));
        _mm256_store_si256((__m256i*)halves, narrow(_mm512_maskz_loadu_ps(first_lanes(count), value + d)));
        for (int64_t i = 0; i < count / 2; i++) std::memcpy(pairs + (d / 2 + i) * BLOCK_TOKENS, keys + 2 * i, 4);
        for (int64_t i = 0; i < count; i++) line[2 * (d + i)] = halves[i];
    }
}

}  // namespace farthing
