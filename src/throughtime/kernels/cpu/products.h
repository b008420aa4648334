// Products of whole matrices, distributed over threads; products of lanes with weights, step by step; scratch memory.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bfloat16.h"
#include "gemm.h"
#include "pool.h"
#include "throughtime.h"
#include "vec.h"

namespace tt {
namespace {

constexpr int64_t ROWS_PER_TASK = 384;              // rows of one task
constexpr int64_t MIN_BLAS_SIDE = 256;              // of the longer side of a product in one call of a BLAS, at least
constexpr int64_t MAX_BLAS_PARTS = 8;               // of that side, at most: the other matrix is packed again for each
constexpr int64_t MIN_PARALLEL_WORK = 4 * 1000 * 1000; // multiplications from which a product is worth a second thread
constexpr int64_t SPARE_ROWS = 15;               // rows that a product of bfloat16 may write after the last one

// Memory of one call, freed at its end. Small requests come from the stack of their thread, whose pages stay: the allocator took a fifth of
// the fixed cost of a call, and had the system clear some pages anew. Arenas of a thread end in the order opposite to their start.
class Arena {
public:
  Arena() : stack_(tt_thread_stack()), before_(stack_ ? stack_->used : 0) {}
  ~Arena() {
    if (stack_) stack_->used = before_;
    for (int i = 0; i < count_; i++) free(taken_[i]);
  }
  template <class F> F *take(int64_t numbers) {
    const int64_t bytes = (int64_t(sizeof(F)) * (numbers > 0 ? numbers : 1) + 63) / 64 * 64;
    if (stack_ && bytes <= TT_STACK_BYTES - stack_->used) {
      stack_->used += bytes;
      return reinterpret_cast<F *>(stack_->base + stack_->used - bytes);
    }
    void *p = nullptr;
    if (count_ == MOST || posix_memalign(&p, 64, bytes)) {
      failed = true;
      return nullptr;
    }
    taken_[count_++] = p;
    return static_cast<F *>(p);
  }
  template <class F> F *zeros(int64_t numbers) {
    F *p = take<F>(numbers);
    if (p) memset(p, 0, sizeof(F) * numbers);
    return p;
  }
  bool failed = false;

private:
  static constexpr int MOST = 40;
  tt_stack *const stack_;
  const int64_t before_;
  void *taken_[MOST];
  int count_ = 0;
};

// One side of a product in 1, 2, 4 or 8 parts: whole tiles of a BLAS, except the last.
struct Parts {
  int64_t side, grain, parts = 1;
  Parts(int64_t side_, int64_t grain_) : side(side_), grain(grain_) {
    while (parts < MAX_BLAS_PARTS && side >= 2 * parts * MIN_BLAS_SIDE) parts *= 2;
  }
  int64_t at(int64_t part) const { return part == parts ? side : (side / grain) * part / parts * grain; }
};

// A matrix as a BLAS reads it, row by row; `transposed`: its transpose lies there.
template <class N> struct Matrix {
  const N *from;
  int64_t stride; // row stride in memory
  bool transposed;
  const N *row(int64_t i) const { return from + (transposed ? i : i * stride); }
  const N *column(int64_t i) const { return from + (transposed ? i * stride : i); }
  const char *op() const { return transposed ? "T" : "N"; }
};

// Whether a BLAS with 32-bit integers can compute a product, and the product is large enough.
template <class F> bool by_blas(tt_gemm blas, int64_t m, int64_t n, int64_t k, int64_t a_apart, int64_t b_apart, const Out<F> &c) {
  constexpr int64_t most = INT32_MAX;
  return blas && m * n * k >= MIN_PARALLEL_WORK && m <= most && n <= most && k <= most && a_apart <= most && b_apart <= most && c.row <= most;
}

// By a BLAS, column by column: C' = B' A'. The longer side is cut in parts, each on one thread, independent of the number of threads: the
// BLAS itself would cut, and so round, differently for each number.
template <class N, class F>
void gemm_in_parts(tt_gemm blas, int threads, int64_t m, int64_t n, int64_t k, const Matrix<N> &a, const Matrix<N> &b, const Out<F> &c) {
  const bool wide = n > m;
  const Parts parts(wide ? n : m, wide ? 48 : 8);
  share(threads, parts.parts, [&](int64_t part) {
    const int64_t from = parts.at(part), to = parts.at(part + 1), m0 = wide ? 0 : from, m1 = wide ? m : to, n0 = wide ? from : 0, n1 = wide ? to : n;
    for (int64_t i = m0; c.start && !c.add && i < m1; i++) memcpy(c.to + i * c.row + n0, c.start + n0, sizeof(F) * (n1 - n0));
    const int rows = static_cast<int>(m1 - m0), columns = static_cast<int>(n1 - n0), depth = static_cast<int>(k);
    const int of_a = static_cast<int>(a.stride), of_b = static_cast<int>(b.stride), of_c = static_cast<int>(c.row);
    const F one = 1, keep = c.add || c.start ? F(1) : F(0);
    const int before = tt_torch_gemm_threads ? tt_torch_gemm_threads(1) : 0;
    blas(b.op(), a.op(), &columns, &rows, &depth, &one, b.column(n0), &of_b, a.row(m0), &of_a, &keep, c.to + m0 * c.row + n0, &of_c);
    if (tt_torch_gemm_threads) tt_torch_gemm_threads(before);
  });
}

// By the BLAS of torch; false if it has none. Scattered rows of B are copied first.
template <class F> bool gemm_by_blas(int threads, int64_t m, int64_t n, int64_t k, const Left<F> &a, const Right<F> &right, const Out<F> &c) {
  const tt_gemm blas = __atomic_load_n(tt_torch_gemm + (sizeof(F) == 8), __ATOMIC_RELAXED);
  const bool transposed = a.row == 1 && a.step != 1, scattered = right.index || right.first || right.skip;
  const Matrix<F> left = {a.from, transposed ? a.step : a.row, transposed};
  if (!by_blas(blas, m, n, k, left.stride, right.row, c)) return false;
  Arena arena;
  F *const copied = scattered ? arena.take<F>(k * n) : nullptr;
  if (arena.failed) return false;
  for (int64_t i = 0; scattered && i < k; i++) {
    const F *const from = right.at(i);
    if (from)
      memcpy(copied + i * n, from, sizeof(F) * n);
    else
      memset(copied + i * n, 0, sizeof(F) * n);
  }
  gemm_in_parts(blas, threads, m, n, k, left, scattered ? Matrix<F>{copied, n, false} : Matrix<F>{right.base, right.row, right.transposed}, c);
  return true;
}

#if defined(__AVX512F__)
// The same for numbers rounded to bfloat16; both factors are copied.
bool gemm_of_pairs_by_blas(int threads, int64_t m, int64_t n, int64_t k, const Left<float> &a, const Right<float> &right, const Out<float> &c) {
  const tt_gemm blas = __atomic_load_n(&tt_torch_gemm[TT_BF16], __ATOMIC_RELAXED);
  const bool transposed = a.row == 1 && a.step != 1;
  const int64_t rows = transposed ? k : m, columns = transposed ? m : k, of_a = (columns + 1) / 2 * 2, of_b = (n + 1) / 2 * 2; // whole pairs
  if (!by_blas(blas, m, n, k, of_a, of_b, c)) return false;
  Arena arena;
  uint32_t *const left = arena.take<uint32_t>(rows * of_a / 2), *const b = arena.take<uint32_t>(k * of_b / 2);
  if (arena.failed) return false;
  for (int64_t i = 0; i < rows; i++) round_row(left + i * of_a / 2, a.from + i * (transposed ? a.step : a.row), columns, of_a / 2);
  for (int64_t i = 0; i < k; i++) round_row(b + i * of_b / 2, right.at(i), n, of_b / 2);
  typedef Matrix<uint16_t> Half;
  gemm_in_parts(blas, threads, m, n, k, Half{reinterpret_cast<const uint16_t *>(left), of_a, transposed}, Half{reinterpret_cast<const uint16_t *>(b), of_b, false}, c);
  return true;
}
#endif

// C as `c` says; HALF: both factors are rounded to bfloat16, and there is no `start`.
template <class F, bool HALF = false>
void gemm(int threads, int64_t m, int64_t n, int64_t k, const Left<F> &a, const Right<F> &right, const Out<F> &c, F *scratch, int64_t each) {
#if defined(__AVX512F__)
  if constexpr (HALF) {
    if (gemm_of_pairs_by_blas(threads, m, n, k, a, right, c)) return;
    const int64_t high = (m + GROUP - 1) / GROUP;
    const Partition pieces(high, (high + threads - 1) / threads);
    return share(threads, pieces.parts, [&](int64_t i) {
      const int64_t m1 = pieces.at(i + 1) * GROUP;
      gemm_rows_of_pairs(pieces.at(i) * GROUP, m1 < m ? m1 : m, n, k, a, right, c, reinterpret_cast<uint32_t *>(scratch + i * each));
    });
  }
#endif
  if (gemm_by_blas(threads, m, n, k, a, right, c)) return;
  const int64_t groups = (m + GROUP - 1) / GROUP;
  const Partition parts(groups, (groups + threads - 1) / threads);
  share(threads, parts.parts, [&](int64_t i) {
    const int64_t m1 = parts.at(i + 1) * GROUP;
    gemm_rows<F>(parts.at(i) * GROUP, m1 < m ? m1 : m, n, k, a, right, c, scratch + i * each);
  });
}

// Consecutive tiles of lanes.
struct Span {
  const Partition &tiles;
  int64_t i0, i1;
  int64_t b0() const { return tiles.at(i0); }
  int64_t b1() const { return tiles.at(i1); }
};

// The left factor of the products of a step, a row of k numbers for each lane: in place, or rounded to bfloat16.
template <class F, bool HALF> struct Lanes {
  typedef F Number;
  const F **rows;
  const F *zeros;
  int64_t k;

  static int64_t depth(int64_t k) { return k; } // rows of a panel of weights
  void take(Arena &arena, int64_t lanes, int64_t numbers) { rows = arena.take<const F *>(lanes), zeros = arena.zeros<F>(numbers), k = numbers; }
  void set(int64_t lane, const F *row) const { rows[lane] = row ? row : zeros; } // null: zeros
  // made = start + the product with a panel.
  void times(F *result, const Span &span, int64_t vectors, const F *panel, const F *start, int64_t stride, bool reversed = false) const {
    multiply_panel(result, rows + span.b0(), span.tiles, span.i0, span.i1, vectors, panel, k, start, stride, reversed);
  }
  static void pack(F *to, const F *panel, int64_t k, int64_t width) { memcpy(to, panel, sizeof(F) * k * width); }
};

#if defined(__AVX512F__)
template <> struct Lanes<float, true> {
  typedef uint32_t Number;
  uint32_t *rows;
  int64_t k, pairs;

  static int64_t depth(int64_t k) { return pairs_of(k); }
  void take(Arena &arena, int64_t lanes, int64_t numbers) {
    k = numbers, pairs = pairs_of(numbers), rows = arena.zeros<uint32_t>((lanes + SPARE_ROWS) * pairs);
  }
  void set(int64_t lane, const float *row) const { round_row(rows + lane * pairs, row, k, pairs); }
  void times(float *result, const Span &span, int64_t vectors, const uint32_t *panel, const float *start, int64_t stride, bool = false) const {
    multiply_panel_of_pairs(result, rows + span.b0() * pairs, pairs, span.tiles, span.i0, span.i1, vectors, panel, pairs, start, stride);
  }
  static void pack(uint32_t *to, const float *panel, int64_t k, int64_t width) { pair_panel(to, panel, k, width); }
};
#endif

} // namespace
} // namespace tt
