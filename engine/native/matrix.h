// Products of quantised weights and quantised activations with AVX512-VNNI.
//
// int8 weights are unsigned around 128, int4 weights steps above a group's least value; activations are signed: the instruction multiplies
// unsigned by signed bytes, four at a time. Every row of activations has a scale for each ACTIVATION_GROUP columns, so
// that one large element spoils few others. A row's result depends on that row alone, bit for bit, however many rows
// go together.
#pragma once

#include "vector.h"

namespace farthing {

constexpr int64_t TILE = 32;               // outputs computed together
constexpr int64_t COLUMN_MULTIPLE = 64;    // columns are padded with zeros to this
constexpr int64_t ACTIVATION_GROUP = 128;  // columns that share an activation scale (the last group may be shorter)
constexpr int64_t WEIGHT_GROUP = 32;       // int4: columns of an output that share a weight scale
constexpr int64_t MOST_ROWS = 12;          // rows per register tile: 24 sums, 2 weights, the rest for activations

// int8 `data`: [rows / 32, columns / 4, 32, 4]; `scales`: [rows] float32.
// int4 `data`: [rows / 32, columns / 32, 4, 128]: byte i of line j has the values at i of columns quadruple j (low half)
// and j + 4 (high half) of the group, in int8's order; `scales`: [rows / 32, columns / 32, 2, 32] float16, the size of a
// step and the least value.
struct Matrix {
    const uint8_t* data;
    const void* scales;
    const float* bias;  // [rows], or null
    int64_t rows, columns, bits;
};

// Quantised rows: `stride` columns each, scales and sums (of the quantised values) by group.
struct Activations {
    int8_t* values;
    float* scales;     // [rows, groups]
    int32_t* sums;     // [rows, groups]
    int32_t* subsums;  // [rows, columns / WEIGHT_GROUP], or null where no weights are int4
};

inline int64_t activation_groups(int64_t columns) { return ceil_div(columns, ACTIVATION_GROUP); }

// One group of one row to int8. `x`: the group's floats, ACTIVATION_GROUP of them or what the last group has.
inline void quantise_group(const float* x, int64_t columns, int64_t row, int64_t group, const Activations& out) {
    const int64_t first = group * ACTIVATION_GROUP, count = std::min(columns - first, ACTIVATION_GROUP);
    int8_t* values = out.values + row * columns + first;
    __m512 most = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
    const float largest = _mm512_reduce_max_ps(most);
    const __m512 steps = _mm512_set1_ps(largest > 0 ? 127 / largest : 0);
    __m512i total = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += WEIGHT_GROUP) {
        const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), steps));
        const __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i + 16), steps));
        _mm_storeu_si128((__m128i*)(values + i), _mm512_cvtsepi32_epi8(a));
        _mm_storeu_si128((__m128i*)(values + i + 16), _mm512_cvtsepi32_epi8(b));
        const __m512i both = _mm512_add_epi32(a, b);
        if (out.subsums) out.subsums[(row * columns + first + i) / WEIGHT_GROUP] = _mm512_reduce_add_epi32(both);
        total = _mm512_add_epi32(total, both);
    }
    out.scales[row * activation_groups(columns) + group] = largest / 127;
    out.sums[row * activation_groups(columns) + group] = _mm512_reduce_add_epi32(total);
}

// One row of `columns` floats (a multiple of COLUMN_MULTIPLE) to int8.
inline void quantise_row(const float* x, int64_t columns, int64_t row, const Activations& out) {
    for (int64_t g = 0; g < activation_groups(columns); g++) quantise_group(x + g * ACTIVATION_GROUP, columns, row, g, out);
}

inline __m512i quad(const int8_t* values) {
    int32_t bits;
    std::memcpy(&bits, values, sizeof bits);
    return _mm512_set1_epi32(bits);
}

// One activation group of int8 weights into the sums of R rows. Out of line, so that during the loop the registers hold
// nothing but the 2 R dot products, the weights and one activation. `ahead`: bytes from these weights to those to fetch
// from memory meanwhile.
template <int R>
__attribute__((noinline)) void int8_group(const uint8_t* weights, int64_t ahead, const int8_t* values, int64_t stride, int64_t count,
                                          const int32_t* totals, const float* scales, int64_t groups, __m512 (*sums)[2]) {
    __m512i dots[R][2];
    each<R>([&](auto r) __attribute__((always_inline)) { dots[r][0] = dots[r][1] = _mm512_set1_epi32(-128 * totals[r * groups]); });
    for (const uint8_t* end = weights + count * TILE; weights != end; weights += 4 * TILE, values += 4) {
        const __m512i w0 = _mm512_loadu_si512(weights), w1 = _mm512_loadu_si512(weights + 64);
        _mm_prefetch(reinterpret_cast<const char*>(weights + ahead), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(weights + ahead + 64), _MM_HINT_T1);
        each<R>([&](auto r) __attribute__((always_inline)) {
            const __m512i x = quad(values + r * stride);
            dots[r][0] = dot(dots[r][0], w0, x);
            dots[r][1] = dot(dots[r][1], w1, x);
        });
    }
    each<R>([&](auto r) __attribute__((always_inline)) {
        const __m512 scale = _mm512_set1_ps(scales[r * groups]);
        sums[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][0]), scale, sums[r][0]);
        sums[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][1]), scale, sums[r][1]);
    });
}

// Rows row..row + R of the activations times one tile of int8 weights: two vectors of sums a row.
template <int R>
inline void int8_tile(const Matrix& w, int64_t tile, const Activations& a, int64_t row, bool again, __m512 (*sums)[2]) {
    const int64_t ahead = again ? TILE * w.columns : 0;  // the next tile, while this one comes from the cache
    const int64_t columns = w.columns, groups = activation_groups(columns);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = g * ACTIVATION_GROUP, count = std::min(columns - first, ACTIVATION_GROUP);
        int8_group<R>(w.data + tile * TILE * columns + first * TILE, ahead, a.values + row * columns + first, columns, count,
                      a.sums + row * groups + g, a.scales + row * groups + g, groups, sums);
    }
    const float* scales = static_cast<const float*>(w.scales) + tile * TILE;
    for (int h = 0; h < 2; h++)
        for (int r = 0; r < R; r++) sums[r][h] = _mm512_mul_ps(sums[r][h], _mm512_loadu_ps(scales + 16 * h));
}

// One weight group of int4 weights into the sums of R rows.
template <int R>
__attribute__((noinline)) void int4_group(const uint8_t* lines, const uint16_t* weight_scales, const int8_t* values,
                                          int64_t stride, const int32_t* totals, const float* scales, int64_t groups,
                                          __m512 (*sums)[2]) {
    const int64_t weight_groups = stride / WEIGHT_GROUP;
    const __m512i low = _mm512_set1_epi8(0x0f);
    __m512i dots[R][2];
    each<R>([&](auto r) __attribute__((always_inline)) { dots[r][0] = dots[r][1] = _mm512_setzero_si512(); });
    const auto add = [&](__m512i w0, __m512i w1, const int8_t* at) __attribute__((always_inline)) {
        each<R>([&](auto r) __attribute__((always_inline)) {
            const __m512i x = quad(at + r * stride);
            dots[r][0] = dot(dots[r][0], w0, x);
            dots[r][1] = dot(dots[r][1], w1, x);
        });
    };
#pragma GCC unroll 1
    for (int64_t j = 0; j < 4; j++) {
        const __m512i p0 = _mm512_loadu_si512(lines + j * 128), p1 = _mm512_loadu_si512(lines + j * 128 + 64);
        const __m512i h0 = _mm512_srli_epi16(p0, 4), h1 = _mm512_srli_epi16(p1, 4);
        add(_mm512_and_si512(p0, low), _mm512_and_si512(p1, low), values + 4 * j);
        add(_mm512_and_si512(h0, low), _mm512_and_si512(h1, low), values + 4 * j + 16);
    }
    const auto wide = [&](int64_t i) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(weight_scales + i))); };
    const __m512 step0 = wide(0), step1 = wide(16), least0 = wide(TILE), least1 = wide(TILE + 16);
    each<R>([&](auto r) __attribute__((always_inline)) {
        const __m512 scale = _mm512_set1_ps(scales[r * groups]);
        const __m512 total = _mm512_set1_ps(static_cast<float>(totals[r * weight_groups]));
        const __m512 part0 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][0]), step0, _mm512_mul_ps(least0, total));
        const __m512 part1 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][1]), step1, _mm512_mul_ps(least1, total));
        sums[r][0] = _mm512_fmadd_ps(part0, scale, sums[r][0]);
        sums[r][1] = _mm512_fmadd_ps(part1, scale, sums[r][1]);
    });
}

template <int R>
inline void int4_tile(const Matrix& w, int64_t tile, const Activations& a, int64_t row, __m512 (*sums)[2]) {
    const int64_t columns = w.columns, groups = activation_groups(columns), weight_groups = columns / WEIGHT_GROUP;
    const uint16_t* scales = static_cast<const uint16_t*>(w.scales) + 2 * tile * TILE * weight_groups;
    for (int64_t g = 0; g < weight_groups; g++)
        int4_group<R>(w.data + (tile * columns + g * WEIGHT_GROUP) * TILE / 2, scales + 2 * g * TILE,
                      a.values + row * columns + g * WEIGHT_GROUP, columns, a.subsums + row * weight_groups + g,
                      a.scales + row * groups + g * WEIGHT_GROUP / ACTIVATION_GROUP, groups, sums);
}

// What becomes of a product: stored, added to what is there, or gate and up (the two halves of a tile) combined.
enum class Into { STORE, ADD, SILU_GATE, GELU_GATE };

// R rows of one tile. `again`: others of its rows were just before. `out`: of the first of the rows, where the tile's
// outputs go.
template <int R>
inline void rows_tile(const Matrix& w, int64_t tile, const Activations& a, int64_t row, bool again, float* out,
                      int64_t stride, Into into) {
    __m512 sums[R][2];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    if (w.bits == 8)
        int8_tile<R>(w, tile, a, row, again, sums);
    else
        int4_tile<R>(w, tile, a, row, sums);
    if (w.bias)
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++) sums[r][h] = _mm512_add_ps(sums[r][h], _mm512_loadu_ps(w.bias + tile * TILE + 16 * h));
    for (int r = 0; r < R; r++, out += stride) {
        if (into == Into::STORE || into == Into::ADD) {
            for (int h = 0; h < 2; h++) {
                const __m512 sum = into == Into::ADD ? _mm512_add_ps(sums[r][h], _mm512_loadu_ps(out + 16 * h)) : sums[r][h];
                _mm512_storeu_ps(out + 16 * h, sum);
            }
        } else {
            const __m512 gate = into == Into::SILU_GATE ? silu(sums[r][0]) : gelu(sums[r][0]);
            _mm512_storeu_ps(out, _mm512_mul_ps(gate, sums[r][1]));
        }
    }
}

// Rows row..row + count of one tile. Out of line: it is where a step's time goes, and profiles should say so.
__attribute__((noinline)) void product_tile(const Matrix& w, int64_t tile, const Activations& a, int64_t row, int64_t count,
                                            float* out, int64_t stride, Into into) {
    const int64_t first = row;
    for (; count >= MOST_ROWS; row += MOST_ROWS, count -= MOST_ROWS, out += MOST_ROWS * stride)
        rows_tile<MOST_ROWS>(w, tile, a, row, row > first, out, stride, into);
    const bool again = row > first;
    switch (count) {
        case 11: return rows_tile<11>(w, tile, a, row, again, out, stride, into);
        case 10: return rows_tile<10>(w, tile, a, row, again, out, stride, into);
        case 9: return rows_tile<9>(w, tile, a, row, again, out, stride, into);
        case 8: return rows_tile<8>(w, tile, a, row, again, out, stride, into);
        case 7: return rows_tile<7>(w, tile, a, row, again, out, stride, into);
        case 6: return rows_tile<6>(w, tile, a, row, again, out, stride, into);
        case 5: return rows_tile<5>(w, tile, a, row, again, out, stride, into);
        case 4: return rows_tile<4>(w, tile, a, row, again, out, stride, into);
        case 3: return rows_tile<3>(w, tile, a, row, again, out, stride, into);
        case 2: return rows_tile<2>(w, tile, a, row, again, out, stride, into);
        case 1: return rows_tile<1>(w, tile, a, row, again, out, stride, into);
        default: return;
    }
}

// The gated outputs of one activation group, quantised at once: they are never in memory as floats. `columns`: of `out`.
inline void gate_group(const Matrix& w, int64_t group, const Activations& a, int64_t first_row, int64_t rows, Into into,
                       int64_t columns, const Activations& out) {
    constexpr int64_t TILES = ACTIVATION_GROUP / (TILE / 2), CHUNK = 4 * MOST_ROWS;
    alignas(64) float gated[CHUNK][ACTIVATION_GROUP];
    const int64_t first = group * TILES, tiles = std::min(TILES, w.rows / TILE - first);
    if (tiles < TILES) std::memset(gated, 0, sizeof gated);
    for (int64_t row = first_row; row < first_row + rows; row += CHUNK) {
        const int64_t count = std::min(CHUNK, first_row + rows - row);
        for (int64_t t = 0; t < tiles; t++)
            product_tile(w, first + t, a, row, count, gated[0] + t * TILE / 2, ACTIVATION_GROUP, into);
        for (int64_t r = 0; r < count; r++) quantise_group(gated[r], columns, row + r, group, out);
    }
}

// One row of the matrix (an embedding), times `factor`. int8 only: embeddings and heads are never int4.
inline void read_row(const Matrix& w, int64_t row, int64_t columns, float factor, float* out) {
    const uint8_t* weights = w.data + row / TILE * TILE * w.columns + row % TILE * 4;
    const float scale = static_cast<const float*>(w.scales)[row] * factor;
    for (int64_t k = 0; k < columns; k++) out[k] = (weights[k / 4 * TILE * 4 + k % 4] - 128) * scale;
}

}  // namespace farthing
