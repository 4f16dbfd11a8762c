// The selection of cases of experts.
#include <algorithm>
#include <utility>

#include "experts_case.h"
#include "layout/sparse_24.h"
#include "random.h"

namespace marlin::conformance {
namespace {

constexpr int64_t kTokens[] = {1, 2, 7, 8, 9, 16, 33, 64, 65, 200};
constexpr DType kTypes[] = {DType::kBf16, DType::kF16, DType::kF32};

/// Numbers cases, and cycles through the options that are independent of what they test.
class ExpertsCases {
 public:
  explicit ExpertsCases(std::string_view backend) : backend_(backend) {}

  ExpertsCase Make(int64_t tokens, DataClass data) {
    ExpertsCase c;
    c.backend = backend_;
    c.tokens = tokens;
    c.data = data;
    c.seed = seed_++;
    c.gate = data == DataClass::kGaussian ? GateKind::kSilu
             : c.seed % 2 == 0            ? GateKind::kRelu
                                          : GateKind::kNone;
    c.accuracy = c.seed % 3 == 0 ? Accuracy::kExact : Accuracy::kDefault;
    c.allow_bf16 = c.accuracy == Accuracy::kDefault && c.seed % 4 < 2;
    c.apart = c.seed % 5 < 2;
    c.own_workspace = c.seed % 4 == 1;
    c.padded = c.seed % 6 == 1;
    c.misaligned = c.seed % 7 == 2;
    return c;
  }
  void Add(const ExpertsCase& c) { cases_.push_back(c); }
  /// The same on exact lattice data and on random data.
  void AddBoth(ExpertsCase c) {
    Add(c);
    const ExpertsCase random = Make(c.tokens, DataClass::kGaussian);
    c.data = random.data;
    c.gate = random.gate;
    c.accuracy = random.accuracy;
    c.allow_bf16 = random.allow_bf16;
    c.seed = random.seed;
    Add(c);
  }
  std::vector<ExpertsCase> Take() { return std::move(cases_); }

 private:
  std::string backend_;
  std::vector<ExpertsCase> cases_;
  uint64_t seed_ = 1;
};

void AddEveryFormat(ExpertsCases& cases) {
  for (const FormatInfo& info : AllFormats()) {
    for (const int64_t tokens : {1, 9, 33}) {
      ExpertsCase c = cases.Make(tokens, DataClass::kLatticeSmall);
      c.format = info.name;
      c.stacked = tokens == 9;
      cases.AddBoth(c);
      c = cases.Make(tokens, DataClass::kGaussian);
      c.format = info.name;
      c.varied = true;
      cases.Add(c);
    }
  }
}

/// Numbers of tokens around tiles, with a format for every matrix.
void AddEveryCount(ExpertsCases& cases) {
  for (const int64_t tokens : kTokens) {
    ExpertsCase c = cases.Make(tokens, DataClass::kLatticeSmall);
    c.experts = 7;
    cases.AddBoth(c);
    c = cases.Make(tokens, DataClass::kLatticeSmall);
    c.experts = 5;
    c.top_k = 3;
    c.varied = true;
    c.shared = SharedKind::kPlain;
    cases.AddBoth(c);
  }
}

void AddActivations(ExpertsCases& cases) {
  for (const GateKind gate :
       {GateKind::kNone, GateKind::kRelu, GateKind::kSilu, GateKind::kGelu, GateKind::kClamped}) {
    for (const SharedKind shared : {SharedKind::kNone, SharedKind::kPlain, SharedKind::kGated}) {
      for (int flags = 0; flags < 4; ++flags) {
        const bool biased = flags >= 2;
        ExpertsCase c = cases.Make(biased ? 17 : 4, DataClass::kGaussian);
        c.gate = gate;
        c.shared = shared;
        c.biased = biased;
        c.accuracy = flags % 2 == 0 ? Accuracy::kDefault : Accuracy::kExact;
        c.allow_bf16 = c.accuracy == Accuracy::kDefault && biased;
        c.format = biased ? "mixed" : "fp4_e2m1";
        cases.Add(c);
        const bool exact = gate == GateKind::kNone || gate == GateKind::kRelu;
        if (!exact || shared == SharedKind::kGated) continue;
        c.data = DataClass::kLatticeSmall;
        cases.Add(c);
      }
    }
  }
}

void AddTypes(ExpertsCases& cases) {
  for (const DType x_type : kTypes) {
    for (const DType out_type : kTypes) {
      for (const bool padded : {false, true}) {
        ExpertsCase c = cases.Make(padded ? 11 : 3, DataClass::kLatticeSmall);
        c.x_type = x_type;
        c.out_type = out_type;
        c.padded = padded;
        c.misaligned = !padded && x_type != out_type;
        c.shared = SharedKind::kPlain;
        cases.AddBoth(c);
      }
    }
  }
}

/// Empty experts, missing experts, one that takes everything, many of few tokens.
void AddSelections(ExpertsCases& cases) {
  for (const int64_t tokens : {1, 8, 64, 200}) {
    for (const Selection selection : {Selection::kRandom, Selection::kOne, Selection::kFew}) {
      for (const bool missing : {false, true}) {
        ExpertsCase c = cases.Make(tokens, DataClass::kLatticeSmall);
        c.experts = selection == Selection::kFew ? 16 : 6;
        c.selection = selection;
        c.missing = missing;
        c.stacked = missing;
        c.format = c.stacked ? "u4" : "mixed";
        c.shared = missing && tokens == 8 ? SharedKind::kPlain : SharedKind::kNone;
        cases.AddBoth(c);
      }
    }
  }
  for (const int64_t tokens : {1, 8, 33}) {
    for (const int64_t experts : {64, 128}) {
      ExpertsCase c = cases.Make(tokens, DataClass::kLatticeSmall);
      c.experts = experts;
      c.top_k = 8;
      c.hidden = 64;
      c.inner = 32;
      c.format = experts == 64 ? "fp4_e2m1" : "mixed";
      c.stacked = experts == 64;
      c.missing = experts == 128 && tokens == 8;
      cases.AddBoth(c);
    }
  }
  ExpertsCase c = cases.Make(5, DataClass::kGaussian);
  c.experts = 40;
  c.top_k = 32;
  cases.Add(c);
  // More than the CPU runs in one pass.
  c = cases.Make(1030, DataClass::kLatticeSmall);
  c.hidden = 32;
  c.inner = 16;
  cases.AddBoth(c);
}

/// Sizes that no tile and no group divides, and sizes beyond one tile.
void AddShapes(ExpertsCases& cases, bool large) {
  struct Shape {
    int64_t hidden, inner;
  };
  constexpr Shape kShapes[] = {{72, 40}, {100, 36}, {33, 17}, {128, 128}, {160, 96}, {16, 200}};
  for (const Shape& shape : kShapes) {
    for (const int64_t tokens : {1, 12, 40}) {
      ExpertsCase c = cases.Make(tokens, DataClass::kLatticeSmall);
      c.hidden = shape.hidden;
      c.inner = shape.inner;
      cases.AddBoth(c);
    }
  }
  constexpr Shape kLarge[] = {{256, 128}, {512, 384}, {1024, 256}, {640, 720}};
  if (!large) return;
  for (const Shape& shape : kLarge) {
    for (const int64_t tokens : {1, 8, 64, 130}) {
      for (const char* format : {"fp4_e2m1", "u4", "fp8_e4m3", "s8", "bf16"}) {
        ExpertsCase c = cases.Make(tokens, DataClass::kGaussian);
        c.experts = 8;
        c.hidden = shape.hidden;
        c.inner = shape.inner;
        c.format = format;
        cases.Add(c);
      }
    }
  }
}

void AddPromises(ExpertsCases& cases) {
  for (const char* format : {"fp4_e2m1", "u4", "bf16", "mixed"}) {
    for (const ExpertsCheck check : {ExpertsCheck::kRepeat, ExpertsCheck::kThreads,
                                     ExpertsCheck::kBatchInvariant, ExpertsCheck::kPoison}) {
      for (const int64_t tokens : {6, 64}) {
        ExpertsCase c = cases.Make(tokens, DataClass::kGaussian);
        c.check = check;
        c.format = format;
        c.experts = 8;
        c.top_k = 3;
        c.shared = tokens == 64 ? SharedKind::kGated : SharedKind::kNone;
        c.batch_invariant = check == ExpertsCheck::kBatchInvariant;
        cases.Add(c);
      }
    }
  }
  for (const int64_t tokens : {1, 50, 1030}) {
    ExpertsCase c = cases.Make(tokens, DataClass::kGaussian);
    c.check = ExpertsCheck::kBadId;
    c.hidden = 32;
    c.inner = 16;
    cases.Add(c);
  }
}

void AddW4A8(ExpertsCases& cases) {
  for (const char* format : {"fp4_e2m1", "u4", "s4", "s8"}) {
    for (const int64_t tokens : {1, 20}) {
      ExpertsCase c = cases.Make(tokens, DataClass::kGaussian);
      c.format = format;
      c.accuracy = Accuracy::kW4A8;
      c.allow_bf16 = true;
      cases.Add(c);
    }
  }
}

/// Random combinations of everything.
void AddRandom(ExpertsCases& cases, int count) {
  Random random(HashText("experts"));
  const auto formats = AllFormats();
  for (int i = 0; i < count; ++i) {
    const bool lattice = random.OneIn(2);
    ExpertsCase c = cases.Make(kTokens[random.Integer(0, 8)],
                               lattice ? DataClass::kLatticeSmall : DataClass::kGaussian);
    c.experts = random.Integer(1, 20);
    c.top_k = random.Integer(1, std::min<int64_t>(c.experts, 4));
    c.hidden = random.Integer(2, 10) * 16;
    c.inner = random.Integer(1, 6) * 16;
    if (random.OneIn(2)) {
      c.format =
          formats[static_cast<size_t>(random.Integer(0, static_cast<int64_t>(formats.size()) - 1))]
              .name;
    }
    c.varied = random.OneIn(2);
    c.stacked = c.format != "mixed" && random.OneIn(2);
    c.biased = random.OneIn(2);
    c.shared = static_cast<SharedKind>(random.Integer(0, lattice ? 1 : 2));
    c.selection = static_cast<Selection>(random.Integer(0, 2));
    c.missing = random.OneIn(4) && c.experts > 3;
    c.gate = static_cast<GateKind>(random.Integer(0, lattice ? 1 : 4));
    c.x_type = kTypes[random.Integer(0, 2)];
    c.out_type = kTypes[random.Integer(0, 2)];
    c.batch_invariant = random.OneIn(4);
    cases.Add(c);
  }
}

/// Several tiles of rows for every expert, and more selections than a GPU sorts in one CTA.
void AddManyRows(ExpertsCases& cases) {
  for (const char* format : {"fp4_e2m1", "u4", "nf4", "s8", "bf16", "mixed"}) {
    for (const int64_t tokens : {180, 700}) {
      ExpertsCase c = cases.Make(tokens, DataClass::kGaussian);
      c.experts = 3;
      c.hidden = 256;
      c.inner = 192;
      c.format = format;
      c.stacked = c.format != "mixed" && tokens == 700;
      c.biased = tokens == 180;
      c.shared = tokens == 180 ? SharedKind::kGated : SharedKind::kNone;
      cases.Add(c);
    }
  }
  for (const bool missing : {false, true}) {
    ExpertsCase c = cases.Make(2300, DataClass::kLatticeSmall);
    c.experts = 9;
    c.hidden = 32;
    c.inner = 16;
    c.missing = missing;
    c.shared = missing ? SharedKind::kNone : SharedKind::kPlain;
    cases.AddBoth(c);
  }
  ExpertsCase c = cases.Make(2300, DataClass::kGaussian);
  c.check = ExpertsCheck::kBadId;
  c.hidden = 32;
  c.inner = 16;
  cases.Add(c);
}

/// 2:4 matrices: every format that has them, alone and in layers with dense ones; numbers of tokens
/// around tiles, stacks, gates apart, shared experts, whole and partial tiles of 128 k; promises.
void AddSparse(ExpertsCases& cases, bool many_rows) {
  for (const FormatInfo& info : AllFormats()) {
    if (info.zero_point == ZeroPoint::kRequired || !CheckSparse24(info.format, false).ok())
      continue;
    for (const int64_t tokens : {1, 9, 33}) {
      ExpertsCase c = cases.Make(tokens, DataClass::kLatticeSmall);
      c.format = info.name;
      c.sparse = true;
      c.stacked = tokens == 9;
      cases.AddBoth(c);
    }
  }
  for (const int64_t tokens : kTokens) {
    ExpertsCase c = cases.Make(tokens, DataClass::kLatticeSmall);
    c.format = tokens % 2 == 0 ? "s4" : "fp4_e2m1";
    c.sparse = true;
    c.experts = 7;
    c.hidden = 160;
    c.inner = 80;
    cases.AddBoth(c);
    for (const char* format : {"mixed", "fp4_e2m1", "s4"}) {
      c = cases.Make(tokens, DataClass::kGaussian);
      c.format = format;
      c.sparse = true;
      c.experts = 5;
      c.top_k = 3;
      c.varied = true;
      c.biased = tokens % 3 == 0;
      c.shared = tokens % 2 == 0 ? SharedKind::kPlain : SharedKind::kGated;
      cases.Add(c);
    }
  }
  for (const char* format : {"fp4_e2m1", "s4", "mixed"}) {
    for (const ExpertsCheck check : {ExpertsCheck::kRepeat, ExpertsCheck::kThreads,
                                     ExpertsCheck::kBatchInvariant, ExpertsCheck::kPoison}) {
      ExpertsCase c = cases.Make(check == ExpertsCheck::kPoison ? 6 : 64, DataClass::kGaussian);
      c.check = check;
      c.format = format;
      c.sparse = true;
      c.experts = 8;
      c.top_k = 3;
      c.hidden = 272;
      c.batch_invariant = check == ExpertsCheck::kBatchInvariant;
      cases.Add(c);
    }
  }
  if (!many_rows) return;
  for (const char* format : {"fp4_e2m1", "s4", "nf4", "mixed"}) {
    for (const int64_t tokens : {180, 700}) {
      for (const int64_t hidden : {256, 400}) {
        ExpertsCase c = cases.Make(tokens, DataClass::kGaussian);
        c.sparse = true;
        c.accuracy = Accuracy::kDefault;
        c.allow_bf16 = true;
        c.experts = 3;
        c.hidden = hidden;
        c.inner = 192;
        c.format = format;
        c.stacked = c.format != "mixed" && tokens == 700;
        c.biased = tokens == 180;
        c.shared = tokens == 180 ? SharedKind::kGated : SharedKind::kNone;
        cases.Add(c);
      }
    }
  }
}

void AddNightly(ExpertsCases& cases) {
  AddRandom(cases, 1500);
  for (const int64_t tokens : {1023, 1024, 1025, 4096}) {
    for (const char* format : {"fp4_e2m1", "u4", "mixed"}) {
      ExpertsCase c = cases.Make(tokens, DataClass::kLatticeSmall);
      c.experts = 8;
      c.hidden = 64;
      c.inner = 32;
      c.format = format;
      cases.AddBoth(c);
    }
  }
}

// The simulator is thousands of times slower than a GPU: few tokens, and a share of the cases.
void KeepFewForSimulator(std::vector<ExpertsCase>* cases) {
  std::erase_if(*cases, [](const ExpertsCase& c) {
    const bool threads = c.check == ExpertsCheck::kThreads;
    return threads || c.tokens > 20 || c.experts > 16 || c.seed % 7 > 3;
  });
}

}  // namespace

std::vector<ExpertsCase> SelectExpertsCases(std::string_view backend, bool nightly) {
  ExpertsCases cases(backend);
  AddEveryFormat(cases);
  AddEveryCount(cases);
  AddActivations(cases);
  AddTypes(cases);
  AddSelections(cases);
  AddShapes(cases, backend == "cuda" || nightly);
  AddPromises(cases);
  AddW4A8(cases);
  AddRandom(cases, 60);
  if (backend == "cuda" || nightly) AddManyRows(cases);
  AddSparse(cases, backend == "cuda" || nightly);
  if (nightly && backend != "metal") AddNightly(cases);
  std::vector<ExpertsCase> selected = cases.Take();
  if (backend != "cpu") {
    std::erase_if(selected, [](const ExpertsCase& c) { return c.check == ExpertsCheck::kThreads; });
  }
  if (backend == "metal" && !nightly) KeepFewForSimulator(&selected);
  return selected;
}

}  // namespace marlin::conformance
