// LSTM, GRU and RNN over all steps of a layer, forward and backward; reference.py defines what they compute.
//
// What the gates see of the inputs is one product over many steps; only the product with h runs step by step, and the gates of a
// panel of units are made from it while it is still in the first cache. Backward the same: the product with the gradients of the
// next step's gates, the gates' slopes on it at once; the weights' gradients are products over many steps. Steps go in blocks that
// stay in the second cache.
//
// Gates lie as [block of V units][gate][V], padded with zeros to whole vectors, so that a tile holds all gates of its units; so do
// their gradients. `saved` holds the gates' values (T, B, Np), and behind them c of an LSTM, or what n sees of h in a GRU, (T, B, Hp).
//
// References: S. Hochreiter and J. Schmidhuber, Neural Computation 9 (1997); F. Gers et al., Neural Computation 12 (2000); H. Sak et al.,
// Interspeech (2014), for the projection; K. Cho et al., EMNLP (2014); J. Appleyard et al., arXiv:1604.01946 (2016), for the one product.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "gemm.h"
#include "pool.h"
#include "throughtime.h"
#include "vec.h"

namespace tt {
namespace {

constexpr int64_t BLOCK = 512 * 1024;     // bytes of gates that a block of steps takes, within the second cache
constexpr int64_t LEAST = 384;            // rows that it takes even so: each panel of weights is packed once for all of them
constexpr int64_t TALL = 384;              // rows that a BLAS is given at once
constexpr int64_t WORTH = 4 * 1000 * 1000; // multiplications from which a product is worth a second thread

// Memory of one call, given back at its end.
class Arena {
public:
  ~Arena() {
    for (int i = 0; i < count_; i++) free(taken_[i]);
  }
  template <class F> F *take(int64_t numbers) {
    void *p = nullptr;
    if (count_ == MOST || posix_memalign(&p, 64, sizeof(F) * (numbers > 0 ? numbers : 1))) {
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
  static constexpr int MOST = 32;
  void *taken_[MOST];
  int count_ = 0;
};

enum Cell { LSTM, GRU, RNN };

constexpr int gates_of(Cell cell) { return cell == LSTM ? 4 : cell == GRU ? 3 : 1; }
constexpr int squares_of(Cell cell) { return cell == LSTM ? 6 : cell == GRU ? 4 : 1; }

template <class F, Cell CELL> struct Sizes {
  static constexpr int V = Vec<F>::N, G = gates_of(CELL), S = squares_of(CELL);
  static constexpr int UNITS = CELL == RNN ? NV : 1; // blocks of units in a panel of the product with h
  static constexpr int ROWS = tile_rows(UNITS * G);  // lanes in a tile of it
  static constexpr int BACK_ROWS = tile_rows(NV);
  int64_t T, B, D, H, P, blocks, Hp, p_blocks, Pp, Dp, Np, block;
  int threads;

  explicit Sizes(const tt_call &call)
      : T(call.steps), B(call.lanes), D(call.inputs), H(call.hidden), P(call.outputs), blocks((H + V - 1) / V), Hp(blocks * V),
        p_blocks((P + V - 1) / V), Pp(p_blocks * V), Dp((D + V - 1) / V * V), Np(Hp * G), block(BLOCK / (int64_t(sizeof(F)) * B * Np)), threads(call.threads) {
    if (block * B < LEAST) block = (LEAST + B - 1) / B;
    if (block > T) block = T;
  }
  int64_t numbers() const { return CELL == RNN ? 0 : T * B * (Np + Hp); }
  int part(int64_t unit_block) const { return static_cast<int>(H - unit_block * V < V ? H - unit_block * V : V); }
  // The row of torch's weights that a column of gates belongs to, -1 for padding.
  int64_t row(int64_t column) const {
    const int64_t unit = column / (G * V) * V + column % V, gate = column / V % G;
    return unit < H ? gate * H + unit : -1;
  }
  // The same without padding: k-th of the gates that a backward product adds up.
  int64_t compact(int64_t k) const {
    const int64_t whole = H / V * V * G;
    if (k < whole) return row(k);
    const int64_t rest = H % V, gate = (k - whole) / rest;
    return gate * H + H / V * V + (k - whole) % rest;
  }
  // `row` and `compact` of every k, worked out once.
  void tables(int32_t *rows, int32_t *compacts) const {
    for (int64_t k = 0; k < Np; k++) rows[k] = static_cast<int32_t>(row(k));
    for (int64_t k = 0; compacts && k < G * H; k++) compacts[k] = static_cast<int32_t>(compact(k));
  }
  int share_of(int64_t m, int64_t n, int64_t k) const { return m * n * k < WORTH ? 1 : threads; }
};

// By the BLAS that torch has brought, column by column: C' = B' A'. Rows of B that lie apart are copied first. In blocks of rows on one
// thread each, whatever their number: it would cut, and so round, otherwise for another one.
template <class F> bool gemm_by_blas(int threads, int64_t m, int64_t n, int64_t k, const Left<F> &a, const Right<F> &right, const Out<F> &c) {
  const tt_gemm blas = __atomic_load_n(tt_torch_gemm + (sizeof(F) == 8), __ATOMIC_RELAXED);
  const bool turned = a.row == 1 && a.step != 1;
  const int64_t lda = turned ? a.step : a.row;
  constexpr int64_t most = INT32_MAX;
  if (!blas || m * n * k < WORTH || m > most || n > most || k > most || lda > most || c.row > most || right.row > most) return false;
  Arena arena;
  const bool apart = right.index || right.first || right.skip;
  F *const copied = apart ? arena.take<F>(k * n) : nullptr;
  if (arena.failed) return false;
  for (int64_t i = 0; apart && i < k; i++) {
    const F *const from = right.at(i);
    if (from)
      memcpy(copied + i * n, from, sizeof(F) * n);
    else
      memset(copied + i * n, 0, sizeof(F) * n);
  }
  const Cut parts(m, TALL);
  share(threads, parts.parts, [&](int64_t part) {
    const int64_t m0 = parts.at(part), m1 = parts.at(part + 1);
    for (int64_t i = m0; c.start && !c.add && i < m1; i++) memcpy(c.to + i * c.row, c.start, sizeof(F) * n);
    const int rows = static_cast<int>(m1 - m0), columns = static_cast<int>(n), depth = static_cast<int>(k), of_a = static_cast<int>(lda);
    const int of_b = static_cast<int>(apart ? n : right.row), of_c = static_cast<int>(c.row);
    const F one = 1, keep = c.add || c.start ? F(1) : F(0);
    const int before = tt_torch_gemm_threads ? tt_torch_gemm_threads(1) : 0;
    blas("N", turned ? "T" : "N", &columns, &rows, &depth, &one, apart ? copied : right.base, &of_b, a.from + m0 * a.row, &of_a, &keep,
         c.to + m0 * c.row, &of_c);
    if (tt_torch_gemm_threads) tt_torch_gemm_threads(before);
  });
  return true;
}

template <class F>
void gemm(int threads, int64_t m, int64_t n, int64_t k, const Left<F> &a, const Right<F> &right, const Out<F> &c, F *scratch, int64_t each) {
  if (gemm_by_blas(threads, m, n, k, a, right, c)) return;
  const int64_t groups = (m + GROUP - 1) / GROUP;
  const Cut parts(groups, (groups + threads - 1) / threads);
  share(threads, parts.parts, [&](int64_t i) {
    const int64_t m1 = parts.at(i + 1) * GROUP;
    gemm_rows<F>(parts.at(i) * GROUP, m1 < m ? m1 : m, n, k, a, right, c, scratch + i * each);
  });
}

// (rows x columns) to (columns x rows), rows apart by `apart`.
template <class F> void turn(F *to, int64_t apart, const F *from, int64_t rows, int64_t columns) {
  for (int64_t c = 0; c < columns; c++)
    for (int64_t r = 0; r < rows; r++) to[c * apart + r] = from[r * columns + c];
}

// W (G*H, K) as (K, Np), its columns in the order of gates; or in panels of UNITS blocks, [panel][k][columns of the panel].
template <class F, Cell CELL> void arrange(F *to, const Sizes<F, CELL> &s, const F *w, int64_t k, int units) {
  constexpr int V = Vec<F>::N, G = gates_of(CELL);
  for (int64_t u = 0; u < s.blocks; u++) {
    const int64_t panel = units ? u / units * units : 0;
    const int64_t in_panel = units ? (s.blocks - panel < units ? s.blocks - panel : units) : s.blocks;
    F *const base = to + panel * G * V * k + (u - panel) * G * V;
    const int part = s.part(u);
    for (int g = 0; g < G; g++) {
      turn(base + g * V, in_panel * G * V, w + (g * s.H + u * V) * k, part, k);
      if (part < V)
        for (int64_t j = 0; j < k; j++) memset(base + g * V + j * in_panel * G * V + part, 0, sizeof(F) * (V - part));
    }
  }
}

// What the gates begin with: both biases, but that of n in a GRU, which is multiplied by r.
template <class F, Cell CELL> void biases(F *to, F *of_n, const Sizes<F, CELL> &s, const F *b_ih, const F *b_hh) {
  for (int64_t column = 0; column < s.Np; column++) {
    const int64_t row = s.row(column);
    const bool apart = CELL == GRU && row >= 2 * s.H;
    to[column] = row < 0 || !b_ih ? F(0) : apart ? b_ih[row] : b_ih[row] + b_hh[row];
    if (apart && b_ih) of_n[row - 2 * s.H] = b_hh[row];
  }
}

template <class F> struct Playing { // what a forward call works with
  F *wx, *bias, *n_bias, *wh, *wr, *h, *c, *m, *zeros, *gates, *made, *scratch;
  const F **rows;
  int64_t each;
};

// One step of one lane and one block of units; `made` is the product with h, (G, V).
template <class F, Cell CELL>
__attribute__((noinline)) void play(const tt_call &call, const Sizes<F, CELL> &s, const Playing<F> &p, int64_t t, int64_t b, int64_t u, F *gates, const F *made) {
  constexpr int V = Vec<F>::N;
  const bool reset = call.resets && call.resets[t * s.B + b], keep = CELL != RNN && call.saved;
  F *const more = keep ? static_cast<F *>(call.saved) + s.T * s.B * s.Np + (t * s.B + b) * s.Hp + u * V : nullptr;
  const F *const before_here = p.h + ((t & 1) * s.B + b) * s.Pp + u * V;
  vec<F> h;
  if constexpr (CELL == LSTM) {
    F *const cell = p.c + b * s.Hp + u * V;
    vec<F> i = load(made) + load(gates), f = load(made + V) + load(gates + V);
    vec<F> g = load(made + 2 * V) + load(gates + 2 * V), o = load(made + 3 * V) + load(gates + 3 * V);
    two_sigmoids<F>(i, f);
    sigmoid_and_tanh<F>(o, g);
    const vec<F> c = reset ? i * g : f * load(cell) + i * g;
    store<F>(cell, c);
    h = o * tanh<F>(c);
    if (keep) {
      store<F>(gates, i), store<F>(gates + V, f), store<F>(gates + 2 * V, g), store<F>(gates + 3 * V, o);
      store<F>(more, c);
    }
  } else if constexpr (CELL == GRU) {
    vec<F> r = load(made) + load(gates), z = load(made + V) + load(gates + V);
    two_sigmoids<F>(r, z);
    const vec<F> seen = load(made + 2 * V) + load(p.n_bias + u * V), n = tanh<F>(load(gates + 2 * V) + r * seen);
    const vec<F> before = reset ? vec<F>{} : load(before_here);
    h = n + z * (before - n);
    if (keep) {
      store<F>(gates, r), store<F>(gates + V, z), store<F>(gates + 2 * V, n);
      store<F>(more, seen);
    }
  } else {
    const vec<F> sum = load(made) + load(gates), zero = {};
    h = call.kind == TT_RNN_RELU ? (sum < zero ? zero : sum) : tanh<F>(sum);
  }
  if (CELL == LSTM && p.m) return store<F>(p.m + b * s.Hp + u * V, h);
  store<F>(p.h + ((~t & 1) * s.B + b) * s.Pp + u * V, h);
  store_part<F>(static_cast<F *>(call.y) + (t * s.B + b) * s.P + u * V, h, s.part(u));
}

// Consecutive tiles of lanes.
struct Span {
  const Cut &tiles;
  int64_t i0, i1;
  int64_t b0() const { return tiles.at(i0); }
  int64_t b1() const { return tiles.at(i1); }
};

// One step of some lanes.
template <class F, Cell CELL>
void play_lanes(const tt_call &call, const Sizes<F, CELL> &s, const Playing<F> &p, int64_t t, const Span &span, F *gates) {
  const int64_t b0 = span.b0(), b1 = span.b1();
  constexpr int V = Vec<F>::N, G = gates_of(CELL);
  typedef Sizes<F, CELL> S;
  const F *const before = p.h + (t & 1) * s.B * s.Pp;
  F *const made = p.made + b0 * NV * V;
  for (int64_t b = b0; b < b1; b++) p.rows[b] = call.resets && call.resets[t * s.B + b] ? p.zeros : before + b * s.Pp;
  for (int64_t u0 = 0; u0 < s.blocks; u0 += S::UNITS) {
    const int64_t units = s.blocks - u0 < S::UNITS ? s.blocks - u0 : S::UNITS, width = units * G * V;
    multiply_panel(made, p.rows + b0, span.tiles, span.i0, span.i1, units * G, p.wh + u0 * G * V * s.P, s.P, false);
    for (int64_t b = b0; b < b1; b++)
      for (int64_t x = 0; x < units; x++)
        play<F, CELL>(call, s, p, t, b, u0 + x, gates + b * s.Np + (u0 + x) * G * V, made + (b - b0) * width + x * G * V);
  }
}

// h = W_hr m of a projected LSTM.
template <class F> void project(const tt_call &call, const Sizes<F, LSTM> &s, const Playing<F> &p, int64_t t, const Span &span) {
  const int64_t b0 = span.b0(), b1 = span.b1();
  constexpr int V = Vec<F>::N;
  F *const after = p.h + (~t & 1) * s.B * s.Pp, *const y = static_cast<F *>(call.y) + t * s.B * s.P, *const made = p.made + b0 * NV * V;
  for (int64_t b = b0; b < b1; b++) p.rows[b] = p.m + b * s.Hp;
  for (int64_t u = 0; u < s.p_blocks; u++) {
    multiply_panel(made, p.rows + b0, span.tiles, span.i0, span.i1, 1, p.wr + u * V * s.H, s.H, false);
    for (int64_t b = b0; b < b1; b++) store<F>(after + b * s.Pp + u * V, load(made + (b - b0) * V));
  }
  for (int64_t b = b0; b < b1; b++) memcpy(y + b * s.P, after + b * s.Pp, sizeof(F) * s.P);
}

template <class F> void lay_in(F *to, int64_t width, const F *from, int64_t rows, int64_t columns) { // rows, padded
  for (int64_t r = 0; r < rows; r++) memcpy(to + r * width, from + r * columns, sizeof(F) * columns);
}

template <class F, Cell CELL> int forward_of(const tt_call &call) {
  constexpr int V = Vec<F>::N;
  const Sizes<F, CELL> s(call);
  const bool projected = CELL == LSTM && call.w_hr, kept = CELL != RNN && call.saved;
  Arena arena;
  Playing<F> p = {};
  p.wx = arena.take<F>(s.D * s.Np);
  p.bias = arena.take<F>(s.Np);
  p.n_bias = arena.zeros<F>(s.Hp);
  p.wh = arena.take<F>(s.P * s.Np);
  p.h = arena.zeros<F>(2 * s.B * s.Pp);
  p.zeros = arena.zeros<F>(s.Pp);
  if (CELL == LSTM) p.c = arena.zeros<F>(s.B * s.Hp);
  if (projected) p.m = arena.take<F>(s.B * s.Hp), p.wr = arena.zeros<F>(s.p_blocks * V * s.H);
  p.made = arena.take<F>(s.B * NV * V);
  p.rows = arena.take<const F *>(s.B);
  if (!kept) p.gates = arena.take<F>(s.block * s.B * s.Np);
  p.each = gemm_scratch<F>(s.block * s.B, false);
  p.scratch = arena.take<F>(p.each * (s.threads > 1 ? s.threads : 1));
  if (arena.failed) return 1;

  arrange(p.wx, s, static_cast<const F *>(call.w_ih), s.D, 0);
  arrange(p.wh, s, static_cast<const F *>(call.w_hh), s.P, Sizes<F, CELL>::UNITS);
  biases(p.bias, p.n_bias, s, static_cast<const F *>(call.b_ih), static_cast<const F *>(call.b_hh));
  lay_in(p.h, s.Pp, static_cast<const F *>(call.h0), s.B, s.P);
  if (CELL == LSTM) lay_in(p.c, s.Hp, static_cast<const F *>(call.c0), s.B, s.H);
  if (projected)
    for (int64_t u = 0; u < s.p_blocks; u++)
      turn(p.wr + u * V * s.H, V, static_cast<const F *>(call.w_hr) + u * V * s.H, s.P - u * V < V ? s.P - u * V : V, s.H);

  const Cut tiles(s.B, Sizes<F, CELL>::ROWS), groups(tiles.parts, (tiles.parts + s.threads - 1) / (s.threads > 0 ? s.threads : 1));
  for (int64_t t0 = 0; t0 < s.T; t0 += s.block) {
    const int64_t t1 = t0 + s.block < s.T ? t0 + s.block : s.T, rows = (t1 - t0) * s.B;
    F *const gates = kept ? static_cast<F *>(call.saved) + t0 * s.B * s.Np : p.gates;
    gemm<F>(s.share_of(rows, s.Np, s.D), rows, s.Np, s.D, {static_cast<const F *>(call.x) + t0 * s.B * s.D, s.D, 1}, {p.wx, s.Np},
            {gates, s.Np, p.bias, false}, p.scratch, p.each);
    share(s.threads, groups.parts, [&](int64_t group) {
      const Span span = {tiles, groups.at(group), groups.at(group + 1)};
      for (int64_t t = t0; t < t1; t++) {
        play_lanes<F, CELL>(call, s, p, t, span, gates + (t - t0) * s.B * s.Np);
        if constexpr (CELL == LSTM)
          if (projected) project(call, s, p, t, span);
      }
    });
  }
  memcpy(call.h_end, static_cast<F *>(call.y) + (s.T - 1) * s.B * s.P, sizeof(F) * s.B * s.P);
  if (CELL == LSTM)
    for (int64_t b = 0; b < s.B; b++) memcpy(static_cast<F *>(call.c_end) + b * s.H, p.c + b * s.Hp, sizeof(F) * s.H);
  return 0;
}

template <class F> struct Pulling { // what a backward call works with
  F *wb, *wr, *ds, *dx, *carry, *dh, *m, *zeros, *sums, *sums_h, *dw_ih, *dw_hh, *made, *scratch;
  double *squares; // (B, S, a vector), of the step that is played
  const F **from;
  int32_t *rows, *compacts;
  int64_t each;
};

// One step of one lane and one block of units: from the gradient of h to those of what the gates see.
template <class F, Cell CELL>
__attribute__((noinline)) void pull(const tt_call &call, const Sizes<F, CELL> &s, const Pulling<F> &p, int64_t t, int64_t slot, int64_t b, int64_t u, vec<F> dh) {
  constexpr int V = Vec<F>::N, G = gates_of(CELL);
  const int64_t at = t * s.B + b, here = slot * s.B + b;
  const bool reset = call.resets && call.resets[at];
  const int part = s.part(u);
  const F *const gates = static_cast<const F *>(call.saved) + at * s.Np + u * G * V;
  const F *const more = static_cast<const F *>(call.saved) + s.T * s.B * s.Np + at * s.Hp + u * V;
  const F *const y = static_cast<const F *>(call.y) + at * s.P + u * V;
  F *const ds = p.ds + here * s.Np + u * G * V, *const carry = p.carry + b * s.Hp + u * V;
  constexpr int W = Vec<double>::N;
  double *const squares = p.squares ? p.squares + b * s.S * W : nullptr;
  dh = first<F>(dh, part); // behind the last unit all must be zeros: 0 times what is not finite is no zero
  if constexpr (CELL == LSTM) {
    const vec<F> i = load_part(gates, part), f = load_part(gates + V, part), g = load_part(gates + 2 * V, part);
    const vec<F> o = load_part(gates + 3 * V, part), c = tanh<F>(load_part(more, part));
    vec<F> before = {};
    if (!reset) before = load_part(t ? more - s.B * s.Hp : static_cast<const F *>(call.c0) + b * s.H + u * V, part);
    const vec<F> dc = load(carry) + dh * o * (F(1) - c * c);
    const vec<F> di = dc * g, df = dc * before, dg = dc * i, d_o = dh * c;
    store<F>(ds, di * i * (F(1) - i));
    store<F>(ds + V, df * f * (F(1) - f));
    store<F>(ds + 2 * V, dg * (F(1) - g * g));
    store<F>(ds + 3 * V, d_o * o * (F(1) - o));
    store<F>(carry, reset ? vec<F>{} : dc * f);
    if (p.m) store<F>(p.m + here * s.Hp + u * V, o * c);
    if (squares) {
      add_squares(squares + W, dc), add_squares(squares + 2 * W, di), add_squares(squares + 3 * W, df);
      add_squares(squares + 4 * W, dg), add_squares(squares + 5 * W, d_o);
    }
  } else if constexpr (CELL == GRU) {
    const vec<F> r = load_part(gates, part), z = load_part(gates + V, part), n = load_part(gates + 2 * V, part), b_n = load_part(more, part);
    vec<F> before = {};
    if (!reset) before = load_part(t ? y - s.B * s.P : static_cast<const F *>(call.h0) + b * s.P + u * V, part);
    dh += load(carry);
    const vec<F> dn = dh * (F(1) - z), dz = dh * (before - n), inner = dn * (F(1) - n * n), dr = inner * b_n;
    const vec<F> by_r = dr * r * (F(1) - r), by_z = dz * z * (F(1) - z);
    F *const dx = p.dx + here * s.Np + u * G * V;
    store<F>(ds, by_r), store<F>(ds + V, by_z), store<F>(ds + 2 * V, inner * r);
    store<F>(dx, by_r), store<F>(dx + V, by_z), store<F>(dx + 2 * V, inner);
    store<F>(carry, reset ? vec<F>{} : dh * z);
    if (squares) add_squares(squares + W, dr), add_squares(squares + 2 * W, dz), add_squares(squares + 3 * W, dn);
  } else {
    const vec<F> h = load_part(y, part), zero = {};
    store<F>(ds, call.kind == TT_RNN_RELU ? (h <= zero ? zero : dh) : dh * (F(1) - h * h));
  }
  if (squares && !p.dh) add_squares(squares, dh);
}

// The squared norms of a step of lanes b0 to b1, from their sums; room for those of the next step.
template <class F, Cell CELL> void lay_out_squares(const tt_call &call, const Sizes<F, CELL> &s, const Pulling<F> &p, int64_t t, int64_t b0, int64_t b1) {
  constexpr int W = Vec<double>::N;
  for (int64_t k = b0 * s.S; k < b1 * s.S; k++) call.squares[t * s.B * s.S + k] = total<F>(p.squares + k * W);
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

// made += ds of the next step, `from`, times W_hh, over the gates that are there; `from` is spoilt.
template <class F, Cell CELL>
void through_weights(F *made, const F **from, const Span &span, int64_t vectors, const Sizes<F, CELL> &s, const F *w) {
  constexpr int V = Vec<F>::N, G = gates_of(CELL);
  const int64_t whole = s.H / V * V * G, rest = s.H % V, width = vectors * V;
  multiply_panel(made, from, span.tiles, span.i0, span.i1, vectors, w, whole, true);
  const int64_t lanes = span.b1() - span.b0();
  for (int64_t b = 0; rest && b < lanes; b++) from[b] += whole;
  for (int g = 0; rest && g < G; g++) {
    multiply_panel(made, from, span.tiles, span.i0, span.i1, vectors, w + (whole + g * rest) * width, rest, true);
    for (int64_t b = 0; b < lanes; b++) from[b] += V;
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

// One step of lanes b0 to b1, from the step after it, whose gates' gradients are in slot `next`.
template <class F, Cell CELL>
void pull_lanes(const tt_call &call, const Sizes<F, CELL> &s, const Pulling<F> &p, int64_t t, int64_t slot, int64_t next, const Span &span) {
  const int64_t b0 = span.b0(), b1 = span.b1();
  constexpr int V = Vec<F>::N;
  const uint8_t *const resets = call.resets && t + 1 < s.T ? call.resets + (t + 1) * s.B : nullptr;
  F *const made = p.made + b0 * NV * V;
  const Cut panels(s.p_blocks, NV);
  for (int64_t j = 0; j < panels.parts; j++) {
    const int64_t u0 = panels.at(j), vectors = panels.size(j), width = vectors * V, there = s.P - u0 * V < width ? s.P - u0 * V : width;
    for (int64_t b = b0; b < b1; b++) {
      from_outside(made + (b - b0) * width, call, s, t, b, u0 * V, there, width);
      p.from[b] = resets && resets[b] ? p.zeros : p.ds + (next * s.B + b) * s.Np;
    }
    if (t < s.T - 1) through_weights(made, p.from + b0, span, vectors, s, p.wb + u0 * V * s.H * s.G);
    for (int64_t b = b0; b < b1; b++)
      for (int64_t x = 0; x < vectors; x++) {
        const vec<F> dh = load(made + (b - b0) * width + x * V);
        if (!p.dh) {
          pull<F, CELL>(call, s, p, t, slot, b, u0 + x, dh);
          continue;
        }
        store<F>(p.dh + (slot * s.B + b) * s.Pp + (u0 + x) * V, dh);
        if (p.squares) add_squares(p.squares + b * s.S * Vec<double>::N, dh);
      }
  }
  if (!p.dh) return;
  for (int64_t b = b0; b < b1; b++) p.from[b] = p.dh + (slot * s.B + b) * s.Pp;
  for (int64_t u = 0; u < s.blocks; u++) {
    multiply_panel(made, p.from + b0, span.tiles, span.i0, span.i1, 1, p.wr + u * V * s.P, s.P, false);
    for (int64_t b = b0; b < b1; b++) pull<F, CELL>(call, s, p, t, slot, b, u, load(made + (b - b0) * V));
  }
}

template <class F> void add_columns(F *sums, const F *from, int64_t rows, int64_t columns) {
  constexpr int V = Vec<F>::N;
  for (int64_t c = 0; c < columns; c += V) {
    vec<F> sum = {};
    for (int64_t r = 0; r < rows; r++) sum += load(from + r * columns + c);
    store<F>(sums + c, load(sums + c) + sum);
  }
}

// The gradients of weights, biases and inputs that a block of steps gives.
template <class F, Cell CELL>
void by_weights(const tt_call &call, const Sizes<F, CELL> &s, const Pulling<F> &p, int64_t t0, int64_t rows, bool add) {
  const F *const dx = CELL == GRU ? p.dx : p.ds;
  const F *const x = static_cast<const F *>(call.x) + t0 * s.B * s.D, *const y = static_cast<const F *>(call.y);
  const int64_t B = s.B, first = t0 * B, left_rows = t0 ? 0 : B; // the state before the first step lies elsewhere
  const Right<F> before = {y + (t0 ? first - B : 0) * s.P, s.P, nullptr, static_cast<const F *>(call.h0), left_rows,
                           call.resets ? call.resets + first : nullptr};
  if (call.dw_ih) gemm<F>(s.share_of(s.Np, s.D, rows), s.Np, s.D, rows, {dx, 1, s.Np}, {x, s.D}, {p.dw_ih, s.Dp, nullptr, add, true}, p.scratch, p.each);
  if (call.dw_hh) gemm<F>(s.share_of(s.Np, s.P, rows), s.Np, s.P, rows, {p.ds, 1, s.Np}, before, {p.dw_hh, s.Pp, nullptr, add, true}, p.scratch, p.each);
  if (call.dw_hr)
    gemm<F>(s.share_of(s.P, s.H, rows), s.P, s.H, rows, {p.dh, 1, s.Pp}, {p.m, s.Hp}, {static_cast<F *>(call.dw_hr), s.H, nullptr, add || call.accumulate},
            p.scratch, p.each);
  if (call.dx)
    gemm<F>(s.share_of(rows, s.D, s.Np), rows, s.D, s.Np, {dx, s.Np, 1}, {static_cast<const F *>(call.w_ih), s.D, p.rows},
            {static_cast<F *>(call.dx) + first * s.D, s.D, nullptr, false}, p.scratch, p.each);
  if (call.db_ih || call.db_hh) {
    add_columns(p.sums, dx, rows, s.Np);
    if (CELL == GRU) add_columns(p.sums_h, p.ds, rows, s.Np);
  }
}

// Rows in the order of gates to rows in torch's.
template <class F, Cell CELL> void lay_out(void *to, const Sizes<F, CELL> &s, const F *from, int64_t width, int64_t columns, const int32_t *rows, bool add) {
  for (int64_t k = 0; to && k < s.Np; k++) {
    if (rows[k] < 0) continue;
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
    for (int64_t column = 0; made[i] && column < s.Np; column++) {
      const int64_t row = s.row(column);
      if (row >= 0) made[i][row] = (call.accumulate ? made[i][row] : F(0)) + sums[i][column];
    }
}

// The gradients of the state entering the first step, and their squared norms.
template <class F, Cell CELL> void by_state(const tt_call &call, const Sizes<F, CELL> &s, const Pulling<F> &p) {
  constexpr int V = Vec<F>::N, W = Vec<double>::N, E = CELL == LSTM ? 2 : 1;
  const Cut panels(s.p_blocks, NV), tiles(s.B, s.BACK_ROWS);
  for (int64_t b = 0; call.entering && b < s.B * E; b++) call.entering[b] = 0;
  for (int64_t j = 0; (call.dh0 || call.entering) && j < panels.parts; j++) {
    const int64_t u0 = panels.at(j), width = panels.size(j) * V, there = s.P - u0 * V < width ? s.P - u0 * V : width;
    for (int64_t b = 0; b < s.B; b++) {
      memset(p.made + b * width, 0, sizeof(F) * width);
      if (CELL == GRU) memcpy(p.made + b * width, p.carry + b * s.Hp + u0 * V, sizeof(F) * width);
      p.from[b] = call.resets && call.resets[b] ? p.zeros : p.ds + b * s.Np;
    }
    through_weights(p.made, p.from, Span{tiles, 0, tiles.parts}, panels.size(j), s, p.wb + u0 * V * s.H * s.G);
    for (int64_t b = 0; b < s.B; b++) {
      if (call.dh0) memcpy(static_cast<F *>(call.dh0) + b * s.P + u0 * V, p.made + b * width, sizeof(F) * there);
      double sums[W] = {};
      for (int64_t x = 0; call.entering && x < width; x += V) add_squares(sums, load(p.made + b * width + x));
      if (call.entering) call.entering[b * E] += total<F>(sums);
    }
  }
  for (int64_t b = 0; CELL == LSTM && b < s.B; b++) {
    if (call.dc0) memcpy(static_cast<F *>(call.dc0) + b * s.H, p.carry + b * s.Hp, sizeof(F) * s.H);
    double sums[W] = {};
    for (int64_t x = 0; call.entering && x < s.Hp; x += V) add_squares(sums, load(p.carry + b * s.Hp + x));
    if (call.entering) call.entering[b * E + 1] = total<F>(sums);
  }
}

template <class F, Cell CELL> int backward_of(const tt_call &call) {
  constexpr int V = Vec<F>::N;
  const Sizes<F, CELL> s(call);
  const bool projected = CELL == LSTM && call.w_hr;
  Arena arena;
  Pulling<F> p = {};
  p.wb = arena.take<F>(s.G * s.H * s.Pp);
  p.ds = arena.take<F>((s.block + 1) * s.B * s.Np);
  if (CELL == GRU) p.dx = arena.take<F>(s.block * s.B * s.Np);
  if (CELL != RNN) p.carry = arena.zeros<F>(s.B * s.Hp);
  p.zeros = arena.zeros<F>(s.Np);
  if (call.squares) p.squares = arena.zeros<double>(s.B * s.S * Vec<double>::N);
  if (call.dw_ih) p.dw_ih = arena.take<F>(s.Np * s.Dp);
  if (call.dw_hh) p.dw_hh = arena.take<F>(s.Np * s.Pp);
  p.sums = arena.zeros<F>(s.Np);
  p.sums_h = arena.zeros<F>(s.Np);
  if (projected) p.wr = arena.take<F>(s.P * s.Hp), p.dh = arena.take<F>(s.block * s.B * s.Pp), p.m = arena.take<F>(s.block * s.B * s.Hp);
  p.made = arena.take<F>(s.B * NV * V);
  p.from = arena.take<const F *>(s.B);
  p.rows = arena.take<int32_t>(s.Np);
  p.compacts = arena.take<int32_t>(s.G * s.H);
  p.each = gemm_scratch<F>(s.Np > s.Pp ? s.Np : s.Pp, true);
  p.scratch = arena.take<F>(p.each * (s.threads > 1 ? s.threads : 1));
  if (arena.failed) return 1;

  s.tables(p.rows, p.compacts);
  const Right<F> hh = {static_cast<const F *>(call.w_hh), s.P, p.compacts}, hr = {static_cast<const F *>(call.w_hr), s.H};
  const Cut panels(s.p_blocks, NV);
  for (int64_t j = 0; j < panels.parts; j++)
    pack_right(p.wb + panels.at(j) * V * s.G * s.H, hh, 0, s.G * s.H, panels.at(j) * V, s.P, panels.size(j) * V);
  for (int64_t u = 0; projected && u < s.blocks; u++) pack_right(p.wr + u * V * s.P, hr, 0, s.P, u * V, s.H, V);
  if (CELL == LSTM && call.dc_end) lay_in(p.carry, s.Hp, static_cast<const F *>(call.dc_end), s.B, s.H);
  if (call.kept) memset(call.kept, 0, sizeof(double) * s.H);

  const Cut tiles(s.B, Sizes<F, CELL>::BACK_ROWS), groups(tiles.parts, (tiles.parts + s.threads - 1) / (s.threads > 0 ? s.threads : 1));
  bool add = false;
  for (int64_t t1 = s.T; t1 > 0; t1 -= s.block) {
    const int64_t t0 = t1 > s.block ? t1 - s.block : 0;
    share(s.threads, groups.parts, [&](int64_t group) {
      const Span span = {tiles, groups.at(group), groups.at(group + 1)};
      for (int64_t t = t1 - 1; t >= t0; t--) {
        pull_lanes(call, s, p, t, t - t0, t + 1 == t1 ? s.block : t + 1 - t0, span);
        if (p.squares) lay_out_squares(call, s, p, t, span.b0(), span.b1());
      }
    });
    by_weights(call, s, p, t0, (t1 - t0) * s.B, add);
    if (CELL != RNN && call.kept) add_kept(call.kept, s, static_cast<const F *>(call.saved) + t0 * s.B * s.Np, (t1 - t0) * s.B);
    add = true;
    if (t0) memcpy(p.ds + s.block * s.B * s.Np, p.ds, sizeof(F) * s.B * s.Np);
  }
  lay_out(call.dw_ih, s, p.dw_ih, s.Dp, s.D, p.rows, call.accumulate);
  lay_out(call.dw_hh, s, p.dw_hh, s.Pp, s.P, p.rows, call.accumulate);
  by_biases(call, s, p);
  by_state(call, s, p);
  return 0;
}

template <class F> int64_t saved_of(const tt_call &call) {
  if (call.kind == TT_LSTM) return Sizes<F, LSTM>(call).numbers();
  return call.kind == TT_GRU ? Sizes<F, GRU>(call).numbers() : 0;
}

int64_t saved(const tt_call *call) { return call->type == TT_F32 ? saved_of<float>(*call) : saved_of<double>(*call); }

template <class F> int forward_as(const tt_call &call) {
  return call.kind == TT_LSTM ? forward_of<F, LSTM>(call) : call.kind == TT_GRU ? forward_of<F, GRU>(call) : forward_of<F, RNN>(call);
}

template <class F> int backward_as(const tt_call &call) {
  return call.kind == TT_LSTM ? backward_of<F, LSTM>(call) : call.kind == TT_GRU ? backward_of<F, GRU>(call) : backward_of<F, RNN>(call);
}

int forward(const tt_call *call) { return call->type == TT_F32 ? forward_as<float>(*call) : forward_as<double>(*call); }
int backward(const tt_call *call) { return call->type == TT_F32 ? backward_as<float>(*call) : backward_as<double>(*call); }

} // namespace
} // namespace tt
