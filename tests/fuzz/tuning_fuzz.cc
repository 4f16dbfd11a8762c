// Tuning tables: an accepted table can be written, read again, and looked up.
#include <algorithm>
#include <string>

#include "fuzz_target.h"
#include "plan/gemm/tuning_table.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = marlin::TextOf(data, size);
  const auto sections = marlin::ParseTuning(text, "fuzz");
  if (!sections.ok()) {
    marlin::CheckError(sections.status());
    return 0;
  }
  const std::string written = marlin::FormatTuning(*sections);
  const auto again = marlin::ParseTuning(written, "again");
  MARLIN_FUZZ_CHECK(again.ok());
  MARLIN_FUZZ_CHECK(marlin::FormatTuning(*again) == written);
  // A table is made of all sections, so that one for each of them would take quadratic time.
  constexpr size_t kMostTables = 8;
  for (size_t i = 0; i < std::min(sections->size(), kMostTables); ++i) {
    const marlin::TuningSection& section = (*sections)[i];
    marlin::TuningTable table;
    table.Add(*sections, section.device);
    marlin::GemmDesc desc;
    desc.m = 16;
    desc.n = desc.k = 4096;
    desc.group_size = 128;
    desc.a_type = desc.c_type = marlin::DType::kBf16;
    const marlin::TuningEntry* const found = table.Find(desc);
    MARLIN_FUZZ_CHECK(found == nullptr || (found->m >= 16 && found->m < 32));
  }
  return 0;
}
