// The functions of one instruction set.
#pragma once
#include "throughtime.h"

struct tt_table {
  int64_t (*saved)(const tt_call *);
  int (*forward)(const tt_call *);
  int (*backward)(const tt_call *);
  int64_t (*fused_step_scratch)(const tt_fused_step *);
  int (*fused_step)(const tt_fused_step *);
  double (*optimize)(const tt_optim *);
};

// As glibc has had them from the start; those of 2.29 would keep the library from loading on systems that torch still runs on.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver pow, pow@GLIBC_2.2.5");
#endif
