// Files of prepared weights: an opened file's parts are inside the file, for any index. Hardly any
// input has the right checksums, so the index is sealed first, after 192 bytes of weights.
#include <string>

#include "checkpoint/files/io.h"
#include "fuzz_target.h"
#include "model/prepared_file.h"
#include "temporary_folder.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const marlin::TemporaryFolder folder;
  constexpr int64_t kEnd = marlin::kPreparedDataBegin + 192;
  const std::string index(marlin::TextOf(data, size));
  std::string file = marlin::BuildPreparedHead(marlin::kPreparedVersion, kEnd, index);
  file.resize(kEnd, 'w');
  folder.Write("prepared", file + index);
  marlin::SystemIo io;
  const auto opened = marlin::PreparedFile::Open(io, folder.Path("prepared"));
  if (!opened.ok()) {
    marlin::CheckError(opened.status());
    return 0;
  }
  int64_t end = marlin::kPreparedDataBegin;
  for (const marlin::PreparedPart& part : (*opened)->parts()) {
    MARLIN_FUZZ_CHECK(part.offset == end && part.offset % 64 == 0);
    MARLIN_FUZZ_CHECK(part.bytes >= 0 && part.bytes <= kEnd - part.offset);
    const auto input = static_cast<int64_t>((*opened)->Input(part).size());
    const int arrays = (part.spec.has_permutation ? 1 : 0) + (part.spec.has_input_scale ? 1 : 0);
    MARLIN_FUZZ_CHECK(input == arrays * 4 * part.spec.k);
    const auto matrix = static_cast<int64_t>((*opened)->Data(part).size());
    MARLIN_FUZZ_CHECK(matrix + input == part.bytes);
    end = (part.offset + part.bytes + 63) / 64 * 64;
  }
  MARLIN_FUZZ_CHECK(end == kEnd);
  const marlin::Status intact = (*opened)->VerifyChecksums();
  if (!intact.ok()) marlin::CheckError(intact);
  return 0;
}
