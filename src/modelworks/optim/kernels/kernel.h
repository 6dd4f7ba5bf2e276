// What all kernels share: how they are called, and how sums of squares are taken.
//
// A kernel takes one stretch of flat, contiguous arrays. It is called with their addresses, some sizes and some numbers;
// which ones, in this order, is said at each kernel. Numbers are rounded to the arrays' own type first. Every kernel is
// there for float and double, and those may run side by side on several threads.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

using Arrays = void *const *;
using Sizes = const std::int64_t *;
using Numbers = const double *;

#define EXPORT(kernel)                                                                  \
    extern "C" void kernel##_float32(Arrays arrays, Sizes sizes, Numbers numbers) {      \
        kernel<float>(arrays, sizes, numbers);                                           \
    }                                                                                    \
    extern "C" void kernel##_float64(Arrays arrays, Sizes sizes, Numbers numbers) {      \
        kernel<double>(arrays, sizes, numbers);                                          \
    }

template <class T> T *as(void *address) { return static_cast<T *>(address); }

// Additions side by side, so that they keep pace with memory; the order is the same in each call.
constexpr int LANES = 64;

template <class T> double total(const T *lanes) {
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

template <class T> double square_sum(const T *array, std::int64_t n) {
    double lanes[LANES] = {};
    std::int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            const double wide = array[i + lane];
            lanes[lane] += wide * wide;
        }
    for (int lane = 0; i < n; i++, lane++) {
        const double wide = array[i];
        lanes[lane] += wide * wide;
    }
    return total(lanes);
}
