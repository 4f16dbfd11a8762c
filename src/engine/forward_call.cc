#include "engine/forward_call.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "engine/expand.h"
#include "engine/forward.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
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
    for (const PassPlan& plan : PlanPasses(inputs_, most)) MARLIN_RETURN_IF_ERROR(RunPass(plan));
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

  /// All steps of a pass, one behind the other: the device makes the tokens of one those that the
  /// next one feeds.
  Status RunSteps(const Pass& pass) const {
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

  /// Where a group's block tables, and the tables of pages that it expands, are in an upload.
  struct UploadedTables {
    size_t first = 0;
    int64_t count = 0;
    int64_t pages = 0;  ///< 0: none are expanded.
    size_t first_page = 0;
    size_t first_count = 0;
    size_t first_expanded = 0;
  };

  /// Uploads everything that depends on the tokens in one copy.
  Status Upload(const PassRows& rows, StepValues* values) const {
    std::vector<int32_t> numbers;
    numbers.reserve(4 * rows.ids.size() + 64);
    const auto add = [&numbers](const std::vector<int32_t>& part) {
      const size_t first = numbers.size();
      numbers.insert(numbers.end(), part.begin(), part.end());
      return first;
    };
    const size_t ids = add(rows.ids);
    const size_t positions = add(rows.positions);
    const size_t first_rows = add(rows.first_rows);
    const size_t wanted = add(rows.wanted);
    const std::vector<int32_t> states = SamplerRows(rows);
    const size_t sampler_rows = add(states);
    std::vector<UploadedTables> tables;
    const bool expands = ExpandsLatents(model_.device, model_.decoder.config, rows.sequences,
                                        model_.products.determinism);
    for (size_t group = 0; group < model_.pool->groups(); ++group) {
      const std::vector<int32_t> blocks = BlockTables(rows, group);
      UploadedTables& of_group = tables.emplace_back();
      of_group.count = static_cast<int64_t>(blocks.size());
      of_group.first = add(blocks);
      if (!expands) continue;
      const ExpandedTables expanded = TablesOf(rows.sequences, blocks, model_.pool->page_tokens());
      of_group.pages = static_cast<int64_t>(expanded.pages.size());
      const ExpandedMemory memory(model_.decoder.config, model_.info.kv_cache,
                                  model_.products.accuracy, model_.writes_host);
      if (memory.HeadsAtATime(of_group.pages, model_.pool->page_tokens()) == 0) {
        of_group.pages = 0;
        continue;
      }
      of_group.first_page = add(expanded.pages);
      of_group.first_count = add(expanded.tokens);
      of_group.first_expanded = add(expanded.block_tables);
    }
    const size_t steps = AddSteps(&numbers);
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView all, arena_.Upload(numbers));
    const auto part = [&all](size_t first, const Shape& shape) {
      return TensorView(all.As<int32_t>() + first, DType::kI32, shape);
    };
    const auto vector = [&part](size_t first, const std::vector<int32_t>& numbers_of) {
      return part(first, {static_cast<int64_t>(numbers_of.size())});
    };
    const auto sequences = static_cast<int64_t>(rows.caches.size());
    for (size_t group = 0; group < tables.size(); ++group) {
      const UploadedTables& of_group = tables[group];
      const Shape blocks{sequences, of_group.count / sequences};
      StepPages& pages = values->pages.emplace_back();
      pages.slabs = model_.pool->Slabs(group);
      pages.block_tables = part(of_group.first, blocks);
      if (of_group.pages == 0) continue;
      pages.expanded = {part(of_group.first_page, {of_group.pages}),
                        part(of_group.first_count, {of_group.pages}),
                        part(of_group.first_expanded, blocks)};
    }
    values->ids = vector(ids, rows.ids);
    values->positions = vector(positions, rows.positions);
    values->first_rows = vector(first_rows, rows.first_rows);
    values->wanted = vector(wanted, rows.wanted);
    if (!states.empty()) values->sampler_rows = vector(sampler_rows, states);
    if (wanted_.steps != nullptr) {
      values->advance = AdvanceOf(all, {ids, positions, sampler_rows, steps});
    }
    return {};
  }

  /// The states of a pass's wanted rows; none if they are in order.
  std::vector<int32_t> SamplerRows(const PassRows& rows) const {
    if (wanted_.sampler_rows.empty()) return {};
    const auto of_pass =
        wanted_.sampler_rows.subspan(static_cast<size_t>(next_row_), rows.wanted.size());
    return {of_pass.begin(), of_pass.end()};
  }

  /// Adds what several steps need to an upload, from the returned place on: the stop ids, and the
  /// counts and tokens that the device fills.
  size_t AddSteps(std::vector<int32_t>* numbers) const {
    const size_t first = numbers->size();
    if (wanted_.steps == nullptr) return first;
    const std::span<const int32_t> stops = wanted_.steps->stop_token_ids;
    numbers->insert(numbers->end(), stops.begin(), stops.end());
    numbers->resize(numbers->size() + wanted_.steps->counts.size() + wanted_.steps->tokens.size());
    return first;
  }

  /// Where an upload has the vectors that several steps change.
  struct UploadedSteps {
    size_t ids;
    size_t positions;
    size_t sampler_rows;
    size_t steps;
  };

  StepAdvance AdvanceOf(const MutableTensorView& all, const UploadedSteps& at) const {
    const auto rows = static_cast<int64_t>(inputs_.size());
    const size_t stops = wanted_.steps->stop_token_ids.size();
    const auto part = [&all](size_t first, const Shape& shape) {
      return MutableTensorView(all.As<int32_t>() + first, DType::kI32, shape);
    };
    const size_t counts = at.steps + stops;
    return {part(at.steps, {static_cast<int64_t>(stops)}),
            part(at.ids, {rows}),
            part(at.positions, {rows}),
            part(at.sampler_rows, {rows}),
            part(counts, {rows}),
            part(counts + inputs_.size(), {rows, wanted_.steps->steps})};
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
    if (wanted_.steps != nullptr) return FetchSteps(values.advance);
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

  /// Counts and tokens are one behind the other.
  Status FetchSteps(const StepAdvance& advance) const {
    const StepsWanted& steps = *wanted_.steps;
    std::vector<int32_t> host(steps.counts.size() + steps.tokens.size());
    const TensorView both(advance.counts.data(), DType::kI32, {static_cast<int64_t>(host.size())});
    MARLIN_RETURN_IF_ERROR(arena_.Download(both, host.data()));
    const auto tokens = host.begin() + static_cast<std::ptrdiff_t>(steps.counts.size());
    std::copy(host.begin(), tokens, steps.counts.begin());
    std::copy(tokens, host.end(), steps.tokens.begin());
    return {};
  }

  const Model::Impl& model_;
  std::span<const SequenceInput> inputs_;
  Arena& arena_;
  const Wanted& wanted_;
  int64_t next_row_ = 0;   ///< Index among the wanted rows of the call.
  bool in_place_ = false;  ///< The device writes logits directly to the caller's memory.
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
