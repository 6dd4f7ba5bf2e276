// What this machine can do at most, for shares of it: bytes read from memory and products summed, per second.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef Floats FloatsInMemory __attribute__((aligned(4), may_alias));
volatile float kept;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <class Work>
double seconds(int n_threads, Work work) {
  const double started = now();
  std::vector<std::thread> threads;
  for (int t = 0; t < n_threads; t++) threads.emplace_back([=] { work(t); });
  for (auto& thread : threads) thread.join();
  return now() - started;
}

void read_all(const char* from, size_t n_bytes) {
  Floats sums[4] = {};
  for (size_t i = 0; i < n_bytes; i += 256)
    for (int k = 0; k < 4; k++) {
      __builtin_prefetch(from + i + 4096 + 64 * k, 0, 2);
      sums[k] += *reinterpret_cast<const FloatsInMemory*>(from + i + 64 * k);
    }
  kept = sums[0][0] + sums[1][0] + sums[2][0] + sums[3][0];
}

void multiply(long n, bool bfloat16) {
  Floats sums[12], a = Floats{} + 1.0f;
  for (auto& sum : sums) {
    sum = a;
    asm volatile("" : "+x"(sum));  // or the compiler would see that all are equal and keep one
  }
  asm volatile("" : "+x"(a));
#ifdef __AVX512BF16__
  if (bfloat16) {
    for (long i = 0; i < n; i++)
      for (auto& sum : sums) sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)a);
    for (auto& sum : sums) kept = sum[0];
    return;
  }
#endif
  for (long i = 0; i < n; i++)
    for (auto& sum : sums) sum = sum + a * a;
  for (auto& sum : sums) kept = sum[0];
}

}  // namespace

// Of reading `n_bytes` from `from` on. Where memory lies matters: on some machines parts of it are nearly twice as fast.
extern "C" double bytes_per_second(int n_threads, const char* from, size_t n_bytes) {
  const size_t each = n_bytes / n_threads / 4096 * 4096;
  std::vector<double> rates;  // their median: who shares the memory with us makes some rounds faster and some slower
  for (int round = 0; round < 9; round++)
    rates.push_back(each * n_threads / seconds(n_threads, [=](int t) { read_all(from + t * each, each); }));
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() / 2];
}

extern "C" double operations_per_second(int n_threads, int bfloat16) {
#ifndef __AVX512BF16__
  bfloat16 = 0;  // is computed in float32 then
#endif
  const long n = 5'000'000;
  double best = 0.0;
  for (int round = 0; round < 3; round++) {
    const double operations = 12.0 * 2 * 16 * (bfloat16 ? 2 : 1) * n * n_threads;
    best = std::max(best, operations / seconds(n_threads, [=](int) { multiply(n, bfloat16); }));
  }
  return best;
}
