// Work distributed over torch's own threads.
#pragma once
#include "throughtime.h"

// Plain C symbols and the compiler's atomics: the linker would take a weak symbol of std:: from one instruction set's object for all.
extern "C" tt_parallel tt_torch_pool;
extern "C" tt_gemm tt_torch_gemm[3]; // by tt_type
extern "C" int (*tt_torch_gemm_threads)(int);

namespace {

// Calls work(i) for every i < count on at most `threads` threads. Any thread may run any i, so results must not depend on it.
template <class Work> void share(int threads, int64_t count, const Work &work) {
  const tt_parallel parallel = __atomic_load_n(&tt_torch_pool, __ATOMIC_RELAXED);
  if (threads > count) threads = static_cast<int>(count);
  if (threads <= 1 || !parallel) {
    for (int64_t i = 0; i < count; i++) work(i);
    return;
  }
  struct Shared {
    const Work *work;
    int64_t next, count;
  } shared{&work, 0, count};
  parallel(
      [](void *data) {
        auto *s = static_cast<Shared *>(data);
        for (int64_t i; (i = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < s->count;) (*s->work)(i);
      },
      &shared, static_cast<unsigned>(threads), 0);
}

} // namespace
