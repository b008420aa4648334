// The sizes of a call, and how its gates lie.
//
// What gates see lies as [block of V units][gate][V], so that a tile holds all gates of its units, and without gaps where the last block
// has fewer units than V: [gate][units]; so do its gradients. `saved` holds the gates' values, whole vectors in the last block too,
// (T, B, Np), and behind them c of an LSTM, or what n sees of h in a GRU, (T, B, Hp), zeros behind the last unit.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "products.h"

namespace tt {
namespace {

constexpr int64_t BLOCK = 512 * 1024;     // bytes of gates that a block of steps takes, within the second cache
constexpr int64_t LEAST = 384;            // rows that it takes even so: each panel of weights is packed once for all of them
constexpr int64_t BEYOND = 2048 * 1024;   // bytes of so many rows that are in no second cache: twice as many then
constexpr int64_t NARROW = 512 * 1024;     // bytes of the inputs' weights up to which they are read again at every step, from the second cache

enum Cell { LSTM, GRU, RNN };

constexpr int gates_of(Cell cell) { return cell == LSTM ? 4 : cell == GRU ? 3 : 1; }
constexpr int squares_of(Cell cell) { return cell == LSTM ? 6 : cell == GRU ? 4 : 1; }

// Vectors of h's columns, in panels; a last one that holds few is apart where there are few lanes: as sums along rows of weights it costs
// so many vectors a column as there are in a row, not one for every number.
template <int V> struct Columns {
  bool apart;
  Cut panels;
  Columns(int64_t P, bool few) : apart(few && P % V && P % V <= V / 4), panels((P + V - 1) / V - apart, NV) {}
  int64_t parts() const { return panels.parts + apart; }
  bool along(int64_t j) const { return j == panels.parts; }
  int64_t at(int64_t j) const { return along(j) ? panels.whole : panels.at(j); }
  int64_t size(int64_t j) const { return along(j) ? 1 : panels.size(j); }
};

template <class F, Cell CELL> struct Sizes {
  static constexpr int V = Vec<F>::N, G = gates_of(CELL), S = squares_of(CELL);
  static constexpr int UNITS = CELL == RNN ? NV : 1; // blocks of units in a panel of the product with h
  static constexpr int ROWS = tile_rows(UNITS * G);  // lanes in a tile of it
  static constexpr int BACK_ROWS = tile_rows(NV);
  // K: gates, Nc: the same in whole vectors, Np: with every gate in whole vectors, Ns: from a row of gates' gradients to the next
  int64_t T, B, D, H, P, blocks, Hp, p_blocks, Pp, Dp, K, Nc, Np, Ns, block;
  int threads;
  bool joined; // whether the inputs' product runs step by step, with that of h

  explicit Sizes(const tt_call &call)
      : T(call.steps), B(call.lanes), D(call.inputs), H(call.hidden), P(call.outputs), blocks((H + V - 1) / V), Hp(blocks * V),
        p_blocks((P + V - 1) / V), Pp(p_blocks * V), Dp((D + V - 1) / V * V), K(G * H), Nc((K + V - 1) / V * V), Np(Hp * G),
        Ns(Np + (Np * sizeof(F) % 1024 ? 0 : V)), block(BLOCK / (int64_t(sizeof(F)) * B * Np)), threads(call.threads),
        joined(B >= ROWS && D * Np * int64_t(sizeof(F)) <= NARROW) {
    const int64_t least = LEAST * Np * int64_t(sizeof(F)) > BEYOND ? 2 * LEAST : LEAST;
    if (block * B < least) block = (least + B - 1) / B;
    if (block > T) block = T;
  }
  int64_t numbers() const { return CELL == RNN ? 0 : T * B * (Np + Hp); }
  int part(int64_t unit_block) const { return static_cast<int>(H - unit_block * V < V ? H - unit_block * V : V); }
  Columns<V> columns(bool half) const { return {P, B < ROWS && !half}; }
  int64_t column(int64_t unit_block) const { return unit_block < blocks ? unit_block * G * V : Nc; } // the first of a block
  // The row of torch's weights that a column belongs to.
  int64_t row(int64_t column) const {
    const int64_t unit = column / (G * V) * V, units = H - unit < V ? H - unit : V, within = column - unit * G;
    return within / units * H + unit + within % units;
  }
  int share_of(int64_t m, int64_t n, int64_t k) const { return m * n * k < WORTH ? 1 : threads; }
};

// W (G*H, k) as (k, Nc), its columns in the order of gates; or in panels of UNITS blocks, [panel][k][columns of the panel].
template <class F, Cell CELL> void arrange(F *to, const Sizes<F, CELL> &s, const F *w, int64_t k, int units) {
  constexpr int V = Vec<F>::N, G = gates_of(CELL);
  for (int64_t u = 0; u < s.blocks; u++) {
    const int64_t panel = units ? u / units * units : 0, end = units && panel + units < s.blocks ? panel + units : s.blocks;
    const int64_t width = s.column(end) - s.column(panel), there = s.column(u + 1) - s.column(u);
    F *const base = to + s.column(panel) * k + s.column(u) - s.column(panel);
    const int part = s.part(u);
    for (int g = 0; g < G; g++) turn(base + g * part, width, w + (g * s.H + u * V) * k, part, k, k);
    for (int64_t j = 0; j < k && G * part < there; j++) memset(base + j * width + G * part, 0, sizeof(F) * (there - G * part));
  }
}

// What the gates begin with: both biases, but in a GRU only h's of n, which is multiplied by r; `of_n` is the inputs'.
template <class F, Cell CELL> void biases(F *to, F *of_n, const Sizes<F, CELL> &s, const F *b_ih, const F *b_hh) {
  for (int64_t column = 0; b_ih && column < s.K; column++) {
    const int64_t row = s.row(column);
    const bool apart = CELL == GRU && row >= 2 * s.H;
    to[column] = apart ? b_hh[row] : b_ih[row] + b_hh[row];
    if (apart) of_n[row - 2 * s.H] = b_ih[row];
  }
}

template <class F> struct Rows { // one for each lane
  F *first;
  int64_t apart;
};

// Room for the products of a span of lanes; those of bfloat16 write whole tiles.
template <bool HALF> int64_t room_of(const Span &span) { return span.b0() + (HALF ? span.i0 * ROOM : 0); }

template <class F> void lay_in(F *to, int64_t width, const F *from, int64_t rows, int64_t columns) { // rows, padded
  for (int64_t r = 0; r < rows; r++) memcpy(to + r * width, from + r * columns, sizeof(F) * columns);
}

} // namespace
} // namespace tt
