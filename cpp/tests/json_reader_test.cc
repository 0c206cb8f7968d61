// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/json_reader.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace lorafleet {
namespace {

std::string ReadString(std::string_view text) {
  JsonReader json(text);
  std::string value = json.String();
  json.End();
  return json.ok() ? value : "error: " + json.error();
}

bool RefusesString(std::string_view text) {
  JsonReader json(text);
  const std::string value = json.String();
  json.End();
  return !json.ok();
}

TEST(JsonReader, ReadsNestedObjectsAndArrays) {
  JsonReader json(R"( { "a" : [ 1 , 2 ] , "b" : { } , "c" : [ ] } )");
  std::string key;
  std::vector<int64_t> numbers;
  std::string keys;
  json.BeginObject();
  while (json.NextKey(&key)) {
    keys += key;
    if (key == "b") {
      json.BeginObject();
      EXPECT_FALSE(json.NextKey(&key));
      continue;
    }
    json.BeginArray();
    while (json.NextItem()) numbers.push_back(json.Unsigned());
  }
  json.End();
  EXPECT_TRUE(json.ok()) << json.error();
  EXPECT_EQ(keys, "abc");
  EXPECT_EQ(numbers, (std::vector<int64_t>{1, 2}));
}

TEST(JsonReader, ReadsEscapes) {
  EXPECT_EQ(ReadString(R"("\"\\\/\b\f\n\r\t")"), "\"\\/\b\f\n\r\t");
  EXPECT_EQ(ReadString(R"("\u0041\u00e9\u20AC\ud83d\ude00")"), "A\u00e9\u20ac\U0001F600");
  EXPECT_EQ(ReadString("\"\u20ac\""), "\u20ac");
}

TEST(JsonReader, RefusesStringsThatAreNone) {
  for (const char* text :
       {"", "\"", "a", "\"a", "\"\\", "\"\\x\"", "\"\\u12\"", "\"\\u12g4\"", "\"\\ud800\"",
        "\"\\ud800\\u0041\"", "\"\\udc00\"", "\"\n\"", "\"a\" b"}) {
    EXPECT_TRUE(RefusesString(text)) << text;
  }
}

TEST(JsonReader, RefusesWhatIsNotUtf8) {
  for (const char* text : {"\"\x80\"", "\"\xc3\"", "\"\xc0\xaf\"", "\"\xe2\x82\"",
                           "\"\xed\xa0\x80\"", "\"\xf4\x90\x80\x80\"", "\"\xff\""}) {
    EXPECT_TRUE(RefusesString(text)) << text;
  }
}

TEST(JsonReader, ReadsIntegersOfSixtyThreeBits) {
  JsonReader json("[0,9223372036854775807]");
  json.BeginArray();
  ASSERT_TRUE(json.NextItem());
  EXPECT_EQ(json.Unsigned(), 0);
  ASSERT_TRUE(json.NextItem());
  EXPECT_EQ(json.Unsigned(), INT64_MAX);
  EXPECT_FALSE(json.NextItem());
  EXPECT_TRUE(json.ok());
}

TEST(JsonReader, RefusesOtherNumbers) {
  for (const char* text : {"-1", "01", "1.0", "1e3", "9223372036854775808", "99999999999999999999",
                           "NaN", "+1", ".5", "", "\"1\""}) {
    JsonReader json(text);
    json.Unsigned();
    json.End();
    EXPECT_FALSE(json.ok()) << text;
  }
}

TEST(JsonReader, RefusesBrokenContainers) {
  for (const char* text : {"{\"a\":1", "{\"a\" 1}", "{\"a\":1,}", "{,}", "{\"a\":1 \"b\":2}",
                           "{1:2}", "{\"a\":1}}", "[1]", ""}) {
    JsonReader json(text);
    std::string key;
    json.BeginObject();
    while (json.NextKey(&key)) json.Unsigned();
    json.End();
    EXPECT_FALSE(json.ok()) << text;
  }
}

TEST(JsonReader, KeepsTheFirstErrorAndReadsNoFurther) {
  JsonReader json("[x, 1]");
  json.BeginArray();
  ASSERT_TRUE(json.NextItem());
  json.Unsigned();
  const std::string first = json.error();
  EXPECT_EQ(first, "expected a non-negative integer at byte 1");
  EXPECT_FALSE(json.NextItem());
  EXPECT_EQ(json.Unsigned(), 0);
  EXPECT_EQ(json.String(), "");
  json.Fail("something else");
  EXPECT_EQ(json.error(), first);
}

}  // namespace
}  // namespace lorafleet
