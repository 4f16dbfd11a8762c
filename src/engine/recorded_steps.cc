#include "engine/recorded_steps.h"

#include <algorithm>
#include <utility>

#include "base/macros.h"
#include "ops/device/device.h"

namespace marlin {
namespace {

constexpr size_t kMostSteps = 16;

}  // namespace

RecordedSteps::Step::~Step() {
  if (work == nullptr) return;
  void* const stream = work->stream();
  work.reset();
  Internals::Impl(device).FreeWorkspaces(stream);
}

RecordedSteps::Key RecordedSteps::KeyOf(const StepValues& values) {
  Key key;
  const auto add = [&key](const auto&... views) {
    const auto add_one = [&key](const TensorView& view) {
      key.push_back(reinterpret_cast<uintptr_t>(view.data()));
      for (int i = 0; i < view.rank(); ++i) key.push_back(static_cast<uintptr_t>(view.dim(i)));
    };
    (add_one(views), ...);
  };
  // Bindings name every member, so that one that is added to StepValues does not compile here.
  const auto& [ids, positions, first_rows, wanted, pages, turns, hidden, projected, latent, mixed,
               inner, normed, expert_ids, expert_weights, logits, samplers, sampler_rows, tokens,
               allowed, allowed_rows, drafts, logprobs, advance, hidden_out] = values;
  add(ids, positions, first_rows, wanted, hidden, projected, latent, mixed, inner, normed,
      expert_ids, expert_weights, logits, samplers, sampler_rows, tokens, allowed, allowed_rows,
      drafts, hidden_out);
  const auto& [of_ids, likely_ids, of_likely] = logprobs;
  add(of_ids, likely_ids, of_likely);
  const auto& [stop_ids, next_ids, next_positions, state_rows, counts, all_tokens] = advance;
  add(stop_ids, next_ids, next_positions, state_rows, counts, all_tokens);
  for (const auto& [first, stride, of_positions, of_first_rows] : turns) {
    key.push_back(static_cast<uintptr_t>(first));
    key.push_back(static_cast<uintptr_t>(stride));
    add(of_positions, of_first_rows);
  }
  for (const auto& [slabs, block_tables, expanded, continued, of_turns] : pages) {
    add(block_tables, continued, expanded.pages, expanded.tokens, expanded.block_tables);
    for (const TensorView& of_turn : of_turns) add(of_turn);
    key.push_back(slabs.size());
    for (void* const slab : slabs) key.push_back(reinterpret_cast<uintptr_t>(slab));
  }
  return key;
}

Status RecordedSteps::Run(const Device& device, const StepValues& values, const Enqueue& enqueue) {
  const Backend& backend = Internals::Impl(device).backend();
  if (!backend.records() || values.rows() > kMostRows) return enqueue(nullptr, nullptr);
  Key key = KeyOf(values);
  const auto found = std::find_if(steps_.begin(), steps_.end(),
                                  [&key](const auto& step) { return step->key == key; });
  if (found != steps_.end()) {
    const std::unique_ptr<RecordedWork>& work = (*found)->work;
    return work == nullptr ? enqueue(nullptr, nullptr) : work->Launch(nullptr);
  }
  Key& last = last_[values.advance.steps()];
  if (key != last) {
    last = std::move(key);
    return enqueue(nullptr, nullptr);
  }
  auto step = std::make_unique<Step>(device, std::move(key));
  MARLIN_ASSIGN_OR_RETURN(step->work, backend.Record([&](void* stream) {
    step->plans.clear();
    return enqueue(stream, &step->plans);
  }));
  if (steps_.size() == kMostSteps) steps_.erase(steps_.begin());
  steps_.push_back(std::move(step));
  return {};
}

}  // namespace marlin
