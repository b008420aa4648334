// The recurrent kernels against their plainest form, at odd sizes, in memory of exactly the size that was promised.
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
  uint64_t seed;    // also draws what is left out: gradients that do not come, gradients that nobody wants
  double large = 1; // inputs reach so far from zero
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

// Weights near sqrt(3 / P), where a recurrence neither dies out nor blows up.
Given drawn(const Case &c, Random random) {
  const Sizes &z = c.z;
  const bool lstm = z.kind == TT_LSTM;
  const double deep = std::sqrt(3.0 / static_cast<double>(z.P)), wide = std::sqrt(3.0 / static_cast<double>(z.D));
  const auto maybe = [&](int64_t count) { return random.bits() >> 62 ? draw(random, count, 1.0) : Numbers(); };
  Given g;
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

template <class F> struct Lent { // what one side gives, in its type; null where there is none
  explicit Lent(const Numbers &from) : numbers(static_cast<int64_t>(from.size())), there(!from.empty()) {
    for (size_t i = 0; i < from.size(); i++) numbers[static_cast<int64_t>(i)] = static_cast<F>(from[i]);
  }
  const F *pointer() const { return there ? numbers.data() : nullptr; }
  Exact<F> numbers;
  bool there;
};

template <class F> struct Asked { // what is to be made; null where nobody wants it
  Asked(int64_t count, bool wanted_, F before = F(NAN)) : numbers(count), wanted(wanted_ && count) { numbers.fill(before); }
  F *pointer() const { return wanted ? numbers.data() : nullptr; }
  Exact<F> numbers;
  bool wanted;
};

template <class F> class Run {
public:
  Run(const Case &c, const Given &g, int threads, bool all)
      : c_(c), x(g.x), h0(g.h0), c0(g.c0), w_ih(g.w_ih), w_hh(g.w_hh), b_ih(g.b_ih), b_hh(g.b_hh), w_hr(g.w_hr), dy(g.dy), dh_end(g.dh_end),
        dc_end(g.dc_end), resets(static_cast<int64_t>(g.resets.size())), wants_(all ? ~uint64_t(0) : Random(c.seed ^ 77).bits()),
        before_(wants_ & 1 ? F(0.5) : F(NAN)), y(size(c.z.T * c.z.B, c.z.P), true), h_end(size(c.z.B, c.z.P), true), c_end(size(c.z.B, cells()), true),
        dx(size(c.z.T * c.z.B, c.z.D), want()), dh0(size(c.z.B, c.z.P), want()), dc0(size(c.z.B, cells()), want()),
        dw_ih(size(c.z.rows(), c.z.D), want(), before_), dw_hh(size(c.z.rows(), c.z.P), want(), before_),
        db_ih(c.bias ? c.z.rows() : 0, want(), before_), db_hh(c.bias ? c.z.rows() : 0, want(), before_),
        dw_hr(c.z.projected ? size(c.z.P, c.z.H) : 0, want(), before_), squares(size(c.z.T * c.z.B, c.z.letters()), want()) {
    std::copy(g.resets.begin(), g.resets.end(), resets.begin());
    fill(threads);
  }

  // Forward and backward; also that a forward pass that saves nothing gives the same. What failed, or null.
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
  double distance(const Made &made, const char **of) const {
    double worst = 0.0;
    const auto take = [&](const char *name, double error) {
      if (error > worst) worst = error, *of = name;
    };
    take("y", one(y, made.y)), take("h_end", one(h_end, made.h_end)), take("c_end", one(c_end, made.c_end));
    take("dx", one(dx, made.dx)), take("dh0", one(dh0, made.dh0)), take("dc0", one(dc0, made.dc0));
    take("dw_ih", one(dw_ih, made.dw_ih, true)), take("dw_hh", one(dw_hh, made.dw_hh, true));
    take("db_ih", one(db_ih, made.db_ih, true)), take("db_hh", one(db_hh, made.db_hh, true));
    take("dw_hr", one(dw_hr, made.dw_hr, true)), take("squares", one(squares, made.squares));
    return worst;
  }

  bool finite() const {
    bool well = true;
    const auto look = [&](const auto &asked) {
      if (asked.wanted)
        for (const auto number : asked.numbers) well = well && std::isfinite(static_cast<double>(number));
    };
    look(y), look(h_end), look(c_end), look(dx), look(dh0), look(dc0), look(dw_ih), look(dw_hh), look(db_ih), look(db_hh), look(dw_hr), look(squares);
    return well;
  }

  // Bit by bit.
  bool same(const Run &other) const {
    const auto equal = [](const auto &a, const auto &b) {
      return !a.wanted || !memcmp(a.numbers.data(), b.numbers.data(), sizeof(*a.numbers.data()) * static_cast<size_t>(a.numbers.size()));
    };
    return equal(y, other.y) && equal(h_end, other.h_end) && equal(c_end, other.c_end) && equal(dx, other.dx) && equal(dh0, other.dh0) && equal(dc0, other.dc0) &&
           equal(dw_ih, other.dw_ih) && equal(dw_hh, other.dw_hh) && equal(db_ih, other.db_ih) && equal(db_hh, other.db_hh) &&
           equal(dw_hr, other.dw_hr) && equal(squares, other.squares);
  }

private:
  static int64_t size(int64_t rows, int64_t columns) { return rows * columns; }
  int64_t cells() const { return c_.z.kind == TT_LSTM ? c_.z.H : 0; }
  bool want() { return (wants_ >>= 1) & 3; } // three of four

  void fill(int threads) {
    const Sizes &z = c_.z;
    memset(&call, 0, sizeof call);
    call.kind = z.kind, call.type = sizeof(F) == 4 ? TT_F32 : TT_F64;
    call.steps = z.T, call.lanes = z.B, call.inputs = z.D, call.hidden = z.H, call.outputs = z.P;
    call.threads = threads, call.accumulate = before_ == F(0.5);
    call.x = x.pointer(), call.h0 = h0.pointer(), call.c0 = c0.pointer();
    call.w_ih = w_ih.pointer(), call.w_hh = w_hh.pointer(), call.b_ih = b_ih.pointer(), call.b_hh = b_hh.pointer();
    call.w_hr = w_hr.pointer(), call.resets = c_.resets ? resets.data() : nullptr;
    call.y = y.pointer(), call.h_end = h_end.pointer(), call.c_end = c_end.pointer();
    call.dy = dy.pointer(), call.dh_end = dh_end.pointer(), call.dc_end = dc_end.pointer();
    call.dx = dx.pointer(), call.dh0 = dh0.pointer(), call.dc0 = dc0.pointer();
    call.dw_ih = dw_ih.pointer(), call.dw_hh = dw_hh.pointer(), call.db_ih = db_ih.pointer(), call.db_hh = db_hh.pointer();
    call.dw_hr = dw_hr.pointer(), call.squares = squares.pointer();
  }

  template <class G> double one(const Asked<G> &asked, const Numbers &made, bool weight = false) const {
    if (!asked.wanted) return 0.0;
    const double before = weight && call.accumulate ? 0.5 : 0.0;
    double most = 1e-30, worst = 0.0;
    for (size_t i = 0; i < made.size(); i++) {
      const double error = std::fabs(static_cast<double>(asked.numbers[static_cast<int64_t>(i)]) - made[i] - before);
      if (!(error <= 1e300)) return HUGE_VAL;
      worst = std::fmax(worst, error);
      most = std::fmax(most, std::fabs(made[i] + before));
    }
    return worst / most;
  }

  const Case c_;
  const Lent<F> x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, dy, dh_end, dc_end;
  Exact<uint8_t> resets;
  uint64_t wants_;
  const F before_; // in the gradients of the weights: 0.5 where they are added to
  Asked<F> y, h_end, c_end, dx, dh0, dc0, dw_ih, dw_hh, db_ih, db_hh, dw_hr;
  Asked<double> squares;

public:
  tt_call call;
};

template <class F> int agrees(const Case &c, const Given &given, const Made &made) {
  const int type = sizeof(F) == 4 ? TT_F32 : TT_F64;
  const double tolerance = type == TT_F32 ? 2e-4 : 1e-11;
  Run<F> one(c, given, 1, false), two(c, given, 2, false);
  for (Run<F> *run : {&one, &two})
    if (const char *what = run->go()) return say(c, type, what, 0.0), 1;
  const char *of = "";
  const double error = one.distance(made, &of);
  if (error > tolerance) return say(c, type, of, error), 1;
  if (!one.same(two)) return say(c, type, "two threads give other numbers than one", two.distance(made, &of)), 1;
  return 0;
}

// The nearest that a sum of relu may come to its kink, where float falls on the other side than double.
Given away_from_kinks(const Case &c, Made *made) {
  for (uint64_t attempt = 0;; attempt++) {
    const Given given = drawn(c, Random(c.seed + (attempt << 32)));
    *made = reference(c.z, given);
    if (c.z.kind != TT_RNN_RELU || made->nearest > 1e-5) return given;
  }
}

int compare(const Case &c) {
  Made made;
  const Given given = away_from_kinks(c, &made);
  return agrees<float>(c, given, made) + agrees<double>(c, given, made);
}

// Every `nth` of all sizes; 13 has no factor in common with their numbers, so that each meets each other in turn.
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

// Inputs of 1e4 drive gates to their ends: every number stays finite.
int saturated() {
  int failures = 0;
  for (int kind : {TT_LSTM, TT_GRU, TT_RNN_TANH})
    for (uint64_t seed = 1; seed < 9; seed++) {
      const Case c{{kind, 9, 3, 5, 33, 33, false}, true, true, seed, 1e4};
      const Given given = drawn(c, Random(seed));
      Run<float> narrow(c, given, 1, true);
      Run<double> wide(c, given, 1, true);
      if (narrow.go() || !narrow.finite()) failures++, say(c, TT_F32, "not finite", 0.0);
      if (wide.go() || !wide.finite()) failures++, say(c, TT_F64, "not finite", 0.0);
    }
  return failures;
}

double loss(const Sizes &z, const Given &g) {
  const Made made = reference(z, g);
  const auto dot = [](const Numbers &weights, const double *with) {
    double sum = 0.0;
    for (size_t i = 0; i < weights.size(); i++) sum += weights[i] * with[i];
    return sum;
  };
  return dot(g.dy, made.y.data()) + dot(g.dh_end, made.h_end.data()) + dot(g.dc_end, made.c_end.data());
}

// The reference itself, against differences of the loss.
int differences(const Case &c) {
  Made made;
  Given g = away_from_kinks(c, &made);
  const std::pair<Numbers *, const Numbers *> each[] = {{&g.x, &made.dx},       {&g.h0, &made.dh0},     {&g.c0, &made.dc0},
                                                        {&g.w_ih, &made.dw_ih}, {&g.w_hh, &made.dw_hh}, {&g.b_ih, &made.db_ih},
                                                        {&g.b_hh, &made.db_hh}, {&g.w_hr, &made.dw_hr}};
  int failures = 0;
  for (const auto &[numbers, gradient] : each)
    for (size_t i = 0; i < numbers->size(); i++) {
      const double old = (*numbers)[i], by = 1e-6;
      (*numbers)[i] = old + by;
      const double above = loss(c.z, g);
      (*numbers)[i] = old - by;
      const double error = std::fabs((above - loss(c.z, g)) / (2 * by) - (*gradient)[i]);
      (*numbers)[i] = old;
      if (error > 1e-7 * (1.0 + std::fabs((*gradient)[i]))) failures++, say(c, TT_F64, "the reference differs from differences", error);
    }
  return failures;
}

int trust() {
  int failures = 0;
  for (int kind : {TT_LSTM, TT_GRU, TT_RNN_TANH, TT_RNN_RELU})
    for (uint64_t seed = 1; seed < 9; seed++)
      for (bool projected : {false, true})
        if (!projected || kind == TT_LSTM) failures += differences({{kind, 5, 2, 3, 4, projected ? 2 : 4, projected}, true, seed % 2 == 0, seed});
  return failures;
}

// A mutant must fail: the same without a single one of its resets.
int notices() {
  int failures = 0;
  for (int kind : {TT_LSTM, TT_GRU, TT_RNN_TANH, TT_RNN_RELU}) {
    const Case c{{kind, 17, 3, 5, 33, 33, false}, true, true, 5};
    Made made;
    Given given = away_from_kinks(c, &made);
    Run<float> run(c, given, 1, true);
    for (uint8_t &reset : given.resets)
      if (reset) {
        reset = 0;
        break;
      }
    const char *of = "";
    if (run.go() || !(run.distance(reference(c.z, given), &of) > 1e-2)) failures++, say(c, TT_F32, "a missing reset goes unnoticed", 0.0);
  }
  return failures;
}

// Products of bfloat16: near what they round, not the numbers of float, and the same on two threads. tests/test_bfloat16.py says what they are.
int in_half(const Case &c) {
  Made made;
  const Given given = away_from_kinks(c, &made);
  Run<float> one(c, given, 1, true), two(c, given, 2, true), plain(c, given, 1, true);
  one.call.type = two.call.type = TT_BF16;
  for (Run<float> *run : {&one, &two, &plain})
    if (const char *what = run->go()) return say(c, TT_BF16, what, 0.0), 1;
  const char *of = "";
  const double error = one.distance(made, &of);
  int failures = 0;
  if (c.z.kind != TT_RNN_RELU && error > 0.1) failures++, say(c, TT_BF16, of, error); // a relu that falls on the other side is far
  if (one.same(plain)) failures++, say(c, TT_BF16, "nothing was rounded", 0.0);
  if (!one.same(two)) failures++, say(c, TT_BF16, "two threads give other numbers than one", two.distance(made, &of));
  return failures;
}

// By every way that the processor has.
int halves() {
  const int before = tt_bfloat16();
  int failures = 0;
  for (int pairs : {TT_PAIRS_AVX512, TT_PAIRS_AMX}) {
    if (!tt_use_bfloat16(pairs) || tt_bfloat16() != pairs) continue; // the processor has none, or the instruction set that runs
    uint64_t seed = 2000;
    for (int kind : {TT_LSTM, TT_GRU, TT_RNN_TANH, TT_RNN_RELU})
      for (int64_t H : {3, 7, 33, 50}) // of one unit a gradient is one sum, which may come near zero
        for (int64_t B : {1, 3, 17, 33})
          for (int64_t D : {1, 16, 35}) {
            const bool projected = kind == TT_LSTM && D == 16;
            failures += in_half({{kind, 1 + static_cast<int64_t>(seed % 5), B, D, H, projected ? H / 2 : H, projected}, seed % 3 != 0, seed % 2 == 0, seed});
            seed++;
          }
    for (int kind : {TT_LSTM, TT_GRU}) failures += in_half({{kind, 5, 27, 650, 200, 200, false}, true, true, ++seed});
    for (int kind : {TT_LSTM, TT_GRU, TT_RNN_TANH}) // many rows of few units: the left side of dx is the longest
      failures += in_half({{kind, 90, 33, 16, 7, 7, false}, true, true, ++seed}) + in_half({{kind, 300, 8, 8, 16, 16, false}, true, false, ++seed});
  }
  tt_use_bfloat16(before);
  return failures;
}

} // namespace

int check_recurrent(bool brief) {
  return trust() + notices() + compare_all(brief ? 13 : 1) + compare_large() + saturated() + halves();
}
