// The C interface of the compiled core: plain pointers and numbers, no torch, no Python.
//
// Shapes: T steps, B lanes, D input features, H hidden, P = H or the size of a projection, G gates (LSTM i f g o, GRU r z n, RNN one).
// Matrices are row by row and without gaps; `type` says whether numbers are float or double. A pointer may be null where that is said.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TT_EXPORT __attribute__((visibility("default")))

enum tt_kind { TT_LSTM = 0, TT_GRU = 1, TT_RNN_TANH = 2, TT_RNN_RELU = 3 };
// TT_BF16: numbers are float; both sides of every product are rounded to bfloat16 first, sums stay float. Where `tt_bfloat16` says so.
enum tt_type { TT_F32 = 0, TT_F64 = 1, TT_BF16 = 2 };

// One layer, one direction, over T steps. `tt_forward` reads what is given and writes what is made; `tt_backward` reads both,
// and writes gradients (adds to those of the weights where `accumulate`).
typedef struct {
  int32_t kind, type;
  int64_t steps, lanes, inputs, hidden, outputs; // T, B, D, H, P
  int32_t threads, accumulate;
  // given
  const void *x, *h0, *c0;       // (T, B, D), (B, P), (B, H); c0 of an LSTM only
  const void *w_ih, *w_hh;       // (G*H, D), (G*H, P)
  const void *b_ih, *b_hh;       // (G*H), both or neither null
  const void *w_hr;              // (P, H), null without a projection
  const uint8_t *resets;         // (T, B), null: none
  // made by the forward pass
  void *y;                       // (T, B, P)
  void *h_end, *c_end;           // (B, P), (B, H); c_end of an LSTM only
  void *saved;                   // tt_saved numbers; null: no backward pass will come
  // given to the backward pass
  const void *dy, *dh_end, *dc_end; // (T, B, P), (B, P), (B, H); null: zeros
  // made by the backward pass; null: not wanted
  void *dx, *dh0, *dc0, *dw_ih, *dw_hh, *db_ih, *db_hh, *dw_hr;
  double *squares;               // (T, B, S) squared norms of gradients: LSTM h c i f g o, GRU h r z n, RNN h
  double *entering;              // (B, E) those of the state entering the first step: LSTM h c, else h
  double *kept;                  // (H) f of an LSTM, z of a GRU, added up over steps and lanes
} tt_call;

// The numbers that `saved` must hold.
TT_EXPORT int64_t tt_saved(const tt_call *call);
TT_EXPORT int tt_forward(const tt_call *call);
TT_EXPORT int tt_backward(const tt_call *call);

// A stack of layers, the outputs of each the inputs of the next (and its dx the dy of the one before), and a linear readout of the
// last one's outputs: a loss over the last steps, and the gradients of all weights. `tt_whole` fills what each layer makes.
enum tt_loss { TT_CROSS_ENTROPY = 0, TT_SQUARED = 1 };
enum tt_fault { TT_NO_MEMORY = 1, TT_NO_CLASS = 2, TT_NOT_FINITE = 3 };
typedef struct {
  tt_call *layers;
  int32_t count, loss, accumulate;
  int64_t steps, classes, valid; // steps that may count; C; rows that count
  const void *w, *b;             // (C, P), (C); b may be null
  const void *targets;           // (steps, B) int64, or (steps, B, C)
  const uint8_t *mask;           // (steps, B), null: all count
  void *outputs;                 // (steps, B, C)
  void *room;                    // tt_whole_room numbers to work with; who keeps them spares the system's clearing of fresh memory
  void *dw, *db;
  double *mean;                  // the loss
} tt_whole;
// The numbers that `room` must hold, by layers, steps and classes.
TT_EXPORT int64_t tt_whole_room(const tt_whole *whole);
// 0, or a fault: TT_NO_CLASS leaves everything as it was, TT_NOT_FINITE is said of gradients that are written.
TT_EXPORT int tt_whole_step(const tt_whole *whole);

// One step of an optimizer over `count` tensors, each with a gradient, clipped by their global norm.
enum tt_rule { TT_SGD = 0, TT_ADAM = 1, TT_ADAMW = 2 };
typedef struct {
  double lr, decay;                         // learning rate, weight decay
  double momentum, dampening;               // SGD
  double beta1, beta2, eps;                 // Adam, AdamW
  int32_t rule, nesterov, amsgrad, maximize;
} tt_group;
// Numbers of one type without gaps, the same order in every array.
typedef struct {
  void *param;
  void *first, *second, *largest; // SGD: momentum or null; Adam: means of gradients, of their squares, and amsgrad's maximum or null
  void *step;                     // Adam: one number, steps so far; counted here
  int64_t start, size;            // numbers in the tensors before it, and in it
  int32_t group, type, step_type;
  int32_t fresh;                  // SGD: momentum starts from this gradient; false afterwards
  double rate, root;              // working room
} tt_tensor;
typedef struct {
  int64_t count;
  tt_tensor *tensors;
  const tt_group *groups;
  const void *const *grads; // of the tensors; only read
  double max_norm;          // infinity: the norm is taken, nothing clipped
  int32_t clip, threads;    // clip false: no norm is taken
} tt_optim;
// The global norm of the gradients before clipping, 0 without `clip`. The same bits for any number of threads.
TT_EXPORT double tt_optimize(const tt_optim *optim);

// Of this interface: one more whenever a structure or a call changes; VERSION in library.py is to be the same.
#define TT_VERSION 5
TT_EXPORT int tt_version(void);
// The instruction set that runs: "v4", "v3", "v2" or "base". `tt_use` takes another one that the processor has; 0 if it has not.
TT_EXPORT const char *tt_level(void);
TT_EXPORT int tt_use(const char *level);
// How products of TT_BF16 are made; where the instruction set that runs has none, or none that are faster, they are those of TT_F32. So
// they are until `tt_bfloat16` is asked: AMX has to be asked for, and from then on the process needs alternate signal stacks of 11 KiB.
enum tt_pairs { TT_PAIRS_NONE = 0, TT_PAIRS_AVX512 = 1, TT_PAIRS_AMX = 2 };
TT_EXPORT int tt_bfloat16(void);
TT_EXPORT int tt_use_bfloat16(int pairs); // another way that the processor has; 0 if it has not
// The thread pool of torch: GOMP_parallel of the OpenMP runtime that it has loaded; null: one thread.
typedef void (*tt_parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
TT_EXPORT void tt_pool(tt_parallel parallel);
// Products of large matrices by somebody else: Fortran's sgemm and dgemm with numbers of 32 bits, and what sets how many threads the
// calling one may take for them and returns what it was; null: by our own.
typedef void (*tt_gemm)(const char *trans_a, const char *trans_b, const int *m, const int *n, const int *k, const void *alpha, const void *a,
                        const int *lda, const void *b, const int *ldb, const void *beta, void *c, const int *ldc);
// `half` takes numbers of bfloat16 and gives float.
TT_EXPORT void tt_blas(tt_gemm single_precision, tt_gemm double_precision, tt_gemm half, int (*threads)(int));

#ifdef __cplusplus
}
#endif
