// DynamicCode for processors that permute the bytes of vectors (AVX-512 VBMI): no look-up asks the memory.
//
// A table of 256 floats is kept as four planes of bytes, and 64 look-ups are 8 permutations. Packing four vectors of 16
// codes to one of bytes, and unpacking bytes to four vectors of 16 floats, work within quarters of a vector. So bytes
// are worked on in "turned" order, that of a 4 x 4 matrix of four bytes each turned over; turning it again undoes that.

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

    // In two loops: constants of both do not fit the registers.
    void encode(float *values, float scale, std::uint8_t *codes, int n) const {
        const __m512 divisor = _mm512_set1_ps(scale != 0 ? scale : 1);
        alignas(64) std::uint8_t below[TILE];
        for (int start = 0; start < n; start += GROUP) {
            __m512i code[4];
            for (int quarter = 0; quarter < 4; quarter++) {
                float *own = values + start + 16 * quarter;
                const __m512 scaled = _mm512_div_ps(_mm512_loadu_ps(own), divisor);
                _mm512_storeu_ps(own, scaled);
                code[quarter] = codes_or_below(scaled);
            }
            const __m512i low = _mm512_packs_epi32(code[0], code[1]), high = _mm512_packs_epi32(code[2], code[3]);
            _mm512_store_si512(below + start, _mm512_packus_epi16(low, high)); // negative ones become 0
        }
        for (int start = 0; start < n; start += GROUP) {
            const __m512i found = _mm512_load_si512(below + start);
            __m512 limits[4];
            limits_.look_up(found, limits);
            const auto above = [&](int quarter) {
                return _mm512_cmp_ps_mask(_mm512_loadu_ps(values + start + 16 * quarter), limits[quarter], _CMP_GT_OQ);
            };
            const __mmask64 all_above = _mm512_kunpackd(_mm512_kunpackw(above(3), above(2)),
                                                        _mm512_kunpackw(above(1), above(0)));
            const __m512i code = turned(found);
            _mm512_storeu_si512(codes + start, _mm512_mask_add_epi8(code, all_above, code, _mm512_set1_epi8(1)));
        }
    }

  private:
    // Below 0: to become 0. min(one, x) and not min(x, one): of a NaN it is the NaN, which is converted to the least int.
    __m512i codes_or_below(__m512 value) const {
        const __m512 one = _mm512_set1_ps(1);
        const auto steps = [&](__m512 magnitude) {
            const auto line = [&](int decade) {
                return _mm512_fmadd_ps(magnitude, _mm512_set1_ps(lines_.slope[decade]),
                                       _mm512_set1_ps(lines_.offset[decade]));
            };
            __m512 place = line(0);
            for (int decade = 1; decade < DECADES; decade++) place = _mm512_min_ps(place, line(decade));
            return _mm512_cvt_roundps_epi32(place, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        };
        if (!SIGNED) return steps(_mm512_min_ps(one, value));
        const __mmask16 is_number = _mm512_cmp_ps_mask(value, value, _CMP_ORD_Q);
        const __m512i bits = _mm512_maskz_mov_epi32(is_number, _mm512_castps_si512(value));
        const __m512 magnitude = _mm512_castsi512_ps(_mm512_and_epi32(bits, _mm512_set1_epi32(0x7FFFFFFF)));
        // Of what is below 0: -1 - steps.
        const __m512i turns = _mm512_xor_epi32(steps(_mm512_min_ps(one, magnitude)), _mm512_srai_epi32(bits, 31));
        return _mm512_add_epi32(_mm512_set1_epi32(127), turns);
    }

    Table values_, limits_;
    Lines<SIGNED> lines_;
};
