// Lion, LAMB and LARS in one pass over memory each, LAMB and LARS in two.
//
// A formula of several operations goes several times through memory in torch, and through the cache at best; an update
// is bound by memory, so here each number is read and written once. The formulas are explained where they are called
// (lion.py, trust.py); the torch path there and these come to the same but for rounding.

#include "kernel.h"

namespace {

// Arrays: value, gradient, average. Sizes: elements. Numbers: lr; keep, 1 - lr decay; ahead and weight, of the gradient,
// in the direction and in the average that is kept.
template <class T> void lion(Arrays arrays, Sizes sizes, Numbers numbers) {
    T *__restrict__ value = as<T>(arrays[0]);
    const T *__restrict__ gradient = as<T>(arrays[1]);
    T *__restrict__ average = as<T>(arrays[2]);
    const T lr = numbers[0], keep = numbers[1], ahead = numbers[2], weight = numbers[3];
    for (std::int64_t i = 0; i < sizes[0]; i++) {
        const T apart = gradient[i] - average[i];
        const T direction = average[i] + apart * ahead;
        value[i] = value[i] * keep - (direction > 0 ? lr : direction < 0 ? -lr : T(0));
        average[i] += apart * weight;
    }
}

template <class T> struct Direction {
    T scale1, scale2, eps, decay;

    explicit Direction(Numbers numbers) : scale1(numbers[0]), scale2(numbers[1]), eps(numbers[2]), decay(numbers[3]) {}

    T operator()(T value, T first, T second) const {
        return first * scale1 / (std::sqrt(second) * scale2 + eps) + decay * value;
    }
};

constexpr std::int64_t BLOCK = 2048;

// Sums of squares in float that nothing underflowed out of, or overflowed.
bool in_range(double sum) { return 1e-25 < sum && sum < 1e35; }

// Moves both moments. Arrays: value, gradient, first, second; sums (double): squares of the weights and of the
// direction. Sizes: elements. Numbers: weight1, weight2, keep2, then as in Direction.
//
// Squares are added up in the arrays' own type for a block only, which costs a relative 1e-5 at most. Where they leave the
// range of float the block is gone through again.
template <class T> void lamb_moments(Arrays arrays, Sizes sizes, Numbers numbers) {
    const T *__restrict__ value = as<T>(arrays[0]);
    const T *__restrict__ gradient = as<T>(arrays[1]);
    T *__restrict__ first = as<T>(arrays[2]);
    T *__restrict__ second = as<T>(arrays[3]);
    double *sums = as<double>(arrays[4]);
    const T weight1 = numbers[0], weight2 = numbers[1], keep2 = numbers[2];
    const Direction<T> direction_of(numbers + 3);
    sums[0] = sums[1] = 0;
    for (std::int64_t start = 0; start < sizes[0]; start += BLOCK) {
        const std::int64_t end = std::min(start + BLOCK, sizes[0]);
        T of_weights = 0, of_directions = 0;
#pragma omp simd reduction(+ : of_weights, of_directions)
        for (std::int64_t i = start; i < end; i++) {
            const T g = gradient[i];
            const T moved1 = first[i] + (g - first[i]) * weight1;
            const T moved2 = second[i] * keep2 + (weight2 * g) * g;
            const T direction = direction_of(value[i], moved1, moved2);
            first[i] = moved1;
            second[i] = moved2;
            of_weights += value[i] * value[i];
            of_directions += direction * direction;
        }
        double weights = of_weights, directions = of_directions;
        if (!in_range(weights) || !in_range(directions)) {
            weights = square_sum(end - start, [&](std::int64_t i) { return value[start + i]; });
            directions = square_sum(end - start, [&](std::int64_t i) {
                return direction_of(value[start + i], first[start + i], second[start + i]);
            });
        }
        sums[0] += weights;
        sums[1] += directions;
    }
}

// Arrays: value, first, second. Sizes: elements. Numbers: rate, then as in Direction.
template <class T> void lamb_apply(Arrays arrays, Sizes sizes, Numbers numbers) {
    T *__restrict__ value = as<T>(arrays[0]);
    const T *__restrict__ first = as<T>(arrays[1]);
    const T *__restrict__ second = as<T>(arrays[2]);
    const T rate = numbers[0];
    const Direction<T> direction_of(numbers + 1);
    for (std::int64_t i = 0; i < sizes[0]; i++) value[i] -= rate * direction_of(value[i], first[i], second[i]);
}

// Arrays: one, other; sums (double): their squares. Sizes: elements.
template <class T> void two_square_sums(Arrays arrays, Sizes sizes, Numbers) {
    double *sums = as<double>(arrays[2]);
    for (int which = 0; which < 2; which++)
        sums[which] = square_sum(sizes[0], [array = as<T>(arrays[which])](std::int64_t i) { return array[i]; });
}

// Arrays: value, gradient, buffer. Sizes: elements. Numbers: rate, decay, momentum.
template <class T> void lars_apply(Arrays arrays, Sizes sizes, Numbers numbers) {
    T *__restrict__ value = as<T>(arrays[0]);
    const T *__restrict__ gradient = as<T>(arrays[1]);
    T *__restrict__ buffer = as<T>(arrays[2]);
    const T rate = numbers[0], decay = numbers[1], momentum = numbers[2];
    for (std::int64_t i = 0; i < sizes[0]; i++) {
        const T moved = buffer[i] * momentum + rate * (gradient[i] + decay * value[i]);
        buffer[i] = moved;
        value[i] -= moved;
    }
}

// Without momentum. Arrays: value, gradient. Sizes: elements. Numbers: rate, decay.
template <class T> void lars_apply_plain(Arrays arrays, Sizes sizes, Numbers numbers) {
    T *__restrict__ value = as<T>(arrays[0]);
    const T *__restrict__ gradient = as<T>(arrays[1]);
    const T rate = numbers[0], decay = numbers[1];
    for (std::int64_t i = 0; i < sizes[0]; i++) value[i] -= rate * (gradient[i] + decay * value[i]);
}

} // namespace

EXPORT(lion)
EXPORT(lamb_moments)
EXPORT(lamb_apply)
EXPORT(two_square_sums)
EXPORT(lars_apply)
EXPORT(lars_apply_plain)
