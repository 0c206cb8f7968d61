// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/safetensors.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <string>

namespace lorafleet {
namespace {

class SafetensorsTest : public testing::Test {
 protected:
  std::string WriteBytes(const std::string& bytes) {
    const std::string path = testing::TempDir() + "/test.safetensors";
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  // A file of this header and data, its length field right.
  std::string Write(const std::string& header, const std::string& data) {
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i) & 0xFF);
    return WriteBytes(bytes + header + data);
  }

  // Why the file is refused; empty if it is not, or not as a broken adapter.
  std::string Complaint(const std::string& path) {
    const auto file = SafetensorsFile::Open(path);
    if (file.ok() || file.error().kind() != ErrorKind::kInvalidAdapter) return "";
    return file.error().message();
  }

  std::string Complaint(const std::string& header, size_t data_bytes) {
    return Complaint(Write(header, std::string(data_bytes, '\0')));
  }
};

// One float32 tensor "a" of shape [2] with other text in places.
std::string Header(const std::string& dtype = R"("F32")", const std::string& shape = "[2]",
                   const std::string& offsets = "[0,8]") {
  return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

bool Mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(SafetensorsTest, ReadsNamesShapesMetadataAndBytes) {
  const std::string path =
      Write(R"({"__metadata__":{"format":"pt","k":"\u00e9"},)"
            R"("late":{"dtype":"U8","shape":[3],"data_offsets":[8,11]},)"
            R"("early":{"shape":[1,2],"data_offsets":[0,8],"dtype":"F32"},)"
            R"("empty":{"dtype":"F32","shape":[0,7],"data_offsets":[11,11]}}   )",
            std::string("\0\0\x80\x3f\0\0\0\xc0xyz", 11));
  const auto opened = SafetensorsFile::Open(path);
  ASSERT_TRUE(opened.ok()) << opened.error().message();
  const SafetensorsFile& file = *opened.value();
  EXPECT_EQ(file.names(), (std::vector<std::string>{"early", "late", "empty"}));
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.metadata().at("k"), "\u00e9");
  ASSERT_NE(file.Find("early"), nullptr);
  EXPECT_EQ(file.Find("early")->shape, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(std::memcmp(file.Data(*file.Find("late")), "xyz", 3), 0);
  EXPECT_EQ(file.Find("empty")->num_elements(), 0);
  EXPECT_EQ(file.Find("absent"), nullptr);
  float out[2];
  ASSERT_TRUE(file.ReadFloat32("early", out).ok());
  EXPECT_EQ(out[0], 1.0f);
  EXPECT_EQ(out[1], -2.0f);
}

TEST_F(SafetensorsTest, WidensHalvesExactly) {
  // F16 at an odd address: 1, -2, the least subnormal, the greatest, infinity, NaN, -0.
  const uint16_t halves[] = {0x3C00, 0xC000, 0x0001, 0x7BFF, 0x7C00, 0x7E00, 0x8000};
  const uint16_t brains[] = {0x3F80, 0xC000, 0x0001, 0x7F7F, 0x7F80, 0x7FC0, 0x8000};
  std::string data = "x";
  data.append(reinterpret_cast<const char*>(halves), sizeof(halves));
  data.append(reinterpret_cast<const char*>(brains), sizeof(brains));
  const auto opened =
      SafetensorsFile::Open(Write(R"({"pad":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                  R"("half":{"dtype":"F16","shape":[7],"data_offsets":[1,15]},)"
                                  R"("brain":{"dtype":"BF16","shape":[7],"data_offsets":[15,29]}})",
                                  data));
  ASSERT_TRUE(opened.ok()) << opened.error().message();
  float half[7], brain[7];
  ASSERT_TRUE(opened.value()->ReadFloat32("half", half).ok());
  ASSERT_TRUE(opened.value()->ReadFloat32("brain", brain).ok());
  EXPECT_EQ(half[2], std::ldexp(1.0f, -24));
  EXPECT_EQ(half[3], 65504.0f);
  EXPECT_EQ(brain[3], std::ldexp(255.0f, 120));
  for (const float* values : {half, brain}) {
    EXPECT_EQ(values[0], 1.0f);
    EXPECT_EQ(values[1], -2.0f);
    EXPECT_EQ(values[4], INFINITY);
    EXPECT_TRUE(std::isnan(values[5]));
    EXPECT_TRUE(values[6] == 0.0f && std::signbit(values[6]));
  }
}

TEST_F(SafetensorsTest, ReadsOnlyFloatsAsFloats) {
  const auto opened = SafetensorsFile::Open(Write(Header(R"("I32")"), std::string(8, '\0')));
  ASSERT_TRUE(opened.ok());
  float out[2];
  const Status status = opened.value()->ReadFloat32("a", out);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind(), ErrorKind::kInvalidAdapter);
  EXPECT_TRUE(Mentions(status.error().message(), "tensor 'a': dtype: is I32"));
  EXPECT_EQ(opened.value()->ReadFloat32("b", out).error().kind(), ErrorKind::kNotFound);
}

TEST_F(SafetensorsTest, SaysThatAFileIsAbsent) {
  EXPECT_EQ(SafetensorsFile::Open("/no/such/file").error().kind(), ErrorKind::kNotFound);
}

TEST_F(SafetensorsTest, RefusesWhatIsNoFileWithoutWaiting) {
  EXPECT_TRUE(Mentions(Complaint(testing::TempDir()), "not a regular file"));
  const std::string pipe = testing::TempDir() + "/pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_TRUE(Mentions(Complaint(pipe), "not a regular file"));
  unlink(pipe.c_str());
}

TEST_F(SafetensorsTest, RefusesFilesShorterThanTheySay) {
  EXPECT_TRUE(Mentions(Complaint(WriteBytes("")), "at least 8 bytes, got 0"));
  EXPECT_TRUE(Mentions(Complaint(WriteBytes("\x02\0\0")), "at least 8 bytes"));
  EXPECT_TRUE(Mentions(Complaint(WriteBytes(std::string(8, '\xff') + "{}")), "header claims"));
  EXPECT_TRUE(Mentions(Complaint(WriteBytes(std::string("\x03\0\0\0\0\0\0\0{}", 10))), "claims 3"));
  EXPECT_TRUE(Mentions(Complaint(Header(), 7), "outside the file's 7 bytes"));
}

TEST_F(SafetensorsTest, RefusesHeadersThatAreNoJsonObject) {
  for (const char* header : {"", "[]", "null", "{", "{}x", " {}", "{\"a\"}", "{\"a\":1}",
                             "{'a':{}}", "{\"a\":{}", "\xff\xfe{}", "{\"\xff\":{}}"}) {
    EXPECT_NE(Complaint(header, 0), "") << header;
  }
  EXPECT_EQ(Complaint("{}", 0), "") << "a file without tensors is a valid one";
}

TEST_F(SafetensorsTest, RefusesEntriesThatAreIncompleteOrRepeatKeys) {
  for (const char* entry : {"{}", R"({"dtype":"F32"})", R"({"dtype":"F32","shape":[2]})",
                            R"({"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]})",
                            R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1})",
                            R"({"dtype":1,"shape":[2],"data_offsets":[0,8]})"}) {
    EXPECT_TRUE(Mentions(Complaint(std::string("{\"a\":") + entry + "}", 8), "tensor 'a'"))
        << entry;
  }
}

TEST_F(SafetensorsTest, RefusesShapesThatDoNotMatchTheirBytes) {
  for (const char* shape : {"[3]", "[1]", "[]", "[2,0]", "[-2]", "[2.0]", "[\"2\"]", "2", "[2,]",
                            "[9223372036854775807]", "[4294967296,4294967296]",
                            "[0,9223372036854775807,9223372036854775807]"}) {
    EXPECT_TRUE(Mentions(Complaint(Header(R"("F32")", shape), 8), "tensor 'a'")) << shape;
  }
  std::string many = "[2";
  for (int i = 0; i < 32; ++i) many += ",1";
  EXPECT_TRUE(Mentions(Complaint(Header(R"("F32")", many + "]"), 8), "at most 32 dimensions"));
}

TEST_F(SafetensorsTest, RefusesUnknownDtypes) {
  EXPECT_TRUE(Mentions(Complaint(Header(R"("F31")"), 8), "dtype: unknown 'F31'"));
  EXPECT_TRUE(Mentions(Complaint(Header(R"("")"), 8), "dtype: unknown ''"));
}

TEST_F(SafetensorsTest, RefusesOffsetsThatAreNoTwoNumbersInside) {
  for (const char* offsets : {"[8,0]", "[0]", "[0,8,8]", "[]", "[0,16]", "[-8,0]", "[0,1e1]",
                              "[0,18446744073709551615]"}) {
    EXPECT_TRUE(Mentions(Complaint(Header(R"("F32")", "[2]", offsets), 8), "tensor 'a'"))
        << offsets;
  }
}

TEST_F(SafetensorsTest, RefusesHolesOverlapsAndLeftovers) {
  const auto two = [](const std::string& first, const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + first +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}";
  };
  EXPECT_EQ(Complaint(two("[4,8]", "[0,4]"), 8), "");
  EXPECT_TRUE(Mentions(Complaint(two("[0,4]", "[5,9]"), 9), "tensor 'b'")) << "a hole";
  EXPECT_TRUE(Mentions(Complaint(two("[0,4]", "[2,6]"), 6), "tensor 'b'")) << "an overlap";
  EXPECT_TRUE(Mentions(Complaint(two("[0,4]", "[0,4]"), 4), "tensor 'b'")) << "the same bytes";
  EXPECT_TRUE(Mentions(Complaint(two("[1,5]", "[5,9]"), 9), "tensor 'a'")) << "a hole at the front";
  EXPECT_TRUE(Mentions(Complaint(two("[0,4]", "[4,8]"), 9), "end at byte 8 of 9"));
}

TEST_F(SafetensorsTest, RefusesNamesThatOccurTwice) {
  const std::string entry = R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  EXPECT_TRUE(Mentions(Complaint("{\"a\":" + entry + ",\"\\u0061\":" + entry + "}", 4), "twice"));
  EXPECT_TRUE(Mentions(Complaint(R"({"__metadata__":{},"__metadata__":{}})", 0), "twice"));
  EXPECT_TRUE(Mentions(Complaint(R"({"__metadata__":{"k":"1","k":"2"}})", 0), "twice"));
  EXPECT_TRUE(Mentions(Complaint(R"({"__metadata__":{"k":1}})", 0), "__metadata__"));
}

TEST_F(SafetensorsTest, NamesTheTensorInTheFacts) {
  const auto opened = SafetensorsFile::Open(Write(Header(R"("F31")"), std::string(8, '\0')));
  ASSERT_FALSE(opened.ok());
  ASSERT_EQ(opened.error().facts().size(), 1u);
  EXPECT_EQ(opened.error().facts()[0], (std::pair<std::string, std::string>{"tensor", "a"}));
}

// Every truncation of a valid file is refused, and every single changed byte is read or refused.
TEST_F(SafetensorsTest, SurvivesEveryTruncationAndEveryFlippedByte) {
  const std::string header = Header(R"("F16")", "[2,2]");
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i) & 0xFF);
  bytes += header + std::string(8, '\1');
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_NE(Complaint(WriteBytes(bytes.substr(0, length))), "") << length;
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (const char flip : {'\x01', '\x20', '\x80'}) {
      std::string changed = bytes;
      changed[i] = static_cast<char>(changed[i] ^ flip);
      const auto opened = SafetensorsFile::Open(WriteBytes(changed));
      if (!opened.ok()) continue;
      for (const std::string& name : opened.value()->names()) {
        std::vector<float> out(opened.value()->Find(name)->num_elements());
        (void)opened.value()->ReadFloat32(name, out.data()).ok();
      }
    }
  }
}

}  // namespace
}  // namespace lorafleet
