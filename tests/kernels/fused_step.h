// A stack of layers with a readout, a loss and all gradients in its plainest form, in double, and examples of it.
//
// z = W y + b over the last steps; the loss is the mean over the rows that count, of -log softmax(z)[target] or of the mean over classes of
// (z - target)^2.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "recurrent.h"
#include "throughtime.h"

enum Mask { ALL, SOME, ONE };

struct Case {
  std::vector<Sizes> layers;
  int64_t steps, C; // steps that may count, the last ones of T
  int loss, mask;
  bool bias, read_bias, resets, accumulate, all; // all: gradients of what enters the first layer too
  double far;                                    // biases of the readout reach so far from zero
  uint64_t seed;
  int64_t rows() const { return steps * layers[0].B; }
  int64_t lead() const { return (layers[0].T - steps) * layers[0].B; }
  int64_t P() const { return layers.back().P; }
};

struct Example {
  std::vector<LayerInputs> layers; // x of the first alone
  Numbers w, b, targets;      // b is empty where there is none, targets for the squared error alone
  std::vector<int64_t> classes;
  std::vector<uint8_t> mask; // empty: all count
  bool counts(int64_t row) const { return mask.empty() || mask[row]; }
};

struct Answer {
  std::vector<LayerResults> layers;
  Numbers outputs, dw, db;
  double mean = 0.0, nearest = 1e300; // to the kink of relu
};

// The loss of one row; z becomes its gradient.
inline double slope(const Case &c, const Example &e, int64_t row, Numbers &z) {
  double loss = 0.0, sum = 0.0;
  if (c.loss == TT_SQUARED_ERROR) {
    for (int64_t k = 0; k < c.C; k++) {
      const double off = z[k] - e.targets[row * c.C + k];
      loss += off * off / static_cast<double>(c.C);
      z[k] = 2.0 * off / static_cast<double>(c.C);
    }
    return loss;
  }
  const double most = *std::max_element(z.begin(), z.end()), at_target = z[e.classes[row]];
  for (double &number : z) sum += number = std::exp(number - most);
  for (double &number : z) number /= sum;
  z[e.classes[row]] -= 1.0;
  return std::log(sum) + most - at_target;
}

// Fills all but the layers; returns the gradient of y, (T, B, P).
inline Numbers read_out(const Case &c, const Example &e, const Numbers &y, Answer &answer) {
  double valid = 0.0;
  for (int64_t row = 0; row < c.rows(); row++) valid += e.counts(row);
  Numbers dy(y.size(), 0.0);
  answer.dw = Numbers(e.w.size(), 0.0), answer.db = Numbers(static_cast<size_t>(c.C), 0.0), answer.mean = 0.0;
  for (int64_t row = 0; row < c.rows(); row++) {
    const Numbers features = cut(y, c.lead() + row, c.P());
    Numbers z = times(e.w, features, c.C);
    add(z, e.b);
    answer.outputs.insert(answer.outputs.end(), z.begin(), z.end());
    if (!e.counts(row)) continue;
    answer.mean += slope(c, e, row, z) / valid;
    for (double &number : z) number /= valid;
    add_outer(answer.dw, z, features);
    add(answer.db, z);
    const Numbers back = transposed_times(e.w, z, c.P());
    std::copy(back.begin(), back.end(), dy.begin() + (c.lead() + row) * c.P());
  }
  return dy;
}

inline Answer answer_of(const Case &c, Example e) {
  Answer answer;
  for (size_t i = 0; i < c.layers.size(); i++) {
    if (i) e.layers[i].x = answer.layers[i - 1].y;
    answer.layers.push_back(reference(c.layers[i], e.layers[i]));
    answer.nearest = std::fmin(answer.nearest, c.layers[i].kind == TT_RNN_RELU ? answer.layers[i].nearest : 1e300);
  }
  Numbers dy = read_out(c, e, answer.layers.back().y, answer);
  for (size_t i = c.layers.size(); i-- > 0;) {
    e.layers[i].dy = dy;
    answer.layers[i] = reference(c.layers[i], e.layers[i]);
    dy = answer.layers[i].dx;
  }
  return answer;
}

// Numbers that are the same in both types.
inline Numbers draw(Random &random, int64_t count, double most) {
  Numbers out(static_cast<size_t>(count));
  for (double &number : out) number = static_cast<float>(most * random.number());
  return out;
}

inline double fair(int64_t inputs) { return std::sqrt(3.0 / static_cast<double>(inputs)); } // sums of so many neither die out nor blow up

inline LayerInputs layer_of(const Case &c, size_t i, Random &random, const std::vector<uint8_t> &resets) {
  const Sizes &z = c.layers[i];
  const bool bias = c.bias || z.kind == TT_RNN_RELU; // else sums of nothing but zeros lie on its kink
  LayerInputs g;
  g.x = draw(random, i ? 0 : z.T * z.B * z.D, 1.0);
  g.h0 = draw(random, z.B * z.P, 1.0);
  g.c0 = draw(random, z.kind == TT_LSTM ? z.B * z.H : 0, 1.0);
  g.w_ih = draw(random, z.rows() * z.D, fair(z.D));
  g.w_hh = draw(random, z.rows() * z.P, fair(z.P));
  g.b_ih = draw(random, bias ? z.rows() : 0, 0.5);
  g.b_hh = draw(random, bias ? z.rows() : 0, 0.5);
  g.w_hr = draw(random, z.projected ? z.P * z.H : 0, fair(z.H));
  g.resets = resets;
  return g;
}

// What does not count has targets that nobody may read: NaN, and classes that are not there.
inline Example drawn(const Case &c, Random random) {
  Example e;
  std::vector<uint8_t> resets;
  for (int64_t i = 0; c.resets && i < c.layers[0].T * c.layers[0].B; i++) resets.push_back(random.bits() >> 62 ? 0 : 1);
  for (size_t i = 0; i < c.layers.size(); i++) e.layers.push_back(layer_of(c, i, random, resets));
  e.w = draw(random, c.C * c.P(), fair(c.P()));
  e.b = draw(random, c.read_bias ? c.C : 0, c.far);
  const uint64_t rows = static_cast<uint64_t>(c.rows()), C = static_cast<uint64_t>(c.C), one = random.bits() % rows;
  for (uint64_t row = 0; c.mask != ALL && row < rows; row++) e.mask.push_back(row == one || (c.mask == SOME && random.bits() >> 63));
  e.targets = draw(random, c.loss == TT_SQUARED_ERROR ? c.rows() * c.C : 0, 1.0);
  for (uint64_t row = 0; row < rows; row++) {
    const bool counts = e.counts(static_cast<int64_t>(row));
    if (c.loss == TT_CROSS_ENTROPY) e.classes.push_back(counts ? static_cast<int64_t>(random.bits() % C) : row % 2 ? -1 : c.C);
    for (uint64_t k = 0; c.loss == TT_SQUARED_ERROR && !counts && k < C; k++) e.targets[row * C + k] = NAN;
  }
  return e;
}

// One that comes no nearer to the kink of relu than where float falls on the other side than double.
inline Example away_from_kinks(const Case &c, Answer *answer) {
  for (uint64_t attempt = 0;; attempt++) {
    const Example e = drawn(c, Random(c.seed + (attempt << 32)));
    *answer = answer_of(c, e);
    if (answer->nearest > 1e-5) return e;
  }
}

// Every size and choice, drawn by the seed.
inline Case case_of(uint64_t seed) {
  Random random(seed);
  for (int i = 0; i < 8; i++) random.bits(); // the first ones of near seeds are near each other
  const auto of = [&](auto... options) {
    const int64_t all[] = {options...};
    return all[random.bits() % sizeof...(options)];
  };
  const auto flag = [&] { return random.bits() >> 63 != 0; };
  Case c = {};
  const int64_t T = 1 + static_cast<int64_t>(random.bits() % 17), B = of(1, 3, 8), count = of(1, 2, 3);
  for (int64_t i = 0, D = of(1, 5, 16); i < count; i++) {
    const int kind = static_cast<int>(of(TT_LSTM, TT_GRU, TT_RNN_TANH, TT_RNN_RELU, TT_LSTM));
    const int64_t H = of(1, 7, 33, 50);
    const bool projected = !i && kind == TT_LSTM && H > 1 && flag();
    c.layers.push_back({kind, T, B, D, H, projected ? H / 2 : H, projected});
    D = c.layers.back().P;
  }
  c.steps = flag() ? T : 1 + static_cast<int64_t>(random.bits() % static_cast<uint64_t>(T));
  c.C = of(1, 5, 17, 64), c.loss = static_cast<int>(of(TT_CROSS_ENTROPY, TT_SQUARED_ERROR)), c.mask = static_cast<int>(of(ALL, SOME, ONE));
  c.bias = flag(), c.read_bias = flag(), c.resets = flag(), c.accumulate = flag(), c.all = flag();
  c.far = c.loss == TT_CROSS_ENTROPY && flag() ? 1000.0 : 1.0; // beyond where exp is cut off, in both types
  c.seed = seed;
  return c;
}
