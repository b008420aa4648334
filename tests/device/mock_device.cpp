// A device for tests: memory of the host that only the device's own operators may read.
//
// It is registered as PyTorch's backend for users (PrivateUse1), with two devices. Every operator
// runs as the CPU's kernel on the same memory, so numbers are those of the CPU. What differs is what
// matters on a GPU:
//   - tensors of two devices in one operator are an error, as on CUDA;
//   - copies, reads by the host and operators are counted, and a kind of them can be refused;
//   - each device has a random generator of its own;
//   - memory can be pinned, and a copy that need not be waited for is finished late: the host reads
//     0xFF bytes until it synchronises, and must leave the source of a copy alone until then.
//
// One thread of Python computes and synchronises; autograd's thread of the device may join in.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
constexpr auto MOCK = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex DEVICES = 2;
constexpr size_t ALIGNMENT = 64;
thread_local DeviceIndex current_device = 0;

// ---- counts ---------------------------------------------------------------------------------

enum Kind { TO_DEVICE, FROM_DEVICE, BLOCKING, HOST_READS, NONZERO, OPERATORS, EVENTS, KINDS };
const char* const KIND_NAMES[KINDS] = {
    "copy to the device",    "copy from the device",  "copy that the host waits for",
    "value read by the host", "shape read by the host", "operator", "event that the host waits for"};
std::array<std::atomic<int64_t>, KINDS> counts{};
std::array<std::atomic<bool>, KINDS> refused{};
std::mutex names_lock;
std::map<std::string, int64_t> names;

void count(Kind kind, const std::string& name) {
  TORCH_CHECK(!refused[kind], "refused: ", KIND_NAMES[kind], " (", name, ")");
  ++counts[kind];
  if (kind == OPERATORS) {
    std::lock_guard<std::mutex> guard(names_lock);
    ++names[name];
  }
}

// ---- memory ---------------------------------------------------------------------------------

void* aligned(size_t bytes) {
  if (!bytes) return nullptr;
  void* pointer = std::aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  TORCH_CHECK(pointer, "out of memory: ", bytes, " bytes");
  return pointer;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = aligned(bytes);
    if (bytes) std::memset(pointer, 0xFF, bytes);  // NaN: what nobody has written is no number
    return {pointer, pointer, &std::free, Device(MOCK, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} device_allocator;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;  // start and size of every pinned block

void unpin(void* pointer) {
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase(static_cast<const char*>(pointer));
  }
  std::free(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = aligned(bytes);
    if (pointer) {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned[static_cast<const char*>(pointer)] = bytes;
    }
    return {pointer, pointer, &unpin, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} pinned_allocator;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto block = pinned.upper_bound(static_cast<const char*>(pointer));
  if (block == pinned.begin()) return false;
  --block;
  return static_cast<const char*>(pointer) < block->first + block->second;
}

// The same memory as a tensor of the CPU, for the CPU's kernels.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  auto storage = tensor.storage();
  auto result = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(),
                              tensor.strides(), [storage](void*) {},
                              at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  if (tensor.is_conj()) result = at::_conj(result);
  if (tensor.is_neg()) result = at::_neg_view(result);
  return result;
}

Tensor device_tensor(c10::Storage storage, const Tensor& like, int64_t offset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(offset);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return result;
}

// Memory that a kernel of the CPU allocated, as a tensor of the device.
Tensor adopt(const Tensor& tensor, DeviceIndex index) {
  if (!tensor.defined() || !tensor.is_cpu()) return tensor;
  auto* owner = new c10::Storage(tensor.storage());
  c10::DataPtr memory(owner->mutable_data(), owner,
                      [](void* held) { delete static_cast<c10::Storage*>(held); },
                      Device(MOCK, index));
  c10::Storage storage(c10::Storage::use_byte_size_t(), owner->nbytes(), std::move(memory),
                       &device_allocator, /*resizable=*/true);
  return device_tensor(std::move(storage), tensor, tensor.storage_offset());
}

// ---- copies ---------------------------------------------------------------------------------

struct PendingCopy {
  Tensor host;    // the tensor of the host: the source, or what the host will read
  Tensor values;  // as they were when the copy was called
  bool to_device;
  int64_t number;  // in the order of the calls
};
std::mutex pending_lock;
std::vector<PendingCopy> pending;
int64_t copies = 0;  // that were pending so far

// The host has waited for the device, up to a copy: what it may now read is there.
void synchronize(int64_t last = INT64_MAX) {
  std::vector<PendingCopy> finished;
  {
    std::lock_guard<std::mutex> guard(pending_lock);
    auto later = std::find_if(pending.begin(), pending.end(),
                              [last](const PendingCopy& copy) { return copy.number > last; });
    finished.assign(pending.begin(), later);
    pending.erase(pending.begin(), later);
  }
  bool changed = false;
  for (auto& copy : finished) {
    auto bytes = copy.values.nbytes();
    if (copy.to_device) {
      changed |= std::memcmp(copy.host.const_data_ptr(), copy.values.const_data_ptr(), bytes) != 0;
    } else {
      std::memcpy(copy.host.mutable_data_ptr(), copy.values.const_data_ptr(), bytes);
    }
  }
  TORCH_CHECK(!changed, "pinned memory was overwritten before its copy to the device was waited for");
}

// What a tensor of the host holds once the copies called so far are done, as the device reads it.
Tensor host_values(const Tensor& tensor) {
  auto values = tensor.clone(at::MemoryFormat::Contiguous);
  auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  std::lock_guard<std::mutex> guard(pending_lock);
  for (auto& copy : pending) {
    if (copy.to_device) continue;
    auto* other = static_cast<const char*>(copy.host.const_data_ptr());
    auto* first = std::max(begin, other);
    auto* last = std::min(begin + tensor.nbytes(), other + copy.host.nbytes());
    if (first >= last) continue;
    std::memcpy(static_cast<char*>(values.mutable_data_ptr()) + (first - begin),
                static_cast<const char*>(copy.values.const_data_ptr()) + (first - other),
                last - first);
  }
  return values;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  bool to_device = source.is_cpu(), from_device = target.is_cpu();
  auto from = on_host(source), to = on_host(target);
  if (!to_device && !from_device) {
    count(OPERATORS, "copy_");
    to.copy_(from);
    return target;
  }
  const Tensor& host = to_device ? source : target;
  bool plain = host.is_contiguous() && !host.is_conj() && !host.is_neg() && host.numel();
  bool late = non_blocking && plain && from.dtype() == to.dtype() && is_pinned(host.const_data_ptr());
  count(to_device ? TO_DEVICE : FROM_DEVICE, "copy_");
  if (!late) {
    count(BLOCKING, "copy_");
    synchronize();
    to.copy_(from);
    return target;
  }
  auto values = to_device ? host_values(from) : from.clone(at::MemoryFormat::Contiguous);
  if (to_device) {
    to.copy_(values);
  } else {
    std::memset(host.mutable_data_ptr(), 0xFF, host.nbytes());
  }
  std::lock_guard<std::mutex> guard(pending_lock);
  pending.push_back({host, values, to_device, ++copies});
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  count(HOST_READS, "item");
  synchronize();
  return on_host(tensor).item();
}

// ---- operators ------------------------------------------------------------------------------

std::array<at::Generator, DEVICES>& device_generators() {
  static std::array<at::Generator, DEVICES> generators{at::detail::createCPUGenerator(),
                                                       at::detail::createCPUGenerator()};
  return generators;
}

// While an operator of the device draws, the CPU's generator has the state of the device's.
struct GeneratorSwap {
  explicit GeneratorSwap(DeviceIndex index)
      : own(at::detail::getDefaultCPUGenerator()), other(device_generators()[index]) {
    exchange();
  }
  ~GeneratorSwap() { exchange(); }
  void exchange() {
    auto state = own.get_state();
    own.set_state(other.get_state());
    other.set_state(state);
  }
  at::Generator own, other;
};

// The tensors of one call: of which device they are, and which tensors of the device the aliases
// on the host belong to.
struct Call {
  const std::string& name;
  bool indexed;  // tensors of indices may be on the CPU
  bool is_put;   // and this operator copies them; another had them copied before
  std::optional<Device> device = std::nullopt;
  std::vector<std::pair<Tensor, Tensor>> aliases{};  // on the host, on the device
  std::vector<std::pair<Tensor, Tensor>> outs{};     // results, which a kernel may resize

  void check(const Tensor& tensor, bool written, bool is_index) {
    if (!tensor.defined()) return;
    if (!tensor.is_cpu()) {
      if (!device) device = tensor.device();
      if (*device == tensor.device()) return;
    } else if (indexed && is_index) {
      if (is_put) {
        count(TO_DEVICE, name);
        count(BLOCKING, name);
      }
      return;
    } else if (!tensor.dim() && !written) {
      return;
    }
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two"
                " devices, ", device ? device->str() : std::string("mock"), " and ",
                tensor.device(), "! (in ", name, ")");
  }

  Tensor alias(const Tensor& tensor, bool out) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
    if (out) {
      outs.emplace_back(at::empty({0}, at::TensorOptions().dtype(tensor.dtype())), tensor);
      return outs.back().first;
    }
    aliases.emplace_back(on_host(tensor), tensor);
    return aliases.back().first;
  }

  Tensor result(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [host, original] : outs) {
      if (tensor.is_same(host)) return original;
    }
    for (auto& [host, original] : aliases) {
      if (tensor.is_same(host)) return original;
      if (tensor.storage().is_alias_of(host.storage())) {
        // a view may be of another type: the real numbers of complex ones
        auto start = original.storage_offset() * original.itemsize() / tensor.itemsize();
        return device_tensor(original.storage(), tensor, start + tensor.storage_offset());
      }
    }
    return adopt(tensor, device ? device->index() : current_device);
  }

  void write_outs() {
    for (auto& [host, original] : outs) {
      if (original.sizes() != host.sizes()) original.resize_(host.sizes());
      on_host(original).copy_(host);
    }
  }
};

// Each tensor of a value, and what `change` makes of it.
template <class Change>
c10::IValue map_tensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

bool is_mask(const Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.operator_name().name;
  // of x[mask], PyTorch has called nonzero before; of x[mask] = y, the kernel does
  bool is_put = name == "aten::_index_put_impl_" || name == "aten::index_put_";
  bool indexed = is_put || name == "aten::index";
  Call call{name, indexed, is_put};
  size_t arguments = schema.arguments().size(), begin = stack->size() - arguments;
  for (bool on_device : {true, false}) {  // the first tensor on the device names it
    for (size_t i = 0; i < arguments; ++i) {
      const auto& info = schema.arguments()[i].alias_info();
      bool written = info && info->isWrite();
      map_tensors((*stack)[begin + i], [&](const Tensor& tensor) {
        if (tensor.defined() && tensor.is_privateuseone() == on_device) {
          call.check(tensor, written, i > 0 && (*stack)[begin + i].isOptionalTensorList());
        }
        return tensor;
      });
    }
  }
  count(OPERATORS, name);
  bool values = op.hasTag(at::Tag::data_dependent_output);
  bool shape = !indexed && op.hasTag(at::Tag::dynamic_output_shape);
  if (is_put && (*stack)[begin + 2].toTensor().numel() != 1) {  // one value: no shape is needed
    map_tensors((*stack)[begin + 1], [&](const Tensor& tensor) {
      shape |= tensor.defined() && is_mask(tensor);
      return tensor;
    });
  }
  if (values) count(HOST_READS, name);
  if (shape) count(NONZERO, name);
  if (values || shape) synchronize();

  for (size_t i = 0; i < arguments; ++i) {
    auto& value = (*stack)[begin + i];
    bool out = schema.arguments()[i].is_out();
    if (value.isDevice()) {
      if (value.toDevice().type() != MOCK) continue;
      call.device = value.toDevice().has_index() ? value.toDevice() : Device(MOCK, current_device);
      value = Device(c10::DeviceType::CPU);
    } else {
      value = map_tensors(value, [&](const Tensor& tensor) { return call.alias(tensor, out); });
    }
  }
  {
    std::optional<GeneratorSwap> swap;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {
      swap.emplace(call.device ? call.device->index() : current_device);
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.write_outs();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    value = map_tensors(value, [&](const Tensor& tensor) { return call.result(tensor); });
  }
}

// ---- autocast -------------------------------------------------------------------------------

// Under autocast, products are computed in the lower precision and sums in float32, as on CUDA.
const char* const LOWERED[] = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "matmul", "linear",
                               "conv1d", "conv2d", "lstm_cell", "gru_cell", "rnn_tanh_cell",
                               "rnn_relu_cell"};
const char* const RAISED[] = {"exp", "log", "cumsum", "softmax.int", "log_softmax.int", "mse_loss",
                              "nll_loss", "cross_entropy_loss", "binary_cross_entropy_with_logits",
                              "layer_norm"};

template <bool lower>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  auto type = lower ? at::autocast::get_autocast_dtype(MOCK) : at::kFloat;
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    (*stack)[i] = map_tensors((*stack)[i], [&](const Tensor& tensor) {
      return tensor.defined() ? at::autocast::cached_cast(type, tensor, MOCK) : tensor;
    });
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (auto name : LOWERED) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<true>>());
  }
  for (auto name : RAISED) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<false>>());
  }
}

// ---- tensors without values -----------------------------------------------------------------

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty_memory_format(c10::IntArrayRef sizes, std::optional<at::ScalarType> type,
                           std::optional<at::Layout>, std::optional<Device> device,
                           std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(MOCK, current_device)));
  return at::detail::empty_generic(sizes, &device_allocator, KEYS, c10::dtype_or_default(type),
                                   format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                     std::optional<at::ScalarType> type, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(MOCK, current_device)));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, KEYS,
                                           c10::dtype_or_default(type));
}

const Tensor& resize(const Tensor& tensor, c10::IntArrayRef sizes,
                     std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(tensor.device());
  return at::native::resize_(tensor, sizes, format);
}

Tensor as_strided(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                  std::optional<int64_t> offset) {
  return at::cpu::as_strided(tensor, sizes, strides, offset);
}

Tensor view(const Tensor& tensor, c10::IntArrayRef sizes) { return at::cpu::view(tensor, sizes); }

Tensor reshape_alias(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::cpu::_reshape_alias(tensor, sizes, strides);
}

Tensor& set_part(Tensor& result, at::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                 c10::IntArrayRef strides) {
  return at::cpu::set_(result, storage, offset, sizes, strides);
}

Tensor& set_storage(Tensor& result, at::Storage storage) {
  int64_t size = storage.nbytes() / result.dtype().itemsize();
  return at::cpu::set_(result, storage, 0, {size}, {1});
}

Tensor& set_tensor(Tensor& result, const Tensor& source) {
  return at::cpu::set_(result, source.storage(), source.storage_offset(), source.sizes(),
                       source.strides());
}

// ---- cells that PyTorch computes in one operator on accelerators alone -----------------------

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Tensor host_or_zeros(const std::optional<Tensor>& tensor, const Tensor& like) {
  return tensor && tensor->defined() ? on_host(*tensor) : at::zeros_like(like);
}

Tensor with_bias(const Tensor& gates, const std::optional<Tensor>& bias) {
  return bias && bias->defined() ? on_host(gates) + on_host(*bias) : on_host(gates);
}

Three lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  count(OPERATORS, "aten::_thnn_fused_lstm_cell");
  auto gates = with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias);
  auto part = gates.chunk(4, 1);
  auto i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(), o = part[3].sigmoid();
  auto cy = f * on_host(cx) + i * g;
  auto index = cx.device().index();
  return {adopt(o * cy.tanh(), index), adopt(cy, index), adopt(at::cat({i, f, g, o}, 1), index)};
}

Three lstm_cell_backward(const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy,
                         const Tensor& cx, const Tensor& cy, const Tensor& workspace, bool bias) {
  count(OPERATORS, "aten::_thnn_fused_lstm_cell_backward_impl");
  auto index = cx.device().index();
  auto c = on_host(cy).tanh();
  auto part = on_host(workspace).chunk(4, 1);
  auto i = part[0], f = part[1], g = part[2], o = part[3];
  auto dh = host_or_zeros(grad_hy, c), dc = host_or_zeros(grad_cy, c) + dh * o * (1 - c * c);
  auto gates = at::cat({dc * g * i * (1 - i), dc * on_host(cx) * f * (1 - f), dc * i * (1 - g * g),
                        dh * c * o * (1 - o)}, 1);
  return {adopt(gates, index), adopt(dc * f, index),
          bias ? adopt(gates.sum(0), index) : Tensor()};
}

Two gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
             const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  count(OPERATORS, "aten::_thnn_fused_gru_cell");
  auto in = with_bias(input_gates, input_bias).chunk(3, 1);
  auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  auto r = (in[0] + hidden[0]).sigmoid(), z = (in[1] + hidden[1]).sigmoid();
  auto n = (in[2] + r * hidden[2]).tanh(), h = on_host(hx);
  auto index = hx.device().index();
  return {adopt(n + z * (h - n), index), adopt(at::cat({r, z, n, h, hidden[2]}, 1), index)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace,
                                                                     bool bias) {
  count(OPERATORS, "aten::_thnn_fused_gru_cell_backward");
  auto dy = on_host(grad_hy);
  auto part = on_host(workspace).chunk(5, 1);
  auto r = part[0], z = part[1], n = part[2], h = part[3], hn = part[4];
  auto dz = dy * (h - n) * z * (1 - z), dn = dy * (1 - z) * (1 - n * n);
  auto dr = dn * hn * r * (1 - r);
  auto index = grad_hy.device().index();
  auto in = at::cat({dr, dz, dn}, 1), hidden = at::cat({dr, dz, dn * r}, 1);
  return {adopt(in, index), adopt(hidden, index), adopt(dy * z, index),
          bias ? adopt(in.sum(0), index) : Tensor(), bias ? adopt(hidden.sum(0), index) : Tensor()};
}

// ---- convolutions, which a backend must provide ----------------------------------------------

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                   bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  count(OPERATORS, "aten::convolution");
  auto own = bias ? std::optional<Tensor>(on_host(*bias)) : std::nullopt;
  return adopt(at::convolution(on_host(input), on_host(weight), own, stride, padding, dilation,
                               transposed, output_padding, groups),
               input.device().index());
}

Three convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                           c10::IntArrayRef stride, c10::IntArrayRef padding,
                           c10::IntArrayRef dilation, bool transposed,
                           c10::IntArrayRef output_padding, int64_t groups,
                           std::array<bool, 3> needed) {
  count(OPERATORS, "aten::convolution_backward");
  std::vector<int64_t> bias{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  auto [x, w, b] = at::convolution_backward(on_host(grad), on_host(input), on_host(weight), bias,
                                            stride, padding, dilation, transposed, output_padding,
                                            groups, needed);
  auto index = grad.device().index();
  return {adopt(x, index), adopt(w, index), adopt(b, index)};
}

// ---- registration ---------------------------------------------------------------------------

void wait(int64_t last) {
  count(EVENTS, "synchronize");
  synchronize(last);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return MOCK; }
  Device getDevice() const override { return {MOCK, current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "mock has ", int(DEVICES), " devices, got ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    auto previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const c10::Stream&, const DeviceIndex,
              const c10::EventFlag) const override {
    std::lock_guard<std::mutex> guard(pending_lock);
    if (!*event) *event = new int64_t;
    *static_cast<int64_t*>(*event) = copies;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    return synchronize(*static_cast<int64_t*>(event)), true;
  }
  bool queryStream(const c10::Stream&) const override { return synchronize(), true; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<int64_t*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void synchronizeStream(const c10::Stream&) const override { wait(INT64_MAX); }
  void synchronizeEvent(void* event) const override { wait(*static_cast<int64_t*>(event)); }
  void synchronizeDevice(const DeviceIndex) const override { wait(INT64_MAX); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice({MOCK, index}); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice({MOCK, index}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return device_generators().at(index < 0 ? current_device : index);
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
};

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// A copy resolves lazy conjugates itself; resolving them before would copy again, for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_part);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  // PyTorch divides these into one operator a tensor where no backend has a kernel; GPUs have.
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (op.name.rfind("aten::_foreach_", 0) != 0) continue;
    std::string name = op.name.substr(6);
    if (!op.overload_name.empty()) name += "." + op.overload_name;
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

// ---- what the tests call --------------------------------------------------------------------

TORCH_LIBRARY(mock, library) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(MOCK, &device_allocator);

  library.def("counts() -> int[]", [] {
    return std::vector<int64_t>(counts.begin(), counts.end());
  });
  library.def("refuse(int kind, bool on) -> ()",
              [](int64_t kind, bool on) { refused.at(kind) = on; });
  // "name number" lines of all operators since the start
  library.def("operators() -> str", [] {
    std::lock_guard<std::mutex> guard(names_lock);
    std::string lines;
    for (const auto& [name, number] : names) lines += name + " " + std::to_string(number) + "\n";
    return lines;
  });
  library.def("synchronize() -> ()", [] { wait(INT64_MAX); });
  library.def("current_device() -> int", [] { return int64_t(current_device); });
  library.def("set_device(int index) -> ()",
              [](int64_t index) { Guard().setDevice({MOCK, DeviceIndex(index)}); });
  library.def("manual_seed(int seed, int index) -> ()", [](int64_t seed, int64_t index) {
    device_generators().at(index).set_current_seed(seed);
  });
  library.def("get_rng_state(int index) -> Tensor",
              [](int64_t index) { return device_generators().at(index).get_state(); });
  library.def("set_rng_state(Tensor state, int index) -> ()",
              [](const Tensor& state, int64_t index) {
                device_generators().at(index).set_state(state);
              });
}

}  // namespace
