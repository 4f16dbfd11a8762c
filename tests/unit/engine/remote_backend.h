// A fake GPU that runs whole models: the CPU's kernels behind memory that the host cannot access
// and with asynchronous calls. A host access to the device's memory ends the process with a signal.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "ops/device/device.h"
#include "plan/gemm/backend.h"
#include "plan/gemm/host_staging.h"
#include "plan/moe/experts.h"
#include "plan/step/decoder_backend.h"
#include "plan/step/decoder_calls.h"

namespace marlin::testing {

/// Device addresses are host addresses plus this offset, which makes them unmapped.
inline constexpr uintptr_t kFarAway = uintptr_t{1} << 60;

template <typename T>
T* LocalAddress(T* remote) {
  return remote == nullptr ? nullptr
                           : reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(remote) - kFarAway);
}
template <typename View>
View Local(const View& view) {
  View local(LocalAddress(view.data()), view.dtype(), view.shape());
  for (int i = 0; i < view.rank(); ++i) local.set_stride(i, view.stride(i));
  return local;
}

/// An in-order queue whose work runs when a caller waits. The first error is sticky.
class RemoteQueue {
 public:
  Status Put(std::function<Status()> work) {
    const std::lock_guard lock(mutex_);
    (recording_ ? recorded_ : work_).push_back(std::move(work));
    return {};
  }
  /// Work that is put until EndRecording is kept, and not done.
  void BeginRecording() {
    const std::lock_guard lock(mutex_);
    recording_ = true;
  }
  std::vector<std::function<Status()>> EndRecording() {
    const std::lock_guard lock(mutex_);
    recording_ = false;
    return std::exchange(recorded_, {});
  }
  Status Finish() {
    const std::lock_guard lock(mutex_);
    for (const std::function<Status()>& work : work_) {
      if (error_.ok()) error_ = work();
    }
    work_.clear();
    return error_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::function<Status()>> work_;
  std::vector<std::function<Status()>> recorded_;
  bool recording_ = false;
  Status error_;
};

/// The operations that a test disables.
struct RemoteOptions {
  std::vector<DecoderOperation> lacking = {};
  std::vector<DecoderOperation> left_to_host = {};  ///< Without a kernel.
  bool fuses_experts = true;
  bool fuses_by_rows = false;  ///< Experts of one row in one run, of several in another within it.
  bool products_only = false;
  bool plans_experts = false;  ///< Runs experts without biases.
  bool records = false;        ///< For one thread at a time.
  int64_t free_memory = 0;
  int64_t pass_tokens = 512;
  std::function<bool(int64_t bytes)> refuses = {};  ///< Allocations that fail.
  std::function<Status()> fails = {};               ///< The status of decoder operations.
};

/// Work that is put again. As a stream it is itself, which keeps its workspaces apart.
class RemoteRecording final : public RecordedWork {
 public:
  explicit RemoteRecording(RemoteQueue& queue) : queue_(queue) {}
  /// Does the work, and records it: workspaces have their final sizes then.
  Status Run(const std::function<Status(void*)>& enqueue) {
    MARLIN_RETURN_IF_ERROR(enqueue(this));
    queue_.BeginRecording();
    const Status status = enqueue(this);
    work_ = queue_.EndRecording();
    return status;
  }
  Status Launch(void* /*stream*/) const override {
    for (const std::function<Status()>& work : work_) MARLIN_RETURN_IF_ERROR(queue_.Put(work));
    return {};
  }
  void* stream() const override { return const_cast<RemoteRecording*>(this); }

 private:
  RemoteQueue& queue_;
  std::vector<std::function<Status()>> work_;
};

class RemoteDecoder final : public DecoderBackend {
 public:
  RemoteDecoder(const Device& host, RemoteQueue& queue, RemoteOptions options)
      : host_(host), queue_(queue), options_(std::move(options)) {}

  bool reads_host_memory() const override { return false; }
  bool Has(DecoderOperation operation) const override {
    return std::find(options_.lacking.begin(), options_.lacking.end(), operation) ==
           options_.lacking.end();
  }
  bool RunsItself(DecoderOperation operation) const override {
    const auto& left = options_.left_to_host;
    return Has(operation) && std::find(left.begin(), left.end(), operation) == left.end();
  }
  int64_t cache_page_tokens() const override { return 64 * 4; }
  int64_t sampler_state_bytes(int64_t vocab) const override {
    return Internals::Impl(host_).decoder()->sampler_state_bytes(vocab);
  }
  bool Fuses(StepKind kind) const override {
    return kind == StepKind::kExperts && options_.fuses_experts;
  }
  Result<FusedRun> Fuse(const StepDescription& step,
                        std::span<const StepOperation> operations) const override;
  Result<FusedRun> FuseWithin(const StepDescription& step,
                              std::span<const StepOperation> operations) const override;
  int fused_runs() const { return fused_runs_; }
  /// How often such runs ran.
  int fused_calls() const { return fused_calls_; }
  void CountFusedCall() const { ++fused_calls_; }
  /// Rows of all lookups: the tokens that were fed, and those whose logits not all tokens of a pass
  /// have.
  int64_t looked_up() const { return looked_up_; }

  Status Run(const LookUpRowsCall& call, const OperationContext&) const override {
    looked_up_ += call.ids.dim(0);
    return Put([this, call] {
      return Now(LookUpRowsCall{Local(call.table), Local(call.ids), Local(call.out)});
    });
  }
  Status Run(const LookUpWeightRowsCall& call, const OperationContext&) const override {
    return Put([this, call] {
      return Now(LookUpWeightRowsCall{call.table, Local(call.ids), Local(call.out)});
    });
  }
  Status Run(const ConvertCall& call, const OperationContext&) const override {
    return Put([this, call] { return Now(ConvertCall{Local(call.x), Local(call.out)}); });
  }
  Status Run(const RmsNormCall& call, const OperationContext&) const override {
    return Put([this, call] {
      return Now(RmsNormCall{Local(call.x), Local(call.weight), call.epsilon, Local(call.out)});
    });
  }
  Status Run(const AddToCall& call, const OperationContext&) const override {
    return Put([this, call] { return Now(AddToCall{Local(call.y), Local(call.x), call.scale}); });
  }
  Status Run(const AddRmsNormCall& call, const OperationContext&) const override {
    return Put([this, call] {
      return Now(AddRmsNormCall{Local(call.block), Local(call.residual), Local(call.weight),
                                call.epsilon, Local(call.out)});
    });
  }
  Status Run(const RotateAndAppendCall& call, const OperationContext&) const override {
    RotaryEmbedding rotary = call.rotary;
    rotary.inverse_frequencies = Local(rotary.inverse_frequencies);
    const AttentionHeads heads{Local(call.heads.queries), Local(call.heads.keys),
                               Local(call.heads.values)};
    const HeadNorms norms{Local(call.norms.queries), Local(call.norms.keys), call.norms.epsilon};
    return Put([this, heads, norms, rotary, paged = Paged(call.rows, call.cache)] {
      const PagedCache cache = paged.Cache();
      return Now(RotateAndAppendCall{heads, norms, rotary, paged.rows, cache});
    });
  }
  Status Run(const ApplyRotaryCall& call, const OperationContext&) const override {
    RotaryEmbedding rotary = call.rotary;
    rotary.inverse_frequencies = Local(rotary.inverse_frequencies);
    return Put([this, rotary, positions = Local(call.positions), x = Local(call.x)] {
      return Now(ApplyRotaryCall{rotary, positions, x});
    });
  }
  Status Run(const CenterRowsCall& call, const OperationContext&) const override {
    return Put([this, call] { return Now(CenterRowsCall{Local(call.x)}); });
  }
  Status Run(const ScaleByPositionCall& call, const OperationContext&) const override {
    return Put([this, scale = call.scale, positions = Local(call.positions), x = Local(call.x)] {
      return Now(ScaleByPositionCall{scale, positions, x});
    });
  }
  Status Run(const ApplyGateCall& call, const OperationContext&) const override {
    return Put([this, gate = Local(call.gate), up = Local(call.up), out = Local(call.out),
                options = call.options] {
      return Now(ApplyGateCall{gate, up, out, options});
    });
  }
  Status Run(const ApplySigmoidCall& call, const OperationContext&) const override {
    return Put([this, call] { return Now(ApplySigmoidCall{Local(call.x)}); });
  }
  Status Run(const ScaleAndCapCall& call, const OperationContext&) const override {
    return Put([this, call] {
      return Now(ScaleAndCapCall{Local(call.x), call.scale, call.softcap});
    });
  }
  Status Run(const AppendToCacheCall& call, const OperationContext&) const override {
    return Put([this, keys = Local(call.keys), values = Local(call.values),
                paged = Paged(call.rows, call.cache)] {
      const PagedCache cache = paged.Cache();
      return Now(AppendToCacheCall{keys, values, paged.rows, cache});
    });
  }
  Status Run(const PagedAttentionCall& call, const OperationContext&) const override {
    AttentionOptions options = call.options;
    options.sinks = Local(options.sinks);
    return Put([this, queries = Local(call.queries), paged = Paged(call.rows, call.cache),
                out = Local(call.out), options] {
      const PagedCache cache = paged.Cache();
      return Now(PagedAttentionCall{queries, paged.rows, cache, out, options});
    });
  }
  Status Run(const HeadProductCall& call, const OperationContext&) const override {
    return Put([this, x = Local(call.x), weights = Local(call.weights), out = Local(call.out),
                options = call.options] {
      return Now(HeadProductCall{x, weights, out, options});
    });
  }
  Status Run(const ExpandLatentsCall& call, const OperationContext&) const override {
    return Put([this, latents = Copy(call.latents), pages = Local(call.pages),
                tokens = Local(call.tokens), keys = Local(call.key_weights),
                values = Local(call.value_weights), heads = Copy(call.heads)] {
      const PagedCache from = latents.Cache();
      const PagedCache to = heads.Cache();
      return Now(ExpandLatentsCall{from, pages, tokens, keys, values, to});
    });
  }
  Status Run(const RouteTokensCall& call, const OperationContext&) const override {
    RouterOptions options = call.options;
    options.choice_bias = Local(options.choice_bias);
    return Put([this, logits = Local(call.logits), options, ids = Local(call.ids),
                weights = Local(call.weights)] {
      return Now(RouteTokensCall{logits, options, ids, weights});
    });
  }
  Status Run(const ResetSamplerCall& call, const OperationContext&) const override {
    return Put([this, options = call.options, vocab = call.vocab, prompt = Local(call.prompt),
                state = Local(call.state)] {
      return Now(ResetSamplerCall{options, vocab, prompt, state});
    });
  }
  Status Run(const SampleTokensCall& call, const OperationContext&) const override {
    return Put([this, call] {
      return Now(SampleTokensCall{Local(call.logits), Local(call.states), Local(call.tokens),
                                  Local(call.state_rows), call.marks, Local(call.allowed),
                                  Local(call.allowed_rows), Local(call.drafts)});
    });
  }
  Status Run(const LogProbabilitiesCall& call, const OperationContext&) const override {
    return Put([this, call] {
      const auto& [of_ids, likely_ids, of_likely] = call.out;
      return Now(LogProbabilitiesCall{Local(call.logits),
                                      Local(call.ids),
                                      {Local(of_ids), Local(likely_ids), Local(of_likely)}});
    });
  }
  Status Run(const AdvanceTokensCall& call, const OperationContext&) const override {
    return Put([this, call] {
      return Now(AdvanceTokensCall{Local(call.sampled), Local(call.stop_ids), Local(call.ids),
                                   Local(call.positions), Local(call.state_rows),
                                   Local(call.counts), Local(call.tokens)});
    });
  }

  Status Put(std::function<Status()> work) const {
    if (options_.fails) MARLIN_RETURN_IF_ERROR(options_.fails());
    return queue_.Put(std::move(work));
  }
  /// Runs a call with local memory.
  template <typename Call>
  Status Now(const Call& call) const {
    const DecoderBackend& decoder = *Internals::Impl(host_).decoder();
    MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer workspace,
                            AlignedBuffer::Allocate(decoder.WorkspaceBytes(call)));
    return decoder.Run(call, {nullptr, workspace.data()});
  }
  const Device& host() const { return host_; }
  const RemoteOptions& options() const { return options_; }
  /// Adds the same weights, prepared for the host.
  void AddTwin(const PreparedWeights::Storage* storage, PreparedWeights twin) {
    twins_[storage] = std::move(twin);
  }
  const PreparedWeights& TwinOf(const PreparedWeights& weights) const {
    return twins_.at(Internals::Storage(weights));
  }

 private:
  struct CacheCopy {
    PagedCache cache;
    std::vector<void*> slabs;
    PagedCache Cache() const {
      PagedCache local = cache;
      local.slabs = slabs;
      return local;
    }
  };
  struct PagedCopy : CacheCopy {
    SequenceRows rows;
  };
  static CacheCopy Copy(const PagedCache& cache) {
    CacheCopy copy{cache, {cache.slabs.begin(), cache.slabs.end()}};
    for (void*& slab : copy.slabs) slab = LocalAddress(slab);
    return copy;
  }
  static PagedCopy Paged(const SequenceRows& rows, const PagedCache& cache) {
    return {Copy(cache), {Local(rows.positions), Local(rows.first_rows), Local(rows.block_tables)}};
  }

  Device host_;
  RemoteQueue& queue_;
  RemoteOptions options_;
  std::map<const PreparedWeights::Storage*, PreparedWeights> twins_;
  mutable int fused_runs_ = 0;
  mutable int fused_calls_ = 0;
  mutable int64_t looked_up_ = 0;
};

/// Enqueues the CPU's plan.
class RemoteGemm final : public PlannedGemm {
 public:
  RemoteGemm(RemoteQueue& queue, std::shared_ptr<const PlannedGemm> plan)
      : PlannedGemm(plan->kernel(), plan->variant(), plan->workspace_bytes()),
        queue_(queue),
        plan_(std::move(plan)) {}

  Status Run(const GemmCall& call) const override {
    GemmCall local = call;
    local.a = LocalAddress(call.a);
    local.c = LocalAddress(call.c);
    local.epilogue.bias = LocalAddress(call.epilogue.bias);
    local.epilogue.row_weight = LocalAddress(call.epilogue.row_weight);
    local.workspace = LocalAddress(call.workspace);
    return queue_.Put([plan = plan_, local] { return plan->Run(local); });
  }

 private:
  RemoteQueue& queue_;
  const std::shared_ptr<const PlannedGemm> plan_;
};

/// Enqueues the CPU's plan of experts, which have no biases.
class RemoteExperts final : public PlannedExperts {
 public:
  RemoteExperts(RemoteQueue& queue, std::shared_ptr<const PlannedExperts> plan)
      : queue_(queue), plan_(std::move(plan)) {}

  int64_t workspace_bytes() const override { return plan_->workspace_bytes(); }
  Status Run(const ExpertsCall& call) const override {
    ExpertsCall local = call;
    local.x = LocalAddress(call.x);
    local.ids = LocalAddress(call.ids);
    local.weights = LocalAddress(call.weights);
    local.out = LocalAddress(call.out);
    local.workspace = LocalAddress(call.workspace);
    return queue_.Put([plan = plan_, local] { return plan->Run(local); });
  }

 private:
  RemoteQueue& queue_;
  const std::shared_ptr<const PlannedExperts> plan_;
};

/// Host memory whose copies are done once the queue has run.
class RemoteStaging final : public HostStaging {
 public:
  RemoteStaging(RemoteQueue& queue, AlignedBuffer buffer)
      : HostStaging(buffer.data(), buffer.size()), queue_(queue), buffer_(std::move(buffer)) {}
  ~RemoteStaging() override { (void)queue_.Finish(); }

  Status Record(void* /*stream*/) override { return {}; }
  Status Wait() override {
    const Status status = queue_.Finish();
    return status.code() == Code::kInvalidArgument ? Status() : status;
  }

 private:
  RemoteQueue& queue_;
  const AlignedBuffer buffer_;
};

class RemoteBackend final : public Backend {
 public:
  RemoteBackend(const Device& host, RemoteOptions options)
      : cpu_(&Internals::Impl(host).backend()), decoder_(host, queue_, std::move(options)) {}

  DeviceInfo Info() const override {
    DeviceInfo info = cpu_->Info();
    info.name = info.backend = "remote";
    return info;
  }
  DeviceProperties Properties() const override { return cpu_->Properties(); }
  std::span<const KernelDesc> Kernels() const override { return cpu_->Kernels(); }
  Result<std::shared_ptr<const PreparedWeights::Storage>> Prepare(
      const QuantizedWeights& weights, const PrepareOptions& options) const override {
    ++uploads_;
    MARLIN_ASSIGN_OR_RETURN(auto storage, cpu_->Prepare(weights, options));
    std::const_pointer_cast<PreparedWeights::Storage>(storage)->backend = this;
    MARLIN_ASSIGN_OR_RETURN(PreparedWeights twin, marlin::Prepare(weights, decoder_.host()));
    decoder_.AddTwin(storage.get(), std::move(twin));
    return storage;
  }
  double Cost(const KernelDesc& kernel, const GemmDesc& desc) const override {
    return cpu_->Cost(kernel, desc);
  }
  Result<std::shared_ptr<const PlannedGemm>> Plan(
      const KernelDesc& kernel, const GemmDesc& desc, const KernelVariant& variant,
      const PreparedWeights::Storage& weights) const override {
    MARLIN_ASSIGN_OR_RETURN(auto plan, cpu_->Plan(kernel, desc, variant, weights));
    return {std::make_shared<const RemoteGemm>(queue_, std::move(plan))};
  }
  Result<std::shared_ptr<const PlannedExperts>> PlanExperts(
      const ExpertsProblem& problem, const LayerExperts& experts,
      const SelectGemm& select) const override {
    if (!decoder_.options().plans_experts) return Backend::PlanExperts(problem, experts, select);
    MARLIN_ASSIGN_OR_RETURN(auto plan, cpu_->PlanExperts(problem, experts, select));
    return {std::make_shared<const RemoteExperts>(queue_, std::move(plan))};
  }
  bool plans_experts() const override { return decoder_.options().plans_experts; }
  bool records() const override { return decoder_.options().records; }
  int64_t free_memory() const override { return decoder_.options().free_memory; }
  int64_t pass_tokens() const override { return decoder_.options().pass_tokens; }
  Result<std::unique_ptr<RecordedWork>> Record(
      const std::function<Status(void* stream)>& enqueue) const override {
    ++recordings_;
    auto recording = std::make_unique<RemoteRecording>(queue_);
    MARLIN_RETURN_IF_ERROR(recording->Run(enqueue));
    return {std::unique_ptr<RecordedWork>(std::move(recording))};
  }
  Result<std::unique_ptr<HostStaging>> AllocateStaging(int64_t bytes) const override {
    MARLIN_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Allocate(bytes));
    return {std::make_unique<RemoteStaging>(queue_, std::move(buffer))};
  }
  Status AddRows(const AddRowsCall& call, void* /*stream*/) const override {
    AddRowsCall local = call;
    local.sum = LocalAddress(call.sum);
    local.rows = LocalAddress(call.rows);
    local.slot_of = LocalAddress(call.slot_of);
    local.out = LocalAddress(call.out);
    return queue_.Put([this, local] { return cpu_->AddRows(local, nullptr); });
  }
  Status Dequantize(const PreparedWeights::Storage& weights, int64_t expert,
                    const MutableTensorView& out, void* stream) const override {
    return cpu_->Dequantize(weights, expert, Local(out), stream);
  }
  const DecoderBackend* decoder() const override {
    return decoder_.options().products_only ? nullptr : &decoder_;
  }
  Result<void*> Allocate(int64_t bytes) const override {
    ++uploads_;
    const std::function<bool(int64_t bytes)>& refuses = decoder_.options().refuses;
    if (refuses && refuses(bytes)) return Status(Code::kOutOfMemory, "remote: no memory");
    MARLIN_ASSIGN_OR_RETURN(void* data, cpu_->Allocate(bytes));
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) + kFarAway);
  }
  /// Waits for the device first, as cudaFree does.
  void Free(void* data) const override {
    (void)queue_.Finish();
    cpu_->Free(LocalAddress(data));
  }
  Status CopyToDevice(void* device, const void* host, int64_t bytes) const override {
    ++copies_;
    MARLIN_RETURN_IF_ERROR(queue_.Finish());
    return cpu_->CopyToDevice(LocalAddress(device), host, bytes);
  }
  Status CopyToHost(void* host, const void* device, int64_t bytes) const override {
    MARLIN_RETURN_IF_ERROR(queue_.Finish());
    return cpu_->CopyToHost(host, LocalAddress(device), bytes);
  }
  Status CopyToDeviceAsync(void* device, const void* host, int64_t bytes,
                           void* /*stream*/) const override {
    return queue_.Put([this, to = LocalAddress(device), host, bytes] {
      return cpu_->CopyToDevice(to, host, bytes);
    });
  }
  Status CopyToHostAsync(void* host, const void* device, int64_t bytes,
                         void* /*stream*/) const override {
    return queue_.Put([this, host, from = LocalAddress(device), bytes] {
      return cpu_->CopyToHost(host, from, bytes);
    });
  }
  Status Synchronize(void* /*stream*/) const override {
    ++waits_;
    return queue_.Finish();
  }
  bool calls_block() const override { return false; }

  int waits() const { return waits_; }
  int uploads() const { return uploads_; }
  int copies() const { return copies_; }  ///< Synchronous ones to the device: one per pass.
  int recordings() const { return recordings_; }
  const RemoteDecoder& remote_decoder() const { return decoder_; }

 private:
  const Backend* cpu_;
  mutable RemoteQueue queue_;
  mutable RemoteDecoder decoder_;
  mutable int waits_ = 0;
  mutable int uploads_ = 0;
  mutable int copies_ = 0;
  mutable int recordings_ = 0;
};

/// A layer's experts as one operation, from the step's description alone: the host that runs the
/// model never learns how tokens are routed.
class FusedExperts final : public FusedOperations {
 public:
  /// `takes`: the numbers of rows; null: any.
  FusedExperts(const RemoteDecoder& decoder, const ExpertsStep& step, Accuracy accuracy,
               bool (*takes)(int64_t rows) = nullptr)
      : decoder_(decoder), host_(decoder.host()), step_(step), accuracy_(accuracy), takes_(takes) {}

  bool Takes(const StepValues& values) const override {
    return takes_ == nullptr || takes_(values.rows());
  }
  int64_t WorkspaceBytes(const StepValues& values) const override {
    return values.normed.ByteCount();
  }
  Status Run(const StepValues& values, const OperationContext& context) const override {
    decoder_.CountFusedCall();
    // The rows are read from the workspace, so that it has to be there, and large enough.
    const MutableTensorView copy(context.workspace, values.normed.dtype(), values.normed.shape());
    MARLIN_RETURN_IF_ERROR(decoder_.Put([from = Local(values.normed), to = Local(copy)] {
      std::memcpy(to.data(), from.data(), static_cast<size_t>(from.ByteCount()));
      return Status();
    }));
    return decoder_.Put([this, x = Local(copy), ids = Local(values.expert_ids),
                         weights = Local(values.expert_weights), hidden = Local(values.hidden)] {
      for (int64_t row = 0; row < x.dim(0); ++row) {
        const int64_t width = x.dim(1);
        const MutableTensorView one(x.As<float>() + row * width, DType::kF32, {1, width});
        const MutableTensorView to(hidden.As<float>() + row * width, DType::kF32, {1, width});
        const int64_t first = row * ids.dim(1);
        MARLIN_RETURN_IF_ERROR(
            RunRow(one, ids.As<int32_t>() + first, weights.As<float>() + first, ids.dim(1), to));
      }
      return Status();
    });
  }

 private:
  Status Multiply(const StepLinear& linear, const TensorView& x, const TensorView& row_weight,
                  const MutableTensorView& out) const {
    int64_t column = 0;
    for (const PreparedWeights& part : linear.parts) {
      GemmOptions options;
      options.accuracy = accuracy_;
      options.row_weight = row_weight;
      const int64_t n = part.spec().n;
      if (!linear.bias.empty()) {
        options.bias = {Local(linear.bias).As<float>() + column, DType::kF32, {n}};
      }
      const MutableTensorView columns(out.As<float>() + column, DType::kF32, {1, n});
      MARLIN_RETURN_IF_ERROR(Gemm(host_, x, decoder_.TwinOf(part), columns, options));
      column += n;
    }
    return {};
  }

  Status RunMlp(const StepMlp& mlp, const TensorView& x, float weight,
                const MutableTensorView& out) const {
    const int64_t width = mlp.down.in;
    std::vector<float> both(static_cast<size_t>(2 * width));
    const auto part = [&](int64_t first, int64_t count) {
      return MutableTensorView(both.data() + first, DType::kF32, {1, count});
    };
    MARLIN_RETURN_IF_ERROR(Multiply(mlp.gate_up, x, {}, part(0, 2 * width)));
    MARLIN_RETURN_IF_ERROR(
        ApplyGate(host_, part(0, width), part(width, width), part(0, width), step_.gate));
    return Multiply(mlp.down, part(0, width), {&weight, DType::kF32, {1}}, out);
  }

  Status RunRow(const TensorView& x, const int32_t* ids, const float* weights, int64_t top_k,
                const MutableTensorView& hidden) const {
    std::vector<float> sum(static_cast<size_t>(x.dim(1)));
    std::vector<float> one(sum.size());
    const MutableTensorView sum_row(sum.data(), DType::kF32, {1, x.dim(1)});
    const MutableTensorView one_row(one.data(), DType::kF32, {1, x.dim(1)});
    for (int64_t i = 0; i < top_k; ++i) {
      const StepMlp& expert = step_.experts[static_cast<size_t>(ids[i])];
      MARLIN_RETURN_IF_ERROR(RunMlp(expert, x, weights[i], i == 0 ? sum_row : one_row));
      if (i > 0) MARLIN_RETURN_IF_ERROR(AddTo(host_, one_row, sum_row));
    }
    if (!step_.shared.down.parts.empty()) {
      float gate = 1.0F;
      const MutableTensorView gate_view(&gate, DType::kF32, {1, 1});
      if (!step_.shared_gate.parts.empty()) {
        MARLIN_RETURN_IF_ERROR(Multiply(step_.shared_gate, x, {}, gate_view));
        MARLIN_RETURN_IF_ERROR(ApplySigmoid(host_, gate_view));
      }
      MARLIN_RETURN_IF_ERROR(RunMlp(step_.shared, x, gate, one_row));
      MARLIN_RETURN_IF_ERROR(AddTo(host_, one_row, sum_row));
    }
    return AddTo(host_, sum_row, hidden);
  }

  const RemoteDecoder& decoder_;
  const Device host_;
  const ExpertsStep& step_;
  Accuracy accuracy_;
  bool (*takes_)(int64_t rows);
};

inline Result<FusedRun> RemoteDecoder::Fuse(const StepDescription& step,
                                            std::span<const StepOperation> operations) const {
  const auto* const experts = std::get_if<ExpertsStep>(&operations.front());
  if (std::holds_alternative<AttentionStep>(operations.front())) {
    return FusedRun{0, nullptr, "attention one by one"};
  }
  if (experts == nullptr || !options_.fuses_experts) return FusedRun();
  ++fused_runs_;
  bool (*const takes_one)(int64_t) = [](int64_t rows) { return rows == 1; };
  return FusedRun{1,
                  std::make_unique<FusedExperts>(*this, *experts, step.accuracy,
                                                 options_.fuses_by_rows ? takes_one : nullptr),
                  {}};
}

inline Result<FusedRun> RemoteDecoder::FuseWithin(const StepDescription& step,
                                                  std::span<const StepOperation> operations) const {
  if (!options_.fuses_by_rows) return FusedRun();
  const auto& experts = std::get<ExpertsStep>(operations.front());
  return FusedRun{1,
                  std::make_unique<FusedExperts>(*this, experts, step.accuracy,
                                                 [](int64_t rows) { return rows > 1; }),
                  {}};
}

/// Returns a device of this backend, whose CPU has two threads.
inline Device OpenRemote(RemoteOptions options = {}) {
  const Device host = *Device::Open("cpu", {.threads = 2});
  return Internals::Make<Device>(
      std::make_shared<Device::Impl>(std::make_unique<RemoteBackend>(host, std::move(options))));
}
inline const RemoteBackend& RemoteOf(const Device& device) {
  return static_cast<const RemoteBackend&>(Internals::Impl(device).backend());
}

}  // namespace marlin::testing
