// What Python hands to the kernels. daop/runtime/native.py mirrors these structures field by field.
#pragma once
#include <cstdint>

enum Dtype : int32_t { F32 = 0, F16 = 1, BF16 = 2, INT8 = 3, INT4 = 4, FP8 = 5, MXFP4 = 6,
                       MXFP4_SHORT = 7 };  // the same, for a model whose hidden states have 16 bits
enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4, GPT_OSS = 5 };

// One family's experts. Offsets are in bytes from the slot's start, -1: there is none. Steps are in values.
struct Form {
  int64_t hidden, inner;  // H, I
  int64_t gate, up, down, gate_bias, up_bias, down_bias;
  int64_t step;       // [out, in]: from one row of gate (or up) to the next. [in, out]: likewise, along in.
  int64_t bias_step;  // from one value of gate_bias (or up_bias) to the next
  int32_t dtype, activation;
  int32_t transposed, down_transposed;  // stored [in, out]
  int32_t interleaved;                  // transposed only: gate and up alternate within a row
  int32_t scales_input;                 // the router weight belongs to the input
  float alpha, limit;                   // of GPT_OSS
  // Of quantised weights, which lie [out, in]. `up` is where the tensor begins that holds it, `up_first` the
  // row of its first output there; with `interleaved`, it is the same tensor as gate's, row by row in turn.
  int64_t gate_scale, up_scale, down_scale, up_first;
  int32_t group, scale_dtype, bias_dtype;
};

// One call: `tasks` experts, each with the rows of `pairs` from starts[i] to starts[i + 1].
struct Call {
  const Form* form;
  const float* x;         // [T, x_width] as daop_prepare leaves it
  const int64_t* slots;   // addresses, [tasks]
  const int64_t* starts;  // [tasks + 1]
  const int64_t* pairs;   // token * top_k + rank, by row
  const float* weights;   // [T * top_k]
  float* inner;           // scratch, [rows, inner_width]
  float* out;             // [rows, H]: outputs, router weights applied
  int64_t tasks, top_k, x_width, inner_width;
  int32_t x_dtype;  // of the hidden states that daop_prepare was given
};
