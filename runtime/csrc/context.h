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

struct Search {
  const Context* context;
  const float* worth;                 // [total]
  const int64_t* offsets;             // [L + 1] first flat id of each layer
  const uint8_t *resident, *filling;  // [total]
  float found;
};
