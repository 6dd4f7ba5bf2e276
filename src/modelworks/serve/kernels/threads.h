// A team of threads that work through the phases of a job.
//
// A phase is a number of pieces of work, and is over when all are done: no thread waits for another that holds none.
// So who has lost its core to somebody else holds up no more than the piece in its hands, and catches up when it is
// back, be it phases or jobs later. Pieces are dealt out in contiguous ranges, which memory reads fastest, and who has
// finished its own takes from the others'. Waiting spins first, as the others are microseconds away, and then sleeps.
//
// Outside its pieces a thread may touch nothing that belongs to a job: that may be over already. What it has to know
// there, such as how many pieces there are, is the job's `Numbers`, of which it has a copy.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace modelworks {

using Numbers = std::array<int64_t, 4>;

class Turn;

class Team {
 public:
  // work: what each thread does of a job. It calls the same phases in the same order on every thread.
  Team(int n_threads, std::function<void(Turn&)> work);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return n_threads_; }

  // A job from its first phase to its last. The caller is thread number 0.
  void run(const Numbers& numbers);

  // The first of the pieces that are meant for `thread`.
  int first_piece(int thread, int n_pieces) const { return static_cast<int>(int64_t{n_pieces} * thread / n_threads_); }

 private:
  friend class Turn;
  // Which phase it is (upper half) and how many pieces of a thread's range were taken (lower half). In one number, so
  // that who comes late to a phase takes nothing of the next.
  struct alignas(64) Taken {
    std::atomic<uint64_t> value{0};
  };

  void work_until_closed(int thread);
  void open(uint32_t phase);

  const int n_threads_;
  const std::function<void(Turn&)> work_;
  std::unique_ptr<Taken[]> taken_;
  alignas(64) std::atomic<int> n_done_{0};      // pieces of this phase
  alignas(64) std::atomic<uint32_t> phase_{0};  // counted over all jobs
  // The job: odd while it is written, so that a reader knows whether what it read belongs together.
  alignas(64) std::atomic<uint32_t> version_{0};
  std::atomic<uint32_t> first_phase_{0};
  std::array<std::atomic<int64_t>, std::tuple_size_v<Numbers>> numbers_{};
  std::atomic<bool> closing_{false};
  std::vector<std::thread> threads_;
};

// One thread's way through one job.
class Turn {
 public:
  Turn(Team& team, int thread, uint32_t phase, const Numbers& numbers)
      : team(team), thread(thread), numbers(numbers), phase_(phase) {}

  Team& team;
  const int thread;
  const Numbers numbers;

  // do_piece(i) for those i < n_pieces that this thread gets. Then comes `wait`.
  template <class Function>
  void take(int n_pieces, Function&& do_piece) {
    if (n_pieces == 0 || team.phase_.load(std::memory_order_acquire) != phase_) return;
    for (int turn = 0; turn < team.n_threads_; turn++) {
      const int owner = (thread + turn) % team.n_threads_;
      const int first = team.first_piece(owner, n_pieces), end = team.first_piece(owner + 1, n_pieces);
      std::atomic<uint64_t>& taken = team.taken_[owner].value;
      uint64_t value = taken.load(std::memory_order_acquire);
      while (value >> 32 == phase_ && static_cast<int>(value & 0xffffffffu) < end - first) {
        if (!taken.compare_exchange_weak(value, value + 1, std::memory_order_acq_rel)) continue;
        do_piece(first + static_cast<int>(value & 0xffffffffu));
        if (team.n_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_pieces) team.open(phase_ + 1);
        value = taken.load(std::memory_order_acquire);
      }
    }
  }

  // Until the phase is over.
  void wait(int n_pieces);

 private:
  uint32_t phase_;
};

}  // namespace modelworks
