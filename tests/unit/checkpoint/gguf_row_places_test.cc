// Orders of rows and columns of GGUF files.
#include "checkpoint/readers/gguf/gguf_row_places.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace marlin::gguf_row_places_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Rows = GgufPlace::Rows;

// Two key heads of 1, four value heads of 2: a key head's are side by side outside of files.
constexpr GgufHeads kHeads = {.queries = 2,
                              .keys = 1,
                              .delta_keys = 2,
                              .delta_values = 4,
                              .delta_key_dim = 1,
                              .delta_value_dim = 2};

TEST(GgufRowPlaces, PairsOfRotaryHeads) {
  EXPECT_THAT(GgufRowPlaces(Rows::kQueryHeads, kHeads, 8), ElementsAre(0, 2, 1, 3, 4, 6, 5, 7));
  EXPECT_THAT(GgufRowPlaces(Rows::kKeyHeads, kHeads, 4), ElementsAre(0, 2, 1, 3));
  EXPECT_THAT(GgufRowPlaces(Rows::kQueryHeads, kHeads, 6), IsEmpty());
}

TEST(GgufRowPlaces, ValueHeadsAreTiled) {
  EXPECT_THAT(GgufRowPlaces(Rows::kValueHeads, kHeads, 4), ElementsAre(0, 2, 1, 3));
  EXPECT_THAT(GgufRowPlaces(Rows::kValueHeads, kHeads, 8), ElementsAre(0, 1, 4, 5, 2, 3, 6, 7));
  // Queries and keys stay: two rows each.
  EXPECT_THAT(GgufRowPlaces(Rows::kMixedHeads, kHeads, 12),
              ElementsAre(0, 1, 2, 3, 4, 5, 8, 9, 6, 7, 10, 11));
  EXPECT_THAT(GgufRowPlaces(Rows::kMixedHeads, kHeads, 4), IsEmpty());
  EXPECT_THAT(GgufRowPlaces(Rows::kValueHeads, {}, 8), IsEmpty());
  EXPECT_THAT(TiledHeads(kHeads), ElementsAre(0, 2, 1, 3));
  GgufPlace place;
  EXPECT_EQ(GgufColumn(place, kHeads, 8, 2), 2);
  place.value_columns = true;
  EXPECT_EQ(GgufColumn(place, kHeads, 8, 2), 4);
}

TEST(GgufRowPlaces, GateAndUpOfOneTensor) {
  EXPECT_THAT(GgufWrittenPlaces(Rows::kEven, kHeads, 4), ElementsAre(0, -1, 1, -1));
  EXPECT_THAT(GgufWrittenPlaces(Rows::kOdd, kHeads, 4), ElementsAre(-1, 0, -1, 1));
  EXPECT_THAT(GgufWrittenPlaces(Rows::kFirstHalf, kHeads, 4), ElementsAre(0, 1, -1, -1));
  EXPECT_THAT(GgufWrittenPlaces(Rows::kSecondHalf, kHeads, 4), ElementsAre(-1, -1, 0, 1));
  EXPECT_THAT(GgufWrittenPlaces(Rows::kSecondHalf, kHeads, 5), IsEmpty());
}

/// A key head's queries, keys, values and gates, and the next one's.
TEST(GgufRowPlaces, PartsOfProjectionsByHead) {
  EXPECT_EQ(ProjectionRows(Rows::kGatesOfHeads, kHeads), 20);
  EXPECT_EQ(PartRows(Rows::kQkvOfHeads, kHeads), 12);
  EXPECT_THAT(GgufRowPlaces(Rows::kQkvOfHeads, kHeads, 12),
              ElementsAre(0, 10, 1, 11, 2, 3, 4, 5, 12, 13, 14, 15));
  EXPECT_THAT(GgufRowPlaces(Rows::kGatesOfHeads, kHeads, 8),
              ElementsAre(6, 7, 8, 9, 16, 17, 18, 19));
  EXPECT_THAT(GgufRowPlaces(Rows::kWritesOfHeads, kHeads, 4), ElementsAre(0, 1, 4, 5));
  EXPECT_THAT(GgufRowPlaces(Rows::kDecaysOfHeads, kHeads, 4), ElementsAre(2, 3, 6, 7));
  EXPECT_THAT(GgufWrittenPlaces(Rows::kWritesOfHeads, kHeads, 8),
              ElementsAre(0, 1, -1, -1, 2, 3, -1, -1));
  EXPECT_THAT(GgufRowPlaces(Rows::kDecaysOfHeads, kHeads, 8), IsEmpty());
}

}  // namespace
}  // namespace marlin::gguf_row_places_test
