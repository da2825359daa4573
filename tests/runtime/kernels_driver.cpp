// Runs every kernel on buffers of exactly the right size, for the sanitizers to watch, and compares with plain
// loops. Built and run by test_native.py.
#include "experts.cpp"

#include <cstdio>
#include <cstdlib>
#include <utility>
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

static int check(int variant, int32_t dtype, int32_t hidden_dtype, int flags, Shape shape) {
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
  const int64_t given = hidden_dtype == F32 ? 4 : 2;
  std::vector<char> stored(T * H * given);
  for (int64_t i = 0; i < T * H; ++i) {
    put(stored, i * given, hidden_dtype, noise());
    hidden[i] = value_at(&stored[i * given], hidden_dtype);
  }
  for (float& v : weights) v = noise();
  std::vector<int64_t> pairs(T);
  for (int64_t t = 0; t < T; ++t) pairs[t] = T - 1 - t;
  const int64_t slots[] = {reinterpret_cast<int64_t>(slot.data())}, starts[] = {0, T};
  const int64_t x_width = round_up(H, 32), inner_width = round_up(I, 32);
  std::vector<float> x(T * x_width), inner(T * inner_width, NAN);
  daop_prepare(variant, &form, stored.data(), hidden_dtype, T, x_width, nullptr, x.data());
  const Call call = {&form,        x.data(), slots, starts, pairs.data(), weights.data(), inner.data(), out.data(), 1, 1,
                     x_width, inner_width, hidden_dtype};
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
        printf("variant %s dtypes %d %d flags %d shape %ldx%ld tokens %ld: %g instead of %g\n", daop_variant(variant), dtype,
               hidden_dtype, flags, static_cast<long>(H), static_cast<long>(I), static_cast<long>(T), sum[t * H + h], y);
        return 1;
      }
    }
  }
  return 0;
}

static double fp8_value(int byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return byte & 128 ? -magnitude : magnitude;
}

// A quantised weight of `rows` x `width`, appended to the slot: what it means, row by row.
struct Weight {
  int64_t at, scale;
  std::vector<double> values;
};

static Weight append(std::vector<char>& slot, const Form& form, int64_t rows, int64_t width) {
  const int64_t block = form.dtype == INT8 || form.dtype == INT4 ? form.group : form.dtype == FP8 ? 128 : 32;
  const int64_t step = block > 64 ? block : 64;
  const bool whole = form.dtype == INT8 || form.dtype == INT4;
  const int64_t stored = whole ? (width + step - 1) / step * step : width, groups = (stored + block - 1) / block;
  const int64_t row_bytes = form.dtype == INT8 || form.dtype == FP8 ? stored : stored / 2;
  const int64_t scale_rows = form.dtype == FP8 ? (rows + 127) / 128 : rows;
  const int64_t scale_size = is_mxfp4(form.dtype) ? 1 : form.dtype == FP8 && form.scale_dtype == F32 ? 4 : 2;
  Weight w = {static_cast<int64_t>(slot.size()), 0, std::vector<double>(rows * width)};
  w.scale = w.at + rows * row_bytes;
  slot.resize(w.scale + scale_rows * groups * scale_size);
  for (int64_t i = w.at; i < w.scale; ++i) {
    const int byte = static_cast<int>((noise() + 1) * 128) & 255;
    slot[i] = static_cast<char>(form.dtype == FP8 && (byte & 127) == 127 ? 1 : form.dtype == INT8 && byte == 128 ? 1 : byte);
  }
  for (int64_t i = 0; i < scale_rows * groups; ++i) {
    const int64_t at = w.scale + i * scale_size;
    if (is_mxfp4(form.dtype))
      slot[at] = static_cast<char>(118 + i % 5);
    else
      put(slot, at, scale_size == 4 ? F32 : BF16, (noise() + 1.5f) * (form.dtype == FP8 ? 1e-3f : form.dtype == INT8 ? 1e-3f : 1e-2f));
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < width; ++k) {
      const int64_t scale_at = w.scale + ((form.dtype == FP8 ? r / 128 : r) * groups + k / block) * scale_size;
      const uint8_t* row = reinterpret_cast<const uint8_t*>(&slot[w.at + r * row_bytes]);
      double value;
      switch (form.dtype) {
        case INT8: value = static_cast<int8_t>(row[k]); break;
        case INT4: value = (k % 64 < 32 ? row[k / 64 * 32 + k % 32] & 15 : row[k / 64 * 32 + k % 32] >> 4) - 8; break;
        case FP8: value = fp8_value(row[k]); break;
        default: value = coded::E2M1[k % 2 ? row[k / 2] >> 4 : row[k / 2] & 15];
      }
      w.values[r * width + k] = value * (is_mxfp4(form.dtype) ? std::ldexp(1.0, static_cast<uint8_t>(slot[scale_at]) - 127)
                                                             : value_at(&slot[scale_at], scale_size == 4 ? F32 : BF16));
    }
  return w;
}

static int check_coded(int variant, int32_t dtype, int32_t group, int flags, Shape shape) {
  const int64_t H = shape.hidden, I = shape.inner, T = shape.tokens;
  Form form = {};
  form.hidden = H, form.inner = I, form.dtype = dtype, form.group = group, form.activation = flags % 6;
  form.alpha = 1.7f, form.limit = 7, form.scales_input = flags >> 3 & 1;
  form.scale_dtype = dtype == FP8 && flags & 1 ? F32 : BF16, form.bias_dtype = flags & 2 ? F32 : BF16;
  const bool gated = flags >> 4 & 1 || form.activation == GPT_OSS, alternate = gated && flags >> 5 & 1;
  const int64_t sides = gated ? 2 : 1, size = form.bias_dtype == F32 ? 4 : 2;
  form.interleaved = alternate, form.bias_step = alternate ? 2 : 1;
  std::vector<char> slot;
  const Weight up = append(slot, form, sides * I, H), down = append(slot, form, H, I);
  form.gate = gated ? up.at : -1, form.up = up.at, form.down = down.at;
  form.gate_scale = gated ? up.scale : -1, form.up_scale = up.scale, form.down_scale = down.scale;
  form.up_first = !gated ? 0 : alternate ? 1 : I;
  form.gate_bias = form.up_bias = form.down_bias = -1;
  if (flags & 4) {
    const int64_t biases = slot.size();
    slot.resize(biases + (sides * I + H) * size);
    for (int64_t at = biases; at < static_cast<int64_t>(slot.size()); at += size) put(slot, at, form.bias_dtype, noise());
    form.gate_bias = gated ? biases : -1, form.up_bias = biases + (gated ? form.up_first * size : 0);
    form.down_bias = biases + sides * I * size;
  }
  slot.shrink_to_fit();

  std::vector<float> hidden(T * H), weights(T), out(T * H), scratch(H);
  for (float& v : hidden) v = noise();
  for (float& v : weights) v = noise();
  std::vector<int64_t> pairs(T);
  for (int64_t t = 0; t < T; ++t) pairs[t] = T - 1 - t;
  const int64_t slots[] = {reinterpret_cast<int64_t>(slot.data())}, starts[] = {0, T};
  const int64_t x_width = round_up(H, 128) + 32, inner_width = round_up(I, 128) + 32;
  std::vector<float> x(T * x_width), inner(T * inner_width, NAN);
  daop_prepare(variant, &form, hidden.data(), F32, T, x_width, scratch.data(), x.data());
  const Call call = {&form,      x.data(), slots, starts, pairs.data(), weights.data(), inner.data(), out.data(), 1, 1,
                     x_width, inner_width, F32};
  daop_run(variant, &call, nullptr, 1);

  const auto bias = [&](int64_t base, int64_t i) { return base < 0 ? 0 : value_at(&slot[base + i * size], form.bias_dtype); };
  double worst = 0, largest = 0;
  for (int64_t t = 0; t < T; ++t) {
    const int64_t token = pairs[t];
    std::vector<double> act(I);
    for (int64_t i = 0; i < I; ++i) {
      double gate = 0, value = 0;
      for (int64_t h = 0; h < H; ++h) {
        const double in = hidden[token * H + h] * (form.scales_input ? weights[token] : 1.0f);
        if (gated) gate += in * up.values[(alternate ? 2 * i : i) * H + h];
        value += in * up.values[(form.up_first + (alternate ? 2 : 1) * i) * H + h];
      }
      gate += bias(form.gate_bias, i * form.bias_step), value += bias(form.up_bias, i * form.bias_step);
      act[i] = gated ? activate(form, gate, value) : activate(form, value, 1.0f);
    }
    for (int64_t h = 0; h < H; ++h) {
      double y = bias(form.down_bias, h);
      for (int64_t i = 0; i < I; ++i) y += act[i] * down.values[h * I + i];
      if (!form.scales_input) y *= weights[token];
      largest = std::fmax(largest, std::fabs(y));
      worst = std::fmax(worst, std::fabs(y - out[t * H + h]));
    }
  }
  // INT8 and INT4 round activations, which the loops above do not; test_native_coded.py compares exactly.
  if (worst <= (is_integer(dtype) ? 5e-2 : dtype == MXFP4_SHORT ? 3e-4 : 1e-4) * (largest + 0.1)) return 0;
  printf("variant %s dtype %d group %d flags %d shape %ldx%ld tokens %ld: off by %g of %g\n", daop_variant(variant), dtype,
         group, flags, static_cast<long>(H), static_cast<long>(I), static_cast<long>(T), worst, largest);
  return 1;
}

int main() {
  const Shape shapes[] = {{1, 1, 1}, {33, 17, 2}, {64, 32, 1}, {31, 130, 3}, {70, 9, 7}, {37, 40, 21}};
  int runs = 0;
  for (int variant = 0; daop_variant(variant); ++variant)
    for (const auto& [dtype, hidden] : {std::pair(F32, F32), {F16, F32}, {BF16, F32}, {BF16, BF16}})
      for (int flags = 0; flags < 256; ++flags) {
        ++runs;
        if (check(variant, dtype, hidden, flags, shapes[flags % 6])) return 1;
        if (flags % 5 == 0 && check(variant, dtype, hidden, flags, shapes[(flags / 5 + variant) % 6])) return 1;
      }
  const Shape coded[] = {{1, 1, 1}, {33, 17, 2}, {64, 32, 1}, {31, 130, 3}, {70, 9, 7}, {300, 40, 21}};
  const Shape blocks[] = {{32, 32, 1}, {64, 96, 2}, {96, 64, 3}, {160, 32, 21}, {2112, 32, 1}, {64, 160, 5}};
  for (int variant = 0; daop_variant(variant); ++variant)
    for (const int32_t dtype : {INT8, INT4, FP8, MXFP4, MXFP4_SHORT})
      for (int flags = 0; flags < 64; ++flags) {
        ++runs;
        const Shape shape = is_mxfp4(dtype) ? blocks[flags % 6] : coded[(flags + flags / 6) % 6];
        if (check_coded(variant, dtype, is_mxfp4(dtype) ? 32 : dtype == FP8 ? 128 : 32 << flags % 3, flags, shape)) return 1;
      }
  std::vector<char> memory(512 * 300);
  for (int variant = 0; daop_variant(variant); ++variant) daop_read(variant, memory.data(), memory.size(), nullptr, 1);
  for (int variant = 0; daop_variant(variant); ++variant) printf("%s, ", daop_variant(variant));
  printf("%d runs\n", runs);
}
