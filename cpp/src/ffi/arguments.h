// What every FFI entry does first: errors become exceptions, tensors are checked by named dims.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "lorafleet/status.h"

namespace lorafleet {

// Throws the FFI error of kind "lorafleet.<Kind>"; its extra context is the map of facts.
[[noreturn]] inline void Raise(const Error& error) {
  namespace ffi = tvm::ffi;
  ffi::Map<ffi::String, ffi::String> facts;
  for (const auto& [key, value] : error.facts()) facts.Set(key, value);
  throw ffi::Error(std::string("lorafleet.") + ErrorKindName(error.kind()), error.message(), "",
                   std::nullopt, facts);
}

inline void Check(const Status& status) {
  if (!status.ok()) Raise(status.error());
}

template <typename T>
T Take(Expected<T> expected) {
  if (!expected.ok()) Raise(expected.error());
  return std::move(expected).value();
}

// Matches the arguments of one call against named dims: the first use of a dim fixes its size.
class ShapeMatcher {
 public:
  // A dim that no argument has fixed yet.
  static constexpr int64_t kUnknown = -1;

  explicit ShapeMatcher(const char* op) : op_(op) {}

  // A contiguous CPU tensor of T with exactly these dims.
  template <typename T>
  T* Array(const tvm::ffi::TensorView& tensor, const char* name,
           std::initializer_list<int64_t*> dims) const {
    if (static_cast<size_t>(tensor.ndim()) != dims.size()) {
      Fail(name, "expected " + std::to_string(dims.size()) + " dimensions, got " +
                     std::to_string(tensor.ndim()));
    }
    int32_t axis = 0;
    for (int64_t* dim : dims) {
      Match(tensor.size(axis), name, axis, dim);
      ++axis;
    }
    return Data<T>(tensor, name);
  }

  // A float matrix given with any number of leading dims: all but the last are rows.
  float* Rows(const tvm::ffi::TensorView& tensor, const char* name, int64_t* rows,
              int64_t* columns) const {
    if (tensor.ndim() < 1) Fail(name, "expected at least one dimension");
    int64_t count = 1;
    for (int32_t i = 0; i + 1 < tensor.ndim(); ++i) count *= tensor.size(i);
    Match(tensor.size(-1), name, tensor.ndim() - 1, columns);
    Match(count, name, 0, rows);
    return Data<float>(tensor, name);
  }

  // A float matrix in any shape, (rows..., heads, head_dim): only the number of elements counts.
  float* Elements(const tvm::ffi::TensorView& tensor, const char* name, int64_t rows,
                  int64_t columns) const {
    if (tensor.numel() != rows * columns) {
      Fail(name, "expected " + std::to_string(rows) + " x " + std::to_string(columns) +
                     " elements, got " + std::to_string(tensor.numel()));
    }
    return Data<float>(tensor, name);
  }

  // `count` + 1 bounds: ascending, from 0 to `end`.
  void CheckBounds(const int32_t* bounds, const char* name, int64_t count, int64_t end) const {
    if (bounds[0] != 0 || bounds[count] != end) {
      Fail(name, "expected to run from 0 to " + std::to_string(end) + ", got " +
                     std::to_string(bounds[0]) + " to " + std::to_string(bounds[count]));
    }
    for (int64_t i = 0; i < count; ++i) {
      if (bounds[i] > bounds[i + 1]) Fail(name, "expected ascending values");
    }
  }

  [[noreturn]] void Fail(const char* name, const std::string& what) const {
    Raise(Error(ErrorKind::kInvalidInput, std::string(op_) + ": " + name + ": " + what)
              .With("field", name));
  }

 private:
  void Match(int64_t size, const char* name, int32_t axis, int64_t* dim) const {
    if (*dim == kUnknown) *dim = size;
    if (*dim != size) {
      Fail(name, "dimension " + std::to_string(axis) + " is " + std::to_string(size) +
                     ", expected " + std::to_string(*dim));
    }
  }

  template <typename T>
  T* Data(const tvm::ffi::TensorView& tensor, const char* name) const {
    static_assert(std::is_same_v<T, float> || std::is_same_v<T, int32_t>);
    if (tensor.device().device_type != kDLCPU) Fail(name, "expected a CPU tensor");
    const DLDataType dtype = tensor.dtype();
    const uint8_t code = std::is_same_v<T, float> ? kDLFloat : kDLInt;
    if (dtype.code != code || dtype.bits != 32 || dtype.lanes != 1) {
      Fail(name, code == kDLFloat ? "expected float32" : "expected int32");
    }
    if (!tensor.IsContiguous()) Fail(name, "expected a contiguous tensor");
    return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
  }

  const char* op_;
};

}  // namespace lorafleet
