// One model, its cache, and the memory of a step.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "interface.h"
#include "phases.h"
#include "plan.h"
#include "pointwise.h"
#include "product.h"

namespace modelworks {

// Zeros on a cache line's boundary. Grows by forgetting what it held.
template <class Element>
class Buffer {
 public:
  Element* data() { return data_.get(); }
  void grow(ptrdiff_t size) {
    if (size <= size_) return;
    const size_t bytes = (static_cast<size_t>(size) * sizeof(Element) + 63) / 64 * 64;
    data_.reset(static_cast<Element*>(std::aligned_alloc(64, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(static_cast<void*>(data_.get()), 0, bytes);
    size_ = size;
  }

 private:
  struct Free {
    void operator()(Element* data) const { std::free(data); }
  };
  std::unique_ptr<Element, Free> data_;
  ptrdiff_t size_ = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual void run(const Batch& batch) = 0;
  virtual void copy_blocks(const int64_t* pairs, int64_t n_pairs) = 0;
  BatchError check(const Batch& batch) const;
  const Phases& phases() const { return phases_; }

 protected:
  Engine(const ModelShape& shape, const ModelWeights& weights)
      : shape_(shape), weights_(weights), layers_(weights.layers, weights.layers + shape.n_layers) {
    weights_.layers = layers_.data();
  }
  const ModelShape shape_;
  ModelWeights weights_;
  std::vector<LayerWeights> layers_;
  Phases phases_;
};

// Element: of weights and of what is multiplied with them. Stored: of the cache.
template <class Element, class Stored>
class TypedEngine final : public Engine {
  using Kv = Factor<Stored, Element>;  // what is multiplied with the cache

 public:
  TypedEngine(const ModelShape& shape, const ModelWeights& weights);
  void run(const Batch& batch) override;
  void copy_blocks(const int64_t* pairs, int64_t n_pairs) override;

 private:
  // Of one thread, for attention and for norms of few rows.
  struct Scratch {
    Buffer<Element> normed;
    Buffer<Kv> queries, weights, wide;
    Buffer<Stored> codes;
    Buffer<float> scores, head, best, total, mixed, merged_best, merged_total, merged_mixed;
    std::vector<Sight> sights;
  };

  void run_thread(Turn& turn);
  template <class Function>
  void phase(Turn& turn, Phase kind, int n_pieces, Function&& do_piece);
  template <class Prepare, class Finish>
  void product(Turn& turn, Phase kind, const Element* a, ptrdiff_t stride, int n_rows,
               const PackedWeight<Element>& weight, const PackedWeight<Element>& following, Prepare prepare,
               Finish finish);
  template <class Finish>
  void product_of_normed(Turn& turn, Phase kind, const Norm& norm, int n_rows, bool wanted,
                         const PackedWeight<Element>& weight, const PackedWeight<Element>& following, Finish finish);
  void embed(int token);
  void attend(Turn& turn, const LayerWeights& layer);
  void attend_piece(const LayerWeights& layer, const AttentionPiece& piece, int head, Scratch& scratch);
  void store_keys(const LayerWeights& layer, int head, int sequence, int first, int end, int key_begin, int key_end,
                  Scratch& scratch);
  void make_queries(const LayerWeights& layer, const AttentionPiece& piece, int head, Scratch& scratch);
  void prepare_head(int token, int column, const float* norm_weight, float* head);
  void finish_rows(const AttentionPiece& piece, int head, const Softmax& softmax);
  Softmax state(int index, int head);
  void grow(const Batch& batch);

  PackedWeight<Element> packed(const void* panels, int n_outputs, int n_inputs) const;
  PackedWeight<Element> qkv(const LayerWeights& layer) const;
  PackedWeight<Element> output(const LayerWeights& layer) const;
  PackedWeight<Element> up(const LayerWeights& layer) const;
  PackedWeight<Element> down(const LayerWeights& layer) const;
  PackedWeight<Element> head() const;
  LayerCache<Stored> cache(const LayerWeights& layer) const {
    return {static_cast<Stored*>(layer.keys), static_cast<Stored*>(layer.values)};
  }
  Norm norm(const float* weight, const float* bias) const {
    return {static_cast<NormKind>(shape_.norm_kind), weight, bias, shape_.norm_epsilon};
  }

  const CacheShape cache_;
  const int n_query_columns_, n_key_columns_;  // of all heads
  const int heads_per_group_;
  const int stream_stride_, qkv_stride_, attended_stride_, inner_stride_;
  const Batch* batch_ = nullptr;  // of the step that runs
  AttentionPlan plan_;
  std::vector<Scratch> scratch_;
  Buffer<float> stream_;  // the residual stream. float32, as each layer adds to it what is small beside it
  Buffer<float> qkv_;
  Buffer<Element> normed_, attended_, inner_;
  Buffer<float> state_best_, state_total_, state_mixed_;  // of parts that wait to be merged, by (state, head)
  std::unique_ptr<std::atomic<int>[]> parts_done_;        // by (split, head)
  int n_parts_done_ = 0;
  Team team_;  // last, so that it is gone before what its threads work on
};

}  // namespace modelworks
