// Attention over a paged cache: one online softmax (Milakov, Gimelshein 2018; Dao et al. 2022) for decoding and chunks.
//
// Keys are visited 64 at a time and summed up over 512 at a time, counted from the sequence's first key. So neither the
// chunks in which a prompt came, nor the threads, nor other sequences change a bit of the result.
#pragma once

#include <algorithm>
#include <cmath>

#include "cache.h"
#include "tiles.h"

namespace modelworks {

constexpr int kPartTiles = 32;  // tiles whose softmax is made on its own and then merged
constexpr float kLowest = -1e30f;  // finite, as differences of it are taken

#ifdef __AVX512F__
constexpr int kAttentionRows = 6;
#else
constexpr int kAttentionRows = 1;
#endif

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

// Scores (kGroupKeys,) of one row become weights of the values as they are stored: of codes, times their scales. What
// was mixed before is brought to their measure.
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
void hide(const HeadCache<Stored>& cache, const Sight& sight, bool has_window, int first_tile, int n_tiles,
          float* scores) {
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
      score_some_rows<Kv>(std::min(kAttentionRows, n_rows - r), queries + ptrdiff_t{r} * padded_dim, padded_dim,
                          columns, scratch.scores + ptrdiff_t{r} * kGroupKeys);
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

}  // namespace modelworks
