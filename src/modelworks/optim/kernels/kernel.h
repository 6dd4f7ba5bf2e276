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

// Of element(0) ... element(n - 1). As in every sum here, additions go side by side, so that they keep pace with memory:
// in another order on another processor, in the same in each call. `element` captures by value: by reference, what it
// captured would be read again for every element.
template <class Element> double square_sum(std::int64_t n, Element element) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < n; i++) {
        const double wide = element(i);
        sum += wide * wide;
    }
    return sum;
}
