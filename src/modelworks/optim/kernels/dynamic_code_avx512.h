// DynamicCode for processors that permute the bytes of vectors (AVX-512 VBMI): no look-up asks the memory.
//
// A table of 256 floats is kept as four planes of bytes, and 64 look-ups are 8 permutations. Putting four planes together
// to four vectors of 16 floats works within quarters of a vector. So look-ups take bytes in "turned" order, that of a
// 4 x 4 matrix of four bytes each turned over.

#include <immintrin.h>

inline __m512i turned(__m512i bytes) {
    return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), bytes);
}

class Table {
  public:
    explicit Table(const float *entries) {
        for (int code = 0; code < 256; code++)
            for (int plane = 0; plane < 4; plane++)
                planes_[plane][code] = std::bit_cast<std::uint32_t>(entries[code]) >> (8 * plane);
    }

    // codes: in turned order.
    void look_up(__m512i codes, __m512 found[4]) const {
        const __mmask64 upper = _mm512_movepi8_mask(codes);
        const auto bytes = [&](int plane) {
            const auto part = [&](int start) { return _mm512_load_si512(planes_[plane] + start); };
            return _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(part(0), codes, part(64)),
                                          _mm512_permutex2var_epi8(part(128), codes, part(192)));
        };
        const __m512i byte0 = bytes(0), byte1 = bytes(1), byte2 = bytes(2), byte3 = bytes(3);
        const __m512i low01 = _mm512_unpacklo_epi8(byte0, byte1), high01 = _mm512_unpackhi_epi8(byte0, byte1);
        const __m512i low23 = _mm512_unpacklo_epi8(byte2, byte3), high23 = _mm512_unpackhi_epi8(byte2, byte3);
        found[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low01, low23));
        found[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low01, low23));
        found[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(high01, high23));
        found[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(high01, high23));
    }

  private:
    alignas(64) std::uint8_t planes_[4][256];
};

// Of a float's upper 16 bits, the right code or the one below it, for 32 at a time.
//
// These bits leave less than 0.6 of a part open (signed: 0.3) and one or two lines by their exponent, the lower of which
// counts. Codes are computed with 8 bits behind the point, low enough for the largest of these floats not to fall below
// the code it may have as the least: by more than the first fifth of a decade's first part, which is nearer to the decade
// below, and by less than what is left of a whole part.
template <bool SIGNED> class CodeOrBelow {
  public:
    CodeOrBelow() {
        const Lines<SIGNED> lines;
        for (int exponent = LOWEST >> 7; exponent <= HIGHEST >> 7; exponent++)
            for (int end = 0; end < 2; end++) { // the lines that count where the exponent begins and ends
                const double magnitude = std::ldexp(1.0, exponent - 127 + end);
                const auto at = [&](int decade) { return magnitude * lines.slope[decade] + lines.offset[decade]; };
                int lowest = 0;
                for (int decade = 1; decade < DECADES; decade++) lowest = at(decade) < at(lowest) ? decade : lowest;
                slope_[end][exponent % 32] = std::lround(std::ldexp(lines.slope[lowest], exponent - 126 + 8));
                offset_[end][exponent % 32] = std::lround(std::ldexp(lines.offset[lowest] - LESS, 8));
            }
    }

    // upper: of 32 floats. Codes are in the upper byte of each word.
    __m512i operator()(__m512i upper) const {
        const auto all = [](int word) { return _mm512_set1_epi16(word); };
        const __m512i size = SIGNED ? _mm512_and_si512(upper, all(0x7FFF)) : upper;
        const __mmask32 is_number = _mm512_cmple_epi16_mask(size, all(0x7F80));
        const __m512i bits = _mm512_min_epi16(_mm512_max_epi16(size, all(LOWEST)), all(HIGHEST));
        const __m512i exponent = _mm512_srli_epi16(bits, 7);
        const __m512i mantissa = _mm512_or_si512(_mm512_slli_epi16(bits, 8), all(-0x8000));
        const auto line = [&](int end) {
            const __m512i slope = _mm512_permutexvar_epi16(exponent, _mm512_load_si512(slope_[end]));
            const __m512i offset = _mm512_permutexvar_epi16(exponent, _mm512_load_si512(offset_[end]));
            return _mm512_add_epi16(_mm512_mulhi_epu16(mantissa, slope), offset);
        };
        const __m512i place = _mm512_maskz_min_epu16(is_number, line(0), line(1));
        if (!SIGNED) return place;
        const __m512i middle = all(127 << 8);
        return _mm512_mask_subs_epu16(_mm512_add_epi16(middle, place), _mm512_movepi16_mask(upper), middle, place);
    }

  private:
    // Magnitudes below have the code of 0, as this one has; those above are compared with the last limit, as this one is.
    static constexpr int LOWEST = 103 << 7, HIGHEST = (127 << 7) - 1; // 2^-24, just below 1
    static constexpr double LESS = SIGNED ? 0.45 : 0.32;

    alignas(64) std::uint16_t slope_[2][32] = {}, offset_[2][32] = {};
};

// As the portable one in dynamic_code.h.
template <bool SIGNED> class DynamicCode {
  public:
    DynamicCode(const float *values, const float *limits) : values_(values), limits_(limits) {}

    void decode(const std::uint8_t *codes, float *into, int n) const {
        for (int start = 0; start < n; start += GROUP) {
            __m512 found[4];
            values_.look_up(turned(_mm512_loadu_si512(codes + start)), found);
            for (int quarter = 0; quarter < 4; quarter++) _mm512_storeu_ps(into + start + 16 * quarter, found[quarter]);
        }
    }

    void encode(const float *values, float scale, std::uint8_t *codes, int n) const {
        const __m512 inverse = _mm512_set1_ps(inverse_of(scale));
        for (int start = 0; start < n; start += GROUP) {
            __m512 scaled[4], limits[4];
            for (int quarter = 0; quarter < 4; quarter++)
                scaled[quarter] = _mm512_mul_ps(_mm512_loadu_ps(values + start + 16 * quarter), inverse);
            const __m512i below = codes_or_below(scaled);
            limits_.look_up(turned(below), limits);
            const auto above = [&](int quarter) {
                return _mm512_cmp_ps_mask(scaled[quarter], limits[quarter], _CMP_GT_OQ);
            };
            const __mmask64 all_above = _mm512_kunpackd(_mm512_kunpackw(above(3), above(2)),
                                                        _mm512_kunpackw(above(1), above(0)));
            _mm512_storeu_si512(codes + start, _mm512_mask_add_epi8(below, all_above, below, _mm512_set1_epi8(1)));
        }
    }

  private:
    __m512i codes_or_below(const __m512 scaled[4]) const {
        const auto upper = [&](int one, int other) { // of two vectors, word by word in turn
            const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(scaled[one]), 16);
            return _mm512_mask_blend_epi16(0xAAAAAAAA, low, _mm512_castps_si512(scaled[other]));
        };
        const __m512i even = search_(upper(0, 2)), odd = search_(upper(1, 3));
        const __m512i all = _mm512_mask_blend_epi8(0xAAAAAAAAAAAAAAAA, _mm512_srli_epi16(even, 8), odd);
        return _mm512_permutexvar_epi8(_mm512_load_si512(ORDER.place), all);
    }

    // Of byte `lane` of vector `quarter`, where four vectors lie byte by byte in turn.
    struct Order {
        alignas(64) std::uint8_t place[64];
        constexpr Order() : place() {
            for (int quarter = 0; quarter < 4; quarter++)
                for (int lane = 0; lane < 16; lane++) place[16 * quarter + lane] = 4 * lane + quarter;
        }
    };
    static constexpr Order ORDER{};

    Table values_, limits_;
    CodeOrBelow<SIGNED> search_;
};
