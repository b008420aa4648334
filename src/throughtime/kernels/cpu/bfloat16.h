// Products of numbers rounded to bfloat16, sums in float: by Intel's AMX tiles or by AVX512-BF16.
//
// Two successive terms of a sum are stored side by side, as a pair: rows of A are plain bfloat16, B is [pair][column].
// Sums are padded with zeros to whole tiles of DEEP pairs. To nearest, ties to even; a NaN stays one.
//
// On a Sapphire Rapids AVX512-BF16 does 83 GFLOP/s, half of what multiplications in float do, and AMX 1,270; AMD's processors have no
// AMX, and their AVX512-BF16 does twice what float does. `tt_bfloat16` in dispatch.cpp chooses by that.
#pragma once
#include <stdint.h>
#include <string.h>

#include "gemm.h"
#include "throughtime.h"
#include "vec.h"

extern "C" int tt_torch_pairs; // TT_PAIRS_...

namespace tt {
namespace {

constexpr int64_t TILE_PAIRS = 16;                                              // pairs in a row of a tile
constexpr int64_t pairs_of(int64_t k) { return (k + 2 * TILE_PAIRS - 1) / (2 * TILE_PAIRS) * TILE_PAIRS; }

// Bits of a bfloat16 in the upper half of each number.
TT_INLINE Vec<float>::I rounded(vec<float> v) {
  typedef Vec<float>::I I;
  const I bits = (I)v, odd = (bits >> 16) & 1, up = bits + 0x7fff + odd;
  return v == v ? up : bits | 0x400000;
}

// Two rows of numbers, whole vectors, side by side; a null is a row of zeros.
TT_INLINE void pair_rows(uint32_t *to, const float *first, const float *second, int64_t width) {
  typedef Vec<float>::I I;
  typedef uint32_t U __attribute__((vector_size(TT_BYTES)));
  for (int64_t x = 0; x < width; x += Vec<float>::N) {
    const U low = first ? (U)rounded(load(first + x)) >> 16 : U{}, high = second ? (U)rounded(load(second + x)) & 0xffff0000u : U{};
    const I both = (I)(low | high);
    memcpy(to + x, &both, sizeof both);
  }
}

// A panel (k, width) of whole vectors to (pairs_of(k), width).
__attribute__((unused)) void pair_panel(uint32_t *to, const float *from, int64_t k, int64_t width) {
  for (int64_t pair = 0; pair < pairs_of(k); pair++, to += width)
    pair_rows(to, 2 * pair < k ? from + 2 * pair * width : nullptr, 2 * pair + 1 < k ? from + (2 * pair + 1) * width : nullptr, width);
}

#if defined(__AVX512F__)

// Rounds `count` numbers to bfloat16 and fills up `pairs` pairs with zeros; null: all zeros. Like the products, the instruction takes
// denormal numbers as zero.
__attribute__((target("avx512bf16"))) inline void round_row(uint32_t *to, const float *from, int64_t count, int64_t pairs) {
  const auto first = [](int64_t numbers) { return static_cast<__mmask16>(numbers >= 16 ? 0xffff : numbers > 0 ? (1 << numbers) - 1 : 0); };
  for (int64_t i = 0; i < 2 * pairs; i += 16) {
    const __m512 numbers = from ? _mm512_maskz_loadu_ps(first(count - i), from + i) : _mm512_setzero_ps();
    _mm256_mask_storeu_epi16(to + i / 2, first(2 * pairs - i), (__m256i)_mm512_cvtneps_pbh(numbers));
  }
}

// As `multiply`, of pairs: rows of A are `row` apart, their pairs `STEP`.
template <int M, int N, int64_t STEP>
__attribute__((target("avx512bf16"))) void multiply_pairs(float *to, int64_t to_row, const float *from, int64_t from_row, const uint32_t *a, int64_t row,
                                                          const uint32_t *b, int64_t pairs) {
  constexpr int V = 16;
  __m512 acc[M][N];
  TT_UNROLL for (int i = 0; i < M; i++) TT_UNROLL for (int n = 0; n < N; n++) acc[i][n] = _mm512_loadu_ps(from + i * from_row + n * V);
  for (int64_t k = 0; k < pairs; k++, b += N * V) {
    __m512bh w[N];
    TT_UNROLL for (int n = 0; n < N; n++) w[n] = (__m512bh)_mm512_loadu_si512(b + n * V);
    TT_UNROLL for (int i = 0; i < M; i++) {
      const __m512bh s = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[i * row + k * STEP]));
      TT_UNROLL for (int n = 0; n < N; n++) acc[i][n] = _mm512_dpbf16_ps(acc[i][n], w[n], s);
    }
  }
  TT_UNROLL for (int i = 0; i < M; i++) TT_UNROLL for (int n = 0; n < N; n++) _mm512_storeu_ps(to + i * to_row + n * V, acc[i][n]);
}

using MultiplyPairs = void (*)(float *, int64_t, const float *, int64_t, const uint32_t *, int64_t, const uint32_t *, int64_t);

template <int64_t STEP> MultiplyPairs pairs_tile_of(int64_t rows, int64_t vectors) {
#define TT_ROW(m) {multiply_pairs<m, 1, STEP>, multiply_pairs<m, 2, STEP>, multiply_pairs<m, 3, STEP>, multiply_pairs<m, (m <= tile_rows(4) ? 4 : 1), STEP>}
  static const MultiplyPairs tiles[MAX_TILE_ROWS][NV] = {TT_ROW(1), TT_ROW(2), TT_ROW(3), TT_ROW(4), TT_ROW(5), TT_ROW(6), TT_ROW(7), TT_ROW(8)};
#undef TT_ROW
  return tiles[rows - 1][vectors - 1];
}

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11 || defined(__clang__) && __clang_major__ >= 12
#define TT_AMX 1
// 32 rows and 32 columns at a time. Whole tiles of rows are read and written, so there must be memory for them after the last one.
__attribute__((target("amx-tile,amx-bf16"))) inline void multiply_by_tiles(float *to, int64_t to_row, const float *from, int64_t from_row, const uint32_t *a,
                                                                           int64_t row, const uint32_t *b, int64_t width, int64_t m, int64_t pairs) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } const all;
  _tile_loadconfig(&all);
  const int64_t stride = 4 * to_row, before = 4 * from_row, of_a = 4 * row, of_b = 4 * width;
  for (int64_t i = 0; i < m; i += 32)
    for (int64_t n = 0; n < width; n += 32) {
      const bool lower = i + 16 < m, right = n + 16 < width;
      const float *const start = from + i * from_row + n;
      _tile_loadd(0, start, before);
      if (right) _tile_loadd(1, start + 16, before);
      if (lower) _tile_loadd(2, start + 16 * from_row, before);
      if (lower && right) _tile_loadd(3, start + 16 * from_row + 16, before);
      for (int64_t k = 0; k < pairs; k += TILE_PAIRS) {
        _tile_loadd(4, a + i * row + k, of_a);
        _tile_loadd(6, b + k * width + n, of_b);
        _tile_dpbf16ps(0, 4, 6);
        if (right) {
          _tile_loadd(7, b + k * width + n + 16, of_b);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (lower) {
          _tile_loadd(5, a + (i + 16) * row + k, of_a);
          _tile_dpbf16ps(2, 5, 6);
          if (right) _tile_dpbf16ps(3, 5, 7);
        }
      }
      float *const out = to + i * to_row + n;
      _tile_stored(0, out, stride);
      if (right) _tile_stored(1, out + 16, stride);
      if (lower) _tile_stored(2, out + 16 * to_row, stride);
      if (lower && right) _tile_stored(3, out + 16 * to_row + 16, stride);
    }
  _tile_release();
}
#endif

// made (tiles i0 to i1, vectors * V) = start + A (m, pairs) B: rows of A `row` apart, of `start` `stride`. It reads and writes up to 15 rows beyond the last one.
inline void multiply_panel_of_pairs(float *result, const uint32_t *a, int64_t row, const Partition &tiles, int64_t i0, int64_t i1, int64_t vectors,
                                    const uint32_t *panel, int64_t pairs, const float *start, int64_t stride) {
  constexpr int64_t V = 16;
  const int64_t width = vectors * V, origin = tiles.at(i0);
  if (!start) start = Zeros<float>::zeros, stride = 0;
#if defined(TT_AMX)
  if (__atomic_load_n(&tt_torch_pairs, __ATOMIC_RELAXED) == TT_PAIRS_AMX) return multiply_by_tiles(result, width, start, stride, a, row, panel, width, tiles.at(i1) - origin, pairs);
#endif
  for (int64_t i = i0; i < i1; i++) {
    const int64_t first = tiles.at(i) - origin;
    pairs_tile_of<1>(tiles.size(i), vectors)(result + first * width, width, start + first * stride, stride, a + first * row, row, panel, pairs);
  }
}

// Rows m0 to m1 of C = or += A B, both sides rounded; `scratch` as of `gemm_rows`, packed.
inline void gemm_rows_of_pairs(int64_t m0, int64_t m1, int64_t n, int64_t k, const Left<float> &a, const Right<float> &right, const Out<float> &c,
                               uint32_t *scratch) {
  constexpr int64_t V = 16, WIDE = NV * V, HIGH = (GROUP + V - 1) / V * V;
  uint32_t *const panel = scratch, *const left = scratch + L2_ROWS / 2 * WIDE;
  float two[2][WIDE > HIGH ? WIDE : HIGH], result[MAX_TILE_ROWS * WIDE];
  uint32_t both[HIGH];
  const Partition panels((n + V - 1) / V, NV);
  for (int64_t k0 = 0; k0 < k; k0 += L2_ROWS) {
    const int64_t k1 = k0 + L2_ROWS < k ? k0 + L2_ROWS : k, pairs = (k1 - k0 + 1) / 2;
    for (int64_t group = m0; group < m1; group += GROUP)
      for (int64_t pair = 0; pair < pairs; pair++) {
        memset(two, 0, sizeof two);
        for (int64_t half = 0, at = k0 + 2 * pair; half < 2 && at < k1; half++, at++)
          for (int64_t i = 0; i < GROUP && group + i < m1; i++) two[half][i] = a.from[(group + i) * a.row + at * a.step];
        pair_rows(both, two[0], two[1], HIGH);
        memcpy(left + (group - m0) * pairs + pair * GROUP, both, sizeof(uint32_t) * GROUP);
      }
    for (int64_t p = 0; p < panels.parts; p++) {
      const int64_t column = panels.at(p) * V, vectors = panels.size(p), width = vectors * V, valid = n - column < width ? n - column : width;
      for (int64_t pair = 0; pair < pairs; pair++) {
        memset(two, 0, sizeof two);
        for (int64_t half = 0, at = k0 + 2 * pair; half < 2 && at < k1; half++, at++)
          if (const float *const from = right.at(at)) memcpy(two[half], from + column, sizeof(float) * valid);
        pair_rows(panel + pair * width, two[0], two[1], width);
      }
      for (int64_t group = m0; group < m1; group += GROUP) {
        const Partition tiles(m1 - group < GROUP ? m1 - group : GROUP, tile_rows(static_cast<int>(vectors)));
        for (int64_t i = 0; i < tiles.parts; i++) {
          pairs_tile_of<GROUP>(tiles.size(i), vectors)(result, width, Zeros<float>::zeros, 0, left + (group - m0) * pairs + tiles.at(i), 1, panel, pairs);
          put(c, result, width, group + tiles.at(i), tiles.size(i), column, valid, k0 || c.add);
        }
      }
    }
  }
}

#endif // AVX-512

} // namespace
} // namespace tt
