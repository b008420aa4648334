// Matrix products, built from a register tile of rows times vectors of columns.
//
//     C (M x N)  =  start + A (M x K) B (K x N)
//
// B is packed in panels of up to 4 vectors of columns, which stay in a cache for all rows of A. A is packed too if its rows are strided. The
// order of a sum depends on the height of its tile. Tiles are the same for any number of threads, so results are the same to the bit.
//
// Reference: K. Goto and R. van de Geijn, Anatomy of high-performance matrix multiplication, ACM TOMS 34 (2008).
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <utility>

#include "vec.h"

namespace tt {
namespace {

constexpr int NV = 4;    // vectors of columns in a panel
constexpr int L1_ROWS = 128; // rows of a panel for few rows of A: 32 KiB, within the first-level cache
constexpr int L2_ROWS = 256;  // rows of a panel for many rows of A: in the second-level cache, and C is read and written half as often

// Rows of a tile: accumulators, one row of B and a number of A must fit in registers.
constexpr int tile_rows(int vectors) {
#if TT_REGISTERS == 32
  return vectors == 4 ? 6 : 8;
#else
  return vectors == 4 ? 3 : vectors == 3 ? 4 : 6;
#endif
}

// A tile: to[i][n] = from[i][n] + sum over k of rows[i][k] * b[k][n], whole vectors; `to_row` and `from_row` are row strides.
template <class F> using Multiply = void (*)(F *to, int64_t to_row, const F *from, int64_t from_row, const F *const *rows, const F *b, int64_t count, const F *next);

// Rows of A that are packed together, [k][GROUP]: a whole number of tiles of any height.
constexpr int GROUP = 24;

// How a tile reads A: row by row; packed, from rows[0][k * GROUP + i]; row by row, while it prefetches one vector per row at `next`.
enum Access { DIRECT, PACKED, PREFETCH };

// Unrolled explicitly, so sums stay in registers at any level of optimization.
template <class F, int M, int N, Access ACCESS>
void multiply(F *to, int64_t to_row, const F *from, int64_t from_row, const F *const *rows, const F *b, int64_t count, const F *next) {
  constexpr int V = Vec<F>::N;
  constexpr int64_t STEP = ACCESS == PACKED ? GROUP : 1;
  vec<F> acc[M][N];
  const F *a[M];
  TT_UNROLL for (int i = 0; i < M; i++) {
    a[i] = ACCESS == PACKED ? rows[0] + i : rows[i];
    TT_UNROLL for (int n = 0; n < N; n++) acc[i][n] = load(from + i * from_row + n * V);
  }
  int64_t k = 0;
  constexpr int SUMS = M * N >= 8 ? 1 : M * N >= 4 ? 2 : 4; // several sums in parallel hide the latency of a multiplication
  if constexpr (SUMS > 1) {
    vec<F> extra[SUMS - 1][M][N] = {};
    for (; k + SUMS <= count; k += SUMS, b += SUMS * N * V)
      TT_UNROLL for (int i = 0; i < M; i++) TT_UNROLL for (int n = 0; n < N; n++) {
        acc[i][n] += load(b + n * V) * a[i][k * STEP];
        TT_UNROLL for (int j = 1; j < SUMS; j++) extra[j - 1][i][n] += load(b + (j * N + n) * V) * a[i][(k + j) * STEP];
      }
    TT_UNROLL for (int i = 0; i < M; i++) TT_UNROLL for (int n = 0; n < N; n++) {
      acc[i][n] += extra[0][i][n];
      if constexpr (SUMS == 4) acc[i][n] += extra[1][i][n] + extra[2][i][n];
    }
  }
  for (; k < count; k++, b += N * V) {
    if constexpr (ACCESS == PREFETCH) prefetch(next + k * N * V, 1);
    vec<F> w[N];
    TT_UNROLL for (int n = 0; n < N; n++) w[n] = load(b + n * V);
    TT_UNROLL for (int i = 0; i < M; i++) {
      const F s = a[i][k * STEP];
      TT_UNROLL for (int n = 0; n < N; n++) acc[i][n] += w[n] * s;
    }
  }
  TT_UNROLL for (int i = 0; i < M; i++) TT_UNROLL for (int n = 0; n < N; n++) store<F>(to + i * to_row + n * V, acc[i][n]);
}

constexpr int MAX_TILE_ROWS = 8;

// The function for a tile of this size.
template <class F> Multiply<F> tile_of(int rows, int vectors, Access access) {
#define TT_ROW(m, w) {multiply<F, m, 1, w>, multiply<F, m, 2, w>, multiply<F, m, 3, w>, multiply<F, m, (m <= tile_rows(4) ? 4 : 1), w>}
#define TT_ALL(w) {TT_ROW(1, w), TT_ROW(2, w), TT_ROW(3, w), TT_ROW(4, w), TT_ROW(5, w), TT_ROW(6, w), TT_ROW(7, w), TT_ROW(8, w)}
  static const Multiply<F> tiles[3][MAX_TILE_ROWS][NV] = {TT_ALL(DIRECT), TT_ALL(PACKED), TT_ALL(PREFETCH)};
#undef TT_ALL
#undef TT_ROW
  return tiles[access][rows - 1][vectors - 1];
}

// The start of a tile that starts from zero: as many vectors as in a panel.
template <class F> struct Zeros {
  alignas(TT_BYTES) static const F zeros[NV * Vec<F>::N];
};
template <class F> alignas(TT_BYTES) const F Zeros<F>::zeros[NV * Vec<F>::N] = {};

struct Partition { // `total` in `parts` of at most `most`, as even as possible
  int64_t total, parts;
  Partition(int64_t total_, int64_t most) : total(total_), parts(most > 0 ? (total_ + most - 1) / most : 0) {}
  int64_t at(int64_t part) const { return total * part / parts; }
  int64_t size(int64_t part) const { return at(part + 1) - at(part); }
};

// Rows of A anywhere, a panel of B: made (rows, vectors * V) = start + the product, in blocks of the panel that fit in the first-level cache.
// `rows`, `result` and `start` begin with tile i0 of `tiles`, which are the same for all threads: the order of a sum depends on its tile.
// Rows of `start` are `stride`; it may be `result`, or null: zeros. A long panel is one of many that exceed the second-level cache: each tile
// prefetches a part of the next block. `reversed`: the last block first, which a call before may have left in the first-level cache.
template <class F>
void multiply_panel(F *result, const F *const *rows, const Partition &tiles, int64_t i0, int64_t i1, int64_t vectors, const F *panel, int64_t k, const F *start,
                    int64_t stride, bool reversed = false) {
  const int64_t width = vectors * Vec<F>::N, origin = tiles.at(i0);
  const Access access = k > 2 * L1_ROWS ? PREFETCH : DIRECT;
  if (!start) start = Zeros<F>::zeros, stride = 0;
  const int64_t blocks = (k + L1_ROWS - 1) / L1_ROWS;
  for (int64_t part = 0; part < blocks; part++) {
    const int64_t k0 = (reversed ? blocks - 1 - part : part) * L1_ROWS, length = k - k0 < L1_ROWS ? k - k0 : L1_ROWS;
    for (int64_t i = i0; i < i1; i++) {
      const int64_t first = tiles.at(i) - origin, valid = tiles.size(i);
      const F *current[MAX_TILE_ROWS];
      for (int64_t r = 0; r < valid; r++) current[r] = rows[first + r] + k0;
      F *const to = result + first * width;
      const F *const block = panel + k0 * width, *const next = block + length * width + (i - i0) % vectors * Vec<F>::N;
      const Multiply<F> multiply_tile = tile_of<F>(static_cast<int>(valid), static_cast<int>(vectors), access);
      if (part)
        multiply_tile(to, width, to, width, current, block, length, next);
      else
        multiply_tile(to, width, start + first * stride, stride, current, block, length, next);
    }
  }
}

template <class F> struct Left { // A
  const F *from;
  int64_t row, step; // between rows, between columns; one of them is 1
};

// B: row k is `base + row * k`, or `base + row * index[k]`; the first `firsts` rows are at `first`. Where `skip[k]`, or the index is
// negative, it is zeros. Or `transposed`: B' lies at `base`, its rows so far apart, and nothing else of this; not for bfloat16.
template <class F> struct Right {
  const F *base;
  int64_t row;
  const int32_t *index = nullptr;
  const F *first = nullptr;
  int64_t firsts = 0;
  const uint8_t *skip = nullptr;
  bool transposed = false;

  const F *at(int64_t k) const {
    if (skip && skip[k]) return nullptr;
    if (k < firsts) return first + k * row;
    if (!index) return base + (k - firsts) * row;
    return index[k] < 0 ? nullptr : base + index[k] * row;
  }
};

template <class F> struct Out { // C
  F *to;
  int64_t row;         // row stride
  const F *start;      // the initial value of each row, whole vectors; null: zeros
  bool add;            // add to C
  bool padded = false;  // whether whole vectors may be written after the last column
};

// The low or high halves of two vectors, interleaved.
template <class F, bool HIGH, size_t... I> TT_INLINE vec<F> interleave(vec<F> a, vec<F> b, std::index_sequence<I...>) {
  constexpr int V = Vec<F>::N;
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, (int(I) / 2 + (HIGH ? V / 2 : 0) + int(I) % 2 * V)...);
#else
  return __builtin_shuffle(a, b, typename Vec<F>::I{(int(I) / 2 + (HIGH ? V / 2 : 0) + int(I) % 2 * V)...});
#endif
}

// Transposes (V rows x columns), at most V columns.
template <class F> void transpose_square(F *to, int64_t stride, const F *from, int64_t columns, int64_t from_apart) {
  constexpr int V = Vec<F>::N;
  typedef std::make_index_sequence<V> Index;
  vec<F> rows[V], next[V];
  for (int r = 0; r < V; r++) rows[r] = load_part(from + r * from_apart, static_cast<int>(columns));
  for (int n = 1; n < V; n *= 2) { // each time, one bit of the index of a row goes to that of a column
    for (int i = 0; i < V / 2; i++) {
      next[2 * i] = interleave<F, false>(rows[i], rows[i + V / 2], Index());
      next[2 * i + 1] = interleave<F, true>(rows[i], rows[i + V / 2], Index());
    }
    memcpy(rows, next, sizeof rows);
  }
  for (int64_t c = 0; c < columns; c++) store<F>(to + c * stride, rows[c]);
}

// Transposes (rows x columns) with row stride `from_stride` to (columns x rows), whose rows are `stride`.
template <class F> void transpose(F *to, int64_t stride, const F *from, int64_t rows, int64_t columns, int64_t from_apart) {
  constexpr int64_t V = Vec<F>::N;
  int64_t whole = 0;
  for (; whole + V <= rows; whole += V)
    for (int64_t c = 0; c < columns; c += V)
      transpose_square(to + whole + c * stride, stride, from + whole * from_apart + c, columns - c < V ? columns - c : V, from_apart);
  for (int64_t r = whole; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) to[c * stride + r] = from[r * from_apart + c];
}

// Packs rows k0 to k1 of B to [k][width], whole vectors, zeros after the last column.
template <class F> void pack_right(F *to, const Right<F> &right, int64_t k0, int64_t k1, int64_t column, int64_t columns, int64_t width) {
  constexpr int V = Vec<F>::N;
  const int64_t valid = columns - column < width ? columns - column : width;
  if (right.transposed) {
    if (valid < width) memset(to, 0, sizeof(F) * width * (k1 - k0));
    return transpose(to, width, right.base + column * right.row + k0, valid, k1 - k0, right.row);
  }
  for (int64_t k = k0; k < k1; k++, to += width) {
    const F *from = right.at(k);
    if (!from || valid < width) memset(to, 0, sizeof(F) * width);
    if (!from) continue;
    if (valid == width)
      for (int64_t x = 0; x < width; x += V) store<F>(to + x, load(from + column + x));
    else
      memcpy(to, from + column, sizeof(F) * valid);
  }
}

template <class F> void pack_left(F *to, const Left<F> &a, int64_t m0, int64_t m1, int64_t k0, int64_t k1) {
  for (int64_t first = m0; first < m1; first += GROUP, to += GROUP * (k1 - k0)) {
    const F *from = a.from + first + k0 * a.step;
    if (m1 - first >= GROUP)
      for (int64_t k = 0; k < k1 - k0; k++, from += a.step) memcpy(to + k * GROUP, from, sizeof(F) * GROUP);
    else
      for (int64_t k = 0; k < k1 - k0; k++, from += a.step) memcpy(to + k * GROUP, from, sizeof(F) * (m1 - first));
  }
}

template <class F> int64_t gemm_scratch(int64_t m, bool packed) {
  return L2_ROWS * NV * Vec<F>::N + (packed ? (m + GROUP - 1) / GROUP * GROUP * L2_ROWS : 0);
}

// Copies or adds a tile to rows of C that end within a vector.
template <class F> void put(const Out<F> &c, const F *result, int64_t made_row, int64_t first, int64_t rows, int64_t column, int64_t columns, bool add) {
  for (int64_t i = 0; i < rows; i++) {
    F *const to = c.to + (first + i) * c.row + column;
    const F *const from = result + i * made_row;
    if (add)
      for (int64_t x = 0; x < columns; x++) to[x] += from[x];
    else if (c.start)
      for (int64_t x = 0; x < columns; x++) to[x] = from[x] + c.start[column + x];
    else
      memcpy(to, from, sizeof(F) * columns);
  }
}

// One part of a product: rows m0 to m1 of C, N columns.
template <class F>
void gemm_rows(int64_t m0, int64_t m1, int64_t n, int64_t k, const Left<F> &a, const Right<F> &right, const Out<F> &c, F *scratch) {
  constexpr int V = Vec<F>::N;
  const bool packed = a.row == 1 && a.step != 1;
  F *const panel = scratch, *const left = scratch + L2_ROWS * NV * V;
  F result[MAX_TILE_ROWS * NV * V];
  const Partition panels((n + V - 1) / V, NV);
  for (int64_t k0 = 0; k0 == 0 || k0 < k; k0 += L2_ROWS) {
    const int64_t k1 = k0 + L2_ROWS < k ? k0 + L2_ROWS : k;
    const bool add = k0 || c.add;
    if (packed) pack_left(left, a, m0, m1, k0, k1);
    for (int64_t p = 0; p < panels.parts; p++) {
      const int64_t column = panels.at(p) * V, vectors = panels.size(p), valid = n - column < vectors * V ? n - column : vectors * V;
      const bool direct = c.padded || valid == vectors * V;
      const int most = tile_rows(static_cast<int>(vectors));
      pack_right(panel, right, k0, k1, column, n, vectors * V);
      for (int64_t group = m0; group < m1; group += GROUP) {
        const Partition tiles(m1 - group < GROUP ? m1 - group : GROUP, most);
        for (int64_t i = 0; i < tiles.parts; i++) {
          const int64_t first = group + tiles.at(i), tile_height = tiles.size(i);
          const F *rows[MAX_TILE_ROWS];
          if (packed)
            rows[0] = left + (group - m0) * (k1 - k0) + tiles.at(i);
          else
            for (int64_t r = 0; r < tile_height; r++) rows[r] = a.from + (first + r) * a.row + k0;
          const Multiply<F> multiply_tile = tile_of<F>(static_cast<int>(tile_height), static_cast<int>(vectors), packed ? PACKED : DIRECT);
          if (direct) {
            F *const to = c.to + first * c.row + column;
            const F *const from = add ? to : c.start ? c.start + column : Zeros<F>::zeros;
            multiply_tile(to, c.row, from, add ? c.row : 0, rows, panel, k1 - k0, nullptr);
          } else {
            multiply_tile(result, vectors * V, Zeros<F>::zeros, 0, rows, panel, k1 - k0, nullptr);
            put(c, result, vectors * V, first, tile_height, column, valid, add);
          }
        }
      }
    }
  }
}

} // namespace
} // namespace tt
