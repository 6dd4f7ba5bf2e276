// Where a step's time goes, as the calling thread sees it. Compiled in by -DMODELWORKS_PROFILE; else nothing.
#pragma once

#include <chrono>

namespace modelworks {

enum class Phase { kEmbedding, kNorms, kQkv, kAttention, kOutput, kUp, kDown, kHead, kWaiting, kCount };

class Phases {
 public:
#ifdef MODELWORKS_PROFILE
  void start(int thread) {
    if (thread == 0) last_ = Clock::now();
  }
  // What has passed since the last mark was spent on this.
  void mark(int thread, Phase phase) {
    if (thread != 0) return;
    const Clock::time_point now = Clock::now();
    seconds_[static_cast<int>(phase)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }
  double seconds(int phase) const { return seconds_[phase]; }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_;
  double seconds_[static_cast<int>(Phase::kCount)] = {};
#else
  void start(int) {}
  void mark(int, Phase) {}
  double seconds(int) const { return 0.0; }
#endif
};

}  // namespace modelworks
