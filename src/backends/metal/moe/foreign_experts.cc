#include "backends/metal/moe/foreign_experts.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "backends/metal/gemm/foreign_product.h"
#include "backends/metal/moe/expert_launches.h"
#include "backends/metal/runtime/memory_driver.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

using kernels::ExpertMatrix;

constexpr int64_t kBlockAlignment = 256;

uint64_t AddressIn(ForeignOperand operand, int64_t offset) {
  return (static_cast<uint64_t>(operand) << kForeignOperandShift) + static_cast<uint64_t>(offset);
}

template <typename T>
T* PointerIn(ForeignOperand operand, int64_t offset) {
  return reinterpret_cast<T*>(AddressIn(operand, offset));  // NOLINT(performance-no-int-to-ptr)
}

/// An address of the image in the device's memory; 0: the matrix lacks the array.
uint64_t Moved(uint64_t invented, uint64_t image) {
  const ForeignPlace place = PlaceOf(invented);
  return place.operand == ForeignOperand::kImage ? image + static_cast<uint64_t>(place.offset) : 0;
}

const WeightsSpec* SpecOf(const ExpertOperand& operand) {
  return &static_cast<const PreparedStrips&>(*operand.weights).spec;
}

Status Refused(const std::string& what) { return Status(Code::kInvalidArgument, what); }

}  // namespace

/// Gives addresses in the image.
class ForeignExperts::ImageMemory final : public MemoryDriver {
 public:
  /// Memory that others allocated.
  void Add(const void* data, int64_t bytes) {
    blocks_.push_back({{data, bytes}, bytes_});
    bytes_ += RoundUp(bytes, kBlockAlignment);
  }
  Result<void*> Allocate(int64_t bytes) override {
    MARLIN_ASSIGN_OR_RETURN(void* data, MemoryDriver::Allocate(bytes));
    Add(data, bytes);
    return data;
  }
  uint64_t AddressOf(const void* data) const override {
    const auto* const byte = static_cast<const std::byte*>(data);
    for (const Block& block : blocks_) {
      const auto* const first = static_cast<const std::byte*>(block.memory.data);
      if (byte < first || byte >= first + block.memory.bytes) continue;
      return AddressIn(ForeignOperand::kImage, block.offset + (byte - first));
    }
    return reinterpret_cast<uintptr_t>(data);
  }

  int64_t bytes() const { return bytes_; }
  void CopyTo(std::byte* image) const {
    for (const Block& block : blocks_) {
      std::memcpy(image + block.offset, block.memory.data, static_cast<size_t>(block.memory.bytes));
    }
  }

 private:
  struct Block {
    MemoryRange memory;
    int64_t offset;
  };
  std::vector<Block> blocks_;
  int64_t bytes_ = 0;
};

ForeignExperts::ForeignExperts() : memory_(std::make_unique<ImageMemory>()) {}
ForeignExperts::~ForeignExperts() = default;

int64_t ForeignExperts::image_bytes() const { return memory_->bytes(); }

Status ForeignExperts::AddMatrices(const char* name, const ForeignMatrices& matrices,
                                   ExpertOperand ExpertOperands::*part) {
  size_t count = 0;
  for (const QuantizedWeights* weights : matrices.weights) {
    MARLIN_ASSIGN_OR_RETURN(std::shared_ptr<const PreparedStrips> strips, PrepareForeign(*weights));
    // Whether there is a kernel for such weights.
    MARLIN_RETURN_IF_ERROR(ForeignLaunches(*strips, {}, {}).status());
    memory_->Add(strips->codes(0).data, strips->bytes);
    const auto end = count + static_cast<size_t>(strips->spec.experts);
    operands_.resize(std::max(operands_.size(), end));
    for (int64_t index = 0; count < end; ++index, ++count) {
      operands_[count].*part = {strips.get(), index, nullptr};
    }
    strips_.push_back(std::move(strips));
  }
  if (matrices.biases.empty()) return Status();
  const size_t n = count == 0 ? 0 : static_cast<size_t>(strips_.back()->spec.n);
  if (matrices.biases.size() != count * n) {
    return Refused(std::string(name) + "_bias: expected [" + std::to_string(count) + ", " +
                   std::to_string(n) + "], got " + std::to_string(matrices.biases.size()) +
                   " values");
  }
  for (size_t e = 0; e < count; ++e) (operands_[e].*part).bias = matrices.biases.data() + e * n;
  return Status();
}

Status ForeignExperts::CheckShapes() const {
  if (operands_.empty()) return Refused("experts: there are none");
  const WeightsSpec* const first = SpecOf(operands_.front().gate);
  for (size_t e = 0; e < operands_.size(); ++e) {
    const auto& [gate, up, down] = operands_[e];
    const bool has_up = operands_.front().up.weights != nullptr;
    if (gate.weights == nullptr || down.weights == nullptr || (up.weights != nullptr) != has_up) {
      return Refused("experts: the matrices are of different numbers");
    }
    const int64_t hidden = first->k;
    const int64_t inner = SpecOf(down)->k;
    const bool halves = !has_up || (SpecOf(up)->k == hidden && SpecOf(up)->n == inner);
    const bool same = SpecOf(gate)->k == hidden && SpecOf(gate)->n == first->n;
    if (!halves || !same || SpecOf(gate)->n != (has_up ? inner : 2 * inner) ||
        SpecOf(down)->n != hidden) {
      return Refused("experts: the shapes of expert " + std::to_string(e) + " do not match");
    }
  }
  return Status();
}

Result<std::shared_ptr<ForeignExperts>> ForeignExperts::Make(const ForeignLayer& layer) {
  const std::shared_ptr<ForeignExperts> made(new ForeignExperts);
  MARLIN_RETURN_IF_ERROR(made->AddMatrices("gate", layer.gate, &ExpertOperands::gate));
  MARLIN_RETURN_IF_ERROR(made->AddMatrices("up", layer.up, &ExpertOperands::up));
  MARLIN_RETURN_IF_ERROR(made->AddMatrices("down", layer.down, &ExpertOperands::down));
  MARLIN_RETURN_IF_ERROR(made->CheckShapes());
  made->gate_ = layer.gate_options;
  made->batch_invariant_ = layer.batch_invariant;
  made->layer_.experts = made->operands_;
  made->layer_.hidden = SpecOf(made->operands_.front().down)->n;
  MARLIN_ASSIGN_OR_RETURN(made->table_, ExpertTable::Make(made->layer_, *made->memory_));
  return made;
}

void ForeignExperts::WriteImage(std::byte* image, uint64_t address) {
  memory_->CopyTo(image);
  const MemoryRange table = table_->matrices();
  auto* const matrices =
      reinterpret_cast<ExpertMatrix*>(image + PlaceOf(memory_->AddressOf(table.data)).offset);
  const auto count = static_cast<size_t>(table.bytes) / sizeof(ExpertMatrix);
  for (ExpertMatrix& matrix : std::span(matrices, count)) {
    for (uint64_t ExpertMatrix::*array :
         {&ExpertMatrix::codes, &ExpertMatrix::scales, &ExpertMatrix::extras, &ExpertMatrix::table,
          &ExpertMatrix::bias}) {
      matrix.*array = Moved(matrix.*array, address);
    }
  }
  for (std::shared_ptr<const PreparedStrips>& strips : strips_) {
    const std::shared_ptr<const PreparedStrips> shapes = strips->WithoutMemory();
    for (ExpertOperands& expert : operands_) {
      for (ExpertOperand* operand : {&expert.gate, &expert.up, &expert.down}) {
        if (operand->weights == strips.get()) operand->weights = shapes.get();
        operand->bias = nullptr;  // The caller's; the table has them.
      }
    }
    strips = shapes;
  }
}

ExpertsProblem ForeignExperts::ProblemOf(const ForeignExpertsCall& call) const {
  ExpertsProblem problem;
  problem.tokens = call.rows;
  problem.top_k = 1;
  problem.x_type = call.type;
  problem.out_type = call.type;
  problem.gate = gate_;
  if (batch_invariant_) problem.determinism = Determinism::kBatchInvariant;
  return problem;
}

ForeignExpertLaunches ForeignExperts::Launches(const ForeignExpertsCall& call,
                                               const DeviceShape& device,
                                               const PassLimits& limits) const {
  const ExpertsProblem problem = ProblemOf(call);
  const int64_t most = TokensOfPass(problem, layer_, table_->inner_stride(), limits);
  const int64_t row_bytes = hidden() * DTypeBytes(call.type);
  ForeignExpertLaunches made;
  for (int64_t first = 0; first < call.rows; first += most, ++made.passes) {
    PlannedPass planned;
    planned.pass.tokens = std::min(most, call.rows - first);
    planned.pass.top_k = 1;
    planned.pass.present = table_->present_experts();
    planned.pass.batch_invariant = batch_invariant_;
    planned.tiling = TileExperts(planned.pass, device);
    ExpertsCall part;
    const int64_t x_offset =
        (call.one_row ? 0 : first * row_bytes) + (call.aligned ? 0 : int64_t{kForeignUnaligned});
    part.x = PointerIn<void>(ForeignOperand::kX, x_offset);
    part.x_stride = call.one_row ? 0 : hidden();
    part.ids = PointerIn<int32_t>(ForeignOperand::kIds, first * int64_t{sizeof(int32_t)});
    part.weights = PointerIn<float>(ForeignOperand::kOnes, 0);
    part.out = PointerIn<void>(ForeignOperand::kOut, first * row_bytes);
    part.out_stride = hidden();
    part.workspace = PointerIn<std::byte>(ForeignOperand::kWorkspace, 0);
    auto* const error = PointerIn<ErrorWords::Word>(
        ForeignOperand::kErrors, made.passes * int64_t{sizeof(ErrorWords::Word)});
    made.workspace_bytes =
        std::max(made.workspace_bytes, LayOutArrays(planned, layer_, *table_, nullptr).bytes);
    for (KernelLaunch& launch : ExpertLaunches(planned, problem, layer_, *table_, part, error)) {
      SetPlaces(&launch);
      made.launches.push_back(std::move(launch));
    }
  }
  return made;
}

void ForeignExperts::SetPlaces(KernelLaunch* launch) const {
  for (KernelBuffer& buffer : launch->buffers) {
    // The table, of which the launches have this object's copy.
    const uint64_t address = memory_->AddressOf(buffer.data);
    buffer.data = reinterpret_cast<const void*>(address);  // NOLINT(performance-no-int-to-ptr)
  }
  launch->reached = nullptr;  // The image, which the framework keeps resident.
}

}  // namespace marlin::metal
