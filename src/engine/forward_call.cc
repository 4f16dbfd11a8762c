#include "engine/forward_call.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "engine/forward.h"
#include "engine/index_upload.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "model/mixer.h"
#include "ops/decoder/sampling.h"

namespace marlin {
namespace {

/// The tokens of a Forward call that share one pass.
struct PassPlan {
  struct Chunk {
    size_t input;
    int64_t first;  ///< Index among the input's tokens.
    int64_t count;
  };
  std::vector<Chunk> chunks;
  int64_t tokens = 0;
  int64_t wanted = 0;  ///< Rows of logits.
};

/// Passes of at most `most` tokens.
std::vector<PassPlan> PlanPasses(std::span<const SequenceInput> inputs, int64_t most) {
  std::vector<PassPlan> passes(1);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool all_logits = inputs[i].all_logits;
    const bool last_logits = !all_logits && !inputs[i].feed_only;
    const auto total = static_cast<int64_t>(inputs[i].tokens.size());
    for (int64_t first = 0; first < total;) {
      if (passes.back().tokens == most || passes.back().wanted == kPassTokens) {
        passes.emplace_back();
      }
      PassPlan& pass = passes.back();
      int64_t count = std::min(total - first, most - pass.tokens);
      if (all_logits) count = std::min(count, kPassTokens - pass.wanted);
      pass.chunks.push_back({i, first, count});
      pass.tokens += count;
      first += count;
      pass.wanted += all_logits ? count : static_cast<int64_t>(last_logits && first == total);
    }
  }
  return passes;
}

/// Whether kernels can write to a matrix in place: contiguous columns, rows that do not overlap.
bool HasRows(const MutableTensorView& view) {
  const bool columns = view.dim(1) <= 1 || view.stride(1) == 1;
  return columns && (view.dim(0) <= 1 || view.stride(0) >= view.dim(1));
}

/// Copies contiguous f32 rows to the rows of a matrix of any strides, from `first` on.
void CopyRows(const MutableTensorView& from, const MutableTensorView& to, int64_t first) {
  for (int64_t row = 0; row < from.dim(0); ++row) {
    const float* const source = from.As<float>() + row * from.dim(1);
    float* const target = to.As<float>() + (first + row) * to.stride(0);
    for (int64_t i = 0; i < from.dim(1); ++i) target[i * to.stride(1)] = source[i];
  }
}

/// One Forward call: passes over its tokens, in sequence.
class ForwardCall {
 public:
  ForwardCall(const Model::Impl& model, std::span<const SequenceInput> inputs, Arena& arena,
              const Wanted& wanted)
      : model_(model), inputs_(inputs), arena_(arena), wanted_(wanted) {}

  Status Run() {
    const Status status = RunPasses();
    // Even after an error, no work may still write logits or read activations.
    const Status finished = model_.device.Synchronize();
    MARLIN_RETURN_IF_ERROR(status);
    MARLIN_RETURN_IF_ERROR(finished);
    for (size_t i = 0; i < inputs_.size(); ++i) {
      KvCache& cache = inputs_[i].sequence->state()->cache;
      const int64_t fed = wanted_.steps != nullptr ? wanted_.steps->counts[i]
                                                   : static_cast<int64_t>(inputs_[i].tokens.size());
      cache.Grow(cache.length() + fed);
    }
    return {};
  }

 private:
  Status RunPasses() {
    const int64_t most = Internals::Impl(model_.device).backend().pass_tokens();
    for (const PassPlan& plan : PlanPasses(inputs_, most)) {
      const int64_t first_row = next_row_;
      Status status = RunPass(plan);
      if (status.code() == Code::kOutOfMemory) {
        // Cached pages make room for activations. No work may run when the pass is repeated.
        MARLIN_RETURN_IF_ERROR(model_.device.Synchronize());
        next_row_ = first_row;
        if (model_.pool->DropCached()) status = RunPass(plan);
      }
      MARLIN_RETURN_IF_ERROR(status);
    }
    return {};
  }

  Status RunPass(const PassPlan& plan) {
    const ArenaScope scope(arena_);
    Pass pass{model_.device,   model_.decoder, *model_.pool,
              model_.products, arena_,         wanted_.routing};
    PassRows rows;
    for (const PassPlan::Chunk& chunk : plan.chunks) {
      MARLIN_RETURN_IF_ERROR(AddChunk(chunk, &rows));
    }
    MARLIN_RETURN_IF_ERROR(Upload(rows, &pass.values));
    MARLIN_RETURN_IF_ERROR(TakeValues(&pass));
    MARLIN_RETURN_IF_ERROR(TakeResults(&pass.values));
    MARLIN_RETURN_IF_ERROR(RunProgram(pass));
    return FetchResults(pass.values);
  }

  Status RunProgram(Pass& pass) {
    if (wanted_.timer != nullptr) {
      pass.timer = wanted_.timer;
      MARLIN_RETURN_IF_ERROR(pass.timer->BeginPass());
      const Status run = model_.program.Run(pass);
      const Status ended = pass.timer->EndPass();
      return run.ok() ? ended : run;
    }
    // Where the host reads selections layer by layer, nothing can be recorded.
    if (pass.routing != nullptr || model_.decoder.host_experts > 0) {
      return model_.program.Run(pass);
    }
    return arena_.recorded().Run(model_.device, pass.values,
                                 [&](void* stream, std::vector<ExpertsPlan>* plans) {
                                   Pass on_stream = pass;
                                   on_stream.products.stream = stream;
                                   on_stream.plans = plans;
                                   return RunSteps(on_stream);
                                 });
  }

  /// The consecutive steps of a pass: each feeds the next one's tokens on the device.
  Status RunSteps(Pass& pass) const {
    const StepValues& values = pass.values;
    if (wanted_.steps == nullptr) return model_.program.Run(pass);
    for (int64_t step = 0; step < values.advance.steps(); ++step) {
      MARLIN_RETURN_IF_ERROR(model_.program.Run(pass));
      MARLIN_RETURN_IF_ERROR(
          AdvanceTokens(model_.device, values.tokens, values.advance, pass.stream()));
    }
    return {};
  }

  /// Row metadata that a pass uploads.
  struct PassRows {
    std::vector<int32_t> ids;
    std::vector<int32_t> positions;
    std::vector<int32_t> first_rows = {0};
    std::vector<int32_t> wanted;  ///< Rows whose logits are wanted.
    std::vector<const KvCache*> caches;
    std::vector<PassSequence> sequences;
  };

  Status AddChunk(const PassPlan::Chunk& chunk, PassRows* rows) const {
    const SequenceInput& input = inputs_[chunk.input];
    KvCache& cache = input.sequence->state()->cache;
    const int64_t position = cache.length() + chunk.first;
    MARLIN_RETURN_IF_ERROR(cache.Reserve(position, position + chunk.count));
    rows->caches.push_back(&cache);
    rows->sequences.push_back({chunk.count, position + chunk.count});
    const auto total = static_cast<int64_t>(input.tokens.size());
    for (int64_t i = 0; i < chunk.count; ++i) {
      const int64_t token = chunk.first + i;
      if (input.all_logits || (token == total - 1 && !input.feed_only)) {
        rows->wanted.push_back(static_cast<int32_t>(rows->ids.size()));
      }
      rows->ids.push_back(input.tokens[static_cast<size_t>(token)]);
      rows->positions.push_back(static_cast<int32_t>(position + i));
    }
    rows->first_rows.push_back(static_cast<int32_t>(rows->ids.size()));
    return {};
  }

  /// The places of a group's tables in an upload.
  struct GroupParts {
    IndexUpload::Part blocks;
    IndexUpload::Part pages;  ///< Empty: the pass expands none.
    IndexUpload::Part tokens;
    IndexUpload::Part expanded_blocks;
  };
  /// The places of a pass's vectors in its upload.
  struct PassParts {
    IndexUpload::Part ids;
    IndexUpload::Part positions;
    IndexUpload::Part first_rows;
    IndexUpload::Part wanted;
    IndexUpload::Part sampler_rows;
    std::vector<GroupParts> groups;
    IndexUpload::Part stop_ids;  ///< From here on: for several steps.
    IndexUpload::Part results;   ///< Counts [inputs], then tokens [inputs, steps].
  };

  /// Uploads everything that depends on the tokens in one copy.
  Status Upload(const PassRows& rows, StepValues* values) {
    IndexUpload upload;
    PassParts parts;
    parts.ids = upload.Add(rows.ids);
    parts.positions = upload.Add(rows.positions);
    parts.first_rows = upload.Add(rows.first_rows);
    parts.wanted = upload.Add(rows.wanted);
    parts.sampler_rows = upload.Add(SamplerRows(rows));
    for (size_t group = 0; group < model_.pool->groups(); ++group) {
      parts.groups.push_back(AddGroup(rows, group, &upload));
    }
    if (wanted_.steps != nullptr) {
      parts.stop_ids = upload.Add(wanted_.steps->stop_token_ids);
      parts.results = upload.AddRoom(wanted_.steps->counts.size() + wanted_.steps->tokens.size());
    }
    MARLIN_RETURN_IF_ERROR(upload.Send(arena_));
    values->ids = upload.View(parts.ids);
    values->positions = upload.View(parts.positions);
    values->first_rows = upload.View(parts.first_rows);
    values->wanted = upload.View(parts.wanted);
    if (parts.sampler_rows.count > 0) values->sampler_rows = upload.View(parts.sampler_rows);
    const auto sequences = static_cast<int64_t>(rows.caches.size());
    for (const GroupParts& group : parts.groups) {
      MARLIN_RETURN_IF_ERROR(ViewGroup(upload, group, sequences, values));
    }
    return wanted_.steps == nullptr ? Status() : ViewSteps(upload, parts, values);
  }

  /// Adds the tables of a group.
  GroupParts AddGroup(const PassRows& rows, size_t group, IndexUpload* upload) const {
    const std::vector<int32_t> blocks = BlockTables(rows, group);
    GroupParts parts;
    parts.blocks = upload->Add(blocks);
    const Mixer& mixer =
        *model_.decoder.layers[static_cast<size_t>(model_.pool->FirstLayerOf(group))].mixer.mixer;
    const PassSetting setting = model_.setting();
    if (!mixer.Expands(setting, rows.sequences)) return parts;
    const ExpandedTables expanded = mixer.Expand(setting, rows.sequences, blocks);
    if (expanded.pages.empty()) return parts;
    parts.pages = upload->Add(expanded.pages);
    parts.tokens = upload->Add(expanded.tokens);
    parts.expanded_blocks = upload->Add(expanded.block_tables);
    return parts;
  }

  /// Adds the pages of the next group to a step's values.
  Status ViewGroup(const IndexUpload& upload, const GroupParts& parts, int64_t sequences,
                   StepValues* values) const {
    const Shape blocks{sequences, static_cast<int64_t>(parts.blocks.count) / sequences};
    StepPages& pages = values->pages.emplace_back();
    pages.slabs = model_.pool->Slabs(values->pages.size() - 1);
    MARLIN_ASSIGN_OR_RETURN(pages.block_tables, upload.View(parts.blocks, blocks));
    if (parts.pages.count == 0) return {};
    pages.expanded.pages = upload.View(parts.pages);
    pages.expanded.tokens = upload.View(parts.tokens);
    MARLIN_ASSIGN_OR_RETURN(pages.expanded.block_tables,
                            upload.View(parts.expanded_blocks, blocks));
    return {};
  }

  /// The vectors that several steps change.
  Status ViewSteps(const IndexUpload& upload, const PassParts& parts, StepValues* values) {
    const StepsWanted& steps = *wanted_.steps;
    const auto inputs = static_cast<int64_t>(steps.counts.size());
    const IndexUpload::Part counts{parts.results.first, steps.counts.size()};
    const IndexUpload::Part tokens{counts.first + counts.count, steps.tokens.size()};
    StepAdvance& advance = values->advance;
    advance.stop_ids = upload.View(parts.stop_ids);
    MARLIN_ASSIGN_OR_RETURN(advance.ids, upload.View(parts.ids, {inputs}));
    MARLIN_ASSIGN_OR_RETURN(advance.positions, upload.View(parts.positions, {inputs}));
    MARLIN_ASSIGN_OR_RETURN(advance.state_rows, upload.View(parts.sampler_rows, {inputs}));
    advance.counts = upload.View(counts);
    MARLIN_ASSIGN_OR_RETURN(advance.tokens, upload.View(tokens, {inputs, steps.steps}));
    step_results_ = upload.View(parts.results);
    return {};
  }

  /// The states of a pass's wanted rows; none if they are in order.
  std::vector<int32_t> SamplerRows(const PassRows& rows) const {
    if (wanted_.sampler_rows.empty()) return {};
    const auto of_pass =
        wanted_.sampler_rows.subspan(static_cast<size_t>(next_row_), rows.wanted.size());
    return {of_pass.begin(), of_pass.end()};
  }

  /// The block tables of all sequences in one group, padded to the longest.
  std::vector<int32_t> BlockTables(const PassRows& rows, size_t group) const {
    size_t most = 0;
    for (const KvCache* const cache : rows.caches) {
      most = std::max(most, cache->Blocks(group).size());
    }
    most = static_cast<size_t>(PaddedBlocks(model_, static_cast<int64_t>(most)));
    std::vector<int32_t> tables;
    for (const KvCache* const cache : rows.caches) {
      const std::vector<int32_t>& blocks = cache->Blocks(group);
      tables.insert(tables.end(), blocks.begin(), blocks.end());
      tables.resize(tables.size() + most - blocks.size(), -1);
    }
    return tables;
  }

  /// Rows [next_row_, next_row_ + rows) of a matrix.
  MutableTensorView NextRows(const MutableTensorView& matrix, int64_t rows) const {
    auto* const first =
        matrix.As<uint8_t>() + next_row_ * matrix.stride(0) * DTypeBytes(matrix.dtype());
    return {first, matrix.dtype(), {rows, matrix.dim(1)}, {matrix.stride(0), 1}};
  }

  /// Allocates the results of a pass.
  Status TakeResults(StepValues* values) {
    const int64_t rows = values->wanted.dim(0);
    if (rows == 0) return {};
    in_place_ = wanted_.samplers.empty() && model_.writes_host && HasRows(wanted_.logits);
    if (in_place_) {
      values->logits = NextRows(wanted_.logits, rows);
      return {};
    }
    const Shape shape{rows, model_.info.vocab_size};
    MARLIN_ASSIGN_OR_RETURN(values->logits, arena_.Take(DType::kF32, shape));
    if (wanted_.samplers.empty()) return {};
    values->samplers =
        wanted_.sampler_rows.empty() ? NextRows(wanted_.samplers, rows) : wanted_.samplers;
    MARLIN_ASSIGN_OR_RETURN(values->tokens, arena_.Take(DType::kI32, {rows}));
    return {};
  }

  /// Copies the results of a pass to the caller's memory.
  Status FetchResults(const StepValues& values) {
    const int64_t rows = values.wanted.dim(0);
    const int64_t first = next_row_;
    next_row_ += rows;
    if (rows == 0 || in_place_) return {};
    MARLIN_RETURN_IF_ERROR(model_.device.Synchronize());
    if (wanted_.steps != nullptr) return FetchSteps();
    if (!wanted_.samplers.empty()) {
      return arena_.Download(values.tokens, wanted_.tokens.data() + first);
    }
    if (model_.writes_host) {
      CopyRows(values.logits, wanted_.logits, first);
      return {};
    }
    std::vector<float> host(static_cast<size_t>(values.logits.ElementCount()));
    MARLIN_RETURN_IF_ERROR(arena_.Download(values.logits, host.data()));
    CopyRows({host.data(), DType::kF32, values.logits.shape()}, wanted_.logits, first);
    return {};
  }

  Status FetchSteps() const {
    const StepsWanted& steps = *wanted_.steps;
    std::vector<int32_t> host(static_cast<size_t>(step_results_.ElementCount()));
    MARLIN_RETURN_IF_ERROR(arena_.Download(step_results_, host.data()));
    const auto tokens = host.begin() + static_cast<std::ptrdiff_t>(steps.counts.size());
    std::copy(host.begin(), tokens, steps.counts.begin());
    std::copy(tokens, host.end(), steps.tokens.begin());
    return {};
  }

  const Model::Impl& model_;
  std::span<const SequenceInput> inputs_;
  Arena& arena_;
  const Wanted& wanted_;
  int64_t next_row_ = 0;     ///< Index among the wanted rows of the call.
  TensorView step_results_;  ///< PassParts::results of a pass of several steps.
  bool in_place_ = false;    ///< The device writes logits directly to the caller's memory.
};

}  // namespace

int64_t PaddedBlocks(const Model::Impl& model, int64_t blocks) {
  constexpr int64_t kBlocks = 8;
  return Internals::Impl(model.device).backend().records() ? RoundUp(blocks, kBlocks) : blocks;
}

Status RunForward(const Model::Impl& model, std::span<const SequenceInput> inputs,
                  const Wanted& wanted) {
  Arena arena(model.device);
  {
    const std::lock_guard lock(model.mutex);
    if (!model.arenas.empty()) {
      arena = std::move(model.arenas.back());
      model.arenas.pop_back();
    }
  }
  Status status = ForwardCall(model, inputs, arena, wanted).Run();
  const std::lock_guard lock(model.mutex);
  model.arenas.push_back(std::move(arena));
  return status;
}

}  // namespace marlin
