// A strict, small JSON pull reader: enough for a safetensors header, bounded in depth and memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lorafleet {

// Reads one JSON text from left to right; the caller asks for what it expects. The first thing that
// is not as asked is kept in error(); from then on nothing is read, every method returns at once,
// and NextKey and NextItem are false, so that loops end. Nothing is read past the end.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  // `{` ... `}`: BeginObject, then NextKey until it is false; each key's value must be read.
  void BeginObject();
  bool NextKey(std::string* key);

  // `[` ... `]`: BeginArray, then NextItem until it is false; each item must be read.
  void BeginArray();
  bool NextItem();

  // A string of well-formed UTF-8 without control characters.
  std::string String();

  // A non-negative integer without fraction or exponent that fits into 63 bits.
  int64_t Unsigned();

  // Only white space may follow.
  void End();

  // Fails with `what`, which the caller found wrong, unless something failed before.
  void Fail(const std::string& what);

  bool ok() const { return error_.empty(); }
  const std::string& error() const { return error_; }

 private:
  void Expect(const std::string& what);
  void SkipSpace();
  bool Take(char c);
  char Next();
  uint32_t Hex4();
  void Escape(std::string* out);
  bool Separator(char close);

  std::string_view text_;
  size_t at_ = 0;
  bool first_ = false;  // the innermost open container has had no element yet
  std::string error_;
};

}  // namespace lorafleet
