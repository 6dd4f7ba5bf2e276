#include "threads.h"

#include <utility>

namespace modelworks {
namespace {

constexpr int kSpinsInJob = 2000;  // some 30 microseconds
constexpr int kSpinsBetweenJobs = 10000;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void wait_while(const std::atomic<uint32_t>& value, uint32_t old, int spins) {
  for (int i = 0; i < spins; i++) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

Team::Team(int n_threads, std::function<void(Turn&)> work)
    : n_threads_(n_threads), work_(std::move(work)), taken_(new Taken[n_threads]) {
  for (int thread = 1; thread < n_threads; thread++) threads_.emplace_back([this, thread] { work_until_closed(thread); });
}

Team::~Team() {
  closing_.store(true, std::memory_order_relaxed);
  version_.fetch_add(2, std::memory_order_release);
  version_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(const Numbers& numbers) {
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  const uint32_t version = version_.load(std::memory_order_relaxed);
  version_.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  first_phase_.store(phase, std::memory_order_relaxed);
  for (size_t i = 0; i < numbers.size(); i++) numbers_[i].store(numbers[i], std::memory_order_relaxed);
  version_.store(version + 2, std::memory_order_release);
  version_.notify_all();
  Turn turn(*this, 0, phase, numbers);
  work_(turn);
}

void Team::work_until_closed(int thread) {
  for (uint32_t seen = 0;;) {
    wait_while(version_, seen, kSpinsBetweenJobs);
    const uint32_t version = version_.load(std::memory_order_acquire);
    if (version % 2 == 1) continue;
    const uint32_t phase = first_phase_.load(std::memory_order_relaxed);
    Numbers numbers;
    for (size_t i = 0; i < numbers.size(); i++) numbers[i] = numbers_[i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (version_.load(std::memory_order_relaxed) != version) continue;
    if (closing_.load(std::memory_order_relaxed)) return;
    seen = version;
    Turn turn(*this, thread, phase, numbers);
    work_(turn);
  }
}

// By who has done the last piece of the phase before. Nobody takes anything until the number of the phase says so.
void Team::open(uint32_t phase) {
  n_done_.store(0, std::memory_order_relaxed);
  for (int thread = 0; thread < n_threads_; thread++)
    taken_[thread].value.store(uint64_t{phase} << 32, std::memory_order_relaxed);
  phase_.store(phase, std::memory_order_release);
  phase_.notify_all();
}

void Turn::wait(int n_pieces) {
  if (n_pieces == 0) return;
  wait_while(team.phase_, phase_, kSpinsInJob);
  phase_++;
}

}  // namespace modelworks
