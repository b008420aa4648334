// The C interface: calls go to the widest instruction set that the processor has, or to the one pairs_known for.
#include "table.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "pool.h"

#if defined(__x86_64__)
extern const tt_table tt_table_v2, tt_table_v3, tt_table_v4;
#else
extern const tt_table tt_table_base;
#endif

tt_parallel tt_torch_pool = nullptr;
tt_gemm tt_torch_gemm[3] = {nullptr, nullptr, nullptr};
int tt_torch_pairs = TT_PAIRS_NONE;
int (*tt_torch_gemm_threads)(int) = nullptr;
int64_t tt_least_work = 8 * 1000 * 1000;
uint32_t tt_late_teams = 0, tt_skips = 0;

#if defined(__linux__)
void tt_sleep(uint32_t *word, uint32_t value) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0); }
void tt_wake(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
void tt_sleep(uint32_t *, uint32_t) { sched_yield(); }
void tt_wake(uint32_t *) {}
#endif

namespace {

pthread_key_t stack_key; // frees the memory of a thread that ends
bool has_stacks = false;
__thread tt_stack stack = {nullptr, 0};

void free_stack(void *base) {
  free(base);
  stack = {nullptr, 0}; // whatever else ends with the thread may still call
}

struct Level {
  const char *name;
  const tt_table *table;
  bool available;
};

#if defined(__x86_64__)
Level levels[] = {{"v4", &tt_table_v4, false}, {"v3", &tt_table_v3, false}, {"v2", &tt_table_v2, false}};
#else
Level levels[] = {{"base", &tt_table_base, true}};
#endif

const Level *active = nullptr;
bool pairs_known = false; // whether tt_torch_pairs is determined

// All instructions that the compiler may use at a level must be available, and the system must save the registers;
// __builtin_cpu_supports checks both. Every processor with avx2 and bmi2 also has lzcnt, movbe and f16c.
void detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v2 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("popcnt");
  const bool v3 = v2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  levels[0].available = v4;
  levels[1].available = v3;
  levels[2].available = v2;
#endif
}

// Whether the processor has these products, and the system lets a process use them: AMX has to be pairs_known for.
bool has_pairs(int pairs) {
#if defined(__x86_64__)
  if (!levels[0].available) return false;
  unsigned a, b, c, d;
  if (pairs == TT_PAIRS_AVX512) return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1;
#if defined(__linux__)
  constexpr int BF16 = 1 << 22, TILE = 1 << 24, ASK = 0x1023, DATA = 18;
  if (pairs == TT_PAIRS_AMX && has_pairs(TT_PAIRS_AVX512) && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & BF16) && (d & TILE))
    return !syscall(SYS_arch_prctl, ASK, DATA);
#endif
#endif
  return pairs == TT_PAIRS_NONE;
}

// Intel's AVX512-BF16 has half the throughput of its float products.
int fastest_pairs() {
#if defined(__x86_64__)
  if (has_pairs(TT_PAIRS_AMX)) return TT_PAIRS_AMX;
  return has_pairs(TT_PAIRS_AVX512) && !__builtin_cpu_is("intel") ? TT_PAIRS_AVX512 : TT_PAIRS_NONE;
#else
  return TT_PAIRS_NONE;
#endif
}

// OpenMP's threads do not survive a fork, and its runtime would wait for them forever: a child process uses one thread.
void after_fork() {
  tt_pool(nullptr);
  tt_blas(nullptr, nullptr, nullptr, nullptr); // the BLAS has threads of its own
}

__attribute__((constructor)) void load() {
  detect();
  for (const Level &level : levels)
    if (level.available && !active) active = &level;
  pthread_atfork(nullptr, nullptr, after_fork);
#if !defined(__SANITIZE_ADDRESS__) // which finds errors only between blocks of the allocator
  has_stacks = !pthread_key_create(&stack_key, free_stack);
#endif
}

const tt_table *table() { return __atomic_load_n(&active, __ATOMIC_RELAXED)->table; }

} // namespace

tt_stack *tt_thread_stack(void) {
  if (!stack.base && has_stacks) {
    void *p = nullptr;
    if (posix_memalign(&p, 64, TT_STACK_BYTES)) return nullptr;
    if (pthread_setspecific(stack_key, p)) return free(p), nullptr;
    stack.base = static_cast<char *>(p);
  }
  return stack.base ? &stack : nullptr;
}

extern "C" {

int tt_version(void) { return TT_VERSION; }

const char *tt_level(void) {
  const Level *level = __atomic_load_n(&active, __ATOMIC_RELAXED);
  return level ? level->name : "";
}

int tt_use(const char *name) {
  for (const Level &level : levels)
    if (level.available && !strcmp(level.name, name)) {
      __atomic_store_n(&active, &level, __ATOMIC_RELAXED);
      return 1;
    }
  return 0;
}

int tt_bfloat16(void) {
  const tt_table *const now = table();
#if defined(__x86_64__)
  if (now != &tt_table_v4) return TT_PAIRS_NONE;
#endif
  if (!now) return TT_PAIRS_NONE;
  if (!__atomic_load_n(&pairs_known, __ATOMIC_ACQUIRE)) {
    __atomic_store_n(&tt_torch_pairs, fastest_pairs(), __ATOMIC_RELAXED); // every thread computes the same value
    __atomic_store_n(&pairs_known, true, __ATOMIC_RELEASE);
  }
  return __atomic_load_n(&tt_torch_pairs, __ATOMIC_RELAXED);
}
int tt_use_bfloat16(int pairs) {
  if (pairs != TT_PAIRS_NONE && !has_pairs(pairs)) return 0;
  __atomic_store_n(&tt_torch_pairs, pairs, __ATOMIC_RELAXED);
  __atomic_store_n(&pairs_known, true, __ATOMIC_RELEASE);
  return 1;
}

void tt_pool(tt_parallel parallel) { __atomic_store_n(&tt_torch_pool, parallel, __ATOMIC_RELAXED); }
void tt_blas(tt_gemm single_precision, tt_gemm double_precision, tt_gemm half, int (*threads)(int)) {
  tt_torch_gemm_threads = threads;
  __atomic_store_n(tt_torch_gemm, single_precision, __ATOMIC_RELAXED);
  __atomic_store_n(tt_torch_gemm + 1, double_precision, __ATOMIC_RELAXED);
  __atomic_store_n(tt_torch_gemm + 2, half, __ATOMIC_RELAXED);
}

int64_t tt_use_threads_from(int64_t multiplications) { return __atomic_exchange_n(&tt_least_work, multiplications, __ATOMIC_RELAXED); }

int64_t tt_saved(const tt_call *call) { return table()->saved(call); }
int tt_forward(const tt_call *call) { return table()->forward(call); }
int tt_backward(const tt_call *call) { return table()->backward(call); }
int64_t tt_fused_step_scratch(const tt_fused_step *step) { return table()->fused_step_scratch(step); }

int tt_fused_step_run(const tt_fused_step *step) { return table()->fused_step(step); }
double tt_optimize(const tt_optim *optim) { return table()->optimize(optim); }
}
