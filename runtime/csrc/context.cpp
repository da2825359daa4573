// One step of a running forecast (runtime/running_forecast.py; here the linear one of runtime/context_state.py), and the searches over it that a policy makes at
// every layer. The numpy code there is the plain version: it says what is computed, and the tests compare the two.
// Called with the interpreter's lock held: a call takes a few microseconds.
#include "context.h"

#include <algorithm>
#include <cmath>
#include <cstring>

void count_uses(const Context& c, int64_t layer, const int32_t* ids, const float* shares, int64_t n) {
  const int64_t E = c.experts;
  float *hot = c.hot + layer * E, *counts = c.counts + layer * E, *usual = c.usual + layer * E;
  std::fill(hot, hot + E, 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    c.chosen[layer * E + i] = ids[i];
    hot[ids[i]] = shares ? shares[i] : 1.0f;
  }
  c.many[layer] = static_cast<int32_t>(n);
  c.seen[layer] += 1.0;
  const float share = static_cast<float>(1.0 / c.seen[layer]);
  for (int64_t e = 0; e < E; ++e) {
    counts[e] += hot[e];
    usual[e] = counts[e] * share;
  }
}

void expect(const Context& c, int64_t target, int64_t rows, float trust) {
  const int64_t E = c.experts;
  float *sharp = c.expected + target * E, *chance = c.chance + target * E;
  const float* usual = c.usual + target * E;
  for (int64_t e = 0; e < E; ++e) {
    sharp[e] = 1.0f / (1.0f + std::exp(sharp[e]));
    chance[e] = trust * sharp[e] + (1.0f - trust) * usual[e];
  }
  if (rows > 1)
    for (int64_t e = 0; e < E; ++e) chance[e] = 1.0f - std::pow(1.0f - chance[e], static_cast<float>(rows));
}

namespace {

constexpr float FLOOR = 1e-3f;

// What was chosen at `layer`, its averages and rate.
void learn(const Context& c, int64_t layer, const int32_t* ids, const float* shares, int64_t n, float trust) {
  const int64_t E = c.experts, D = c.decays;
  count_uses(c, layer, ids, shares, n);
  const float* hot = c.hot + layer * E;
  float* averages = c.features + layer * 2 * D * E;
  for (int64_t d = 0; d < D; ++d) {
    const float decay = c.decay[d], fresh = 1.0f - decay;
    float* average = averages + d * E;
    float* logarithm = averages + (D + d) * E;
    for (int64_t e = 0; e < E; ++e) average[e] = average[e] * decay + fresh * hot[e];
    for (int64_t e = 0; e < E; ++e) logarithm[e] = std::log(std::max(average[e], FLOOR));
  }

  const float *medium = averages + 2 * E, *slow = averages + 3 * E, *usual = c.usual + layer * E;
  float* rate = c.rate + layer * E;
  for (int64_t e = 0; e < E; ++e)
    rate[e] = 0.5f * trust * (medium[e] + slow[e]) + (1.0f - trust) * usual[e];
}

// sum[e] += weight * row[e] for everything that was chosen at layer `from`, whose rows begin at `rows`.
void add_rows(const Context& c, int64_t from, const float* rows, float* sum) {
  const int64_t E = c.experts;
  for (int32_t i = 0; i < c.many[from]; ++i) {
    const int32_t expert = c.chosen[from * E + i];
    const float weight = c.hot[from * E + expert];
    const float* row = rows + expert * E;
    for (int64_t e = 0; e < E; ++e) sum[e] += weight * row[e];
  }
}

// The chance that each expert of the layers ahead is chosen at its next visit.
void forecast(const Context& c, int64_t layer, int64_t rows, float trust) {
  const int64_t E = c.experts, D = c.decays, inputs = (c.lags + 1) * E + 1;
  for (int64_t r = 0; r < c.leads; ++r) {
    const int64_t target = c.targets[layer * c.leads + r];
    const float* table = c.table + (layer * c.leads + r) * inputs * E;
    const float* gain = c.gain + (layer * c.leads + r) * 2 * D;
    const float* features = c.features + target * 2 * D * E;
    float* z = c.expected + target * E;  // minus the log-odds, then the chance
    const float* bias = table + (inputs - 1) * E;
    std::copy(bias, bias + E, z);
    for (int64_t f = 0; f < 2 * D; ++f)
      for (int64_t e = 0; e < E; ++e) z[e] += gain[f] * features[f * E + e];
    for (int64_t lag = 0; lag < c.lags; ++lag)
      add_rows(c, ((layer - lag) % c.layers + c.layers) % c.layers, table + lag * E * E, z);
    add_rows(c, target, table + c.lags * E * E, z);
    expect(c, target, rows, trust);
  }
}

}  // namespace

extern "C" void daop_context_absorb(const Context* context, int64_t layer, const int32_t* ids, const float* shares,
                                    int64_t n, int64_t rows, float trust) {
  learn(*context, layer, ids, shares, n, trust);
  forecast(*context, layer, rows, trust);
}

// Mean log loss per expert of a guess [E], of which the `n` experts `ids` were chosen.
extern "C" double daop_context_loss(const Context* context, const float* guess, const int32_t* ids, int64_t n) {
  double loss = 0.0;
  for (int64_t e = 0; e < context->experts; ++e) {
    const float absent = 1.0f - std::min(std::max(guess[e], FLOOR), 1.0f - FLOOR);
    loss -= std::log(absent);
  }
  for (int64_t i = 0; i < n; ++i) {
    const float chance = std::min(std::max(guess[ids[i]], FLOOR), 1.0f - FLOOR);
    loss += std::log(1.0f - chance) - std::log(chance);
  }
  return loss / static_cast<double>(context->experts);
}

// worth [L, E] = chance * nearness + stay * rate: of the targets of `layer`, or (all) of every layer.
extern "C" void daop_context_worth(const Context* context, int64_t layer, const float* nearness, float stay, int all,
                                   float* worth) {
  const Context& c = *context;
  const int64_t E = c.experts, count = all ? c.layers : c.leads;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t target = all ? i : c.targets[layer * c.leads + i];
    const float near = nearness[i];
    const float *chance = c.chance + target * E, *rate = c.rate + target * E;
    float* out = worth + target * E;
    for (int64_t e = 0; e < E; ++e) out[e] = chance[e] * near + stay * rate[e];
  }
}

// The most worthy expert that is neither resident nor filling nor among `taken`, or -1; its worth is left in `found`.
// `numbers` are the `lates` layers whose next visit a copy begun now would miss, so that theirs count without the
// chance of that visit, and after them the `takens` experts.
extern "C" int64_t daop_context_best(Search* search, const int64_t* numbers, int64_t lates, int64_t takens) {
  const Search& s = *search;
  const Context& c = *s.context;
  const int64_t *late = numbers, *taken = numbers + lates;
  int64_t best = -1;
  float most = 0.0f;
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    const bool discounted = std::find(late, late + lates, layer) != late + lates;
    const float* chance = c.chance + layer * c.experts;
    for (int64_t i = s.offsets[layer]; i < s.offsets[layer + 1]; ++i) {
      const float value = discounted ? s.worth[i] - chance[i - s.offsets[layer]] : s.worth[i];
      if (value <= most || s.resident[i] || s.filling[i]) continue;
      if (std::find(taken, taken + takens, i) != taken + takens) continue;
      most = value, best = i;
    }
  }
  search->found = most;
  return best;
}

namespace {

// The `count` allowed indices of least value, ascending, ties by index; returns how many there are.
template <typename T>
int64_t lowest(const T* values, const uint8_t* allowed, int64_t n, int64_t count, int64_t* out) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!allowed[i] || (found == count && !(values[i] < values[out[found - 1]]))) continue;
    int64_t at = found < count ? found++ : found - 1;
    for (; at > 0 && values[i] < values[out[at - 1]]; --at) out[at] = out[at - 1];
    out[at] = i;
  }
  return found;
}

}  // namespace

extern "C" int64_t daop_lowest_float(const float* values, const uint8_t* allowed, int64_t n, int64_t count,
                                     int64_t* out) {
  return lowest(values, allowed, n, count, out);
}

extern "C" int64_t daop_lowest_int(const int64_t* values, const uint8_t* allowed, int64_t n, int64_t count,
                                   int64_t* out) {
  return lowest(values, allowed, n, count, out);
}
