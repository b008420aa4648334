// The optimizers' step: the global norm of all gradients, then SGD, Adam or AdamW with the gradients scaled to it, in one call.
//
// The tensors are numbered end to end and cut into blocks that do not depend on the number of threads. Each block's squares are summed
// separately and the sums are added in order, so any number of threads gives the same bits. Gradients are only read.
//
// References: D. P. Kingma and J. Ba, Adam, ICLR (2015). I. Loshchilov and F. Hutter, Decoupled weight decay regularization, ICLR
// (2019). S. J. Reddi et al., On the convergence of Adam and beyond, ICLR (2018). R. Pascanu et al., On the difficulty of training
// recurrent neural networks, ICML (2013), for the norm.
#pragma once
#include "pool.h"
#include "throughtime.h"

namespace tt {
namespace {

constexpr int64_t OPTIM_BLOCK = 16384; // numbers at least: 448 KiB of Adam's traffic in floats, about 10 us
constexpr int64_t OPTIM_BLOCKS = 512;  // at most: their sums are on the stack
constexpr int64_t WORK_OF_NUMBER = 64; // in multiplications of a matrix product: one takes Adam 0.6 ns
constexpr double CLIP_EPSILON = 1e-6;  // torch.nn.utils.clip_grad_norm_

inline float root_of(float x) { return __builtin_sqrtf(x); }
inline double root_of(double x) { return __builtin_sqrt(x); }

// Calls work(tensor, from, to) for the part of every tensor that lies in [from, to) of the common numbering.
template <class Work> void parts(const tt_optim *o, int64_t from, int64_t to, const Work &work) {
  int64_t low = 0, high = o->count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (o->tensors[middle].start <= from ? low : high) = middle;
  }
  for (int64_t i = low; i < o->count && o->tensors[i].start < to; i++) {
    const tt_tensor &t = o->tensors[i];
    const int64_t first = from > t.start ? from - t.start : 0;
    const int64_t last = to - t.start < t.size ? to - t.start : t.size;
    if (first < last) work(i, first, last);
  }
}

template <class T> double squares(const T *x, int64_t size) {
  double lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= size; i += 16)
    for (int lane = 0; lane < 16; lane++) {
      const double number = static_cast<double>(x[i + lane]);
      lanes[lane] += number * number;
    }
  for (int lane = 0; i < size; i++, lane++) {
    const double number = static_cast<double>(x[i]);
    lanes[lane] += number * number;
  }
  for (int half = 8; half; half /= 2)
    for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

template <class T> struct Factors {
  T scale;           // of the gradient: clipping, and -1 to maximize
  T decay, shrink;   // of the weight: the share added to the gradient, the factor of the weight itself
  T rate, root, eps; // step size; 1 / sqrt(1 - beta2^t)
  T keep1, take1, keep2, take2;
};

template <class T> Factors<T> factors(const tt_group &g, const tt_tensor &t, double scale) {
  const bool decoupled = g.rule == TT_ADAMW;
  Factors<T> f;
  f.scale = static_cast<T>(g.maximize ? -scale : scale);
  f.decay = static_cast<T>(decoupled ? 0.0 : g.weight_decay);
  f.shrink = static_cast<T>(decoupled ? 1.0 - g.lr * g.weight_decay : 1.0);
  f.rate = static_cast<T>(t.rate);
  f.root = static_cast<T>(t.root);
  f.eps = static_cast<T>(g.eps);
  f.keep1 = static_cast<T>(g.rule == TT_SGD ? g.momentum : g.beta1);
  f.take1 = static_cast<T>(1.0 - (g.rule == TT_SGD ? g.dampening : g.beta1));
  f.keep2 = static_cast<T>(g.beta2);
  f.take2 = static_cast<T>(1.0 - g.beta2);
  return f;
}

template <class T, bool DECAY, bool LARGEST>
void adam(T *__restrict p, const T *__restrict g, T *__restrict m, T *__restrict v, T *__restrict largest, int64_t size,
          const Factors<T> f) {
  for (int64_t i = 0; i < size; i++) {
    T d = g[i] * f.scale;
    if (DECAY) d += f.decay * p[i];
    const T mean = f.keep1 * m[i] + f.take1 * d;
    const T square = f.keep2 * v[i] + f.take2 * d * d;
    m[i] = mean;
    v[i] = square;
    T under = square;
    if (LARGEST) { // a NaN is the largest
      const T before = largest[i];
      under = ((square > before) | (square != square)) ? square : before;
      largest[i] = under;
    }
    p[i] = f.shrink * p[i] - f.rate * (mean / (root_of(under) * f.root + f.eps));
  }
}

template <class T, bool DECAY, bool MOMENTUM, bool NESTEROV>
void sgd(T *__restrict p, const T *__restrict g, T *__restrict buffer, int64_t size, const Factors<T> f) {
  for (int64_t i = 0; i < size; i++) {
    T d = g[i] * f.scale;
    if (DECAY) d += f.decay * p[i];
    if (MOMENTUM) {
      const T moved = f.keep1 * buffer[i] + f.take1 * d;
      buffer[i] = moved;
      d = NESTEROV ? d + f.keep1 * moved : moved;
    }
    p[i] -= f.rate * d;
  }
}

template <class T, bool DECAY> void adam(const tt_group &group, const tt_tensor &t, const T *g, int64_t first, int64_t size, Factors<T> f) {
  T *p = static_cast<T *>(t.param) + first, *m = static_cast<T *>(t.first) + first, *v = static_cast<T *>(t.second) + first;
  if (group.amsgrad) return adam<T, DECAY, true>(p, g + first, m, v, static_cast<T *>(t.largest) + first, size, f);
  return adam<T, DECAY, false>(p, g + first, m, v, nullptr, size, f);
}

template <class T, bool DECAY> void sgd(const tt_group &group, const tt_tensor &t, const T *g, int64_t first, int64_t size, Factors<T> f) {
  T *p = static_cast<T *>(t.param) + first;
  if (!t.first) return sgd<T, DECAY, false, false>(p, g + first, nullptr, size, f);
  T *buffer = static_cast<T *>(t.first) + first;
  if (group.nesterov) return sgd<T, DECAY, true, true>(p, g + first, buffer, size, f);
  return sgd<T, DECAY, true, false>(p, g + first, buffer, size, f);
}

template <class T> void update(const tt_group &group, const tt_tensor &t, const void *grad, int64_t first, int64_t size, double scale) {
  const T *g = static_cast<const T *>(grad);
  const Factors<T> f = factors<T>(group, t, scale);
  const bool decay = f.decay != 0; // 0 * infinity is NaN, so nothing is added without decay
  if (group.rule == TT_SGD) return decay ? sgd<T, true>(group, t, g, first, size, f) : sgd<T, false>(group, t, g, first, size, f);
  return decay ? adam<T, true>(group, t, g, first, size, f) : adam<T, false>(group, t, g, first, size, f);
}

// Increments the step of a tensor and stores Adam's bias correction.
inline void count(const tt_group &g, tt_tensor &t) {
  t.rate = g.lr;
  if (g.rule == TT_SGD) return;
  double step;
  if (t.step_type == TT_F64)
    step = *static_cast<double *>(t.step) += 1.0;
  else
    step = static_cast<double>(*static_cast<float *>(t.step) += 1.0F);
  t.rate = g.lr / (1.0 - __builtin_pow(g.beta1, step));
  t.root = 1.0 / __builtin_sqrt(1.0 - __builtin_pow(g.beta2, step));
}

inline double optimize(const tt_optim *o) {
  if (o->count <= 0) return 0.0;
  const int64_t total = o->tensors[o->count - 1].start + o->tensors[o->count - 1].size;
  const int64_t even = (total + OPTIM_BLOCKS - 1) / OPTIM_BLOCKS;
  const int64_t length = even > OPTIM_BLOCK ? even : OPTIM_BLOCK;
  const int64_t blocks = (total + length - 1) / length;
  const int threads = threads_for(o->threads, WORK_OF_NUMBER * total);
  double norm = 0.0, scale = 1.0;
  with_team(threads, [&] {
    if (o->clip) {
      double sums[OPTIM_BLOCKS];
      share(threads, blocks, [&](int64_t block) {
        double sum = 0.0;
        parts(o, block * length, (block + 1) * length, [&](int64_t i, int64_t first, int64_t last) {
          if (o->tensors[i].type == TT_F64)
            sum += squares(static_cast<const double *>(o->grads[i]) + first, last - first);
          else
            sum += squares(static_cast<const float *>(o->grads[i]) + first, last - first);
        });
        sums[block] = sum;
      });
      double sum = 0.0;
      for (int64_t block = 0; block < blocks; block++) sum += sums[block];
      norm = __builtin_sqrt(sum);
      scale = o->max_norm / (norm + CLIP_EPSILON);
      if (scale > 1.0) scale = 1.0; // NaN stays
    }
    for (int64_t i = 0; i < o->count; i++) count(o->groups[o->tensors[i].group], o->tensors[i]);
    share(threads, blocks, [&](int64_t block) {
      parts(o, block * length, (block + 1) * length, [&](int64_t i, int64_t first, int64_t last) {
        const tt_tensor &t = o->tensors[i];
        if (t.type == TT_F64)
          update<double>(o->groups[t.group], t, o->grads[i], first, last - first, scale);
        else
          update<float>(o->groups[t.group], t, o->grads[i], first, last - first, scale);
      });
    });
  });
  return norm;
}

} // namespace
} // namespace tt
