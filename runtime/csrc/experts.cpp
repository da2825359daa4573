// Routed experts on the CPU: gate/up, activation, down and router weight of all given experts in one call.
//
// Weights are read once, as stored, and converted to float32 in registers; sums and inner values are float32.
// The kernels (kernels.inc; coded.inc for quantised weights) are compiled for several instruction sets;
// supported() says which of them this CPU has.
// The threads are the caller's: `Parallel` runs a function on a team of them.

#include "experts.h"

#include <atomic>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "weights are stored little-endian"
#endif

#define INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")  // else GCC keeps sums in memory
#endif
#define NOINLINE __attribute__((noinline))

namespace {

constexpr int64_t TILE = 128;          // rows that a thread takes at a time, at most
constexpr int64_t SMALLEST_TILE = 16;  // and at least
constexpr int64_t TOKENS = 16;         // per expert and pass over a tile
constexpr int64_t AHEAD = 8192;       // bytes between what is computed and what is fetched
constexpr int64_t STRETCH = 512;       // values of GROUP rows that many tokens share in the first cache
constexpr int64_t GROUP = 8;

INLINE constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
constexpr bool is_integer(int32_t dtype) { return dtype == INT8 || dtype == INT4; }
constexpr bool is_mxfp4(int32_t dtype) { return dtype >= MXFP4; }
constexpr bool is_coded(int32_t dtype) { return dtype >= INT8; }

INLINE float value_at(const char* at, int32_t dtype) {
  if (dtype == F32) {
    float f;
    memcpy(&f, at, 4);
    return f;
  }
  uint16_t h;
  memcpy(&h, at, 2);
  uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  if (dtype == F16) {
    const uint32_t magnitude = (h & 0x7fffu) << 13;
    memcpy(&f, &magnitude, 4);
    f *= 0x1p112f;
    memcpy(&bits, &f, 4);
    bits |= ((h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u) | (h & 0x8000u) << 16;
  }
  memcpy(&f, &bits, 4);
  return f;
}

// As transformers has them; a NaN stays one.
INLINE float activate(const Form& form, float gate, float up) {
  switch (form.activation) {
    case SILU: return gate / (1.0f + expf(-gate)) * up;
    case GELU: return 0.5f * gate * (1.0f + erff(gate * 0.70710678f)) * up;
    case GELU_TANH:
      return 0.5f * gate * (1.0f + tanhf(0.79788456f * (gate + 0.044715f * gate * gate * gate))) * up;
    case RELU: return (gate < 0 ? 0 : gate) * up;
    case RELU2: return gate < 0 ? 0 * up : gate * gate * up;
    default:
      gate = gate > form.limit ? form.limit : gate;
      up = up > form.limit ? form.limit : up < -form.limit ? -form.limit : up;
      return gate / (1.0f + expf(-form.alpha * gate)) * (up + 1.0f);
  }
}

// Portable: vectors of 4, which every compiler maps to what the architecture always has (SSE2, NEON).
#define VARIANT portable
#define LANES 4
#define TARGET
#include "kernels.inc"
#undef VARIANT
#define VARIANT coded
#define LEVEL 0
#include "coded.inc"
#undef LEVEL
#undef VARIANT
#undef LANES
#undef TARGET

#if defined(__x86_64__)
#define VARIANT avx2
#define LANES 8
#define TARGET __attribute__((target("avx2,fma,f16c")))
#include "kernels.inc"
#undef VARIANT
#define VARIANT coded_avx2
#define LEVEL 1
#include "coded.inc"
#undef LEVEL
#undef VARIANT
#undef LANES
#undef TARGET

#define VARIANT coded_vnni
#define LEVEL 2
#define LANES 8
#if defined(DAOP_EMULATE_AVX512)
#define TARGET __attribute__((target("avx2,fma,f16c")))
#else
#define TARGET __attribute__((target("avx512f,avx512vl,avx512vnni,avx2,fma,f16c")))
#endif
#include "coded.inc"
#undef LEVEL
#undef VARIANT
#undef LANES
#undef TARGET

#define VARIANT avx512
#define LANES 16
#if defined(DAOP_EMULATE_AVX512)  // for tests: the same code, with each vector in two halves
#define TARGET __attribute__((target("avx2,fma,f16c")))
#else
#define TARGET __attribute__((target("avx512f,avx2,fma,f16c")))
#endif
#include "kernels.inc"
#undef VARIANT
#undef TARGET

#if __clang_major__ >= 9 || __GNUC__ >= 11  // clang says that it is GCC 4
#define VARIANT avx512bf16
#define BF16_DOT
#if defined(DAOP_EMULATE_AVX512)
#define TARGET __attribute__((target("avx2,fma,f16c")))
#else
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")))
#endif
#include "kernels.inc"
#undef VARIANT
#undef TARGET
#endif
#endif

#if defined(__aarch64__)
#define VARIANT coded_dots
#define LANES 4
#define LEVEL 3
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#include "coded.inc"
#undef LEVEL
#undef VARIANT
#undef LANES
#undef TARGET

bool has_dot_products() {
#if defined(__ARM_FEATURE_DOTPROD)
  return true;
#elif defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
  return false;
#endif
}
#endif

struct Variant {
  const char* name;
  decltype(&portable::prepare) prepare;
  decltype(&portable::tile) tile;
  decltype(&portable::read) read;
  decltype(&coded::store_row) store_row;
  decltype(&coded::tile) coded_tile;
};

// What this CPU can run, best first; ended by an entry without a name.
const Variant* supported() {
  static const Variant* const list = [] {
    static Variant found[6] = {};
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
#if defined(DAOP_EMULATE_AVX512)
    const bool avx512f = true, vnni = true, bf16 = true;
#else
    const bool avx512f = __builtin_cpu_supports("avx512f");
    const bool vnni = __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#if defined(BF16_DOT)
    const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
#endif
#endif
#if defined(BF16_DOT)
    if (avx2 && avx512f && bf16)
      found[n++] = {"avx512bf16",
                    avx512bf16::prepare,
                    avx512bf16::tile,
                    avx512bf16::read,
                    vnni ? coded_vnni::store_row : coded_avx2::store_row,
                    vnni ? coded_vnni::tile : coded_avx2::tile};
#endif
    if (avx2 && avx512f && vnni)
      found[n++] = {"avx512vnni", avx512::prepare,       avx512::tile,    avx512::read,
                    coded_vnni::store_row, coded_vnni::tile};
    if (avx2 && avx512f)
      found[n++] = {"avx512", avx512::prepare, avx512::tile, avx512::read, coded_avx2::store_row, coded_avx2::tile};
    if (avx2) found[n++] = {"avx2", avx2::prepare, avx2::tile, avx2::read, coded_avx2::store_row, coded_avx2::tile};
#endif
#if defined(__aarch64__)
    if (has_dot_products())
      found[n++] = {"neon_dots", portable::prepare,     portable::tile, portable::read,
                    coded_dots::store_row, coded_dots::tile};
    const char* const last = "neon";
#else
    const char* const last = "portable";
#endif
    found[n++] = {last, portable::prepare, portable::tile, portable::read, coded::store_row, coded::tile};
    return found;
  }();
  return list;
}

// One half of a call, tile by tile. Threads take tiles as they get to them.
struct Work {
  const Call* call;
  const Variant* variant;
  bool first_half;
  int64_t rows, tile, tiles;  // tiles per task
  std::atomic<int64_t> next{0};

  Work(const Call& c, const Variant& v, bool first, int64_t threads)
      : call(&c), variant(&v), first_half(first), rows(first ? c.form->inner : c.form->hidden) {
    // Long tiles, so that memory is read in long runs, but enough of them that threads end together. Columns
    // ([in, out]) need the full width for that.
    const bool columns = first ? c.form->transposed : c.form->down_transposed;
    // Outputs that become quantised activations are rounded by whole groups, those of MXFP4 reordered by 64.
    const int64_t group = c.form->group > 64 ? c.form->group : 64;
    tile = round_up(rows * c.tasks / (16 * threads) + 1, first && is_coded(c.form->dtype) ? group : SMALLEST_TILE);
    if (columns || tile > TILE) tile = TILE;
    tiles = (rows + tile - 1) / tile;
  }

  static void run(void* self) {
    Work& work = *static_cast<Work*>(self);
    for (int64_t i; (i = work.next.fetch_add(1, std::memory_order_relaxed)) < work.tiles * work.call->tasks;) {
      const int64_t first = i % work.tiles * work.tile;
      const int64_t count = work.rows - first < work.tile ? work.rows - first : work.tile;
      const auto run = is_coded(work.call->form->dtype) ? work.variant->coded_tile : work.variant->tile;
      run(*work.call, work.first_half, i / work.tiles, first, count);
    }
  }
};

// Reading as threads read weights: chunk by chunk, each taken by whoever gets to it.
struct Read {
  static constexpr int64_t CHUNK = 1 << 16;
  const Variant* variant;
  const char* from;
  int64_t bytes;
  std::atomic<int64_t> next{0};
  std::atomic<uint32_t> sum{0};

  static void run(void* self) {
    Read& work = *static_cast<Read*>(self);
    for (int64_t at; (at = work.next.fetch_add(CHUNK, std::memory_order_relaxed)) < work.bytes;)
      work.sum ^= work.variant->read(work.from + at, work.bytes - at < CHUNK ? work.bytes - at : CHUNK);
  }
};

// GOMP_parallel's signature: runs the function on a team of so many threads and waits for all.
typedef void (*Parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);

}  // namespace

extern "C" {

// Of experts.h and of what is below; runtime/native.py refuses any other.
int daop_version() { return 7; }

// Name of the i-th variant that this CPU can run, best first; null after the last.
const char* daop_variant(int i) { return supported()[i].name; }

// Hidden states [rows, H] in `dtype` as the form's kernels read them: out [rows, width]. `scratch`: [H], for
// quantised weights.
void daop_prepare(int variant, const Form* form, const void* hidden, int32_t dtype, int64_t rows, int64_t width,
                  float* scratch, float* out) {
  const Variant& with = supported()[variant];
  const char* from = static_cast<const char*>(hidden);
  if (!is_coded(form->dtype))
    return with.prepare(from, dtype, rows, form->hidden, form->dtype == BF16 && !form->transposed, width, out);
  const int64_t step = form->hidden * (dtype == F32 ? 4 : 2);
  for (int64_t row = 0; row < rows; ++row, from += step, out += width) {
    with.prepare(from, dtype, 1, form->hidden, 0, form->hidden, scratch);
    with.store_row(*form, scratch, form->hidden, out);
  }
}

void daop_run(int variant, const Call* call, Parallel parallel, unsigned threads) {
  for (int phase = 0; phase < 2; ++phase) {
    Work work(*call, supported()[variant], phase == 0, parallel ? threads : 1);
    if (parallel && threads > 1)
      parallel(Work::run, &work, threads, 0);
    else
      Work::run(&work);
  }
}

// Reads memory and does nothing else, to measure its bandwidth; bytes is a multiple of 512.
uint32_t daop_read(int variant, const void* from, int64_t bytes, Parallel parallel, unsigned threads) {
  Read work;
  work.variant = &supported()[variant];
  work.from = static_cast<const char*>(from);
  work.bytes = bytes;
  if (parallel && threads > 1)
    parallel(Read::run, &work, threads, 0);
  else
    Read::run(&work);
  return work.sum;
}

// sum[pairs[i] / top_k] += rows[i], one row after the other.
void daop_add(const float* rows, const int64_t* pairs, int64_t count, int64_t top_k, int64_t hidden, float* sum) {
  for (int64_t i = 0; i < count; ++i, rows += hidden) {
    float* to = sum + pairs[i] / top_k * hidden;
    for (int64_t h = 0; h < hidden; ++h) to[h] += rows[h];
  }
}
}
