// The recurrent layers in their plainest form, in double: what the kernels are compared with.
//
// LSTM   i f g o = sigmoid, sigmoid, tanh, sigmoid of s        c[t] = f c[t-1] + i g       h[t] = o tanh(c[t]), times W_hr' if projected
// GRU    r z = sigmoid(s), n = tanh(a + r b)                   h[t] = (1 - z) n + z h[t-1]
// RNN    h[t] = tanh or relu of s
// with a = W_ih x[t] + b_ih, b = W_hh h[t-1] + b_hh, s = a + b. A reset makes the state that enters a step zero.
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
  int64_t letters() const { return kind == TT_LSTM ? 6 : kind == TT_GRU ? 4 : 1; } // of `squares`
};

struct Given { // b_ih, w_hr, resets, dy, dh_end and dc_end are empty where there are none
  Numbers x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, dy, dh_end, dc_end;
  std::vector<uint8_t> resets;
};

struct Made {
  Numbers y, h_end, c_end, dx, dh0, dc0, dw_ih, dw_hh, db_ih, db_hh, dw_hr, squares;
  double nearest = 1e300; // to the kink of relu
};

inline double logistic(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// One step of one lane: what it was given, what is inside, what leaves it.
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

inline double square(const Numbers &v) {
  double sum = 0.0;
  for (double e : v) sum += e * e;
  return sum;
}

inline Numbers cut(const Numbers &from, int64_t at, int64_t count) {
  return Numbers(from.begin() + at * count, from.begin() + (at + 1) * count);
}

inline void step_forward(const Sizes &z, const Given &given, Step &s, double &nearest) {
  const int64_t H = z.H;
  s.a = times(given.w_ih, s.x, z.rows());
  s.b = times(given.w_hh, s.h, z.rows());
  if (!given.b_ih.empty()) {
    add(s.a, given.b_ih);
    add(s.b, given.b_hh);
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
  s.next_h = z.projected ? times(given.w_hr, s.inner, z.P) : s.inner;
}

// From dh and dc of the state that leaves a step to those of the state that enters it.
inline void step_backward(const Sizes &z, const Given &given, const Step &s, Numbers &dh, Numbers &dc, Made &made, int64_t at) {
  const int64_t H = z.H;
  const Numbers inner = z.projected ? transposed_times(given.w_hr, dh, H) : dh;
  if (z.projected) add_outer(made.dw_hr, dh, s.inner);
  Numbers da(static_cast<size_t>(z.rows())), db(static_cast<size_t>(z.rows())), past(static_cast<size_t>(H), 0.0);
  std::vector<Numbers> seen(static_cast<size_t>(z.letters()), Numbers(static_cast<size_t>(H)));
  for (int64_t j = 0; j < H; j++) {
    if (z.kind == TT_LSTM) {
      const double tanh = std::tanh(s.next_c[j]), d = dc[j] + inner[j] * s.o[j] * (1.0 - tanh * tanh);
      seen[1][j] = d, seen[2][j] = d * s.g[j], seen[3][j] = d * s.c[j], seen[4][j] = d * s.i[j], seen[5][j] = inner[j] * tanh;
      da[j] = seen[2][j] * s.i[j] * (1.0 - s.i[j]);
      da[H + j] = seen[3][j] * s.f[j] * (1.0 - s.f[j]);
      da[2 * H + j] = seen[4][j] * (1.0 - s.g[j] * s.g[j]);
      da[3 * H + j] = seen[5][j] * s.o[j] * (1.0 - s.o[j]);
      dc[j] = d * s.f[j];
    } else if (z.kind == TT_GRU) {
      seen[2][j] = inner[j] * (s.h[j] - s.g[j]), seen[3][j] = inner[j] * (1.0 - s.f[j]);
      const double dn = seen[3][j] * (1.0 - s.g[j] * s.g[j]);
      seen[1][j] = dn * s.b[2 * H + j];
      da[j] = seen[1][j] * s.i[j] * (1.0 - s.i[j]);
      da[H + j] = seen[2][j] * s.f[j] * (1.0 - s.f[j]);
      da[2 * H + j] = dn;
      past[j] = inner[j] * s.f[j];
    } else {
      da[j] = inner[j] * (z.kind == TT_RNN_TANH ? 1.0 - s.inner[j] * s.inner[j] : s.i[j] > 0.0 ? 1.0 : 0.0);
    }
  }
  db = da;
  if (z.kind == TT_GRU)
    for (int64_t j = 0; j < H; j++) db[2 * H + j] *= s.i[j];
  seen[0] = dh;
  for (int64_t k = 0; k < z.letters(); k++) made.squares[at * z.letters() + k] = square(seen[k]);
  add_outer(made.dw_ih, da, s.x);
  add_outer(made.dw_hh, db, s.h);
  add(made.db_ih, da);
  add(made.db_hh, db);
  const Numbers dx = transposed_times(given.w_ih, da, z.D);
  std::copy(dx.begin(), dx.end(), made.dx.begin() + at * z.D);
  dh = transposed_times(given.w_hh, db, z.P);
  if (z.kind == TT_GRU) add(dh, past);
}

inline Made reference(const Sizes &z, const Given &given) {
  const auto zeros = [](int64_t count) { return Numbers(static_cast<size_t>(count), 0.0); };
  const int64_t cells = z.kind == TT_LSTM ? z.H : 0;
  Made made;
  made.y = zeros(z.T * z.B * z.P), made.h_end = zeros(z.B * z.P), made.c_end = zeros(z.B * cells);
  made.dx = zeros(z.T * z.B * z.D), made.dh0 = zeros(z.B * z.P), made.dc0 = zeros(z.B * cells);
  made.dw_ih = zeros(z.rows() * z.D), made.dw_hh = zeros(z.rows() * z.P), made.dw_hr = zeros(z.projected ? z.P * z.H : 0);
  made.db_ih = zeros(z.rows()), made.db_hh = zeros(z.rows()), made.squares = zeros(z.T * z.B * z.letters());
  for (int64_t lane = 0; lane < z.B; lane++) {
    std::vector<Step> steps(static_cast<size_t>(z.T));
    const auto fresh = [&](int64_t t) { return !given.resets.empty() && given.resets[t * z.B + lane]; };
    Numbers h = cut(given.h0, lane, z.P), c = cells ? cut(given.c0, lane, z.H) : Numbers();
    for (int64_t t = 0; t < z.T; t++) {
      Step &s = steps[t];
      s.x = cut(given.x, t * z.B + lane, z.D), s.h = fresh(t) ? zeros(z.P) : h, s.c = fresh(t) ? zeros(cells) : c;
      step_forward(z, given, s, made.nearest);
      h = s.next_h, c = s.next_c;
      std::copy(h.begin(), h.end(), made.y.begin() + (t * z.B + lane) * z.P);
    }
    std::copy(h.begin(), h.end(), made.h_end.begin() + lane * z.P);
    if (cells) std::copy(c.begin(), c.end(), made.c_end.begin() + lane * z.H);
    Numbers dh = given.dh_end.empty() ? zeros(z.P) : cut(given.dh_end, lane, z.P);
    Numbers dc = given.dc_end.empty() ? zeros(cells) : cut(given.dc_end, lane, z.H);
    for (int64_t t = z.T; t-- > 0;) {
      if (!given.dy.empty()) add(dh, cut(given.dy, t * z.B + lane, z.P));
      step_backward(z, given, steps[t], dh, dc, made, t * z.B + lane);
      if (fresh(t)) dh = zeros(z.P), dc = zeros(cells);
    }
    std::copy(dh.begin(), dh.end(), made.dh0.begin() + lane * z.P);
    std::copy(dc.begin(), dc.end(), made.dc0.begin() + lane * cells);
  }
  return made;
}
