// Attention over a paged cache: one online softmax (Milakov, Gimelshein 2018; Dao et al. 2022) for decoding and chunks.
//
// Keys are visited 64 at a time and summed up over 512 at a time, counted from the sequence's first key. So neither the
// chunks in which a prompt came, nor the threads, nor other sequences change a bit of the result.
//
// The cache of a layer is made of tiles of up to 16 keys of one head: a block has `tiles_per_block` of them for each
// head, heads after one another. With depth D (`Products`), of elements per 32-bit lane, tiles are
//   keys    [head_dim / D][16 keys][D]      so that 16 scores are 16 lanes
//   values  [16 keys / D][head_dim][D]      so that channels are lanes
// Codes (cache_format.h) lie in the same order, D being that of what they are multiplied as, and their 16 scales behind
// them. A group of tiles is widened once for all of its rows, into memory that stays in the nearest cache.
#pragma once

#include <algorithm>
#include <cmath>

#include "cache_format.h"
#include "tiles.h"

namespace modelworks {

constexpr int kTileKeys = kLanes;
constexpr int kGroupTiles = 4;  // tiles that are scored together
constexpr int kGroupKeys = kGroupTiles * kTileKeys;
constexpr int kPartTiles = 32;  // tiles whose softmax is made on its own and then merged
constexpr float kLowest = -1e30f;  // finite, as differences of it are taken

#ifdef __AVX512F__
constexpr int kAttentionRows = 6;
#else
constexpr int kAttentionRows = 1;
#endif

struct CacheShape {
  int n_kv_heads, head_dim, padded_dim;  // padded to whole vectors
  int block_size, tiles_per_block;
  int scale_size;  // elements of the cache that the scale of one vector takes

  ptrdiff_t tile_numbers() const { return ptrdiff_t{kTileKeys} * padded_dim; }
  ptrdiff_t tile_size() const { return tile_numbers() + kTileKeys * scale_size; }
  ptrdiff_t block_elements() const { return tile_size() * tiles_per_block * n_kv_heads; }
  int n_tiles(int n_keys) const {
    return n_keys / block_size * tiles_per_block + divide_up(n_keys % block_size, kTileKeys);
  }
  int first_key(int tile) const { return tile / tiles_per_block * block_size + tile % tiles_per_block * kTileKeys; }
  int keys_in(int tile) const { return std::min(kTileKeys, block_size - tile % tiles_per_block * kTileKeys); }
};

template <class Stored>
struct LayerCache {
  Stored* keys;
  Stored* values;
};

// The scales of a tile of codes.
template <class Stored>
auto* scales_of(const CacheShape& shape, Stored* tile) {
  using Scale = std::conditional_t<std::is_const_v<Stored>, const float, float>;
  return reinterpret_cast<Scale*>(tile + shape.tile_numbers());
}

// One head of one sequence's cache.
template <class Stored>
struct HeadCache {
  const CacheShape& shape;
  LayerCache<Stored> layer;
  const int32_t* table;  // blocks of the sequence
  int head;
  const int32_t* key_positions;  // of each slot; for windows

  ptrdiff_t offset(int tile) const {
    const ptrdiff_t block = table[tile / shape.tiles_per_block];
    const ptrdiff_t in_block = ptrdiff_t{head} * shape.tiles_per_block + tile % shape.tiles_per_block;
    return block * shape.block_elements() + in_block * shape.tile_size();
  }
  Ints positions(int tile) const {
    const ptrdiff_t slot = ptrdiff_t{table[tile / shape.tiles_per_block]} * shape.block_size +
                           tile % shape.tiles_per_block * kTileKeys;
    return *reinterpret_cast<const IntsInMemory*>(key_positions + slot);
  }
};

// What a row may see: its first `n_visible` keys, of those the ones after position `after`.
struct Sight {
  int n_visible;
  int after;
};

// Softmax in the making, for rows of (padded_dim,). Scores are in units of log 2.
struct Softmax {
  float* best;   // largest score
  float* total;  // sum of weights 2^(score - best)
  float* mixed;  // the values' sum by these weights

  void clear(int n_rows, int padded_dim) {
    std::fill_n(best, n_rows, kLowest);
    std::fill_n(total, n_rows, 0.0f);
    std::fill_n(mixed, ptrdiff_t{n_rows} * padded_dim, 0.0f);
  }

  void merge(const Softmax& other, int n_rows, int padded_dim) {
    for (int r = 0; r < n_rows; r++) {
      const float largest = std::max(best[r], other.best[r]);
      const Floats ours = power_of_two(broadcast(best[r] - largest));
      const Floats theirs = power_of_two(broadcast(other.best[r] - largest));
      best[r] = largest;
      total[r] = total[r] * ours[0] + other.total[r] * theirs[0];
      float* into = mixed + ptrdiff_t{r} * padded_dim;
      const float* from = other.mixed + ptrdiff_t{r} * padded_dim;
      for (int i = 0; i < padded_dim; i += kLanes) store(into + i, load(into + i) * ours + load(from + i) * theirs);
    }
  }
};

template <class Kv, int kRows>
[[gnu::noinline]] void score_rows(const Kv* queries, int padded_dim, const Kv* const* tiles, float* scores) {
  using P = Products<Kv>;
  const Kv* const columns[kGroupTiles] = {tiles[0], tiles[1], tiles[2], tiles[3]};
  Tile<kRows, kGroupTiles> tile = {};
  multiply_add<Kv, kRows, kGroupTiles>(tile, queries, padded_dim, columns, kTileKeys * P::kDepth,
                                       padded_dim / P::kDepth);
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kGroupTiles; v++) store(scores + r * kGroupKeys + v * kTileKeys, tile.sums[r][v]);
}

template <class Kv, int kRows, int kVectors>
[[gnu::noinline]] void mix_rows(const Kv* weights, const Kv* const* tiles, int n_keys, int channel, int padded_dim,
                                float* mixed) {
  using P = Products<Kv>;
  Tile<kRows, kVectors> tile;
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++) tile.sums[r][v] = load(mixed + r * padded_dim + channel + v * kLanes);
  for (int key = 0; key < n_keys; key += kTileKeys) {
    const Kv* columns[kVectors];
    for (int v = 0; v < kVectors; v++)
      columns[v] = tiles[key / kTileKeys] + ptrdiff_t{channel + v * kLanes} * P::kDepth;
    // Not a pair further than there are keys: what lies there is another sequence's, and may be infinite.
    const int steps = divide_up(std::min(n_keys - key, kTileKeys), P::kDepth);
    multiply_add<Kv, kRows, kVectors>(tile, weights + key, kGroupKeys, columns, ptrdiff_t{padded_dim} * P::kDepth,
                                      steps);
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++) store(mixed + r * padded_dim + channel + v * kLanes, tile.sums[r][v]);
}

template <class Kv, int kRows>
void mix_channels(const Kv* weights, const Kv* const* tiles, int n_keys, int padded_dim, float* mixed) {
  int channel = 0;
  for (; channel + 4 * kLanes <= padded_dim; channel += 4 * kLanes)
    mix_rows<Kv, kRows, 4>(weights, tiles, n_keys, channel, padded_dim, mixed);
  for (; channel < padded_dim; channel += kLanes)
    mix_rows<Kv, kRows, 1>(weights, tiles, n_keys, channel, padded_dim, mixed);
}

template <class Kv, int kRows = kAttentionRows>
void score_some_rows(int n_rows, const Kv* queries, int padded_dim, const Kv* const* tiles, float* scores) {
  if constexpr (kRows > 1) {
    if (n_rows < kRows) return score_some_rows<Kv, kRows - 1>(n_rows, queries, padded_dim, tiles, scores);
  }
  score_rows<Kv, kRows>(queries, padded_dim, tiles, scores);
}

template <class Kv, int kRows = kAttentionRows>
void mix_some_rows(int n_rows, const Kv* weights, const Kv* const* tiles, int n_keys, int padded_dim, float* mixed) {
  if constexpr (kRows > 1) {
    if (n_rows < kRows) return mix_some_rows<Kv, kRows - 1>(n_rows, weights, tiles, n_keys, padded_dim, mixed);
  }
  mix_channels<Kv, kRows>(weights, tiles, n_keys, padded_dim, mixed);
}

// Scores (kGroupKeys,) of one row become weights of the values as they are stored: of codes, times their scales. What was
// mixed before is brought to their scale.
template <class Stored, class Kv>
void soften(const CacheShape& shape, const Stored* const* values, float* scores, Kv* weights, float& best, float& total,
            float* mixed) {
  Floats score[kGroupTiles];
  for (int v = 0; v < kGroupTiles; v++) score[v] = load(scores + v * kLanes);
  const float here = largest_of(larger(larger(score[0], score[1]), larger(score[2], score[3])));
  if (here > best) {
    const Floats scale = power_of_two(broadcast(best - here));
    total *= scale[0];
    for (int i = 0; i < shape.padded_dim; i += kLanes) store(mixed + i, load(mixed + i) * scale);
    best = here;
  }
  Floats sum = {};
  for (int v = 0; v < kGroupTiles; v++) {
    const Floats weight = power_of_two(score[v] - best);
    if constexpr (kIsCode<Stored>) {
      sum += weight;
      const Floats scaled = weight * load(scales_of(shape, values[v]));
      store(weights + v * kLanes, weight == 0.0f ? weight : scaled);  // what is hidden may have any scale
    } else {
      store(weights + v * kLanes, weight);
      sum += load(weights + v * kLanes);  // as rounded: so the weights that are used sum to one
    }
  }
  total += sum_of(sum);
}

// Hides from one row what it may not see of a group of tiles.
template <class Stored>
void hide(const HeadCache<Stored>& cache, const Sight& sight, bool has_window, int first_tile, int n_tiles, float* scores) {
  const Floats hidden = broadcast(-INFINITY);
  for (int v = 0; v < kGroupTiles; v++) {
    const int tile = first_tile + v;
    const int limit =
        v < n_tiles ? std::min(cache.shape.keys_in(tile), sight.n_visible - cache.shape.first_key(tile)) : 0;
    if (limit >= kTileKeys && !has_window) continue;
    Ints visible = kLaneNumbers < limit;
    if (has_window && limit > 0) visible = visible & (cache.positions(tile) > sight.after);
    store(scores + v * kLanes, visible ? load(scores + v * kLanes) : hidden);
  }
}

// Asks for a tile before it is needed. Tiles lie where blocks happen to be, so that the processor cannot foresee them.
template <class Stored>
void fetch_tile(const CacheShape& shape, const Stored* tile) {
  const char* from = reinterpret_cast<const char*>(tile);
  for (ptrdiff_t i = 0; i < shape.tile_size() * ptrdiff_t{sizeof(Stored)}; i += 64)
    __builtin_prefetch(from + i, 0, 2);
}

// Tiles as they are multiplied: where they lie, or in `wide`. The last one up to `n_numbers`.
template <class Stored, class Kv>
void widen_tiles(const CacheShape& shape, const Stored* const* tiles, int n_tiles, ptrdiff_t n_numbers, Kv* wide,
                 const Kv** out) {
  for (int v = 0; v < kGroupTiles; v++) {
    if constexpr (kIsCode<Stored>) {
      out[v] = wide + std::min(v, n_tiles - 1) * shape.tile_numbers();
      if (v < n_tiles)
        widen(tiles[v], v == n_tiles - 1 ? n_numbers : shape.tile_numbers(), wide + v * shape.tile_numbers());
    } else {
      out[v] = tiles[v];
    }
  }
}

// Memory for one group: scores and weights (n_rows, kGroupKeys), and kGroupTiles tiles.
template <class Kv>
struct GroupScratch {
  float* scores;
  Kv* weights;
  Kv* wide;
};

// The softmax of `queries` (n_rows, padded_dim) over tiles `begin` to `end`, of which no row sees more than `n_keys`.
template <class Stored, class Kv>
void attend_tiles(const HeadCache<Stored>& cache, const Kv* queries, const Sight* sights, int n_rows, bool has_window,
                  int n_keys, int begin, int end, GroupScratch<Kv> scratch, Softmax softmax) {
  const CacheShape& shape = cache.shape;
  const int padded_dim = shape.padded_dim;
  softmax.clear(n_rows, padded_dim);
  int fewest = n_keys;
  for (int r = 0; r < n_rows; r++) fewest = std::min(fewest, sights[r].n_visible);
  for (int first = begin; first < end; first += kGroupTiles) {
    const int n_tiles = std::min(kGroupTiles, end - first);
    if (has_window) {  // rows are in order of position: the first sees furthest back
      bool seen = false;
      for (int v = 0; v < n_tiles && !seen; v++) {
        const int limit = std::min(shape.keys_in(first + v), n_keys - shape.first_key(first + v));
        const Ints visible = (kLaneNumbers < limit) & (cache.positions(first + v) > sights[0].after);
        for (int lane = 0; lane < kLanes; lane++) seen = seen || visible[lane];
      }
      if (!seen) continue;
    }
    const Stored* keys[kGroupTiles];
    const Stored* values[kGroupTiles];
    const Kv* columns[kGroupTiles];
    bool whole = n_tiles == kGroupTiles && !has_window;
    for (int v = 0; v < kGroupTiles; v++) {
      const ptrdiff_t offset = cache.offset(first + std::min(v, n_tiles - 1));
      keys[v] = cache.layer.keys + offset, values[v] = cache.layer.values + offset;
      whole = whole && shape.keys_in(first + v) == kTileKeys && shape.first_key(first + v) + kTileKeys <= fewest;
    }
    for (int v = 0; v < n_tiles; v++) fetch_tile(shape, values[v]);
    widen_tiles(shape, keys, n_tiles, shape.tile_numbers(), scratch.wide, columns);
    for (int r = 0; r < n_rows; r += kAttentionRows)
      score_some_rows<Kv>(std::min(kAttentionRows, n_rows - r), queries + ptrdiff_t{r} * padded_dim, padded_dim, columns,
                          scratch.scores + ptrdiff_t{r} * kGroupKeys);
    for (int tile = first + kGroupTiles; tile < std::min(end, first + 2 * kGroupTiles); tile++)
      fetch_tile(shape, cache.layer.keys + cache.offset(tile));
    for (int r = 0; r < n_rows; r++) {
      float* row = scratch.scores + ptrdiff_t{r} * kGroupKeys;
      if constexpr (kIsCode<Stored>) {
        for (int v = 0; v < kGroupTiles; v++)
          store(row + v * kLanes, load(row + v * kLanes) * load(scales_of(shape, keys[v])));
      }
      if (!whole) hide(cache, sights[r], has_window, first, n_tiles, row);
      soften(shape, values, row, scratch.weights + ptrdiff_t{r} * kGroupKeys, softmax.best[r], softmax.total[r],
             softmax.mixed + ptrdiff_t{r} * padded_dim);
    }
    // Lanes from here on hold nothing of this sequence. Tiles that are not full lie at the end, or in small blocks.
    const int last = first + n_tiles - 1;
    const int in_last = std::min(shape.keys_in(last), n_keys - shape.first_key(last));
    const int lanes = (n_tiles - 1) * kTileKeys + in_last;
    widen_tiles(shape, values, n_tiles, ptrdiff_t{round_up(in_last, Products<Kv>::kDepth)} * padded_dim, scratch.wide,
                columns);
    for (int r = 0; r < n_rows; r += kAttentionRows)
      mix_some_rows<Kv>(std::min(kAttentionRows, n_rows - r), scratch.weights + ptrdiff_t{r} * kGroupKeys, columns,
                        lanes, padded_dim, softmax.mixed + ptrdiff_t{r} * padded_dim);
  }
}

// Stores a key and a value (padded_dim,) in `slot`. codes: scratch (padded_dim,).
// next_is_stored: the key after it is of this step too, and may be stored by another thread at the same time.
template <class Stored, class Kv>
void store_key_value(const CacheShape& shape, LayerCache<Stored> layer, int head, int64_t slot, bool next_is_stored,
                     const float* key, const float* value, Stored* codes) {
  constexpr int kDepth = Products<Kv>::kDepth;
  const ptrdiff_t block = slot / shape.block_size;
  const int in_block = static_cast<int>(slot % shape.block_size);
  const int lane = in_block % kTileKeys;
  const ptrdiff_t tile = block * shape.block_elements() +
                         (ptrdiff_t{head} * shape.tiles_per_block + in_block / kTileKeys) * shape.tile_size();
  // A value's neighbour in the lane is multiplied with a weight of zero until it is stored: it must be finite, as codes
  // always are.
  const bool clear_neighbour =
      kDepth == 2 && !kIsCode<Stored> && lane % 2 == 0 && !(next_is_stored && in_block + 1 < shape.block_size);
  const float key_scale = encode(key, shape.padded_dim, codes);
  for (int c = 0; c < shape.padded_dim; c++)
    layer.keys[tile + ptrdiff_t{c / kDepth * kTileKeys + lane} * kDepth + c % kDepth] = codes[c];
  const float value_scale = encode(value, shape.padded_dim, codes);
  for (int c = 0; c < shape.padded_dim; c++) {
    Stored* pair = layer.values + tile + (ptrdiff_t{lane / kDepth} * shape.padded_dim + c) * kDepth;
    pair[lane % kDepth] = codes[c];
    if (clear_neighbour) pair[1] = Stored{};
  }
  if constexpr (kIsCode<Stored>) {
    scales_of(shape, layer.keys + tile)[lane] = key_scale;
    scales_of(shape, layer.values + tile)[lane] = value_scale;
  }
}

}  // namespace modelworks
