// The recurrent kernels against the reference, at odd sizes, in memory of exactly the promised size.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <utility>

#include "check.h"
#include "recurrent.h"
#include "throughtime.h"

namespace {

const char *const KINDS[] = {"LSTM", "GRU", "RNN tanh", "RNN relu"};

struct Case {
  Sizes z;
  bool bias, resets;
  uint64_t seed;    // also decides which gradients are missing and which are not needed
  double large = 1; // the range of the inputs
};

void say(const Case &c, int type, const char *what, double error) {
  fprintf(stderr, "%s %s T=%" PRId64 " B=%" PRId64 " D=%" PRId64 " H=%" PRId64 " P=%" PRId64 "%s%s seed %" PRIu64 " on %s: %s %g\n",
          KINDS[c.z.kind], type == TT_F64 ? "double" : type == TT_F32 ? "float" : "bfloat16", c.z.T, c.z.B, c.z.D, c.z.H, c.z.projected ? c.z.P : 0,
          c.bias ? ", biases" : "", c.resets ? ", resets" : "", c.seed, tt_level(), what, error);
}

// Numbers that are the same in both types.
Numbers draw(Random &random, int64_t count, double most) {
  Numbers out(static_cast<size_t>(count));
  for (double &number : out) number = static_cast<float>(most * random.number());
  return out;
}

// Weights near sqrt(3 / P): the recurrence neither vanishes nor explodes.
LayerInputs drawn(const Case &c, Random random) {
  const Sizes &z = c.z;
  const bool lstm = z.kind == TT_LSTM;
  const double deep = std::sqrt(3.0 / static_cast<double>(z.P)), wide = std::sqrt(3.0 / static_cast<double>(z.D));
  const auto maybe = [&](int64_t count) { return random.bits() >> 62 ? draw(random, count, 1.0) : Numbers(); };
  LayerInputs g;
  g.x = draw(random, z.T * z.B * z.D, c.large);
  g.h0 = draw(random, z.B * z.P, 1.0);
  g.c0 = draw(random, lstm ? z.B * z.H : 0, 1.0);
  g.w_ih = draw(random, z.rows() * z.D, wide);
  g.w_hh = draw(random, z.rows() * z.P, deep);
  g.b_ih = draw(random, c.bias ? z.rows() : 0, 0.5);
  g.b_hh = draw(random, c.bias ? z.rows() : 0, 0.5);
  g.w_hr = draw(random, z.projected ? z.P * z.H : 0, std::sqrt(3.0 / static_cast<double>(z.H)));
  g.dy = maybe(z.T * z.B * z.P);
  g.dh_end = maybe(z.B * z.P);
  g.dc_end = maybe(lstm ? z.B * z.H : 0);
  if (c.resets) // every fourth, the first step of all included
    for (int64_t i = 0; i < z.T * z.B; i++) g.resets.push_back(random.bits() >> 62 ? 0 : 1);
  return g;
}

template <class F> struct Input { // an input in the type of the run; null if empty
  explicit Input(const Numbers &from) : numbers(static_cast<int64_t>(from.size())), present(!from.empty()) {
    for (size_t i = 0; i < from.size(); i++) numbers[static_cast<int64_t>(i)] = static_cast<F>(from[i]);
  }
  const F *pointer() const { return present ? numbers.data() : nullptr; }
  Exact<F> numbers;
  bool present;
};

template <class F> struct Output { // a result; null if not needed
  Output(int64_t count, bool needed_, F before = F(NAN)) : numbers(count), needed(needed_ && count) { numbers.fill(before); }
  F *pointer() const { return needed ? numbers.data() : nullptr; }
  Exact<F> numbers;
  bool needed;
};

template <class F> class Run {
public:
  Run(const Case &c, const LayerInputs &g, int threads, bool all)
      : c_(c), x(g.x), h0(g.h0), c0(g.c0), w_ih(g.w_ih), w_hh(g.w_hh), b_ih(g.b_ih), b_hh(g.b_hh), w_hr(g.w_hr), dy(g.dy), dh_end(g.dh_end),
        dc_end(g.dc_end), resets(static_cast<int64_t>(g.resets.size())), needs_(all ? ~uint64_t(0) : Random(c.seed ^ 77).bits()),
        initial_(needs_ & 1 ? F(0.5) : F(NAN)), y(size(c.z.T * c.z.B, c.z.P), true), h_end(size(c.z.B, c.z.P), true), c_end(size(c.z.B, cells()), true),
        dx(size(c.z.T * c.z.B, c.z.D), draw_need()), dh0(size(c.z.B, c.z.P), draw_need()), dc0(size(c.z.B, cells()), draw_need()),
        dw_ih(size(c.z.rows(), c.z.D), draw_need(), initial_), dw_hh(size(c.z.rows(), c.z.P), draw_need(), initial_),
        db_ih(c.bias ? c.z.rows() : 0, draw_need(), initial_), db_hh(c.bias ? c.z.rows() : 0, draw_need(), initial_),
        dw_hr(c.z.projected ? size(c.z.P, c.z.H) : 0, draw_need(), initial_) {
    std::copy(g.resets.begin(), g.resets.end(), resets.begin());
    fill(threads);
  }

  // Run forward and backward, and check that a forward pass without `saved` computes the same. Return the failure, or null.
  const char *go() {
    Exact<F> saved(tt_saved(&call));
    if (tt_forward(&call)) return "tt_forward without anything saved returned an error";
    Exact<F> again(y.numbers.size());
    std::copy(y.numbers.begin(), y.numbers.end(), again.begin());
    y.numbers.poison();
    h_end.numbers.poison();
    c_end.numbers.poison();
    call.saved = saved.data();
    if (tt_forward(&call)) return "tt_forward returned an error";
    if (memcmp(again.data(), y.numbers.data(), sizeof(F) * static_cast<size_t>(again.size()))) return "y differs where nothing is saved";
    if (tt_backward(&call)) return "tt_backward returned an error";
    return nullptr;
  }

  // The largest difference, each relative to the largest number of its kind; NaN and infinity count as infinite.
  double distance(const LayerResults &results, const char **of) const {
    double worst = 0.0;
    const auto take = [&](const char *name, double error) {
      if (error > worst) worst = error, *of = name;
    };
    take("y", one(y, results.y)), take("h_end", one(h_end, results.h_end)), take("c_end", one(c_end, results.c_end));
    take("dx", one(dx, results.dx)), take("dh0", one(dh0, results.dh0)), take("dc0", one(dc0, results.dc0));
    take("dw_ih", one(dw_ih, results.dw_ih, true)), take("dw_hh", one(dw_hh, results.dw_hh, true));
    take("db_ih", one(db_ih, results.db_ih, true)), take("db_hh", one(db_hh, results.db_hh, true));
    take("dw_hr", one(dw_hr, results.dw_hr, true));
    return worst;
  }

  bool finite() const {
    bool well = true;
    const auto look = [&](const auto &asked) {
      if (asked.needed)
        for (const auto number : asked.numbers) well = well && std::isfinite(static_cast<double>(number));
    };
    look(y), look(h_end), look(c_end), look(dx), look(dh0), look(dc0), look(dw_ih), look(dw_hh), look(db_ih), look(db_hh), look(dw_hr);
    return well;
  }

  // Bit by bit.
  bool same(const Run &other) const {
    const auto equal = [](const auto &a, const auto &b) {
      return !a.needed || !memcmp(a.numbers.data(), b.numbers.data(), sizeof(*a.numbers.data()) * static_cast<size_t>(a.numbers.size()));
    };
    return equal(y, other.y) && equal(h_end, other.h_end) && equal(c_end, other.c_end) && equal(dx, other.dx) && equal(dh0, other.dh0) && equal(dc0, other.dc0) &&
           equal(dw_ih, other.dw_ih) && equal(dw_hh, other.dw_hh) && equal(db_ih, other.db_ih) && equal(db_hh, other.db_hh) &&
           equal(dw_hr, other.dw_hr);
  }

private:
  static int64_t size(int64_t rows, int64_t columns) { return rows * columns; }
  int64_t cells() const { return c_.z.kind == TT_LSTM ? c_.z.H : 0; }
  bool draw_need() { return (needs_ >>= 1) & 3; } // three of four

  void fill(int threads) {
    const Sizes &z = c_.z;
    memset(&call, 0, sizeof call);
    call.kind = z.kind, call.type = sizeof(F) == 4 ? TT_F32 : TT_F64;
    call.steps = z.T, call.lanes = z.B, call.inputs = z.D, call.hidden = z.H, call.outputs = z.P;
    call.threads = threads, call.accumulate = initial_ == F(0.5);
    call.x = x.pointer(), call.h0 = h0.pointer(), call.c0 = c0.pointer();
    call.w_ih = w_ih.pointer(), call.w_hh = w_hh.pointer(), call.b_ih = b_ih.pointer(), call.b_hh = b_hh.pointer();
    call.w_hr = w_hr.pointer(), call.resets = c_.resets ? resets.data() : nullptr;
    call.y = y.pointer(), call.h_end = h_end.pointer(), call.c_end = c_end.pointer();
    call.dy = dy.pointer(), call.dh_end = dh_end.pointer(), call.dc_end = dc_end.pointer();
    call.dx = dx.pointer(), call.dh0 = dh0.pointer(), call.dc0 = dc0.pointer();
    call.dw_ih = dw_ih.pointer(), call.dw_hh = dw_hh.pointer(), call.db_ih = db_ih.pointer(), call.db_hh = db_hh.pointer();
    call.dw_hr = dw_hr.pointer();
  }

  template <class G> double one(const Output<G> &asked, const Numbers &results, bool weight = false) const {
    if (!asked.needed) return 0.0;
    const double before = weight && call.accumulate ? 0.5 : 0.0;
    double most = 1e-30, worst = 0.0;
    for (size_t i = 0; i < results.size(); i++) {
      const double error = std::fabs(static_cast<double>(asked.numbers[static_cast<int64_t>(i)]) - results[i] - before);
      if (!(error <= 1e300)) return HUGE_VAL;
      worst = std::fmax(worst, error);
      most = std::fmax(most, std::fabs(results[i] + before));
    }
    return worst / most;
  }

  const Case c_;
  const Input<F> x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, dy, dh_end, dc_end;
  Exact<uint8_t> resets;
  uint64_t needs_;
  const F initial_; // initial gradients of the weights: 0.5 with `accumulate`
  Output<F> y, h_end, c_end, dx, dh0, dc0, dw_ih, dw_hh, db_ih, db_hh, dw_hr;

public:
  tt_call call;
};

template <class F> int agrees(const Case &c, const LayerInputs &inputs, const LayerResults &results) {
  const int type = sizeof(F) == 4 ? TT_F32 : TT_F64;
  const double tolerance = type == TT_F32 ? 2e-4 : 1e-11;
  Run<F> one(c, inputs, 1, false), two(c, inputs, 2, false);
  for (Run<F> *run : {&one, &two})
    if (const char *what = run->go()) return say(c, type, what, 0.0), 1;
  const char *of = "";
  const double error = one.distance(results, &of);
  if (error > tolerance) return say(c, type, of, error), 1;
  if (!one.same(two)) return say(c, type, "two threads give other numbers than one", two.distance(results, &of)), 1;
  return 0;
}

// Draws inputs until no sum is so near the kink of relu that float and double fall on different sides.
LayerInputs away_from_kinks(const Case &c, LayerResults *results) {
  for (uint64_t attempt = 0;; attempt++) {
    const LayerInputs inputs = drawn(c, Random(c.seed + (attempt << 32)));
    *results = reference(c.z, inputs);
    if (c.z.kind != TT_RNN_RELU || results->nearest > 1e-5) return inputs;
  }
}

int compare(const Case &c) {
  LayerResults results;
  const LayerInputs inputs = away_from_kinks(c, &results);
  return agrees<float>(c, inputs, results) + agrees<double>(c, inputs, results);
}

// Every `nth` of all sizes. 13 is coprime to their counts, so all combinations of values occur in turn.
int compare_all(uint64_t nth) {
  int failures = 0;
  uint64_t seed = 0;
  for (int kind : {TT_LSTM, TT_GRU, TT_RNN_TANH, TT_RNN_RELU})
    for (int64_t H : {1, 7, 33, 50, 64})
      for (int64_t B : {1, 3, 8, 13})
        for (int64_t T : {1, 2, 17})
          for (int64_t D : {1, 5, 16, 70})
            for (int what = 0; what < (kind == TT_LSTM && H > 1 ? 8 : 4); what++) {
              const bool projected = what & 4;
              if (++seed % nth) continue;
              failures += compare({{kind, T, B, D, H, projected ? H / 2 : H, projected}, (what & 1) != 0, (what & 2) != 0, seed});
            }
  return failures;
}

// Sizes beyond one block of every loop: columns, rows and steps.
int compare_large() {
  int failures = 0;
  for (int kind : {TT_LSTM, TT_GRU, TT_RNN_TANH})
    failures += compare({{kind, 7, 27, 150, 200, 200, false}, true, true, 900}) + compare({{kind, 150, 2, 9, 131, 131, false}, true, true, 901});
  return failures + compare({{TT_LSTM, 7, 27, 150, 200, 140, true}, true, true, 902});
}

// Inputs of 1e4 saturate the gates; every number stays finite.
int saturated() {
  int failures = 0;
  for (int kind : {TT_LSTM, TT_GRU, TT_RNN_TANH})
    for (uint64_t seed = 1; seed < 9; seed++) {
      const Case c{{kind, 9, 3, 5, 33, 33, false}, true, true, seed, 1e4};
      const LayerInputs inputs = drawn(c, Random(seed));
      Run<float> narrow(c, inputs, 1, true);
      Run<double> wide(c, inputs, 1, true);
      if (narrow.go() || !narrow.finite()) failures++, say(c, TT_F32, "not finite", 0.0);
      if (wide.go() || !wide.finite()) failures++, say(c, TT_F64, "not finite", 0.0);
    }
  return failures;
}

double loss(const Sizes &z, const LayerInputs &g) {
  const LayerResults results = reference(z, g);
  const auto dot = [](const Numbers &weights, const double *with) {
    double sum = 0.0;
    for (size_t i = 0; i < weights.size(); i++) sum += weights[i] * with[i];
    return sum;
  };
  return dot(g.dy, results.y.data()) + dot(g.dh_end, results.h_end.data()) + dot(g.dc_end, results.c_end.data());
}

// The reference itself, against compare_with_differences of the loss.
int compare_with_differences(const Case &c) {
  LayerResults results;
  LayerInputs g = away_from_kinks(c, &results);
  const std::pair<Numbers *, const Numbers *> each[] = {{&g.x, &results.dx},       {&g.h0, &results.dh0},     {&g.c0, &results.dc0},
                                                        {&g.w_ih, &results.dw_ih}, {&g.w_hh, &results.dw_hh}, {&g.b_ih, &results.db_ih},
                                                        {&g.b_hh, &results.db_hh}, {&g.w_hr, &results.dw_hr}};
  int failures = 0;
  for (const auto &[numbers, gradient] : each)
    for (size_t i = 0; i < numbers->size(); i++) {
      const double old = (*numbers)[i], by = 1e-6;
      (*numbers)[i] = old + by;
      const double above = loss(c.z, g);
      (*numbers)[i] = old - by;
      const double error = std::fabs((above - loss(c.z, g)) / (2 * by) - (*gradient)[i]);
      (*numbers)[i] = old;
      if (error > 1e-7 * (1.0 + std::fabs((*gradient)[i]))) failures++, say(c, TT_F64, "the reference differs from compare_with_differences", error);
    }
  return failures;
}

int check_reference() {
  int failures = 0;
  for (int kind : {TT_LSTM, TT_GRU, TT_RNN_TANH, TT_RNN_RELU})
    for (uint64_t seed = 1; seed < 9; seed++)
      for (bool projected : {false, true})
        if (!projected || kind == TT_LSTM) failures += compare_with_differences({{kind, 5, 2, 3, 4, projected ? 2 : 4, projected}, true, seed % 2 == 0, seed});
  return failures;
}

// A mutant must fail: the same with one reset missing.
int detects_mutant() {
  int failures = 0;
  for (int kind : {TT_LSTM, TT_GRU, TT_RNN_TANH, TT_RNN_RELU}) {
    const Case c{{kind, 17, 3, 5, 33, 33, false}, true, true, 5};
    LayerResults results;
    LayerInputs inputs = away_from_kinks(c, &results);
    Run<float> run(c, inputs, 1, true);
    for (uint8_t &reset : inputs.resets)
      if (reset) {
        reset = 0;
        break;
      }
    const char *of = "";
    if (run.go() || !(run.distance(reference(c.z, inputs), &of) > 1e-2)) failures++, say(c, TT_F32, "a missing reset goes unnoticed", 0.0);
  }
  return failures;
}

// Products of bfloat16: near those of float but not equal, and the same on two threads. tests/test_bfloat16.py checks their values.
int compare_bfloat16(const Case &c) {
  LayerResults results;
  const LayerInputs inputs = away_from_kinks(c, &results);
  Run<float> one(c, inputs, 1, true), two(c, inputs, 2, true), plain(c, inputs, 1, true);
  one.call.type = two.call.type = TT_BF16;
  for (Run<float> *run : {&one, &two, &plain})
    if (const char *what = run->go()) return say(c, TT_BF16, what, 0.0), 1;
  const char *of = "";
  const double error = one.distance(results, &of);
  int failures = 0;
  if (c.z.kind != TT_RNN_RELU && error > 0.1) failures++, say(c, TT_BF16, of, error); // a relu that falls on the other side is far
  if (one.same(plain)) failures++, say(c, TT_BF16, "nothing was rounded", 0.0);
  if (!one.same(two)) failures++, say(c, TT_BF16, "two threads give other numbers than one", two.distance(results, &of));
  return failures;
}

// With every method of the processor.
int check_bfloat16() {
  const int before = tt_bfloat16();
  int failures = 0;
  for (int pairs : {TT_PAIRS_AVX512, TT_PAIRS_AMX}) {
    if (!tt_use_bfloat16(pairs) || tt_bfloat16() != pairs) continue; // missing in the processor or in the active instruction set
    uint64_t seed = 2000;
    for (int kind : {TT_LSTM, TT_GRU, TT_RNN_TANH, TT_RNN_RELU})
      for (int64_t H : {3, 7, 33, 50}) // of one unit a gradient is one sum, which may come near zero
        for (int64_t B : {1, 3, 17, 33})
          for (int64_t D : {1, 16, 35}) {
            const bool projected = kind == TT_LSTM && D == 16;
            failures += compare_bfloat16({{kind, 1 + static_cast<int64_t>(seed % 5), B, D, H, projected ? H / 2 : H, projected}, seed % 3 != 0, seed % 2 == 0, seed});
            seed++;
          }
    for (int kind : {TT_LSTM, TT_GRU}) failures += compare_bfloat16({{kind, 5, 27, 650, 200, 200, false}, true, true, ++seed});
    for (int kind : {TT_LSTM, TT_GRU, TT_RNN_TANH}) // many rows of few units: the left side of dx is the longest
      failures += compare_bfloat16({{kind, 90, 33, 16, 7, 7, false}, true, true, ++seed}) + compare_bfloat16({{kind, 300, 8, 8, 16, 16, false}, true, false, ++seed});
  }
  tt_use_bfloat16(before);
  return failures;
}

} // namespace

int check_recurrent(bool brief) {
  return check_reference() + detects_mutant() + compare_all(brief ? 13 : 1) + compare_large() + saturated() + check_bfloat16();
}
