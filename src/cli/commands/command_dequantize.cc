// dequantize: converts a quantized directory back to a plain checkpoint.
#include <fmt/core.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/macros.h"
#include "base/seconds_since.h"
#include "base/text_table.h"
#include "cli/command.h"
#include "cli/progress_bar.h"
#include "marlin/checkpoint.h"

namespace marlin::cli {
namespace {

Result<DType> ParseOutputType(const std::string& name) {
  if (name == "bf16") return DType::kBf16;
  if (name == "fp16") return DType::kF16;
  if (name == "fp32") return DType::kF32;
  return Invalid(fmt::format("--dtype: unknown type '{}'; known: bf16, fp16, fp32", name));
}

class DequantizeCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("QUANT", &source_,
                         "A quantized directory or file, also of another program");
    arguments.Model(&source_);
    arguments.RequiredOption("-o,--output", &output_, "DST",
                             "The directory to write; it appears whole or not at all");
    arguments.Option("--dtype", &dtype_, "TYPE", "bf16, fp16 or fp32");
    arguments.Choices({"bf16", "fp16", "fp32"});
    arguments.Flag("--allow-extra-tensors", &allow_extra_tensors_,
                   "Leave out tensors that the index of QUANT does not list");
    arguments.Flag("--overwrite", &overwrite_, "Replace DST if it exists");
  }

  Status Run(Console& console) override {
    MARLIN_ASSIGN_OR_RETURN(const DType dtype, ParseOutputType(dtype_));
    const auto start = std::chrono::steady_clock::now();
    {
      ProgressBar bar(console, "dequantize");
      MARLIN_RETURN_IF_ERROR(
          DequantizeCheckpoint(source_, output_, dtype, overwrite_,
                               [&bar](int64_t done, int64_t total) { bar.Update(done, total); },
                               {allow_extra_tensors_}));
    }
    const double elapsed = SecondsSince(start);
    MARLIN_ASSIGN_OR_RETURN(const Checkpoint written, Checkpoint::Open(output_));
    int64_t bytes = 0;
    for (const TensorInfo& tensor : written.tensors()) bytes += tensor.bytes;
    if (console.json()) {
      return console.PrintJson({{"output", output_},
                                {"dtype", dtype_},
                                {"tensors", written.tensors().size()},
                                {"bytes", bytes},
                                {"seconds", elapsed}});
    }
    return console.Print(fmt::format("{}: {} in {}, {}, {:.1f} s\n", output_,
                                     FormatCounted(std::ssize(written.tensors()), "tensor"), dtype_,
                                     FormatBytes(bytes), elapsed));
  }

 private:
  std::string source_;
  std::string output_;
  std::string dtype_ = "bf16";
  bool allow_extra_tensors_ = false;
  bool overwrite_ = false;
};

}  // namespace

std::unique_ptr<Command> Make_dequantize() { return std::make_unique<DequantizeCommand>(); }

}  // namespace marlin::cli
