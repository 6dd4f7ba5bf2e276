// The inner loop of everything: some rows times some vectors of columns, held in registers while the depth goes by.
//
// Each sum is one chain of additions in ascending depth, whatever the number of rows computed beside it. So a row's
// result does not depend, in any bit, on what else is in the batch.
#pragma once

#include "vector.h"

namespace modelworks {

// Sums of a tile: added to, and kept in registers by the compiler, as everything around is inlined.
template <int kRows, int kVectors>
struct Tile {
  Floats sums[kRows][kVectors];
};

// tile += rows * columns over `steps` of the depth. Row r is at rows + r * row_stride; the lanes of vector v are at
// columns[v], and a step further at columns[v] + column_stride. Strides count elements.
template <class Element, int kRows, int kVectors>
[[gnu::always_inline]] inline void multiply_add(Tile<kRows, kVectors>& tile, const Element* rows, ptrdiff_t row_stride,
                                                const Element* const (&columns)[kVectors], ptrdiff_t column_stride,
                                                int steps) {
  using P = Products<Element>;
  for (int step = 0; step < steps; step++) {
    typename P::Vector lanes[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) lanes[v] = P::lanes(columns[v] + step * column_stride);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      const typename P::Vector same = P::same(rows + r * row_stride + step * P::kDepth);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) tile.sums[r][v] = P::add(tile.sums[r][v], same, lanes[v]);
    }
  }
}

}  // namespace modelworks
