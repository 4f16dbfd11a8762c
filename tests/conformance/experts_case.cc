#include "experts_case.h"

#include "base/macros.h"
#include "case_name.h"

namespace marlin::conformance {
namespace {

constexpr NameWord<ExpertsCheck> kChecks[] = {
    {"experts", ExpertsCheck::kCompare},
    {"experts_repeat", ExpertsCheck::kRepeat},
    {"experts_threads", ExpertsCheck::kThreads},
    {"experts_batch_invariant", ExpertsCheck::kBatchInvariant},
    {"experts_poison", ExpertsCheck::kPoison},
    {"experts_bad_id", ExpertsCheck::kBadId}};
constexpr NameWord<GateKind> kGates[] = {{"none", GateKind::kNone},
                                         {"relu", GateKind::kRelu},
                                         {"silu", GateKind::kSilu},
                                         {"gelu", GateKind::kGelu},
                                         {"clamped", GateKind::kClamped}};
constexpr NameWord<SharedKind> kShared[] = {{"alone", SharedKind::kNone},
                                            {"shared", SharedKind::kPlain},
                                            {"shared_gated", SharedKind::kGated}};
constexpr NameWord<Selection> kSelections[] = {
    {"random", Selection::kRandom}, {"one", Selection::kOne}, {"few", Selection::kFew}};
constexpr NameWord<DType> kTypes[] = {
    {"f32", DType::kF32}, {"bf16", DType::kBf16}, {"f16", DType::kF16}};
constexpr NameWord<Accuracy> kAccuracies[] = {
    {"default", Accuracy::kDefault}, {"exact", Accuracy::kExact}, {"w4a8", Accuracy::kW4A8}};
constexpr NameWord<DataClass> kData[] = {{"lattice", DataClass::kLatticeSmall},
                                         {"gaussian", DataClass::kGaussian}};

template <typename Io>
void Parts(Io& io, ExpertsCase& c) {
  io.Word(kChecks, c.check);
  io.Text(c.backend);
  io.Text(c.row);
  io.Number("tokens", c.tokens);
  io.Number("experts", c.experts);
  io.Number("top", c.top_k);
  io.Number("hidden", c.hidden);
  io.Number("inner", c.inner);
  io.Text(c.format);
  io.Flag("sparse", c.sparse);
  io.Flag("varied", c.varied);
  io.Flag("stacked", c.stacked);
  io.Flag("apart", c.apart);
  io.Flag("biased", c.biased);
  io.Word(kGates, c.gate);
  io.Word(kShared, c.shared);
  io.Word(kSelections, c.selection);
  io.Flag("missing", c.missing);
  io.Word(kTypes, c.x_type);
  io.Word(kTypes, c.out_type);
  io.Flag("padded", c.padded);
  io.Flag("misaligned", c.misaligned);
  io.Flag("own_workspace", c.own_workspace);
  io.Word(kAccuracies, c.accuracy);
  io.Flag("invariant", c.batch_invariant);
  io.Flag("allow_bf16", c.allow_bf16);
  io.Word(kData, c.data);
  io.Number("seed", c.seed);
}

}  // namespace

GateOptions GateOf(const ExpertsCase& c) {
  GateOptions options;
  switch (c.gate) {
    case GateKind::kNone:
      options.activation = Activation::kNone;
      break;
    case GateKind::kRelu:
      options.activation = Activation::kRelu;
      break;
    case GateKind::kSilu:
      break;
    case GateKind::kGelu:
      options.activation = Activation::kGeluTanh;
      break;
    case GateKind::kClamped:
      options.limit = 7.0F;
      break;
  }
  return options;
}

std::string CaseName(const ExpertsCase& c) {
  NameWriter writer;
  ExpertsCase copy = c;
  Parts(writer, copy);
  return writer.name();
}

Result<ExpertsCase> ParseExpertsCase(std::string_view name) {
  NameReader reader(name);
  ExpertsCase c;
  c.allow_bf16 = false;
  Parts(reader, c);
  MARLIN_RETURN_IF_ERROR(reader.Finish());
  if (c.format != "mixed") MARLIN_RETURN_IF_ERROR(ParseFormat(c.format).status());
  return c;
}

bool NamesExperts(std::string_view name) {
  for (const NameWord<ExpertsCheck>& check : kChecks) {
    if (name.substr(0, name.find('/')) == check.word) return true;
  }
  return false;
}

}  // namespace marlin::conformance
