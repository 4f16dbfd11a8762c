#include "backends/metal/moe/expert_table.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "backends/metal/gemm/product_launches.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::metal {

using kernels::ExpertMatrix;
using kernels::ExpertPart;
using kernels::kExpertParts;
using kernels::kStripOutputs;

namespace {

const PreparedStrips& StripsOf(const ExpertOperand& operand) {
  return static_cast<const PreparedStrips&>(*operand.weights);
}

bool HaveSameTable(const StripPart& table, const StripPart& other) {
  return table.bytes == other.bytes &&
         (table.bytes == 0 ||
          std::memcmp(table.data, other.data, static_cast<size_t>(table.bytes)) == 0);
}

FunctionConstants ConstantsOf(const ExpertOperand& operand, bool gated) {
  FunctionConstants constants = WeightConstants(StripsOf(operand));
  constants[MARLIN_CONSTANT_HAS_BIAS] = operand.bias != nullptr ? 1 : 0;
  constants[MARLIN_CONSTANT_GATED] = gated ? 1 : 0;
  return constants;
}

int32_t KindOf(const FunctionConstants& constants) {
  return kernels::WeightKind(
      constants[MARLIN_CONSTANT_CODE_KIND], constants[MARLIN_CONSTANT_CODE_BITS],
      constants[MARLIN_CONSTANT_SCALE_TYPE], constants[MARLIN_CONSTANT_GROUP_EXTRA],
      constants[MARLIN_CONSTANT_GROUP_SPAN], constants[MARLIN_CONSTANT_HAS_BIAS],
      constants[MARLIN_CONSTANT_GATED],
      kernels::GroupTypes(constants[MARLIN_CONSTANT_EXTRA_TYPE],
                          constants[MARLIN_CONSTANT_GLOBAL_DIVIDES],
                          constants[MARLIN_CONSTANT_GROUP_LOG2], constants[MARLIN_CONSTANT_WHOLE_K],
                          constants[MARLIN_CONSTANT_INTEGER_ZEROS]));
}

/// Whether one launch can accumulate gate and up together: both are strips of the same kind.
bool CanPair(const ExpertOperands& expert) {
  if (expert.up.weights == nullptr) return expert.inner() % kStripOutputs == 0;
  return ConstantsOf(expert.gate, false) == ConstantsOf(expert.up, false) &&
         HaveSameTable(StripsOf(expert.gate).table(), StripsOf(expert.up).table());
}

int64_t BiasCount(const ExpertOperand& operand) {
  return operand.bias == nullptr ? 0 : operand.weights->spec.n;
}

void AddToGroups(const MatrixGroup& added, std::vector<MatrixGroup>* groups) {
  for (MatrixGroup& group : *groups) {
    if (group.constants != added.constants) continue;
    group.parts = std::max(group.parts, added.parts);
    group.columns = std::max(group.columns, added.columns);
    group.chunks = std::max(group.chunks, added.chunks);
    group.routed = group.routed || added.routed;
    group.shared = group.shared || added.shared;
    group.one_table = group.one_table && HaveSameTable(group.table, added.table);
    return;
  }
  groups->push_back(added);
}

}  // namespace

class ExpertTableBuilder {
 public:
  ExpertTableBuilder(const LayerExperts& layer, Driver& driver, ExpertTable* table)
      : layer_(layer), driver_(driver), table_(*table) {}

  Status Build() {
    MARLIN_RETURN_IF_ERROR(Allocate());
    const size_t experts = layer_.experts.size();
    for (size_t e = 0; e < experts; ++e) AddExpert(layer_.experts[e], MatricesOf(e));
    AddExpert(layer_.shared, MatricesOf(experts));
    if (layer_.shared.present() && layer_.shared_gate != nullptr) {
      const ExpertOperand score{layer_.shared_gate, 0, nullptr};
      ExpertMatrix& matrix = MatricesOf(experts)[kernels::kPartScore];
      matrix = Describe(score);
      SetKind(score, false, {kernels::kPartScore, 1}, &matrix, &table_.score_);
    }
    // Vector loads of four.
    table_.inner_stride_ = RoundUp(table_.inner_stride_, 4);
    std::vector<MemoryRange> ranges;
    ranges.reserve(ranges_.size());
    for (const auto& [data, bytes] : ranges_) ranges.push_back({data, bytes});
    table_.reached_ = driver_.Reach(ranges);
    return Status();
  }

 private:
  Status Allocate() {
    int64_t biases = 0;
    const auto count = [&](const ExpertOperands& expert) {
      biases += BiasCount(expert.gate) + BiasCount(expert.up) + BiasCount(expert.down);
    };
    for (const ExpertOperands& expert : layer_.experts) count(expert);
    count(layer_.shared);
    const auto matrices = (static_cast<int64_t>(layer_.experts.size()) + 1) * kExpertParts;
    table_.matrix_bytes_ = matrices * int64_t{sizeof(ExpertMatrix)};
    const int64_t biases_at = RoundUp(table_.matrix_bytes_, 64);
    const int64_t bias_bytes = biases * int64_t{sizeof(float)};
    MARLIN_ASSIGN_OR_RETURN(table_.memory_,
                            AllocateMemory<std::byte>(driver_, biases_at + bias_bytes));
    matrices_ = reinterpret_cast<ExpertMatrix*>(table_.memory_.get());
    next_bias_ = reinterpret_cast<float*>(table_.memory_.get() + biases_at);
    if (bias_bytes > 0) ranges_[next_bias_] = bias_bytes;
    ExpertMatrix none{};
    none.kind = kernels::kNoKind;
    std::fill_n(matrices_, matrices, none);
    return Status();
  }

  ExpertMatrix* MatricesOf(size_t expert) const { return matrices_ + expert * kExpertParts; }

  void AddExpert(const ExpertOperands& expert, ExpertMatrix* to) {
    if (!expert.present()) return;
    if (&expert != &layer_.shared) ++table_.present_;
    AddGateAndUp(expert, to);
    ExpertMatrix& down = to[kernels::kPartDown];
    down = Describe(expert.down);
    SetKind(expert.down, false, {kernels::kPartDown, 1}, &down, &table_.down_);
  }

  void AddGateAndUp(const ExpertOperands& expert, ExpertMatrix* to) {
    const bool paired = CanPair(expert);
    const bool apart = expert.up.weights != nullptr;
    const int64_t inner = expert.inner();
    ExpertMatrix& gate = to[kernels::kPartGate];
    ExpertMatrix& up = to[kernels::kPartUp];
    gate = Describe(expert.gate);
    if (paired) {
      up = apart ? Describe(expert.up) : SecondHalf(expert.gate, gate);
      gate.n = up.n = static_cast<int32_t>(inner);
      SetKind(expert.gate, true, {kernels::kPartGate, 1}, &gate, &table_.first_);
    } else {
      SetKind(expert.gate, false, {kernels::kPartGate, 1}, &gate, &table_.first_);
      if (apart) {
        up = Describe(expert.up);
        SetKind(expert.up, false, {kernels::kPartGate, 2}, &up, &table_.first_);
      }
      table_.ungated_inner_ = std::max(table_.ungated_inner_, inner);
    }
    table_.inner_stride_ = std::max(table_.inner_stride_, paired ? inner : 2 * inner);
  }

  /// The matrix, of no kind yet.
  ExpertMatrix Describe(const ExpertOperand& operand) {
    const PreparedStrips& strips = StripsOf(operand);
    const kernels::Parameters parameters = WeightParameters(strips, operand.index);
    ExpertMatrix matrix{};
    matrix.codes = AddressOf(strips.codes(operand.index));
    matrix.scales = AddressOf(strips.scales(operand.index));
    matrix.extras = AddressOf(strips.extras(operand.index));
    matrix.table = AddressOf(strips.table());
    if (operand.bias != nullptr) {
      std::copy_n(operand.bias, BiasCount(operand), next_bias_);
      matrix.bias = driver_.AddressOf(next_bias_);
      next_bias_ += BiasCount(operand);
    }
    matrix.kind = kernels::kNoKind;
    matrix.n = parameters.n;
    matrix.k = parameters.k;
    matrix.chunks = parameters.chunks;
    matrix.groups = parameters.groups;
    matrix.group_size = parameters.group_size;
    matrix.code_offset = parameters.code_offset;
    matrix.global_scale = parameters.global_scale;
    return matrix;
  }

  /// The up half of gate and up side by side, which begins with a whole strip.
  static ExpertMatrix SecondHalf(const ExpertOperand& operand, ExpertMatrix both) {
    const PreparedStrips& strips = StripsOf(operand);
    const WeightsSpec& spec = strips.spec;
    const int64_t skipped = spec.n / 2 / kStripOutputs;
    const int64_t group_values = skipped * both.groups * kStripOutputs;
    both.codes += static_cast<uint64_t>(skipped * strips.chunks() * ChunkBytes(CodeBitsOf(spec)));
    both.scales += static_cast<uint64_t>(group_values * DTypeBytes(ScaleDType(spec.scale_type)));
    both.extras += static_cast<uint64_t>(group_values * ExtraBytes(spec));
    if (both.bias != 0) both.bias += static_cast<uint64_t>(spec.n / 2) * sizeof(float);
    return both;
  }

  /// `part` and `parts`: of the launches that compute the matrix.
  void SetKind(const ExpertOperand& operand, bool gated, std::pair<ExpertPart, int> parts,
               ExpertMatrix* matrix, std::vector<MatrixGroup>* groups) const {
    MatrixGroup group;
    group.constants = ConstantsOf(operand, gated);
    group.part = parts.first;
    group.parts = parts.second;
    group.columns = matrix->n;
    group.chunks = matrix->chunks;
    group.shared = matrix >= MatricesOf(layer_.experts.size());
    group.routed = !group.shared;
    group.table = StripsOf(operand).table();
    matrix->kind = KindOf(group.constants);
    AddToGroups(group, groups);
  }

  /// 0: there is no such array.
  uint64_t AddressOf(const StripPart& part) {
    if (part.bytes == 0) return 0;
    ranges_[part.data] = part.bytes;
    return driver_.AddressOf(part.data);
  }

  const LayerExperts& layer_;
  Driver& driver_;
  ExpertTable& table_;
  ExpertMatrix* matrices_ = nullptr;
  float* next_bias_ = nullptr;
  std::map<const void*, int64_t> ranges_;
};

Result<std::shared_ptr<const ExpertTable>> ExpertTable::Make(const LayerExperts& layer,
                                                             Driver& driver) {
  auto table = std::make_shared<ExpertTable>();
  MARLIN_RETURN_IF_ERROR(ExpertTableBuilder(layer, driver, table.get()).Build());
  return std::shared_ptr<const ExpertTable>(std::move(table));
}

}  // namespace marlin::metal
