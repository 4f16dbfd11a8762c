// Launches that need a barrier between them, found from what they did.
#include "metal_sim/launch_order.h"

#include <gtest/gtest.h>

#include <array>
#include <utility>
#include <vector>

namespace metal_sim {
namespace {

std::array<std::byte, 400> memory;

struct Bytes {
  size_t begin;
  size_t end;
};

/// An access of a buffer at [first, last) of the memory; offsets are the memory's.
ObservedAccess Access(Bytes buffer, std::vector<Bytes> read, std::vector<Bytes> written) {
  const size_t bytes = buffer.end - buffer.begin;
  ObservedAccess access{"data", memory.data() + buffer.begin, bytes, ByteSet(bytes),
                        ByteSet(bytes)};
  for (const Bytes& part : read) access.read.Add(part.begin - buffer.begin, part.end - part.begin);
  for (const Bytes& part : written) {
    access.written.Add(part.begin - buffer.begin, part.end - part.begin);
  }
  return access;
}

TEST(LaunchOrder, FindsBytesThatOneWrites) {
  struct Case {
    ObservedAccess first;
    ObservedAccess second;
    const char* text;  // Part of the finding; null: none.
  };
  const Case cases[] = {
      {Access({0, 400}, {}, {{0, 200}}), Access({0, 400}, {{200, 400}}, {{300, 310}}), nullptr},
      {Access({0, 400}, {{0, 400}}, {}), Access({0, 400}, {{0, 400}}, {}), nullptr},
      {Access({0, 100}, {}, {{0, 100}}), Access({100, 200}, {}, {{100, 200}}), nullptr},
      {Access({0, 400}, {}, {{199, 200}}), Access({0, 400}, {{199, 400}}, {}),
       "second reads byte 199 of data, which first writes"},
      {Access({3, 400}, {{350, 351}}, {}), Access({70, 400}, {}, {{340, 360}}),
       "second writes byte 280 of data, which first reads"},
      {Access({64, 400}, {}, {{399, 400}}), Access({1, 400}, {}, {{399, 400}}),
       "second writes byte 398 of data, which first writes"},
      {Access({0, 400}, {}, {{8, 16}, {72, 80}, {136, 144}}),
       Access({7, 400}, {{16, 72}, {80, 136}, {144, 300}}, {}), nullptr},
  };
  for (const Case& c : cases) {
    LaunchOrder order;
    EXPECT_FALSE(order.Add("first", {c.first}));
    const auto found = order.Add("second", {c.second});
    ASSERT_EQ(found.has_value(), c.text != nullptr) << found.value_or("");
    if (found) EXPECT_NE(found->find(c.text), std::string::npos) << *found;
    order.Barrier();
    EXPECT_FALSE(order.Add("second", {c.second}));
  }
}

TEST(LaunchOrder, ComparesWithAllSinceTheBarrier) {
  LaunchOrder order;
  EXPECT_FALSE(order.Add("first", {Access({0, 400}, {}, {{5, 6}})}));
  EXPECT_FALSE(order.Add("second", {Access({0, 400}, {}, {{6, 7}})}));
  EXPECT_FALSE(order.Add("third", {Access({0, 4}, {}, {}), Access({0, 400}, {}, {{7, 8}})}));
  const auto found = order.Add("fourth", {Access({0, 4}, {}, {}), Access({0, 400}, {{6, 7}}, {})});
  ASSERT_TRUE(found.has_value());
  EXPECT_NE(found->find("second writes"), std::string::npos) << *found;
}

}  // namespace
}  // namespace metal_sim
