// What the cache holds: numbers as they are multiplied, or codes of one byte under a scale for each vector.
//
//   x ~ scale * code,   scale = max |x| / largest code     (int8: 127; fp8, e4m3: 448; of each token, in each head)
//
// Codes and scales are those of `serve/kv_cache.py` bit for bit. Every code is a bfloat16 number, so that widening one
// rounds nothing: scales meet scores and weights instead, where there are fewer of them. (e4m3: Micikevicius et al.
// 2022, 2209.05433.)
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "vector.h"

namespace modelworks {

struct Int8 {
  int8_t bits;
  static constexpr float kLargest = 127.0f;
};

struct Float8 {
  uint8_t bits;  // sign, 4 bits of exponent (bias 7), 3 of mantissa
  static constexpr float kLargest = 448.0f;
};

template <class Stored>
constexpr bool kIsCode = sizeof(Stored) == 1;

// What keys and values are multiplied as: codes as what the model is made of, others as they are.
template <class Stored, class Element>
using Factor = std::conditional_t<kIsCode<Stored>, Element, Stored>;

// In elements of the cache, of one vector's scale.
template <class Stored>
constexpr int kScaleSize = kIsCode<Stored> ? sizeof(float) : 0;

typedef int8_t CodesInMemory __attribute__((vector_size(16), aligned(1), may_alias));

inline Floats widened_codes(const Int8* from) {
  return __builtin_convertvector(*reinterpret_cast<const CodesInMemory*>(from), Floats);
}

inline Floats widened_codes(const Float8* from) {
  const Ints wide = __builtin_convertvector(*reinterpret_cast<const CodesInMemory*>(from), Ints);
  const Words bits = reinterpret_cast<Words>(wide);
  const Words size = bits & 0x7fu;
  const Floats normal = reinterpret_cast<Floats>((size << 20) + (120u << 23));
  const Floats small = __builtin_convertvector(reinterpret_cast<Ints>(size), Floats) * 0x1p-9f;
  const Words magnitude = reinterpret_cast<Words>(size < 8u ? small : normal);
  return reinterpret_cast<Floats>(magnitude | (bits & 0x80000000u));
}

// x lies within the largest code. Rounds to the nearest, ties to even.
inline void store_codes(Int8* to, Floats x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const Ints whole = __builtin_convertvector(x + kShift - kShift, Ints);
  *reinterpret_cast<CodesInMemory*>(to) = __builtin_convertvector(whole, CodesInMemory);
}

inline void store_codes(Float8* to, Floats x) {
  const Words bits = reinterpret_cast<Words>(x), size = bits & 0x7fffffffu;
  const Words normal = (size + 0x7ffffu + ((size >> 20) & 1u) - (120u << 23)) >> 20;
  // Below 2^-6 codes are multiples of 2^-9, which is what a float32 of 2^14 is exact to.
  const Words small = reinterpret_cast<Words>(reinterpret_cast<Floats>(size) + 0x1p14f) & 0xffu;
  const Words code = (size < (121u << 23) ? small : normal) | ((bits >> 24) & 0x80u);
  *reinterpret_cast<CodesInMemory*>(to) = __builtin_convertvector(reinterpret_cast<Ints>(code), CodesInMemory);
}

// x (size,), whole vectors, as it is stored; returns codes' scale. Of what is not finite the scale is no number either,
// and codes are 0: then all that is read is not a number.
template <class Stored>
float encode(const float* x, int size, Stored* out) {
  if constexpr (!kIsCode<Stored>) {
    for (int i = 0; i < size; i += kLanes) store(out + i, load(x + i));
    return 1.0f;
  } else {
    constexpr float kLargest = Stored::kLargest;
    Floats largest = {}, wrong = {};
    for (int i = 0; i < size; i += kLanes) {
      const Floats each = load(x + i);
      largest = larger(largest, each < 0.0f ? -each : each);
      wrong += each * 0.0f;
    }
    if (sum_of(wrong) != 0.0f) {
      std::fill_n(out, size, Stored{});
      return std::numeric_limits<float>::quiet_NaN();
    }
    const float scale = std::max(largest_of(largest) / kLargest, std::numeric_limits<float>::min());
    for (int i = 0; i < size; i += kLanes) {
      const Floats scaled = load(x + i) / scale;
      const Floats below = scaled < kLargest ? scaled : broadcast(kLargest);
      store_codes(out + i, below > -kLargest ? below : broadcast(-kLargest));
    }
    return scale;
  }
}

#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
// The upper or the lower bytes of the bfloat16 numbers that codes without their sign stand for.
template <class Stored>
struct HalfOfCodes {
  alignas(64) uint8_t bytes[128];
  explicit HalfOfCodes(int shift) {
    for (int first = 0; first < 128; first += kLanes) {
      Stored codes[kLanes];
      Bfloat16 wide[kLanes];
      for (int i = 0; i < kLanes; i++) codes[i].bits = first + i;
      store(wide, widened_codes(codes));
      for (int i = 0; i < kLanes; i++) bytes[first + i] = wide[i].bits >> shift;
    }
  }
};

// Codes as bfloat16 numbers, in the same order: 64 at a time, by tables of 128 bytes.
template <class Stored>
[[gnu::noinline]] void widen(const Stored* codes, ptrdiff_t size, Bfloat16* out) {
  static const HalfOfCodes<Stored> upper_half(8), lower_half(0);
  const __m512i upper_first = _mm512_load_si512(upper_half.bytes);
  const __m512i upper_last = _mm512_load_si512(upper_half.bytes + 64);
  const __m512i lower_first = _mm512_load_si512(lower_half.bytes);
  const __m512i lower_last = _mm512_load_si512(lower_half.bytes + 64);
  // Bytes are put side by side within each quarter of a vector: first those that end up in the first half.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(-128);
  for (ptrdiff_t i = 0; i < size; i += 64) {
    const __m512i code = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes + i));
    // Look-ups pass over the top bit, which is the sign of fp8.
    const __m512i magnitude = std::is_same_v<Stored, Int8> ? _mm512_abs_epi8(code) : code;
    const __m512i unsigned_upper = _mm512_permutex2var_epi8(upper_first, magnitude, upper_last);
    const __m512i upper = _mm512_ternarylogic_epi64(unsigned_upper, code, sign, 0xf8);  // a | (b & c)
    const __m512i lower = _mm512_permutex2var_epi8(lower_first, magnitude, lower_last);
    _mm512_storeu_si512(out + i, _mm512_unpacklo_epi8(lower, upper));
    _mm512_storeu_si512(out + i + 32, _mm512_unpackhi_epi8(lower, upper));
  }
}
#else
template <class Stored>
[[gnu::noinline]] void widen(const Stored* codes, ptrdiff_t size, Bfloat16* out) {
  for (ptrdiff_t i = 0; i < size; i += kLanes) store(out + i, widened_codes(codes + i));
}
#endif

template <class Stored>
[[gnu::noinline]] void widen(const Stored* codes, ptrdiff_t size, float* out) {
  for (ptrdiff_t i = 0; i < size; i += kLanes) store(out + i, widened_codes(codes + i));
}

}  // namespace modelworks
