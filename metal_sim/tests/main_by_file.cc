// The main function of test programs of several files. A test knows the file that it is in, so that
// ctest has an entry for each file:
//   PROGRAM                    runs all tests, or the ones of --gtest_filter
//   PROGRAM FILE...            runs the tests in these files, named without folders; one without a
//                              test is an error
//   PROGRAM --others FILE...   fails if there are tests in other files, which no entry would run
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <string>

namespace {

/// The filter that selects the tests of each file.
std::map<std::string, std::string> TestsByFile() {
  std::map<std::string, std::string> tests;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const testing::TestInfo& test = *suite.GetTestInfo(j);
      const char* const file = test.file() == nullptr ? "" : test.file();
      tests[std::filesystem::path(file).filename().string()] +=
          std::string(suite.name()) + '.' + test.name() + ':';
    }
  }
  return tests;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  std::map<std::string, std::string> tests = TestsByFile();
  const bool others = argc > 1 && std::string(argv[1]) == "--others";
  std::string filter;
  for (int i = others ? 2 : 1; i < argc; ++i) {
    const auto found = tests.find(argv[i]);
    if (found == tests.end()) {
      std::fprintf(stderr, "no test is in %s\n", argv[i]);
      return 1;
    }
    filter += found->second;
    tests.erase(found);
  }
  if (others) {
    for (const auto& [file, names] : tests) {
      std::fprintf(stderr, "in '%s', which no entry runs: %s\n", file.c_str(), names.c_str());
    }
    return tests.empty() ? 0 : 1;
  }
  // The child process of a death test has the filter of its test.
  if (!filter.empty() && testing::GTEST_FLAG(filter) == "*") testing::GTEST_FLAG(filter) = filter;
  return RUN_ALL_TESTS();
}
