// The sizes of a call, and the layout of its gates.
//
// The sums that enter the gates, and their gradients, are stored as [block of V units][gate][V], so a tile holds all gates of its units. If
// the last block has fewer units than V, it is stored without gaps: [gate][units]. `saved` holds the values of the gates, (T, B, Np), with
// whole vectors in the last block too. After them it holds c of an LSTM, or W_hn h + b_hn of a GRU, (T, B, Hp), zeros after the last unit.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "products.h"

namespace tt {
namespace {

constexpr int64_t BLOCK_BYTES = 512 * 1024;     // bytes of gates in a block of steps, within the second-level cache
constexpr int64_t MIN_BLOCK_ROWS = 384;            // rows in a block at least: each panel of weights is packed once for all of them
constexpr int64_t L2_BYTES = 2048 * 1024;   // if that many rows exceed any second-level cache, a block has twice as many
constexpr int64_t MAX_APART_BYTES = 16 * 1024; // bytes of the sums of a step up to which all are computed before the gates
constexpr int64_t MAX_JOINED_BYTES = 512 * 1024;     // bytes of the inputs' weights up to which every step reads them again from the second-level cache

enum Cell { LSTM, GRU, RNN };

constexpr int gates_of(Cell cell) { return cell == LSTM ? 4 : cell == GRU ? 3 : 1; }

// The columns of h in panels of vectors. With few lanes, a last vector with few columns is separate and computed as dot products along rows
// of the weights: that costs one operation per vector of a row, not one per number.
template <int V> struct Columns {
  bool separate;
  Partition panels;
  Columns(int64_t P, bool few) : separate(few && P % V && P % V <= V / 4), panels((P + V - 1) / V - separate, NV) {}
  int64_t parts() const { return panels.parts + separate; }
  bool along(int64_t j) const { return j == panels.parts; }
  int64_t at(int64_t j) const { return along(j) ? panels.total : panels.at(j); }
  int64_t size(int64_t j) const { return along(j) ? 1 : panels.size(j); }
};

template <class F, Cell CELL> struct Sizes {
  static constexpr int V = Vec<F>::N, G = gates_of(CELL);
  static constexpr int UNITS = CELL == RNN ? NV : 1; // blocks of units in a panel of the product with h
  static constexpr int ROWS = tile_rows(UNITS * G);  // lanes in a tile of it
  static constexpr int BACK_ROWS = tile_rows(NV);
  // K: gates, Nc: the same in whole vectors, Np: with every gate in whole vectors, Ns: from a row of gates' gradients to the next
  int64_t T, B, D, H, P, blocks, Hp, p_blocks, Pp, Dp, K, Nc, Np, Ns, block;
  int threads;
  bool joined; // whether the inputs' product runs step by step, together with that of h

  explicit Sizes(const tt_call &call)
      : T(call.steps), B(call.lanes), D(call.inputs), H(call.hidden), P(call.outputs), blocks((H + V - 1) / V), Hp(blocks * V),
        p_blocks((P + V - 1) / V), Pp(p_blocks * V), Dp((D + V - 1) / V * V), K(G * H), Nc((K + V - 1) / V * V), Np(Hp * G),
        Ns(Np + (Np * sizeof(F) % 1024 ? 0 : V)), block(BLOCK_BYTES / (int64_t(sizeof(F)) * B * Np)), threads(threads_for(call.threads, shared_work())),
        joined(B >= ROWS && D * Np * int64_t(sizeof(F)) <= MAX_JOINED_BYTES) {
    const int64_t least = MIN_BLOCK_ROWS * Np * int64_t(sizeof(F)) > L2_BYTES ? 2 * MIN_BLOCK_ROWS : MIN_BLOCK_ROWS;
    if (block * B < least) block = (least + B - 1) / B;
    if (block > T) block = T;
  }
  // Multiplications of a forward pass that threads can share. Each thread takes whole tiles of lanes; of a single tile they share only the
  // products of many steps, which are too short to pay as soon.
  int64_t shared_work() const { return T * B * K * (D + P) / (B > BACK_ROWS || B > ROWS ? 1 : 4); }
  int64_t numbers() const { return CELL == RNN ? 0 : T * B * (Np + Hp); }
  int part(int64_t unit_block) const { return static_cast<int>(H - unit_block * V < V ? H - unit_block * V : V); }
  Columns<V> columns(bool half) const { return {P, B < ROWS && !half}; }
  int64_t column(int64_t unit_block) const { return unit_block < blocks ? unit_block * G * V : Nc; } // the first of a block
  // Calls with each column and its row of torch's weights.
  template <class Each> void rows(const Each &each) const {
    for (int64_t unit = 0, column = 0; unit < H; unit += V)
      for (int g = 0; g < G; g++)
        for (int64_t i = unit; i < H && i < unit + V; i++) each(column++, g * H + i);
  }
  bool apart(bool half) const { return B <= ROWS && !half && B * Nc * int64_t(sizeof(F)) <= MAX_APART_BYTES; } // one tile of lanes
  int share_of(int64_t m, int64_t n, int64_t k) const { return m * n * k < MIN_PARALLEL_WORK ? 1 : threads; }
};

// W (G*H, k) as (k, Nc), its columns in the order of gates; or in panels of UNITS blocks, [panel][k][columns of the panel].
template <class F, Cell CELL> void arrange(F *to, const Sizes<F, CELL> &s, const F *w, int64_t k, int units) {
  constexpr int V = Vec<F>::N, G = gates_of(CELL);
  for (int64_t u = 0; u < s.blocks; u++) {
    const int64_t panel = units ? u / units * units : 0, end = units && panel + units < s.blocks ? panel + units : s.blocks;
    const int64_t width = s.column(end) - s.column(panel), valid = s.column(u + 1) - s.column(u);
    F *const base = to + s.column(panel) * k + s.column(u) - s.column(panel);
    const int part = s.part(u);
    for (int g = 0; g < G; g++) transpose(base + g * part, width, w + (g * s.H + u * V) * k, part, k, k);
    for (int64_t j = 0; j < k && G * part < valid; j++) memset(base + j * width + G * part, 0, sizeof(F) * (valid - G * part));
  }
}

// The initial sums of the gates: both biases. For n of a GRU only that of h, which r multiplies; `of_n` receives that of the inputs.
template <class F, Cell CELL> void biases(F *to, F *of_n, const Sizes<F, CELL> &s, const F *b_ih, const F *b_hh) {
  if (!b_ih) return;
  s.rows([&](int64_t column, int64_t row) {
    const bool separate = CELL == GRU && row >= 2 * s.H;
    to[column] = separate ? b_hh[row] : b_ih[row] + b_hh[row];
    if (separate) of_n[row - 2 * s.H] = b_ih[row];
  });
}

template <class F> struct Rows { // one for each lane
  F *first;
  int64_t stride;
};

// Where the products of a span of lanes start; those of bfloat16 write whole tiles.
template <bool HALF> int64_t scratch_offset(const Span &span) { return span.b0() + (HALF ? span.i0 * SPARE_ROWS : 0); }

template <class F> void copy_padded(F *to, int64_t width, const F *from, int64_t rows, int64_t columns) { // rows, padded
  for (int64_t r = 0; r < rows; r++) memcpy(to + r * width, from + r * columns, sizeof(F) * columns);
}

} // namespace
} // namespace tt
