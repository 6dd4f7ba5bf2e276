#include "engine.h"

namespace modelworks {
namespace {

constexpr int kAloneRows = 4;  // up to so many rows are normed by every thread for itself: a phase would take longer

Floats with_bias(Floats x, const float* bias, int column) { return bias != nullptr ? x + load(bias + column) : x; }

}  // namespace

BatchError Engine::check(const Batch& batch) const {
  const int64_t n_slots = int64_t{shape_.n_blocks} * shape_.block_size;
  const bool has_positions = batch.cosines != nullptr || weights_.positions != nullptr;
  for (int t = 0; t < batch.n_tokens; t++) {
    if (batch.tokens[t] < 0 || batch.tokens[t] >= shape_.vocab_size) return kBadToken;
    if (batch.positions[t] < 0 || (has_positions && batch.positions[t] >= batch.n_positions)) return kBadPosition;
    if (batch.slots[t] < 0 || batch.slots[t] >= n_slots) return kBadSlot;
  }
  for (int s = 0; s < batch.n_sequences; s++) {
    const int n_tokens = batch.starts[s + 1] - batch.starts[s];
    const int n_used = divide_up(batch.lengths[s], shape_.block_size);
    if (n_tokens < 1 || batch.lengths[s] < n_tokens || n_used > batch.table_width) return kBadTable;
    const int32_t* table = batch.tables + int64_t{s} * batch.table_width;
    for (int i = 0; i < n_used; i++)
      if (table[i] < 0 || table[i] >= shape_.n_blocks) return kBadTable;
  }
  if (batch.starts[0] != 0 || batch.starts[batch.n_sequences] != batch.n_tokens) return kBadTable;
  for (int i = 0; i < batch.n_wanted; i++)
    if (batch.wanted[i] < 0 || batch.wanted[i] >= batch.n_tokens) return kBadWanted;
  return kFine;
}

template <class Element, class Stored>
TypedEngine<Element, Stored>::TypedEngine(const ModelShape& shape, const ModelWeights& weights)
    : Engine(shape, weights),
      cache_{shape.n_kv_heads, shape.head_dim, round_up(shape.head_dim, kLanes), shape.block_size,
             divide_up(shape.block_size, kTileKeys), kScaleSize<Stored>},
      n_query_columns_(shape.n_heads * shape.head_dim),
      n_key_columns_(shape.n_kv_heads * shape.head_dim),
      heads_per_group_(shape.n_heads / shape.n_kv_heads),
      stream_stride_(round_up(shape.d_model, kPanel)),
      qkv_stride_(round_up(n_query_columns_ + 2 * n_key_columns_, kPanel)),
      attended_stride_(round_up(n_query_columns_, kPanel)),
      inner_stride_(round_up(shape.d_ff, kPanel)),
      scratch_(shape.n_threads),
      team_(shape.n_threads, [this](Turn& turn) { run_thread(turn); }) {
  const int rows = std::max(kQueryRows, heads_per_group_);
  for (Scratch& scratch : scratch_) {
    scratch.normed.grow(kAloneRows * stream_stride_);
    scratch.queries.grow(rows * cache_.padded_dim);
    scratch.weights.grow(rows * kGroupKeys);
    if (kIsCode<Stored>) scratch.wide.grow(kGroupTiles * cache_.tile_numbers());
    scratch.codes.grow(cache_.padded_dim);
    scratch.scores.grow(rows * kGroupKeys);
    scratch.head.grow(2 * cache_.padded_dim);
    for (Buffer<float>* each : {&scratch.best, &scratch.total, &scratch.merged_best, &scratch.merged_total})
      each->grow(rows);
    for (Buffer<float>* each : {&scratch.mixed, &scratch.merged_mixed}) each->grow(rows * cache_.padded_dim);
    scratch.sights.resize(rows);
  }
}

template <class Element, class Stored>
void TypedEngine<Element, Stored>::run(const Batch& batch) {
  plan_.make(batch, cache_, heads_per_group_);
  grow(batch);
  if (shape_.window > 0)
    for (int t = 0; t < batch.n_tokens; t++)
      weights_.key_positions[batch.slots[t]] = static_cast<int32_t>(batch.positions[t]);
  batch_ = &batch;
  const int64_t n_attention = static_cast<int64_t>(plan_.pieces.size()) * shape_.n_kv_heads;
  team_.run({batch.n_tokens, batch.n_wanted, n_attention, plan_.stores_first ? batch.n_tokens : 0});
}

// On every thread. `batch_` and `plan_` are for pieces of work alone: see threads.h.
template <class Element, class Stored>
void TypedEngine<Element, Stored>::run_thread(Turn& turn) {
  const int n = static_cast<int>(turn.numbers[0]), n_wanted = static_cast<int>(turn.numbers[1]);
  const Activation activation = static_cast<Activation>(shape_.activation);
  const auto nothing = [] {};
  phases_.start(turn.thread);
  phase(turn, Phase::kEmbedding, n, [&](int token) { embed(token); });
  for (int i = 0; i < shape_.n_layers; i++) {
    const LayerWeights& layer = weights_.layers[i];
    const auto qkv = this->qkv(layer), output = this->output(layer), up = this->up(layer), down = this->down(layer);
    const auto next = i + 1 == shape_.n_layers ? head() : this->qkv(weights_.layers[i + 1]);

    product_of_normed(turn, Phase::kQkv, norm(layer.attention_norm, layer.attention_norm_bias), n, false, qkv, output,
                      [&](int row, int panel, const float* sums) {
                        float* out = qkv_.data() + ptrdiff_t{row} * qkv_stride_ + panel * kPanel;
                        for (int c = 0; c < kPanel; c += kLanes)
                          store(out + c, with_bias(load(sums + c), layer.qkv_bias, panel * kPanel + c));
                      });
    attend(turn, layer);
    const auto add_to_stream = [&](const float* bias) {
      return [this, bias](int row, int panel, const float* sums) {
        float* out = stream_.data() + ptrdiff_t{row} * stream_stride_ + panel * kPanel;
        for (int c = 0; c < kPanel; c += kLanes) {
          const Floats change = with_bias(load(sums + c), bias, panel * kPanel + c);
          store(out + c, shape_.residual ? load(out + c) + change : change);
        }
      };
    };
    product(turn, Phase::kOutput, attended_.data(), attended_stride_, n, output, up, nothing,
            add_to_stream(layer.output_bias));
    product_of_normed(turn, Phase::kUp, norm(layer.feed_forward_norm, layer.feed_forward_norm_bias), n, false, up, down,
                      [&](int row, int panel, const float* sums) {
                        const Floats x = with_bias(load(sums), layer.up_bias, panel * kPanel);
                        const Floats y = with_bias(load(sums + kLanes), layer.up_bias, panel * kPanel + kLanes);
                        Element* out = inner_.data() + ptrdiff_t{row} * inner_stride_;
                        if (shape_.gated) {
                          store(out + panel * kLanes, activated(activation, x) * y);
                        } else {
                          store(out + panel * kPanel, activated(activation, x));
                          store(out + panel * kPanel + kLanes, activated(activation, y));
                        }
                      });
    product(turn, Phase::kDown, inner_.data(), inner_stride_, n, down, next, nothing, add_to_stream(layer.down_bias));
  }
  product_of_normed(turn, Phase::kHead, norm(weights_.final_norm, weights_.final_norm_bias), n_wanted, true, head(),
                    qkv(weights_.layers[0]), [&](int row, int panel, const float* sums) {
                      const int column = panel * kPanel, n_columns = std::min(kPanel, shape_.vocab_size - column);
                      std::memcpy(batch_->logits + ptrdiff_t{row} * shape_.vocab_size + column, sums,
                                  n_columns * sizeof(float));
                    });
}

template <class Element, class Stored>
template <class Function>
void TypedEngine<Element, Stored>::phase(Turn& turn, Phase kind, int n_pieces, Function&& do_piece) {
  turn.take(n_pieces, do_piece);
  phases_.mark(turn.thread, kind);
  turn.wait(n_pieces);
  phases_.mark(turn.thread, Phase::kWaiting);
}

template <class Element, class Stored>
template <class Prepare, class Finish>
void TypedEngine<Element, Stored>::product(Turn& turn, Phase kind, const Element* a, ptrdiff_t stride, int n_rows,
                                       const PackedWeight<Element>& weight, const PackedWeight<Element>& following,
                                       Prepare prepare, Finish finish) {
  Product<Element, Prepare, Finish> product(turn, a, stride, n_rows, weight, following, prepare, finish);
  phase(turn, kind, product.n_pieces(), product);
}

// The product of the residual stream's rows (the wanted ones, or all) under a norm.
template <class Element, class Stored>
template <class Finish>
void TypedEngine<Element, Stored>::product_of_normed(Turn& turn, Phase kind, const Norm& norm, int n_rows, bool wanted,
                                                 const PackedWeight<Element>& weight,
                                                 const PackedWeight<Element>& following, Finish finish) {
  const auto normalise_row = [&](int i, Element* rows) {
    const float* x = stream_.data() + ptrdiff_t{wanted ? batch_->wanted[i] : i} * stream_stride_;
    const float multiplier = wanted ? shape_.output_multiplier : 1.0f;
    normalise(norm, x, shape_.d_model, multiplier, rows + ptrdiff_t{i} * stream_stride_);
  };
  if (n_rows > kAloneRows) {
    phase(turn, Phase::kNorms, n_rows, [&](int i) { normalise_row(i, normed_.data()); });
    product(turn, kind, normed_.data(), stream_stride_, n_rows, weight, following, [] {}, finish);
    return;
  }
  Element* const alone = scratch_[turn.thread].normed.data();
  const auto prepare = [&] {
    for (int i = 0; i < n_rows; i++) normalise_row(i, alone);
  };
  product(turn, kind, alone, stream_stride_, n_rows, weight, following, prepare, finish);
}

template <class Element, class Stored>
void TypedEngine<Element, Stored>::embed(int token) {
  const auto* table = static_cast<const Element*>(weights_.embedding) + batch_->tokens[token] * shape_.d_model;
  const auto* positions = static_cast<const Element*>(weights_.positions);
  float* x = stream_.data() + ptrdiff_t{token} * stream_stride_;
  if (positions == nullptr) {
    for (int i = 0; i < shape_.d_model; i++) x[i] = widened(table[i]);
  } else {
    positions += batch_->positions[token] * shape_.d_model;
    for (int i = 0; i < shape_.d_model; i++) x[i] = widened(table[i]) + widened(positions[i]);
  }
}

template <class Element, class Stored>
void TypedEngine<Element, Stored>::copy_blocks(const int64_t* pairs, int64_t n_pairs) {
  const ptrdiff_t size = cache_.block_elements();
  for (const LayerWeights& layer : layers_)
    for (Stored* memory : {cache(layer).keys, cache(layer).values})
      for (int64_t i = 0; i < n_pairs; i++)
        std::memcpy(memory + pairs[2 * i + 1] * size, memory + pairs[2 * i] * size, size * sizeof(Stored));
  if (shape_.window == 0) return;
  int32_t* positions = weights_.key_positions;
  for (int64_t i = 0; i < n_pairs; i++)
    std::memcpy(positions + pairs[2 * i + 1] * shape_.block_size, positions + pairs[2 * i] * shape_.block_size,
                shape_.block_size * sizeof(int32_t));
}

template <class Element, class Stored>
void TypedEngine<Element, Stored>::grow(const Batch& batch) {
  const ptrdiff_t n = batch.n_tokens;
  stream_.grow(n * stream_stride_);
  qkv_.grow(n * qkv_stride_);
  normed_.grow(std::max<ptrdiff_t>(n, batch.n_wanted) * stream_stride_);
  attended_.grow(n * attended_stride_);
  inner_.grow(n * inner_stride_);
  const int rows = std::max(kQueryRows, heads_per_group_);
  const ptrdiff_t n_states = ptrdiff_t{plan_.n_states} * shape_.n_kv_heads * rows;
  state_best_.grow(n_states);
  state_total_.grow(n_states);
  state_mixed_.grow(n_states * cache_.padded_dim);
  const int n_parts = plan_.n_splits * shape_.n_kv_heads;
  if (n_parts > n_parts_done_) {
    parts_done_.reset(new std::atomic<int>[n_parts]());
    n_parts_done_ = n_parts;
  }
}

template <class Element, class Stored>
PackedWeight<Element> TypedEngine<Element, Stored>::packed(const void* panels, int n_outputs, int n_inputs) const {
  return {static_cast<const Element*>(panels), divide_up(n_outputs, kPanel),
          divide_up(n_inputs, Products<Element>::kDepth)};
}

template <class Element, class Stored>
PackedWeight<Element> TypedEngine<Element, Stored>::qkv(const LayerWeights& layer) const {
  return packed(layer.qkv, n_query_columns_ + 2 * n_key_columns_, shape_.d_model);
}

template <class Element, class Stored>
PackedWeight<Element> TypedEngine<Element, Stored>::output(const LayerWeights& layer) const {
  return packed(layer.output, shape_.d_model, n_query_columns_);
}

template <class Element, class Stored>
PackedWeight<Element> TypedEngine<Element, Stored>::up(const LayerWeights& layer) const {
  return packed(layer.up, shape_.gated ? 2 * round_up(shape_.d_ff, kLanes) : shape_.d_ff, shape_.d_model);
}

template <class Element, class Stored>
PackedWeight<Element> TypedEngine<Element, Stored>::down(const LayerWeights& layer) const {
  return packed(layer.down, shape_.d_model, shape_.d_ff);
}

template <class Element, class Stored>
PackedWeight<Element> TypedEngine<Element, Stored>::head() const {
  return packed(weights_.head, shape_.vocab_size, shape_.d_model);
}

}  // namespace modelworks

#include "engine_attention.h"

namespace modelworks {
namespace {

template <class Element>
Engine* open_engine(const ModelShape& shape, const ModelWeights& weights) {
  switch (static_cast<CacheKind>(shape.cache_kind)) {
    case CacheKind::kFloat:  // a cache is no wider than the model
      if constexpr (std::is_same_v<Element, float>) return new TypedEngine<Element, float>(shape, weights);
      break;
    case CacheKind::kBfloat16:
      return new TypedEngine<Element, Bfloat16>(shape, weights);
    case CacheKind::kInt8:
      return new TypedEngine<Element, Int8>(shape, weights);
    case CacheKind::kFloat8:
      return new TypedEngine<Element, Float8>(shape, weights);
  }
  return nullptr;
}

}  // namespace
}  // namespace modelworks

using namespace modelworks;

extern "C" void* modelworks_serve_open(const ModelShape* shape, const ModelWeights* weights) {
  return shape->weights_are_bfloat16 ? open_engine<Bfloat16>(*shape, *weights)
                                     : open_engine<float>(*shape, *weights);
}

extern "C" void modelworks_serve_close(void* engine) { delete static_cast<Engine*>(engine); }

extern "C" int32_t modelworks_serve_run(void* engine, const Batch* batch) {
  Engine* const each = static_cast<Engine*>(engine);
  const BatchError error = each->check(*batch);
  if (error == kFine) each->run(*batch);
  return error;
}

extern "C" void modelworks_serve_copy_blocks(void* engine, const int64_t* pairs, int64_t n_pairs) {
  static_cast<Engine*>(engine)->copy_blocks(pairs, n_pairs);
}

extern "C" double modelworks_serve_seconds(void* engine, int32_t phase) {
  return static_cast<Engine*>(engine)->phases().seconds(phase);
}

extern "C" int64_t modelworks_serve_size(int32_t which) {
  constexpr int64_t sizes[] = {sizeof(ModelShape), sizeof(LayerWeights), sizeof(ModelWeights), sizeof(Batch)};
  return sizes[which];
}
