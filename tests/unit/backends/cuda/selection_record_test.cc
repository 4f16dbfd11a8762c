// Checks selection against measurements: for every GEMM of the committed record the selected kernel
// and variant is at most 3 % slower than any other that may be selected, and at most 4 % slower
// than cuBLAS's bf16 GEMM, isolated and back-to-back. selection_misses.txt lists exactly the
// exceptions, with reasons: the list may only shrink.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "../../../source_directory.h"
#include "backends/cuda/plan/kernel_table.h"
#include "backends/cuda/tuning/shipped_tuning.h"
#include "plan/gemm/kernel_name.h"
#include "plan/gemm/select.h"

namespace marlin::cuda::selection_record_test {
namespace {

using Json = nlohmann::json;

constexpr double kRowNoise = 1.03;
constexpr double kPeerNoise = 1.04;

std::string SourcePath(const char* name) { return SourceDirectory() + "/" + name; }

/// A GEMM of the record, and the times of every kernel.
struct Product {
  std::string name;  ///< "fp4_e2m1 128 fp16 bf16 16 4096 4096"
  GemmDesc desc;
  std::string device;
  std::map<std::string, double> alone;  ///< Isolated, by kernel that may be selected.
  std::map<std::string, double> chain;
  double peer = 0;  ///< The baseline; 0: none ran.
};

Product ProductOf(const Json& run, const Json& row) {
  Product product;
  GemmDesc& desc = product.desc;
  desc.m = row["m"];
  desc.n = row["n"];
  desc.k = row["k"];
  desc.format = *ParseFormat(row["format"].get<std::string>());
  desc.group_size = row["group_size"];
  desc.scale_type = *ParseScaleType(row["scale_type"].get<std::string>());
  desc.has_zeros = GetFormatInfo(desc.format).zero_point == ZeroPoint::kRequired;
  const auto activations = row["activations"].get<std::string>();
  desc.a_type = activations == "bf16"  ? DType::kBf16
                : activations == "f16" ? DType::kF16
                                       : DType::kF32;
  desc.c_type = desc.a_type;
  desc.weights.tiled = desc.format != Format::kFp32 && desc.scale_type != ScaleType::kF32;
  desc.weights.fits_f16 = true;
  const Json& arguments = run["arguments"];
  const auto option = std::find(arguments.begin(), arguments.end(), "--accuracy");
  const std::string accuracy = option == arguments.end() ? "default" : *std::next(option);
  if (accuracy == "exact") desc.accuracy = Accuracy::kExact;
  if (accuracy == "w4a8") desc.accuracy = Accuracy::kW4A8;
  desc.weights.fits_fp8 = desc.accuracy == Accuracy::kW4A8;
  product.device = run["device"]["model"];
  product.name = row["format"].get<std::string>() + " " + std::to_string(desc.group_size) + " " +
                 row["scale_type"].get<std::string>() + " " + activations + " " + accuracy + " " +
                 std::to_string(desc.m) + " " + std::to_string(desc.n) + " " +
                 std::to_string(desc.k);
  for (const Json& peer : row.value("peers", Json::array())) product.peer = peer["seconds"];
  return product;
}

/// The times of every kernel of a result.
void AddTimes(const Json& row, Product* product) {
  if (!row.contains("candidates")) {
    product->alone[row["kernel"]] = row["seconds"];
    product->chain[row["kernel"]] = row["chain"]["seconds"];
    return;
  }
  for (const Json& candidate : row["candidates"]) {
    if (!candidate["selectable"].get<bool>()) continue;
    product->alone[candidate["kernel"]] = candidate["seconds"];
    if (!candidate.contains("chain_seconds")) continue;
    product->chain[candidate["kernel"]] = candidate["chain_seconds"];
  }
}

/// The GEMMs of the record, once for each run that measured them.
std::vector<Product> ReadRecord() {
  std::ifstream file(SourcePath("bench/records/gemm-h200.json"));
  const Json record = Json::parse(file);
  std::vector<Product> products;
  for (const Json& run : record["runs"]) {
    for (const Json& row : run["results"]) {
      if (row["op"] != "gemm" || !row["planned"].get<bool>()) continue;
      Product product = ProductOf(run, row);
      AddTimes(row, &product);
      products.push_back(std::move(product));
    }
  }
  return products;
}

/// The kernel that the library selects for a GEMM, with its variant.
std::string Chosen(const Product& product) {
  static const auto* const sections =
      new std::vector<TuningSection>(*ParseTuning(ShippedTuning(), "shipped"));
  TuningTable table;
  table.Add(*sections, product.device);
  const DeviceShape device;  // An H200.
  const auto can_run_as = [&](const KernelDesc& kernel, const GemmDesc& desc,
                              const KernelVariant& variant) {
    return CanRunAs(kernel, desc, device, variant);
  };
  const auto cost = [&](const KernelDesc& kernel, const GemmDesc& desc) {
    return FamilyOf(kernel).microseconds(desc, device);
  };
  DeviceProperties properties;
  properties.level = Isa::kCuda;
  properties.has_dense_library = [] { return true; };
  const Result<KernelChoice> choice =
      SelectKernel(product.desc, {properties, CudaKernels(), cost, can_run_as, &table}, "");
  EXPECT_TRUE(choice.ok()) << product.name << ": " << choice.status().message();
  if (!choice.ok()) return {};
  if (!choice->variant.automatic()) return choice->ToString();
  const std::vector<KernelVariant> variants = VariantsOf(*choice->kernel, product.desc, device);
  return ToString(choice->kernel->name, variants.empty() ? KernelVariant() : variants.front());
}

/// The seconds of a kernel, 0 if it was not measured; records older than variants name kernels
/// only.
double SecondsOf(const std::map<std::string, double>& seconds, const std::string& kernel) {
  const auto found = seconds.find(kernel);
  if (found != seconds.end()) return found->second;
  const auto plain = seconds.find(kernel.substr(0, kernel.find('@')));
  return plain == seconds.end() ? 0 : plain->second;
}

/// Lines in the format of selection_misses.txt, without reasons.
void AddMisses(const Product& product, const std::string& chosen, const char* mode,
               const std::map<std::string, double>& seconds, std::set<std::string>* misses) {
  const double taken = SecondsOf(seconds, chosen);
  if (taken == 0) return;
  const auto best =
      std::min_element(seconds.begin(), seconds.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  if (taken > kRowNoise * best->second) {
    misses->insert("kernel " + product.name + " " + mode);
  }
  if (product.peer > 0 && taken > kPeerNoise * product.peer) {
    misses->insert("cublas " + product.name + " " + mode);
  }
}

TEST(SelectionRecord, NothingIsSlowerThanItNeedsToBe) {
  const std::vector<Product> products = ReadRecord();
  ASSERT_GT(products.size(), 100U);
  std::set<std::string> misses;
  for (const Product& product : products) {
    const std::string chosen = Chosen(product);
    AddMisses(product, chosen, "alone", product.alone, &misses);
    AddMisses(product, chosen, "chain", product.chain, &misses);
    // If every candidate was measured, so was the selected one.
    if (product.alone.size() > 1) {
      EXPECT_GT(SecondsOf(product.alone, chosen), 0) << product.name;
    }
  }

  std::ifstream file(SourcePath("tests/unit/backends/cuda/selection_misses.txt"));
  ASSERT_TRUE(file);
  std::set<std::string> listed;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.front() == '#') continue;
    const size_t colon = line.find(": ");
    EXPECT_LT(colon + 2, line.size()) << "without a reason: " << line;
    EXPECT_TRUE(listed.insert(line.substr(0, colon)).second) << "twice: " << line;
  }
  for (const std::string& miss : misses) {
    EXPECT_TRUE(listed.contains(miss)) << "slower than necessary: " << miss;
  }
  for (const std::string& line : listed) {
    EXPECT_TRUE(misses.contains(line)) << "no longer a miss, remove it: " << line;
  }
}

}  // namespace
}  // namespace marlin::cuda::selection_record_test
