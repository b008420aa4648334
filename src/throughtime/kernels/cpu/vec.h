// Vectors as wide as the instruction set has them, and the functions of gates on them.
#pragma once
#include <stdint.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define TT_BYTES 64
#define TT_REGISTERS 32
#elif defined(__AVX__)
#define TT_BYTES 32
#define TT_REGISTERS 16
#elif defined(__aarch64__)
#define TT_BYTES 16
#define TT_REGISTERS 32
#else
#define TT_BYTES 16
#define TT_REGISTERS 16
#endif

#define TT_INLINE inline __attribute__((always_inline))
#define TT_UNROLL _Pragma("GCC unroll 8")

namespace tt {
namespace {

template <class F> struct Vec;

template <> struct Vec<float> {
  typedef float V __attribute__((vector_size(TT_BYTES)));
  typedef int32_t I __attribute__((vector_size(TT_BYTES)));
  static constexpr int N = TT_BYTES / 4;
  static constexpr int BIAS = 127, MANTISSA = 23;
  static constexpr float LOG2E = 1.44269504f, LN2 = 0.693359375f, LN2_REST = -2.12194440e-4f;
  static constexpr float ROUND = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float SIGMOID_END = 40.0f; // 1 + exp(-40) is 1; the product of two 1 + exp(40) is far from overflow
  static constexpr float TANH_END = 10.0f;    // tanh(10) rounds to 1
};

template <> struct Vec<double> {
  typedef double V __attribute__((vector_size(TT_BYTES)));
  typedef int64_t I __attribute__((vector_size(TT_BYTES)));
  static constexpr int N = TT_BYTES / 8;
  static constexpr int BIAS = 1023, MANTISSA = 52;
  static constexpr double LOG2E = 1.4426950408889634, LN2 = 6.93147180369123816490e-01, LN2_REST = 1.90821492927058770002e-10;
  static constexpr double ROUND = 6755399441055744.0; // 1.5 * 2^52
  static constexpr double SIGMOID_END = 300.0;
  static constexpr double TANH_END = 20.0;
};

template <class F> using vec = typename Vec<F>::V;

template <class F> TT_INLINE vec<F> all(F value) { return value - vec<F>{}; }

template <class F> TT_INLINE vec<F> load(const F *from) {
  vec<F> v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

// Prefetches vectors: a processor predicts sequential lines, but not strided rows.
template <class F> TT_INLINE void prefetch(const F *from, int vectors) {
  for (int64_t byte = 0; byte < vectors * TT_BYTES; byte += 64) __builtin_prefetch(reinterpret_cast<const char *>(from) + byte, 0, 2);
}

template <class F> TT_INLINE void store(F *to, vec<F> v) { __builtin_memcpy(to, &v, sizeof v); }

// The first `count` numbers of v, zeros after them.
template <class F> TT_INLINE vec<F> first(vec<F> v, int count) {
  typedef typename Vec<F>::I I;
  if (count >= Vec<F>::N) return v;
  I index;
  for (int i = 0; i < Vec<F>::N; i++) index[i] = i;
  return index < count - I{} ? v : vec<F>{};
}

// The first `count` numbers, zeros after them; memory beyond is not accessed.
#if defined(__AVX512F__)
TT_INLINE vec<float> load_part(const float *from, int count) {
  return count >= 16 ? load(from) : (vec<float>)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
}
TT_INLINE vec<double> load_part(const double *from, int count) {
  return count >= 8 ? load(from) : (vec<double>)_mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << count) - 1), from);
}
TT_INLINE void store_part(float *to, vec<float> v, int count) {
  if (count >= 16) return store(to, v);
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), (__m512)v);
}
TT_INLINE void store_part(double *to, vec<double> v, int count) {
  if (count >= 8) return store(to, v);
  _mm512_mask_storeu_pd(to, static_cast<__mmask8>((1u << count) - 1), (__m512d)v);
}
#else
template <class F> TT_INLINE vec<F> load_part(const F *from, int count) {
  if (count >= Vec<F>::N) return load(from);
  F part[Vec<F>::N] = {};
  for (int i = 0; i < count; i++) part[i] = from[i];
  return load(part);
}
template <class F> TT_INLINE void store_part(F *to, vec<F> v, int count) {
  if (count >= Vec<F>::N) return store(to, v);
  F part[Vec<F>::N];
  store(part, v);
  for (int i = 0; i < count; i++) to[i] = part[i];
}
#endif

// Clamps to [-end, end]; NaN stays NaN.
#if defined(__AVX512F__)
template <class F> TT_INLINE vec<F> at_most(vec<F> v, F end) { // of two numbers, one of them a NaN, these give the second
  if constexpr (sizeof(F) == 4)
    return (vec<F>)_mm512_maskz_max_ps(0xffff, (__m512)all<F>(-end), _mm512_maskz_min_ps(0xffff, (__m512)all<F>(end), (__m512)v));
  else
    return (vec<F>)_mm512_maskz_max_pd(0xff, (__m512d)all<F>(-end), _mm512_maskz_min_pd(0xff, (__m512d)all<F>(end), (__m512d)v));
}
#else
template <class F> TT_INLINE vec<F> at_most(vec<F> v, F end) {
  const vec<F> high = all<F>(end), low = all<F>(-end);
  v = v > high ? high : v;
  return v < low ? low : v;
}
#endif

// exp(x) = scale * (1 + rest), rest = exp(r) - 1 with |r| <= log(2) / 2, by its Taylor series: to the last bit of the type.
template <class F> struct Power {
  vec<F> scale, rest;
};

TT_INLINE vec<float> series(vec<float> r) {
  vec<float> p = all(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  return p * (r * r) + r;
}

TT_INLINE vec<double> series(vec<double> r) {
  const vec<double> r2 = r * r; // odd and even powers side by side: half the latency
  vec<double> odd = all(1.0 / 6227020800), even = all(1.0 / 479001600);
  odd = odd * r2 + 1.0 / 39916800;
  even = even * r2 + 1.0 / 3628800;
  odd = odd * r2 + 1.0 / 362880;
  even = even * r2 + 1.0 / 40320;
  odd = odd * r2 + 1.0 / 5040;
  even = even * r2 + 1.0 / 720;
  odd = odd * r2 + 1.0 / 120;
  even = even * r2 + 1.0 / 24;
  odd = odd * r2 + 1.0 / 6;
  even = even * r2 + 0.5;
  return (odd * r + even) * r2 + r;
}

template <class F> TT_INLINE Power<F> power(vec<F> x) {
  typedef typename Vec<F>::I I;
  const vec<F> magic = all(Vec<F>::ROUND);
  const vec<F> shifted = x * Vec<F>::LOG2E + magic;
  const vec<F> integer = shifted - magic;
  const vec<F> r = (x - integer * Vec<F>::LN2) - integer * Vec<F>::LN2_REST;
  const I exponent = (I)shifted - (I)magic + Vec<F>::BIAS;
  return {(vec<F>)(exponent << Vec<F>::MANTISSA), series(r)};
}

// 1 / v of a v from 1 to its type's largest root. Where the processor has an estimate, right to 2^-14, Newton's steps square what it is off by:
// in half the time, or a quarter in double, of a division.
#if defined(__AVX512F__)
TT_INLINE vec<float> inverse(vec<float> v) {
  const vec<float> near = (vec<float>)_mm512_maskz_rcp14_ps(0xffff, (__m512)v);
  return near + near * (1.0f - v * near);
}
TT_INLINE vec<double> inverse(vec<double> v) {
  vec<double> near = (vec<double>)_mm512_maskz_rcp14_pd(0xff, (__m512d)v);
  near = near + near * (1.0 - v * near);
  return near + near * (1.0 - v * near);
}
#else
TT_INLINE vec<float> inverse(vec<float> v) { return 1.0f / v; }
TT_INLINE vec<double> inverse(vec<double> v) { return 1.0 / v; }
#endif

// (e - 1) / (e + 1) with e = exp(2x), e - 1 without cancellation.
template <class F> TT_INLINE vec<F> tanh(vec<F> x) {
  const Power<F> e = power<F>(F(2) * at_most<F>(x, Vec<F>::TANH_END));
  const vec<F> less = e.rest * e.scale + (e.scale - F(1));
  return less * inverse(less + F(2));
}

// Exactly 1 from SIGMOID_END on: a memory cell whose gate is closed keeps its value.
template <class F> TT_INLINE vec<F> sigmoid(vec<F> x) {
  const Power<F> e = power<F>(-at_most<F>(x, Vec<F>::SIGMOID_END));
  return inverse(F(1) + (e.rest * e.scale + e.scale));
}

} // namespace
} // namespace tt
