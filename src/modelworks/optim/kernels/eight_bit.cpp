// Moments in 8 bits in one pass: decode a tile, update, measure its largest magnitude, encode it again.
//
// A tile is at most 256 elements, and what it decodes to stays in the first-level cache; beside codes and scales nothing
// is written but the weights. Tiles are those of `codec.Blocks`, whose operations give the same codes.

#include <cstring>

#include "dynamic_code.h"
#include "kernel.h"

namespace {

// `Blocks.geometry`: the shard seen as (stacked, rows, columns), a tile's height and width, how much of the first tile
// lies above and to the left elsewhere, and rows and columns of tiles.
struct Geometry {
    std::int64_t stacked, rows, columns, height, width, above, left, tall, wide;
};

// A tile as far as it is here: its first element, its rows and columns, and from row to row.
struct Tile {
    std::int64_t start;
    int height, width;
    std::int64_t stride;

    int size() const { return height * width; }
    std::int64_t row(int number) const { return start + number * stride; }

    void gather(const std::uint8_t *codes, std::uint8_t *together) const {
        for (int r = 0; r < height; r++) std::memcpy(together + r * width, codes + row(r), width);
    }
    void scatter(const std::uint8_t *together, std::uint8_t *codes) const {
        for (int r = 0; r < height; r++) std::memcpy(codes + row(r), together + r * width, width);
    }
};

Tile tile_at(std::int64_t unit, std::int64_t column, const Geometry &g) {
    const std::int64_t stack = unit / g.tall, tile_row = unit % g.tall;
    const std::int64_t top = std::max<std::int64_t>(0, tile_row * g.height - g.above);
    const std::int64_t bottom = std::min(g.rows, (tile_row + 1) * g.height - g.above);
    const std::int64_t first = std::max<std::int64_t>(0, column * g.width - g.left);
    const std::int64_t last = std::min(g.columns, (column + 1) * g.width - g.left);
    return {(stack * g.rows + top) * g.columns + first, int(bottom - top), int(last - first), g.columns};
}

// As `Blocks.largest`: infinity counts as the largest float, and not a number wins.
float largest_of(const float *values, int n) {
    std::int32_t top = 0;
    for (int i = 0; i < n; i++) top = std::max(top, std::bit_cast<std::int32_t>(values[i]) & 0x7FFFFFFF);
    return std::bit_cast<float>(top == 0x7F800000 ? 0x7F7FFFFF : top);
}

// One moment of a shard, and its tile that is worked on.
template <bool SIGNED> struct Moment {
    std::uint8_t *codes;
    float *scales, *largest; // of each tile; `largest` is read where it is agreed on, written otherwise
    bool agreed, writes;     // writes: codes and scales; without, only `largest`
    DynamicCode<SIGNED> code;
    alignas(64) float decoded[BLOCK] = {};
    alignas(64) std::uint8_t own[BLOCK] = {};

    void load(const Tile &tile) {
        const bool in_place = tile.size() == BLOCK && tile.height == 1;
        if (!in_place) tile.gather(codes, own);
        code.decode(in_place ? codes + tile.start : own, decoded, tile.size());
    }

    void store(const Tile &tile, std::int64_t number) {
        if (!agreed) largest[number] = largest_of(decoded, tile.size());
        if (!writes) return;
        scales[number] = largest[number];
        code.encode(decoded, scales[number], own, tile.size());
        tile.scatter(own, codes);
    }
};

struct Part {
    std::int64_t first_unit, last_unit; // rows of tiles
    bool agreed, writes;
    Geometry geometry;

    explicit Part(Sizes s)
        : first_unit(s[0]), last_unit(s[1]), agreed(s[2]), writes(s[3]),
          geometry{s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12]} {}
};

template <class T> struct Adam {
    T weight1, weight2, keep2, scale1, scale2, eps, lr, keep, decay;

    void update(T *__restrict__ value, const T *__restrict__ gradient, float *__restrict__ first,
                float *__restrict__ second, float top1, float top2, int n) const {
        for (int i = 0; i < n; i++) {
            const T g = gradient[i] + decay * value[i];
            T moved1 = first[i] * top1;
            moved1 = moved1 + (g - moved1) * weight1;
            const T moved2 = T(second[i] * top2) * keep2 + (weight2 * g) * g;
            first[i] = moved1;
            second[i] = moved2;
            const T direction = moved1 * scale1 / (std::sqrt(moved2) * scale2 + eps);
            value[i] = value[i] * keep - lr * direction;
        }
    }
};

// Arrays: value, gradient, codes and scales of the first moment, of the second, largest magnitudes of the first, of the
// second, values and limits of the signed code, of the unsigned one. Sizes: as in Part. Numbers: as in Adam; decay:
// through the gradient; keep: 1 - lr times decay of the weights.
template <class T> void adam_tiles(Arrays arrays, Sizes sizes, Numbers numbers) {
    const Part part(sizes);
    const Adam<T> adam{T(numbers[0]), T(numbers[1]), T(numbers[2]), T(numbers[3]), T(numbers[4]),
                       T(numbers[5]), T(numbers[6]), T(numbers[7]), T(numbers[8])};
    T *value = as<T>(arrays[0]);
    const T *gradient = as<T>(arrays[1]);
    Moment<true> m{as<std::uint8_t>(arrays[2]), as<float>(arrays[3]), as<float>(arrays[6]), part.agreed, part.writes,
                   {as<float>(arrays[8]), as<float>(arrays[9])}};
    Moment<false> v{as<std::uint8_t>(arrays[4]), as<float>(arrays[5]), as<float>(arrays[7]), part.agreed, part.writes,
                    {as<float>(arrays[10]), as<float>(arrays[11])}};
    for (std::int64_t unit = part.first_unit; unit < part.last_unit; unit++)
        for (std::int64_t column = 0; column < part.geometry.wide; column++) {
            const Tile tile = tile_at(unit, column, part.geometry);
            const std::int64_t number = unit * part.geometry.wide + column;
            m.load(tile);
            v.load(tile);
            for (int row = 0; row < tile.height; row++)
                adam.update(value + tile.row(row), gradient + tile.row(row), m.decoded + row * tile.width,
                            v.decoded + row * tile.width, m.scales[number], v.scales[number], tile.width);
            m.store(tile, number);
            v.store(tile, number);
        }
}

template <class T> struct Lion {
    T lr, keep, ahead, weight;

    void update(T *__restrict__ value, const T *__restrict__ gradient, float *__restrict__ average, float top,
                int n) const {
        for (int i = 0; i < n; i++) {
            const T before = average[i] * top;
            const T apart = gradient[i] - before;
            const T direction = before + apart * ahead;
            value[i] = value[i] * keep - (direction > 0 ? lr : direction < 0 ? -lr : T(0));
            average[i] = before + apart * weight;
        }
    }
};

// Arrays: value, gradient, codes, scales, largest magnitudes, values and limits of the signed code. Sizes: as in Part.
// Numbers: as in Lion, which are those of the kernel `lion`.
template <class T> void lion_tiles(Arrays arrays, Sizes sizes, Numbers numbers) {
    const Part part(sizes);
    const Lion<T> lion{T(numbers[0]), T(numbers[1]), T(numbers[2]), T(numbers[3])};
    T *value = as<T>(arrays[0]);
    const T *gradient = as<T>(arrays[1]);
    Moment<true> m{as<std::uint8_t>(arrays[2]), as<float>(arrays[3]), as<float>(arrays[4]), part.agreed, part.writes,
                   {as<float>(arrays[5]), as<float>(arrays[6])}};
    for (std::int64_t unit = part.first_unit; unit < part.last_unit; unit++)
        for (std::int64_t column = 0; column < part.geometry.wide; column++) {
            const Tile tile = tile_at(unit, column, part.geometry);
            const std::int64_t number = unit * part.geometry.wide + column;
            m.load(tile);
            for (int row = 0; row < tile.height; row++)
                lion.update(value + tile.row(row), gradient + tile.row(row), m.decoded + row * tile.width,
                            m.scales[number], tile.width);
            m.store(tile, number);
        }
}

} // namespace

EXPORT(adam_tiles)
EXPORT(lion_tiles)
