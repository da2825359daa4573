// Runs every kernel on buffers of exactly the right size, for the sanitizers to watch, and compares with plain
// loops. Built and run by test_native.py.
#include "experts.cpp"

#include <cstdio>
#include <cstdlib>
#include <vector>

static uint32_t state = 1;
static float noise() { return static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) / (1 << 23) - 1.0f; }

static void put(std::vector<char>& slot, int64_t at, int32_t dtype, float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint16_t top = static_cast<uint16_t>(bits >> 16);
  // f16 of the same sign, and a magnitude below 1 that needs no rounding to be valid
  const uint16_t small = static_cast<uint16_t>((top & 0x8000) | (0x3000 + (bits >> 13 & 0x3ff)));
  if (dtype == F32) memcpy(&slot[at], &value, 4);
  if (dtype == F16) memcpy(&slot[at], &small, 2);
  if (dtype == BF16) memcpy(&slot[at], &top, 2);
}

struct Shape {
  int64_t hidden, inner, tokens;
};

static int check(int variant, int32_t dtype, int flags, Shape shape) {
  const int64_t size = dtype == F32 ? 4 : 2, H = shape.hidden, I = shape.inner, T = shape.tokens;
  Form form = {};
  form.hidden = H, form.inner = I, form.dtype = dtype, form.activation = flags % 6, form.alpha = 1.7f, form.limit = 7;
  form.transposed = flags >> 3 & 1, form.down_transposed = flags >> 4 & 1, form.scales_input = flags >> 5 & 1;
  const bool gated = flags >> 6 & 1 || form.activation == GPT_OSS, alternate = gated && flags >> 7 & 1;
  const bool biased = flags & 1;
  form.interleaved = alternate;
  const int64_t sides = gated ? 2 : 1, fused = sides * I * H * size;
  const int64_t between = alternate ? 1 : I;
  form.gate = gated ? 0 : -1;
  form.up = gated ? between * (form.transposed ? 1 : H) * size : 0;
  form.step = form.transposed ? sides * I : (alternate ? 2 : 1) * H;
  form.bias_step = alternate ? 2 : 1;
  form.down = fused;
  const int64_t biases = fused + I * H * size;
  form.gate_bias = biased && gated ? biases : -1;
  form.up_bias = biased ? biases + (gated ? between * size : 0) : -1;
  form.down_bias = biased ? biases + sides * I * size : -1;
  std::vector<char> slot(biases + (biased ? (sides * I + H) * size : 0));
  for (int64_t at = 0; at < static_cast<int64_t>(slot.size()); at += size) put(slot, at, dtype, noise() * 0.3f);

  std::vector<float> hidden(T * H), weights(T), out(T * H);
  for (float& v : hidden) v = noise();
  for (float& v : weights) v = noise();
  std::vector<int64_t> pairs(T);
  for (int64_t t = 0; t < T; ++t) pairs[t] = T - 1 - t;
  const int64_t slots[] = {reinterpret_cast<int64_t>(slot.data())}, starts[] = {0, T};
  const int64_t x_width = round_up(H, 32), inner_width = round_up(I, 32);
  std::vector<float> x(T * x_width), inner(T * inner_width, NAN);
  daop_prepare(variant, hidden.data(), F32, T, H, dtype == BF16 && !form.transposed, x_width, x.data());
  const Call call = {&form,        x.data(), slots, starts, pairs.data(), weights.data(), inner.data(), out.data(), 1, 1,
                     x_width, inner_width};
  daop_run(variant, &call, nullptr, 1);
  std::vector<float> sum(T * H);
  daop_add(out.data(), pairs.data(), T, 1, H, sum.data());

  const auto at = [&](int64_t base, int64_t i) { return value_at(slot.data() + base + i * size, dtype); };
  for (int64_t t = 0; t < T; ++t) {
    const float w = weights[t];
    std::vector<double> act(I);
    for (int64_t i = 0; i < I; ++i) {
      double gate = 0, up = 0;
      for (int64_t h = 0; h < H; ++h) {
        const double value = hidden[t * H + h] * (form.scales_input ? w : 1.0f);
        const int64_t index = form.transposed ? h * form.step + i * (alternate ? 2 : 1) : i * form.step + h;
        if (gated) gate += value * at(form.gate, index);
        up += value * at(form.up, index);
      }
      if (form.gate_bias >= 0) gate += at(form.gate_bias, i * form.bias_step);
      if (form.up_bias >= 0) up += at(form.up_bias, i * form.bias_step);
      act[i] = gated ? activate(form, gate, up) : activate(form, up, 1.0f);
    }
    for (int64_t h = 0; h < H; ++h) {
      double y = form.down_bias >= 0 ? at(form.down_bias, h) : 0;
      for (int64_t i = 0; i < I; ++i) y += act[i] * at(form.down, form.down_transposed ? i * H + h : h * I + i);
      if (!form.scales_input) y *= w;
      const double error = std::fabs(y - sum[t * H + h]);
      if (!(error <= 1e-4 * (1 + std::fabs(y)))) {
        printf("variant %s dtype %d flags %d shape %ldx%ld tokens %ld: %g instead of %g\n", daop_variant(variant), dtype,
               flags, static_cast<long>(H), static_cast<long>(I), static_cast<long>(T), sum[t * H + h], y);
        return 1;
      }
    }
  }
  return 0;
}

int main() {
  const Shape shapes[] = {{1, 1, 1}, {33, 17, 2}, {64, 32, 1}, {31, 130, 3}, {70, 9, 7}, {37, 40, 21}};
  int runs = 0;
  for (int variant = 0; daop_variant(variant); ++variant)
    for (const int32_t dtype : {F32, F16, BF16})
      for (int flags = 0; flags < 256; ++flags) {
        ++runs;
        if (check(variant, dtype, flags, shapes[flags % 6])) return 1;
        if (flags % 5 == 0 && check(variant, dtype, flags, shapes[(flags / 5 + variant) % 6])) return 1;
      }
  std::vector<char> memory(512 * 300);
  for (int variant = 0; daop_variant(variant); ++variant) daop_read(variant, memory.data(), memory.size(), nullptr, 1);
  printf("%d runs\n", runs);
}
