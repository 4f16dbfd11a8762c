#include "experts_run.h"

#include <fmt/format.h>

#include <cstring>
#include <numeric>
#include <utility>

#include "base/macros.h"
#include "device_runtime.h"
#include "reference/elements.h"
#include "store_element.h"

namespace marlin::conformance {
namespace {

// Padding elements between the rows of padded matrices.
constexpr int64_t kXPadding = 13;
constexpr int64_t kOutPadding = 11;

// Copies the values of some tokens, `count` each.
template <typename T>
GuardedBuffer GatherTokens(const std::vector<T>& values, const std::vector<int64_t>& tokens,
                           int64_t count) {
  GuardedBuffer memory(static_cast<int64_t>(tokens.size()) * count *
                       static_cast<int64_t>(sizeof(T)));
  auto* to = reinterpret_cast<T*>(memory.data());
  for (const int64_t token : tokens) {
    to = std::copy_n(values.begin() + token * count, count, to);
  }
  return memory;
}

}  // namespace

Result<std::shared_ptr<const PreparedExperts>> PreparedExperts::Make(const Device& device,
                                                                     const ExpertsData& data) {
  auto made = std::make_shared<PreparedExperts>();
  std::vector<Expert> experts;
  for (const ExpertData& expert : data.experts) {
    MARLIN_ASSIGN_OR_RETURN(experts.emplace_back(), made->Place(device, expert));
  }
  SharedExpert shared;
  MARLIN_ASSIGN_OR_RETURN(shared.expert, made->Place(device, data.shared));
  MARLIN_ASSIGN_OR_RETURN(const ExpertMatrix gate, made->Place(device, data.shared_gate));
  shared.gate = gate.weights;
  MARLIN_ASSIGN_OR_RETURN(made->set_, ExpertSet::Make(device, experts, shared));
  return std::shared_ptr<const PreparedExperts>(std::move(made));
}

Result<ExpertMatrix> PreparedExperts::Place(const Device& device, const MatrixData& matrix) {
  ExpertMatrix placed;
  if (matrix.weights == nullptr) return placed;
  auto found = weights_.find(matrix.weights.get());
  if (found == weights_.end()) {
    MARLIN_ASSIGN_OR_RETURN(PreparedWeights prepared, Prepare(*matrix.weights, device));
    found = weights_.emplace(matrix.weights.get(), std::move(prepared)).first;
  }
  placed.weights = found->second;
  placed.index = matrix.index;
  if (matrix.bias.empty()) return placed;
  GuardedBuffer bias(static_cast<int64_t>(matrix.bias.size()) * 4);
  std::memcpy(bias.data(), matrix.bias.data(), matrix.bias.size() * 4);
  MARLIN_ASSIGN_OR_RETURN(DeviceImage image, DeviceImage::Make(device, std::move(bias)));
  biases_.push_back(std::move(image));
  placed.bias =
      TensorView(biases_.back().data(), DType::kF32, {static_cast<int64_t>(matrix.bias.size())});
  return placed;
}

Result<Expert> PreparedExperts::Place(const Device& device, const ExpertData& expert) {
  Expert placed;
  MARLIN_ASSIGN_OR_RETURN(placed.gate, Place(device, expert.gate));
  MARLIN_ASSIGN_OR_RETURN(placed.up, Place(device, expert.up));
  MARLIN_ASSIGN_OR_RETURN(placed.down, Place(device, expert.down));
  return placed;
}

Result<bool> PreparedExperts::Changed() const {
  for (const DeviceImage& bias : biases_) {
    MARLIN_ASSIGN_OR_RETURN(const bool changed, bias.Changed());
    if (changed) return true;
  }
  return false;
}

Result<ExpertsRun> ExpertsRun::Make(const Device& device, std::string_view backend,
                                    std::shared_ptr<const PreparedExperts> experts,
                                    const ExpertsData& data, const std::vector<int64_t>& tokens) {
  ExpertsRun run(device, std::move(experts), data);
  run.tokens_ = static_cast<int64_t>(tokens.size());
  run.x_stride_ = data.c.hidden + (data.c.padded ? kXPadding : 0);
  run.out_stride_ = data.c.hidden + (data.c.padded ? kOutPadding : 0);
  MARLIN_ASSIGN_OR_RETURN(run.stream_, MakeStream(backend));
  MARLIN_RETURN_IF_ERROR(run.PlaceOperands(data, tokens));
  MARLIN_RETURN_IF_ERROR(run.Plan());
  return run;
}

Status ExpertsRun::PlaceOperands(const ExpertsData& data, const std::vector<int64_t>& tokens) {
  const auto buffer = [&](int64_t stride, DType type) {
    const int64_t bytes = DTypeBytes(type);
    return GuardedBuffer(((tokens_ - 1) * stride + c_.hidden) * bytes, c_.misaligned ? bytes : 0);
  };
  GuardedBuffer x = buffer(x_stride_, c_.x_type);
  for (int64_t t = 0; t < tokens_; ++t) {
    const double* const row = data.x.data() + tokens[static_cast<size_t>(t)] * c_.hidden;
    for (int64_t i = 0; i < c_.hidden; ++i) {
      StoreElement(x.data(), c_.x_type, t * x_stride_ + i, row[i]);
    }
  }
  MARLIN_ASSIGN_OR_RETURN(x_, DeviceImage::Make(device_, std::move(x)));
  MARLIN_ASSIGN_OR_RETURN(ids_,
                          DeviceImage::Make(device_, GatherTokens(data.ids, tokens, c_.top_k)));
  MARLIN_ASSIGN_OR_RETURN(weights_,
                          DeviceImage::Make(device_, GatherTokens(data.weights, tokens, c_.top_k)));
  MARLIN_ASSIGN_OR_RETURN(out_, DeviceImage::Make(device_, buffer(out_stride_, c_.out_type)));
  return Status();
}

Status ExpertsRun::Plan() {
  ExpertsProblem problem;
  problem.tokens = tokens_;
  problem.top_k = c_.top_k;
  problem.x_type = c_.x_type;
  problem.out_type = c_.out_type;
  problem.gate = GateOf(c_);
  problem.accuracy = c_.accuracy;
  problem.determinism = c_.batch_invariant ? Determinism::kBatchInvariant : Determinism::kDefault;
  problem.allow_bf16_activations = c_.allow_bf16;
  MARLIN_ASSIGN_OR_RETURN(plan_, PlanExperts(device_, problem, experts_->set()));
  if (c_.own_workspace || plan_.workspace_bytes() == 0) return Status();
  MARLIN_ASSIGN_OR_RETURN(workspace_,
                          DeviceImage::Make(device_, GuardedBuffer(plan_.workspace_bytes())));
  return Status();
}

Status ExpertsRun::Run() {
  MARLIN_RETURN_IF_ERROR(out_.Poison());
  if (workspace_.data() != nullptr) MARLIN_RETURN_IF_ERROR(workspace_.Poison());
  const Shape rows{tokens_, c_.hidden};
  const Shape selections{tokens_, c_.top_k};
  ExpertsArguments arguments;
  arguments.stream = stream_.get();
  if (workspace_.data() != nullptr) {
    arguments.workspace = workspace_.data();
    arguments.workspace_bytes = plan_.workspace_bytes();
  }
  const Status ran =
      plan_.Run({x_.data(), c_.x_type, rows, {x_stride_, 1}},
                {ids_.data(), DType::kI32, selections}, {weights_.data(), DType::kF32, selections},
                {out_.data(), c_.out_type, rows, {out_stride_, 1}}, arguments);
  const Status waited = device_.Synchronize(stream_.get());
  MARLIN_RETURN_IF_ERROR(ran);
  MARLIN_RETURN_IF_ERROR(waited);
  MARLIN_RETURN_IF_ERROR(out_.Download());
  if (workspace_.data() != nullptr) MARLIN_RETURN_IF_ERROR(workspace_.DownloadGuards());
  return CheckDamage();
}

Status ExpertsRun::CheckDamage() {
  const auto damaged = [](const std::string& what) { return Status(Code::kInternal, what); };
  if (!out_.host().Intact()) return damaged("output: wrote outside of it");
  if (workspace_.data() != nullptr && !workspace_.host().Intact()) {
    return damaged("workspace: wrote outside of it");
  }
  for (const DeviceImage* input : {&x_, &ids_, &weights_}) {
    MARLIN_ASSIGN_OR_RETURN(const bool changed, input->Changed());
    if (changed) return damaged("inputs: a guard or an operand was written to");
  }
  MARLIN_ASSIGN_OR_RETURN(const bool changed, experts_->Changed());
  if (changed) return damaged("biases: a guard or an operand was written to");
  const int64_t bytes = DTypeBytes(c_.out_type);
  for (int64_t t = 0; t + 1 < tokens_; ++t) {
    if (!out_.host().Untouched((t * out_stride_ + c_.hidden) * bytes,
                               (t + 1) * out_stride_ * bytes)) {
      return damaged(fmt::format("output: wrote between rows {} and {}", t, t + 1));
    }
  }
  return Status();
}

double ExpertsRun::Output(int64_t token, int64_t n) const {
  return reference::LoadElement(out_.host().data(), c_.out_type, token * out_stride_ + n);
}

uint32_t ExpertsRun::Bits(int64_t token, int64_t n) const {
  const int64_t bytes = DTypeBytes(c_.out_type);
  uint32_t bits = 0;
  std::memcpy(&bits, out_.host().data() + (token * out_stride_ + n) * bytes,
              static_cast<size_t>(bytes));
  return bits;
}

std::vector<int64_t> AllTokens(const ExpertsData& data) {
  std::vector<int64_t> tokens(static_cast<size_t>(data.c.tokens));
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

}  // namespace marlin::conformance
