// A strict, small JSON pull reader: enough for a safetensors header, bounded in depth and memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lorafleet {

// Reads one JSON text from left to right. Every method throws std::runtime_error with the byte
// offset when the text is not what the method wants; nothing is read past the end.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  // `{` ... `}`: BeginObject, then NextKey until it is false; each key's value must be read.
  void BeginObject();
  bool NextKey(std::string* key);

  // `[` ... `]`: BeginArray, then NextItem until it is false; each item must be read.
  void BeginArray();
  bool NextItem();

  std::string String();

  // A non-negative integer without fraction or exponent that fits into 63 bits.
  int64_t Unsigned();

  // Only white space may follow.
  void End();

 private:
  [[noreturn]] void Fail(const std::string& what) const;
  void SkipSpace();
  bool Take(char c);
  char Next();
  uint32_t Hex4();
  bool Separator(char close);

  std::string_view text_;
  size_t at_ = 0;
  bool first_ = false;  // the innermost open container has had no element yet
};

}  // namespace lorafleet
