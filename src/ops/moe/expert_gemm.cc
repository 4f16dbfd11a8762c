// One product of every selected expert: rows are grouped by expert on the host, multiplied expert
// by expert, and added in the order of the selections on the device.
#include <fmt/core.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "marlin/decoder.h"
#include "marlin/moe.h"
#include "ops/device/checks.h"
#include "ops/device/device.h"
#include "plan/gemm/host_staging.h"

namespace marlin {
namespace {

/// The operands of ExpertGemm.
struct ExpertGemmCall {
  const TensorView& x;
  const PreparedWeights& matrices;
  const TensorView& ids;
  const TensorView& weights;
  const MutableTensorView& out;

  int64_t tokens() const { return x.dim(0); }
  int64_t top_k() const { return ids.dim(1); }
  int64_t n() const { return matrices.spec().n; }
};

Status CheckSelected(const char* name, const TensorView& view, DType dtype, int64_t tokens) {
  if (view.dtype() == dtype && view.rank() == 2 && view.dim(0) == tokens) {
    if (view.ElementCount() == 0) return {};
    if (view.IsContiguous()) return CheckMemory(name, view);
  }
  return Invalid(fmt::format("{}: expected contiguous {} [{}, top_k], got {} {}", name,
                             DTypeName(dtype), tokens, DTypeName(view.dtype()),
                             view.shape().ToString()));
}

Status CheckCall(const Device& device, const ExpertGemmCall& call) {
  MARLIN_RETURN_IF_ERROR(CheckWeights(device, call.matrices));
  if (call.x.rank() != 2) {
    return Invalid(fmt::format("x: expected rank 2, got {}", call.x.rank()));
  }
  const int64_t tokens = call.tokens();
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", call.x, {tokens, call.matrices.spec().k}));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", call.out, {tokens, call.n()}));
  MARLIN_RETURN_IF_ERROR(CheckSelected("ids", call.ids, DType::kI32, tokens));
  MARLIN_RETURN_IF_ERROR(CheckSelected("weights", call.weights, DType::kF32, tokens));
  if (!(call.weights.shape() == call.ids.shape())) {
    return Invalid(fmt::format("weights: expected {} as ids, got {}", call.ids.shape().ToString(),
                               call.weights.shape().ToString()));
  }
  if (!(Checked(tokens) * Checked(call.top_k()) * Checked(call.n()) * Checked(4)).valid()) {
    return Status(Code::kOutOfMemory, "ids: the products of all selections do not fit in memory");
  }
  for (const auto& [name, view] :
       {std::pair{"x", call.x}, {"ids", call.ids}, {"weights", call.weights}}) {
    MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", call.out, name, view, false));
  }
  return {};
}

/// The selections sorted by expert: every expert has adjacent slots, in order of tokens.
struct Slots {
  std::vector<int64_t> first;     ///< [experts + 1]: the slots of each expert.
  std::vector<int32_t> token_of;  ///< [slots]
  std::vector<int32_t> slot_of;   ///< [top_k, tokens]
  std::vector<float> weight_of;   ///< [slots]
};

Result<Slots> SortSelections(const std::vector<int32_t>& ids, const std::vector<float>& weights,
                             int64_t top_k, int64_t experts) {
  Slots made;
  const auto count = static_cast<int64_t>(ids.size());
  const int64_t tokens = count / top_k;
  made.first.assign(static_cast<size_t>(experts) + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t id = ids[static_cast<size_t>(i)];
    if (id < 0 || id >= experts) {
      return Invalid(fmt::format("ids: expected 0..{} (experts), got {} at [{}, {}]", experts - 1,
                                 id, i / top_k, i % top_k));
    }
    ++made.first[static_cast<size_t>(id) + 1];
  }
  for (size_t e = 0; e + 1 < made.first.size(); ++e) made.first[e + 1] += made.first[e];
  std::vector<int64_t> next(made.first.begin(), made.first.end() - 1);
  made.token_of.resize(ids.size());
  made.slot_of.resize(ids.size());
  made.weight_of.resize(ids.size());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = next[static_cast<size_t>(ids[static_cast<size_t>(i)])]++;
    const auto at = static_cast<size_t>(slot);
    made.token_of[at] = static_cast<int32_t>(i / top_k);
    made.weight_of[at] = weights[static_cast<size_t>(i)];
    made.slot_of[static_cast<size_t>(i % top_k * tokens + i / top_k)] = static_cast<int32_t>(slot);
  }
  return made;
}

template <typename T>
Result<std::vector<T>> ToHost(const Backend& backend, const TensorView& view) {
  std::vector<T> made(static_cast<size_t>(view.ElementCount()));
  MARLIN_RETURN_IF_ERROR(backend.CopyToHost(made.data(), view.data(), view.ByteCount()));
  return made;
}

template <typename T>
Result<DeviceBuffer> ToDevice(const Device& device, const std::vector<T>& values) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  MARLIN_ASSIGN_OR_RETURN(DeviceBuffer made, DeviceBuffer::Allocate(device, bytes));
  MARLIN_RETURN_IF_ERROR(made.CopyFrom(values.data(), bytes));
  return made;
}

/// products [slots, n] of f32: every slot's row of x times its expert's matrix, times its weight.
Status MultiplySlots(const Device& device, const ExpertGemmCall& call, const Slots& slots,
                     const GemmOptions& options, void* products) {
  const auto count = static_cast<int64_t>(slots.token_of.size());
  const int64_t k = call.x.dim(1);
  const int64_t row_bytes = k * DTypeBytes(call.x.dtype());
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer rows,
                          DeviceBuffer::Allocate(device, count * row_bytes));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer weights, ToDevice(device, slots.weight_of));
  const MutableTensorView gathered(rows.data(), call.x.dtype(), {count, k});
  MARLIN_RETURN_IF_ERROR(LookUpRows(device, call.x, slots.token_of, gathered, options.stream));
  for (size_t e = 0; e + 1 < slots.first.size(); ++e) {
    const int64_t first = slots.first[e];
    const int64_t m = slots.first[e + 1] - first;
    if (m == 0) continue;
    GemmOptions own = options;
    own.expert = static_cast<int64_t>(e);
    own.row_weight = TensorView(static_cast<float*>(weights.data()) + first, DType::kF32, {m});
    const TensorView from(static_cast<std::byte*>(rows.data()) + first * row_bytes, call.x.dtype(),
                          {m, k});
    const MutableTensorView to(static_cast<float*>(products) + first * call.n(), DType::kF32,
                               {m, call.n()});
    MARLIN_RETURN_IF_ERROR(Gemm(device, from, call.matrices, to, own));
  }
  return device.Synchronize(options.stream);
}

}  // namespace

Status ExpertGemm(const Device& device, const TensorView& x, const PreparedWeights& matrices,
                  const TensorView& ids, const TensorView& weights, const MutableTensorView& out,
                  const GemmOptions& options) {
  const ExpertGemmCall call{x, matrices, ids, weights, out};
  MARLIN_RETURN_IF_ERROR(CheckCall(device, call));
  if (!options.bias.empty() || !options.row_weight.empty() || options.gated ||
      options.activation != Activation::kNone || options.expert != 0) {
    return Invalid("options: only accuracy, determinism, kernel and stream apply to all experts");
  }
  if (call.tokens() == 0 || call.n() == 0) return {};
  const Backend& backend = Internals::Impl(device).backend();
  MARLIN_RETURN_IF_ERROR(device.Synchronize(options.stream));
  MARLIN_ASSIGN_OR_RETURN(const std::vector<int32_t> chosen, ToHost<int32_t>(backend, ids));
  MARLIN_ASSIGN_OR_RETURN(const std::vector<float> factors, ToHost<float>(backend, weights));
  const int64_t top_k = call.top_k();
  AddRowsCall add;
  add.tokens = call.tokens();
  add.width = call.n();
  add.out = out.data();
  add.out_stride = out.stride(0);
  add.out_type = out.dtype();
  if (top_k == 0) return backend.AddRows(add, options.stream);

  MARLIN_ASSIGN_OR_RETURN(const Slots slots,
                          SortSelections(chosen, factors, top_k, matrices.spec().experts));
  const auto count = static_cast<int64_t>(slots.token_of.size());
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer products,
                          DeviceBuffer::Allocate(device, count * call.n() * 4));
  MARLIN_RETURN_IF_ERROR(MultiplySlots(device, call, slots, options, products.data()));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer places, ToDevice(device, slots.slot_of));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer sums,
                          DeviceBuffer::Allocate(device, call.tokens() * call.n() * 4));
  add.rows = static_cast<const float*>(products.data());
  add.slots = count;
  for (int64_t s = 0; s < top_k; ++s) {
    AddRowsCall one = add;
    one.slot_of = static_cast<const int32_t*>(places.data()) + s * call.tokens();
    one.sum = s == 0 ? nullptr : static_cast<const float*>(sums.data());
    if (s + 1 < top_k) {
      one.out = sums.data();
      one.out_stride = call.n();
      one.out_type = DType::kF32;
    }
    MARLIN_RETURN_IF_ERROR(backend.AddRows(one, options.stream));
  }
  return device.Synchronize(options.stream);
}

}  // namespace marlin
