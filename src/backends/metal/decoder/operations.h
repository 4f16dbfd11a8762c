// How the Metal backend runs decoder operations. For a row of decoder_operations.def whose `metal`
// column is not kAbsent, the operation's folder defines these functions next to its launches:
//
//   bool Takes(const NameCall& call, const DeviceShape& shape);
//       Whether kernels run the call; if not, the host does.
//   Status Launch(const NameCall& call, CallContext* context);
//       Appends the launches. Precondition: Takes. It neither runs nor waits, and reads no memory
//       of the call: earlier launches may not have written it.
//   int64_t WorkspaceBytes(const NameCall& call, const DeviceShape& shape);
//       kScratch: the workspace of a call that it takes.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "backends/metal/runtime/driver.h"
#include "backends/metal/runtime/error_words.h"
#include "base/macros.h"
#include "plan/step/decoder_backend.h"
#include "plan/step/decoder_calls.h"

namespace marlin::metal {

/// What a call's launches are made from and appended to.
struct CallContext {
  const DeviceShape& shape;
  void* workspace;  ///< WorkspaceBytes of the call, aligned to 64 bytes.
  ErrorWords& errors;
  const Driver& driver;  ///< For addresses.
  std::vector<KernelLaunch> launches = {};
  std::vector<ResultCheck> checks = {};

  /// A word in which a launch reports wrong values, and which is `initial` before it. `error_of`
  /// makes the error of another word; it keeps copies of what it needs. Errors: kOutOfMemory.
  Result<ErrorWords::Word*> TakeWord(const ErrorWords::Word& initial,
                                     std::function<Status(const ErrorWords::Word& word)> error_of) {
    MARLIN_ASSIGN_OR_RETURN(const std::shared_ptr<ErrorWords::Word> word, errors.Take());
    *word = initial;
    checks.emplace_back([word, initial, error_of = std::move(error_of)]() -> Status {
      const ErrorWords::Word found = std::exchange(*word, initial);
      return found == initial ? Status() : error_of(found);
    });
    return word.get();
  }
};

#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, on_metal) \
  bool Takes(const Name##Call& call, const DeviceShape& shape);   \
  Status Launch(const Name##Call& call, CallContext* context);    \
  int64_t WorkspaceBytes(const Name##Call& call, const DeviceShape& shape);
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION

/// RouteTokens of a product with a router's matrix (DecoderBackend::RouteRows).
bool RoutesRows(const RouteRowsCall& call);
Status Launch(const RouteRowsCall& call, CallContext* context);

}  // namespace marlin::metal
