// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/json_reader.h"

#include <stdexcept>

namespace lorafleet {
namespace {

void AppendUtf8(uint32_t c, std::string* out) {
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out->push_back(static_cast<char>(0xC0 | c >> 6));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else if (c < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | c >> 12));
    out->push_back(static_cast<char>(0x80 | (c >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | c >> 18));
    out->push_back(static_cast<char>(0x80 | (c >> 12 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  }
}

}  // namespace

void JsonReader::Fail(const std::string& what) const {
  throw std::runtime_error("expected " + what + " at byte " + std::to_string(at_));
}

void JsonReader::SkipSpace() {
  while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' ||
                                text_[at_] == '\t')) {
    ++at_;
  }
}

bool JsonReader::Take(char c) {
  SkipSpace();
  if (at_ >= text_.size() || text_[at_] != c) return false;
  ++at_;
  return true;
}

char JsonReader::Next() {
  if (at_ >= text_.size()) Fail("more text");
  return text_[at_++];
}

bool JsonReader::Separator(char close) {
  if (Take(close)) {
    first_ = false;
    return false;
  }
  if (!first_ && !Take(',')) Fail(std::string("',' or '") + close + "'");
  first_ = false;
  return true;
}

void JsonReader::BeginObject() {
  if (!Take('{')) Fail("'{'");
  first_ = true;
}

bool JsonReader::NextKey(std::string* key) {
  if (!Separator('}')) return false;
  *key = String();
  if (!Take(':')) Fail("':'");
  return true;
}

void JsonReader::BeginArray() {
  if (!Take('[')) Fail("'['");
  first_ = true;
}

bool JsonReader::NextItem() { return Separator(']'); }

uint32_t JsonReader::Hex4() {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) {
    const char c = Next();
    value <<= 4;
    if (c >= '0' && c <= '9') {
      value |= c - '0';
    } else if (c >= 'a' && c <= 'f') {
      value |= c - 'a' + 10;
    } else if (c >= 'A' && c <= 'F') {
      value |= c - 'A' + 10;
    } else {
      Fail("a hexadecimal digit");
    }
  }
  return value;
}

std::string JsonReader::String() {
  if (!Take('"')) Fail("a string");
  std::string out;
  while (true) {
    const char c = Next();
    if (c == '"') return out;
    if (static_cast<unsigned char>(c) < 0x20) Fail("no control character in a string");
    if (c != '\\') {
      out.push_back(c);
      continue;
    }
    switch (const char escape = Next()) {
      case '"':
      case '\\':
      case '/':
        out.push_back(escape);
        break;
      case 'b':
        out.push_back('\b');
        break;
      case 'f':
        out.push_back('\f');
        break;
      case 'n':
        out.push_back('\n');
        break;
      case 'r':
        out.push_back('\r');
        break;
      case 't':
        out.push_back('\t');
        break;
      case 'u': {
        uint32_t code = Hex4();
        if (code >= 0xD800 && code < 0xDC00) {
          if (Next() != '\\' || Next() != 'u') Fail("the second half of a surrogate pair");
          const uint32_t low = Hex4();
          if (low < 0xDC00 || low > 0xDFFF) Fail("the second half of a surrogate pair");
          code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        } else if (code >= 0xDC00 && code <= 0xDFFF) {
          Fail("no lone surrogate");
        }
        AppendUtf8(code, &out);
        break;
      }
      default:
        Fail("a known escape");
    }
  }
}

int64_t JsonReader::Unsigned() {
  SkipSpace();
  const size_t start = at_;
  int64_t value = 0;
  while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
    const int digit = text_[at_] - '0';
    if (value > (INT64_MAX - digit) / 10) Fail("an integer below 2^63");
    value = value * 10 + digit;
    ++at_;
  }
  if (at_ == start) Fail("a non-negative integer");
  if (text_[start] == '0' && at_ - start > 1) Fail("no leading zero");
  if (at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E')) {
    Fail("an integer");
  }
  return value;
}

void JsonReader::End() {
  SkipSpace();
  if (at_ != text_.size()) Fail("the end");
}

}  // namespace lorafleet
