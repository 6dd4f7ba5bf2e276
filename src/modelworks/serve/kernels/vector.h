// Sixteen numbers at a time on any processor: the vector types of GCC and Clang, which become whatever instructions are
// there, and by hand the few that they do not know.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace modelworks {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
// The same in memory: of any alignment, and over any type.
typedef Floats FloatsInMemory __attribute__((aligned(4), may_alias));
typedef Ints IntsInMemory __attribute__((aligned(4), may_alias));
typedef Words WordsInMemory __attribute__((aligned(4), may_alias));
typedef Halves HalvesInMemory __attribute__((aligned(2), may_alias));

struct Bfloat16 {
  uint16_t bits;  // the upper half of a float32
};

constexpr Ints kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline Floats broadcast(float x) { return Floats{} + x; }

inline Floats load(const float* from) { return *reinterpret_cast<const FloatsInMemory*>(from); }

inline Floats load(const Bfloat16* from) {
  const Words wide = __builtin_convertvector(*reinterpret_cast<const HalvesInMemory*>(from), Words);
  return reinterpret_cast<Floats>(wide << 16);
}

inline void store(float* to, Floats x) { *reinterpret_cast<FloatsInMemory*>(to) = x; }

// Rounds to the nearest, ties to even.
inline void store(Bfloat16* to, Floats x) {
#ifdef __AVX512BF16__
  const __m256bh narrow = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
  *reinterpret_cast<HalvesInMemory*>(to) = reinterpret_cast<Halves>(narrow);
#else
  const Words bits = reinterpret_cast<Words>(x);
  const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const Words quiet = bits | 0x400000u;  // of a NaN, which rounding could turn into infinity
  const Words chosen = (bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
  *reinterpret_cast<HalvesInMemory*>(to) = __builtin_convertvector(chosen >> 16, Halves);
#endif
}

inline void store_one(float* to, float x) { *to = x; }

inline void store_one(Bfloat16* to, float x) {
  Bfloat16 all[kLanes];  // through the vector, so that one value and sixteen round alike
  store(all, broadcast(x));
  *to = all[0];
}

inline float widened(float x) { return x; }

inline float widened(Bfloat16 x) { return __builtin_bit_cast(float, uint32_t{x.bits} << 16); }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// In a fixed order, so that a sum is the same wherever it is taken.
inline float sum_of(Floats x) {
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15);
  return (x[0] + x[2]) + (x[1] + x[3]);
}

inline float largest_of(Floats x) {
  x = larger(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15));
  x = larger(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  return x[0] > x[1] ? x[0] : x[1];
}

// 2^x to 2e-7 of it, from 2^-126 to 2^127; beyond them about 0 and something large (of -infinity 0). A NaN stays one.
// The polynomial is that of Cephes' exp2f (Moshier), for fractions from -1/2 to 1/2.
inline Floats power_of_two(Floats x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, left in the lowest bits
#ifdef __AVX512F__
  // These give their second operand where one is a NaN. The scaling below makes infinity and zero of the bounds.
  const __m512 above = _mm512_max_ps(_mm512_set1_ps(-160.0f), reinterpret_cast<__m512>(x));
  const Floats bounded = reinterpret_cast<Floats>(_mm512_min_ps(_mm512_set1_ps(160.0f), above));
#else
  const Floats bounded = x > 127.0f ? broadcast(127.0f) : (x < -126.0f ? broadcast(-126.0f) : x);
#endif
  const Floats shifted = bounded + kShift;
  const Floats whole = shifted - kShift;
  const Floats fraction = bounded - whole;
  Floats y = broadcast(1.535336188319500e-4f);
  y = y * fraction + 1.339887440266574e-3f;
  y = y * fraction + 9.618437357674640e-3f;
  y = y * fraction + 5.550332471162809e-2f;
  y = y * fraction + 2.402264791363012e-1f;
  y = y * fraction + 6.931472028550421e-1f;
  y = y * fraction + 1.0f;
#ifdef __AVX512F__
  return reinterpret_cast<Floats>(_mm512_scalef_ps(reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(whole)));
#else
  const Words exponent = (reinterpret_cast<Words>(shifted) - (0x4b400000u - 127u)) << 23;
  return x < -126.0f ? Floats{} : y * reinterpret_cast<Floats>(exponent);
#endif
}

// How elements are multiplied and summed: `kDepth` of them lie side by side in each 32-bit lane.
template <class Element>
struct Products;

template <>
struct Products<float> {
  static constexpr int kDepth = 1;
  using Vector = Floats;
  static Vector lanes(const float* from) { return load(from); }
  static Vector same(const float* from) { return broadcast(*from); }
  static Floats add(Floats sum, Vector a, Vector b) { return sum + a * b; }
};

template <>
struct Products<Bfloat16> {
  static constexpr int kDepth = 2;
  using Vector = Words;
  static Vector lanes(const Bfloat16* from) { return *reinterpret_cast<const WordsInMemory*>(from); }
  static Vector same(const Bfloat16* from) {
    typedef uint32_t Word __attribute__((aligned(2), may_alias));
    return Words{} + *reinterpret_cast<const Word*>(from);
  }
  static Floats add(Floats sum, Vector a, Vector b) {
#ifdef __AVX512BF16__
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a),
                                                     reinterpret_cast<__m512bh>(b)));
#else
    sum = sum + reinterpret_cast<Floats>(a << 16) * reinterpret_cast<Floats>(b << 16);
    return sum + reinterpret_cast<Floats>(a & 0xffff0000u) * reinterpret_cast<Floats>(b & 0xffff0000u);
#endif
  }
};

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int divide_up(int value, int by) { return (value + by - 1) / by; }

}  // namespace modelworks
