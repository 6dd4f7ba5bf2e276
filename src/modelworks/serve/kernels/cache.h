// How keys and values lie in memory.
//
// The cache of a layer is made of tiles of up to 16 keys of one head: a block has `tiles_per_block` of them for each
// head, heads after one another. With depth D (`Products`), of elements per 32-bit lane, tiles are
//   keys    [head_dim / D][16 keys][D]      so that 16 scores are 16 lanes
//   values  [16 keys / D][head_dim][D]      so that channels are lanes
// Codes (cache_format.h) lie in the same order, D being that of what they are multiplied as, and their 16 scales behind
// them. A group of tiles is widened once for all of its rows, into memory that stays in the nearest cache.
#pragma once

#include <algorithm>

#include "cache_format.h"

namespace modelworks {

constexpr int kTileKeys = kLanes;
constexpr int kGroupTiles = 4;  // tiles that are scored together
constexpr int kGroupKeys = kGroupTiles * kTileKeys;

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
