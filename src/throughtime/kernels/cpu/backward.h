// The backward pass of a layer. Each step multiplies the gate gradients of the next step by the weights and applies the derivatives of its
// gates. Weight gradients are products over blocks of steps, whose gate gradients fit in the second-level cache.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "sizes.h"

namespace tt {
namespace {

template <class F> struct BackwardBuffers { // scratch memory of a backward call
  F *along, *ds, *dx, *carry, *dh, *m, *sums, *sums_h, *dw_ih, *dw_hh, *result, *scratch;
  int32_t *rows;
  int64_t each;
};

template <class F, bool HALF> struct BackwardWeights { // the factors of its products
  Lanes<F, HALF> of_ds, of_dh;
  typename Lanes<F, HALF>::Number *wb, *wr;
};

// One step of lanes b0 to b1 and `blocks` of units from u0 on: from the gradient of h to those of the sums that enter the gates.
template <class F, Cell CELL>
__attribute__((noinline)) void backward_units(const tt_call &call, const Sizes<F, CELL> &s, const BackwardBuffers<F> &p, int64_t t, int64_t slot, int64_t b0, int64_t b1,
                                    int64_t u0, int64_t blocks, Rows<const F> of_h) {
  constexpr int V = Vec<F>::N, G = gates_of(CELL);
  const uint8_t *const resets = call.resets ? call.resets + t * s.B : nullptr;
  const vec<F> zero = {};
  const F *const saved = static_cast<const F *>(call.saved);
  for (int64_t b = b0; b < b1; b++) {
    const int64_t at = t * s.B + b, current = slot * s.B + b;
    const bool reset = resets && resets[b];
    for (int64_t u = u0; u < u0 + blocks; u++) {
      const int part = s.part(u);
      const F *const gates = saved + at * s.Np + u * G * V, *const extra = saved + s.T * s.B * s.Np + at * s.Hp + u * V;
      const F *const y = static_cast<const F *>(call.y) + at * s.P + u * V;
      F *const ds = p.ds + current * s.Ns + u * G * V, *const carry = p.carry + b * s.Hp + u * V;
      if (CELL != RNN && t) prefetch(gates - s.B * s.Np, G), prefetch(extra - s.B * s.Hp, 1);
      const auto gate_at = [&](int gate) { return first<F>(load(gates + gate * V), part); };
      // zeros after the last unit: 0 times infinity or NaN would be NaN
      vec<F> dh = first<F>(load(of_h.first + (b - b0) * of_h.stride + (u - u0) * V), part);
      if constexpr (CELL == LSTM) {
        const vec<F> i = gate_at(0), f = gate_at(1), g = gate_at(2), o = gate_at(3), c = tanh<F>(first<F>(load(extra), part));
        vec<F> before = zero;
        if (!reset) before = t ? first<F>(load(extra - s.B * s.Hp), part) : load_part(static_cast<const F *>(call.c0) + b * s.H + u * V, part);
        const vec<F> dc = load(carry) + dh * o * (F(1) - c * c);
        const vec<F> di = dc * g, df = dc * before, dg = dc * i, d_o = dh * c;
        store<F>(ds, di * i * (F(1) - i));
        store<F>(ds + part, df * f * (F(1) - f));
        store<F>(ds + 2 * part, dg * (F(1) - g * g));
        store<F>(ds + 3 * part, d_o * o * (F(1) - o));
        store<F>(carry, reset ? zero : dc * f);
        if (p.m) store<F>(p.m + current * s.Hp + u * V, o * c);
      } else if constexpr (CELL == GRU) {
        const vec<F> r = gate_at(0), z = gate_at(1), n = gate_at(2), b_n = first<F>(load(extra), part);
        vec<F> before = zero;
        if (!reset) before = load_part(t ? y - s.B * s.P : static_cast<const F *>(call.h0) + b * s.P + u * V, part);
        dh += load(carry);
        const vec<F> dn = dh * (F(1) - z), dz = dh * (before - n), inner = dn * (F(1) - n * n), dr = inner * b_n;
        const vec<F> by_r = dr * r * (F(1) - r), by_z = dz * z * (F(1) - z);
        F *const dx = p.dx + current * s.Ns + u * G * V;
        store<F>(ds, by_r), store<F>(ds + part, by_z), store<F>(ds + 2 * part, inner * r);
        store<F>(dx, by_r), store<F>(dx + part, by_z), store<F>(dx + 2 * part, inner);
        store<F>(carry, reset ? zero : dh * z);
      } else {
        const vec<F> h = load_part(y, part);
        store<F>(ds, call.kind == TT_RNN_RELU ? (h <= zero ? zero : dh) : dh * (F(1) - h * h));
      }
    }
  }
}

// The direct gradient of h: from the outputs, and at the last step from the final state.
template <class F, Cell CELL>
void direct_gradient(F *result, const tt_call &call, const Sizes<F, CELL> &s, int64_t t, int64_t b, int64_t column, int64_t valid, int64_t width) {
  const F *const dy = static_cast<const F *>(call.dy), *const end = t == s.T - 1 ? static_cast<const F *>(call.dh_end) : nullptr;
  if (dy)
    memcpy(result, dy + (t * s.B + b) * s.P + column, sizeof(F) * valid);
  else
    memset(result, 0, sizeof(F) * valid);
  memset(result + valid, 0, sizeof(F) * (width - valid));
  for (int64_t x = 0; end && x < valid; x++) result[x] += end[b * s.P + column + x];
}

template <class F> F sum_of_products(const F *a, const F *b, int64_t count) {
  constexpr int V = Vec<F>::N;
  vec<F> even = {}, odd = {};
  int64_t k = 0;
  for (; k + 2 * V <= count; k += 2 * V) even += load(a + k) * load(b + k), odd += load(a + k + V) * load(b + k + V);
  for (; k < count; k += V) {
    const int valid = static_cast<int>(count - k < V ? count - k : V);
    even += load_part(a + k, valid) * load_part(b + k, valid);
  }
  F part[V];
  store<F>(part, even + odd);
  for (int n = V / 2; n; n /= 2)
    for (int i = 0; i < n; i++) part[i] += part[i + n];
  return part[0];
}

// made = start + ds of the next step, times panel j of W_hh's columns. Zeros after the last column stay zeros.
template <class F, Cell CELL, bool HALF>
void through_weights(F *result, const Sizes<F, CELL> &s, const BackwardBuffers<F> &p, const BackwardWeights<F, HALF> &w, const Span &span, int64_t j, Rows<const F> start,
                     bool reversed) {
  constexpr int V = Vec<F>::N;
  const Columns<V> columns = s.columns(HALF);
  if (!columns.along(j)) return w.of_ds.times(result, span, columns.size(j), w.wb + columns.at(j) * V * w.of_ds.depth(s.K), start.first, start.stride, reversed);
  if constexpr (!HALF)
    for (int64_t b = span.b0(); b < span.b1(); b++, result += V)
      for (int64_t c = 0; c < s.P % V; c++) result[c] = start.first[(b - span.b0()) * start.stride + c] + sum_of_products(w.of_ds.rows[b], p.along + c * s.K, s.K);
}

// One step of some lanes; the gate gradients of the step after it are in slot `next`.
template <class F, Cell CELL, bool HALF>
void backward_lanes(const tt_call &call, const Sizes<F, CELL> &s, const BackwardBuffers<F> &p, const BackwardWeights<F, HALF> &w, int64_t t, int64_t slot, int64_t next,
                const Span &span) {
  const int64_t b0 = span.b0(), b1 = span.b1();
  constexpr int V = Vec<F>::N;
  const bool last = t == s.T - 1;
  const uint8_t *const resets = call.resets && !last ? call.resets + (t + 1) * s.B : nullptr;
  F *const result = p.result + scratch_offset<HALF>(span) * NV * V;
  const Columns<V> columns = s.columns(HALF);
  for (int64_t b = b0; b < b1 && !last; b++) w.of_ds.set(b, resets && resets[b] ? nullptr : p.ds + (next * s.B + b) * s.Ns);
  for (int64_t j = columns.parts() - 1; j >= 0; j--) { // the short last columns first: they finish while the others begin
    const int64_t u0 = columns.at(j), vectors = columns.size(j), width = vectors * V, valid = s.P - u0 * V < width ? s.P - u0 * V : width;
    Rows<const F> outside = {result, width};
    if (!last && call.dy && valid == width && !HALF)
      outside = {static_cast<const F *>(call.dy) + (t * s.B + b0) * s.P + u0 * V, s.P};
    else
      for (int64_t b = b0; b < b1; b++) direct_gradient(result + (b - b0) * width, call, s, t, b, u0 * V, valid, width);
    if (!last) through_weights(result, s, p, w, span, j, outside, columns.panels.parts == 1 && t & 1);
    if (!p.dh) backward_units<F, CELL>(call, s, p, t, slot, b0, b1, u0, vectors, {result, width});
    for (int64_t b = b0; b < b1 && p.dh; b++)
      memcpy(p.dh + (slot * s.B + b) * s.Pp + u0 * V, result + (b - b0) * width, sizeof(F) * width);
  }
  if (!p.dh) return;
  for (int64_t b = b0; b < b1; b++) w.of_dh.set(b, p.dh + (slot * s.B + b) * s.Pp);
  for (int64_t u = 0; u < s.blocks; u++) {
    w.of_dh.times(result, span, 1, w.wr + u * V * w.of_dh.depth(s.P), nullptr, 0);
    backward_units<F, CELL>(call, s, p, t, slot, b0, b1, u, 1, {result, V});
  }
}

// Sums of columns, eight vectors at a time, so that each row is read sequentially.
template <class F> void add_columns(F *sums, const F *from, int64_t rows, int64_t columns, int64_t stride) {
  constexpr int V = Vec<F>::N, WIDE = 8;
  for (int64_t c = 0; c < columns; c += WIDE * V) {
    const int64_t valid = (columns - c) / V < WIDE ? (columns - c) / V : WIDE;
    vec<F> sum[WIDE] = {};
    const F *row = from + c;
    if (valid == WIDE)
      for (int64_t r = 0; r < rows; r++, row += stride)
        for (int i = 0; i < WIDE; i++) sum[i] += load(row + i * V);
    else
      for (int64_t r = 0; r < rows; r++, row += stride)
        for (int64_t i = 0; i < valid; i++) sum[i] += load(row + i * V);
    for (int64_t i = 0; i < valid; i++) store<F>(sums + c + i * V, load(sums + c + i * V) + sum[i]);
  }
}

// The contribution of a block of steps to the gradients of weights, biases and inputs.
template <class F, Cell CELL, bool HALF>
void weight_gradients(const tt_call &call, const Sizes<F, CELL> &s, const BackwardBuffers<F> &p, int64_t t0, int64_t rows, bool add) {
  const F *const dx = CELL == GRU ? p.dx : p.ds;
  const F *const x = static_cast<const F *>(call.x) + t0 * s.B * s.D, *const y = static_cast<const F *>(call.y);
  const int64_t B = s.B, first = t0 * B, left_rows = t0 ? 0 : B; // the state before the first step is at another address
  const Right<F> before = {y + (t0 ? first - B : 0) * s.P, s.P, nullptr, static_cast<const F *>(call.h0), left_rows,
                           call.resets ? call.resets + first : nullptr};
  if (call.dw_ih) gemm<F, HALF>(s.share_of(s.K, s.D, rows), s.K, s.D, rows, {dx, 1, s.Ns}, {x, s.D}, {p.dw_ih, s.Dp, nullptr, add, true}, p.scratch, p.each);
  if (call.dw_hh) gemm<F, HALF>(s.share_of(s.K, s.P, rows), s.K, s.P, rows, {p.ds, 1, s.Ns}, before, {p.dw_hh, s.Pp, nullptr, add, true}, p.scratch, p.each);
  if (call.dw_hr)
    gemm<F, HALF>(s.share_of(s.P, s.H, rows), s.P, s.H, rows, {p.dh, 1, s.Pp}, {p.m, s.Hp}, {static_cast<F *>(call.dw_hr), s.H, nullptr, add || call.accumulate},
            p.scratch, p.each);
  if (call.dx)
    gemm<F, HALF>(s.share_of(rows, s.D, s.K), rows, s.D, s.K, {dx, s.Ns, 1}, {static_cast<const F *>(call.w_ih), s.D, p.rows},
            {static_cast<F *>(call.dx) + first * s.D, s.D, nullptr, false}, p.scratch, p.each);
  if (call.db_ih || call.db_hh) {
    add_columns(p.sums, dx, rows, s.Nc, s.Ns);
    if (CELL == GRU) add_columns(p.sums_h, p.ds, rows, s.Nc, s.Ns);
  }
}

// Copies or adds rows in the order of gates to rows in torch's order.
template <class F, Cell CELL> void unpack_rows(void *to, const Sizes<F, CELL> &s, const F *from, int64_t width, int64_t columns, const int32_t *rows, bool add) {
  for (int64_t k = 0; to && k < s.K; k++) {
    F *const row = static_cast<F *>(to) + rows[k] * columns;
    if (add)
      for (int64_t x = 0; x < columns; x++) row[x] += from[k * width + x];
    else
      memcpy(row, from + k * width, sizeof(F) * columns);
  }
}

template <class F, Cell CELL> void bias_gradients(const tt_call &call, const Sizes<F, CELL> &s, const BackwardBuffers<F> &p) {
  F *const result[2] = {static_cast<F *>(call.db_ih), static_cast<F *>(call.db_hh)};
  const F *const sums[2] = {p.sums, CELL == GRU ? p.sums_h : p.sums};
  for (int i = 0; i < 2; i++)
    for (int64_t column = 0; result[i] && column < s.K; column++) {
      const int32_t row = p.rows[column];
      result[i][row] = (call.accumulate ? result[i][row] : F(0)) + sums[i][column];
    }
}

// The gradients of the state entering the first step.
template <class F, Cell CELL, bool HALF>
void state_gradients(const tt_call &call, const Sizes<F, CELL> &s, const BackwardBuffers<F> &p, const BackwardWeights<F, HALF> &w) {
  constexpr int V = Vec<F>::N;
  const Partition tiles(s.B, s.BACK_ROWS);
  const Columns<V> columns = s.columns(HALF);
  for (int64_t b = 0; call.dh0 && b < s.B; b++) w.of_ds.set(b, call.resets && call.resets[b] ? nullptr : p.ds + b * s.Ns);
  for (int64_t j = 0; call.dh0 && j < columns.parts(); j++) {
    const int64_t u0 = columns.at(j), width = columns.size(j) * V, valid = s.P - u0 * V < width ? s.P - u0 * V : width;
    for (int64_t b = 0; b < s.B; b++) {
      memset(p.result + b * width, 0, sizeof(F) * width);
      if (CELL == GRU) memcpy(p.result + b * width, p.carry + b * s.Hp + u0 * V, sizeof(F) * width);
    }
    through_weights(p.result, s, p, w, Span{tiles, 0, tiles.parts}, j, {p.result, width}, false);
    for (int64_t b = 0; b < s.B; b++) memcpy(static_cast<F *>(call.dh0) + b * s.P + u0 * V, p.result + b * width, sizeof(F) * valid);
  }
  for (int64_t b = 0; CELL == LSTM && call.dc0 && b < s.B; b++) memcpy(static_cast<F *>(call.dc0) + b * s.H, p.carry + b * s.Hp, sizeof(F) * s.H);
}

template <class F, Cell CELL, bool HALF> int backward_of(const tt_call &call) {
  constexpr int V = Vec<F>::N;
  const Sizes<F, CELL> s(call);
  const bool projected = CELL == LSTM && call.w_hr;
  const Partition tiles(s.B, Sizes<F, CELL>::BACK_ROWS), groups(tiles.parts, (tiles.parts + s.threads - 1) / (s.threads > 0 ? s.threads : 1));
  Arena arena;
  BackwardBuffers<F> p = {};
  BackwardWeights<F, HALF> w = {};
  p.along = arena.take<F>(s.K * (V / 4));
  p.ds = arena.take<F>((s.block + 1) * s.B * s.Ns);
  if (CELL == GRU) p.dx = arena.take<F>(s.block * s.B * s.Ns);
  if (CELL != RNN) p.carry = arena.zeros<F>(s.B * s.Hp);
  w.of_ds.take(arena, s.B, s.K);
  if (call.dw_ih) p.dw_ih = arena.take<F>(s.K * s.Dp);
  if (call.dw_hh) p.dw_hh = arena.take<F>(s.K * s.Pp);
  p.sums = arena.zeros<F>(s.Nc);
  p.sums_h = arena.zeros<F>(s.Nc);
  if (projected) p.dh = arena.take<F>(s.block * s.B * s.Pp), p.m = arena.take<F>(s.block * s.B * s.Hp), w.of_dh.take(arena, s.B, s.P);
  p.result = arena.take<F>((s.B + (HALF ? tiles.parts * SPARE_ROWS : 0)) * NV * V);
  p.rows = arena.take<int32_t>(s.K);
  const int64_t tall = s.Np > s.Pp ? s.Np : s.Pp, long_ = HALF ? s.block * s.B : 0; // products of bfloat16 pack every left factor, that of dx too
  p.each = gemm_scratch<F>(tall > long_ ? tall : long_, true);
  p.scratch = arena.take<F>(p.each * (s.threads > 1 ? s.threads : 1));
  typedef Lanes<F, HALF> L;
  F *const panel = arena.take<F>((s.K > s.P ? s.K : s.P) * NV * V);
  w.wb = arena.take<typename L::Number>(L::depth(s.K) * s.Pp);
  if (projected) w.wr = arena.take<typename L::Number>(L::depth(s.P) * s.Hp);
  if (arena.failed) return 1;

  s.rows([&](int64_t column, int64_t row) { p.rows[column] = static_cast<int32_t>(row); });
  const Right<F> hh = {static_cast<const F *>(call.w_hh), s.P, p.rows}, hr = {static_cast<const F *>(call.w_hr), s.H};
  const Columns<V> columns = s.columns(HALF);
  for (int64_t j = 0; j < columns.panels.parts; j++) {
    auto *const to = w.wb + columns.at(j) * V * L::depth(s.K);
    pack_right(HALF ? panel : reinterpret_cast<F *>(to), hh, 0, s.K, columns.at(j) * V, s.P, columns.size(j) * V);
    if (HALF) L::pack(to, panel, s.K, columns.size(j) * V);
  }
  for (int64_t c = s.P / V * V; columns.separate && c < s.P; c++)
    for (int64_t k = 0; k < s.K; k++) p.along[(c % V) * s.K + k] = hh.at(k)[c];
  for (int64_t u = 0; projected && u < s.blocks; u++) {
    pack_right(panel, hr, 0, s.P, u * V, s.H, V);
    L::pack(w.wr + u * V * L::depth(s.P), panel, s.P, V);
  }
  if (CELL == LSTM && call.dc_end) copy_padded(p.carry, s.Hp, static_cast<const F *>(call.dc_end), s.B, s.H);

  bool add = false;
  for (int64_t t1 = s.T; t1 > 0; t1 -= s.block) {
    const int64_t t0 = t1 > s.block ? t1 - s.block : 0;
    share(s.threads, groups.parts, [&](int64_t group) {
      const Span span = {tiles, groups.at(group), groups.at(group + 1)};
      for (int64_t t = t1 - 1; t >= t0; t--) backward_lanes(call, s, p, w, t, t - t0, t + 1 == t1 ? s.block : t + 1 - t0, span);
    });
    weight_gradients<F, CELL, HALF>(call, s, p, t0, (t1 - t0) * s.B, add);
    add = true;
    if (t0) memcpy(p.ds + s.block * s.B * s.Ns, p.ds, sizeof(F) * s.B * s.Ns);
  }
  unpack_rows(call.dw_ih, s, p.dw_ih, s.Dp, s.D, p.rows, call.accumulate);
  unpack_rows(call.dw_hh, s, p.dw_hh, s.Pp, s.P, p.rows, call.accumulate);
  bias_gradients(call, s, p);
  state_gradients(call, s, p, w);
  return 0;
}

} // namespace
} // namespace tt
