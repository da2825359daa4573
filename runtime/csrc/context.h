// What crosses between runtime/native_context.py and context.cpp. L layers, R leads, E experts of the widest layer,
// D moving averages, X = (lags + 1) * E + 1 rows of a table, the bias last.
#pragma once
#include <cstdint>

struct Context {
  int64_t layers, experts, leads, lags, decays;
  const int64_t* targets;  // [L, R] the layers that a step of layer l forecasts
  const float* table;      // [L, R, X, E] minus the log-odds
  const float* gain;       // [L, R, 2D] minus
  const float* decay;      // [D]
  float* features;         // [L, 2D, E] averages and their logarithms
  double* seen;            // [L]
  float *counts, *usual, *rate, *chance, *expected, *hot;  // [L, E]
  int32_t* chosen;         // [L, E] what each layer chose last; `many` of them count
  int32_t* many;           // [L]
};

// What the layer used now and has used in all.
void count_uses(const Context& context, int64_t layer, const int32_t* ids, const float* shares, int64_t n);

// `expected` of the target from minus the log-odds to the chance, and `chance` from it.
void expect(const Context& context, int64_t target, int64_t rows, float trust);

// The running form of the network of predictors/network.py, for one token or the mean of several. Beside the above:
// D its width, F its forecasts per expert, W windows of use, S = 2W: their frequencies and the logarithms.
struct Visits {
  const Context* context;
  int64_t width, forecasts, windows, total, later;  // later: the forecast that the rate is told by
  const int64_t *offsets, *heads;                   // [L + 1]; [R] the forecast that each lead is told by
  const float* embeddings;              // [2 + W, total, D] of a choice: now, by the token before, in its past
  const uint16_t *in, *out, *head;      // [L, D, D], [L, D, D], [L, D, F, E] bfloat16
  const float* bias;                    // [L, D]
  const float *head_bias, *direct;      // [L, F, E], [L, F, S + 1]
  const float *base, *blank, *decay;    // [L] usual share; [W, D] the bases of all experts, embedded; [W]
  float *state, *work;                  // [D], [2, D]
  float *sums, *coming;                 // [1 + W, D] embeddings of the token before and of its past; of this pass
  float *said, *shown, *decayed, *mass;  // [F, E], [L, S, E] (frequencies less base), [W, L, E], [W]
  int64_t *at, *visited;  // [3] layer that came last (-1: a pass begins), tokens in a row, layers shown; [L] in this pass
};

struct Search {
  const Context* context;
  const float* worth;                 // [total]
  const int64_t* offsets;             // [L + 1] first flat id of each layer
  const uint8_t *resident, *filling;  // [total]
  float found;
};
