// A stack of recurrent layers, a linear readout, its loss and the gradients of all weights, in one call.
//
// The loss is the mean over the rows that count of the last steps; the steps before them only lead up to it.
//
//     z = W y + b        cross-entropy: -log softmax(z)[target]        squared: mean over classes of (z - target)^2
//     dz = (softmax(z) - [target]) / N,  2 (z - target) / (N C)        dW = dz' y        dy = dz W
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "recurrent.h"

namespace tt {
namespace {

template <class F> struct Reading { // sizes and memory of the readout
  int64_t rows, P, C, Cp, lead; // rows that may count; those of the steps before them
  F *z, *w, *bias, *scratch;
  int64_t each;
  int threads;
};

// The loss of one row, z turned into its gradient times N. Classes behind the last stay zero.
template <class F> double cross_entropy(F *z, int64_t C, int64_t Cp, int64_t target) {
  constexpr int V = Vec<F>::N;
  F most = z[0];
  for (int64_t c = 1; c < C; c++) most = z[c] > most ? z[c] : most;
  const double at_target = z[target];
  vec<F> sums = {};
  for (int64_t c = 0; c < Cp; c += V) { // exp(-80) of a sum of at least 1 is lost in rounding
    const vec<F> far = load(z + c) - most;
    const Power<F> e = power<F>(far < -2 * Vec<F>::SIGMOID_END ? all<F>(-2 * Vec<F>::SIGMOID_END) : far);
    vec<F> p = e.rest * e.scale + e.scale;
    if (C - c < V) {
      F part[V];
      store<F>(part, p);
      for (int64_t x = C - c; x < V; x++) part[x] = 0;
      p = load(part);
    }
    store<F>(z + c, p);
    sums += p;
  }
  F part[V];
  store<F>(part, sums);
  double sum = 0;
  for (int i = 0; i < V; i++) sum += static_cast<double>(part[i]);
  const F scale = static_cast<F>(1 / sum);
  for (int64_t c = 0; c < Cp; c += V) store<F>(z + c, load(z + c) * scale);
  z[target] -= F(1);
  return log(sum) + static_cast<double>(most) - at_target;
}

template <class F> double squared(F *z, int64_t C, const F *target) {
  double sum = 0;
  for (int64_t c = 0; c < C; c++) {
    const F off = z[c] - target[c];
    sum += static_cast<double>(off) * static_cast<double>(off);
    z[c] = F(2) * off / static_cast<F>(C);
  }
  return sum / static_cast<double>(C);
}

// Outputs and the loss; z becomes the gradient of the loss.
template <class F> double read_out(const tt_whole &whole, const Reading<F> &r, const F *y) {
  for (int64_t c = 0; c < r.Cp; c += Vec<F>::N) {
    const int part = static_cast<int>(r.C - c < Vec<F>::N ? r.C - c : Vec<F>::N);
    turn(r.w + c, r.Cp, static_cast<const F *>(whole.w) + c * r.P, part, r.P);
  }
  if (whole.b) memcpy(r.bias, whole.b, sizeof(F) * r.C);
  gemm<F>(r.threads, r.rows, r.C, r.P, {y, r.P, 1}, {r.w, r.Cp}, {r.z, r.Cp, r.bias, false, true}, r.scratch, r.each);
  for (int64_t i = 0; i < r.rows; i++) memcpy(static_cast<F *>(whole.outputs) + i * r.C, r.z + i * r.Cp, sizeof(F) * r.C);
  double loss = 0;
  const F scale = static_cast<F>(1 / static_cast<double>(whole.valid));
  for (int64_t i = 0; i < r.rows; i++) {
    F *const z = r.z + i * r.Cp;
    if (whole.mask && !whole.mask[i]) {
      memset(z, 0, sizeof(F) * r.Cp);
      continue;
    }
    if (whole.loss == TT_CROSS_ENTROPY)
      loss += cross_entropy<F>(z, r.C, r.Cp, static_cast<const int64_t *>(whole.targets)[i]);
    else
      loss += squared<F>(z, r.C, static_cast<const F *>(whole.targets) + i * r.C);
    for (int64_t c = 0; c < r.Cp; c += Vec<F>::N) store<F>(z + c, load(z + c) * scale);
  }
  return loss / static_cast<double>(whole.valid);
}

// Whether none is infinite or NaN: times zero, all others add up to it.
template <class F> bool all_finite(const void *of, int64_t count) {
  constexpr int V = Vec<F>::N;
  const F *const from = static_cast<const F *>(of);
  vec<F> sums[4] = {};
  int64_t i = 0;
  for (; of && i + 4 * V <= count; i += 4 * V)
    for (int j = 0; j < 4; j++) sums[j] += load(from + i + j * V) * F(0);
  F rest = 0;
  for (; of && i < count; i++) rest += from[i] * F(0);
  F part[V];
  store<F>(part, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (int j = 0; j < V; j++) rest += part[j];
  return rest == 0;
}

template <class F> int whole_of(const tt_whole &whole) {
  const tt_call &top = whole.layers[whole.count - 1];
  const int64_t all_rows = top.steps * top.lanes;
  Reading<F> r = {};
  r.rows = whole.steps * top.lanes, r.lead = all_rows - r.rows;
  r.P = top.outputs, r.C = whole.classes, r.Cp = (r.C + Vec<F>::N - 1) / Vec<F>::N * Vec<F>::N;
  r.threads = r.rows * r.P * r.C < WORTH ? 1 : top.threads;
  const int64_t *const targets = static_cast<const int64_t *>(whole.targets);
  for (int64_t i = 0; whole.loss == TT_CROSS_ENTROPY && i < r.rows; i++)
    if ((!whole.mask || whole.mask[i]) && (targets[i] < 0 || targets[i] >= r.C)) return TT_NO_CLASS;
  Arena arena;
  r.z = arena.zeros<F>(r.rows * r.Cp);
  r.w = arena.zeros<F>(r.P * r.Cp);
  r.bias = arena.zeros<F>(r.Cp);
  F *const sums = arena.zeros<F>(r.Cp);
  r.each = gemm_scratch<F>(r.C, true);
  r.scratch = arena.take<F>(r.each * (r.threads > 1 ? r.threads : 1));
  if (arena.failed) return TT_NO_MEMORY;

  for (int32_t i = 0; i < whole.count; i++)
    if (forward_as<F>(whole.layers[i])) return TT_NO_MEMORY;
  const F *const y = static_cast<const F *>(top.y) + r.lead * r.P;
  *whole.mean = read_out<F>(whole, r, y);
  gemm<F>(r.threads, r.C, r.P, r.rows, {r.z, 1, r.Cp}, {y, r.P}, {static_cast<F *>(whole.dw), r.P, nullptr, whole.accumulate != 0}, r.scratch,
          r.each);
  add_columns(sums, r.z, r.rows, r.Cp, r.Cp);
  for (int64_t c = 0; whole.db && c < r.C; c++) {
    F *const db = static_cast<F *>(whole.db) + c;
    *db = (whole.accumulate ? *db : F(0)) + sums[c];
  }
  F *const dy = const_cast<F *>(static_cast<const F *>(top.dy));
  memset(dy, 0, sizeof(F) * r.lead * r.P);
  gemm<F>(r.threads, r.rows, r.P, r.C, {r.z, r.Cp, 1}, {static_cast<const F *>(whole.w), r.P}, {dy + r.lead * r.P, r.P, nullptr, false}, r.scratch,
          r.each);
  for (int32_t i = whole.count - 1; i >= 0; i--)
    if (backward_as<F>(whole.layers[i])) return TT_NO_MEMORY;
  bool finite = all_finite<F>(whole.dw, r.C * r.P);
  for (int32_t i = 0; i < whole.count; i++) {
    const tt_call &layer = whole.layers[i];
    const int64_t rows = (layer.kind == TT_LSTM ? 4 : layer.kind == TT_GRU ? 3 : 1) * layer.hidden;
    finite = finite && all_finite<F>(layer.dw_ih, rows * layer.inputs) && all_finite<F>(layer.dw_hh, rows * layer.outputs);
  }
  return finite ? 0 : TT_NOT_FINITE;
}

int whole(const tt_whole *call) { return call->layers[0].type == TT_F64 ? whole_of<double>(*call) : whole_of<float>(*call); }

} // namespace
} // namespace tt
