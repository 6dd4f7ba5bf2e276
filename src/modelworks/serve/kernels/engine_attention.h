// How an engine's step attends: from the products' q, k and v to what the output product reads.
#pragma once

#include "engine.h"

namespace modelworks {

template <class Element, class Stored>
void TypedEngine<Element, Stored>::attend(Turn& turn, const LayerWeights& layer) {
  Scratch& scratch = scratch_[turn.thread];
  const int n_heads = shape_.n_kv_heads;
  phase(turn, Phase::kAttention, static_cast<int>(turn.numbers[3]), [&](int token) {
    const int32_t* starts = batch_->starts;
    const int sequence = static_cast<int>(std::upper_bound(starts, starts + batch_->n_sequences, token) - starts) - 1;
    for (int head = 0; head < n_heads; head++)
      store_keys(layer, head, sequence, token, token + 1, 0, batch_->lengths[sequence], scratch);
  });
  phase(turn, Phase::kAttention, static_cast<int>(turn.numbers[2]),
        [&](int i) { attend_piece(layer, plan_.pieces[i / n_heads], i % n_heads, scratch); });
}

// A head's part of a row of q, k and v: normed, rotated, and zeros behind it.
template <class Element, class Stored>
void TypedEngine<Element, Stored>::prepare_head(int token, int column, const float* norm_weight, float* head) {
  const Batch& batch = *batch_;
  const int head_dim = shape_.head_dim;
  std::memcpy(head, qkv_.data() + ptrdiff_t{token} * qkv_stride_ + column,
              head_dim * sizeof(float));
  if (norm_weight != nullptr)
    normalise(Norm{NormKind::kRms, norm_weight, nullptr, shape_.norm_epsilon}, head, head_dim, 1.0f, head);
  if (batch.cosines != nullptr) {
    const ptrdiff_t angle = batch.positions[token] * (head_dim / 2);
    rotate(head, head_dim, batch.cosines + angle, batch.sines + angle);
  }
}

// Of the tokens `first` to `end`, those whose place among the sequence's keys is from key_begin to key_end.
template <class Element, class Stored>
void TypedEngine<Element, Stored>::store_keys(const LayerWeights& layer, int head, int sequence, int first, int end,
                                          int key_begin, int key_end, Scratch& scratch) {
  const Batch& batch = *batch_;
  float* key = scratch.head.data();
  float* value = key + cache_.padded_dim;
  const int last = batch.starts[sequence + 1] - 1;
  for (int token = first; token < end; token++) {
    const int place = batch.lengths[sequence] - 1 - (last - token);
    if (place < key_begin || place >= key_end) continue;
    const int column = n_query_columns_ + head * shape_.head_dim;
    prepare_head(token, column, layer.key_norm, key);
    std::memcpy(value, qkv_.data() + ptrdiff_t{token} * qkv_stride_ + column + n_key_columns_,
                shape_.head_dim * sizeof(float));
    store_key_value<Stored, Kv>(cache_, cache(layer), head, batch.slots[token], token < last, key, value,
                                scratch.codes.data());
  }
}

template <class Element, class Stored>
void TypedEngine<Element, Stored>::make_queries(const LayerWeights& layer, const AttentionPiece& piece, int head,
                                            Scratch& scratch) {
  const Batch& batch = *batch_;
  const float scale = shape_.score_scale * 1.4426950408889634f;  // scores in units of log 2
  float* query = scratch.head.data();
  const int last = batch.starts[piece.sequence + 1] - 1;
  for (int t = 0, row = 0; t < piece.n_tokens; t++) {
    const int token = piece.first_token + t;
    const int after = static_cast<int>(batch.positions[token]) - shape_.window;
    for (int h = 0; h < heads_per_group_; h++, row++) {
      prepare_head(token, (head * heads_per_group_ + h) * shape_.head_dim, layer.query_norm, query);
      Kv* out = scratch.queries.data() + ptrdiff_t{row} * cache_.padded_dim;
      for (int i = 0; i < cache_.padded_dim; i += kLanes) store(out + i, load(query + i) * scale);
      scratch.sights[row] = {batch.lengths[piece.sequence] - (last - token), after};
    }
  }
}

template <class Element, class Stored>
void TypedEngine<Element, Stored>::attend_piece(const LayerWeights& layer, const AttentionPiece& piece, int head,
                                            Scratch& scratch) {
  const Batch& batch = *batch_;
  const int n_rows = piece.n_tokens * heads_per_group_, padded_dim = cache_.padded_dim;
  const int end_token = piece.first_token + piece.n_tokens;
  const bool has_window = shape_.window > 0;
  const int n_keys = batch.lengths[piece.sequence] - (batch.starts[piece.sequence + 1] - end_token);
  if (!plan_.stores_first) {
    const int key_end = piece.split < 0 ? n_keys : std::min(n_keys, cache_.first_key(piece.end));
    store_keys(layer, head, piece.sequence, piece.first_token, end_token, cache_.first_key(piece.begin),
               key_end, scratch);
  }
  make_queries(layer, piece, head, scratch);
  const int32_t* table = batch.tables + ptrdiff_t{piece.sequence} * batch.table_width;
  const HeadCache<Stored> keys{cache_, cache(layer), table, head, weights_.key_positions};
  const auto attend_part = [&](int begin, int end, Softmax into) {
    attend_tiles(keys, scratch.queries.data(), scratch.sights.data(), n_rows, has_window, n_keys, begin, end,
                 GroupScratch<Kv>{scratch.scores.data(), scratch.weights.data(), scratch.wide.data()}, into);
  };
  const Softmax part{scratch.best.data(), scratch.total.data(), scratch.mixed.data()};
  Softmax merged{scratch.merged_best.data(), scratch.merged_total.data(), scratch.merged_mixed.data()};
  if (piece.split >= 0) {
    attend_part(piece.begin, piece.end, state(piece.first_state + piece.begin / kPartTiles, head));
    std::atomic<int>& done = parts_done_[piece.split * shape_.n_kv_heads + head];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < piece.n_parts) return;
    done.store(0, std::memory_order_relaxed);
    merged.clear(n_rows, padded_dim);
    for (int i = 0; i < piece.n_parts; i++) merged.merge(state(piece.first_state + i, head), n_rows, padded_dim);
  } else if (piece.end <= kPartTiles) {
    attend_part(0, piece.end, merged);  // merging it with nothing would change nothing
  } else {
    merged.clear(n_rows, padded_dim);
    for (int begin = 0; begin < piece.end; begin += kPartTiles) {
      attend_part(begin, std::min(piece.end, begin + kPartTiles), part);
      merged.merge(part, n_rows, padded_dim);
    }
  }
  finish_rows(piece, head, merged);
}

template <class Element, class Stored>
void TypedEngine<Element, Stored>::finish_rows(const AttentionPiece& piece, int head, const Softmax& softmax) {
  for (int t = 0, row = 0; t < piece.n_tokens; t++) {
    for (int h = 0; h < heads_per_group_; h++, row++) {
      const float* from = softmax.mixed + ptrdiff_t{row} * cache_.padded_dim;
      const float scale = 1.0f / softmax.total[row];
      Element* out = attended_.data() + ptrdiff_t{piece.first_token + t} * attended_stride_ +
                     (head * heads_per_group_ + h) * shape_.head_dim;
      int i = 0;
      for (; i + kLanes <= shape_.head_dim; i += kLanes) store(out + i, load(from + i) * scale);
      for (; i < shape_.head_dim; i++) store_one(out + i, from[i] * scale);
    }
  }
}

template <class Element, class Stored>
Softmax TypedEngine<Element, Stored>::state(int index, int head) {
  const int rows = std::max(kQueryRows, heads_per_group_);
  const ptrdiff_t first = (ptrdiff_t{index} * shape_.n_kv_heads + head) * rows;
  return {state_best_.data() + first, state_total_.data() + first, state_mixed_.data() + first * cache_.padded_dim};
}

}  // namespace modelworks
