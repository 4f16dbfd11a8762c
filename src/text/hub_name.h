// Models of the Hugging Face Hub in place of paths. The command itself downloads nothing; embedders
// (the Python package) supply what does.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "marlin/status.h"

namespace marlin {

/// The parts of a name "ORG/NAME[@REVISION][:FILE]".
struct HubName {
  std::string repository;  ///< "ORG/NAME".
  std::string revision;    ///< A branch, tag or commit; empty: the default branch.
  std::string file;        ///< A GGUF file, or a part of one's name ("Q4_K_M"); empty: none.
};

/// Parses a name of the Hub. None for text that cannot be one, such as an absolute path, a path
/// with "./" or more than one folder, or a file with the suffix of a model.
std::optional<HubName> ParseHubName(std::string_view text);

/// The part of a model that a command reads.
enum class ModelPart : uint8_t {
  kAll,
  kHeaders,  ///< Names, types and shapes of tensors, and config.json.
  kConfig,   ///< config.json.
};

/// A request for a model of the Hub.
struct ModelRequest {
  std::string name;
  ModelPart part = ModelPart::kAll;
  bool offline = false;  ///< Only what was downloaded before.
  bool quiet = false;
  bool verbose = false;
};

/// Returns the path of a model's files on this machine.
using ModelResolver = std::function<Result<std::string>(const ModelRequest&)>;

/// The path for an argument that names a model: the argument itself if there is such a file or
/// directory or if it is no name of the Hub, otherwise the resolver's answer. Errors: kIo for a
/// name without a resolver; the resolver's.
Result<std::string> ResolveModel(const ModelRequest& request, const ModelResolver& resolver);

}  // namespace marlin
