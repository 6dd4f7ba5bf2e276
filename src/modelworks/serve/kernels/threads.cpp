#include "threads.h"

namespace modelworks {
namespace {

constexpr int kSpinsInStep = 2000;  // about 30 microseconds
constexpr int kSpinsBetweenSteps = 10000;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void wait_while(const std::atomic<int>& value, int old, int spins) {
  for (int i = 0; i < spins; i++) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

Team::Team(int n_threads) : n_threads_(n_threads), taken_(new Count[n_threads]) {
  for (int thread = 1; thread < n_threads; thread++) threads_.emplace_back([this, thread] { work_until_closed(thread); });
}

Team::~Team() {
  work_ = nullptr;
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)>& work) {
  work_ = &work;
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
  work(0);
  barrier();
}

void Team::barrier() {
  const int passed = passed_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < n_threads_) {
    wait_while(passed_, passed, kSpinsInStep);
    return;
  }
  arrived_.store(0, std::memory_order_relaxed);
  for (int thread = 0; thread < n_threads_; thread++) taken_[thread].count.store(0, std::memory_order_relaxed);
  passed_.store(passed + 1, std::memory_order_release);
  passed_.notify_all();
}

void Team::work_until_closed(int thread) {
  for (int seen = 0;; seen++) {
    wait_while(job_, seen, kSpinsBetweenSteps);
    if (work_ == nullptr) return;
    (*work_)(thread);
    barrier();
  }
}

}  // namespace modelworks
