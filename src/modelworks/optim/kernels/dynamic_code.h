// The 256 values of a dynamic code (codec.py), a block at a time: decoding, and the code of the nearest value.
//
// Both look entries of a table of 256 up by a byte. Where the processor permutes bytes across vectors, the tables are
// kept as four planes of bytes, and 64 look-ups are 8 permutations: no memory is asked.
//
// Encoding computes where in its decade a value lies, whose parts are equally wide. Less half a part and rounded down,
// that is the right code or the one below it, far from where rounding could matter; a comparison with the limit between
// the two, from the codec's own table, decides. So codes are the codec's, exactly.

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#if defined(__AVX512VBMI__)
#include <immintrin.h>
#endif

constexpr int BLOCK = 256; // elements at most; a multiple of GROUP
constexpr int GROUP = 64;  // what is looked up at once: buffers are rounded up to it

class Table {
  public:
    explicit Table(const float *entries) : entries_(entries) {
#if defined(__AVX512VBMI__)
        for (int code = 0; code < 256; code++) {
            const auto bits = std::bit_cast<std::uint32_t>(entries[code]);
            for (int plane = 0; plane < 4; plane++) planes_[plane][code] = bits >> (8 * plane);
        }
#endif
    }

    // Of n codes, rounded up to a whole GROUP.
    void look_up(const std::uint8_t *codes, float *into, int n) const {
#if defined(__AVX512VBMI__)
        // Unpacking works within quarters of a vector: turned as a 4 x 4 matrix of four bytes each, codes come out in order.
        const __m512i turned = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        for (int start = 0; start < n; start += GROUP) {
            const __m512i code = _mm512_permutexvar_epi32(turned, _mm512_loadu_si512(codes + start));
            const __mmask64 upper = _mm512_movepi8_mask(code);
            __m512i byte[4];
            for (int plane = 0; plane < 4; plane++) {
                const std::uint8_t *table = planes_[plane];
                const __m512i low = _mm512_permutex2var_epi8(
                    _mm512_load_si512(table), code, _mm512_load_si512(table + 64));
                const __m512i high = _mm512_permutex2var_epi8(
                    _mm512_load_si512(table + 128), code, _mm512_load_si512(table + 192));
                byte[plane] = _mm512_mask_blend_epi8(upper, low, high);
            }
            const __m512i low01 = _mm512_unpacklo_epi8(byte[0], byte[1]), high01 = _mm512_unpackhi_epi8(byte[0], byte[1]);
            const __m512i low23 = _mm512_unpacklo_epi8(byte[2], byte[3]), high23 = _mm512_unpackhi_epi8(byte[2], byte[3]);
            _mm512_storeu_si512(into + start, _mm512_unpacklo_epi16(low01, low23));
            _mm512_storeu_si512(into + start + 16, _mm512_unpackhi_epi16(low01, low23));
            _mm512_storeu_si512(into + start + 32, _mm512_unpacklo_epi16(high01, high23));
            _mm512_storeu_si512(into + start + 48, _mm512_unpackhi_epi16(high01, high23));
        }
#else
        for (int i = 0; i < n; i++) into[i] = entries_[codes[i]];
#endif
    }

  private:
    const float *entries_;
#if defined(__AVX512VBMI__)
    alignas(64) std::uint8_t planes_[4][256];
#endif
};

// values: the 256, ascending. limits: above which the next code is nearer; infinity after the last.
template <bool SIGNED> class DynamicCode {
  public:
    DynamicCode(const float *values, const float *limits) : values_(values), limits_(limits) {
        for (int decade = 0; decade < DECADES; decade++) {
            const double from = std::pow(10.0, decade - DECADES), parts = std::exp2(decade + !SIGNED);
            const double first = SIGNED ? parts : parts - 1; // its first code, counted from that of 0
            const double slope = parts / (9 * from);
            from_[decade] = from;
            slope_[decade] = slope;
            offset_[decade] = first - from * slope - SLACK + BIAS;
        }
    }

    void decode(const std::uint8_t *codes, float *into, int n) const { values_.look_up(codes, into, n); }

    // Divides n values by a scale and finds their codes. Infinities are the outermost values; NaN is 0. Both buffers are
    // written up to a whole GROUP.
    void encode(float *values, float scale, std::uint8_t *codes, int n) const {
        const float divisor = scale != 0 ? scale : 1;
        const int rounded = (n + GROUP - 1) / GROUP * GROUP;
        alignas(64) std::uint8_t below[BLOCK];
        alignas(64) float limits[BLOCK];
        for (int i = 0; i < rounded; i++) {
            const float quotient = values[i] / divisor;
            const float value = quotient == quotient ? quotient : 0;
            values[i] = value;
            below[i] = code_or_below(value);
        }
        limits_.look_up(below, limits, rounded);
        for (int i = 0; i < rounded; i++) codes[i] = below[i] + (values[i] > limits[i]);
    }

  private:
    static constexpr int DECADES = 7;
    // In parts. The first fifth of a decade's first part is nearer to the decade below, the last quarter of all to 1.
    static constexpr float SLACK = 0.5f;
    static constexpr int BIAS = 2;       // makes positive what is rounded down, by cutting off

    int code_or_below(float value) const {
        const float magnitude = std::fabs(value) < 1 ? std::fabs(value) : 1;
        float slope = slope_[0], offset = offset_[0];
        for (int decade = 1; decade < DECADES; decade++) {
            const bool above = magnitude >= from_[decade];
            slope = above ? slope_[decade] : slope;
            offset = above ? offset_[decade] : offset;
        }
        const int steps = static_cast<int>(magnitude * slope + offset) - BIAS;
        if (!SIGNED) return steps > 0 ? steps : 0;
        const int code = 127 + (steps ^ (std::bit_cast<std::int32_t>(value) >> 31)); // below: -1 - steps
        return code > 0 ? code : 0;
    }

    Table values_, limits_;
    float from_[DECADES], slope_[DECADES], offset_[DECADES];
};
