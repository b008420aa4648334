// Runs every check at every instruction set of the processor; the argument `brief` selects every 13th of the sizes.
#include "check.h"

#include <pthread.h>

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

} // namespace

int main(int count, char **arguments) {
  const bool brief = count > 1 && !strcmp(arguments[1], "brief");
  int failures = 0;
  if (tt_version() != TT_VERSION || tt_use("none such")) failures++;
  tt_pool(parallel);
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
