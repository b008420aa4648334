// A stack of recurrent layers, a linear readout, its loss and the gradients of all weights, in one call.
//
// The loss is the mean over the valid rows of the last steps; earlier steps only compute the state.
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

template <class F> struct Readout { // sizes and memory of the readout
  int64_t rows, P, C, Cp, lead; // rows of the last steps; rows of the steps before them
  F *dz, *scratch;              // the gradient of the outputs (rows, Cp), arbitrary after the last class
  double *losses;               // of each row
  int64_t each;
  int threads;
};

// Adds the biases to a row of outputs.
template <class F> void add_bias(F *z, const F *bias, int64_t count) {
  constexpr int V = Vec<F>::N;
  int64_t c = 0;
  for (; c + V <= count; c += V) store<F>(z + c, load(z + c) + load(bias + c));
  for (; c < count; c++) z[c] += bias[c];
}

// The largest number of a row.
template <class F> F largest(const F *z, int64_t count) {
  constexpr int V = Vec<F>::N;
  vec<F> all_of = all<F>(z[0]);
  int64_t c = 0;
  for (; c + V <= count; c += V) {
    const vec<F> next = load(z + c);
    all_of = next > all_of ? next : all_of;
  }
  F part[V], most = z[0];
  store<F>(part, all_of);
  for (int i = 0; i < V; i++) most = part[i] > most ? part[i] : most;
  for (; c < count; c++) most = z[c] > most ? z[c] : most;
  return most;
}

// The loss of one row, and its gradient times `share`.
template <class F> double cross_entropy(F *dz, const F *z, int64_t C, int64_t target, double share) {
  constexpr int V = Vec<F>::N;
  const F most = largest(z, C);
  const auto exponential = [&](vec<F> at) { // exp(-80) of a sum of at least 1 is lost in rounding
    const vec<F> far = at - most;
    const Power<F> e = power<F>(far < -2 * Vec<F>::SIGMOID_END ? all<F>(-2 * Vec<F>::SIGMOID_END) : far);
    return e.rest * e.scale + e.scale;
  };
  vec<F> sums = {};
  int64_t c = 0;
  for (; c + V <= C; c += V) {
    const vec<F> p = exponential(load(z + c));
    store<F>(dz + c, p);
    sums += p;
  }
  if (c < C) {
    const int rest = static_cast<int>(C - c);
    const vec<F> p = first<F>(exponential(load_part(z + c, rest)), rest);
    store<F>(dz + c, p);
    sums += p;
  }
  F part[V];
  store<F>(part, sums);
  double sum = 0;
  for (int i = 0; i < V; i++) sum += static_cast<double>(part[i]);
  const F scale = static_cast<F>(share / sum);
  for (c = 0; c < C; c += V) store<F>(dz + c, load(dz + c) * scale);
  dz[target] -= static_cast<F>(share);
  return log(sum) + (static_cast<double>(most) - static_cast<double>(z[target]));
}

template <class F> double squared(F *dz, const F *z, int64_t C, const F *target, double share) {
  const F scale = static_cast<F>(share);
  double sum = 0;
  for (int64_t c = 0; c < C; c++) {
    const F off = z[c] - target[c];
    sum += static_cast<double>(off) * static_cast<double>(off);
    dz[c] = F(2) * off / static_cast<F>(C) * scale;
  }
  return sum / static_cast<double>(C);
}

// Outputs and the loss, and its gradient.
template <class F> double readout_loss(const tt_fused_step &call, const Readout<F> &r, const F *y) {
  F *const z = static_cast<F *>(call.outputs);
  Right<F> w = {static_cast<const F *>(call.w), r.P};
  w.transposed = true;
  gemm<F>(r.threads, r.rows, r.C, r.P, {y, r.P, 1}, w, {z, r.C, nullptr, false}, r.scratch, r.each);
  const double share_of_row = 1 / static_cast<double>(call.valid);
  const Partition parts(r.rows, ROWS_PER_TASK);
  share(r.threads, parts.parts, [&](int64_t part) {
    for (int64_t i = parts.at(part); i < parts.at(part + 1); i++) {
      F *const dz = r.dz + i * r.Cp, *const row = z + i * r.C;
      if (call.b) add_bias(row, static_cast<const F *>(call.b), r.C);
      if (call.mask && !call.mask[i])
        memset(dz, 0, sizeof(F) * r.Cp), r.losses[i] = 0;
      else if (call.loss == TT_CROSS_ENTROPY)
        r.losses[i] = cross_entropy<F>(dz, row, r.C, static_cast<const int64_t *>(call.targets)[i], share_of_row);
      else
        r.losses[i] = squared<F>(dz, row, r.C, static_cast<const F *>(call.targets) + i * r.C, share_of_row);
    }
  });
  double loss = 0;
  for (int64_t i = 0; i < r.rows; i++) loss += r.losses[i];
  return loss / static_cast<double>(call.valid);
}

// Whether no number is infinite or NaN: times zero, finite numbers sum to zero.
template <class F> bool all_finite(const void *numbers, int64_t count) {
  constexpr int V = Vec<F>::N;
  const F *const from = static_cast<const F *>(numbers);
  vec<F> sums[4] = {};
  int64_t i = 0;
  for (; numbers && i + 4 * V <= count; i += 4 * V)
    for (int j = 0; j < 4; j++) sums[j] += load(from + i + j * V) * F(0);
  F rest = 0;
  for (; numbers && i < count; i++) rest += from[i] * F(0);
  F part[V];
  store<F>(part, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (int j = 0; j < V; j++) rest += part[j];
  return rest == 0;
}

// Classes in whole vectors of the widest instruction set, so one scratch memory serves all.
template <class F> int64_t padded(const tt_fused_step &call) { return (call.classes * int64_t(sizeof(F)) + 63) / 64 * 64 / int64_t(sizeof(F)); }

template <class F> int64_t scratch_of(const tt_fused_step &call) { return call.steps * call.layers->lanes * padded<F>(call); }

int64_t fused_step_scratch(const tt_fused_step *call) { return call->layers->type == TT_F64 ? scratch_of<double>(*call) : scratch_of<float>(*call); }

template <class F> int in_team(const tt_fused_step &call) {
  const tt_call &top = call.layers[call.count - 1];
  const int64_t all_rows = top.steps * top.lanes;
  Readout<F> r = {};
  r.rows = call.steps * top.lanes, r.lead = all_rows - r.rows;
  r.P = top.outputs, r.C = call.classes, r.Cp = padded<F>(call), r.dz = static_cast<F *>(call.scratch);
  r.threads = r.rows * r.P * r.C < MIN_PARALLEL_WORK ? 1 : top.threads;
  const int64_t *const targets = static_cast<const int64_t *>(call.targets);
  for (int64_t i = 0; call.loss == TT_CROSS_ENTROPY && i < r.rows; i++)
    if ((!call.mask || call.mask[i]) && (targets[i] < 0 || targets[i] >= r.C)) return TT_INVALID_TARGET;
  Arena arena;
  r.losses = arena.take<double>(r.rows);
  F *const sums = arena.zeros<F>(r.Cp);
  r.each = gemm_scratch<F>(r.C, true);
  r.scratch = arena.take<F>(r.each * (r.threads > 1 ? r.threads : 1));
  if (arena.failed) return TT_NO_MEMORY;

  for (int32_t i = 0; i < call.count; i++)
    if (forward_as<F>(call.layers[i])) return TT_NO_MEMORY;
  const F *const y = static_cast<const F *>(top.y) + r.lead * r.P;
  *call.mean = readout_loss<F>(call, r, y);
  gemm<F>(r.threads, r.C, r.P, r.rows, {r.dz, 1, r.Cp}, {y, r.P}, {static_cast<F *>(call.dw), r.P, nullptr, call.accumulate != 0}, r.scratch,
          r.each);
  add_columns(sums, r.dz, r.rows, r.Cp, r.Cp);
  for (int64_t c = 0; call.db && c < r.C; c++) {
    F *const db = static_cast<F *>(call.db) + c;
    *db = (call.accumulate ? *db : F(0)) + sums[c];
  }
  F *const dy = const_cast<F *>(static_cast<const F *>(top.dy));
  memset(dy, 0, sizeof(F) * r.lead * r.P);
  gemm<F>(r.threads, r.rows, r.P, r.C, {r.dz, r.Cp, 1}, {static_cast<const F *>(call.w), r.P}, {dy + r.lead * r.P, r.P, nullptr, false}, r.scratch,
          r.each);
  for (int32_t i = call.count - 1; i >= 0; i--)
    if (backward_as<F>(call.layers[i])) return TT_NO_MEMORY;
  bool finite = all_finite<F>(call.dw, r.C * r.P);
  for (int32_t i = 0; i < call.count; i++) {
    const tt_call &layer = call.layers[i];
    const int64_t rows = (layer.kind == TT_LSTM ? 4 : layer.kind == TT_GRU ? 3 : 1) * layer.hidden;
    finite = finite && all_finite<F>(layer.dw_ih, rows * layer.inputs) && all_finite<F>(layer.dw_hh, rows * layer.outputs);
  }
  return finite ? 0 : TT_NON_FINITE;
}

template <class F> int fused_step_of(const tt_fused_step &call) {
  int threads = 1, fault = 0;
  for (int32_t i = 0; i < call.count; i++) {
    const int of_layer = threads_of<F>(call.layers[i]);
    threads = of_layer > threads ? of_layer : threads;
  }
  with_team(threads, [&] { fault = in_team<F>(call); });
  return fault;
}

int fused_step(const tt_fused_step *call) { return call->layers[0].type == TT_F64 ? fused_step_of<double>(*call) : fused_step_of<float>(*call); }

} // namespace
} // namespace tt
