// The forward pass of a layer.
//
// With few lanes, or weights of many inputs, the product of the inputs is computed for many steps at once, and only the product of h runs
// step by step. Otherwise both run step by step, and nothing goes through memory. The gates of a panel of units are computed while their
// sums are in the first-level cache. The steps of one input product fit in the second-level cache.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "sizes.h"

namespace tt {
namespace {

template <class F> struct ForwardBuffers { // scratch memory of a forward call
  F *bias, *n_bias, *h, *c, *m, *gates, *result, *x_result, *scratch;
  int64_t each;
};

template <class F, bool HALF> struct ForwardWeights { // the factors of its products
  Lanes<F, HALF> of_h, of_x, of_m;
  typename Lanes<F, HALF>::Number *wh, *wx, *wr;
};

// One step of lanes b0 to b1 and one block of units: from the products of h and of the inputs to the new h. `gates` receives the values of
// the gates if a backward pass follows.
template <class F, Cell CELL>
__attribute__((noinline)) void forward_units(const tt_call &call, const Sizes<F, CELL> &s, const ForwardBuffers<F> &p, int64_t t, int64_t b0, int64_t b1, int64_t u,
                                    Rows<const F> of_h, Rows<const F> of_x, F *gates) {
  constexpr int V = Vec<F>::N, G = gates_of(CELL);
  const bool keep = CELL != RNN && call.saved;
  const uint8_t *const resets = call.resets ? call.resets + t * s.B : nullptr;
  const int part = s.part(u);
  const vec<F> zero = {}, n_bias = CELL == GRU ? load(p.n_bias + u * V) : zero;
  const F *by_h = of_h.first, *by_x = of_x.first;
  for (int64_t b = b0; b < b1; b++, by_h += of_h.stride, by_x += of_x.stride, gates += s.Np) {
    const bool reset = resets && resets[b];
    F *const extra = keep ? static_cast<F *>(call.saved) + s.T * s.B * s.Np + (t * s.B + b) * s.Hp + u * V : nullptr;
    if (keep && t + 1 < s.T) prefetch(gates + s.B * s.Np, G), prefetch(extra + s.B * s.Hp, 1);
    const auto seen = [&](int gate) { return load(by_h + gate * part) + load(by_x + gate * part); };
    const auto put = [&](F *to, vec<F> v) { store<F>(to, first<F>(v, part)); }; // zeros after the last unit, so equal inputs save equal numbers
    vec<F> h;
    if constexpr (CELL == LSTM) {
      F *const cell = p.c + b * s.Hp + u * V;
      const vec<F> i = sigmoid<F>(seen(0)), f = sigmoid<F>(seen(1)), g = tanh<F>(seen(2)), o = sigmoid<F>(seen(3));
      const vec<F> c = reset ? i * g : f * load(cell) + i * g;
      store<F>(cell, c);
      h = o * tanh<F>(c);
      if (keep) {
        put(gates, i), put(gates + V, f), put(gates + 2 * V, g), put(gates + 3 * V, o);
        put(extra, c);
      }
    } else if constexpr (CELL == GRU) {
      const vec<F> r = sigmoid<F>(seen(0)), z = sigmoid<F>(seen(1));
      const vec<F> inner = load(by_h + 2 * part), n = tanh<F>(load(by_x + 2 * part) + n_bias + r * inner);
      const vec<F> before = reset ? zero : load(p.h + ((t & 1) * s.B + b) * s.Pp + u * V);
      h = (F(1) - z) * n + z * before; // not n + z (before - n), which rounds a state that is kept at every step
      if (keep) {
        put(gates, r), put(gates + V, z), put(gates + 2 * V, n);
        put(extra, inner);
      }
    } else {
      const vec<F> sum = seen(0);
      h = call.kind == TT_RNN_RELU ? (sum < zero ? zero : sum) : tanh<F>(sum);
    }
    if (CELL == LSTM && p.m) {
      store<F>(p.m + b * s.Hp + u * V, h);
      continue;
    }
    store<F>(p.h + ((~t & 1) * s.B + b) * s.Pp + u * V, h);
    store_part(static_cast<F *>(call.y) + (t * s.B + b) * s.P + u * V, h, part);
  }
}

// One step of some lanes; `gates` are those of the step.
template <class F, Cell CELL, bool HALF>
void forward_lanes(const tt_call &call, const Sizes<F, CELL> &s, const ForwardBuffers<F> &p, const ForwardWeights<F, HALF> &w, int64_t t, const Span &span, F *gates) {
  const int64_t b0 = span.b0(), b1 = span.b1();
  constexpr int V = Vec<F>::N, G = gates_of(CELL);
  typedef Sizes<F, CELL> S;
  const F *const before = p.h + (t & 1) * s.B * s.Pp;
  F *const result = p.result + scratch_offset<HALF>(span) * NV * V, *const x_result = p.x_result + scratch_offset<HALF>(span) * NV * V;
  for (int64_t b = b0; b < b1; b++) {
    w.of_h.set(b, call.resets && call.resets[t * s.B + b] ? nullptr : before + b * s.Pp);
    if (s.joined) w.of_x.set(b, static_cast<const F *>(call.x) + (t * s.B + b) * s.D);
  }
  // All products before all gates, if their sums stay in the first-level cache: a processor does not look as far ahead as the next product
  // while it waits for the functions of a gate.
  const bool apart = s.apart(HALF);
  const auto product = [&](int64_t u0, F *to, F *x_to) {
    const int64_t column = s.column(u0), vectors = (s.column(u0 + S::UNITS < s.blocks ? u0 + S::UNITS : s.blocks) - column) / V;
    w.of_h.times(to, span, vectors, w.wh + column * w.of_h.depth(s.P), p.bias + column, 0);
    if (s.joined) w.of_x.times(x_to, span, vectors, w.wx + column * w.of_x.depth(s.D), nullptr, 0);
  };
  for (int64_t i = 0, last = (s.blocks - 1) / S::UNITS; apart && i <= last; i++) {
    const int64_t u0 = (t & 1 ? last - i : i) * S::UNITS; // begins with the weights that the step before read last
    product(u0, result + s.column(u0) * s.B, x_result + s.column(u0) * s.B);
  }
  for (int64_t u0 = 0; u0 < s.blocks; u0 += S::UNITS) {
    const int64_t units = s.blocks - u0 < S::UNITS ? s.blocks - u0 : S::UNITS, column = s.column(u0), width = s.column(u0 + units) - column;
    if (!apart) product(u0, result, x_result);
    const int64_t offset = apart ? column * s.B : 0;
    for (int64_t x = 0; x < units; x++) {
      F *const current = gates + b0 * s.Np + column + x * G * V;
      const Rows<const F> of_h = {result + offset + x * G * V, width};
      const Rows<const F> of_x = s.joined ? Rows<const F>{x_result + offset + x * G * V, width} : Rows<const F>{current, s.Np};
      forward_units<F, CELL>(call, s, p, t, b0, b1, u0 + x, of_h, of_x, current);
    }
  }
}

// h = W_hr m of a projected LSTM.
template <class F, bool HALF>
void project(const tt_call &call, const Sizes<F, LSTM> &s, const ForwardBuffers<F> &p, const ForwardWeights<F, HALF> &w, int64_t t, const Span &span) {
  const int64_t b0 = span.b0(), b1 = span.b1();
  constexpr int V = Vec<F>::N;
  F *const after = p.h + (~t & 1) * s.B * s.Pp, *const y = static_cast<F *>(call.y) + t * s.B * s.P, *const result = p.result + scratch_offset<HALF>(span) * NV * V;
  for (int64_t b = b0; b < b1; b++) w.of_m.set(b, p.m + b * s.Hp);
  for (int64_t u = 0; u < s.p_blocks; u++) {
    w.of_m.times(result, span, 1, w.wr + u * V * w.of_m.depth(s.H), nullptr, 0);
    for (int64_t b = b0; b < b1; b++) store<F>(after + b * s.Pp + u * V, load(result + (b - b0) * V));
  }
  for (int64_t b = b0; b < b1; b++) memcpy(y + b * s.P, after + b * s.Pp, sizeof(F) * s.P);
}

// W with its rows in the order of gates, in panels of UNITS blocks, as `Lanes` multiplies it; null if out of memory.
template <class F, Cell CELL, bool HALF> typename Lanes<F, HALF>::Number *packed_weights(Arena &arena, const Sizes<F, CELL> &s, const void *w, int64_t k) {
  typedef Lanes<F, HALF> L;
  F *const plain = arena.take<F>(k * s.Nc);
  auto *const packed = HALF ? arena.take<typename L::Number>(L::depth(k) * s.Nc) : reinterpret_cast<typename L::Number *>(plain);
  if (arena.failed) return nullptr;
  arrange(plain, s, static_cast<const F *>(w), k, Sizes<F, CELL>::UNITS);
  for (int64_t u = 0; HALF && u < s.blocks; u += Sizes<F, CELL>::UNITS) {
    const int64_t end = u + Sizes<F, CELL>::UNITS < s.blocks ? u + Sizes<F, CELL>::UNITS : s.blocks, column = s.column(u);
    L::pack(packed + column * L::depth(k), plain + column * k, k, s.column(end) - column);
  }
  return packed;
}

// W_hr (P, H) by panels of one vector of its rows.
template <class F, bool HALF> typename Lanes<F, HALF>::Number *packed_projection(Arena &arena, const Sizes<F, LSTM> &s, const void *w) {
  typedef Lanes<F, HALF> L;
  constexpr int V = Vec<F>::N;
  F *const plain = arena.zeros<F>(V * s.H);
  auto *const packed = arena.take<typename L::Number>(s.p_blocks * V * L::depth(s.H));
  for (int64_t u = 0; !arena.failed && u < s.p_blocks; u++) {
    const int64_t valid = s.P - u * V < V ? s.P - u * V : V;
    if (valid < V) memset(plain, 0, sizeof(F) * V * s.H);
    transpose(plain, V, static_cast<const F *>(w) + u * V * s.H, valid, s.H, s.H);
    L::pack(packed + u * V * L::depth(s.H), plain, s.H, V);
  }
  return packed;
}

template <class F, Cell CELL, bool HALF> int forward_of(const tt_call &call) {
  constexpr int V = Vec<F>::N;
  const Sizes<F, CELL> s(call);
  const bool projected = CELL == LSTM && call.w_hr, kept = CELL != RNN && call.saved;
  const Partition tiles(s.B, Sizes<F, CELL>::ROWS), groups(tiles.parts, (tiles.parts + s.threads - 1) / (s.threads > 0 ? s.threads : 1));
  Arena arena;
  ForwardBuffers<F> p = {};
  ForwardWeights<F, HALF> w = {};
  p.bias = arena.zeros<F>(s.Nc);
  p.n_bias = arena.zeros<F>(s.Hp);
  p.h = arena.zeros<F>(2 * s.B * s.Pp);
  if (CELL == LSTM) p.c = arena.zeros<F>(s.B * s.Hp);
  if (projected) p.m = arena.take<F>(s.B * s.Hp), w.of_m.take(arena, s.B, s.H);
  const int64_t sums = s.apart(HALF) ? s.B * s.Nc : (s.B + (HALF ? tiles.parts * SPARE_ROWS : 0)) * NV * V;
  const int64_t room = sums + NV * V; // the gates of the last block are read in whole vectors
  p.result = arena.take<F>(room);
  p.x_result = arena.take<F>(room);
  w.of_h.take(arena, s.B, s.P);
  w.of_x.take(arena, s.joined ? s.B : 0, s.D);
  if (!kept) p.gates = arena.take<F>((s.joined ? 1 : s.block) * s.B * s.Np);
  p.each = gemm_scratch<F>(s.block * s.B, HALF);
  p.scratch = arena.take<F>(p.each * (s.threads > 1 ? s.threads : 1));
  w.wh = packed_weights<F, CELL, HALF>(arena, s, call.w_hh, s.P);
  if (s.joined) w.wx = packed_weights<F, CELL, HALF>(arena, s, call.w_ih, s.D);
  F *const wx = s.joined ? nullptr : arena.take<F>(s.D * s.Nc);
  if constexpr (CELL == LSTM)
    if (projected) w.wr = packed_projection<F, HALF>(arena, s, call.w_hr);
  if (arena.failed) return 1;

  if (wx) arrange(wx, s, static_cast<const F *>(call.w_ih), s.D, 0);
  biases(p.bias, p.n_bias, s, static_cast<const F *>(call.b_ih), static_cast<const F *>(call.b_hh));
  copy_padded(p.h, s.Pp, static_cast<const F *>(call.h0), s.B, s.P);
  if (CELL == LSTM) copy_padded(p.c, s.Hp, static_cast<const F *>(call.c0), s.B, s.H);

  const int64_t block = s.joined ? s.T : s.block;
  for (int64_t t0 = 0; t0 < s.T; t0 += block) {
    const int64_t t1 = t0 + block < s.T ? t0 + block : s.T, rows = (t1 - t0) * s.B;
    F *const gates = kept ? static_cast<F *>(call.saved) + t0 * s.B * s.Np : p.gates;
    if (!s.joined)
      gemm<F, HALF>(s.share_of(rows, s.Nc, s.D), rows, s.Nc, s.D, {static_cast<const F *>(call.x) + t0 * s.B * s.D, s.D, 1}, {wx, s.Nc},
              {gates, s.Np, nullptr, false, true}, p.scratch, p.each);
    const int64_t step = s.joined && !kept ? 0 : s.B * s.Np; // gates that are not saved need memory for one step only
    share(s.threads, groups.parts, [&](int64_t group) {
      const Span span = {tiles, groups.at(group), groups.at(group + 1)};
      for (int64_t t = t0; t < t1; t++) {
        forward_lanes<F, CELL, HALF>(call, s, p, w, t, span, gates + (t - t0) * step);
        if constexpr (CELL == LSTM)
          if (projected) project<F, HALF>(call, s, p, w, t, span);
      }
    });
  }
  memcpy(call.h_end, static_cast<F *>(call.y) + (s.T - 1) * s.B * s.P, sizeof(F) * s.B * s.P);
  if (CELL == LSTM)
    for (int64_t b = 0; b < s.B; b++) memcpy(static_cast<F *>(call.c_end) + b * s.H, p.c + b * s.Hp, sizeof(F) * s.H);
  return 0;
}

} // namespace
} // namespace tt
