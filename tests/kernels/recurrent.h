// The recurrent layers in their simplest form, in double, as a reference for the kernels.
//
// LSTM   i f g o = sigmoid, sigmoid, tanh, sigmoid of s        c[t] = f c[t-1] + i g       h[t] = o tanh(c[t]), times W_hr' if projected
// GRU    r z = sigmoid(s), n = tanh(a + r b)                   h[t] = (1 - z) n + z h[t-1]
// RNN    h[t] = tanh or relu of s
// with a = W_ih x[t] + b_ih, b = W_hh h[t-1] + b_hh, s = a + b. A reset sets the state entering a step to zero.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "throughtime.h"

using Numbers = std::vector<double>;

struct Sizes {
  int kind;
  int64_t T, B, D, H, P;
  bool projected;
  int64_t gates() const { return kind == TT_LSTM ? 4 : kind == TT_GRU ? 3 : 1; }
  int64_t rows() const { return gates() * H; }
};

struct LayerInputs { // b_ih, w_hr, resets, dy, dh_end and dc_end may be empty
  Numbers x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, dy, dh_end, dc_end;
  std::vector<uint8_t> resets;
};

struct LayerResults {
  Numbers y, h_end, c_end, dx, dh0, dc0, dw_ih, dw_hh, db_ih, db_hh, dw_hr;
  double nearest = 1e300; // to the kink of relu
};

inline double logistic(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// One step of one lane: inputs, gates, results.
struct Step {
  Numbers x, h, c;          // h and c as they enter
  Numbers a, b, i, f, g, o; // GRU: r, z, n in i, f, g; RNN: the sum in i
  Numbers inner, next_c, next_h;
};

inline Numbers times(const Numbers &matrix, const Numbers &column, int64_t rows) {
  Numbers out(static_cast<size_t>(rows), 0.0);
  const int64_t n = static_cast<int64_t>(column.size());
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < n; k++) out[r] += matrix[r * n + k] * column[k];
  return out;
}

inline Numbers transposed_times(const Numbers &matrix, const Numbers &row, int64_t columns) {
  Numbers out(static_cast<size_t>(columns), 0.0);
  for (size_t r = 0; r < row.size(); r++)
    for (int64_t k = 0; k < columns; k++) out[k] += matrix[r * columns + k] * row[r];
  return out;
}

inline void add_outer(Numbers &to, const Numbers &rows, const Numbers &columns) {
  for (size_t r = 0; r < rows.size(); r++)
    for (size_t k = 0; k < columns.size(); k++) to[r * columns.size() + k] += rows[r] * columns[k];
}

inline void add(Numbers &to, const Numbers &more) {
  for (size_t k = 0; k < more.size(); k++) to[k] += more[k];
}

inline Numbers cut(const Numbers &from, int64_t at, int64_t count) {
  return Numbers(from.begin() + at * count, from.begin() + (at + 1) * count);
}

inline void step_forward(const Sizes &z, const LayerInputs &inputs, Step &s, double &nearest) {
  const int64_t H = z.H;
  s.a = times(inputs.w_ih, s.x, z.rows());
  s.b = times(inputs.w_hh, s.h, z.rows());
  if (!inputs.b_ih.empty()) {
    add(s.a, inputs.b_ih);
    add(s.b, inputs.b_hh);
  }
  s.i = s.f = s.g = s.o = s.inner = s.next_c = Numbers(static_cast<size_t>(H));
  for (int64_t j = 0; j < H; j++) {
    const auto sum = [&](int64_t gate) { return s.a[gate * H + j] + s.b[gate * H + j]; };
    if (z.kind == TT_LSTM) {
      s.i[j] = logistic(sum(0)), s.f[j] = logistic(sum(1)), s.g[j] = std::tanh(sum(2)), s.o[j] = logistic(sum(3));
      s.next_c[j] = s.f[j] * s.c[j] + s.i[j] * s.g[j];
      s.inner[j] = s.o[j] * std::tanh(s.next_c[j]);
    } else if (z.kind == TT_GRU) {
      s.i[j] = logistic(sum(0)), s.f[j] = logistic(sum(1)), s.g[j] = std::tanh(s.a[2 * H + j] + s.i[j] * s.b[2 * H + j]);
      s.inner[j] = (1.0 - s.f[j]) * s.g[j] + s.f[j] * s.h[j];
    } else {
      s.i[j] = sum(0);
      s.inner[j] = z.kind == TT_RNN_TANH ? std::tanh(s.i[j]) : s.i[j] > 0.0 ? s.i[j] : 0.0;
      nearest = std::fmin(nearest, std::fabs(s.i[j]));
    }
  }
  s.next_h = z.projected ? times(inputs.w_hr, s.inner, z.P) : s.inner;
}

// From dh and dc of the state after a step to those of the state before it.
inline void step_backward(const Sizes &z, const LayerInputs &inputs, const Step &s, Numbers &dh, Numbers &dc, LayerResults &results, int64_t at) {
  const int64_t H = z.H;
  const Numbers inner = z.projected ? transposed_times(inputs.w_hr, dh, H) : dh;
  if (z.projected) add_outer(results.dw_hr, dh, s.inner);
  Numbers da(static_cast<size_t>(z.rows())), db(static_cast<size_t>(z.rows())), past(static_cast<size_t>(H), 0.0);
  for (int64_t j = 0; j < H; j++) {
    if (z.kind == TT_LSTM) {
      const double tanh = std::tanh(s.next_c[j]), d = dc[j] + inner[j] * s.o[j] * (1.0 - tanh * tanh);
      da[j] = d * s.g[j] * s.i[j] * (1.0 - s.i[j]);
      da[H + j] = d * s.c[j] * s.f[j] * (1.0 - s.f[j]);
      da[2 * H + j] = d * s.i[j] * (1.0 - s.g[j] * s.g[j]);
      da[3 * H + j] = inner[j] * tanh * s.o[j] * (1.0 - s.o[j]);
      dc[j] = d * s.f[j];
    } else if (z.kind == TT_GRU) {
      const double dn = inner[j] * (1.0 - s.f[j]) * (1.0 - s.g[j] * s.g[j]);
      da[j] = dn * s.b[2 * H + j] * s.i[j] * (1.0 - s.i[j]);
      da[H + j] = inner[j] * (s.h[j] - s.g[j]) * s.f[j] * (1.0 - s.f[j]);
      da[2 * H + j] = dn;
      past[j] = inner[j] * s.f[j];
    } else {
      da[j] = inner[j] * (z.kind == TT_RNN_TANH ? 1.0 - s.inner[j] * s.inner[j] : s.i[j] > 0.0 ? 1.0 : 0.0);
    }
  }
  db = da;
  if (z.kind == TT_GRU)
    for (int64_t j = 0; j < H; j++) db[2 * H + j] *= s.i[j];
  add_outer(results.dw_ih, da, s.x);
  add_outer(results.dw_hh, db, s.h);
  add(results.db_ih, da);
  add(results.db_hh, db);
  const Numbers dx = transposed_times(inputs.w_ih, da, z.D);
  std::copy(dx.begin(), dx.end(), results.dx.begin() + at * z.D);
  dh = transposed_times(inputs.w_hh, db, z.P);
  if (z.kind == TT_GRU) add(dh, past);
}

inline LayerResults reference(const Sizes &z, const LayerInputs &inputs) {
  const auto zeros = [](int64_t count) { return Numbers(static_cast<size_t>(count), 0.0); };
  const int64_t cells = z.kind == TT_LSTM ? z.H : 0;
  LayerResults results;
  results.y = zeros(z.T * z.B * z.P), results.h_end = zeros(z.B * z.P), results.c_end = zeros(z.B * cells);
  results.dx = zeros(z.T * z.B * z.D), results.dh0 = zeros(z.B * z.P), results.dc0 = zeros(z.B * cells);
  results.dw_ih = zeros(z.rows() * z.D), results.dw_hh = zeros(z.rows() * z.P), results.dw_hr = zeros(z.projected ? z.P * z.H : 0);
  results.db_ih = zeros(z.rows()), results.db_hh = zeros(z.rows());
  for (int64_t lane = 0; lane < z.B; lane++) {
    std::vector<Step> steps(static_cast<size_t>(z.T));
    const auto fresh = [&](int64_t t) { return !inputs.resets.empty() && inputs.resets[t * z.B + lane]; };
    Numbers h = cut(inputs.h0, lane, z.P), c = cells ? cut(inputs.c0, lane, z.H) : Numbers();
    for (int64_t t = 0; t < z.T; t++) {
      Step &s = steps[t];
      s.x = cut(inputs.x, t * z.B + lane, z.D), s.h = fresh(t) ? zeros(z.P) : h, s.c = fresh(t) ? zeros(cells) : c;
      step_forward(z, inputs, s, results.nearest);
      h = s.next_h, c = s.next_c;
      std::copy(h.begin(), h.end(), results.y.begin() + (t * z.B + lane) * z.P);
    }
    std::copy(h.begin(), h.end(), results.h_end.begin() + lane * z.P);
    if (cells) std::copy(c.begin(), c.end(), results.c_end.begin() + lane * z.H);
    Numbers dh = inputs.dh_end.empty() ? zeros(z.P) : cut(inputs.dh_end, lane, z.P);
    Numbers dc = inputs.dc_end.empty() ? zeros(cells) : cut(inputs.dc_end, lane, z.H);
    for (int64_t t = z.T; t-- > 0;) {
      if (!inputs.dy.empty()) add(dh, cut(inputs.dy, t * z.B + lane, z.P));
      step_backward(z, inputs, steps[t], dh, dc, results, t * z.B + lane);
      if (fresh(t)) dh = zeros(z.P), dc = zeros(cells);
    }
    std::copy(dh.begin(), dh.end(), results.dh0.begin() + lane * z.P);
    std::copy(dc.begin(), dc.end(), results.dc0.begin() + lane * cells);
  }
  return results;
}
