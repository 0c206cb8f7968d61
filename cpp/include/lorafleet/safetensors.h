// A safetensors file, memory-mapped, every offset checked before it is used.
//
// The format (huggingface/safetensors, docs/format): an 8-byte little-endian header length, a JSON
// object of {name: {dtype, shape, data_offsets}} with an optional "__metadata__" of strings, then
// the tensors' bytes, which the offsets tile without hole or overlap. Nothing is allocated beyond
// what the header itself describes; a file that breaks a rule is refused with the rule and the
// name.
//
// Immutable once open, hence thread-safe. The file must not shrink while it is mapped: publish
// files by renaming them into place. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lorafleet/status.h"

namespace lorafleet {

struct TensorEntry {
  std::string dtype;           // as in the file: "F32", "BF16", "F16", ...
  std::vector<int64_t> shape;  // at most kMaxDims; the number of elements fits into 63 bits
  uint64_t begin;              // bytes from the end of the header
  uint64_t end;

  int64_t num_elements() const;
};

class SafetensorsFile {
 public:
  // As many as NumPy 1 allows; a weight has two.
  static constexpr size_t kMaxDims = 32;

  // kInvalidAdapter says what is wrong, and names the `tensor` in its facts when one is at fault;
  // kNotFound when the file cannot be opened.
  static Expected<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);

  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  // In the order of their bytes.
  const std::vector<std::string>& names() const { return names_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Null when there is no such tensor.
  const TensorEntry* Find(const std::string& name) const;

  // The tensor's bytes, at any alignment. REQUIRES: `entry` is of this file.
  const uint8_t* Data(const TensorEntry& entry) const;

  // Writes the tensor's elements as float32, exactly; kInvalidAdapter unless it is F32, BF16 or
  // F16. REQUIRES: `out` has room for all elements.
  Status ReadFloat32(const std::string& name, float* out) const;

 private:
  SafetensorsFile(std::string path, const uint8_t* map, uint64_t file_bytes)
      : path_(std::move(path)), map_(map), file_bytes_(file_bytes) {}

  Status Parse();
  Status CheckEntries(uint64_t data_bytes);
  Error Invalid(const std::string& why) const;
  Error InvalidTensor(const std::string& name, const std::string& why) const;

  const std::string path_;
  const uint8_t* const map_;
  const uint64_t file_bytes_;
  uint64_t data_begin_ = 0;
  std::vector<std::string> names_;
  std::map<std::string, TensorEntry> entries_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace lorafleet
