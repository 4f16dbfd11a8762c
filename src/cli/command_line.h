// Runs the command line, in this program or for another one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "marlin/status.h"
#include "text/examination.h"
#include "text/hub_name.h"
#include "text/text_codec.h"

namespace marlin::cli {

/// Parses the command line, runs the command and returns the process's exit code. The factory makes
/// tokenizers for commands that take text; without one they take token ids. The resolver downloads
/// models of the Hub; without one they are an error. `doctor` adds the findings of the examination.
int RunCommandLine(int argc, char** argv, const TextCodecFactory& text_codecs = {},
                   const ModelResolver& model_resolver = {}, const Examination& examination = {});

/// Runs a command inside another program: `words` are its name and its arguments. Returns the JSON
/// document that --json prints; one that says `"ok": false` is no error. `progress` may throw,
/// which ends the command. Errors: the command's; kInvalidArgument for wrong arguments.
Result<std::string> RunForDocument(const std::vector<std::string>& words,
                                   const ModelResolver& model_resolver = {},
                                   const std::function<void(int64_t, int64_t)>& progress = {});

}  // namespace marlin::cli
