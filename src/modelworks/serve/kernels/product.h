// Activations times a weight that was packed once: out = a * weight^T.
//
// A packed weight is a row of panels, each of 32 outputs and the whole depth, in the order in which it is read: for
// each step of the depth 32 lanes of `kDepth` inputs. Missing outputs and inputs are zeros. Every panel is read by one
// thread, once from memory: while it is multiplied, the next one is fetched into the second-level cache.
#pragma once

#include <algorithm>

#include "threads.h"
#include "tiles.h"

namespace modelworks {

constexpr int kPanel = 32;
constexpr int kPanelVectors = kPanel / kLanes;

#ifdef __AVX512F__
constexpr int kTileRows = 12;  // 24 of 32 registers hold sums
#else
constexpr int kTileRows = 4;
#endif
constexpr int kRowsOfPiece = 8 * kTileRows;  // a piece of work: so many rows, if there are, times one panel

template <class Element>
struct PackedWeight {
  const Element* panels;
  int n_panels;
  int n_steps;  // of the depth, each kDepth inputs

  ptrdiff_t panel_size() const { return ptrdiff_t{n_steps} * kPanel * Products<Element>::kDepth; }
  const Element* panel(int i) const { return panels + i * panel_size(); }
};

// What will be read next, spread over the tiles that are computed meanwhile.
struct Fetch {
  const char* from = nullptr;  // none: nothing
  ptrdiff_t bytes_per_step = 0;
};

// out (kRows, kPanel) = rows * panel
template <class Element, int kRows>
[[gnu::noinline]] void multiply_rows(const Element* rows, ptrdiff_t row_stride, const Element* panel, int n_steps,
                                     Fetch fetch, float* out) {
  constexpr ptrdiff_t kStride = kPanel * Products<Element>::kDepth;
  constexpr int kUnroll = 4;
  Tile<kRows, kPanelVectors> tile = {};
  int step = 0;
  const auto advance = [&](int steps) [[gnu::always_inline]] {
    const Element* const columns[kPanelVectors] = {panel + step * kStride, panel + step * kStride + kStride / 2};
    multiply_add<Element, kRows, kPanelVectors>(tile, rows + step * Products<Element>::kDepth, row_stride, columns,
                                                kStride, steps);
    step += steps;
  };
  for (; step + kUnroll <= n_steps;) {
    if (fetch.from != nullptr) {
      for (ptrdiff_t line = 0; line < fetch.bytes_per_step * kUnroll; line += 64)
        __builtin_prefetch(fetch.from + step * fetch.bytes_per_step + line, 0, 2);
    }
    advance(kUnroll);
  }
  advance(n_steps - step);
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kPanelVectors; v++) store(out + r * kPanel + v * kLanes, tile.sums[r][v]);
}

template <class Element, int kRows = kTileRows>
void multiply_some_rows(int n_rows, const Element* rows, ptrdiff_t row_stride, const Element* panel, int n_steps,
                        Fetch fetch, float* out) {
  if constexpr (kRows > 1) {
    if (n_rows < kRows)
      return multiply_some_rows<Element, kRows - 1>(n_rows, rows, row_stride, panel, n_steps, fetch, out);
  }
  multiply_rows<Element, kRows>(rows, row_stride, panel, n_steps, fetch, out);
}

// The phase of a job that makes this product: finish(row, panel, sums) for each row of `a` (n_rows, stride) and each
// panel, with its 32 sums. prepare(): what a thread does before its first piece, if it gets any.
// following: the weight that will be read next; its first panels are fetched in time.
template <class Element, class Prepare, class Finish>
class Product {
 public:
  Product(const Turn& turn, const Element* a, ptrdiff_t stride, int n_rows, const PackedWeight<Element>& weight,
          const PackedWeight<Element>& following, Prepare prepare, Finish finish)
      : a_(a), stride_(stride), n_rows_(n_rows), weight_(weight), following_(following), prepare_(prepare),
        finish_(finish), n_blocks_(divide_up(n_rows, kRowsOfPiece)),
        end_(turn.team.first_piece(turn.thread + 1, n_pieces())),
        next_panel_(turn.team.first_piece(turn.thread, following.n_panels)) {}

  int n_pieces() const { return weight_.n_panels * n_blocks_; }

  void operator()(int piece) {
    if (!prepared_) prepare_(), prepared_ = true;
    const int panel = piece / n_blocks_, block = piece % n_blocks_;
    const int first = block * kRowsOfPiece, end = std::min(n_rows_, first + kRowsOfPiece);
    const int n_tiles = divide_up(end - first, kTileRows);
    const int tile_rows = divide_up(end - first, n_tiles);  // of one size: small ones are slow
    Fetch fetch = block == 0 ? fetch_after(piece, panel, n_tiles) : Fetch{};
    alignas(64) float sums[kTileRows * kPanel];
    for (int row = first; row < end; row += tile_rows) {
      const int n = std::min(tile_rows, end - row);
      multiply_some_rows<Element>(n, a_ + row * stride_, stride_, weight_.panel(panel), weight_.n_steps, fetch, sums);
      for (int r = 0; r < n; r++) finish_(row + r, panel, sums + r * kPanel);
      if (fetch.from != nullptr) fetch.from += weight_.n_steps * fetch.bytes_per_step;
    }
  }

 private:
  // The panel that this thread will read after those of `piece`, in this product or in the following one.
  Fetch fetch_after(int piece, int panel, int n_tiles) const {
    const bool here = piece + n_blocks_ < end_ && panel + 1 < weight_.n_panels;
    const PackedWeight<Element>& source = here ? weight_ : following_;
    const ptrdiff_t bytes = std::min(source.panel_size(), weight_.panel_size()) * ptrdiff_t{sizeof(Element)};
    const int a_step = static_cast<int>(bytes / weight_.n_steps);
    return {reinterpret_cast<const char*>(source.panel(here ? panel + 1 : next_panel_)),
            round_up(divide_up(a_step, n_tiles), 16)};
  }

  const Element* const a_;
  const ptrdiff_t stride_;
  const int n_rows_;
  const PackedWeight<Element> weight_, following_;
  Prepare prepare_;
  Finish finish_;
  const int n_blocks_, end_, next_panel_;
  bool prepared_ = false;
};

}  // namespace modelworks
