// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <cerrno>
#include <stdexcept>
#include <tuple>

#include "lorafleet/error.h"
#include "lorafleet/json_reader.h"

namespace lorafleet {
namespace {

// Upstream's own limit; a header is a few hundred bytes a tensor.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;

int64_t DtypeBits(const std::string& dtype) {
  static const std::map<std::string, int64_t> kBits = {
      {"BOOL", 8},    {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},
      {"I16", 16},    {"U16", 16}, {"F16", 16}, {"BF16", 16},   {"I32", 32},    {"U32", 32},
      {"F32", 32},    {"I64", 64}, {"U64", 64}, {"F64", 64},
  };
  const auto it = kBits.find(dtype);
  return it == kBits.end() ? 0 : it->second;
}

TensorEntry ReadEntry(JsonReader* json) {
  TensorEntry entry{};
  bool has_dtype = false, has_shape = false, has_offsets = false;
  std::string key;
  json->BeginObject();
  while (json->NextKey(&key)) {
    if (key == "dtype" && !has_dtype) {
      entry.dtype = json->String();
      has_dtype = true;
    } else if (key == "shape" && !has_shape) {
      json->BeginArray();
      while (json->NextItem()) entry.shape.push_back(json->Unsigned());
      has_shape = true;
    } else if (key == "data_offsets" && !has_offsets) {
      json->BeginArray();
      uint64_t offsets[2];
      int count = 0;
      while (json->NextItem()) {
        const int64_t value = json->Unsigned();
        if (count == 2) throw std::runtime_error("expected two data_offsets, got more");
        offsets[count++] = static_cast<uint64_t>(value);
      }
      if (count != 2) throw std::runtime_error("expected two data_offsets");
      entry.begin = offsets[0];
      entry.end = offsets[1];
      has_offsets = true;
    } else {
      throw std::runtime_error("unexpected or repeated key '" + key + "'");
    }
  }
  if (!has_dtype || !has_shape || !has_offsets) {
    throw std::runtime_error("expected dtype, shape and data_offsets");
  }
  return entry;
}

// Why the entry cannot be right for a data section of `data_bytes`; empty when it can.
std::string Complaint(const TensorEntry& entry, uint64_t data_bytes) {
  const int64_t bits = DtypeBits(entry.dtype);
  if (bits == 0) return "unknown dtype '" + entry.dtype + "'";
  if (entry.begin > entry.end || entry.end > data_bytes) {
    return "data_offsets [" + std::to_string(entry.begin) + ", " + std::to_string(entry.end) +
           "] are outside the file's " + std::to_string(data_bytes) + " bytes of data";
  }
  uint64_t elements = 1;
  for (const int64_t dim : entry.shape) {
    if (__builtin_mul_overflow(elements, static_cast<uint64_t>(dim), &elements)) {
      return "the shape has too many elements";
    }
  }
  uint64_t total_bits;
  if (__builtin_mul_overflow(elements, static_cast<uint64_t>(bits), &total_bits)) {
    return "the shape has too many elements";
  }
  if (total_bits / 8 != entry.end - entry.begin) {
    return "the shape needs " + std::to_string(total_bits / 8) + " bytes, data_offsets give " +
           std::to_string(entry.end - entry.begin);
  }
  return "";
}

float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  uint32_t exponent = half >> 10 & 0x1F;
  uint32_t mantissa = half & 0x3FF;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000 | mantissa << 13);
  if (exponent == 0) {
    // Zero or subnormal: mantissa * 2^-24 is exact in float32.
    const float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw Error(ErrorKind::kNotFound, path + ": " + std::strerror(errno));
  struct stat info;
  const bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  file_bytes_ = regular ? static_cast<uint64_t>(info.st_size) : 0;
  void* map = MAP_FAILED;
  if (file_bytes_ >= 8) map = mmap(nullptr, file_bytes_, PROT_READ, MAP_PRIVATE, fd, 0);
  close(fd);
  if (map == MAP_FAILED) {
    throw Error(ErrorKind::kInvalidAdapter,
                path + ": not a safetensors file: expected at least 8 bytes, got " +
                    std::to_string(file_bytes_));
  }
  map_ = static_cast<const uint8_t*>(map);
  try {
    Parse();
  } catch (...) {
    munmap(const_cast<uint8_t*>(map_), file_bytes_);
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() { munmap(const_cast<uint8_t*>(map_), file_bytes_); }

void SafetensorsFile::Parse() {
  const auto refuse = [this](const std::string& why) -> Error {
    return Error(ErrorKind::kInvalidAdapter, path_ + ": not a valid safetensors file: " + why);
  };
  uint64_t header_bytes = 0;
  for (int i = 0; i < 8; ++i) header_bytes |= static_cast<uint64_t>(map_[i]) << (8 * i);
  if (header_bytes > file_bytes_ - 8 || header_bytes > kMaxHeaderBytes) {
    throw refuse("the header claims " + std::to_string(header_bytes) + " bytes, the file has " +
                 std::to_string(file_bytes_ - 8) + " after the length");
  }
  data_begin_ = 8 + header_bytes;
  const uint64_t data_bytes = file_bytes_ - data_begin_;

  std::string name;
  try {
    JsonReader json({reinterpret_cast<const char*>(map_) + 8, header_bytes});
    json.BeginObject();
    while (json.NextKey(&name)) {
      if (name == "__metadata__") {
        std::string key;
        json.BeginObject();
        while (json.NextKey(&key)) metadata_[key] = json.String();
      } else if (!entries_.emplace(name, ReadEntry(&json)).second) {
        throw std::runtime_error("the name occurs twice");
      }
    }
    name.clear();
    json.End();
  } catch (const std::runtime_error& error) {
    throw refuse((name.empty() ? "header" : "tensor '" + name + "'") + (": " + std::string(error.what())));
  }

  for (const auto& [tensor, entry] : entries_) {
    const std::string complaint = Complaint(entry, data_bytes);
    if (!complaint.empty()) throw refuse("tensor '" + tensor + "': " + complaint);
    names_.push_back(tensor);
  }
  std::sort(names_.begin(), names_.end(), [this](const std::string& x, const std::string& y) {
    const TensorEntry &a = entries_.at(x), &b = entries_.at(y);
    return std::tie(a.begin, a.end, x) < std::tie(b.begin, b.end, y);
  });
  uint64_t at = 0;
  for (const std::string& tensor : names_) {
    const TensorEntry& entry = entries_.at(tensor);
    if (entry.begin != at) {
      throw refuse("tensor '" + tensor + "' begins at byte " + std::to_string(entry.begin) +
                   ", expected " + std::to_string(at) + ": tensors must tile the data");
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    throw refuse("the tensors end at byte " + std::to_string(at) + " of " +
                 std::to_string(data_bytes) + " bytes of data");
  }
}

const TensorEntry& SafetensorsFile::entry(const std::string& name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end()) throw Error(ErrorKind::kNotFound, path_ + ": no tensor '" + name + "'");
  return it->second;
}

const uint8_t* SafetensorsFile::data(const std::string& name) const {
  return map_ + data_begin_ + entry(name).begin;
}

void SafetensorsFile::ReadFloat32(const std::string& name, float* out) const {
  const TensorEntry& tensor = entry(name);
  const uint8_t* bytes = data(name);
  const uint64_t num_bytes = tensor.end - tensor.begin;
  if (tensor.dtype == "F32") {
    std::memcpy(out, bytes, num_bytes);
    return;
  }
  const bool brain = tensor.dtype == "BF16";
  if (!brain && tensor.dtype != "F16") {
    throw Error(ErrorKind::kInvalidAdapter, path_ + ": tensor '" + name + "' is " + tensor.dtype +
                                                ", expected F32, BF16 or F16");
  }
  for (uint64_t i = 0; i < num_bytes / 2; ++i) {
    uint16_t half;
    std::memcpy(&half, bytes + 2 * i, 2);  // the file may place it at an odd address
    out[i] = brain ? std::bit_cast<float>(static_cast<uint32_t>(half) << 16) : HalfToFloat(half);
  }
}

}  // namespace lorafleet
