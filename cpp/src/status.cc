// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/status.h"

namespace lorafleet {

const char* ErrorKindName(ErrorKind kind) {
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

Error&& Error::With(std::string key, std::string value) && {
  facts_.emplace_back(std::move(key), std::move(value));
  return std::move(*this);
}

}  // namespace lorafleet
