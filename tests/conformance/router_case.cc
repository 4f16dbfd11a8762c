#include "router_case.h"

#include <algorithm>

#include "base/macros.h"
#include "case_name.h"
#include "random.h"

namespace marlin::conformance {
namespace {

using Scoring = RouterOptions::Scoring;

constexpr NameWord<Scoring> kScorings[] = {{"softmax", Scoring::kSoftmax},
                                           {"softmax_of_chosen", Scoring::kSoftmaxOfChosen},
                                           {"sigmoid", Scoring::kSigmoid}};
constexpr NameWord<RouterData> kData[] = {{"gaussian", RouterData::kGaussian},
                                          {"ties", RouterData::kTies},
                                          {"wide", RouterData::kWide},
                                          {"excluded", RouterData::kExcluded},
                                          {"vanishing", RouterData::kVanishing},
                                          {"hidden", RouterData::kHidden},
                                          {"nan", RouterData::kNan},
                                          {"inf", RouterData::kInf},
                                          {"none_finite", RouterData::kNoneFinite},
                                          {"nan_bias", RouterData::kNanBias}};

template <typename Io>
void Parts(Io& io, RouterCase& c) {
  std::string op = "router";
  io.Text(op);
  io.Text(c.backend);
  io.Text(c.row);
  io.Number("tokens", c.tokens);
  io.Number("experts", c.experts);
  io.Number("top", c.top_k);
  io.Word(kScorings, c.scoring);
  io.Number("groups", c.groups);
  io.Number("of", c.top_groups);
  io.Flag("normalized", c.normalize);
  io.Flag("scaled", c.scaled);
  io.Flag("bias", c.bias);
  io.Flag("padded", c.padded);
  io.Flag("best", c.best);
  io.Flag("least", c.least);
  io.Word(kData, c.data);
  io.Number("seed", c.seed);
}

/// Draws cases and numbers them.
class RouterCases {
 public:
  explicit RouterCases(std::string_view backend) : backend_(backend) {}

  /// A case whose options cycle with its number.
  RouterCase Make(int64_t tokens, int64_t experts, int64_t top_k, RouterData data) {
    RouterCase c;
    c.backend = backend_;
    c.tokens = tokens;
    c.experts = experts;
    c.top_k = top_k;
    c.data = data;
    c.seed = seed_++;
    c.scoring = static_cast<Scoring>(c.seed % 3);
    c.normalize = c.seed % 4 != 1;
    c.scaled = c.seed % 5 == 0;
    c.bias = c.seed % 2 == 0;
    c.padded = c.seed % 7 == 3;
    return c;
  }
  void Add(const RouterCase& c) { cases_.push_back(c); }
  std::vector<RouterCase> Take() { return std::move(cases_); }

 private:
  std::string backend_;
  std::vector<RouterCase> cases_;
  uint64_t seed_ = 1;
};

/// Every kind of score with every other option.
void AddOptions(RouterCases& cases) {
  struct Groups {
    int64_t groups, top_groups;
  };
  constexpr Groups kGroups[] = {{1, 1}, {8, 4}, {8, 1}, {64, 8}, {2, 2}};
  for (const NameWord<Scoring>& scoring : kScorings) {
    for (const Groups& groups : kGroups) {
      for (int flags = 0; flags < 8; ++flags) {
        const RouterData data = flags >= 4 ? RouterData::kTies : RouterData::kGaussian;
        RouterCase c = cases.Make(37, 64, 8, data);
        c.scoring = scoring.value;
        c.groups = groups.groups;
        c.top_groups = groups.top_groups;
        c.bias = flags % 4 >= 2;
        c.normalize = flags % 2 == 1;
        cases.Add(c);
      }
    }
  }
}

/// Numbers of tokens, experts and selections around warps, and at their limits.
void AddSizes(RouterCases& cases, bool nightly) {
  struct Size {
    int64_t experts, top_k;
  };
  constexpr Size kSizes[] = {{1, 1},   {2, 1},    {2, 2},     {7, 3},    {8, 8},
                             {31, 5},  {32, 32},  {33, 4},    {60, 4},   {127, 6},
                             {128, 8}, {129, 8},  {160, 6},   {256, 8},  {257, 31},
                             {384, 8}, {512, 10}, {1000, 32}, {1023, 1}, {1024, 32}};
  constexpr RouterData kKinds[] = {RouterData::kGaussian, RouterData::kTies, RouterData::kWide,
                                   RouterData::kExcluded};
  std::vector<int64_t> counts = {1, 3, 65, 300};
  if (nightly) counts.insert(counts.end(), {2, 8, 16, 33, 64, 1000, 4096});
  size_t at = 0;
  for (const Size& size : kSizes) {
    for (const int64_t tokens : counts) {
      cases.Add(cases.Make(tokens, size.experts, size.top_k, kKinds[at++ % 4]));
      if (!nightly) continue;
      for (const RouterData data : kKinds) {
        cases.Add(cases.Make(tokens, size.experts, size.top_k, data));
      }
    }
  }
}

/// Sums of scores that are 0 or nearly so: sigmoid of very negative logits, and softmax whose bias
/// selects experts far below the best.
void AddVanishing(RouterCases& cases) {
  struct Kind {
    Scoring scoring;
    bool bias;
  };
  for (const Kind kind :
       {Kind{Scoring::kSigmoid, false}, {Scoring::kSigmoid, true}, {Scoring::kSoftmax, true}}) {
    for (const int64_t groups : {1, 8}) {
      RouterCase c = cases.Make(37, 64, 4, RouterData::kVanishing);
      c.scoring = kind.scoring;
      c.groups = groups;
      c.top_groups = groups / 2 + groups % 2;
      c.normalize = true;
      c.bias = kind.bias;
      cases.Add(c);
    }
  }
}

/// Groups by their best expert, and sums that have a least value.
void AddScores(RouterCases& cases) {
  for (const NameWord<Scoring>& scoring : kScorings) {
    for (const int64_t groups : {1, 8, 64}) {
      for (const RouterData data : {RouterData::kGaussian, RouterData::kTies}) {
        RouterCase c = cases.Make(37, 64, 4, data);
        c.scoring = scoring.value;
        c.groups = groups;
        c.top_groups = groups / 8 + 1;
        c.normalize = true;
        c.best = groups > 1;
        c.least = groups < 64;
        cases.Add(c);
      }
    }
  }
}

void AddHiddenStates(RouterCases& cases) {
  for (const int64_t tokens : {1, 5, 40}) {
    for (const int64_t experts : {1, 6, 64, 128}) {
      cases.Add(cases.Make(tokens, experts, std::min<int64_t>(experts, 4), RouterData::kHidden));
    }
  }
}

void AddErrors(RouterCases& cases) {
  for (const RouterData data :
       {RouterData::kNan, RouterData::kInf, RouterData::kNoneFinite, RouterData::kNanBias}) {
    for (const int64_t tokens : {1, 9, 200}) {
      for (const int64_t experts : {1, 64, 513}) {
        RouterCase c = cases.Make(tokens, experts, 1, data);
        c.bias = data == RouterData::kNanBias;
        cases.Add(c);
      }
    }
  }
}

}  // namespace

bool ExpectsError(const RouterCase& c) { return c.data >= RouterData::kNan; }

std::string CaseName(const RouterCase& c) {
  NameWriter writer;
  RouterCase copy = c;
  Parts(writer, copy);
  return writer.name();
}

Result<RouterCase> ParseRouterCase(std::string_view name) {
  NameReader reader(name);
  RouterCase c;
  Parts(reader, c);
  MARLIN_RETURN_IF_ERROR(reader.Finish());
  return c;
}

std::vector<RouterCase> SelectRouterCases(std::string_view backend, bool nightly) {
  RouterCases cases(backend);
  AddOptions(cases);
  AddSizes(cases, nightly);
  AddHiddenStates(cases);
  AddErrors(cases);
  AddVanishing(cases);
  AddScores(cases);
  return cases.Take();
}

}  // namespace marlin::conformance
