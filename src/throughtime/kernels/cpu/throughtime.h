// The C interface of the compiled core: plain pointers and numbers, no torch, no Python.
//
// Shapes: T steps, B lanes, D input features, H hidden, P = H or the size of a projection, G gates (LSTM i f g o, GRU r z n, RNN one).
// Matrices are row by row and without gaps; `type` says whether numbers are float or double. A comment says where a pointer may be null.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TT_EXPORT __attribute__((visibility("default")))

enum tt_kind { TT_LSTM = 0, TT_GRU = 1, TT_RNN_TANH = 2, TT_RNN_RELU = 3 };
// TT_BF16: numbers are float; both factors of every product are rounded to bfloat16 first, and sums stay float (see `tt_bfloat16`).
enum tt_type { TT_F32 = 0, TT_F64 = 1, TT_BF16 = 2 };

// One layer, one direction, over T steps. `tt_forward` reads the inputs and writes the results. `tt_backward` reads both and writes the
// gradients; with `accumulate` it adds to those of the weights.
typedef struct {
  int32_t kind, type;
  int64_t steps, lanes, inputs, hidden, outputs; // T, B, D, H, P
  int32_t threads, accumulate;
  // inputs
  const void *x, *h0, *c0;       // (T, B, D), (B, P), (B, H); c0 of an LSTM only
  const void *w_ih, *w_hh;       // (G*H, D), (G*H, P)
  const void *b_ih, *b_hh;       // (G*H), both or neither null
  const void *w_hr;              // (P, H), null without a projection
  const uint8_t *resets;         // (T, B), null: none
  // results of the forward pass
  void *y;                       // (T, B, P)
  void *h_end, *c_end;           // (B, P), (B, H); c_end of an LSTM only
  void *saved;                   // tt_saved numbers; null if no backward pass follows
  // inputs of the backward pass
  const void *dy, *dh_end, *dc_end; // (T, B, P), (B, P), (B, H); null: zeros
  // results of the backward pass; null: not needed
  void *dx, *dh0, *dc0, *dw_ih, *dw_hh, *db_ih, *db_hh, *dw_hr;
} tt_call;

// The numbers that `saved` must hold.
TT_EXPORT int64_t tt_saved(const tt_call *call);
TT_EXPORT int tt_forward(const tt_call *call);
TT_EXPORT int tt_backward(const tt_call *call);

// A stack of layers, a linear readout of the last one's outputs, a loss over the last steps, and the gradients of all weights. The outputs
// of each layer are the inputs of the next, and its dx is the dy of the one before; the call fills the results of each layer.
enum tt_loss { TT_CROSS_ENTROPY = 0, TT_SQUARED_ERROR = 1 };
enum tt_fault { TT_NO_MEMORY = 1, TT_INVALID_TARGET = 2, TT_NON_FINITE = 3 };
typedef struct {
  tt_call *layers;
  int32_t count, loss, accumulate;
  int64_t steps, classes, valid; // steps that the loss may count; C; rows that it counts
  const void *w, *b;             // (C, P), (C); b may be null
  const void *targets;           // (steps, B) int64, or (steps, B, C)
  const uint8_t *mask;           // (steps, B), null: all count
  void *outputs;                 // (steps, B, C)
  void *scratch;                 // tt_fused_step_scratch numbers; reused memory saves the system from clearing fresh pages
  void *dw, *db;
  double *mean;                  // the loss
} tt_fused_step;
// The numbers that `scratch` must hold, by layers, steps and classes.
TT_EXPORT int64_t tt_fused_step_scratch(const tt_fused_step *step);
// 0, or a fault. After TT_INVALID_TARGET nothing has been written; after TT_NON_FINITE all gradients have.
TT_EXPORT int tt_fused_step_run(const tt_fused_step *step);

// One step of an optimizer over `count` tensors, each with a gradient, clipped by their global norm.
enum tt_rule { TT_SGD = 0, TT_ADAM = 1, TT_ADAMW = 2 };
typedef struct {
  double lr, weight_decay;
  double momentum, dampening;               // SGD
  double beta1, beta2, eps;                 // Adam, AdamW
  int32_t rule, nesterov, amsgrad, maximize;
} tt_group;
// Numbers of one type without gaps, the same order in every array.
typedef struct {
  void *param;
  void *first, *second, *largest; // SGD: momentum or null; Adam: means of gradients, of their squares, and amsgrad's maximum or null
  void *step;                     // Adam: one number, steps so far; the call increments it
  int64_t start, size;            // numbers in the tensors before it, and in it
  int32_t group, type, step_type;
  double rate, root;              // scratch
} tt_tensor;
typedef struct {
  int64_t count;
  tt_tensor *tensors;
  const tt_group *groups;
  const void *const *grads; // of the tensors; only read
  double max_norm;          // infinity: the norm is computed, nothing is clipped
  int32_t clip, threads;    // clip false: no norm is computed
} tt_optim;
// The global norm of the gradients before clipping, 0 without `clip`. The same bits for any number of threads.
TT_EXPORT double tt_optimize(const tt_optim *optim);

// The version of this interface: increment it whenever a structure or a call changes, together with VERSION in library.py.
#define TT_VERSION 8
TT_EXPORT int tt_version(void);
// The active instruction set: "v4", "v3", "v2" or "base". `tt_use` selects another one of the processor; 0 if the processor lacks it.
TT_EXPORT const char *tt_level(void);
TT_EXPORT int tt_use(const char *level);
// How products of TT_BF16 are computed. An instruction set without them, or without faster ones, computes them as TT_F32; so does every
// set until `tt_bfloat16` is called. A process must request AMX, and then needs alternate signal stacks of 11 KiB.
enum tt_pairs { TT_PAIRS_NONE = 0, TT_PAIRS_AVX512 = 1, TT_PAIRS_AMX = 2 };
TT_EXPORT int tt_bfloat16(void);
TT_EXPORT int tt_use_bfloat16(int pairs); // selects another method; 0 if the processor lacks it
// The thread pool of torch: GOMP_parallel of the OpenMP runtime that it has loaded; null: one thread.
typedef void (*tt_parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
TT_EXPORT void tt_pool(tt_parallel parallel);
// The least work of a thread, in multiplications of a forward pass: smaller calls run on fewer threads than they ask for. Returns the previous
// number; 0 for tests: always as many as asked for.
TT_EXPORT int64_t tt_use_threads_from(int64_t multiplications);
// Products of large matrices by a BLAS: Fortran's sgemm and dgemm with 32-bit integers, and the function that sets the number of threads of
// the calling thread and returns the previous one; null: our own products.
typedef void (*tt_gemm)(const char *trans_a, const char *trans_b, const int *m, const int *n, const int *k, const void *alpha, const void *a,
                        const int *lda, const void *b, const int *ldb, const void *beta, void *c, const int *ldc);
// `half` multiplies bfloat16 numbers to float.
TT_EXPORT void tt_blas(tt_gemm single_precision, tt_gemm double_precision, tt_gemm half, int (*threads)(int));

#ifdef __cplusplus
}
#endif
