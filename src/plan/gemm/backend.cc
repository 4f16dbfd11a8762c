#include "plan/gemm/backend.h"

#include <chrono>
#include <utility>

#include "base/cholesky.h"
#include "layout/plain_weights.h"

namespace marlin {
namespace {

class HostMarks final : public StreamMarks {
 public:
  HostMarks(const Backend& backend, void* stream) : backend_(backend), stream_(stream) {}

  Status Mark() override {
    Status waited = backend_.Synchronize(stream_);
    marks_.push_back(Clock::now());
    return waited;
  }
  Result<std::vector<double>> Take() override {
    std::vector<double> seconds;
    for (size_t i = 1; i < marks_.size(); ++i) {
      seconds.push_back(std::chrono::duration<double>(marks_[i] - marks_[i - 1]).count());
    }
    marks_.clear();
    return seconds;
  }

 private:
  using Clock = std::chrono::steady_clock;
  const Backend& backend_;
  void* stream_;
  std::vector<Clock::time_point> marks_;
};

}  // namespace

WeightsSpec Backend::TakenSpec(const WeightsSpec& spec, PreparedFor use) const {
  WeightsSpec taken = spec;
  if (!KeepsSparse(spec, use)) taken.sparsity = Sparsity::kDense;
  if (!KeepsOddWidths(spec.format)) taken.format = WiderFormat(spec.format);
  return KeepsTwoLevels(taken) ? taken : FlatSpec(taken);
}

Result<std::unique_ptr<StreamMarks>> Backend::MakeMarks(void* stream, bool /*holds*/) const {
  return std::unique_ptr<StreamMarks>(std::make_unique<HostMarks>(*this, stream));
}

Result<std::unique_ptr<Cholesky>> Backend::MakeCholesky() const {
  return std::unique_ptr<Cholesky>();
}

GemmCall RowsOf(const GemmCall& call, int64_t first, int64_t count) {
  GemmCall part = call;
  part.desc.m = count;
  part.a =
      static_cast<const std::byte*>(call.a) + first * call.a_stride * DTypeBytes(call.desc.a_type);
  part.c = static_cast<std::byte*>(call.c) + first * call.c_stride * DTypeBytes(call.desc.c_type);
  if (call.epilogue.row_weight != nullptr) part.epilogue.row_weight += first;
  return part;
}

GemmDesc DescribeWeights(const PreparedWeights::Storage& weights) {
  const WeightsSpec& spec = weights.spec;
  GemmDesc desc;
  desc.n = spec.n;
  desc.k = spec.k;
  desc.format = spec.format;
  desc.group_size = spec.group_size;
  desc.scale_type = spec.scale_type;
  desc.has_zeros = spec.has_zeros;
  desc.has_biases = spec.has_biases;
  desc.weights = weights.traits;
  return desc;
}

std::shared_ptr<const PlannedGemm> PlanCache::Find(const GemmDesc& desc,
                                                   std::string_view forced) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.desc == desc && entry.forced == forced) return entry.plan;
  }
  return nullptr;
}

void PlanCache::Add(const GemmDesc& desc, std::string_view forced,
                    std::shared_ptr<const PlannedGemm> plan) {
  Entry entry{desc, std::string(forced), std::move(plan)};
  const std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.size() < kCapacity) {
    entries_.push_back(std::move(entry));
    return;
  }
  std::swap(entries_[next_], entry);
  next_ = (next_ + 1) % kCapacity;
}

}  // namespace marlin
