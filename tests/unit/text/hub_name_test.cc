#include "text/hub_name.h"

#include <gtest/gtest.h>

#include <filesystem>

namespace marlin::hub_name_test {
namespace {

TEST(HubName, HasRepositoryRevisionAndFile) {
  const auto plain = ParseHubName("org/name");
  ASSERT_TRUE(plain);
  EXPECT_EQ(plain->repository, "org/name");
  EXPECT_EQ(plain->revision + plain->file, "");
  const auto all = ParseHubName("org/Name-1.5_b@refs/pr/3:UD-Q4_K_XL/x.gguf");
  ASSERT_TRUE(all);
  EXPECT_EQ(all->repository, "org/Name-1.5_b");
  EXPECT_EQ(all->revision, "refs/pr/3");
  EXPECT_EQ(all->file, "UD-Q4_K_XL/x.gguf");
  EXPECT_TRUE(ParseHubName("org/name:a@b.gguf"));
}

TEST(HubName, IsNoPath) {
  for (const char* text : {"",
                           "name",
                           "/",
                           "org/",
                           "/name",
                           "./name",
                           "../name",
                           "org/..",
                           "a/b/c",
                           "org/name/",
                           "~/name",
                           "org/na me",
                           "org/na\nme",
                           "org/a--b",
                           "org/-a",
                           "org/a-",
                           "org/a.",
                           "org/a..b",
                           "org/x.safetensors",
                           "org/x.gguf",
                           "org/x.onnx",
                           "org/config.json",
                           "org/x.prepared",
                           "org/name@",
                           "org/name:",
                           "org/name@../x",
                           "org/name:../x",
                           "org/name:/x",
                           "org/name:a\\b",
                           "org/name@a b"}) {
    EXPECT_FALSE(ParseHubName(text)) << text;
  }
  EXPECT_FALSE(ParseHubName("org/" + std::string(97, 'a')));
  EXPECT_TRUE(ParseHubName("org/" + std::string(96, 'a')));
}

TEST(HubName, IsResolvedUnlessThereIsSuchAPath) {
  ModelRequest request;
  int calls = 0;
  const ModelResolver resolver = [&calls](const ModelRequest& asked) -> Result<std::string> {
    ++calls;
    return "cache/" + asked.name;
  };
  request.name = std::filesystem::temp_directory_path().string();
  EXPECT_EQ(*ResolveModel(request, resolver), request.name);
  request.name = "missing.gguf";
  EXPECT_EQ(*ResolveModel(request, resolver), request.name);
  EXPECT_EQ(calls, 0);
  request.name = "missing-org/name";
  EXPECT_EQ(*ResolveModel(request, resolver), "cache/missing-org/name");
  const Result<std::string> without = ResolveModel(request, {});
  EXPECT_EQ(without.status().code(), Code::kIo);
  EXPECT_EQ(without.status().message(),
            "missing-org/name: no such file or directory; models of the Hugging Face Hub need the "
            "command of the Python package");
}

}  // namespace
}  // namespace marlin::hub_name_test
