// The call of `serve` into the program that has the server.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/model.h"
#include "marlin/speculation.h"
#include "marlin/status.h"

namespace marlin {

struct ServeRequest {
  std::string directory;
  std::optional<std::string> compare;  ///< A second model's directory.
  std::string host;
  int64_t port = 0;  ///< 0: any that is free.
  std::optional<std::string> api_key;
  bool no_api_key = false;  ///< Serve addresses of a network without a key.
  std::vector<std::string> cors_origins;
  std::optional<std::string> model_name;  ///< For clients; none: the directory's.
  int64_t max_running = 0;                ///< As SchedulerOptions has these.
  int64_t max_waiting = 0;
  int64_t prefill_tokens = 0;
  bool prefix_cache = true;
  double timeout_seconds = 0;                ///< A request's; 0: any.
  std::optional<std::string> template_file;  ///< A chat template instead of the model's own.
  std::optional<std::string> recipe;         ///< Quantize the model so first.
  bool json = false;                         ///< Print the start as a document.
  bool quiet = false;                        ///< Log nothing.
  /// Opens the model of a directory: first this one, or a quantized one, then the second.
  std::function<Result<Model>(const std::string& directory)> open;
  /// How texts of the first model are guessed; opens its draft.
  std::function<Result<SpeculationOptions>(const Model& model)> speculation;
  /// Prints a document as one line; false once the reader of stdout is gone.
  std::function<Result<bool>(std::string_view json)> print_json;
};

}  // namespace marlin
