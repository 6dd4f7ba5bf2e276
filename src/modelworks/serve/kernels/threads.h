// A team of threads that run one function together, with barriers inside it.
//
// Waiting spins first, as the others are microseconds away, and then sleeps: a core that somebody else needs is given
// up. Work is dealt out in contiguous ranges, which memory reads fastest, and who has finished takes from the others,
// so that a thread which lost its core holds up no more than the piece in its hands.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace modelworks {

class Team {
 public:
  explicit Team(int n_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return n_threads_; }

  // work(thread) on every thread, of which the caller is number 0; returns when all have returned.
  void run(const std::function<void(int)>& work);

  // The rest is called from inside `run`, by every thread.

  // Nobody goes on before all are here; what was written before is seen by all.
  void barrier();

  // The first of the pieces that `thread` will be given, if nobody takes it away.
  int first_piece(int thread, int n_pieces) const { return static_cast<int>(int64_t{n_pieces} * thread / n_threads_); }

  // do_piece(i) for each i < n_pieces, each by one of the threads. Between two of these there must be a barrier.
  template <class Function>
  void share(int thread, int n_pieces, Function&& do_piece) {
    for (int turn = 0; turn < n_threads_; turn++) {
      const int owner = (thread + turn) % n_threads_;
      const int first = first_piece(owner, n_pieces), n = first_piece(owner + 1, n_pieces) - first;
      for (int i; (i = taken_[owner].count.fetch_add(1, std::memory_order_relaxed)) < n;) do_piece(first + i);
    }
  }

 private:
  struct alignas(64) Count {
    std::atomic<int> count{0};
  };

  void work_until_closed(int thread);

  const int n_threads_;
  std::unique_ptr<Count[]> taken_;  // of each thread's range, how many pieces were begun since the last barrier
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> passed_{0};  // barriers so far
  alignas(64) std::atomic<int> job_{0};
  const std::function<void(int)>* work_ = nullptr;  // none: the team closes
  std::vector<std::thread> threads_;
};

}  // namespace modelworks
