#include "marlin/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "base/macros.h"

namespace marlin::status_test {
namespace {

TEST(Status, DefaultIsOkAndEmpty) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), Code::kOk);
  EXPECT_EQ(status.message(), "");
}

TEST(Status, ContextGoesBeforeTheMessageAndKeepsTheCode) {
  const Status status = Status(Code::kIo, "cannot read").WithContext("a.safetensors");
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_EQ(status.message(), "a.safetensors: cannot read");
  EXPECT_TRUE(Status().WithContext("anything").ok());
  EXPECT_EQ(Status().WithContext("anything").message(), "");
}

TEST(Status, EveryCodeHasItsOwnName) {
  std::string seen = "|";
  for (int code = 0; code <= static_cast<int>(Code::kInternal); ++code) {
    const std::string name(CodeName(static_cast<Code>(code)));
    EXPECT_NE(name, "unknown") << code;
    EXPECT_EQ(seen.find("|" + name + "|"), std::string::npos) << name;
    seen += name + "|";
  }
  EXPECT_EQ(CodeName(static_cast<Code>(200)), "unknown");
}

TEST(Result, HoldsAValueOrAnError) {
  Result<int> value = 7;
  ASSERT_TRUE(value.ok());
  EXPECT_TRUE(static_cast<bool>(value));
  EXPECT_EQ(*value, 7);
  EXPECT_TRUE(value.status().ok());

  const Result<int> error = Status(Code::kUnsupported, "no");
  EXPECT_FALSE(error.ok());
  EXPECT_EQ(error.status().code(), Code::kUnsupported);
  EXPECT_EQ(error.status().message(), "no");
}

TEST(Result, MovesTheValueOut) {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(3);
  const std::unique_ptr<int> taken = *std::move(result);
  ASSERT_NE(taken, nullptr);
  EXPECT_EQ(*taken, 3);
}

Result<int> Half(int value) {
  if (value % 2 != 0) return Status(Code::kInvalidArgument, std::to_string(value) + " is odd");
  return value / 2;
}

Result<int> Quarter(int value) {
  MARLIN_ASSIGN_OR_RETURN(const int half, Half(value));
  MARLIN_ASSIGN_OR_RETURN(const int quarter, Half(half));
  return quarter;
}

Status CheckEven(int value, int* checked) {
  MARLIN_RETURN_IF_ERROR(Half(value).status());
  ++*checked;
  return {};
}

TEST(Macros, ReturnTheFirstError) {
  ASSERT_TRUE(Quarter(12).ok());
  EXPECT_EQ(*Quarter(12), 3);
  EXPECT_EQ(Quarter(6).status().message(), "3 is odd");
  int checked = 0;
  EXPECT_TRUE(CheckEven(2, &checked).ok());
  EXPECT_EQ(CheckEven(5, &checked).message(), "5 is odd");
  EXPECT_EQ(checked, 1);
}

}  // namespace
}  // namespace marlin::status_test
