// Compiled programs that processes share: their names, what is found, what is compiled again.
#include "metal_sim/program_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "metal_program_fixture.h"

namespace metal_sim {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;

CacheKey KeyOf(const std::vector<std::string>& texts) {
  CacheKey key;
  for (const std::string& text : texts) key.Add(text);
  return key;
}

TEST(CacheKey, DependsOnEveryTextAndOnWhereTextsEnd) {
  const std::set<std::string> names = {KeyOf({}).Name(),          KeyOf({""}).Name(),
                                       KeyOf({"", ""}).Name(),    KeyOf({"ab", "c"}).Name(),
                                       KeyOf({"a", "bc"}).Name(), KeyOf({"abc"}).Name(),
                                       KeyOf({"abd"}).Name(),     KeyOf({"bac"}).Name()};
  EXPECT_EQ(names.size(), 8u);
  EXPECT_EQ(KeyOf({"ab", "c"}).Name(), KeyOf({"ab", "c"}).Name());
  EXPECT_EQ(KeyOf({"ab", "c"}).Name().size(), 32u);
}

TEST(CacheKey, IsThatOfAnySourceFolder) {
  EXPECT_EQ(WithoutFolders("# 1 \"/tmp/a/b.metal\" 1\nx = \"/tmp/a\";\n#line 7 \"a/c.h\"\n\ny"),
            "# 1 \"b.metal\" 1\nx = \"/tmp/a\";\n#line 7 \"c.h\"\n\ny");
  EXPECT_EQ(WithoutFolders("#line 1\n# 3 \"c.h\"\n# 4 \"a/\n"), "#line 1\n# 3 \"c.h\"\n# 4 \"a/\n");
  EXPECT_EQ(WithoutFolders(""), "");
}

/// A cache in a folder of its own, and files next to it.
class ProgramCacheTest : public ::testing::Test {
 protected:
  void TearDown() override { fs::remove_all(root_); }

  fs::path FileOf(const std::string& text) const {
    fs::create_directories(root_);
    const fs::path path = root_ / "library";
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }

  std::string Found(const std::string& name) const {
    const fs::path path = root_ / ("found-" + name);
    if (!cache_.Get(KeyOf({name}), path)) return "none";
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  fs::path PathOf(const std::string& name) const {
    return folder_ / (KeyOf({name}).Name() + ".so");
  }

  size_t Count() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), {}));
  }

  const fs::path root_ =
      fs::path(::testing::TempDir()) / ("program_cache." + std::to_string(getpid()));
  const fs::path folder_ = root_ / "cache";
  const ProgramCache cache_{folder_};
};

TEST_F(ProgramCacheTest, FindsWhatWasPut) {
  EXPECT_EQ(Found("a"), "none");
  cache_.Put(KeyOf({"a"}), FileOf("first"));
  cache_.Put(KeyOf({"b"}), FileOf(std::string(100000, 'b')));
  EXPECT_EQ(Found("a"), "first");
  EXPECT_EQ(Found("b"), std::string(100000, 'b'));
  cache_.Put(KeyOf({"a"}), FileOf("second"));
  EXPECT_EQ(Found("a"), "second");
  EXPECT_EQ(Found("c"), "none");
  EXPECT_EQ(Count(), 2u);
}

TEST_F(ProgramCacheTest, WithoutAFolderFindsNothing) {
  const ProgramCache none{fs::path()};
  none.Put(KeyOf({"a"}), FileOf("first"));
  EXPECT_FALSE(none.Get(KeyOf({"a"}), root_ / "found"));
  EXPECT_FALSE(fs::exists(root_ / "found"));
}

TEST_F(ProgramCacheTest, AnErrorLeavesNothingBehind) {
  cache_.Put(KeyOf({"a"}), root_ / "missing");
  EXPECT_EQ(Found("a"), "none");
  EXPECT_EQ(Count(), 0u);
  const ProgramCache nowhere{FileOf("a file") / "folder"};
  nowhere.Put(KeyOf({"a"}), FileOf("first"));
  EXPECT_FALSE(nowhere.Get(KeyOf({"a"}), root_ / "found"));
}

TEST_F(ProgramCacheTest, ThreadsFindWholeFiles) {
  const std::string text(1 << 20, 'x');
  const fs::path file = FileOf(text);
  cache_.Put(KeyOf({"a"}), file);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const fs::path mine = root_ / ("mine-" + std::to_string(i));
      for (int round = 0; round < 20; ++round) {
        cache_.Put(KeyOf({"a"}), file);
        ASSERT_TRUE(cache_.Get(KeyOf({"a"}), mine));
        ASSERT_EQ(fs::file_size(mine), text.size());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Count(), 1u);
}

TEST_F(ProgramCacheTest, KeepsTheNewestLibraries) {
  const auto now = fs::file_time_type::clock::now();
  fs::create_directories(folder_);
  cache_.Put(KeyOf({"0"}), FileOf("0"));
  for (size_t i = 0; i < ProgramCache::kMostLibraries; ++i) {
    const fs::path path = PathOf(std::to_string(i));
    if (i != 0) fs::copy_file(PathOf("0"), path);
    fs::last_write_time(path, now - std::chrono::hours(1000 - static_cast<int>(i)));
  }
  // A library that is found becomes the newest.
  EXPECT_EQ(Found("0"), "0");
  cache_.Put(KeyOf({"new"}), FileOf("new"));
  EXPECT_EQ(Count(), ProgramCache::kMostLibraries);
  EXPECT_EQ(Found("0"), "0");
  EXPECT_EQ(Found("1"), "none");
  EXPECT_EQ(Found("2"), "0");
  EXPECT_EQ(Found("new"), "new");
}

TEST_F(ProgramCacheTest, KeepsNoMoreBytesThanItsLimit) {
  fs::create_directories(folder_);
  const auto now = fs::file_time_type::clock::now();
  for (int i = 0; i < 3; ++i) {  // Files without content, which take no room.
    const fs::path path = PathOf(std::to_string(i));
    std::ofstream(path).close();
    fs::resize_file(path, ProgramCache::kMostBytes / 2 - 1000);
    fs::last_write_time(path, now - std::chrono::hours(9 - i));
  }
  cache_.Put(KeyOf({"new"}), FileOf("new"));
  EXPECT_FALSE(fs::exists(PathOf("0")));
  EXPECT_TRUE(fs::exists(PathOf("1")));
  EXPECT_TRUE(fs::exists(PathOf("2")));
  EXPECT_EQ(Found("new"), "new");
}

TEST_F(ProgramCacheTest, APartOfAFileIsNone) {
  cache_.Put(KeyOf({"a"}), FileOf(std::string(1000, 'a')));
  const uintmax_t whole = fs::file_size(PathOf("a"));
  for (const uintmax_t bytes : {whole - 1, uintmax_t{1000}, uintmax_t{500}, uintmax_t{0}}) {
    fs::resize_file(PathOf("a"), bytes);
    EXPECT_EQ(Found("a"), "none") << bytes;
    EXPECT_FALSE(fs::exists(root_ / "found-a"));
  }
  cache_.Put(KeyOf({"a"}), FileOf("again"));
  EXPECT_EQ(Found("a"), "again");
}

TEST_F(ProgramCacheTest, RemovesWhatWritersLeft) {
  fs::create_directories(folder_);
  for (const char* const name : {"part-old", "part-new"}) std::ofstream(folder_ / name) << "part";
  fs::last_write_time(folder_ / "part-old",
                      fs::file_time_type::clock::now() - std::chrono::hours(2));
  cache_.Put(KeyOf({"a"}), FileOf("first"));
  EXPECT_FALSE(fs::exists(folder_ / "part-old"));
  EXPECT_TRUE(fs::exists(folder_ / "part-new"));
}

/// Sets a variable of the environment, or unsets it, until the end of the scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    const char* const before = getenv(name);
    if (before != nullptr) before_ = before;
    Set(value);
  }
  ~Variable() { Set(before_ ? before_->c_str() : nullptr); }

 private:
  void Set(const char* value) const {
    if (value == nullptr) {
      unsetenv(name_);
    } else {
      setenv(name_, value, 1);
    }
  }
  const char* name_;
  std::optional<std::string> before_;
};

TEST_F(ProgramCacheTest, TheEnvironmentSaysWhere) {
  const fs::path caches = root_ / "caches";
  const Variable home("XDG_CACHE_HOME", caches.c_str());
  const auto kept_in = [&](const fs::path& folder) {
    fs::remove_all(folder);
    ProgramCache::OfEnvironment().Put(KeyOf({"a"}), FileOf("first"));
    return fs::exists(folder / PathOf("a").filename());
  };
  {
    const Variable unset("METAL_SIM_CACHE", nullptr);
    EXPECT_TRUE(kept_in(caches / "metal-sim"));
    // Others could put libraries there, which would be run.
    fs::permissions(caches / "metal-sim", fs::perms::others_write, fs::perm_options::add);
    EXPECT_FALSE(ProgramCache::OfEnvironment().Get(KeyOf({"a"}), root_ / "found"));
    const Variable no_caches("XDG_CACHE_HOME", nullptr);
    const Variable user("HOME", root_.c_str());
    EXPECT_TRUE(kept_in(root_ / ".cache/metal-sim"));
    const Variable no_home("HOME", nullptr);
    const Variable temporary("TMPDIR", root_.c_str());
    EXPECT_TRUE(kept_in(root_ / ("metal-sim-cache-" + std::to_string(geteuid()))));
  }
  const Variable named("METAL_SIM_CACHE", folder_.c_str());
  EXPECT_TRUE(kept_in(folder_));
  const Variable off("METAL_SIM_CACHE", "");
  EXPECT_FALSE(kept_in(caches / "metal-sim"));
}

/// Programs with a cache of the test's own.
class CachedProgram : public MetalProgramTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(MetalProgramTest::SetUp());
    const char* const named = getenv("METAL_SIM_CACHE");
    if (named != nullptr) before_ = named;
    cache_ = path_.parent_path() / "cache";
    setenv("METAL_SIM_CACHE", cache_.c_str(), 1);
  }

  void TearDown() override {
    setenv("METAL_SIM_CACHE", before_.c_str(), 1);
    MetalProgramTest::TearDown();
  }

  /// The value that the kernel `store` stores.
  float Stored() {
    std::vector<float> out(1, -1.0F);
    Launch launch = OneThreadgroup(1);
    Bind(0, &out, &launch);
    EXPECT_TRUE(Run("store", launch).clean());
    return out[0];
  }

  std::vector<fs::path> Libraries() const {
    std::vector<fs::path> found;
    for (const fs::directory_entry& entry : fs::directory_iterator(cache_)) {
      found.push_back(entry.path());
    }
    return found;
  }

  static std::string Store(const std::string& value) {
    return "kernel void store(device float* out [[buffer(0)]]) { out[0] = " + value + "; }";
  }

  std::string before_;
  fs::path cache_;
};

TEST_F(CachedProgram, IsCompiledOnce) {
  Compile(Store("1"));
  EXPECT_EQ(Stored(), 1.0F);
  ASSERT_EQ(Libraries().size(), 1u);
  const fs::path first = Libraries()[0];
  Compile(Store("2"));
  EXPECT_EQ(Stored(), 2.0F);
  ASSERT_EQ(Libraries().size(), 2u);
  // The second program in the first one's place is what the first source gives from now on,
  // wherever it is.
  const fs::path second = Libraries()[Libraries()[0] == first ? 1 : 0];
  fs::copy_file(second, first, fs::copy_options::overwrite_existing);
  const fs::path here = path_;
  path_ = here.parent_path() / "other" / here.filename();
  fs::create_directories(path_.parent_path());
  Compile(Store("1"));
  path_ = here;
  EXPECT_EQ(Stored(), 2.0F);
  EXPECT_EQ(Libraries().size(), 2u);
}

TEST_F(CachedProgram, DependsOnOptions) {
  Compile(Store("VALUE"), {.defines = {"VALUE=1"}});
  Compile(Store("VALUE"), {.defines = {"VALUE=3"}});
  EXPECT_EQ(Stored(), 3.0F);
  Compile(Store("1"), {.fast_math = true});
  Compile(Store("1"), {.msl_version = 300});
  EXPECT_EQ(Libraries().size(), 4u);
}

TEST_F(CachedProgram, RunsTwiceAtOnce) {
  const std::string text = "constant int value [[function_constant(0)]];\n" + Store("float(value)");
  const auto set = [](MetalProgram& program, uint8_t value) {
    ASSERT_TRUE(program.SetConstants({{0, {value, 0, 0, 0}}}).ok());
  };
  Compile(text);
  const std::unique_ptr<MetalProgram> first = std::move(program_);
  set(*first, 5);
  Compile(text);
  set(*program_, 7);
  EXPECT_EQ(Libraries().size(), 1u);
  EXPECT_EQ(Stored(), 7.0F);
  program_ = nullptr;
  Compile(text);
  set(*program_, 9);
  EXPECT_EQ(Stored(), 9.0F);
}

TEST_F(CachedProgram, CompilesAgainWhatCannotBeLoaded) {
  Compile(Store("1"));
  ASSERT_EQ(Libraries().size(), 1u);
  const fs::path library = Libraries()[0];
  const std::string text(1000, 'x');
  std::fstream file(library, std::ios::in | std::ios::out | std::ios::binary);
  file << text;  // Its end is right.
  file.close();
  Compile(Store("1"));
  EXPECT_EQ(Stored(), 1.0F);
  Compile(Store("1"));
  EXPECT_EQ(Stored(), 1.0F);
}

TEST_F(CachedProgram, KnowsItsLines) {
  for (int i = 0; i < 2; ++i) {
    Compile("kernel void store(device float* out [[buffer(0)]]) {\n  out[1] = fabs(out[0]);\n}");
    std::vector<float> out(1, -1.0F);
    Launch launch = OneThreadgroup(1);
    Bind(0, &out, &launch);
    EXPECT_THAT(Places(Run("store", launch)), ElementsAre("out of bounds sample.metal:4 "));
  }
  EXPECT_EQ(Libraries().size(), 1u);
}

}  // namespace
}  // namespace metal_sim
