// A stack of layers, its readout, loss and all gradients in one call, against its plainest form; products by a BLAS too.
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <memory>
#include <utility>

#include "check.h"
#include "throughtime.h"
#include "fused_step.h"

namespace {

void say(const Case &c, int type, const char *what, double error) {
  fprintf(stderr, "fused step, %s, seed %" PRIu64 " on %s: %s %g; steps=%" PRId64 " C=%" PRId64 " loss=%d mask=%d bias=%d%d resets=%d accumulate=%d;",
          type == TT_F32 ? "float" : "double", c.seed, tt_level(), what, error, c.steps, c.C, c.loss, c.mask, c.bias, c.read_bias, c.resets,
          c.accumulate);
  for (const Sizes &z : c.layers)
    fprintf(stderr, " kind %d T=%" PRId64 " B=%" PRId64 " D=%" PRId64 " H=%" PRId64 " P=%" PRId64, z.kind, z.T, z.B, z.D, z.H, z.P);
  fprintf(stderr, "\n");
}

template <class F> void lend(const Exact<F> &to, const Numbers &from) {
  for (size_t i = 0; i < from.size(); i++) to[static_cast<int64_t>(i)] = static_cast<F>(from[i]);
}

template <class F> F *maybe(const Exact<F> &numbers) { return numbers.size() ? numbers.data() : nullptr; } // null where there are none

int64_t length(const Numbers &numbers) { return static_cast<int64_t>(numbers.size()); }

template <class F> struct Layer { // what one layer is inputs and makes; x and dy lie elsewhere but for the first and the last
  Layer(const Sizes &z, const LayerInputs &g, bool last, bool dx_too, bool all)
      : x(length(g.x)), h0(length(g.h0)), c0(length(g.c0)), w_ih(length(g.w_ih)), w_hh(length(g.w_hh)), b_ih(length(g.b_ih)), b_hh(length(g.b_hh)),
        w_hr(length(g.w_hr)), resets(static_cast<int64_t>(g.resets.size())), y(z.T * z.B * z.P), h_end(z.B * z.P), c_end(length(g.c0)),
        dy(last ? z.T * z.B * z.P : 0), dx(dx_too ? z.T * z.B * z.D : 0), dh0(all ? z.B * z.P : 0), dc0(all ? length(g.c0) : 0),
        dw_ih(length(g.w_ih)), dw_hh(length(g.w_hh)), db_ih(length(g.b_ih)), db_hh(length(g.b_hh)), dw_hr(length(g.w_hr)) {
    lend(x, g.x), lend(h0, g.h0), lend(c0, g.c0), lend(w_ih, g.w_ih), lend(w_hh, g.w_hh), lend(b_ih, g.b_ih), lend(b_hh, g.b_hh);
    lend(w_hr, g.w_hr);
    std::copy(g.resets.begin(), g.resets.end(), resets.begin());
    call.kind = z.kind, call.type = sizeof(F) == 4 ? TT_F32 : TT_F64;
    call.steps = z.T, call.lanes = z.B, call.inputs = z.D, call.hidden = z.H, call.outputs = z.P;
    call.x = maybe(x), call.h0 = maybe(h0), call.c0 = maybe(c0), call.w_ih = maybe(w_ih), call.w_hh = maybe(w_hh), call.b_ih = maybe(b_ih);
    call.b_hh = maybe(b_hh), call.w_hr = maybe(w_hr), call.resets = maybe(resets), call.y = maybe(y), call.h_end = maybe(h_end);
    call.c_end = maybe(c_end), call.dy = maybe(dy), call.dx = maybe(dx), call.dh0 = maybe(dh0), call.dc0 = maybe(dc0), call.dw_ih = maybe(dw_ih);
    call.dw_hh = maybe(dw_hh), call.db_ih = maybe(db_ih), call.db_hh = maybe(db_hh), call.dw_hr = maybe(dw_hr);
    saved = std::make_unique<Exact<F>>(tt_saved(&call));
    call.saved = saved->data();
  }

  // What the backward pass makes becomes `value`; the rest is left.
  void gradients(F value) {
    for (Exact<F> *results : {&dw_ih, &dw_hh, &db_ih, &db_hh, &dw_hr}) results->fill(value);
    for (Exact<F> *results : {&dx, &dh0, &dc0}) results->poison();
  }

  Exact<F> x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr;
  Exact<uint8_t> resets;
  Exact<F> y, h_end, c_end, dy, dx, dh0, dc0, dw_ih, dw_hh, db_ih, db_hh, dw_hr;
  std::unique_ptr<Exact<F>> saved;
  tt_call call = {};
};

template <class F> struct Output {
  const char *name;
  Exact<F> Layer<F>::*results;
  Numbers LayerResults::*expected;
  bool weight;
};

template <class F>
const Output<F> OUTPUTS[] = {{"y", &Layer<F>::y, &LayerResults::y, false},           {"h_end", &Layer<F>::h_end, &LayerResults::h_end, false},
                             {"c_end", &Layer<F>::c_end, &LayerResults::c_end, false}, {"dx", &Layer<F>::dx, &LayerResults::dx, false},
                             {"dh0", &Layer<F>::dh0, &LayerResults::dh0, false},       {"dc0", &Layer<F>::dc0, &LayerResults::dc0, false},
                             {"dw_ih", &Layer<F>::dw_ih, &LayerResults::dw_ih, true},  {"dw_hh", &Layer<F>::dw_hh, &LayerResults::dw_hh, true},
                             {"db_ih", &Layer<F>::db_ih, &LayerResults::db_ih, true},  {"db_hh", &Layer<F>::db_hh, &LayerResults::db_hh, true},
                             {"dw_hr", &Layer<F>::dw_hr, &LayerResults::dw_hr, true}};

// The largest difference relative to the largest number that was added; infinity where one is not finite. What is not there differs by
// nothing.
template <class F> double difference(const Exact<F> &results, const Numbers &expected, double before) {
  double most = std::fmax(before, 1e-30), worst = 0.0;
  for (int64_t i = 0; i < results.size(); i++) {
    const double added = expected[static_cast<size_t>(i)], error = std::fabs(static_cast<double>(results[i]) - before - added);
    if (!(error <= 1e300)) return HUGE_VAL;
    worst = std::fmax(worst, error), most = std::fmax(most, std::fabs(added));
  }
  return worst / most;
}

template <class F> class Run {
public:
  Run(const Case &c, const Example &e, int threads)
      : w(length(e.w)), b(length(e.b)), targets(length(e.targets)), classes(static_cast<int64_t>(e.classes.size())),
        mask(static_cast<int64_t>(e.mask.size())), outputs(c.rows() * c.C), dw(length(e.w)), db(length(e.b)), mean(1),
        before_(c.accumulate ? 0.5 : 0.0) {
    lend(w, e.w), lend(b, e.b), lend(targets, e.targets);
    std::copy(e.classes.begin(), e.classes.end(), classes.begin());
    std::copy(e.mask.begin(), e.mask.end(), mask.begin());
    const F start = c.accumulate ? F(0.5) : F(NAN);
    dw.fill(start), db.fill(start);
    for (size_t i = 0; i < c.layers.size(); i++) {
      layers.push_back(std::make_unique<Layer<F>>(c.layers[i], e.layers[i], i + 1 == c.layers.size(), i || c.all, c.all));
      layers[i]->call.threads = threads, layers[i]->call.accumulate = c.accumulate;
      layers[i]->gradients(start);
    }
    step_.loss = c.loss, step_.accumulate = c.accumulate, step_.steps = c.steps, step_.classes = c.C;
    for (int64_t row = 0; row < c.rows(); row++) step_.valid += e.counts(row);
  }

  int go() {
    std::vector<tt_call> calls;
    for (size_t i = 0; i < layers.size(); i++) {
      tt_call &call = layers[i]->call;
      if (i) call.x = layers[i - 1]->call.y;
      if (i + 1 < layers.size()) call.dy = layers[i + 1]->call.dx;
      calls.push_back(call);
    }
    step_.layers = calls.data(), step_.count = static_cast<int32_t>(calls.size());
    step_.w = maybe(w), step_.b = maybe(b), step_.mask = maybe(mask), step_.outputs = maybe(outputs);
    step_.dw = maybe(dw), step_.db = maybe(db);
    step_.targets = step_.loss == TT_CROSS_ENTROPY ? static_cast<const void *>(maybe(classes)) : maybe(targets);
    step_.mean = maybe(mean);
    Exact<F> scratch(tt_fused_step_scratch(&step_));
    step_.scratch = maybe(scratch);
    return tt_fused_step_run(&step_);
  }

  double distance(const Answer &answer, const char **of) const {
    double worst = 0.0;
    const auto take = [&](const char *name, double error) {
      if (error > worst) worst = error, *of = name;
    };
    for (size_t i = 0; i < layers.size(); i++)
      for (const Output<F> &out : OUTPUTS<F>)
        take(out.name, difference((*layers[i]).*out.results, answer.layers[i].*out.expected, out.weight ? before_ : 0.0));
    take("outputs", difference(outputs, answer.outputs, 0.0)), take("dw", difference(dw, answer.dw, before_));
    take("db", difference(db, answer.db, before_)), take("mean", difference(mean, {answer.mean}, 0.0));
    return worst;
  }

  // Everything that was results, bit by bit.
  std::vector<uint8_t> bits() const {
    std::vector<uint8_t> all;
    const auto take = [&](const auto &results) {
      const auto *const start = reinterpret_cast<const uint8_t *>(results.data());
      all.insert(all.end(), start, start + sizeof(*results.data()) * static_cast<size_t>(results.size()));
    };
    for (const auto &layer : layers)
      for (const Output<F> &out : OUTPUTS<F>) take((*layer).*out.results);
    take(outputs), take(dw), take(db), take(mean);
    return all;
  }

  Exact<F> w, b, targets;
  Exact<int64_t> classes;
  Exact<uint8_t> mask;
  Exact<F> outputs, dw, db;
  Exact<double> mean;
  std::vector<std::unique_ptr<Layer<F>>> layers; // the first's x is its own, the last's dy

private:
  const double before_; // in the gradients of the weights
  tt_fused_step step_ = {};
};

template <class F> constexpr int TYPE = sizeof(F) == 4 ? TT_F32 : TT_F64;

template <class F> int agrees(const Case &c, const Example &e, const Answer &answer) {
  Run<F> one(c, e, 1), two(c, e, 2);
  if (const int fault = one.go() + two.go()) return say(c, TYPE<F>, "a fault:", fault), 1;
  const char *of = "";
  const double error = one.distance(answer, &of);
  if (error > (sizeof(F) == 4 ? 2e-4 : 1e-11)) return say(c, TYPE<F>, of, error), 1;
  if (one.bits() != two.bits()) return say(c, TYPE<F>, "two threads give other numbers than one", two.distance(answer, &of)), 1;
  return 0;
}

int compare(const Case &c) {
  Answer answer;
  const Example e = away_from_kinks(c, &answer);
  return agrees<float>(c, e, answer) + agrees<double>(c, e, answer);
}

// A small case of its own, for what is no matter of sizes.
Case plain(int loss, int mask, uint64_t seed) {
  Case c = {};
  c.layers = {{TT_LSTM, 6, 3, 5, 9, 4, true}, {TT_GRU, 6, 3, 4, 7, 7, false}, {TT_RNN_TANH, 6, 3, 7, 8, 8, false}};
  c.steps = 4, c.C = 5, c.loss = loss, c.mask = mask, c.bias = c.read_bias = c.resets = true, c.far = 1.0, c.seed = seed;
  return c;
}

// The reference itself, against differences of the loss.
int trust(int loss, int mask, uint64_t seed) {
  const Case c = plain(loss, mask, seed);
  Example e = drawn(c, Random(seed));
  const Answer answer = answer_of(c, e);
  std::vector<std::pair<Numbers *, const Numbers *>> each = {{&e.w, &answer.dw}, {&e.b, &answer.db}, {&e.layers[0].x, &answer.layers[0].dx}};
  for (size_t i = 0; i < c.layers.size(); i++)
    each.insert(each.end(), {{&e.layers[i].w_hh, &answer.layers[i].dw_hh}, {&e.layers[i].b_ih, &answer.layers[i].db_ih}});
  int failures = 0;
  for (const auto &[numbers, gradient] : each)
    for (size_t i = 0; i < numbers->size(); i += 3) {
      const double old = (*numbers)[i], by = 1e-6;
      (*numbers)[i] = old + by;
      const double above = answer_of(c, e).mean;
      (*numbers)[i] = old - by;
      const double error = std::fabs((above - answer_of(c, e).mean) / (2 * by) - (*gradient)[i]);
      (*numbers)[i] = old;
      if (error > 1e-7 * (1.0 + std::fabs((*gradient)[i]))) failures++, say(c, TT_F64, "the reference differs from differences", error);
    }
  return failures;
}

// Mutants must fail: another row that counts, another target, another start of the steps that count, one reset fewer.
int notices(int loss) {
  const Case c = plain(loss, ONE, 3);
  const Example e = drawn(c, Random(3));
  Run<float> run(c, e, 1);
  const size_t one = static_cast<size_t>(std::find(e.mask.begin(), e.mask.end(), 1) - e.mask.begin()), other = (one + 1) % e.mask.size();
  const size_t C = static_cast<size_t>(c.C);
  Example row = e, target = e, reset = e;
  std::swap(row.mask[one], row.mask[other]);
  if (loss == TT_CROSS_ENTROPY)
    target.classes[one] = (e.classes[one] + 1) % c.C, row.classes[other] = e.classes[one];
  else
    target.targets[one * C] += 1.0, std::copy_n(e.targets.begin() + one * C, C, row.targets.begin() + other * C);
  for (LayerInputs &layer : reset.layers) layer.resets.assign(layer.resets.size(), 0);
  Case shifted = c;
  for (Sizes &z : shifted.layers) z.T--;
  int failures = run.go() != 0;
  const char *of = "";
  for (const Answer &mutant : {answer_of(c, row), answer_of(c, target), answer_of(c, reset)})
    if (!(run.distance(mutant, &of) > 1e-2)) failures++, say(c, TT_F32, "a mutant goes unnoticed", 0.0);
  const Answer early = answer_of(shifted, e); // the numbers of its outputs are as many
  if (!(difference(run.outputs, early.outputs, 0.0) > 1e-2)) failures++, say(c, TT_F32, "other steps go unnoticed", 0.0);
  return failures;
}

// A class that is not there: nothing is written, unless its row does not count.
template <class F> int no_class() {
  const Case c = plain(TT_CROSS_ENTROPY, SOME, 4);
  const Example e = drawn(c, Random(4));
  int failures = 0;
  for (int64_t wrong : {int64_t(-1), c.C, INT64_MIN, INT64_MAX})
    for (int64_t row = 0; row < c.rows(); row++) {
      Run<F> run(c, e, 1);
      run.classes[row] = wrong;
      const std::vector<uint8_t> before = run.bits();
      const int fault = run.go();
      const bool counts = e.counts(row), left = before == run.bits();
      if (fault != (counts ? TT_INVALID_TARGET : 0) || left != counts) failures++, say(c, TYPE<F>, "a class that is not there: fault", fault);
    }
  return failures;
}

// A single NaN among the weights, or in what enters, is reported.
template <class F> int not_finite(int loss) {
  const Case c = plain(loss, ALL, 5);
  const Example e = drawn(c, Random(5));
  const auto missed = [&](Exact<F> *const numbers, Run<F> &run) {
    if (!numbers || !numbers->size()) return 0;
    (*numbers)[numbers->size() / 2] = F(NAN);
    return static_cast<int>(run.go() != TT_NON_FINITE);
  };
  int failures = Run<F>(c, e, 1).go() != 0;
  for (auto weight : {&Run<F>::w, &Run<F>::b}) {
    Run<F> run(c, e, 1);
    failures += missed(&(run.*weight), run);
  }
  for (size_t i = 0; i < c.layers.size(); i++)
    for (auto inputs : {&Layer<F>::w_ih, &Layer<F>::w_hh, &Layer<F>::b_ih, &Layer<F>::b_hh, &Layer<F>::w_hr, &Layer<F>::x, &Layer<F>::h0,
                       &Layer<F>::c0}) {
      Run<F> run(c, e, 1);
      failures += missed(&((*run.layers[i]).*inputs), run);
    }
  if (failures) say(c, TYPE<F>, "NaN goes unnoticed: times", failures);
  return failures;
}

// Gradients that overflow, of the readout alone and on the way to the first layer alone, where all that is inputs is finite.
template <class F> int overflows() {
  const double big = sizeof(F) == 4 ? 1e30 : 1e300, half = std::sqrt(big);
  Case c = plain(TT_SQUARED_ERROR, ALL, 6);
  c.layers = {{TT_RNN_RELU, 6, 3, 5, 7, 7, false}};
  int failures = 0;
  for (bool readout : {true, false}) {
    Example e = drawn(c, Random(6));
    for (double &target : e.targets) target = big;
    for (double &weight : e.w) weight *= readout ? 1 / half : half;
    for (double &bias : e.layers[0].b_ih) bias = readout ? half : 1.0;
    Run<F> run(c, e, 1);
    const int fault = run.go();
    const auto finite = [](const Exact<F> &numbers) { return std::all_of(numbers.begin(), numbers.end(), [](F x) { return std::isfinite(x); }); };
    const bool as_meant = finite(run.dw) != readout && finite(run.layers[0]->dw_ih) == readout;
    if (fault != TT_NON_FINITE || !as_meant) failures++, say(c, TYPE<F>, "gradients that overflow: fault", fault);
  }
  return failures;
}

std::atomic<int> products, refused, spread; // calls; with arguments that cannot be; that may take more than their thread
thread_local int allowed = 7;

int allow(int threads) { return std::exchange(allowed, threads); }

// sgemm and dgemm as their reference has them: C = alpha op(A) op(B) + beta C column by column, C is not read where beta is 0, and
// nothing is done where a matrix cannot have the distance between columns that is said. Sums begin elsewhere for another number of
// columns: so do the best ones round.
// Reference: J. Dongarra et al., A set of level 3 basic linear algebra subprograms, ACM TOMS 16 (1990).
template <class F>
void blas(const char *trans_a, const char *trans_b, const int *m, const int *n, const int *k, const void *alpha, const void *a, const int *lda,
          const void *b, const int *ldb, const void *beta, void *c, const int *ldc) {
  const bool turn_a = *trans_a != 'N', turn_b = *trans_b != 'N';
  products++, spread += allowed != 1;
  if (*lda < std::max(1, turn_a ? *k : *m) || *ldb < std::max(1, turn_b ? *n : *k) || *ldc < std::max(1, *m)) {
    refused++;
    return;
  }
  const F *const A = static_cast<const F *>(a), *const B = static_cast<const F *>(b), times = *static_cast<const F *>(alpha);
  const F keep = *static_cast<const F *>(beta);
  const int64_t a_row = turn_a ? *lda : 1, a_column = turn_a ? 1 : *lda, b_row = turn_b ? *ldb : 1, b_column = turn_b ? 1 : *ldb;
  for (int64_t j = 0; j < *n; j++) {
    F *const to = static_cast<F *>(c) + j * *ldc;
    for (int64_t i = 0; i < *m; i++) to[i] = keep == 0 ? F(0) : keep * to[i];
    for (int64_t y = 0; y < *k; y++) {
      const int64_t x = (y + *n) % *k;
      const F by = times * B[x * b_row + j * b_column];
      for (int64_t i = 0; i < *m; i++) to[i] += A[i * a_row + x * a_column] * by;
    }
  }
}

// tt_backward alone makes of what the forward pass left the bits that it results within the fused step.
template <class F> int alone(const Case &c, const Example &e) {
  Run<F> run(c, e, 2);
  if (run.go()) return say(c, TYPE<F>, "a fault", 0.0), 1;
  const std::vector<uint8_t> before = run.bits();
  for (const auto &layer : run.layers) layer->gradients(F(0.5));
  int failures = 0;
  for (size_t i = run.layers.size(); i-- > 0;) failures += tt_backward(&run.layers[i]->call) != 0;
  if (failures || before != run.bits()) failures++, say(c, TYPE<F>, "tt_backward alone gives other numbers", 0.0);
  return failures;
}

// Products worth a BLAS take one, some with rows of B that lie apart, or are left out by resets, or begin before the first step.
int by_blas(const Case &c) {
  Answer answer;
  const Example e = away_from_kinks(c, &answer);
  int failures = 0;
  tt_blas(blas<float>, blas<double>, nullptr, allow);
  products = refused = spread = 0;
  failures += agrees<float>(c, e, answer);
  if (!products) failures++, say(c, TT_F32, "no product by a BLAS", 0.0);
  products = 0;
  failures += agrees<double>(c, e, answer);
  if (!products) failures++, say(c, TT_F64, "no product by a BLAS", 0.0);
  if (c.accumulate) failures += alone<float>(c, e) + alone<double>(c, e);
  if (refused) failures++, say(c, TT_F32, "arguments that a BLAS refuses, calls:", refused);
  if (spread || allowed != 7) failures++, say(c, TT_F32, "threads of the BLAS not as they were, calls:", spread);
  tt_blas(nullptr, nullptr, nullptr, nullptr);
  return failures;
}

int large(bool brief) {
  Case c = {};
  c.steps = 56, c.C = 80, c.loss = TT_CROSS_ENTROPY, c.mask = SOME, c.bias = c.read_bias = c.resets = c.accumulate = c.all = true, c.far = 1.0;
  c.layers = {{TT_LSTM, 64, 8, 90, 128, 128, false}}, c.seed = 1;
  int failures = by_blas(c);
  if (!brief) {
    c.layers = {{TT_LSTM, 64, 8, 90, 128, 100, true}, {TT_RNN_TANH, 64, 8, 100, 128, 128, false}}, c.seed = 2;
    failures += by_blas(c);
    c.layers = {{TT_GRU, 64, 8, 90, 128, 128, false}}, c.seed = 3, c.loss = TT_SQUARED_ERROR, c.accumulate = c.resets = false;
    failures += by_blas(c);
  }
  c.layers = {{TT_LSTM, 1, 2048, 1, 512, 1, true}}, c.steps = 1, c.C = 2048, c.seed = 4, c.accumulate = c.resets = false; // one column
  return failures + by_blas(c);
}

} // namespace

int check_fused_step(bool brief) {
  int failures = 0;
  for (int loss : {TT_CROSS_ENTROPY, TT_SQUARED_ERROR}) {
    for (int mask : {ALL, SOME, ONE}) failures += trust(loss, mask, 11);
    failures += notices(loss) + not_finite<float>(loss) + not_finite<double>(loss);
  }
  for (uint64_t seed = 1; seed <= (brief ? 200 : 2600); seed++) failures += compare(case_of(seed));
  return failures + no_class<float>() + no_class<double>() + overflows<float>() + overflows<double>() + large(brief);
}
