#include "base/read_file.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

namespace marlin::read_file_test {
namespace {

class ReadFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "read-file-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string Path(const std::string& name) const { return (directory_ / name).string(); }
  std::string Write(const std::string& name, const std::string& content) const {
    std::ofstream(Path(name), std::ios::binary) << content;
    return Path(name);
  }

  std::filesystem::path directory_;
};

TEST_F(ReadFileTest, ReadsTheWhole) {
  for (const size_t size : {0U, 1U, 4095U, 4096U, 4097U, 1'000'000U}) {
    const std::string content(size, 'x');
    const std::string path = Write("file", content);
    const auto text = ReadFile(path, 1'000'000);
    ASSERT_TRUE(text.ok()) << text.status().message();
    EXPECT_EQ(*text, content);
  }
  std::filesystem::create_symlink("file", Path("link"));
  EXPECT_TRUE(ReadFile(Path("link"), 1'000'000).ok());
}

// Files whose reported size is 0, regardless of their content.
TEST_F(ReadFileTest, ReadsFilesThatSayNothingOfTheirSize) {
  if (!std::filesystem::exists("/proc/self/maps")) GTEST_SKIP() << "no /proc";
  const auto text = ReadFile("/proc/self/maps", 100'000'000);
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_FALSE(text->empty());
  EXPECT_EQ(ReadFile("/proc/self/maps", 5).status().code(), Code::kMalformedFile);
}

TEST_F(ReadFileTest, HasALimit) {
  const std::string path = Write("file", "12345");
  EXPECT_TRUE(ReadFile(path, 5).ok());
  const Status status = ReadFile(path, 4).status();
  EXPECT_EQ(status.code(), Code::kMalformedFile);
  EXPECT_EQ(status.message(), path + ": 5 bytes, at most 4 are accepted");
}

TEST_F(ReadFileTest, RefusesWhatIsNoRegularFileWithoutWaiting) {
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink("pipe", Path("link"));
  const int server = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, Path("socket").c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(server, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  for (const std::string& path : {Path("pipe"), Path("link"), Path("socket"), directory_.string(),
                                  std::string("/dev/zero"), Path("absent")}) {
    const Status status = ReadFile(path, 100).status();
    EXPECT_EQ(status.code(), Code::kIo) << path;
    EXPECT_EQ(status.message().find(path), 0U) << status.message();
  }
  EXPECT_NE(ReadFile(Path("pipe"), 100).status().message().find("not a regular file"),
            std::string::npos);
  close(server);
}

}  // namespace
}  // namespace marlin::read_file_test
