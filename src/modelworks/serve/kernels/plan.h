// How a batch's attention is cut into pieces of work, once a step for all layers.
//
// A piece is some neighbouring tokens of one sequence, for one head of its cache (all query heads of that group). Where
// a sequence has only so few tokens, each part of its keys is a piece too, so that one long context is shared by all
// threads; who finishes last merges them, always in the same order.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "interface.h"

namespace modelworks {

constexpr int kQueryRows = 48;  // tokens times query heads of a group, at most, in a piece

struct AttentionPiece {
  int sequence, first_token, n_tokens;
  int begin, end;   // tiles of the cache
  int split;        // which of those that are merged it belongs to; -1: none
  int first_state;  // of a split: where its parts' results lie
  int n_parts;
};

struct AttentionPlan {
  std::vector<AttentionPiece> pieces;
  int n_splits = 0, n_states = 0;
  bool stores_first = false;  // keys are stored by pieces of their own, as several pieces read them

  void make(const Batch& batch, const CacheShape& shape, int heads_per_group) {
    pieces.clear();
    n_splits = n_states = 0;
    stores_first = false;
    const int tokens_per_piece = std::max(1, kQueryRows / heads_per_group);
    for (int s = 0; s < batch.n_sequences; s++) {
      const int first = batch.starts[s], end = batch.starts[s + 1];
      if (end - first > tokens_per_piece) stores_first = true;
      // From the last, which see the most, so that the small pieces come at the end and even out.
      for (int stop = end; stop > first; stop -= tokens_per_piece)
        add(batch, shape, s, std::max(first, stop - tokens_per_piece), stop, end - first <= tokens_per_piece);
    }
    std::stable_sort(pieces.begin(), pieces.end(), [](const AttentionPiece& a, const AttentionPiece& b) {
      return (a.end - a.begin) * a.n_tokens > (b.end - b.begin) * b.n_tokens;
    });
  }

 private:
  void add(const Batch& batch, const CacheShape& shape, int sequence, int first, int stop, bool may_split) {
    const int n_keys = batch.lengths[sequence] - (batch.starts[sequence + 1] - stop);
    const int n_tiles = shape.n_tiles(n_keys);
    const int n_parts = may_split ? divide_up(n_tiles, kPartTiles) : 1;
    if (n_parts == 1) {
      pieces.push_back({sequence, first, stop - first, 0, n_tiles, -1, 0, 1});
      return;
    }
    for (int part = 0; part < n_parts; part++) {
      const int begin = part * kPartTiles;
      pieces.push_back({sequence, first, stop - first, begin, std::min(n_tiles, begin + kPartTiles), n_splits,
                        n_states, n_parts});
    }
    n_splits++, n_states += n_parts;
  }
};

}  // namespace modelworks
