// One step of a decoder in one call: a flat batch of tokens in, logits out (engine/models/decoder.py is the same op by
// op, and the reference in the tests).
//
// Plain C structs over raw pointers, called through ctypes: no torch headers, so it compiles in seconds.

#include <memory>
#include <mutex>

#include "attention.h"
#include "matrix.h"
#include "pool.h"

namespace farthing {

struct Layer {
    const float *attn_norm, *ffn_norm;
    const float *query_norm, *key_norm, *output_norm, *down_norm;  // or null
    Matrix qkv, output, gate_up, down;  // gate_up: halves of 16 rows in turn, gate first
    uint8_t* pool;
    int64_t window, rope;  // window: 0 for none
};

struct Decoder {
    const Layer* layers;
    Matrix embedding, head;
    const float* norm;
    const float *frequencies, *magnitudes;  // [ropes, dim / 2], [ropes]
    int64_t num_layers, hidden, heads, intermediate, ropes, gelu;
    KvShape kv;
    float eps, scale, embedding_scale, attention_softcap, logit_softcap;  // caps: 0 for none
};

struct Step {
    const int64_t *token_ids, *positions, *slots;
    const int32_t *query_starts, *tables;
    const int64_t* logits_rows;  // ascending
    int64_t tokens, sequences, table_stride, num_logits;
    float* logits;  // [num_logits, head.rows]: the vocabulary, padded
    float* hidden;  // [tokens, hidden] final-norm states instead of logits, or null
    uint8_t* scratch;  // scratch_bytes(decoder, tokens), 64-byte aligned
};

namespace {

int64_t padded(int64_t columns) { return ceil_div(columns, COLUMN_MULTIPLE) * COLUMN_MULTIPLE; }

// The step's buffers, carved out of one allocation. Strides in elements.
struct Buffers {
    int64_t x_stride, mixed_stride, attended_stride, gated_stride;
    float *x, *delta, *mixed, *attended, *turns;
    Activations activations, heads, gated;
    int64_t bytes;

    Buffers(const Decoder& d, int64_t tokens, uint8_t* base) {
        x_stride = padded(d.hidden);
        mixed_stride = padded((d.heads + 2 * d.kv.kv_heads) * d.kv.dim);
        attended_stride = padded(d.heads * d.kv.dim);
        gated_stride = padded(d.intermediate);
        bytes = 0;
        const auto take = [&](int64_t size) {
            uint8_t* start = base + bytes;
            bytes += ceil_div(size, 64) * 64;
            return start;
        };
        x = (float*)take(tokens * x_stride * 4);
        delta = (float*)take(tokens * x_stride * 4);
        mixed = (float*)take(tokens * mixed_stride * 4);
        attended = (float*)take(tokens * attended_stride * 4);
        turns = (float*)take(tokens * d.ropes * 2 * d.kv.dim * 4);
        // One each: with rows of two lengths in turn, one band's would lie where another's are.
        for (auto [made, columns] : {std::pair{&activations, x_stride}, {&heads, attended_stride}, {&gated, gated_stride}}) {
            made->values = (int8_t*)take(tokens * columns);
            made->scales = (float*)take(tokens * activation_groups(columns) * 4);
            made->sums = (int32_t*)take(tokens * activation_groups(columns) * 4);
            made->subsums = d.layers[0].qkv.bits == 4 ? (int32_t*)take(tokens * columns / WEIGHT_GROUP * 4) : nullptr;
        }
    }
};

// out = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019). Adds up in a fixed order.
inline void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* out) {
    __m512 squares = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    float sum = _mm512_reduce_add_ps(squares);
    for (; i < size; i++) sum += x[i] * x[i];
    const float inverse = 1 / std::sqrt(sum / size + eps);
    for (i = 0; i + 16 <= size; i += 16)
        _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(inverse)), _mm512_loadu_ps(weight + i)));
    for (; i < size; i++) out[i] = x[i] * inverse * weight[i];
}

// From BANDED_ROWS rows on, a thread takes a band of them through all products up to the next attention: then rows do
// not wander between the cores' caches, which costs more than that every thread reads all weights. Fewer rows share out
// the weights instead.
constexpr int64_t BANDED_ROWS = 96;
constexpr int64_t BAND_ROWS = 128;

struct Band {
    int64_t first, count;
    bool alone;  // one thread's, or all threads' together
};

struct Run {
    const Decoder& d;
    const Step& step;
    Pool& pool;
    Buffers b;
    std::vector<Unit> units;

    Run(const Decoder& decoder, const Step& step, Pool& pool)
        : d(decoder), step(step), pool(pool), b(decoder, step.tokens, step.scratch) {
        const int64_t most = std::max<int64_t>(1, UNIT_ROWS / (d.heads / d.kv.kv_heads));
        for (int64_t s = 0; s < step.sequences; s++)
            for (int64_t row = step.query_starts[s]; row < step.query_starts[s + 1]; row += most)
                units.push_back({step.tables + s * step.table_stride, row, step.positions[row],
                                 std::min<int64_t>(most, step.query_starts[s + 1] - row)});
        // The pool begins with the last piece: with the longest there, the threads end together.
        std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) {
            return a.count * a.first_position < b.count * b.first_position;
        });
    }

    void embed(int64_t row) {
        float* x = b.x + row * b.x_stride;
        read_row(d.embedding, step.token_ids[row], d.hidden, d.embedding_scale, x);
        std::fill(x + d.hidden, x + b.x_stride, 0.0f);
        const int64_t width = d.heads * d.kv.dim;
        std::fill(b.attended + row * b.attended_stride + width, b.attended + (row + 1) * b.attended_stride, 0.0f);
        const int64_t half = d.kv.dim / 2;
        for (int64_t r = 0; r < d.ropes; r++) {
            float* cosines = b.turns + (row * d.ropes + r) * 2 * d.kv.dim;
            float* sines = cosines + d.kv.dim;
            for (int64_t i = 0; i < half; i++) {
                const float angle = static_cast<float>(step.positions[row]) * d.frequencies[r * half + i];
                cosines[2 * i] = cosines[2 * i + 1] = std::cos(angle) * d.magnitudes[r];
                sines[2 * i + 1] = std::sin(angle) * d.magnitudes[r];
                sines[2 * i] = -sines[2 * i + 1];
            }
        }
    }

    // The norm of a row of x, quantised as that row of the activations.
    void norm_to_activations(int64_t row, const float* weight) {
        float normed[b.x_stride];
        std::fill(normed + d.hidden, normed + b.x_stride, 0.0f);
        rms_norm(b.x + row * b.x_stride, weight, d.hidden, d.eps, normed);
        quantise_row(normed, b.x_stride, row, b.activations);
    }

    // part(band) for bands that make up rows 0 … count - 1.
    template <class Part>
    void banded(int64_t count, const Part& part) {
        if (count < BANDED_ROWS) return part(Band{0, count, false});
        const int64_t bands = ceil_div(ceil_div(count, BAND_ROWS), pool.size()) * pool.size();
        pool.run(bands, [&](int64_t i) {
            const int64_t first = i * count / bands;
            part(Band{first, (i + 1) * count / bands - first, true});
        });
    }

    template <class Item>
    void each(const Band& band, int64_t count, const Item& item) {
        if (!band.alone) return pool.each(count, item);
        for (int64_t i = 0; i < count; i++) item(i);
    }

    template <class Item>
    void each_row(const Band& band, const Item& item) {
        each(band, band.count, [&](int64_t i) { item(band.first + i); });
    }

    void multiply(const Matrix& w, const Activations& a, const Band& band, float* out, int64_t stride, Into into) {
        out += band.first * stride;
        each(band, w.rows / TILE, [&](int64_t tile) {
            product_tile(w, tile, a, band.first, band.count, out + tile * TILE, stride, into);
        });
    }

    // Norms, rotation, and the row's keys and values into the pool.
    void place(const Layer& layer, int64_t row) {
        const int64_t dim = d.kv.dim, keys_end = d.heads + d.kv.kv_heads;
        float* mixed = b.mixed + row * b.mixed_stride;
        const float* cosines = b.turns + (row * d.ropes + layer.rope) * 2 * dim;
        for (int64_t head = 0; head < keys_end; head++) {
            float* x = mixed + head * dim;
            const float* norm = head < d.heads ? layer.query_norm : layer.key_norm;
            if (norm) rms_norm(x, norm, dim, d.eps, x);
            for (int64_t i = 0; i < dim; i += 16) {
                const __mmask16 some = first_lanes(dim - i);
                const __m512 pairs = _mm512_maskz_loadu_ps(some, x + i), swapped = _mm512_permute_ps(pairs, 0xb1);
                const __m512 turned = _mm512_mul_ps(swapped, _mm512_maskz_loadu_ps(some, cosines + dim + i));
                const __m512 cosine = _mm512_maskz_loadu_ps(some, cosines + i);
                _mm512_mask_storeu_ps(x + i, some, _mm512_fmadd_ps(pairs, cosine, turned));
            }
            if (d.kv.int8) spread(x, dim);
        }
        const int64_t slot = step.slots[row];
        uint8_t* block = layer.pool + slot / BLOCK_TOKENS * d.kv.block_bytes();
        for (int64_t head = 0; head < d.kv.kv_heads; head++)
            store_token(d.kv, block + head * d.kv.head_bytes(), slot % BLOCK_TOKENS, mixed + (d.heads + head) * dim,
                        mixed + (keys_end + head) * dim);
    }

    void attend_all(const Layer& layer) {
        const int64_t group = d.heads / d.kv.kv_heads;
        const Attention a{d.kv, group, b.mixed_stride, b.attended_stride, d.scale, d.attention_softcap, layer.window};
        pool.run(static_cast<int64_t>(units.size()) * d.kv.kv_heads, [&](int64_t i) {
            static thread_local Workspace work;
            const int64_t head = i % d.kv.kv_heads, first = head * group * d.kv.dim;
            attend(a, units[i / d.kv.kv_heads], head, b.mixed + first, layer.pool, work, b.attended + first);
        });
    }

    // Multiply into the residual stream, through a norm where the family has one there.
    void add(const Matrix& w, const Activations& a, const float* norm, const Band& band) {
        if (!norm) return multiply(w, a, band, b.x, b.x_stride, Into::ADD);
        multiply(w, a, band, b.delta, b.x_stride, Into::STORE);
        each_row(band, [&](int64_t row) {
            float* delta = b.delta + row * b.x_stride;
            float* x = b.x + row * b.x_stride;
            rms_norm(delta, norm, d.hidden, d.eps, delta);
            for (int64_t i = 0; i < d.hidden; i++) x[i] += delta[i];
        });
    }

    void before_attention(const Layer& layer, const Band& band) {
        each_row(band, [&](int64_t row) { norm_to_activations(row, layer.attn_norm); });
        multiply(layer.qkv, b.activations, band, b.mixed, b.mixed_stride, Into::STORE);
        each_row(band, [&](int64_t row) { place(layer, row); });
    }

    void after_attention(const Layer& layer, const Band& band) {
        each_row(band, [&](int64_t row) {
            quantise_row(b.attended + row * b.attended_stride, b.attended_stride, row, b.heads);
        });
        add(layer.output, b.heads, layer.output_norm, band);
        each_row(band, [&](int64_t row) { norm_to_activations(row, layer.ffn_norm); });
        const Into gate = d.gelu ? Into::GELU_GATE : Into::SILU_GATE;
        const auto group = [&](int64_t g) {
            gate_group(layer.gate_up, g, b.activations, band.first, band.count, gate, b.gated_stride, b.gated);
        };
        const int64_t groups = activation_groups(b.gated_stride);
        if (band.alone)
            for (int64_t g = 0; g < groups; g++) group(g);
        else
            pool.run(groups, group);
        add(layer.down, b.gated, layer.down_norm, band);
    }

    // Only the rows whose logits are wanted go on after the last attention, moved to the front.
    void keep_wanted() {
        for (int64_t i = 0; i < step.num_logits; i++) {
            const int64_t from = step.logits_rows[i];
            std::memmove(b.x + i * b.x_stride, b.x + from * b.x_stride, b.x_stride * sizeof(float));
            std::memmove(b.attended + i * b.attended_stride, b.attended + from * b.attended_stride,
                         b.attended_stride * sizeof(float));
        }
    }

    void run_layers() {
        banded(step.tokens, [&](const Band& band) { before_attention(d.layers[0], band); });
        for (int64_t i = 0; i + 1 < d.num_layers; i++) {
            attend_all(d.layers[i]);
            banded(step.tokens, [&](const Band& band) {
                after_attention(d.layers[i], band);
                before_attention(d.layers[i + 1], band);
            });
        }
        const Layer& last = d.layers[d.num_layers - 1];
        attend_all(last);
        if (!step.hidden) keep_wanted();
        banded(step.hidden ? step.tokens : step.num_logits, [&](const Band& band) { after_attention(last, band); });
    }

    void cap(float* row) {
        const __m512 cap = _mm512_set1_ps(d.logit_softcap);
        for (int64_t v = 0; v < d.head.rows; v += 16)
            _mm512_storeu_ps(row + v, _mm512_mul_ps(tanh(_mm512_div_ps(_mm512_loadu_ps(row + v), cap)), cap));
    }

    void all() {
        pool.open();
        pool.each(step.tokens, [&](int64_t row) { embed(row); });
        run_layers();
        if (step.hidden)
            pool.each(step.tokens, [&](int64_t row) {
                rms_norm(b.x + row * b.x_stride, d.norm, d.hidden, d.eps, step.hidden + row * d.hidden);
            });
        else
            finish();
        pool.close();
    }

    void finish() {
        pool.each(step.num_logits, [&](int64_t i) { norm_to_activations(i, d.norm); });
        multiply(d.head, b.activations, {0, step.num_logits, false}, step.logits, d.head.rows, Into::STORE);
        if (d.logit_softcap > 0)
            pool.each(step.num_logits, [&](int64_t i) { cap(step.logits + i * d.head.rows); });
    }
};

}  // namespace
}  // namespace farthing

extern "C" {

int64_t kv_block_bytes(const farthing::Decoder* decoder) { return decoder->kv.block_bytes(); }

int64_t scratch_bytes(const farthing::Decoder* decoder, int64_t tokens) {
    return farthing::Buffers(*decoder, tokens, nullptr).bytes;
}

void run_step(const farthing::Decoder* decoder, const farthing::Step* step, int64_t threads) {
    static std::mutex one_at_a_time;
    static std::unique_ptr<farthing::Pool> pool;
    static int64_t size = 0;
    const std::lock_guard<std::mutex> guard(one_at_a_time);
    if (!pool || size != threads) {
        pool = std::make_unique<farthing::Pool>(static_cast<int>(threads));
        size = threads;
    }
    farthing::Run(*decoder, *step, *pool).all();
}
}
