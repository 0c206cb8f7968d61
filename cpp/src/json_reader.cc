// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/json_reader.h"

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

// RFC 3629: shortest forms only, no surrogates, nothing above U+10FFFF.
bool IsUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t k) -> uint32_t {
      return i + k < text.size() ? static_cast<uint8_t>(text[i + k]) : 0;
    };
    const uint32_t lead = byte(0);
    size_t length = 0;
    uint32_t code = 0, least = 0;
    if (lead < 0x80) {
      ++i;
      continue;
    }
    if (lead >> 5 == 0b110) {
      length = 2, code = lead & 0x1F, least = 0x80;
    } else if (lead >> 4 == 0b1110) {
      length = 3, code = lead & 0x0F, least = 0x800;
    } else if (lead >> 3 == 0b11110) {
      length = 4, code = lead & 0x07, least = 0x10000;
    } else {
      return false;
    }
    for (size_t k = 1; k < length; ++k) {
      if (byte(k) >> 6 != 0b10) return false;
      code = code << 6 | (byte(k) & 0x3F);
    }
    if (code < least || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return false;
    i += length;
  }
  return true;
}

}  // namespace

void JsonReader::Fail(const std::string& what) {
  if (error_.empty()) error_ = what;
}

void JsonReader::Expect(const std::string& what) {
  Fail("expected " + what + " at byte " + std::to_string(at_));
}

void JsonReader::SkipSpace() {
  while (at_ < text_.size() &&
         (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t')) {
    ++at_;
  }
}

bool JsonReader::Take(char c) {
  SkipSpace();
  if (!ok() || at_ >= text_.size() || text_[at_] != c) return false;
  ++at_;
  return true;
}

char JsonReader::Next() {
  if (at_ < text_.size()) return text_[at_++];
  Expect("more text");
  return '\0';
}

bool JsonReader::Separator(char close) {
  const bool first = first_;
  first_ = false;
  if (Take(close)) return false;
  if (!first && !Take(',')) Expect(std::string("',' or '") + close + "'");
  return ok();
}

void JsonReader::BeginObject() {
  if (!Take('{')) Expect("'{'");
  first_ = true;
}

bool JsonReader::NextKey(std::string* key) {
  if (!Separator('}')) return false;
  *key = String();
  if (!Take(':')) Expect("':'");
  return ok();
}

void JsonReader::BeginArray() {
  if (!Take('[')) Expect("'['");
  first_ = true;
}

bool JsonReader::NextItem() {
  return Separator(']');
}

uint32_t JsonReader::Hex4() {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) {
    const char c = Next();
    uint32_t digit = 0;
    if (c >= '0' && c <= '9') {
      digit = c - '0';
    } else if (c >= 'a' && c <= 'f') {
      digit = c - 'a' + 10;
    } else if (c >= 'A' && c <= 'F') {
      digit = c - 'A' + 10;
    } else {
      Expect("a hexadecimal digit");
    }
    value = value << 4 | digit;
  }
  return value;
}

void JsonReader::Escape(std::string* out) {
  switch (const char escape = Next()) {
    case '"':
    case '\\':
    case '/':
      return out->push_back(escape);
    case 'b':
      return out->push_back('\b');
    case 'f':
      return out->push_back('\f');
    case 'n':
      return out->push_back('\n');
    case 'r':
      return out->push_back('\r');
    case 't':
      return out->push_back('\t');
    case 'u': {
      uint32_t code = Hex4();
      if (code >= 0xD800 && code < 0xDC00) {
        const bool pair = Next() == '\\' && Next() == 'u';
        const uint32_t low = pair ? Hex4() : 0;
        if (low < 0xDC00 || low > 0xDFFF) return Expect("the second half of a surrogate pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      } else if (code >= 0xDC00 && code <= 0xDFFF) {
        return Expect("no lone surrogate");
      }
      return AppendUtf8(code, out);
    }
    default:
      Expect("a known escape");
  }
}

std::string JsonReader::String() {
  if (!Take('"')) Expect("a string");
  std::string out;
  while (ok()) {
    const char c = Next();
    if (c == '"') break;
    if (static_cast<unsigned char>(c) < 0x20) {
      Expect("no control character in a string");
    } else if (c == '\\') {
      Escape(&out);
    } else {
      out.push_back(c);
    }
  }
  if (!IsUtf8(out)) Expect("UTF-8 in a string");
  return ok() ? out : std::string();
}

int64_t JsonReader::Unsigned() {
  SkipSpace();
  const size_t start = at_;
  int64_t value = 0;
  while (ok() && at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
    const int digit = text_[at_] - '0';
    if (value > (INT64_MAX - digit) / 10) {
      Expect("an integer below 2^63");
      return 0;
    }
    value = value * 10 + digit;
    ++at_;
  }
  if (at_ == start) {
    Expect("a non-negative integer");
  } else if (text_[start] == '0' && at_ - start > 1) {
    Expect("no leading zero");
  } else if (at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E')) {
    Expect("an integer");
  }
  return ok() ? value : 0;
}

void JsonReader::End() {
  SkipSpace();
  if (at_ != text_.size()) Expect("the end");
}

}  // namespace lorafleet
