#include "router_run.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "base/macros.h"
#include "device_image.h"
#include "device_runtime.h"
#include "marlin/quantize.h"
#include "random.h"
#include "reference/decoder.h"

namespace marlin::conformance {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kHidden = 96;
// Padding elements between the rows of a padded matrix.
constexpr int64_t kRowPadding = 5;

// Logits of kVanishing: the softmax and sigmoid scores of even tokens underflow to 0, those of odd
// ones are about as large as the 1e-20 that the router adds to their sum. With a bias, even experts
// have ordinary scores, which the bias keeps from being selected: only so can all selected softmax
// scores be 0.
float VanishingLogit(Random& random, const RouterCase& c, int64_t token, int64_t expert) {
  const double lowered = token % 2 == 0 ? -2000.0 : -46.0;
  return static_cast<float>((c.bias && expert % 2 == 0 ? 0.0 : lowered) + 2.0 * random.Gaussian());
}

float RandomLogit(Random& random, const RouterCase& c, int64_t token, int64_t expert) {
  switch (c.data) {
    case RouterData::kVanishing:
      return VanishingLogit(random, c, token, expert);
    case RouterData::kTies:
      return static_cast<float>(random.Integer(-1, 1));
    case RouterData::kWide:
      return static_cast<float>(60.0 * random.Gaussian());
    case RouterData::kExcluded:
      return expert % 2 == 1 ? -kInf : static_cast<float>(random.Gaussian());
    default:
      return static_cast<float>(2.0 * random.Gaussian());
  }
}

// Both have the same logits, whose sums are exact in every order.
Accuracy AccuracyOf(const RouterCase& c) {
  return c.seed % 2 == 0 ? Accuracy::kDefault : Accuracy::kExact;
}

// The token and the expert of an error's logit.
int64_t BadToken(const RouterCase& c) { return c.tokens * 2 / 3; }
int64_t BadExpert(const RouterCase& c) { return c.experts * 3 / 4; }

void PlantError(RouterProblem& problem) {
  const RouterCase& c = problem.c;
  const auto row = problem.logits.begin() + BadToken(c) * c.experts;
  if (c.data == RouterData::kNan) row[BadExpert(c)] = kNan;
  if (c.data == RouterData::kInf) row[BadExpert(c)] = kInf;
  if (c.data == RouterData::kNoneFinite) std::fill(row, row + c.experts, -kInf);
  if (c.data == RouterData::kNanBias) problem.bias[static_cast<size_t>(BadExpert(c))] = kNan;
}

// Expected substring of the error message; empty for a case without an error.
std::string ExpectedError(const RouterCase& c) {
  switch (c.data) {
    case RouterData::kNan:
      return fmt::format("NaN at [{}, {}]", BadToken(c), BadExpert(c));
    case RouterData::kInf:
      return fmt::format("Inf at [{}, {}]", BadToken(c), BadExpert(c));
    case RouterData::kNoneFinite:
      return fmt::format("token {}", BadToken(c));
    case RouterData::kNanBias:
      return fmt::format("NaN at {}", BadExpert(c));
    default:
      return {};
  }
}

// Integers, so that every order of the sums gives the same logits, ties among them.
void FillHidden(Random& random, RouterProblem& problem) {
  const RouterCase& c = problem.c;
  problem.hidden = kHidden;
  for (int64_t i = 0; i < c.tokens * kHidden; ++i) {
    problem.x.push_back(static_cast<float>(random.Integer(-2, 2)) * 0.125F);
  }
  for (int64_t i = 0; i < kHidden * c.experts; ++i) {
    problem.matrix.push_back(static_cast<float>(random.Integer(-3, 3)));
  }
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t e = 0; e < c.experts; ++e) {
      float sum = 0;
      for (int64_t i = 0; i < kHidden; ++i) {
        sum += problem.x[static_cast<size_t>(t * kHidden + i)] *
               problem.matrix[static_cast<size_t>(i * c.experts + e)];
      }
      problem.logits[static_cast<size_t>(t * c.experts + e)] = sum;
    }
  }
}

// Rows of 4-byte elements in guarded device memory.
struct Rows {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;
  DeviceImage image;

  static Result<Rows> Make(const Device& device, int64_t rows, int64_t columns, bool padded,
                           const void* data = nullptr) {
    Rows made{rows, columns, columns + (padded ? kRowPadding : 0), {}};
    GuardedBuffer memory(((rows - 1) * made.stride + columns) * 4);
    for (int64_t i = 0; i < rows && data != nullptr; ++i) {
      std::memcpy(memory.data() + i * made.stride * 4,
                  static_cast<const std::byte*>(data) + i * columns * 4,
                  static_cast<size_t>(columns) * 4);
    }
    MARLIN_ASSIGN_OR_RETURN(made.image, DeviceImage::Make(device, std::move(memory)));
    return made;
  }

  MutableTensorView view(DType dtype) const {
    return {image.data(), dtype, {rows, columns}, {stride, 1}};
  }
  template <typename T>
  T At(int64_t row, int64_t column) const {
    T value;
    std::memcpy(&value, image.host().data() + (row * stride + column) * 4, sizeof(T));
    return value;
  }
  // Whether nothing but the rows was written to.
  bool Intact() const {
    bool intact = image.host().Intact();
    for (int64_t i = 0; i + 1 < rows; ++i) {
      intact = intact && image.host().Untouched((i * stride + columns) * 4, (i + 1) * stride * 4);
    }
    return intact;
  }
};

/// The operands of a case on a device.
class RouterRun {
 public:
  static Result<RouterRun> Make(const Device& device, const RouterProblem& problem,
                                std::string_view backend) {
    const RouterCase& c = problem.c;
    RouterRun run(device, problem);
    MARLIN_ASSIGN_OR_RETURN(run.stream_, MakeStream(backend));
    if (c.data == RouterData::kHidden) {
      MARLIN_ASSIGN_OR_RETURN(
          run.input_, Rows::Make(device, c.tokens, problem.hidden, c.padded, problem.x.data()));
      MARLIN_RETURN_IF_ERROR(run.PrepareMatrix());
    } else {
      MARLIN_ASSIGN_OR_RETURN(
          run.input_, Rows::Make(device, c.tokens, c.experts, c.padded, problem.logits.data()));
    }
    MARLIN_ASSIGN_OR_RETURN(run.ids_, Rows::Make(device, c.tokens, c.top_k, c.padded));
    MARLIN_ASSIGN_OR_RETURN(run.weights_, Rows::Make(device, c.tokens, c.top_k, c.padded));
    if (!problem.bias.empty()) {
      MARLIN_ASSIGN_OR_RETURN(run.bias_,
                              Rows::Make(device, 1, c.experts, false, problem.bias.data()));
    }
    return run;
  }

  RouterOptions Options() const {
    const RouterCase& c = problem_.c;
    RouterOptions options;
    options.top_k = c.top_k;
    options.scoring = c.scoring;
    options.normalize = c.normalize;
    options.scaling_factor = c.scaled ? 2.5F : 1.0F;
    options.groups = c.groups;
    options.top_groups = c.top_groups;
    options.best_of_group = c.best ? 1 : 2;
    options.least_sum = c.least ? 0.5F : 0.0F;
    if (!problem_.bias.empty()) {
      options.choice_bias = TensorView(bias_.image.data(), DType::kF32, {c.experts});
    }
    return options;
  }

  /// Routes, waits and downloads. Errors: those of the router.
  Status Route() {
    const MutableTensorView ids = ids_.view(DType::kI32);
    const MutableTensorView weights = weights_.view(DType::kF32);
    void* const stream = stream_.get();
    const Status routed =
        matrix_.bytes() > 0
            ? RouteHiddenStates(device_, input_.view(DType::kF32),
                                {matrix_, {}, Options(), AccuracyOf(problem_.c)}, ids, weights,
                                stream)
            : RouteTokens(device_, input_.view(DType::kF32), Options(), ids, weights, stream);
    const Status waited = device_.Synchronize(stream);
    MARLIN_RETURN_IF_ERROR(routed);
    MARLIN_RETURN_IF_ERROR(waited);
    MARLIN_RETURN_IF_ERROR(ids_.image.Download());
    return weights_.image.Download();
  }

  /// Empty, or what was written and must not be.
  Result<std::string> Damage() const {
    if (!ids_.Intact()) return std::string("ids: wrote outside of them");
    if (!weights_.Intact()) return std::string("weights: wrote outside of them");
    for (const Rows* input : {&input_, &bias_}) {
      MARLIN_ASSIGN_OR_RETURN(const bool changed, input->image.Changed());
      if (changed) return std::string("inputs: a guard or an operand was written to");
    }
    return std::string();
  }

  int32_t id(int64_t token, int64_t i) const { return ids_.At<int32_t>(token, i); }
  float weight(int64_t token, int64_t i) const { return weights_.At<float>(token, i); }

 private:
  RouterRun(const Device& device, const RouterProblem& problem)
      : device_(device), problem_(problem) {}

  Status PrepareMatrix() {
    const Shape shape{problem_.hidden, problem_.c.experts};
    MARLIN_ASSIGN_OR_RETURN(
        const QuantizedWeights quantized,
        Quantize({problem_.matrix.data(), DType::kF32, shape}, {.format = Format::kBf16}));
    MARLIN_ASSIGN_OR_RETURN(matrix_, Prepare(quantized, device_));
    return Status();
  }

  Device device_;
  const RouterProblem& problem_;
  std::shared_ptr<void> stream_;
  PreparedWeights matrix_;
  Rows input_;
  Rows bias_;
  Rows ids_;
  Rows weights_;
};

CaseResult Failed(std::string message) { return {Outcome::kFailed, std::move(message), 0}; }

CaseResult JudgeRoute(const RouterProblem& problem, const RouterRun& run) {
  const RouterCase& c = problem.c;
  // The reference reads the bias from the host.
  RouterOptions options = run.Options();
  if (!problem.bias.empty()) {
    options.choice_bias = TensorView(problem.bias.data(), DType::kF32, {c.experts});
  }
  CaseResult result;
  for (int64_t t = 0; t < c.tokens; ++t) {
    const auto row = problem.logits.begin() + t * c.experts;
    const reference::Route route =
        reference::RouteToken(std::vector<double>(row, row + c.experts), options);
    for (int64_t i = 0; i < c.top_k; ++i) {
      const auto at = static_cast<size_t>(i);
      if (run.id(t, i) != route.ids[at]) {
        return Failed(fmt::format("ids: token {}, selection {}: got {}, expected {}", t, i,
                                  run.id(t, i), route.ids[at]));
      }
      // Double precision, rounded once. A NaN on either side fails.
      const double expected = route.weights[at];
      const double bound = 0x1.001p-24 * std::abs(expected) + 0x1p-149;
      const double error = std::abs(double{run.weight(t, i)} - expected);
      result.worst_ratio = std::max(result.worst_ratio, error / bound);
      if (error <= bound) continue;
      return Failed(fmt::format("weights: token {}, selection {}: got {:.9g}, expected {:.9g}", t,
                                i, run.weight(t, i), expected));
    }
  }
  return result;
}

}  // namespace

RouterProblem MakeRouterProblem(const RouterCase& c) {
  Random random(HashText("router") ^ (c.seed << 8));
  RouterProblem problem;
  problem.c = c;
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t e = 0; e < c.experts; ++e) {
      problem.logits.push_back(RandomLogit(random, c, t, e));
    }
  }
  for (int64_t e = 0; c.bias && e < c.experts; ++e) {
    double bias =
        c.data == RouterData::kTies ? 0.5 * static_cast<double>(e % 2) : 0.3 * random.Gaussian();
    if (c.data == RouterData::kVanishing && e % 2 == 0) bias -= 4.0;
    problem.bias.push_back(static_cast<float>(bias));
  }
  if (c.data == RouterData::kHidden) FillHidden(random, problem);
  PlantError(problem);
  return problem;
}

CaseResult RunRouterCase(const Machine& machine, const Row& row, const RouterProblem& problem) {
  Result<RouterRun> run = RouterRun::Make(machine.DeviceFor(row), problem, row.backend);
  const Status status = run.ok() ? run->Route() : run.status();
  const std::string wanted = ExpectedError(problem.c);
  if (status.code() == Code::kUnsupported) return {Outcome::kUnsupported, status.message(), 0};
  if (!wanted.empty()) {
    const bool right = status.code() == Code::kInvalidArgument &&
                       status.message().find(wanted) != std::string::npos;
    if (!right) return Failed(fmt::format("expected '{}', got '{}'", wanted, status.message()));
    return {};
  }
  if (!status.ok()) return Failed(fmt::format("{}: {}", CodeName(status.code()), status.message()));
  const Result<std::string> damage = run->Damage();
  if (!damage.ok()) return Failed(damage.status().message());
  if (!damage->empty()) return Failed(*damage);
  return JudgeRoute(problem, *run);
}

}  // namespace marlin::conformance
