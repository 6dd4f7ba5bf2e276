// Moments in 8 bits in one pass: decode a tile, update, measure its largest magnitude, encode it again.
//
// What a tile decodes to stays in the first-level cache; beside codes and scales nothing is written but the weights.
// Tiles are those of `codec.Blocks`, whose operations give the same codes. Two at a time take each of these steps
// together: one alone would wait for its scale before its codes, and more push the tables out of that cache. What comes
// next is left to the processor to foresee: asking for it held up the arithmetic, which is what takes the time.

#include <cstring>

#include "dynamic_code.h"
#include "kernel.h"

namespace {

// `Blocks.geometry`: the shard seen as (stacked, rows, columns), a tile's height and width, how much of the first tile
// lies above and to the left elsewhere, and rows and columns of tiles.
struct Geometry {
    std::int64_t stacked, rows, columns, height, width, above, left, tall, wide;
};

constexpr int TOGETHER = 2;

// A tile as far as it is here: which one, its first element, its rows and columns, and from row to row.
struct Tile {
    std::int64_t number, start;
    int height, width;
    std::int64_t stride;

    int size() const { return height * width; }
    bool is_run() const { return height == 1 && width == TILE; } // a whole one, whose codes lie together
    std::int64_t row(int number) const { return start + number * stride; }

    void gather(const std::uint8_t *codes, std::uint8_t *together) const {
        for (int r = 0; r < height; r++) std::memcpy(together + r * width, codes + row(r), width);
    }
    void scatter(const std::uint8_t *together, std::uint8_t *codes) const {
        for (int r = 0; r < height; r++) std::memcpy(codes + row(r), together + r * width, width);
    }
};

// Goes from one tile to the next; without divisions, which would take as long as a row's decoding.
class Tiles {
  public:
    Tiles(std::int64_t first_unit, const Geometry &geometry)
        : number_(first_unit * geometry.wide), stack_(first_unit / geometry.tall),
          tile_row_(first_unit % geometry.tall), geometry_(geometry) {}

    Tile next() {
        const Geometry &g = geometry_;
        const std::int64_t top = std::max<std::int64_t>(0, tile_row_ * g.height - g.above);
        const std::int64_t bottom = std::min(g.rows, (tile_row_ + 1) * g.height - g.above);
        const std::int64_t first = std::max<std::int64_t>(0, column_ * g.width - g.left);
        const std::int64_t last = std::min(g.columns, (column_ + 1) * g.width - g.left);
        const std::int64_t start = (stack_ * g.rows + top) * g.columns + first;
        if (++column_ == g.wide) {
            column_ = 0;
            if (++tile_row_ == g.tall) tile_row_ = 0, stack_++;
        }
        return {number_++, start, int(bottom - top), int(last - first), g.columns};
    }

  private:
    std::int64_t number_, stack_, tile_row_, column_ = 0;
    const Geometry &geometry_;
};

// Of a magnitude as bits, which sort as floats do: as `Blocks.largest`, infinity counts as the largest float, and not a
// number wins.
float as_scale(std::int32_t bits) { return std::bit_cast<float>(bits == 0x7F800000 ? 0x7F7FFFFF : bits); }

std::int32_t magnitude(float value) { return std::bit_cast<std::int32_t>(value) & 0x7FFFFFFF; }

// One moment of a shard, and what some tiles of it decode to.
template <bool SIGNED> struct Moment {
    std::uint8_t *codes;
    float *scales, *largest; // of each tile; `largest` is read where it is agreed on, written otherwise
    bool agreed, writes;     // writes: codes and scales; without, only `largest`
    DynamicCode<SIGNED> code;
    alignas(64) float decoded[TOGETHER][TILE] = {};
    std::int32_t top[TOGETHER] = {}; // the largest magnitude of what was updated, as bits
    alignas(64) std::uint8_t own[TILE] = {};

    void load(const Tile &tile, int k) {
        if (tile.is_run()) {
            code.decode(codes + tile.start, decoded[k], TILE);
        } else {
            tile.gather(codes, own);
            code.decode(own, decoded[k], tile.size());
        }
        top[k] = 0;
    }

    void store(const Tile &tile, int k) {
        if (!agreed) largest[tile.number] = as_scale(top[k]);
        if (!writes) return;
        scales[tile.number] = largest[tile.number];
        if (tile.is_run()) {
            code.encode(decoded[k], scales[tile.number], codes + tile.start, TILE);
        } else {
            code.encode(decoded[k], scales[tile.number], own, tile.size());
            tile.scatter(own, codes);
        }
    }
};

struct Part {
    std::int64_t first_unit, last_unit; // rows of tiles
    bool agreed, writes;
    Geometry geometry;

    explicit Part(Sizes s)
        : first_unit(s[0]), last_unit(s[1]), agreed(s[2]), writes(s[3]),
          geometry{s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12]} {}

    // update(tile, which of those together): all of a tile's elements, once its moments are decoded.
    template <class Update, class... Moments> void each_tile(Update update, Moments &...moments) const {
        Tiles all(first_unit, geometry);
        std::int64_t left = (last_unit - first_unit) * geometry.wide;
        for (; left > 0; left -= TOGETHER) {
            const int n = std::min<std::int64_t>(TOGETHER, left);
            Tile tiles[TOGETHER];
            for (int k = 0; k < n; k++) tiles[k] = all.next();
            for (int k = 0; k < n; k++) (moments.load(tiles[k], k), ...);
            for (int k = 0; k < n; k++) update(tiles[k], k);
            for (int k = 0; k < n; k++) (moments.store(tiles[k], k), ...);
        }
    }
};

template <class T> struct Adam {
    T weight1, weight2, keep2, scale1, scale2, eps, lr, keep, decay;

    void update(T *__restrict__ value, const T *__restrict__ gradient, float *__restrict__ first,
                float *__restrict__ second, float of_first, float of_second, std::int32_t &top1, std::int32_t &top2,
                int n) const {
        std::int32_t largest1 = top1, largest2 = top2;
        for (int i = 0; i < n; i++) {
            const T g = gradient[i] + decay * value[i];
            T moved1 = first[i] * of_first;
            moved1 = moved1 + (g - moved1) * weight1;
            const T moved2 = T(second[i] * of_second) * keep2 + (weight2 * g) * g;
            first[i] = moved1;
            second[i] = moved2;
            largest1 = std::max(largest1, magnitude(moved1));
            largest2 = std::max(largest2, magnitude(moved2));
            const T direction = moved1 * scale1 / (std::sqrt(moved2) * scale2 + eps);
            value[i] = value[i] * keep - lr * direction;
        }
        top1 = largest1;
        top2 = largest2;
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
    const auto update = [&](const Tile &tile, int k) {
        for (int row = 0; row < tile.height; row++)
            adam.update(value + tile.row(row), gradient + tile.row(row), m.decoded[k] + row * tile.width,
                        v.decoded[k] + row * tile.width, m.scales[tile.number], v.scales[tile.number], m.top[k],
                        v.top[k], tile.width);
    };
    part.each_tile(update, m, v);
}

template <class T> struct Lion {
    T lr, keep, ahead, weight;

    void update(T *__restrict__ value, const T *__restrict__ gradient, float *__restrict__ average, float of_average,
                std::int32_t &top, int n) const {
        std::int32_t largest = top;
        for (int i = 0; i < n; i++) {
            const T before = average[i] * of_average;
            const T apart = gradient[i] - before;
            const T direction = before + apart * ahead;
            value[i] = value[i] * keep - (direction > 0 ? lr : direction < 0 ? -lr : T(0));
            const float moved = before + apart * weight;
            average[i] = moved;
            largest = std::max(largest, magnitude(moved));
        }
        top = largest;
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
    const auto update = [&](const Tile &tile, int k) {
        for (int row = 0; row < tile.height; row++)
            lion.update(value + tile.row(row), gradient + tile.row(row), m.decoded[k] + row * tile.width,
                        m.scales[tile.number], m.top[k], tile.width);
    };
    part.each_tile(update, m);
}

} // namespace

EXPORT(adam_tiles)
EXPORT(lion_tiles)
