// The CPU's small kernels: what a decoding step does between matrix products, one call where torch needs four to ten.
//
// Plain C functions over raw pointers, called through ctypes: no torch headers, so they compile in two seconds.
// Every kernel has a torch twin in engine/backends, which is the reference in the tests and the fallback without a
// compiler. OpenMP's runtime is the one that torch has loaded already, so both share one pool of threads.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t BLOCK_TOKENS = 16;
// Below so many multiply-adds, waking a second thread costs more than it brings.
constexpr int64_t WORTH_A_THREAD = 1 << 18;

inline float widen(uint16_t bfloat16) {
    uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// exp(x) for x <= 0 as 2^n * 2^f with |f| <= 1/2; the polynomial is 2^f's Taylor series, relative error below 1e-7.
inline float exp_negative(float x) {
    const float scaled = std::fmax(x * 1.44269504f, -126.0f);
    const float whole = std::nearbyint(scaled);
    const float y = (scaled - whole) * 0.693147181f;
    float sum = 1.0f / 720;
    sum = sum * y + 1.0f / 120;
    sum = sum * y + 1.0f / 24;
    sum = sum * y + 1.0f / 6;
    sum = sum * y + 0.5f;
    sum = sum * y + 1.0f;
    sum = sum * y + 1.0f;
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return sum * power;
}

// One key head of one sequence: `group` query heads [group, dim] over tokens first..last, into out [group, dim].
// scratch: kept by the caller between calls, so that memory is asked for only as contexts grow.
void attend_one(const float* queries, const uint16_t* pool, const int32_t* blocks, int64_t first, int64_t last,
                int64_t group, int64_t dim, int64_t slot_size, int64_t value_offset, float scale, float* out,
                std::vector<float>& scratch) {
    const int64_t count = last - first;
    scratch.resize(group * count + dim);
    float* scores = scratch.data();
    float* wide = scores + group * count;
    for (int64_t t = 0; t < count; t++) {
        const int64_t token = first + t;
        const uint16_t* key = pool + (blocks[token / BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS) * slot_size;
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) wide[d] = widen(key[d]);
        for (int64_t g = 0; g < group; g++) {
            const float* query = queries + g * dim;
            float dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t d = 0; d < dim; d++) dot += query[d] * wide[d];
            scores[g * count + t] = dot * scale;
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float* row = scores + g * count;
        float largest = row[0], sum = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t t = 0; t < count; t++) largest = row[t] > largest ? row[t] : largest;
#pragma omp simd reduction(+ : sum)
        for (int64_t t = 0; t < count; t++) {
            row[t] = exp_negative(row[t] - largest);
            sum += row[t];
        }
        const float inverse = 1 / sum;
#pragma omp simd
        for (int64_t t = 0; t < count; t++) row[t] *= inverse;
    }
    std::memset(out, 0, group * dim * sizeof(float));
    for (int64_t t = 0; t < count; t++) {
        const int64_t token = first + t;
        const uint16_t* value =
            pool + (blocks[token / BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS) * slot_size + value_offset;
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) wide[d] = widen(value[d]);
        for (int64_t g = 0; g < group; g++) {
            const float weight = scores[g * count + t];
            float* target = out + g * dim;
#pragma omp simd
            for (int64_t d = 0; d < dim; d++) target[d] += weight * wide[d];
        }
    }
}

}  // namespace

extern "C" {

// Paged attention of one new token for each of `sequences` (Kwon et al., 2023), reading the blocks where they lie.
// queries: rows of [kv_heads * group, dim] float32, `query_stride` floats apart. pool: [slots, 2 * kv_heads, dim]
// bfloat16, keys then values. blocks: [sequences, table_stride]. contexts: [sequences] tokens, the new one included.
// window: how many of the last tokens are seen, 0 for all. out: [sequences, kv_heads * group, dim] float32.
void decode_attention(const float* queries, int64_t query_stride, const uint16_t* pool, const int32_t* blocks,
                      int64_t table_stride, const int32_t* contexts, int64_t sequences, int64_t kv_heads,
                      int64_t group, int64_t dim, float scale, int64_t window, float* out) {
    int64_t work = 0;
    for (int64_t s = 0; s < sequences; s++) work += contexts[s] * kv_heads * group * dim * 2;
#pragma omp parallel if (work > WORTH_A_THREAD)
    {
        std::vector<float> scratch;
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t s = 0; s < sequences; s++) {
            for (int64_t h = 0; h < kv_heads; h++) {
                const int64_t last = contexts[s];
                const int64_t first = window > 0 && last > window ? last - window : 0;
                attend_one(queries + s * query_stride + h * group * dim, pool + h * dim, blocks + s * table_stride,
                           first, last, group, dim, 2 * kv_heads * dim, kv_heads * dim, scale,
                           out + (s * kv_heads + h) * group * dim, scratch);
            }
        }
    }
}

// out = x / sqrt(mean(x^2) + eps) * weight for each of `rows` rows of `size` float32 (Zhang and Sennrich, 2019).
void rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t size, float* out) {
#pragma omp parallel for if (rows * size > WORTH_A_THREAD)
    for (int64_t r = 0; r < rows; r++) {
        const float* row = x + r * size;
        float* target = out + r * size;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += row[i] * row[i];
        const float inverse = 1 / std::sqrt(squares / size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) target[i] = row[i] * inverse * weight[i];
    }
}

// Each row of float32 to uint8 with zero point 128: its largest magnitude, stored in `largest`, becomes 127 steps.
void quantise(const float* x, int64_t rows, int64_t size, uint8_t* out, float* largest) {
#pragma omp parallel for if (rows * size > WORTH_A_THREAD)
    for (int64_t r = 0; r < rows; r++) {
        const float* row = x + r * size;
        uint8_t* target = out + r * size;
        float most = 0;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < size; i++) {
            const float magnitude = std::fabs(row[i]);
            most = magnitude > most ? magnitude : most;
        }
        largest[r] = most;
        const float steps = most > 0 ? 127 / most : 0;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) target[i] = static_cast<uint8_t>(static_cast<int32_t>(row[i] * steps + 128.5f));
    }
}
}
