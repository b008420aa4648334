// The check of the compiled core: a program without Python, so sanitizers and emulators run nothing else.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>

// Each prints failures to stderr and returns their number. `brief`: every 13th of the sizes.
int check_recurrent(bool brief);
int check_optim();
int check_fused_step(bool brief);

// Exactly the promised memory, in an allocation of its own, so AddressSanitizer reports any access beside it. By default it starts between
// two multiples of 16 bytes, since the interface promises no alignment. Poisoned with NaN until it is filled.
template <class F> class Exact {
public:
  explicit Exact(int64_t count, bool aligned = false) : count_(count), shift_(aligned ? 0 : 1) {
    memory_ = static_cast<F *>(std::malloc(sizeof(F) * static_cast<size_t>(count + shift_)));
    if (!memory_) std::abort();
    poison();
  }
  ~Exact() { std::free(memory_); }
  Exact(const Exact &) = delete;
  Exact &operator=(const Exact &) = delete;

  F *data() const { return memory_ + shift_; }
  F *begin() const { return data(); }
  F *end() const { return data() + count_; }
  int64_t size() const { return count_; }
  F &operator[](int64_t i) const { return data()[i]; }
  void fill(F value) {
    for (F &entry : *this) entry = value;
  }
  void poison() { fill(std::numeric_limits<F>::has_quiet_NaN ? std::numeric_limits<F>::quiet_NaN() : F(0xAA)); }

private:
  F *memory_;
  int64_t count_, shift_;
};

// Numbers between -1 and 1, the same on every machine. S. Vigna, An experimental exploration of Marsaglia's xorshift generators (2016).
class Random {
public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint64_t bits() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Du;
  }
  double number() { return static_cast<double>(bits() >> 11) * 0x1p-52 - 1.0; }

private:
  uint64_t state_;
};
