// What every instruction set offers.
#pragma once
#include "throughtime.h"

struct tt_table {
  int64_t (*saved)(const tt_call *);
  int (*forward)(const tt_call *);
  int (*backward)(const tt_call *);
  int64_t (*whole_room)(const tt_whole *);
  int (*whole)(const tt_whole *);
  double (*optimize)(const tt_optim *);
};

// As glibc has had them from the start; those of 2.29 would keep the library from loading on systems that torch still runs on.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver pow, pow@GLIBC_2.2.5");
#endif
