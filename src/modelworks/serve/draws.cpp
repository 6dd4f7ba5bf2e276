// Draws from rows of logits, and reports of them, without sorting a vocabulary: the same mathematics as
// models/sampling.py, which explains it.
//
// One pass over a row finds the best score of every block of 64. The m-th highest of those bounds the m-th highest score
// from below, and a block whose best is under a bound need not be read again: so the candidates of top-k, top-p and
// min-p are found in a few blocks. Typical sampling keeps the scores about one in the middle, and reads the best blocks
// until the tokens above that one's mirror image have enough. A row's result depends on that row alone.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace {

constexpr int64_t kBlock = 64;
constexpr float kColdest = 1e-3f;
constexpr float kRemoved = -std::numeric_limits<float>::infinity();
constexpr int64_t kNotFinite = -1, kNothingAllowed = -2;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Flags __attribute__((vector_size(64)));
typedef float HalfFloats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));

struct Candidate {
  float score;
  int32_t id;
  double weight;
};

bool better(const Candidate& a, const Candidate& b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }

// exp of x <= 0, to about one unit in the last place: 2^n e^r with |r| <= log(2)/2 and the series of e^r to r^12.
Doubles exponential(Doubles x) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves a whole number in the low bits
  const Doubles shifted = x * 1.4426950408889634 + kRound, whole = shifted - kRound;
  const Doubles r = (x - whole * 0.693147180369123816490) - whole * 1.90821492927058770002e-10;
  Doubles series = r * (1.0 / 479001600) + 1.0 / 39916800;
  for (double factor : {1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    series = series * r + factor;
  Longs bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;
  Doubles scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x > -700.0 ? series * scale : Doubles{};
}

// The same in single precision, for sums over a whole vocabulary, at a quarter of the time: a token's weight is right to
// about 1e-7 of itself (times the distance of its score from the best), and the sums are in double.
Floats exponential(Floats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  const Floats shifted = x * 1.44269504f + kRound, whole = shifted - kRound;
  const Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats series = r * (1.0f / 5040) + 1.0f / 720;
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) series = series * r + factor;
  Flags bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x > -87.0f ? series * scale : Floats{};
}

double exponential(double x) { return exponential(Doubles{} + x)[0]; }

class Row {
 public:
  Row(const float* logits, int64_t vocabulary, double temperature) : logits_(logits), size_(vocabulary), divisor_(float(temperature)) {
    const int64_t blocks = (size_ + kBlock - 1) / kBlock;
    best_of_.resize(blocks);
    for (int64_t block = 0; block < blocks; ++block) best_of_[block] = highest(block);
    highest_ = *std::max_element(best_of_.begin(), best_of_.end());
    shift_ = temperature < kColdest ? highest_ : 0.0f;
    best_ = score(highest_);
  }

  int64_t draw(int64_t top_k, double top_p, double log_min_p, double typical_p, double uniform) {
    if (nan_ || highest_ == std::numeric_limits<float>::infinity()) return kNotFinite;
    if (highest_ == kRemoved) return kNothingAllowed;
    const bool limited = top_k > 0 && top_k < size_;
    if (!limited && top_p >= 1.0 && log_min_p == kRemoved) {
      if (typical_p >= 1.0) return draw_from_all(uniform);
      collect_typical(typical_p);
      return draw_from_candidates(uniform);
    }
    if (limited) {
      collect_top(top_k);
      weigh();
      if (top_p < 1.0) keep_mass(top_p * mass());
    } else if (top_p < 1.0) {
      collect_mass(top_p * sum_blocks());
    } else {
      collect(least_score(log_min_p));
      weigh();
    }
    if (log_min_p > kRemoved)
      std::erase_if(candidates_, [&](const Candidate& each) { return double(each.score) - best_ < log_min_p; });
    if (typical_p < 1.0) {
      double gaps = 0.0;
      for (const Candidate& each : candidates_) gaps += each.weight * (best_ - double(each.score));
      keep_typical(typical_p * mass(), gaps / mass());
    }
    return draw_from_candidates(uniform);
  }

  // Log-probabilities: of `chosen`, and of the `count` most likely tokens, which go to values and ids, the best first.
  float report(int64_t chosen, int64_t count, float* values, int64_t* ids) {
    if (nan_ || std::isinf(highest_)) {
      std::fill_n(values, count, std::numeric_limits<float>::quiet_NaN());
      std::iota(ids, ids + count, 0);
      return std::numeric_limits<float>::quiet_NaN();
    }
    const double log_total = best_ + std::log(sum_blocks());
    if (count > 0) {
      collect_top(count);
      const int64_t found = std::min<int64_t>(count, candidates_.size());
      std::partial_sort(candidates_.begin(), candidates_.begin() + found, candidates_.end(), better);
      for (int64_t i = 0; i < found; ++i) {
        values[i] = float(candidates_[i].score - log_total);
        ids[i] = candidates_[i].id;
      }
      for (int64_t i = found, id = 0; i < count; ++id)  // too few are possible
        if (logits_[id] == kRemoved) values[i] = kRemoved, ids[i++] = id;
    }
    return float(logits_[chosen] - log_total);
  }

 private:
  float score(float logit) const { return (logit - shift_) / divisor_; }

  float highest(int64_t block) {
    const int64_t start = block * kBlock;
    if (size_ - start < kBlock) {
      float best = kRemoved;
      for (int64_t i = start; i < size_; ++i) {
        nan_ |= logits_[i] != logits_[i];
        if (logits_[i] > best) best = logits_[i];
      }
      return best;
    }
    Floats best = Floats{} + kRemoved;
    Flags nan = {};
    for (int64_t i = 0; i < kBlock; i += 16) {
      Floats values;
      std::memcpy(&values, logits_ + start + i, sizeof values);
      best = values > best ? values : best;
      nan |= values != values;
    }
    float result = kRemoved;
    int32_t any = 0;
    for (int lane = 0; lane < 16; ++lane) result = best[lane] > result ? best[lane] : result, any |= nan[lane];
    nan_ |= any != 0;
    return result;
  }

  // Weights of a block, 0 beyond the vocabulary; and gaps, if they are wanted: weight * (best score - score).
  void weigh_block(int64_t block, double* weights, double* gaps = nullptr) const {
    const int64_t start = block * kBlock;
    const float* logits = logits_ + start;
    float padded[kBlock];
    if (size_ - start < kBlock) {
      std::fill(std::copy(logits, logits_ + size_, padded), padded + kBlock, kRemoved);
      logits = padded;
    }
    for (int64_t i = 0; i < kBlock; i += 16) {
      Floats values;
      std::memcpy(&values, logits + i, sizeof values);
      const Floats below = (values - shift_) / divisor_ - best_;
      values = exponential(below);
      widen(values, weights + i);
      if (gaps) widen(values > 0.0f ? values * -below : Floats{}, gaps + i);
    }
  }

  static void widen(Floats values, double* target) {
    HalfFloats halves[2];
    std::memcpy(halves, &values, sizeof values);
    const Doubles result[2] = {__builtin_convertvector(halves[0], Doubles), __builtin_convertvector(halves[1], Doubles)};
    std::memcpy(target, result, sizeof result);
  }

  static double sum_of(const double* block) {
    Doubles lanes = {}, part;
    for (int64_t i = 0; i < kBlock; i += 8) {
      std::memcpy(&part, block + i, sizeof part);
      lanes += part;
    }
    double sum = 0.0;
    for (int lane = 0; lane < 8; ++lane) sum += lanes[lane];
    return sum;
  }

  // Of all weights; and of all gaps, if they are wanted.
  double sum_blocks(double* gaps = nullptr) {
    sums_.resize(best_of_.size());
    double total = 0.0;
    for (size_t block = 0; block < sums_.size(); ++block) {
      double weights[kBlock], of_gaps[kBlock];
      weigh_block(block, weights, gaps ? of_gaps : nullptr);
      total += sums_[block] = sum_of(weights);
      if (gaps) *gaps += sum_of(of_gaps);
    }
    return total;
  }

  int64_t draw_from_all(double uniform) {
    const double target = uniform * sum_blocks();
    double reached = 0.0;
    size_t block = 0;
    while (block + 1 < sums_.size() && reached + sums_[block] <= target) reached += sums_[block++];
    for (; block < sums_.size(); ++block) {  // more than once where rounding puts the target on a block's end
      double weights[kBlock];
      weigh_block(block, weights);
      for (int64_t i = 0; i < kBlock; ++i)
        if ((reached += weights[i]) > target) return block * kBlock + i;
    }
    return last_possible();
  }

  int64_t last_possible() const {
    int64_t id = size_ - 1;
    while (id > 0 && score(logits_[id]) - best_ <= -87.0f) --id;
    return id;
  }

  int64_t draw_from_candidates(double uniform) const {
    const double target = uniform * mass();
    double reached = 0.0;
    for (const Candidate& each : candidates_)
      if ((reached += each.weight) > target) return each.id;
    for (size_t i = candidates_.size(); i-- > 0;)
      if (candidates_[i].weight > 0.0) return candidates_[i].id;
    return kNothingAllowed;
  }

  double mass() const {
    double total = 0.0;
    for (const Candidate& each : candidates_) total += each.weight;
    return total;
  }

  // All tokens with at least this score, in the order of their ids, unweighed.
  void collect(float least) {
    candidates_.clear();
    for (size_t block = 0; block < best_of_.size(); ++block) {
      if (score(best_of_[block]) < least || best_of_[block] == kRemoved) continue;
      const int64_t start = block * kBlock, end = std::min(start + kBlock, size_);
      for (int64_t id = start; id < end; ++id)
        if (const float value = score(logits_[id]); value >= least && value > kRemoved) candidates_.push_back({value, int32_t(id), 0.0});
    }
  }

  void weigh() {
    for (size_t start = 0; start < candidates_.size(); start += 8) {
      const size_t count = std::min<size_t>(8, candidates_.size() - start);
      Doubles scores = {};
      for (size_t i = 0; i < count; ++i) scores[i] = double(candidates_[start + i].score) - best_;
      scores = exponential(scores);
      for (size_t i = 0; i < count; ++i) candidates_[start + i].weight = scores[i];
    }
  }

  // A score that at least `count` tokens have: that of the count-th best block.
  float bound(int64_t count) {
    if (count > int64_t(best_of_.size())) return kRemoved;
    ordered_ = best_of_;
    std::nth_element(ordered_.begin(), ordered_.begin() + count - 1, ordered_.end(), std::greater<float>());
    return score(ordered_[count - 1]);
  }

  void collect_top(int64_t count) {
    collect(bound(count));
    if (int64_t(candidates_.size()) <= count) return;
    ordered_.clear();
    for (const Candidate& each : candidates_) ordered_.push_back(each.score);
    std::nth_element(ordered_.begin(), ordered_.begin() + count - 1, ordered_.end(), std::greater<float>());
    const float least = ordered_[count - 1];
    std::erase_if(candidates_, [&](const Candidate& each) { return each.score < least; });
  }

  void collect_mass(double wanted) {
    for (int64_t blocks = blocks_with(wanted);; blocks *= 2) {
      const float least = bound(blocks);
      collect(least);
      weigh();
      if (keep_mass(wanted) || least == kRemoved) return;
    }
  }

  // Information is -log p = log(total) + (best score - score), and the entropy its mean: so a token's distance from the
  // entropy is that of its gap to the best score from the mean gap.
  double distance(const Candidate& each, double mean_gap) const { return std::abs(best_ - double(each.score) - mean_gap); }

  void collect_typical(double typical_p) {
    double gaps = 0.0;
    const double total = sum_blocks(&gaps), mean_gap = gaps / total, wanted = typical_p * total;
    for (int64_t blocks = blocks_with(wanted);; blocks *= 2) {
      const float least = bound(blocks);
      collect(least);
      weigh();
      if (least > kRemoved) {  // no token that was not read is as near as this
        const double radius = best_ - double(least) - mean_gap;
        double inside = 0.0;
        for (const Candidate& each : candidates_)
          if (distance(each, mean_gap) < radius) inside += each.weight;
        if (inside < wanted) continue;
      }
      keep_typical(wanted, mean_gap);
      return;
    }
  }

  // Leaves the fewest candidates nearest the entropy that have `wanted` together, and those as near as the last of them.
  void keep_typical(double wanted, double mean_gap) {
    const auto nearer = [&](const Candidate& a, const Candidate& b) {
      const double of_a = distance(a, mean_gap), of_b = distance(b, mean_gap);
      return of_a < of_b || (of_a == of_b && a.id < b.id);
    };
    if (mass() < wanted) return;
    const double farthest = distance(last_of_mass(wanted, nearer), mean_gap);
    std::erase_if(candidates_, [&](const Candidate& each) { return distance(each, mean_gap) > farthest; });
  }

  // So many of the best blocks have `wanted` together; a bound that fewer reach has less above it.
  int64_t blocks_with(double wanted) {
    order_.resize(sums_.size());
    std::iota(order_.begin(), order_.end(), 0);
    const auto before = [&](int32_t a, int32_t b) { return best_of_[a] > best_of_[b]; };
    const auto first = order_.begin();
    double reached = 0.0;
    for (auto end = first; end != order_.end();) {
      const auto next = end == first ? end + std::min<int64_t>(16, order_.end() - end) : order_.end();
      std::partial_sort(end, next, order_.end(), before);  // mostly the first few are enough
      for (; end != next; ++end)
        if ((reached += sums_[*end]) >= wanted) return std::max<int64_t>(16, end - first + 1);
    }
    return order_.size();
  }

  // Leaves the fewest best candidates that have `wanted` together. Changes nothing and says false where all have less.
  bool keep_mass(double wanted) {
    if (mass() < wanted) return false;
    const Candidate least = last_of_mass(wanted, better);
    std::erase_if(candidates_, [&](const Candidate& each) { return better(least, each); });
    return true;
  }

  // The last of the fewest candidates, in the order `before`, that have `wanted` together.
  template <class Before>
  Candidate last_of_mass(double wanted, Before before) {
    sorted_ = candidates_;
    size_t low = 0, high = sorted_.size();
    double reached = 0.0;  // by those before `low`, the best
    while (high - low > 32) {
      const size_t middle = low + (high - low) / 2;
      std::nth_element(sorted_.begin() + low, sorted_.begin() + middle, sorted_.begin() + high, before);
      double half = 0.0;
      for (size_t i = low; i < middle; ++i) half += sorted_[i].weight;
      if (reached + half >= wanted) {
        high = middle;
      } else {
        reached += half;
        low = middle;
      }
    }
    std::sort(sorted_.begin() + low, sorted_.begin() + high, before);
    size_t last = low;
    while (last + 1 < high && (reached += sorted_[last].weight) < wanted) ++last;
    return sorted_[last];
  }

  float least_score(double log_min_p) const {
    // Not above any score that stays: the exact test follows.
    return std::nextafter(float(best_ + log_min_p), kRemoved);
  }

  const float* logits_;
  int64_t size_;
  float divisor_, shift_ = 0.0f, highest_ = kRemoved, best_ = 0.0f;
  bool nan_ = false;
  // Kept from row to row, so that no memory is asked for.
  static thread_local std::vector<float> best_of_, ordered_;
  static thread_local std::vector<int32_t> order_;
  static thread_local std::vector<double> sums_;
  static thread_local std::vector<Candidate> candidates_, sorted_;
};

thread_local std::vector<float> Row::best_of_, Row::ordered_;
thread_local std::vector<int32_t> Row::order_;
thread_local std::vector<double> Row::sums_;
thread_local std::vector<Candidate> Row::candidates_, Row::sorted_;

}  // namespace

extern "C" {

// tokens[i]: drawn from row rows[i] of logits (stride floats apart), or -1: not finite, or -2: all are -inf.
void draw_rows(const float* logits, int64_t stride, int64_t vocabulary, int64_t count, const int64_t* rows, const double* temperature,
               const int64_t* top_k, const double* top_p, const double* log_min_p, const double* typical_p, const double* uniform,
               int64_t* tokens) {
  for (int64_t i = 0; i < count; ++i) {
    Row row(logits + rows[i] * stride, vocabulary, temperature[i]);
    tokens[i] = row.draw(top_k[i], top_p[i], log_min_p[i], typical_p[i], uniform[i]);
  }
}

// Of row rows[i] of logits: the log-probability of token chosen[i], and those of the `top` most likely ones with their ids.
void report_rows(const float* logits, int64_t stride, int64_t vocabulary, int64_t count, const int64_t* rows, const int64_t* chosen,
                 int64_t top, float* logprobs, int64_t* ids, float* values) {
  for (int64_t i = 0; i < count; ++i)
    logprobs[i] = Row(logits + rows[i] * stride, vocabulary, 1.0).report(chosen[i], top, values + i * top, ids + i * top);
}

// logits[rows[i]][t] = -inf where bit t of row i of `allowed` (words of 32 bits, the lowest bit first) is not set.
void forbid_rows(float* logits, int64_t stride, int64_t vocabulary, int64_t count, const int64_t* rows, const uint32_t* allowed, int64_t words) {
  for (int64_t i = 0; i < count; ++i) {
    float* row = logits + rows[i] * stride;
    for (int64_t word = 0; word < words && word * 32 < vocabulary; ++word) {
      const uint32_t bits = allowed[i * words + word];
      float* part = row + word * 32;
      const int64_t size = std::min<int64_t>(32, vocabulary - word * 32);
      if (bits == ~uint32_t(0)) continue;
      for (int64_t bit = 0; bit < size; ++bit) part[bit] = (bits >> bit) & 1 ? part[bit] : kRemoved;
    }
  }
}
}
