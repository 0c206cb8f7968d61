// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace lorafleet {
namespace {

Expected<std::unique_ptr<int>> Half(int value) {
  if (value % 2 != 0) {
    return Error(ErrorKind::kInvalidInput, "odd").With("value", std::to_string(value));
  }
  return std::make_unique<int>(value / 2);
}

TEST(Expected, HoldsAValueOrAnError) {
  EXPECT_EQ(*Half(4).value(), 2);
  const auto failed = Half(3);
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().kind(), ErrorKind::kInvalidInput);
  EXPECT_EQ(failed.error().message(), "odd");
  ASSERT_EQ(failed.error().facts().size(), 1u);
  EXPECT_EQ(failed.error().facts()[0], (std::pair<std::string, std::string>{"value", "3"}));
}

TEST(Status, IsOkUnlessMadeOfAnError) {
  EXPECT_TRUE(Status().ok());
  EXPECT_FALSE(Status(Error(ErrorKind::kInternal, "x")).ok());
}

TEST(ErrorKind, NamesAreThoseOfThePythonClasses) {
  EXPECT_STREQ(ErrorKindName(ErrorKind::kInvalidInput), "InvalidInput");
  EXPECT_STREQ(ErrorKindName(ErrorKind::kInvalidAdapter), "InvalidAdapter");
  EXPECT_STREQ(ErrorKindName(ErrorKind::kNotFound), "NotFound");
  EXPECT_STREQ(ErrorKindName(ErrorKind::kConflict), "Conflict");
  EXPECT_STREQ(ErrorKindName(ErrorKind::kExhausted), "Exhausted");
  EXPECT_STREQ(ErrorKindName(ErrorKind::kInternal), "Internal");
}

}  // namespace
}  // namespace lorafleet
