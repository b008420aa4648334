// The backward pass of a layer: the product with the gradients of the next step's gates, and the gates' slopes on it at once; the weights'
// gradients are products over many steps, whose gates' gradients stay in the second cache.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "sizes.h"

namespace tt {
namespace {

template <class F> struct Pulling { // what a backward call works with
  F *along, *ds, *dx, *carry, *dh, *m, *sums, *sums_h, *dw_ih, *dw_hh, *made, *scratch;
  double *squares; // (B, S, a vector), of the step that is played
  int32_t *rows;
  int64_t each;
};

template <class F, bool HALF> struct Returning { // and what its products are made of
  Lanes<F, HALF> of_ds, of_dh;
  typename Lanes<F, HALF>::Number *wb, *wr;
};

// One step of lanes b0 to b1 and `blocks` of units from u0 on: from the gradient of h to those of what the gates see.
template <class F, Cell CELL>
__attribute__((noinline)) void pull(const tt_call &call, const Sizes<F, CELL> &s, const Pulling<F> &p, int64_t t, int64_t slot, int64_t b0, int64_t b1,
                                    int64_t u0, int64_t blocks, Rows<const F> of_h) {
  constexpr int V = Vec<F>::N, G = gates_of(CELL), W = Vec<double>::N, S = squares_of(CELL);
  const uint8_t *const resets = call.resets ? call.resets + t * s.B : nullptr;
  const vec<F> zero = {};
  const F *const saved = static_cast<const F *>(call.saved);
  for (int64_t b = b0; b < b1; b++) {
    const int64_t at = t * s.B + b, here = slot * s.B + b;
    const bool reset = resets && resets[b];
    vec<double> squares[S] = {};
    for (int64_t u = u0; u < u0 + blocks; u++) {
      const int part = s.part(u);
      const F *const gates = saved + at * s.Np + u * G * V, *const more = saved + s.T * s.B * s.Np + at * s.Hp + u * V;
      const F *const y = static_cast<const F *>(call.y) + at * s.P + u * V;
      F *const ds = p.ds + here * s.Ns + u * G * V, *const carry = p.carry + b * s.Hp + u * V;
      if (CELL != RNN && t) prefetch(gates - s.B * s.Np, G), prefetch(more - s.B * s.Hp, 1);
      const auto kept = [&](int gate) { return first<F>(load(gates + gate * V), part); };
      // behind the last unit all must be zeros: 0 times what is not finite is no zero
      vec<F> dh = first<F>(load(of_h.first + (b - b0) * of_h.apart + (u - u0) * V), part);
      if constexpr (CELL == LSTM) {
        const vec<F> i = kept(0), f = kept(1), g = kept(2), o = kept(3), c = tanh<F>(first<F>(load(more), part));
        vec<F> before = zero;
        if (!reset) before = t ? first<F>(load(more - s.B * s.Hp), part) : load_part(static_cast<const F *>(call.c0) + b * s.H + u * V, part);
        const vec<F> dc = load(carry) + dh * o * (F(1) - c * c);
        const vec<F> di = dc * g, df = dc * before, dg = dc * i, d_o = dh * c;
        store<F>(ds, di * i * (F(1) - i));
        store<F>(ds + part, df * f * (F(1) - f));
        store<F>(ds + 2 * part, dg * (F(1) - g * g));
        store<F>(ds + 3 * part, d_o * o * (F(1) - o));
        store<F>(carry, reset ? zero : dc * f);
        if (p.m) store<F>(p.m + here * s.Hp + u * V, o * c);
        if (p.squares) {
          add_squares(squares[1], dc), add_squares(squares[2], di), add_squares(squares[3], df);
          add_squares(squares[4], dg), add_squares(squares[5], d_o);
        }
      } else if constexpr (CELL == GRU) {
        const vec<F> r = kept(0), z = kept(1), n = kept(2), b_n = first<F>(load(more), part);
        vec<F> before = zero;
        if (!reset) before = load_part(t ? y - s.B * s.P : static_cast<const F *>(call.h0) + b * s.P + u * V, part);
        dh += load(carry);
        const vec<F> dn = dh * (F(1) - z), dz = dh * (before - n), inner = dn * (F(1) - n * n), dr = inner * b_n;
        const vec<F> by_r = dr * r * (F(1) - r), by_z = dz * z * (F(1) - z);
        F *const dx = p.dx + here * s.Ns + u * G * V;
        store<F>(ds, by_r), store<F>(ds + part, by_z), store<F>(ds + 2 * part, inner * r);
        store<F>(dx, by_r), store<F>(dx + part, by_z), store<F>(dx + 2 * part, inner);
        store<F>(carry, reset ? zero : dh * z);
        if (p.squares) add_squares(squares[1], dr), add_squares(squares[2], dz), add_squares(squares[3], dn);
      } else {
        const vec<F> h = load_part(y, part);
        store<F>(ds, call.kind == TT_RNN_RELU ? (h <= zero ? zero : dh) : dh * (F(1) - h * h));
      }
      if (p.squares && !p.dh) add_squares(squares[0], dh);
    }
    for (int k = 0; p.squares && k < S; k++) store(p.squares + (b * S + k) * W, load(p.squares + (b * S + k) * W) + squares[k]);
  }
}

// The squared norms of a step of lanes b0 to b1, from their sums; room for those of the next step.
template <class F, Cell CELL> void lay_out_squares(const tt_call &call, const Sizes<F, CELL> &s, const Pulling<F> &p, int64_t t, int64_t b0, int64_t b1) {
  constexpr int W = Vec<double>::N;
  for (int64_t k = b0 * s.S; k < b1 * s.S; k++) call.squares[t * s.B * s.S + k] = total<F>(load(p.squares + k * W));
  memset(p.squares + b0 * s.S * W, 0, sizeof(double) * (b1 - b0) * s.S * W);
}

// Adds up the gate that keeps the past over `rows` steps and lanes; 64 at a time in the numbers' own type.
template <class F, Cell CELL> void add_kept(double *kept, const Sizes<F, CELL> &s, const F *gates, int64_t rows) {
  constexpr int V = Vec<F>::N, G = gates_of(CELL);
  for (int64_t u = 0; u < s.blocks; u++)
    for (int64_t r0 = 0; r0 < rows; r0 += 64) {
      const F *const from = gates + r0 * s.Np + u * G * V + V;
      const int64_t count = rows - r0 < 64 ? rows - r0 : 64;
      vec<F> even = {}, odd = {};
      for (int64_t r = 0; r < count; r += 2) {
        even += load(from + r * s.Np);
        if (r + 1 < count) odd += load(from + (r + 1) * s.Np);
      }
      even += odd;
      for (int i = 0; i < s.part(u); i++) kept[u * V + i] += even[i];
    }
}

// The gradient of h that comes from outside: of the outputs, and of the last state.
template <class F, Cell CELL>
void from_outside(F *made, const tt_call &call, const Sizes<F, CELL> &s, int64_t t, int64_t b, int64_t column, int64_t there, int64_t width) {
  const F *const dy = static_cast<const F *>(call.dy), *const end = t == s.T - 1 ? static_cast<const F *>(call.dh_end) : nullptr;
  if (dy)
    memcpy(made, dy + (t * s.B + b) * s.P + column, sizeof(F) * there);
  else
    memset(made, 0, sizeof(F) * there);
  memset(made + there, 0, sizeof(F) * (width - there));
  for (int64_t x = 0; end && x < there; x++) made[x] += end[b * s.P + column + x];
}

template <class F> F sum_of_products(const F *a, const F *b, int64_t count) {
  constexpr int V = Vec<F>::N;
  vec<F> even = {}, odd = {};
  int64_t k = 0;
  for (; k + 2 * V <= count; k += 2 * V) even += load(a + k) * load(b + k), odd += load(a + k + V) * load(b + k + V);
  for (; k < count; k += V) {
    const int there = static_cast<int>(count - k < V ? count - k : V);
    even += load_part(a + k, there) * load_part(b + k, there);
  }
  F part[V];
  store<F>(part, even + odd);
  for (int n = V / 2; n; n /= 2)
    for (int i = 0; i < n; i++) part[i] += part[i + n];
  return part[0];
}

// made = start + ds of the next step, times panel j of W_hh's columns; zeros behind the last column stay.
template <class F, Cell CELL, bool HALF>
void through_weights(F *made, const Sizes<F, CELL> &s, const Pulling<F> &p, const Returning<F, HALF> &w, const Span &span, int64_t j, Rows<const F> start) {
  constexpr int V = Vec<F>::N;
  const Columns<V> columns = s.columns(HALF);
  if (!columns.along(j)) return w.of_ds.times(made, span, columns.size(j), w.wb + columns.at(j) * V * w.of_ds.depth(s.K), start.first, start.apart);
  if constexpr (!HALF)
    for (int64_t b = span.b0(); b < span.b1(); b++, made += V)
      for (int64_t c = 0; c < s.P % V; c++) made[c] = start.first[(b - span.b0()) * start.apart + c] + sum_of_products(w.of_ds.rows[b], p.along + c * s.K, s.K);
}

// One step of some lanes, from the step after it, whose gates' gradients are in slot `next`.
template <class F, Cell CELL, bool HALF>
void pull_lanes(const tt_call &call, const Sizes<F, CELL> &s, const Pulling<F> &p, const Returning<F, HALF> &w, int64_t t, int64_t slot, int64_t next,
                const Span &span) {
  const int64_t b0 = span.b0(), b1 = span.b1();
  constexpr int V = Vec<F>::N;
  const bool last = t == s.T - 1;
  const uint8_t *const resets = call.resets && !last ? call.resets + (t + 1) * s.B : nullptr;
  F *const made = p.made + room_of<HALF>(span) * NV * V;
  const Columns<V> columns = s.columns(HALF);
  for (int64_t b = b0; b < b1 && !last; b++) w.of_ds.set(b, resets && resets[b] ? nullptr : p.ds + (next * s.B + b) * s.Ns);
  for (int64_t j = 0; j < columns.parts(); j++) {
    const int64_t u0 = columns.at(j), vectors = columns.size(j), width = vectors * V, there = s.P - u0 * V < width ? s.P - u0 * V : width;
    Rows<const F> outside = {made, width};
    if (!last && call.dy && there == width && !HALF)
      outside = {static_cast<const F *>(call.dy) + (t * s.B + b0) * s.P + u0 * V, s.P};
    else
      for (int64_t b = b0; b < b1; b++) from_outside(made + (b - b0) * width, call, s, t, b, u0 * V, there, width);
    if (!last) through_weights(made, s, p, w, span, j, outside);
    if (!p.dh) pull<F, CELL>(call, s, p, t, slot, b0, b1, u0, vectors, {made, width});
    for (int64_t b = b0; b < b1 && p.dh; b++)
      for (int64_t x = 0; x < vectors; x++) {
        const vec<F> dh = load(made + (b - b0) * width + x * V);
        store<F>(p.dh + (slot * s.B + b) * s.Pp + (u0 + x) * V, dh);
        if (p.squares) {
          double *const sums = p.squares + b * s.S * Vec<double>::N;
          vec<double> all = load(sums);
          add_squares(all, dh);
          store(sums, all);
        }
      }
  }
  if (!p.dh) return;
  for (int64_t b = b0; b < b1; b++) w.of_dh.set(b, p.dh + (slot * s.B + b) * s.Pp);
  for (int64_t u = 0; u < s.blocks; u++) {
    w.of_dh.times(made, span, 1, w.wr + u * V * w.of_dh.depth(s.P), nullptr, 0);
    pull<F, CELL>(call, s, p, t, slot, b0, b1, u, 1, {made, V});
  }
}

// Rows of whole vectors: eight of these at a time, so that a row is read on.
template <class F> void add_columns(F *sums, const F *from, int64_t rows, int64_t columns, int64_t apart) {
  constexpr int V = Vec<F>::N, WIDE = 8;
  for (int64_t c = 0; c < columns; c += WIDE * V) {
    const int64_t there = (columns - c) / V < WIDE ? (columns - c) / V : WIDE;
    vec<F> sum[WIDE] = {};
    const F *row = from + c;
    if (there == WIDE)
      for (int64_t r = 0; r < rows; r++, row += apart)
        for (int i = 0; i < WIDE; i++) sum[i] += load(row + i * V);
    else
      for (int64_t r = 0; r < rows; r++, row += apart)
        for (int64_t i = 0; i < there; i++) sum[i] += load(row + i * V);
    for (int64_t i = 0; i < there; i++) store<F>(sums + c + i * V, load(sums + c + i * V) + sum[i]);
  }
}

// The gradients of weights, biases and inputs that a block of steps gives.
template <class F, Cell CELL, bool HALF>
void by_weights(const tt_call &call, const Sizes<F, CELL> &s, const Pulling<F> &p, int64_t t0, int64_t rows, bool add) {
  const F *const dx = CELL == GRU ? p.dx : p.ds;
  const F *const x = static_cast<const F *>(call.x) + t0 * s.B * s.D, *const y = static_cast<const F *>(call.y);
  const int64_t B = s.B, first = t0 * B, left_rows = t0 ? 0 : B; // the state before the first step lies elsewhere
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

// Rows in the order of gates to rows in torch's.
template <class F, Cell CELL> void lay_out(void *to, const Sizes<F, CELL> &s, const F *from, int64_t width, int64_t columns, const int32_t *rows, bool add) {
  for (int64_t k = 0; to && k < s.K; k++) {
    F *const row = static_cast<F *>(to) + rows[k] * columns;
    if (add)
      for (int64_t x = 0; x < columns; x++) row[x] += from[k * width + x];
    else
      memcpy(row, from + k * width, sizeof(F) * columns);
  }
}

template <class F, Cell CELL> void by_biases(const tt_call &call, const Sizes<F, CELL> &s, const Pulling<F> &p) {
  F *const made[2] = {static_cast<F *>(call.db_ih), static_cast<F *>(call.db_hh)};
  const F *const sums[2] = {p.sums, CELL == GRU ? p.sums_h : p.sums};
  for (int i = 0; i < 2; i++)
    for (int64_t column = 0; made[i] && column < s.K; column++) {
      const int32_t row = p.rows[column];
      made[i][row] = (call.accumulate ? made[i][row] : F(0)) + sums[i][column];
    }
}

// The gradients of the state entering the first step, and their squared norms.
template <class F, Cell CELL, bool HALF>
void by_state(const tt_call &call, const Sizes<F, CELL> &s, const Pulling<F> &p, const Returning<F, HALF> &w) {
  constexpr int V = Vec<F>::N, E = CELL == LSTM ? 2 : 1;
  const Cut tiles(s.B, s.BACK_ROWS);
  const Columns<V> columns = s.columns(HALF);
  const bool wanted = call.dh0 || call.entering;
  for (int64_t b = 0; call.entering && b < s.B * E; b++) call.entering[b] = 0;
  for (int64_t b = 0; wanted && b < s.B; b++) w.of_ds.set(b, call.resets && call.resets[b] ? nullptr : p.ds + b * s.Ns);
  for (int64_t j = 0; wanted && j < columns.parts(); j++) {
    const int64_t u0 = columns.at(j), width = columns.size(j) * V, there = s.P - u0 * V < width ? s.P - u0 * V : width;
    for (int64_t b = 0; b < s.B; b++) {
      memset(p.made + b * width, 0, sizeof(F) * width);
      if (CELL == GRU) memcpy(p.made + b * width, p.carry + b * s.Hp + u0 * V, sizeof(F) * width);
    }
    through_weights(p.made, s, p, w, Span{tiles, 0, tiles.parts}, j, {p.made, width});
    for (int64_t b = 0; b < s.B; b++) {
      if (call.dh0) memcpy(static_cast<F *>(call.dh0) + b * s.P + u0 * V, p.made + b * width, sizeof(F) * there);
      vec<double> sums = {};
      for (int64_t x = 0; call.entering && x < width; x += V) add_squares(sums, load(p.made + b * width + x));
      if (call.entering) call.entering[b * E] += total<F>(sums);
    }
  }
  for (int64_t b = 0; CELL == LSTM && b < s.B; b++) {
    if (call.dc0) memcpy(static_cast<F *>(call.dc0) + b * s.H, p.carry + b * s.Hp, sizeof(F) * s.H);
    vec<double> sums = {};
    for (int64_t x = 0; call.entering && x < s.Hp; x += V) add_squares(sums, load(p.carry + b * s.Hp + x));
    if (call.entering) call.entering[b * E + 1] = total<F>(sums);
  }
}

template <class F, Cell CELL, bool HALF> int backward_of(const tt_call &call) {
  constexpr int V = Vec<F>::N;
  const Sizes<F, CELL> s(call);
  const bool projected = CELL == LSTM && call.w_hr;
  const Cut tiles(s.B, Sizes<F, CELL>::BACK_ROWS), groups(tiles.parts, (tiles.parts + s.threads - 1) / (s.threads > 0 ? s.threads : 1));
  Arena arena;
  Pulling<F> p = {};
  Returning<F, HALF> w = {};
  p.along = arena.take<F>(s.K * (V / 4));
  p.ds = arena.take<F>((s.block + 1) * s.B * s.Ns);
  if (CELL == GRU) p.dx = arena.take<F>(s.block * s.B * s.Ns);
  if (CELL != RNN) p.carry = arena.zeros<F>(s.B * s.Hp);
  w.of_ds.take(arena, s.B, s.K);
  if (call.squares) p.squares = arena.zeros<double>(s.B * s.S * Vec<double>::N);
  if (call.dw_ih) p.dw_ih = arena.take<F>(s.K * s.Dp);
  if (call.dw_hh) p.dw_hh = arena.take<F>(s.K * s.Pp);
  p.sums = arena.zeros<F>(s.Nc);
  p.sums_h = arena.zeros<F>(s.Nc);
  if (projected) p.dh = arena.take<F>(s.block * s.B * s.Pp), p.m = arena.take<F>(s.block * s.B * s.Hp), w.of_dh.take(arena, s.B, s.P);
  p.made = arena.take<F>((s.B + (HALF ? tiles.parts * ROOM : 0)) * NV * V);
  p.rows = arena.take<int32_t>(s.K);
  const int64_t tall = s.Np > s.Pp ? s.Np : s.Pp, long_ = HALF ? s.block * s.B : 0; // products of bfloat16 pack every left side, that of dx too
  p.each = gemm_scratch<F>(tall > long_ ? tall : long_, true);
  p.scratch = arena.take<F>(p.each * (s.threads > 1 ? s.threads : 1));
  typedef Lanes<F, HALF> L;
  F *const panel = arena.take<F>((s.K > s.P ? s.K : s.P) * NV * V);
  w.wb = arena.take<typename L::Number>(L::depth(s.K) * s.Pp);
  if (projected) w.wr = arena.take<typename L::Number>(L::depth(s.P) * s.Hp);
  if (arena.failed) return 1;

  for (int64_t k = 0; k < s.K; k++) p.rows[k] = static_cast<int32_t>(s.row(k));
  const Right<F> hh = {static_cast<const F *>(call.w_hh), s.P, p.rows}, hr = {static_cast<const F *>(call.w_hr), s.H};
  const Columns<V> columns = s.columns(HALF);
  for (int64_t j = 0; j < columns.panels.parts; j++) {
    auto *const to = w.wb + columns.at(j) * V * L::depth(s.K);
    pack_right(HALF ? panel : reinterpret_cast<F *>(to), hh, 0, s.K, columns.at(j) * V, s.P, columns.size(j) * V);
    if (HALF) L::pack(to, panel, s.K, columns.size(j) * V);
  }
  for (int64_t c = s.P / V * V; columns.apart && c < s.P; c++)
    for (int64_t k = 0; k < s.K; k++) p.along[(c % V) * s.K + k] = hh.at(k)[c];
  for (int64_t u = 0; projected && u < s.blocks; u++) {
    pack_right(panel, hr, 0, s.P, u * V, s.H, V);
    L::pack(w.wr + u * V * L::depth(s.P), panel, s.P, V);
  }
  if (CELL == LSTM && call.dc_end) lay_in(p.carry, s.Hp, static_cast<const F *>(call.dc_end), s.B, s.H);
  if (call.kept) memset(call.kept, 0, sizeof(double) * s.H);

  bool add = false;
  for (int64_t t1 = s.T; t1 > 0; t1 -= s.block) {
    const int64_t t0 = t1 > s.block ? t1 - s.block : 0;
    share(s.threads, groups.parts, [&](int64_t group) {
      const Span span = {tiles, groups.at(group), groups.at(group + 1)};
      for (int64_t t = t1 - 1; t >= t0; t--) {
        pull_lanes(call, s, p, w, t, t - t0, t + 1 == t1 ? s.block : t + 1 - t0, span);
        if (p.squares) lay_out_squares(call, s, p, t, span.b0(), span.b1());
      }
    });
    by_weights<F, CELL, HALF>(call, s, p, t0, (t1 - t0) * s.B, add);
    if (CELL != RNN && call.kept) add_kept(call.kept, s, static_cast<const F *>(call.saved) + t0 * s.B * s.Np, (t1 - t0) * s.B);
    add = true;
    if (t0) memcpy(p.ds + s.block * s.B * s.Ns, p.ds, sizeof(F) * s.B * s.Ns);
  }
  lay_out(call.dw_ih, s, p.dw_ih, s.Dp, s.D, p.rows, call.accumulate);
  lay_out(call.dw_hh, s, p.dw_hh, s.Pp, s.P, p.rows, call.accumulate);
  by_biases(call, s, p);
  by_state(call, s, p, w);
  return 0;
}

} // namespace
} // namespace tt
