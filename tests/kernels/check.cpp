// Runs every check at every instruction set of the processor; the argument `brief` selects every 13th of the sizes.
#include "check.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "throughtime.h"

namespace {

struct Job {
  void (*body)(void *);
  void *data;
};

void *run(void *job) {
  static_cast<Job *>(job)->body(static_cast<Job *>(job)->data);
  return nullptr;
}

// GOMP_parallel with plain threads: the body runs once on each, and on this one.
void parallel(void (*body)(void *), void *data, unsigned threads, unsigned) {
  Job job{body, data};
  std::vector<pthread_t> others(threads - 1);
  for (pthread_t &other : others)
    if (pthread_create(&other, nullptr, run, &job)) std::abort();
  body(data);
  for (pthread_t other : others) pthread_join(other, nullptr);
}

// Whether ranks, here threads, see at every barrier what all of them wrote before it. Some are late, so that others sleep.
int check_barrier() {
  constexpr int COUNT = 3, ROUNDS = 300;
  struct Shared {
    tt_rank ranks[COUNT] = {};
    int64_t written[COUNT] = {};
    int failures[COUNT] = {};
  } shared;
  struct Rank {
    Shared *shared;
    int rank;
  } ranks[COUNT];
  const auto body = [](void *data) -> void * {
    const auto [shared, rank] = *static_cast<Rank *>(data);
    for (uint32_t round = 1; round <= ROUNDS; round++) {
      if (round % 50 == 10u * rank) usleep(3000);
      shared->written[rank] = round;
      while (!tt_barrier(shared->ranks, rank, COUNT, 2 * round - 1, 1000 * 1000)) {
      }
      for (const int64_t other : shared->written) shared->failures[rank] += other != round;
      while (!tt_barrier(shared->ranks, rank, COUNT, 2 * round, 1000 * 1000)) {
      }
    }
    return nullptr;
  };
  pthread_t threads[COUNT];
  for (int rank = 0; rank < COUNT; rank++) {
    ranks[rank] = {&shared, rank};
    if (pthread_create(&threads[rank], nullptr, body, &ranks[rank])) std::abort();
  }
  int failures = 0;
  for (int rank = 0; rank < COUNT; rank++) {
    pthread_join(threads[rank], nullptr);
    failures += shared.failures[rank];
  }
  tt_rank alone[2] = {};
  return failures + tt_barrier(alone, 0, 2, 1, 1000); // the second never comes
}

} // namespace

int main(int count, char **arguments) {
  const bool brief = count > 1 && !strcmp(arguments[1], "brief");
  int failures = 0;
  if (tt_version() != TT_VERSION || tt_use("none such")) failures++;
  tt_pool(parallel);
  const int barrier = check_barrier();
  printf("barrier %s\n", barrier ? "FAILED" : "passed");
  failures += barrier;
  tt_use_threads_from(0); // the examples are small
  for (const char *level : {"v2", "v3", "v4", "base"}) {
    if (!tt_use(level)) continue;
    if (strcmp(tt_level(), level)) failures++;
    const int recurrent = check_recurrent(brief), optim = check_optim(), fused_step = check_fused_step(brief);
    const auto word = [](int failed) { return failed ? "FAILED" : "passed"; };
    printf("%s: recurrent %s, optim %s, fused step %s\n", level, word(recurrent), word(optim), word(fused_step));
    failures += recurrent + optim + fused_step;
  }
  return failures || !*tt_level();
}
