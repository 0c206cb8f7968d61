// A safetensors file, memory-mapped, every offset checked before it is used.
//
// The format (huggingface/safetensors, docs/format): an 8-byte little-endian header length, a JSON
// object of {name: {dtype, shape, data_offsets}} with an optional "__metadata__" of strings, then the
// tensors' bytes, which the offsets tile without hole or overlap. Nothing is allocated beyond what
// the header itself describes; a file that breaks a rule is refused with the rule and the name.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lorafleet {

struct TensorEntry {
  std::string dtype;  // as in the file: "F32", "BF16", "F16", ...
  std::vector<int64_t> shape;
  uint64_t begin;  // bytes from the end of the header
  uint64_t end;
};

class SafetensorsFile {
 public:
  // Throws Error(kInvalidAdapter) naming what is wrong, or kNotFound when the file is absent.
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  // In the order of their bytes.
  const std::vector<std::string>& names() const { return names_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Throws kNotFound.
  const TensorEntry& entry(const std::string& name) const;
  const uint8_t* data(const std::string& name) const;

  // Writes the tensor as float32, exactly; throws kInvalidAdapter unless it is F32, BF16 or F16.
  void ReadFloat32(const std::string& name, float* out) const;

 private:
  void Parse();

  std::string path_;
  const uint8_t* map_ = nullptr;
  uint64_t file_bytes_ = 0;
  uint64_t data_begin_ = 0;
  std::vector<std::string> names_;
  std::map<std::string, TensorEntry> entries_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace lorafleet
