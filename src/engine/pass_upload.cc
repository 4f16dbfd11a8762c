#include "engine/pass_upload.h"

#include <algorithm>

#include "base/checked.h"
#include "base/macros.h"
#include "model/mixer.h"

namespace marlin {

Status PassUpload::Send(Arena& arena, StepValues* values) {
  PassParts parts;
  parts.ids = upload_.Add(rows_.ids);
  parts.positions = upload_.Add(rows_.positions);
  parts.first_rows = upload_.Add(rows_.first_rows);
  parts.wanted = upload_.Add(rows_.wanted);
  parts.sampler_rows = upload_.Add(rows_.state_rows);
  parts.targets = upload_.Add(rows_.targets);
  parts.drafts = upload_.Add(rows_.drafts);
  parts.masks = upload_.Add(rows_.masks);
  parts.mask_rows = upload_.Add(rows_.mask_rows);
  parts.turns = AddTurns();
  for (size_t group = 0; group < model_.pool->groups(); ++group) {
    parts.groups.push_back(AddGroup(group));
  }
  if (wanted_.steps != nullptr) {
    parts.stop_ids = upload_.Add(wanted_.steps->stop_token_ids);
    parts.results = upload_.AddRoom(wanted_.steps->counts.size() + wanted_.steps->tokens.size());
  }
  MARLIN_RETURN_IF_ERROR(upload_.Send(arena));
  values->ids = upload_.View(parts.ids);
  values->positions = upload_.View(parts.positions);
  values->first_rows = upload_.View(parts.first_rows);
  values->wanted = upload_.View(parts.wanted);
  MARLIN_RETURN_IF_ERROR(ViewSampling(parts, values));
  ViewTurns(parts, values);
  for (const GroupParts& group : parts.groups) {
    MARLIN_RETURN_IF_ERROR(ViewGroup(group, values));
  }
  return wanted_.steps == nullptr ? Status() : ViewSteps(parts, values);
}

/// Adds the turns of a pass with states after guesses.
std::vector<PassUpload::TurnParts> PassUpload::AddTurns() {
  std::vector<TurnParts> parts;
  const auto is_guessed = [](const PassSequence& sequence) { return sequence.drafts > 0; };
  if (!model_.pool->HasStates() || std::ranges::none_of(rows_.sequences, is_guessed)) return parts;
  turns_ = PlanTurns(rows_.sequences);
  for (const PlannedTurn& turn : turns_) {
    // Only their signs are read.
    const std::vector<int32_t> positions(static_cast<size_t>(turn.rows));
    TurnParts& of_turn = parts.emplace_back();
    of_turn.positions = upload_.Add(positions);
    of_turn.first_rows = upload_.Add(FirstRowsOf(turn, rows_.sequences));
  }
  return parts;
}

void PassUpload::ViewTurns(const PassParts& parts, StepValues* values) const {
  for (size_t i = 0; i < turns_.size(); ++i) {
    values->turns.push_back({turns_[i].first, turns_[i].stride,
                             upload_.View(parts.turns[i].positions),
                             upload_.View(parts.turns[i].first_rows)});
  }
}

/// Adds the tables of a group; none of one that another part of the model has.
PassUpload::GroupParts PassUpload::AddGroup(size_t group) {
  GroupParts parts;
  if (!model_.decoder.part.Has(model_.pool->FirstLayerOf(group))) return parts;
  const std::vector<int32_t> blocks = BlockTables(group, 0);
  parts.blocks = upload_.Add(blocks);
  if (model_.pool->IsRecurrent(group)) {
    if (wanted_.steps != nullptr) parts.continued = upload_.Add(BlockTables(group, 1));
    for (const PlannedTurn& turn : turns_) {
      parts.turns.push_back(upload_.Add(StatePages(group, turn)));
    }
    return parts;
  }
  const Mixer& mixer =
      *model_.decoder.layers[static_cast<size_t>(model_.pool->FirstLayerOf(group))].mixer.mixer;
  const PassSetting setting = model_.setting();
  if (!mixer.Expands(setting, rows_.sequences)) return parts;
  const ExpandedTables expanded = mixer.Expand(setting, rows_.sequences, blocks);
  if (expanded.pages.empty()) return parts;
  parts.pages = upload_.Add(expanded.pages);
  parts.tokens = upload_.Add(expanded.tokens);
  parts.expanded_blocks = upload_.Add(expanded.block_tables);
  return parts;
}

/// Adds the pages of the next group to a step's values.
Status PassUpload::ViewGroup(const GroupParts& parts, StepValues* values) const {
  const auto sequences = static_cast<int64_t>(rows_.caches.size());
  const Shape blocks{sequences, static_cast<int64_t>(parts.blocks.count) / sequences};
  StepPages& pages = values->pages.emplace_back();
  const size_t group = values->pages.size() - 1;
  if (parts.blocks.count > 0) pages.slabs = model_.pool->Slabs(group);
  MARLIN_ASSIGN_OR_RETURN(pages.block_tables, upload_.View(parts.blocks, blocks));
  if (parts.continued.count > 0) {
    MARLIN_ASSIGN_OR_RETURN(pages.continued, upload_.View(parts.continued, blocks));
  }
  for (const IndexUpload::Part& turn : parts.turns) {
    const Shape of_turn{static_cast<int64_t>(turn.count) / 2, 2};
    MARLIN_ASSIGN_OR_RETURN(pages.turns.emplace_back(), upload_.View(turn, of_turn));
  }
  if (parts.pages.count == 0) return {};
  pages.expanded.pages = upload_.View(parts.pages);
  pages.expanded.tokens = upload_.View(parts.tokens);
  MARLIN_ASSIGN_OR_RETURN(pages.expanded.block_tables, upload_.View(parts.expanded_blocks, blocks));
  return {};
}

/// The vectors that several steps change.
Status PassUpload::ViewSteps(const PassParts& parts, StepValues* values) {
  const StepsWanted& steps = *wanted_.steps;
  const auto inputs = static_cast<int64_t>(steps.counts.size());
  const IndexUpload::Part counts{parts.results.first, steps.counts.size()};
  const IndexUpload::Part tokens{counts.first + counts.count, steps.tokens.size()};
  StepAdvance& advance = values->advance;
  advance.stop_ids = upload_.View(parts.stop_ids);
  MARLIN_ASSIGN_OR_RETURN(advance.ids, upload_.View(parts.ids, {inputs}));
  MARLIN_ASSIGN_OR_RETURN(advance.positions, upload_.View(parts.positions, {inputs}));
  MARLIN_ASSIGN_OR_RETURN(advance.state_rows, upload_.View(parts.sampler_rows, {inputs}));
  advance.counts = upload_.View(counts);
  MARLIN_ASSIGN_OR_RETURN(advance.tokens, upload_.View(tokens, {inputs, steps.steps}));
  step_results_ = upload_.View(parts.results);
  return {};
}

/// The vectors that sampling needs. Where rows have targets, these are what it writes to.
Status PassUpload::ViewSampling(const PassParts& parts, StepValues* values) const {
  if (parts.sampler_rows.count > 0) values->sampler_rows = upload_.View(parts.sampler_rows);
  if (parts.targets.count > 0) values->tokens = upload_.View(parts.targets);
  if (parts.drafts.count > 0) values->drafts = upload_.View(parts.drafts);
  if (parts.masks.count == 0) return {};
  const int64_t words = CeilDivide(model_.info.vocab_size, 32);
  const Shape shape{static_cast<int64_t>(parts.masks.count) / words, words};
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView masks, upload_.View(parts.masks, shape));
  values->allowed = {masks.data(), DType::kU32, shape};
  values->allowed_rows = upload_.View(parts.mask_rows);
  return {};
}

/// The block tables of all sequences in one group, padded to the longest, after `fed` rows of them.
std::vector<int32_t> PassUpload::BlockTables(size_t group, int64_t fed) const {
  std::vector<std::span<const int32_t>> rows;
  size_t most = 0;
  for (size_t i = 0; i < rows_.caches.size(); ++i) {
    const PassSequence& sequence = rows_.sequences[i];
    rows.push_back(rows_.caches[i]->TableFrom(group, sequence.length - sequence.rows + fed));
    most = std::max(most, rows.back().size());
  }
  if (!model_.pool->IsRecurrent(group)) {
    most = static_cast<size_t>(PaddedBlocks(model_, static_cast<int64_t>(most)));
  }
  std::vector<int32_t> tables;
  for (const std::span<const int32_t> row : rows) {
    tables.insert(tables.end(), row.begin(), row.end());
    tables.resize(tables.size() + most - row.size(), -1);
  }
  return tables;
}

/// RecurrentRows::pages of a turn.
std::vector<int32_t> PassUpload::StatePages(size_t group, const PlannedTurn& turn) const {
  std::vector<int32_t> pages;
  for (size_t i = 0; i < turn.sequences; ++i) {
    const KvCache& cache = *rows_.caches[turn.first_sequence + i];
    const PassSequence& sequence = rows_.sequences[turn.first_sequence + i];
    if (turn.row == PlannedTurn::kAllRows) {
      const auto table = cache.TableFrom(group, sequence.length - sequence.rows);
      pages.insert(pages.end(), table.begin(), table.end());
    } else {
      const auto table = cache.TableOfRow(group, turn.row);
      pages.insert(pages.end(), table.begin(), table.end());
    }
  }
  return pages;
}

}  // namespace marlin
