// LSTM, GRU and RNN over all steps of a layer, forward and backward; reference.py defines what they compute.
//
// References: S. Hochreiter and J. Schmidhuber, Neural Computation 9 (1997); F. Gers et al., Neural Computation 12 (2000); H. Sak et al.,
// Interspeech (2014), for the projection; K. Cho et al., EMNLP (2014); J. Appleyard et al., arXiv:1604.01946 (2016), for the one product.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "backward.h"
#include "forward.h"
#include "throughtime.h"

namespace tt {
namespace {

template <class F> int64_t saved_of(const tt_call &call) {
  if (call.kind == TT_LSTM) return Sizes<F, LSTM>(call).numbers();
  return call.kind == TT_GRU ? Sizes<F, GRU>(call).numbers() : 0;
}

int64_t saved(const tt_call *call) { return call->type == TT_F64 ? saved_of<double>(*call) : saved_of<float>(*call); }

template <class F, bool HALF> int forward_as(const tt_call &call) {
  return call.kind == TT_LSTM  ? forward_of<F, LSTM, HALF>(call)
         : call.kind == TT_GRU ? forward_of<F, GRU, HALF>(call)
                               : forward_of<F, RNN, HALF>(call);
}

template <class F, bool HALF> int backward_as(const tt_call &call) {
  return call.kind == TT_LSTM  ? backward_of<F, LSTM, HALF>(call)
         : call.kind == TT_GRU ? backward_of<F, GRU, HALF>(call)
                               : backward_of<F, RNN, HALF>(call);
}

#if defined(__AVX512F__)
bool half(const tt_call &call) { return call.type == TT_BF16 && __atomic_load_n(&tt_torch_pairs, __ATOMIC_RELAXED); }
int forward_in_half(const tt_call &call) { return forward_as<float, true>(call); }
int backward_in_half(const tt_call &call) { return backward_as<float, true>(call); }
#else
bool half(const tt_call &) { return false; }
int forward_in_half(const tt_call &) { return 1; }
int backward_in_half(const tt_call &) { return 1; }
#endif

template <class F> int forward_as(const tt_call &call) { return sizeof(F) == 4 && half(call) ? forward_in_half(call) : forward_as<F, false>(call); }
template <class F> int backward_as(const tt_call &call) { return sizeof(F) == 4 && half(call) ? backward_in_half(call) : backward_as<F, false>(call); }

template <class F> int threads_of(const tt_call &call) {
  return call.kind == TT_LSTM  ? Sizes<F, LSTM>(call).threads
         : call.kind == TT_GRU ? Sizes<F, GRU>(call).threads
                               : Sizes<F, RNN>(call).threads;
}

template <class F> int forward_alone(const tt_call &call) {
  int failed = 0;
  with_team(threads_of<F>(call), [&] { failed = forward_as<F>(call); });
  return failed;
}
template <class F> int backward_alone(const tt_call &call) {
  int failed = 0;
  with_team(threads_of<F>(call), [&] { failed = backward_as<F>(call); });
  return failed;
}

int forward(const tt_call *call) { return call->type == TT_F64 ? forward_alone<double>(*call) : forward_alone<float>(*call); }
int backward(const tt_call *call) { return call->type == TT_F64 ? backward_alone<double>(*call) : backward_alone<float>(*call); }

} // namespace
} // namespace tt
