// Adafactor's passes over the matrices of a stack, or over some rows of one matrix (adafactor.py).
//
// Everywhere: sizes are all rows that are here, rows of each matrix, columns.

#include "kernel.h"

namespace {

// Arrays: value; sums (double): its squares. Sizes: elements.
template <class T> void square_sums(Arrays arrays, Sizes sizes, Numbers) {
    as<double>(arrays[1])[0] = square_sum(sizes[0], [array = as<T>(arrays[0])](std::int64_t i) { return array[i]; });
}

// Arrays: gradient; rows (double): set to their sums of squares; columns (double): theirs are added.
template <class T> void row_column_squares(Arrays arrays, Sizes sizes, Numbers) {
    double *rows = as<double>(arrays[1]);
    const std::int64_t n_columns = sizes[2];
    for (std::int64_t row = 0; row < sizes[0]; row++) {
        const T *__restrict__ gradient = as<T>(arrays[0]) + row * n_columns;
        double *__restrict__ columns = as<double>(arrays[2]) + row / sizes[1] * n_columns;
        rows[row] = square_sum(n_columns, [=](std::int64_t i) { return gradient[i]; });
        for (std::int64_t i = 0; i < n_columns; i++) {
            const double wide = gradient[i];
            columns[i] += wide * wide;
        }
    }
}

// Arrays: gradient, scales of rows, of columns; sums (double): for each matrix, the squares of the gradient times the
// scales of its row and column are added.
template <class T> void factored_squares(Arrays arrays, Sizes sizes, Numbers) {
    const T *row_scales = as<T>(arrays[1]);
    double *sums = as<double>(arrays[3]);
    const std::int64_t n_columns = sizes[2];
    for (std::int64_t row = 0; row < sizes[0]; row++) {
        const T *__restrict__ gradient = as<T>(arrays[0]) + row * n_columns;
        const T *__restrict__ column = as<T>(arrays[2]) + row / sizes[1] * n_columns;
        const T scale = row_scales[row];
        sums[row / sizes[1]] += square_sum(n_columns, [=](std::int64_t i) { return gradient[i] * scale * column[i]; });
    }
}

// Arrays: value, gradient, scales of rows, of columns. Numbers: keep, size.
template <class T> void factored_apply(Arrays arrays, Sizes sizes, Numbers numbers) {
    const T *row_scales = as<T>(arrays[2]);
    const T keep = numbers[0], size = numbers[1];
    const std::int64_t n_columns = sizes[2];
    for (std::int64_t row = 0; row < sizes[0]; row++) {
        T *__restrict__ value = as<T>(arrays[0]) + row * n_columns;
        const T *__restrict__ gradient = as<T>(arrays[1]) + row * n_columns;
        const T *__restrict__ column = as<T>(arrays[3]) + row / sizes[1] * n_columns;
        const T scale = row_scales[row];
        for (std::int64_t i = 0; i < n_columns; i++)
            value[i] = value[i] * keep - size * (gradient[i] * scale * column[i]);
    }
}

// As factored_apply, then moment; numbers: also weight, of the update in the moment, its running mean.
template <class T> void factored_apply_moment(Arrays arrays, Sizes sizes, Numbers numbers) {
    const T *row_scales = as<T>(arrays[2]);
    const T keep = numbers[0], size = numbers[1], weight = numbers[2];
    const std::int64_t n_columns = sizes[2];
    for (std::int64_t row = 0; row < sizes[0]; row++) {
        T *__restrict__ value = as<T>(arrays[0]) + row * n_columns;
        const T *__restrict__ gradient = as<T>(arrays[1]) + row * n_columns;
        const T *__restrict__ column = as<T>(arrays[3]) + row / sizes[1] * n_columns;
        T *__restrict__ moment = as<T>(arrays[4]) + row * n_columns;
        const T scale = row_scales[row];
        for (std::int64_t i = 0; i < n_columns; i++) {
            moment[i] += (size * (gradient[i] * scale * column[i]) - moment[i]) * weight;
            value[i] = value[i] * keep - moment[i];
        }
    }
}

} // namespace

EXPORT(square_sums)
EXPORT(row_column_squares)
EXPORT(factored_squares)
EXPORT(factored_apply)
EXPORT(factored_apply_moment)
