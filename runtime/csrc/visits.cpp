// One step of the running network of runtime/visit_state.py. The numpy code there is the plain version: it says what
// is computed, and the tests compare the two.
#include "context.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

void add(float* out, const float* row, float weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] += weight * row[i];
}

// Root-mean-square norm of `x` into `out`; with `positive` what is below zero becomes zero.
void normalise(const float* x, float* out, int64_t n, bool positive) {
  float squares = 0.0f;
  for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(n) + 1e-6f);
  for (int64_t i = 0; i < n; ++i) out[i] = positive ? std::max(x[i] * scale, 0.0f) : x[i] * scale;
}

inline __attribute__((always_inline)) float widen(uint16_t bits) {
  const uint32_t all = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &all, sizeof value);
  return value;
}

// out[j] += x[i] * rows[i, j], rows in bfloat16: reading them is what takes the time. Rows for zeros, about half of
// them behind a rectifier, are not read. Four rows at a time, so that `out` is read and written a quarter as often.
inline __attribute__((always_inline)) void multiply_by_fours(const float* x, const uint16_t* rows, int64_t n,
                                                             int64_t columns, float* __restrict out) {
  const uint16_t* row[4];
  float by[4];
  int held = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] == 0.0f) continue;
    row[held] = rows + i * columns, by[held] = x[i];
    if (++held < 4) continue;
    const uint16_t *a = row[0], *b = row[1], *c = row[2], *d = row[3];
    for (int64_t j = 0; j < columns; ++j)
      out[j] += (by[0] * widen(a[j]) + by[1] * widen(b[j])) + (by[2] * widen(c[j]) + by[3] * widen(d[j]));
    held = 0;
  }
  for (int k = 0; k < held; ++k)
    for (int64_t j = 0; j < columns; ++j) out[j] += by[k] * widen(row[k][j]);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void multiply_wide(const float* x, const uint16_t* rows, int64_t n,
                                                       int64_t columns, float* out) {
  multiply_by_fours(x, rows, n, columns, out);
}

void multiply(const float* x, const uint16_t* rows, int64_t n, int64_t columns, float* out) {
  static const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  wide ? multiply_wide(x, rows, n, columns, out) : multiply_by_fours(x, rows, n, columns, out);
}
#else
void multiply(const float* x, const uint16_t* rows, int64_t n, int64_t columns, float* out) {
  multiply_by_fours(x, rows, n, columns, out);
}
#endif

// The pass that ended becomes the past.
void end_pass(const Visits& v) {
  const Context& c = *v.context;
  const int64_t E = c.experts, D = v.width;
  for (int64_t l = 0; l < c.layers; ++l)
    if (!v.visited[l]) {
      std::fill(c.hot + l * E, c.hot + (l + 1) * E, 0.0f);
      c.many[l] = 0;
    }
  for (int64_t w = 0; w < v.windows; ++w) {
    const float kept = std::pow(v.decay[w], static_cast<float>(v.at[1])), fresh = (1.0f - kept) / (1.0f - v.decay[w]);
    float* decayed = v.decayed + w * c.layers * E;
    for (int64_t i = 0; i < c.layers * E; ++i) decayed[i] = decayed[i] * kept + fresh * c.hot[i];
    v.mass[w] = v.mass[w] * kept + fresh;
    float *sum = v.sums + (1 + w) * D, *coming = v.coming + (1 + w) * D;
    for (int64_t i = 0; i < D; ++i) sum[i] = sum[i] * kept + fresh * coming[i];
  }
  std::copy(v.coming, v.coming + D, v.sums);
  std::fill(v.coming, v.coming + (1 + v.windows) * D, 0.0f);
  std::fill(v.visited, v.visited + c.layers, int64_t{0});
}

// The state before the first layer.
void begin_pass(const Visits& v) {
  const int64_t D = v.width;
  std::copy(v.sums, v.sums + D, v.state);
  for (int64_t w = 0; w < v.windows; ++w) {
    const float mass = v.mass[w], share = 1.0f / (mass + 1.0f);
    const float *sum = v.sums + (1 + w) * D, *blank = v.blank + w * D;
    for (int64_t i = 0; i < D; ++i) v.state[i] += (sum[i] - mass * blank[i]) * share;
  }
  v.at[0] = -1;
  v.at[2] = 0;
}

// What the past says of the experts of all layers before `end`, once a pass.
void show(const Visits& v, int64_t end) {
  const Context& c = *v.context;
  const int64_t E = c.experts, W = v.windows;
  for (int64_t l = v.at[2]; l < end; ++l)
    for (int64_t w = 0; w < W; ++w) {
      const float mass = v.mass[w], share = 1.0f / (mass + 1.0f), base = v.base[l];
      const float* decayed = v.decayed + (w * c.layers + l) * E;
      float *shown = v.shown + (l * 2 * W + w) * E, *logarithms = shown + W * E;
      for (int64_t e = 0; e < E; ++e) {
        const float frequency = (decayed[e] + base) * share;
        shown[e] = frequency - base;
        logarithms[e] = std::log(std::max(frequency, 1e-3f));
      }
    }
  v.at[2] = std::max(v.at[2], end);
}

// The choices of `layer` join the state and this pass's sums.
void take_in(const Visits& v, int64_t layer) {
  const Context& c = *v.context;
  const int64_t D = v.width;
  for (int32_t i = 0; i < c.many[layer]; ++i) {
    const int32_t expert = c.chosen[layer * c.experts + i];
    const float weight = c.hot[layer * c.experts + expert];
    const float* row = v.embeddings + (v.offsets[layer] + expert) * D;
    add(v.state, row, weight, D);
    for (int64_t w = 0; w < 1 + v.windows; ++w) add(v.coming + w * D, row + (1 + w) * v.total * D, weight, D);
  }
  v.visited[layer] = 1;
}

void refine(const Visits& v, int64_t layer) {
  const int64_t D = v.width;
  float *normal = v.work, *inner = v.work + D;
  normalise(v.state, normal, D, false);
  std::copy(v.bias + layer * D, v.bias + (layer + 1) * D, inner);
  multiply(normal, v.in + layer * D * D, D, D, inner);
  for (int64_t i = 0; i < D; ++i) inner[i] = std::max(inner[i], 0.0f);
  multiply(inner, v.out + layer * D * D, D, D, v.state);
}

// minus the log-odds that forecast `f` of `layer` gives the experts of `target`.
void odds(const Visits& v, int64_t layer, int64_t f, int64_t target, float* out) {
  const Context& c = *v.context;
  const int64_t E = c.experts;
  const int64_t S = 2 * v.windows;
  const float *said = v.said + f * E, *direct = v.direct + (layer * v.forecasts + f) * (S + 1);
  for (int64_t e = 0; e < E; ++e) out[e] = -said[e];
  for (int64_t i = 0; i < S; ++i) add(out, v.shown + (target * S + i) * E, -direct[i], E);
  add(out, c.hot + target * E, -direct[S], E);
  std::fill(out + v.offsets[target + 1] - v.offsets[target], out + E, 30.0f);  // a narrow layer does not have them
}

}  // namespace

extern "C" void daop_context_visit(const Visits* visits, int64_t layer, const int32_t* ids, const float* shares,
                                   int64_t n, int64_t rows, int64_t tokens, float trust) {
  const Visits& v = *visits;
  const Context& c = *v.context;
  const int64_t E = c.experts, columns = v.forecasts * E;
  if (layer <= v.at[0]) end_pass(v);
  if (layer <= v.at[0] || v.at[0] < 0) begin_pass(v);
  count_uses(c, layer, ids, shares, n);
  v.at[1] = tokens;
  for (int64_t m = v.at[0] + 1; m < layer; ++m) refine(v, m);  // of these nothing is known
  take_in(v, layer);
  refine(v, layer);
  v.at[0] = layer;

  normalise(v.state, v.work, v.width, true);
  std::copy(v.head_bias + layer * columns, v.head_bias + (layer + 1) * columns, v.said);
  multiply(v.work, v.head + layer * v.width * columns, v.width, columns, v.said);
  int64_t last = layer;
  for (int64_t r = 0; r < c.leads; ++r) last = std::max(last, c.targets[layer * c.leads + r]);
  show(v, last + 1);
  for (int64_t r = 0; r < c.leads; ++r) {
    const int64_t target = c.targets[layer * c.leads + r];
    odds(v, layer, v.heads[r], target, c.expected + target * E);
    expect(c, target, rows, trust);
  }
  float* rate = c.rate + layer * E;
  const float* usual = c.usual + layer * E;
  odds(v, layer, v.later, layer, rate);
  for (int64_t e = 0; e < E; ++e) rate[e] = trust / (1.0f + std::exp(rate[e])) + (1.0f - trust) * usual[e];
}
