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

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "backends/metal/runtime/driver.h"
#include "backends/metal/runtime/error_words.h"
#include "base/macros.h"
#include "plan/step/decoder_backend.h"
#include "plan/step/decoder_calls.h"

namespace marlin::metal {

/// The inputs and the list of a call's launches.
struct CallContext {
  const DeviceShape& shape;
  void* workspace;  ///< WorkspaceBytes of the call, aligned to 64 bytes.
  ErrorWords& errors;
  const Driver& driver;  ///< For addresses.
  std::vector<KernelLaunch> launches = {};
  std::vector<ResultCheck> checks = {};

  using Words = std::span<const ErrorWords::Word>;
  /// Words in which launches report wrong values, and which are `initial` before them. `error_of`
  /// makes the error of other words; it keeps copies of what it needs. Errors: kOutOfMemory.
  Result<std::span<ErrorWords::Word>> TakeWords(int64_t count, const ErrorWords::Word& initial,
                                                std::function<Status(Words words)> error_of) {
    MARLIN_ASSIGN_OR_RETURN(const std::shared_ptr<ErrorWords::Word> first, errors.Take(count));
    const std::span<ErrorWords::Word> words(first.get(), static_cast<size_t>(count));
    std::fill(words.begin(), words.end(), initial);
    checks.emplace_back([first, words, initial, error_of = std::move(error_of)]() -> Status {
      const auto is_initial = [&](const ErrorWords::Word& word) { return word == initial; };
      if (std::all_of(words.begin(), words.end(), is_initial)) return Status();
      Status error = error_of(words);
      std::fill(words.begin(), words.end(), initial);
      return error;
    });
    return words;
  }
  /// The same for one word.
  Result<ErrorWords::Word*> TakeWord(const ErrorWords::Word& initial,
                                     std::function<Status(const ErrorWords::Word& word)> error_of) {
    const auto of_first = [error_of = std::move(error_of)](Words words) {
      return error_of(words.front());
    };
    MARLIN_ASSIGN_OR_RETURN(const std::span<ErrorWords::Word> words,
                            TakeWords(1, initial, of_first));
    return words.data();
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
