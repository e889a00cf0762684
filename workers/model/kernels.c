/* What stands between the multiplies of a decode step, where PyTorch would pad, or go over memory again and again:
   the attention of one new token a row over its own keys and values, norms, and the best of a row of logits.

   Letters: n rows, H key-value heads, G query heads each, D and E numbers a key and a value, C tokens of room, K numbers
   of a hidden state, V words. Sums are made in eight lanes whatever the processor, and each row by itself: the bits
   depend neither on the neighbours nor on the number of threads. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8
typedef float vec __attribute__((vector_size(32), aligned(4)));
typedef int32_t lanes __attribute__((vector_size(32)));
typedef float half_vec __attribute__((vector_size(16)));

typedef struct {
    const float *start;
    int64_t head, row; /* Strides in numbers: to the next head, and to the next row. */
} tensor;

static inline vec load(const float *from) { return *(const vec *)from; }

static inline float sum(vec v) {
    union { vec v; half_vec h[2]; } u = {v};
    half_vec s = u.h[0] + u.h[1];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

/* exp(x) for x <= 0, within 2 units in the last place: 2^n times the series of the rest (Cephes, expf). */
static inline float exp_below(float x) {
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23 leaves the nearest integer in the low bits. */
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    float n = shifted - 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    bits = (int32_t)(((uint32_t)bits - 0x4b400000u + 127u) << 23);
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

/* Asks memory for num numbers that will be read soon. */
static inline void fetch(const float *from, int64_t num) {
    for (int64_t i = 0; i < num; i += 16) __builtin_prefetch(from + i, 0, 2);
}

/* Scores of one query with tokens [first, stop), four at a time. Returns the greatest. Fetches soon[stop - first, S]. */
static float score(const float *q, const float *keys, int64_t D, int64_t first, int64_t stop, const float *soon,
                   int64_t S, float *scores) {
    float best = -__builtin_inff();
    for (int64_t t = first; t < stop; t += 4) {
        if (soon != NULL) fetch(soon + (t - first) * S, 4 * S);
        const float *k[4];
        vec acc[4];
        float rest[4];
        for (int i = 0; i < 4; i++) {
            k[i] = keys + (t + i < stop ? t + i : stop - 1) * D;
            acc[i] = (vec){0};
            rest[i] = 0;
        }
        int64_t d = 0;
        for (; d + LANES <= D; d += LANES) {
            vec part = load(q + d);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) acc[i] += part * load(k[i] + d);
        }
        for (; d < D; d++)
            for (int i = 0; i < 4; i++) rest[i] += q[d] * k[i][d];
        for (int i = 0; i < 4 && t + i < stop; i++) {
            float s = sum(acc[i]) + rest[i];
            scores[t - first + i] = s;
            best = s > best ? s : best;
        }
    }
    return best;
}

/* Turns num scores into weights, and returns their sum. The buffer is padded to whole vectors. */
static float weigh(float *scores, int64_t num, float best) {
    int64_t padded = (num + LANES - 1) / LANES * LANES;
    vec total = {0};
    for (int64_t t = num; t < padded; t++) scores[t] = -__builtin_inff();
    for (int64_t t = 0; t < padded; t++) scores[t] = exp_below(scores[t] - best);
    for (int64_t t = num; t < padded; t++) scores[t] = 0;
    for (int64_t t = 0; t < padded; t += LANES) total += load(scores + t);
    return sum(total);
}

/* out[E] = weights[num] times values[num, E], divided by total. width vectors of the output at a time. Fetches
   soon[num, S]. */
static inline __attribute__((always_inline)) int64_t mix(int width, const float *weights, const float *values,
                                                         int64_t num, int64_t E, int64_t e, float total,
                                                         const float *soon, int64_t S, float *out) {
    for (; e + width * LANES <= E; e += width * LANES) {
        vec acc[8];
#pragma GCC unroll 8
        for (int i = 0; i < width; i++) acc[i] = (vec){0};
        for (int64_t t = 0; t < num; t++) {
            float w = weights[t];
            if (soon != NULL) fetch(soon + t * S, S);
#pragma GCC unroll 8
            for (int i = 0; i < width; i++) acc[i] += w * load(values + t * E + e + i * LANES);
        }
#pragma GCC unroll 8
        for (int i = 0; i < width; i++) *(vec *)(out + e + i * LANES) = acc[i] / total;
    }
    return e;
}

/* One query over tokens [first, stop) of its row. is_cold: these values are still to come from memory. next: keys that
   will be read after these, or NULL. */
static void attend(const float *q, const float *keys, const float *values, int64_t D, int64_t E, int64_t first,
                   int64_t stop, float scaling, float softcap, int is_cold, const float *next, float *scratch,
                   float *out) {
    float *scaled = scratch, *scores = scratch + (D + LANES);
    int64_t num = stop - first;
    for (int64_t d = 0; d < D; d++) scaled[d] = q[d] * scaling;
    float best = score(scaled, keys, D, first, stop, is_cold ? values + first * E : NULL, E, scores);
    if (softcap > 0) {
        best = -__builtin_inff();
        for (int64_t t = 0; t < num; t++) {
            scores[t] = __builtin_tanhf(scores[t] / softcap) * softcap;
            best = scores[t] > best ? scores[t] : best;
        }
    }
    float total = weigh(scores, num, best);
    values += first * E;
    int64_t e = mix(8, scores, values, num, E, 0, total, next, D, out);
    e = mix(1, scores, values, num, E, e, total, NULL, 0, out);
    for (; e < E; e++) {
        float acc = 0;
        for (int64_t t = 0; t < num; t++) acc += scores[t] * values[t * E + e];
        out[e] = acc / total;
    }
}

/* Stores key and value of one token a row at written[row], and attends it. keys [n, H, C, D], values [n, H, C, E],
   out [n, H * G, E] with rows out_row apart. window and softcap: 0 for none. Returns 0, or 1 for want of memory. */
int decode(int64_t n, int64_t H, int64_t G, int64_t D, int64_t E, int64_t C, tensor query, tensor key, tensor value,
           float *keys, float *values, const int64_t *written, float scaling, int64_t window, float softcap,
           float *out, int64_t out_row, int64_t longest, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *scratch = malloc(sizeof(float) * (size_t)(D + longest + 4 * LANES));
        if (scratch == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t place = 0; place < n * H; place++) {
            int64_t row = place / H, head = place % H, stop = written[row] + 1;
            int64_t first = window > 0 && stop > window ? stop - window : 0;
            float *row_keys = keys + place * C * D, *row_values = values + place * C * E;
            memcpy(row_keys + written[row] * D, key.start + head * key.head + row * key.row, sizeof(float) * D);
            memcpy(row_values + written[row] * E, value.start + head * value.head + row * value.row, sizeof(float) * E);
            for (int64_t g = 0; g < G && scratch != NULL; g++) {
                int64_t q = head * G + g;
                int is_last = g == G - 1 && place + 1 < n * H;
                attend(query.start + q * query.head + row * query.row, row_keys, row_values, D, E, first, stop, scaling,
                       softcap, g == 0, is_last ? row_keys + (C + first) * D : NULL, scratch, out + row * out_row + q * E);
            }
        }
        free(scratch);
    }
    return failed;
}

/* out[n, K] = x / sqrt(mean(x^2) + epsilon) * gain. Zhang and Sennrich 2019. */
void rms_norm(int64_t n, int64_t K, const float *x, const float *gain, float epsilon, float *out) {
    for (int64_t row = 0; row < n; row++, x += K, out += K) {
        vec squares = {0};
        float rest = 0;
        int64_t k = 0;
        for (; k + LANES <= K; k += LANES) squares += load(x + k) * load(x + k);
        for (; k < K; k++) rest += x[k] * x[k];
        float scale = 1.0f / sqrtf((sum(squares) + rest) / (float)K + epsilon);
        for (k = 0; k < K; k++) out[k] = x[k] * scale * gain[k];
    }
}

#define BLOCK 512

/* The greatest of some logits, or NaN if one of them is no number. */
static float greatest(const float *z, int64_t num) {
    union { vec v; lanes i; float f[LANES]; } best, odd = {.f = {0}};
    for (int i = 0; i < LANES; i++) best.f[i] = -INFINITY;
    int64_t v = 0;
    for (; v + LANES <= num; v += LANES) {
        vec x = load(z + v);
        lanes is_more = x > best.v;
        best.i = (is_more & (lanes)x) | (~is_more & best.i);
        odd.i |= x != x;
    }
    float top = best.f[0];
    int is_odd = 0;
    for (int i = 0; i < LANES; i++) {
        top = best.f[i] > top ? best.f[i] : top;
        is_odd |= odd.i[i] != 0;
    }
    for (; v < num; v++) {
        top = z[v] > top ? z[v] : top;
        is_odd |= z[v] != z[v];
    }
    return is_odd ? NAN : top;
}

/* The greatest logit of each row of z[n, V], NaN if one is no number, and the lowest id that has it. */
void find_best(int64_t n, int64_t V, const float *z, float *best, int64_t *ids, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < n; row++) {
        const float *line = z + row * V;
        int64_t where = 0;
        float top = -INFINITY;
        for (int64_t v = 0; v < V; v += BLOCK) {
            float here = greatest(line + v, V - v < BLOCK ? V - v : BLOCK);
            if (here != here) top = NAN;
            if (here > top) top = here, where = v;
        }
        while (top == top && line[where] != top) where++;
        best[row] = top;
        ids[row] = where;
    }
}

/* log(sum(exp(z - best))) of each row, in nats: what a logit less the best has to lose to be a log-probability. */
void log_mass(int64_t n, int64_t V, const float *z, const float *best, float *mass, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < n; row++) {
        const float *line = z + row * V;
        float peak = best[row];
        double total = 0;
        for (int64_t v = 0; v < V; v += BLOCK) {
            int64_t num = V - v < BLOCK ? V - v : BLOCK;
            float weights[BLOCK];
            vec part = {0};
            for (int64_t i = 0; i < num; i++) weights[i] = exp_below(line[v + i] - peak);
            int64_t i = 0;
            for (; i + LANES <= num; i += LANES) part += load(weights + i);
            total += sum(part);
            for (; i < num; i++) total += weights[i];
        }
        mass[row] = (float)log(total);
    }
}

/* The k greatest logits of each row and their ids, greatest first, of equal ones the lowest id first. k <= V. */
void find_top(int64_t n, int64_t V, int64_t k, const float *z, float *values, int64_t *ids, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < n; row++) {
        const float *line = z + row * V;
        float *top = values + row * k;
        int64_t *where = ids + row * k, held = 0;
        for (int64_t v = 0; v < V; v += LANES) {
            int64_t num = V - v < LANES ? V - v : LANES;
            if (held == k) {
                int any = 0;
                float least = top[k - 1];
                for (int64_t i = 0; i < num; i++) any |= line[v + i] > least;
                if (!any) continue;
            }
            for (int64_t i = 0; i < num; i++) {
                float x = line[v + i];
                if (held == k && !(x > top[k - 1])) continue;
                int64_t place = held < k ? held++ : k - 1;
                for (; place > 0 && x > top[place - 1]; place--)
                    top[place] = top[place - 1], where[place] = where[place - 1];
                top[place] = x, where[place] = v + i;
            }
        }
    }
}
