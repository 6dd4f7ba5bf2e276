// Norms, activations and rotary positions, in float32.
#pragma once

#include <cmath>

#include "vector.h"

namespace modelworks {

enum class NormKind : int32_t { kRms = 0, kLayer = 1 };
enum class Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3 };

struct Norm {
  NormKind kind;
  const float* weight;  // padded with zeros to whole vectors, like `bias`
  const float* bias;    // of a layer norm
  float epsilon;
};

// out = norm(x) * multiplier. x: `size` numbers, then anything up to a whole vector; there `out` will be zero. (What
// follows a row may be not a number: left by a row that was none, where it is written by addition alone.)
template <class Element>
void normalise(const Norm& norm, const float* x, int size, float multiplier, Element* out) {
  const int n_vectors = divide_up(size, kLanes);
  const auto within = [&](int i, Floats values) {
    return i < n_vectors - 1 ? values : (kLaneNumbers < size - i * kLanes ? values : Floats{});
  };
  float mean = 0.0f;
  Floats sum = {};
  if (norm.kind == NormKind::kLayer) {
    for (int i = 0; i < n_vectors; i++) sum += within(i, load(x + i * kLanes));
    mean = sum_of(sum) / size;
    sum = Floats{};
  }
  for (int i = 0; i < n_vectors; i++) {
    const Floats centred = within(i, load(x + i * kLanes) - mean);
    sum += centred * centred;
  }
  const float scale = multiplier / std::sqrt(sum_of(sum) / size + norm.epsilon);
  for (int i = 0; i < n_vectors; i++) {
    Floats y = (load(x + i * kLanes) - mean) * scale * load(norm.weight + i * kLanes);
    if (norm.kind == NormKind::kLayer) y += load(norm.bias + i * kLanes) * multiplier;
    store(out + i * kLanes, within(i, y));
  }
}

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + power_of_two(x * -1.4426950408889634f)); }

// erf to 1.5e-7: Abramowitz and Stegun 7.1.26
inline Floats error_function(Floats x) {
  const Floats size = x < 0.0f ? -x : x;
  const Floats t = 1.0f / (1.0f + 0.3275911f * size);
  Floats y = broadcast(1.061405429f);
  y = y * t - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  y = 1.0f - y * t * power_of_two(size * size * -1.4426950408889634f);
  return x < 0.0f ? -y : y;
}

inline Floats activated(Activation activation, Floats x) {
  switch (activation) {
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kGelu:
      return 0.5f * x * (1.0f + error_function(x * 0.7071067811865476f));
    case Activation::kGeluTanh:  // (1 + tanh(y)) / 2 is the sigmoid of 2 y
      return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    case Activation::kRelu:
      return x < 0.0f ? Floats{} : x;
  }
  return x;
}

// Turns channel i of the first half and of the second half together. cosine, sine: (head_dim / 2,)
inline void rotate(float* head, int head_dim, const float* cosine, const float* sine) {
  const int half = head_dim / 2;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats a = load(head + i), b = load(head + half + i), c = load(cosine + i), s = load(sine + i);
    store(head + i, a * c - b * s);
    store(head + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cosine[i] - b * sine[i];
    head[half + i] = b * cosine[i] + a * sine[i];
  }
}

}  // namespace modelworks
