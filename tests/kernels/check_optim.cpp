// The step of the optimizers against a plain loop over each number in double, on odd sizes and memory that is poisoned beyond them.
#include "check.h"

#include <cstdio>
#include <memory>
#include <vector>

#include "throughtime.h"

namespace {

constexpr int64_t SIZES[] = {1, 7, 0, 33, 16384, 3, 20001, 0};
constexpr int STEPS = 3;

struct Rule {
  const char *name;
  tt_group group;
};

tt_group group(int rule, double decay, double momentum, double dampening, bool nesterov, bool amsgrad, bool maximize) {
  tt_group g = {};
  g.rule = rule, g.lr = 0.1, g.weight_decay = decay, g.momentum = momentum, g.dampening = dampening;
  g.beta1 = 0.8, g.beta2 = 0.95, g.eps = 1e-3;
  g.nesterov = nesterov, g.amsgrad = amsgrad, g.maximize = maximize;
  return g;
}

// One number of a tensor, as the papers write the rules.
struct Number {
  double param, first, second, largest;

  void sgd(const tt_group &g, double d) {
    d += g.weight_decay * param;
    if (g.momentum != 0) {
      first = g.momentum * first + (1 - g.dampening) * d;
      d = g.nesterov ? d + g.momentum * first : first;
    }
    param -= g.lr * d;
  }

  void adam(const tt_group &g, double d, int step) {
    if (g.rule == TT_ADAM) d += g.weight_decay * param;
    if (g.rule == TT_ADAMW) param -= g.lr * g.weight_decay * param;
    first = g.beta1 * first + (1 - g.beta1) * d;
    second = g.beta2 * second + (1 - g.beta2) * d * d;
    largest = std::fmax(largest, second);
    const double under = (g.amsgrad ? largest : second) / (1 - std::pow(g.beta2, step));
    param -= g.lr * (first / (1 - std::pow(g.beta1, step))) / (std::sqrt(under) + g.eps);
  }
};

// A tensor of the library beside the numbers that it should hold.
template <class F> struct Tensor {
  Exact<F> param, grad, first, second, largest;
  Exact<float> step;
  std::vector<Number> numbers;

  Tensor(int64_t size, const tt_group &g, Random &random)
      : param(size), grad(size), first(size), second(size), largest(size), step(1), numbers(static_cast<size_t>(size)) {
    for (int64_t i = 0; i < size; i++) {
      param[i] = static_cast<F>(random.number());
      numbers[static_cast<size_t>(i)] = {static_cast<double>(param[i]), 0, 0, 0};
    }
    step.fill(0), first.fill(0), second.fill(0);
    if (g.amsgrad) largest.fill(0);
  }

  tt_tensor entry(const tt_group &g, int64_t start) {
    const bool adam = g.rule != TT_SGD;
    tt_tensor t = {};
    t.param = param.data(), t.start = start, t.size = param.size(), t.type = sizeof(F) == 8 ? TT_F64 : TT_F32, t.step_type = TT_F32;
    t.first = adam || g.momentum != 0 ? first.data() : nullptr;
    t.second = adam ? second.data() : nullptr;
    t.largest = adam && g.amsgrad ? largest.data() : nullptr;
    t.step = adam ? step.data() : nullptr;
    return t;
  }
};

template <class F> using Tensors = std::vector<std::unique_ptr<Tensor<F>>>;

template <class F> double draw(Tensors<F> &tensors, Random &random) {
  double sum = 0;
  for (auto &tensor : tensors)
    for (F &number : tensor->grad) {
      number = static_cast<F>(random.number());
      sum += static_cast<double>(number) * static_cast<double>(number);
    }
  return std::sqrt(sum);
}

template <class F> double farthest(Tensors<F> &tensors) {
  double distance = 0;
  for (auto &tensor : tensors)
    for (int64_t i = 0; i < tensor->param.size(); i++) {
      const double off = std::fabs(static_cast<double>(tensor->param[i]) - tensor->numbers[static_cast<size_t>(i)].param);
      if (!(off <= distance)) distance = off; // NaN too
    }
  return distance;
}

template <class F> void expect(Tensors<F> &tensors, const tt_group &g, double scale, int step) {
  for (auto &tensor : tensors)
    for (int64_t i = 0; i < tensor->param.size(); i++) {
      const double d = static_cast<double>(tensor->grad[i]) * (g.maximize ? -scale : scale);
      Number &number = tensor->numbers[static_cast<size_t>(i)];
      g.rule == TT_SGD ? number.sgd(g, d) : number.adam(g, d, step);
    }
}

// Whether the norm and every parameter are right after each of some steps; `bits` gathers the parameters.
template <class F> bool run(const Rule &rule, double max_norm, int threads, std::vector<F> &bits) {
  Random random(7);
  Tensors<F> tensors;
  std::vector<tt_tensor> entries;
  std::vector<const void *> grads;
  int64_t start = 0;
  for (int64_t size : SIZES) {
    tensors.push_back(std::make_unique<Tensor<F>>(size, rule.group, random));
    entries.push_back(tensors.back()->entry(rule.group, start));
    grads.push_back(tensors.back()->grad.data());
    start += size;
  }
  const tt_optim optim = {static_cast<int64_t>(entries.size()), entries.data(), &rule.group, grads.data(), max_norm, max_norm > 0, threads};
  const double bound = sizeof(F) == 8 ? 1e-13 : 2e-5;
  bool well = true;
  for (int step = 1; step <= STEPS; step++) {
    const double norm = draw(tensors, random), said = tt_optimize(&optim);
    expect(tensors, rule.group, max_norm > 0 ? std::fmin(1, max_norm / (norm + 1e-6)) : 1, step);
    const double off = farthest(tensors);
    if (std::fabs(said - (max_norm > 0 ? norm : 0)) <= 1e-12 * norm && off <= bound) continue;
    fprintf(stderr, "optim %s, %zu bytes, max_norm %g, %d threads, step %d: norm %.17g for %.17g, off by %g\n", rule.name, sizeof(F), max_norm,
            threads, step, said, norm, off);
    well = false;
  }
  for (auto &tensor : tensors) bits.insert(bits.end(), tensor->param.begin(), tensor->param.end());
  return well;
}

template <class F> int check(const Rule &rule) {
  int failures = 0;
  for (double max_norm : {0.0, 1.0, 1e9}) {
    std::vector<F> one, three;
    failures += !run<F>(rule, max_norm, 1, one);
    failures += !run<F>(rule, max_norm, 3, three);
    if (one != three) {
      fprintf(stderr, "optim %s, max_norm %g: three threads give other bits than one\n", rule.name, max_norm);
      failures++;
    }
  }
  return failures;
}

} // namespace

int check_optim() {
  const Rule rules[] = {
      {"sgd", group(TT_SGD, 0, 0, 0, false, false, false)},
      {"sgd with momentum", group(TT_SGD, 0.1, 0.9, 0.3, false, false, true)},
      {"sgd with Nesterov's", group(TT_SGD, 0, 0.9, 0, true, false, false)},
      {"adam", group(TT_ADAM, 0, 0, 0, false, false, false)},
      {"adam with amsgrad", group(TT_ADAM, 0.1, 0, 0, false, true, true)},
      {"adamw", group(TT_ADAMW, 0.1, 0, 0, false, false, false)},
      {"adamw with amsgrad", group(TT_ADAMW, 0.1, 0, 0, false, true, false)},
  };
  int failures = 0;
  for (const Rule &rule : rules) failures += check<float>(rule) + check<double>(rule);
  const tt_optim nothing = {};
  return failures + (tt_optimize(&nothing) != 0);
}
