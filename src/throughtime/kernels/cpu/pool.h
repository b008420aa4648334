// Work distributed over torch's own threads.
//
// A call opens one parallel region of OpenMP, and its threads are a team until it ends. The caller computes, and posts jobs of several
// parts. Every thread takes the next part of the present job. Who finds none spins for microseconds, then yields its core, and after a
// millisecond sleeps, so that a thread which has lost its core can run on this one: OpenMP's own barriers spin on for the whole time slice
// of another process. The caller takes the parts that nobody else has begun, and waits only for those that somebody has.
//
// OpenMP's region still ends only when each of its threads has had a core for a moment. If the caller waited for a third of a region,
// because the cores are busy with something else, the next calls run on one thread: 2, then 4, up to 64 of them, until a team is in time again.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

#include "throughtime.h"

// Plain C symbols and the compiler's atomics: the linker would take a weak symbol of std:: from one instruction set's object for all.
extern "C" tt_parallel tt_torch_pool;
extern "C" tt_gemm tt_torch_gemm[3]; // by tt_type
extern "C" int (*tt_torch_gemm_threads)(int);
extern "C" uint32_t tt_late_teams, tt_skips;                         // in a row; calls that run on one thread before the next team
extern "C" int64_t tt_least_work;                               // of a thread, in multiplications
extern "C" void tt_sleep(uint32_t *word, uint32_t value); // until `tt_wake(word)`, or another value is there, or for no reason
extern "C" void tt_wake(uint32_t *word);

// Memory of a thread that its calls use again, freed when the thread ends; null: there is none.
struct tt_stack {
  char *base;
  int64_t used;
};
extern "C" tt_stack *tt_thread_stack(void);
constexpr int64_t TT_STACK_BYTES = 1024 * 1024;

namespace {

constexpr int SPINS = 500;                // tests before a thread yields, some 10 to 20 us
constexpr int64_t YIELDING = 1000 * 1000; // nanoseconds before it sleeps: between two jobs mostly less; an idle core wakes up late
constexpr int64_t LATE = 500 * 1000;      // nanoseconds of waiting that do not matter; a time slice has millions
constexpr uint32_t MOST_LATE_TEAMS = 6;   // in a row: the skipped calls double with each

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

template <class N> N read(const N *from) { return __atomic_load_n(from, __ATOMIC_SEQ_CST); }
template <class N> void write(N *to, N value) { __atomic_store_n(to, value, __ATOMIC_SEQ_CST); }
template <class N> N increment(N *number, N by = 1) { return __atomic_add_fetch(number, by, __ATOMIC_SEQ_CST); }

inline int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000 * 1000 * 1000 + now.tv_nsec;
}

class Team {
public:
  Team() : caller_(pthread_self()) {}
  bool is_caller() const { return pthread_equal(caller_, pthread_self()); }

  // Calls run(work, part) for every part; the caller only.
  void post(void (*run)(const void *, int64_t), const void *work, uint32_t parts) {
    write(&run_, run), write(&work_, work), write(&done_, 0u);
    write(&next_, uint64_t(parts) << 32);
    notify();
    while (take()) {
    }
    waited_ += wait(&done_, &waits_, [&] { return read(&done_) == parts; });
  }

  // Takes parts of jobs until the caller ends the team.
  void serve() {
    increment(&inside_);
    while (!read(&over_))
      if (!take()) wait(&posts_, &sleepers_, [&] { return available() || read(&over_); });
    increment(&inside_, ~0u);
    if (read(&waits_)) tt_wake(&inside_);
  }

  // Lets the others leave. Who has not come yet is left to OpenMP.
  void end() {
    write(&over_, 1u);
    notify();
    waited_ += wait(&inside_, &waits_, [&] { return !read(&inside_); });
    ended_ = nanoseconds();
  }

  // After the region: whether the caller waited for a third of it: one thread takes no longer.
  bool late() const {
    const int64_t now = nanoseconds(), waited = waited_ + now - ended_;
    return waited > LATE && 3 * waited > now - began_;
  }

private:
  bool available() const {
    const uint64_t next = read(&next_);
    return uint32_t(next) < uint32_t(next >> 32);
  }

  // Runs one part of the present job, if there is one. It stays present until this part is done.
  bool take() {
    uint64_t next = read(&next_);
    do
      if (uint32_t(next) >= uint32_t(next >> 32)) return false;
    while (!__atomic_compare_exchange_n(&next_, &next, next + 1, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    read(&run_)(read(&work_), uint32_t(next >> 32) - 1 - uint32_t(next)); // the last first: of uneven parts it is the longest
    increment(&done_);
    if (read(&waits_)) tt_wake(&done_);
    return true;
  }

  void notify() {
    increment(&posts_);
    if (read(&sleepers_)) tt_wake(&posts_);
  }

  // Until `ready`, which changes when `word` does. Whoever changes it reads `sleepers` afterwards. Returns how long that took.
  template <class Ready> static int64_t wait(uint32_t *word, uint32_t *sleepers, const Ready &ready) {
    for (int spins = 0; spins < SPINS; spins++) {
      if (ready()) return 0;
      pause_briefly();
    }
    const int64_t began = nanoseconds();
    while (!ready()) {
      if (nanoseconds() - began < YIELDING) {
        sched_yield();
        continue;
      }
      increment(sleepers);
      const uint32_t value = read(word);
      if (!ready()) tt_sleep(word, value);
      increment(sleepers, ~0u);
    }
    return nanoseconds() - began;
  }

  const pthread_t caller_;
  void (*run_)(const void *, int64_t) = nullptr;
  const void *work_ = nullptr;
  uint64_t next_ = 0;                         // of the present job: its parts << 32 | how many are taken
  uint32_t done_ = 0, waits_ = 0;             // its parts that are done; whether the caller sleeps
  uint32_t posts_ = 0, sleepers_ = 0;         // jobs so far; threads that sleep until the next
  uint32_t inside_ = 0, over_ = 0;            // threads besides the caller
  int64_t waited_ = 0, began_ = nanoseconds(), ended_ = 0; // of the caller
};

static __thread Team *team = nullptr; // of a caller

// How many threads are worth waking for so many multiplications.
inline int threads_for(int threads, int64_t multiplications) {
  const int64_t least = read(&tt_least_work), most = least > 0 ? multiplications / least : threads;
  return most < threads ? static_cast<int>(most > 1 ? most : 1) : threads;
}

// Calls work() here, while up to `threads` - 1 other threads take their share in it.
template <class Work> void with_team(int threads, const Work &work) {
  const tt_parallel parallel = __atomic_load_n(&tt_torch_pool, __ATOMIC_RELAXED);
  if (threads <= 1 || !parallel || team) return work();
  if (const uint32_t skips = read(&tt_skips); skips && read(&tt_least_work)) {
    write(&tt_skips, skips - 1);
    return work();
  }
  struct Region {
    const Work &work;
    Team team;
  } region{work, {}};
  parallel(
      [](void *data) {
        auto *r = static_cast<Region *>(data);
        if (!r->team.is_caller()) return r->team.serve();
        team = &r->team;
        r->work();
        team = nullptr;
        r->team.end();
      },
      &region, static_cast<unsigned>(threads), 0);
  const uint32_t late = region.team.late() ? read(&tt_late_teams) + 1 : 0;
  write(&tt_late_teams, late < MOST_LATE_TEAMS ? late : MOST_LATE_TEAMS);
  write(&tt_skips, late ? 1u << read(&tt_late_teams) : 0u);
}

// Calls work(i) for every i < count. Any thread of the team may run any i, so results must not depend on it.
template <class Work> void share(int threads, int64_t count, const Work &work) {
  if (threads > 1 && count > 1 && team)
    return team->post([](const void *data, int64_t i) { (*static_cast<const Work *>(data))(i); }, &work, static_cast<uint32_t>(count));
  for (int64_t i = 0; i < count; i++) work(i);
}

} // namespace
