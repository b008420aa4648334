// All kernels for one instruction set; compiled once for each, under names of its own.
#include "table.h"

#include "optim.h"
#include "recurrent.h"
#include "fused_step.h"

#define TT_NAME_(level) tt_table_##level
#define TT_NAME(level) TT_NAME_(level)

extern const tt_table TT_NAME(TT_LEVEL);
const tt_table TT_NAME(TT_LEVEL) = {tt::saved, tt::forward, tt::backward, tt::fused_step_scratch, tt::fused_step, tt::optimize};
