// What Python says and hears: plain C structures, mirrored by `serve/native_executor.py`.
#pragma once

#include <cstdint>

#define MODELWORKS_EXPORT __attribute__((visibility("default")))

enum class CacheKind : int32_t { kFloat = 0, kBfloat16 = 1, kInt8 = 2, kFloat8 = 3 };  // see cache_format.h

extern "C" {

struct ModelShape {
  int32_t n_layers, d_model, n_heads, n_kv_heads, head_dim, d_ff, vocab_size;
  int32_t norm_kind, activation;  // see pointwise.h
  int32_t gated, residual;
  int32_t window;  // tokens that one sees, itself included; 0: all
  int32_t weights_are_bfloat16, cache_kind;
  int32_t n_blocks, block_size, n_threads;
  float norm_epsilon;
  float score_scale;        // of a query times a key
  float output_multiplier;  // of the final norm's output
};

// Matrices are packed (product.h), in the model's type. Vectors are float32, padded with zeros to a multiple of 32.
// Absent ones are null.
struct LayerWeights {
  const void *qkv, *output, *up, *down;  // up: where it is gated, panels of 16 gates and their 16 factors
  const float *qkv_bias, *output_bias, *up_bias, *down_bias;
  const float *attention_norm, *attention_norm_bias, *feed_forward_norm, *feed_forward_norm_bias;
  const float *query_norm, *key_norm;
  void *keys, *values;  // this layer's cache (cache.h), zeros at first
};

struct ModelWeights {
  const void* embedding;  // (vocab_size, d_model), as it is in the model
  const void* positions;  // (max_seq_len, d_model), likewise
  const void* head;       // packed
  const float *final_norm, *final_norm_bias;
  int32_t* key_positions;  // of each slot, and 16 beyond; for windows
  const LayerWeights* layers;
};

// serve/batch.py says what these are.
struct Batch {
  int32_t n_tokens, n_sequences, n_wanted, table_width;
  const int64_t *tokens, *positions, *slots;
  const int32_t *starts, *lengths, *tables;
  const int64_t* wanted;
  const float *cosines, *sines;  // (positions, head_dim / 2), float32; null: no rotation
  int64_t n_positions;           // rows of these, or of the learned positions
  float* logits;                 // out: (n_wanted, vocab_size)
};

// 0 means done; else what is wrong with the batch, and then nothing was written.
enum BatchError : int32_t { kFine = 0, kBadToken = 1, kBadPosition = 2, kBadSlot = 3, kBadTable = 4, kBadWanted = 5 };

MODELWORKS_EXPORT void* modelworks_serve_open(const ModelShape* shape, const ModelWeights* weights);
MODELWORKS_EXPORT void modelworks_serve_close(void* engine);
MODELWORKS_EXPORT int32_t modelworks_serve_run(void* engine, const Batch* batch);
// pairs: (n_pairs, 2), (from, to), copied in this order.
MODELWORKS_EXPORT void modelworks_serve_copy_blocks(void* engine, const int64_t* pairs, int64_t n_pairs);
// Spent in a phase (phases.h) since the engine was opened; 0 unless compiled to tell.
MODELWORKS_EXPORT double modelworks_serve_seconds(void* engine, int32_t phase);
// Bytes by which shapes are checked against Python's mirror of them.
MODELWORKS_EXPORT int64_t modelworks_serve_size(int32_t which);
}
