// The 256 values of a dynamic code (codec.py), a tile at a time: decoding, and the code of the nearest value.
//
// Encoding computes where among the values a magnitude lies. In a decade these are equally wide apart, so that is a
// straight line, and the lines of higher decades are less steep: of all of them the lowest counts. Less part of a part
// and rounded down, it gives the right code or the one below it, far from where rounding could matter; a comparison with
// the limit between the two, from the codec's own table, decides. So codes are the codec's, exactly.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

constexpr int TILE = 256; // elements at most
constexpr int GROUP = 64; // buffers are worked on, and must be there, up to a whole one

constexpr int DECADES = 7;

// By decade, the code counted from that of 0 as a line over the magnitude.
template <bool SIGNED> struct Lines {
    double slope[DECADES], offset[DECADES];

    Lines() {
        for (int decade = 0; decade < DECADES; decade++) {
            const double from = std::pow(10.0, decade - DECADES), parts = std::exp2(decade + !SIGNED);
            const double first = SIGNED ? parts : parts - 1;
            slope[decade] = parts / (9 * from);
            offset[decade] = first - parts / 9;
        }
    }
};

// What values are multiplied by to be encoded: as the codec's, so that codes are the same.
inline float inverse_of(float scale) {
    return scale != 0 ? std::min(1 / scale, std::numeric_limits<float>::max()) : 1; // of what is no number, that
}

#if defined(__AVX512VBMI__) && !defined(MODELWORKS_PORTABLE)
#include "dynamic_code_avx512.h"
#else

template <bool SIGNED> class DynamicCode {
  public:
    // values: the 256, ascending. limits: above which the next code is nearer; infinity after the last.
    DynamicCode(const float *values, const float *limits) : values_(values), limits_(limits) {
        const Lines<SIGNED> lines;
        for (int decade = 0; decade < DECADES; decade++) {
            slope_[decade] = lines.slope[decade];
            // The first fifth of a decade's first part is nearer to the decade below, the last quarter of all to 1.
            offset_[decade] = lines.offset[decade] - 0.5;
        }
    }

    void decode(const std::uint8_t *codes, float *into, int n) const {
        for (int i = 0; i < n; i++) into[i] = values_[codes[i]];
    }

    // The codes of n values over a scale. Infinities are the outermost values; NaN is 0.
    void encode(const float *values, float scale, std::uint8_t *codes, int n) const {
        const float inverse = inverse_of(scale);
        float scaled[TILE];
        int below[TILE];
        for (int i = 0; i < n; i++) {
            const float found = values[i] * inverse;
            scaled[i] = found == found ? found : 0;
            below[i] = code_or_below(scaled[i]);
        }
        for (int i = 0; i < n; i++) codes[i] = below[i] + (scaled[i] > limits_[below[i]]);
    }

  private:
    int code_or_below(float value) const {
        const float magnitude = std::fabs(value) < 1 ? std::fabs(value) : 1;
        float place = magnitude * slope_[0] + offset_[0];
        for (int decade = 1; decade < DECADES; decade++)
            place = std::min(place, magnitude * slope_[decade] + offset_[decade]);
        const int steps = static_cast<int>(place + 2) - 2; // rounded down: place is above -2
        const int code = SIGNED ? 127 + (steps ^ (std::bit_cast<std::int32_t>(value) >> 31)) : steps; // -1 - steps
        return code > 0 ? code : 0;
    }

    const float *values_, *limits_;
    float slope_[DECADES], offset_[DECADES];
};

#endif
