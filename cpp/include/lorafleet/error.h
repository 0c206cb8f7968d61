// The one exception type of the native library.
//
// `kind` is the name of a class in Python's lorafleet.core.errors; the FFI edge carries it across.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

namespace lorafleet {

enum class ErrorKind { kInvalidInput, kInvalidAdapter, kNotFound, kConflict, kExhausted, kInternal };

// The Python class that stands for a kind.
inline const char* ErrorKindName(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidInput:
      return "InvalidInput";
    case ErrorKind::kInvalidAdapter:
      return "InvalidAdapter";
    case ErrorKind::kNotFound:
      return "NotFound";
    case ErrorKind::kConflict:
      return "Conflict";
    case ErrorKind::kExhausted:
      return "Exhausted";
    case ErrorKind::kInternal:
      return "Internal";
  }
  return "Internal";
}

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace lorafleet
