#include "backends/metal/runtime/driver.h"

#include <utility>

#include "base/macros.h"

namespace marlin::metal {
namespace {

/// Runs the calls one after another.
class RepeatedCalls final : public BoundLaunches {
 public:
  RepeatedCalls(Driver& driver, std::vector<CheckedLaunches> calls)
      : driver_(driver), calls_(std::move(calls)) {}

  Status Run() override {
    for (const CheckedLaunches& call : calls_) {
      MARLIN_RETURN_IF_ERROR(call.check ? driver_.RunAndCheck(call.launches, nullptr, call.check)
                                        : driver_.Run(call.launches, nullptr));
    }
    return {};
  }

 private:
  Driver& driver_;
  const std::vector<CheckedLaunches> calls_;
};

}  // namespace

Result<std::unique_ptr<BoundLaunches>> Driver::Bind(std::vector<CheckedLaunches> calls) {
  return {std::make_unique<RepeatedCalls>(*this, std::move(calls))};
}

}  // namespace marlin::metal
