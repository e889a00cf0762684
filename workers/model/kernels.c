/* What stands between the multiplies of a decode step, where PyTorch would pad, or go over memory again and again:
   the attention of one new token a row over its own keys and values, norms, gates, and the best of a row of logits.

   Letters: n rows, H key-value heads, G query heads each, D and E numbers a key and a value, K numbers of a hidden state,
   V words. Sums are made in eight lanes whatever the processor, and each row by itself: the bits
   depend neither on the neighbours nor on the number of threads. */

#include <math.h>
#include <stdint.h>
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

/* The greater of each lane, or b where one is no number. */
static inline vec greater(vec a, vec b) {
    lanes is_more = a > b;
    return (vec)((is_more & (lanes)a) | (~is_more & (lanes)b));
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

/* Keys and values of one head in a page: keys [D, PAGE], then values [PAGE, E]. So sixteen scores are summed side by side. */
#define PAGE 16
typedef float wide __attribute__((vector_size(64), aligned(4)));
typedef int32_t wide_lanes __attribute__((vector_size(64)));
static const wide_lanes places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static void store_token(const float *key, const float *value, int64_t D, int64_t E, int64_t place, float *page) {
    for (int64_t d = 0; d < D; d++) page[d * PAGE + place] = key[d];
    memcpy(page + D * PAGE + place * E, value, sizeof(float) * E);
}

/* What a row's tokens up to now come to, for one query. */
typedef struct {
    float best, total; /* The greatest score, and the sum of the weights exp(score - best). */
    union { wide v; float f[PAGE]; } weights; /* Of the page at hand. */
} state;

/* The same of sixteen numbers side by side. */
static inline wide exp_below_wide(wide x) {
    wide_lanes is_low = x < -87.0f;
    x = (wide)((is_low & (wide_lanes)((wide){0} - 87.0f)) | (~is_low & (wide_lanes)x));
    wide shifted = x * 1.44269504f + 12582912.0f;
    wide n = shifted - 12582912.0f;
    wide r = x - n * 0.693359375f + n * 2.12194440e-4f;
    wide p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (wide)(((wide_lanes)shifted - 0x4b400000 + 127) << 23);
}

/* Turns the scores of a page's tokens [low, high) into weights, and scales what was summed before to the new best. */
static inline void weigh(state *now, wide scores, int64_t low, int64_t high, float softcap, int64_t E, float *out) {
    union { wide v; vec h[2]; float f[PAGE]; } x = {scores};
    if (softcap > 0)
        for (int i = 0; i < PAGE; i++) x.f[i] = tanhf(x.f[i] / softcap) * softcap;
    if (low > 0 || high < PAGE) {
        wide_lanes is_seen = (places >= (int32_t)low) & (places < (int32_t)high);
        x.v = (wide)((is_seen & (wide_lanes)x.v) | (~is_seen & (wide_lanes)((wide){0} - INFINITY)));
    }
    union { vec v; float f[LANES]; } most = {greater(x.h[0], x.h[1])};
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) most.f[i] = most.f[i] > most.f[i + half] ? most.f[i] : most.f[i + half];
    float best = most.f[0] > now->best ? most.f[0] : now->best;
    if (best > now->best) {
        float scale = exp_below(now->best - best);
        now->total *= scale;
        for (int64_t e = 0; e < E; e++) out[e] *= scale;
        now->best = best;
    }
    x.v = exp_below_wide(x.v - best);
    if (low > 0 || high < PAGE)
        x.v = (wide)((places >= (int32_t)low) & (places < (int32_t)high) & (wide_lanes)x.v);
    now->total += sum(x.h[0] + x.h[1]);
    now->weights.v = x.v;
}

/* Adds to out[G, E] the values of a page's tokens [low, high), 32 numbers at a time. Returns how many it did. Asks for
   next[PAGE, E] meanwhile, if there is one. */
static inline __attribute__((always_inline)) int64_t mix(const int G, const state *now, const float *values, int64_t low,
                                                         int64_t high, int64_t E, const float *next, float *out) {
    int64_t e = 0;
    for (; e + 2 * PAGE <= E; e += 2 * PAGE) {
        wide left[4], right[4];
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            left[g] = *(wide *)(out + g * E + e);
            right[g] = *(wide *)(out + g * E + e + PAGE);
        }
        for (int64_t t = low; t < high; t++) {
            wide v = *(const wide *)(values + t * E + e), w = *(const wide *)(values + t * E + e + PAGE);
            if (next) {
                __builtin_prefetch(next + t * E + e, 0, 2);
                __builtin_prefetch(next + t * E + e + PAGE, 0, 2);
            }
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) {
                left[g] += now[g].weights.f[t] * v;
                right[g] += now[g].weights.f[t] * w;
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            *(wide *)(out + g * E + e) = left[g];
            *(wide *)(out + g * E + e + PAGE) = right[g];
        }
    }
    return e;
}

/* How the queries of a layer attend. window and softcap: 0 for none. */
typedef struct {
    int64_t H, G, D, E;
    float scaling, softcap;
    int64_t window;
} layer;

static inline int64_t first_seen(const layer *of, int64_t stop) {
    return of->window > 0 && stop > of->window ? stop - of->window : 0;
}

static inline void begin(const int G, int64_t E, state *now, float *out) {
    for (int g = 0; g < G; g++) now[g].best = -INFINITY, now[g].total = 0;
    memset(out, 0, sizeof(float) * G * E);
}

/* Adds page number p to what G query heads of one key-value head have seen, for a query that sees tokens [first, stop).
   out [G, E]. next: the page to be asked of memory line by line while this one is read, or none. */
static inline __attribute__((always_inline)) void attend_page(const int G, const layer *of, const float *query,
                                                              int64_t query_head, const float *page, int64_t p,
                                                              int64_t first, int64_t stop, const float *next, state *now,
                                                              float *out) {
    int64_t D = of->D, E = of->E, d = 0;
    wide even[4] = {0}, odd[4] = {0};
    for (; d + 2 <= D; d += 2) {
        wide k = *(const wide *)(page + d * PAGE), l = *(const wide *)(page + d * PAGE + PAGE);
        if (next) {
            __builtin_prefetch(next + d * PAGE, 0, 2);
            __builtin_prefetch(next + d * PAGE + PAGE, 0, 2);
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            even[g] += query[g * query_head + d] * k;
            odd[g] += query[g * query_head + d + 1] * l;
        }
    }
    for (; d < D; d++)
        for (int g = 0; g < G; g++) even[g] += query[g * query_head + d] * *(const wide *)(page + d * PAGE);
    int64_t low = first > p * PAGE ? first - p * PAGE : 0;
    int64_t high = stop < (p + 1) * PAGE ? stop - p * PAGE : PAGE;
    for (int g = 0; g < G; g++) weigh(&now[g], (even[g] + odd[g]) * of->scaling, low, high, of->softcap, E, out + g * E);
    const float *values = page + D * PAGE;
    int64_t e = mix(G, now, values, low, high, E, next ? next + D * PAGE : next, out);
    for (int g = 0; g < G; g++)
        for (int64_t t = low; t < high; t++)
            for (int64_t i = e; i < E; i++) out[g * E + i] += now[g].weights.f[t] * values[t * E + i];
}

static inline void finish(const int G, int64_t E, const state *now, float *out) {
    for (int g = 0; g < G; g++)
        for (int64_t e = 0; e < E; e++) out[g * E + e] /= now[g].total;
}

/* One query over its row's tokens [0, stop). after: the page that will be read when it is done. */
static inline __attribute__((always_inline)) void attend_row(const int G, const layer *of, const float *query,
                                                             int64_t query_head, const float *pages,
                                                             const int32_t *table, int64_t stride, int64_t stop,
                                                             const float *after, float *out) {
    state now[4];
    int64_t first = first_seen(of, stop), last = (stop - 1) / PAGE;
    begin(G, of->E, now, out);
    for (int64_t p = first / PAGE; p <= last; p++)
        attend_page(G, of, query, query_head, pages + table[p] * stride, p, first, stop,
                    p < last ? pages + table[p + 1] * stride : after, now, out);
    finish(G, of->E, now, out);
}

#define TILE 16

/* Queries [start, end), at most a tile, of one row, each over what is before it: a page serves all while it is at hand. */
static inline __attribute__((always_inline)) void attend_tile(const int G, const layer *of, const float *query,
                                                              int64_t query_head, int64_t query_row, const float *pages,
                                                              const int32_t *table, int64_t stride, int64_t start,
                                                              int64_t end, float *out, int64_t out_row) {
    state now[TILE][4];
    for (int64_t s = start; s < end; s++) begin(G, of->E, now[s - start], out + (s - start) * out_row);
    for (int64_t p = first_seen(of, start + 1) / PAGE; p <= (end - 1) / PAGE; p++)
        for (int64_t s = p * PAGE > start ? p * PAGE : start; s < end; s++) {
            int64_t first = first_seen(of, s + 1), q = s - start;
            if (first < (p + 1) * PAGE)
                attend_page(G, of, query + q * query_row, query_head, pages + table[p] * stride, p, first, s + 1, NULL,
                            now[q], out + q * out_row);
        }
    for (int64_t s = start; s < end; s++) finish(G, of->E, now[s - start], out + (s - start) * out_row);
}

/* Calls a function for all of G query heads, four or fewer at a time. */
#define FOR_HEADS(G, CALL) \
    for (int64_t g = 0; g < (G);) { \
        if ((G) - g >= 4) { CALL(4); g += 4; } \
        else if ((G) - g == 3) { CALL(3); g += 3; } \
        else if ((G) - g == 2) { CALL(2); g += 2; } \
        else { CALL(1); g += 1; } \
    }

/* Stores key and value of one token a row at written[i], and attends it to what its row has stored. Row rows[i] has the
   pages table[rows[i], width]. out [n, H * G, E] with rows out_row apart. */
void decode(const layer *of, int64_t n, tensor query, tensor key, tensor value, float *pages, const int32_t *table,
            int64_t width, const int64_t *rows, const int64_t *written, float *out, int64_t out_row, int threads) {
    int64_t size = PAGE * (of->D + of->E), stride = of->H * size;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t place = 0; place < n * of->H; place++) { /* Head by head: rows that share pages read them one after another. */
        int64_t head = place / n, row = place % n;
        const int32_t *own = table + rows[row] * width;
        float *mine = pages + head * size;
        store_token(key.start + head * key.head + row * key.row, value.start + head * value.head + row * value.row,
                    of->D, of->E, written[row] % PAGE, mine + own[written[row] / PAGE] * stride);
        const float *after = mine + (row + 1 < n ? table[rows[row + 1] * width] : own[0]) * stride;
        const float *q = query.start + head * of->G * query.head + row * query.row;
        float *o = out + row * out_row + head * of->G * of->E;
#define ATTEND(N) attend_row(N, of, q + g * query.head, query.head, mine, own, stride, written[row] + 1, \
                             of->G - g <= 4 ? after : mine + own[0] * stride, o + g * of->E)
        FOR_HEADS(of->G, ATTEND)
#undef ATTEND
    }
}

/* Stores S tokens of a row from start on, and attends each to itself and to what is before it. The row has the pages
   that own names. out [S, H * G, E] with tokens out_row apart. */
void prompt(const layer *of, int64_t S, tensor query, tensor key, tensor value, float *pages, const int32_t *own,
            int64_t start, float *out, int64_t out_row, int threads) {
    int64_t size = PAGE * (of->D + of->E), stride = of->H * size, tiles = (S + TILE - 1) / TILE;
    for (int64_t s = 0; s < S; s++)
        for (int64_t head = 0; head < of->H; head++)
            store_token(key.start + head * key.head + s * key.row, value.start + head * value.head + s * value.row,
                        of->D, of->E, (start + s) % PAGE, pages + own[(start + s) / PAGE] * stride + head * size);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t place = 0; place < tiles * of->H; place++) {
        int64_t head = place / tiles, s = place % tiles * TILE, end = s + TILE < S ? s + TILE : S;
        const float *q = query.start + head * of->G * query.head + s * query.row, *mine = pages + head * size;
        float *o = out + s * out_row + head * of->G * of->E;
#define ATTEND(N) attend_tile(N, of, q + g * query.head, query.head, query.row, mine, own, stride, start + s, start + end, \
                              o + g * of->E, out_row)
        FOR_HEADS(of->G, ATTEND)
#undef ATTEND
    }
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

/* x = x * cos + (-second half of x, first half of x) * sin for n rows of each head, with cos and sin [n, D]. D is even.
   Su et al. 2021. */
void rotate(int64_t n, int64_t heads, int64_t D, float *x, int64_t x_head, int64_t x_row, const float *cos,
            const float *sin) {
    int64_t half = D / 2;
    for (int64_t row = 0; row < n; row++, cos += D, sin += D)
        for (int64_t head = 0; head < heads; head++) {
            float *low = x + head * x_head + row * x_row, *high = low + half;
            for (int64_t d = 0; d < half; d++) {
                float first = low[d], second = high[d];
                low[d] = first * cos[d] - second * sin[d];
                high[d] = second * cos[half + d] + first * sin[half + d];
            }
        }
}

/* out[n, K] = silu(x[n, :K]) * x[n, K:], with silu(x) = x / (1 + exp(-x)). */
void gate(int64_t n, int64_t K, const float *x, float *out) {
    for (int64_t row = 0; row < n; row++, x += 2 * K, out += K)
        for (int64_t k = 0; k < K; k++) {
            float small = exp_below(-fabsf(x[k]));
            out[k] = x[k] * (x[k] < 0 ? small : 1.0f) / (1.0f + small) * x[K + k];
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
