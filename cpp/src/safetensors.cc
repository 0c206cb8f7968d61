// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <tuple>
#include <utility>

#include "lorafleet/json_reader.h"

namespace lorafleet {
namespace {

// Upstream's own limit; a header is a few hundred bytes a tensor.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;

// So many of the widest dtype have a number of bytes that fits into 63 bits.
constexpr uint64_t kMaxElements = INT64_MAX / 8;

uint64_t DtypeBytes(const std::string& dtype) {
  static const std::map<std::string, uint64_t> kBytes = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
      {"F32", 4},  {"I64", 8}, {"U64", 8}, {"F64", 8},
  };
  const auto it = kBytes.find(dtype);
  return it == kBytes.end() ? 0 : it->second;
}

void ReadShape(JsonReader* json, std::vector<int64_t>* shape) {
  json->BeginArray();
  while (json->NextItem()) {
    if (shape->size() == SafetensorsFile::kMaxDims) {
      json->Fail("shape: expected at most " + std::to_string(SafetensorsFile::kMaxDims) +
                 " dimensions");
    }
    shape->push_back(json->Unsigned());
  }
}

void ReadOffsets(JsonReader* json, TensorEntry* entry) {
  std::vector<int64_t> offsets;
  json->BeginArray();
  while (json->NextItem() && offsets.size() <= 2) offsets.push_back(json->Unsigned());
  if (offsets.size() != 2) return json->Fail("data_offsets: expected two numbers");
  entry->begin = static_cast<uint64_t>(offsets[0]);
  entry->end = static_cast<uint64_t>(offsets[1]);
}

TensorEntry ReadEntry(JsonReader* json) {
  TensorEntry entry{};
  bool has_dtype = false, has_shape = false, has_offsets = false;
  std::string key;
  json->BeginObject();
  while (json->NextKey(&key)) {
    bool* seen = key == "dtype"          ? &has_dtype
                 : key == "shape"        ? &has_shape
                 : key == "data_offsets" ? &has_offsets
                                         : nullptr;
    if (seen == nullptr || *seen) {
      json->Fail("unexpected or repeated key '" + key + "'");
      break;
    }
    *seen = true;
    if (seen == &has_dtype) entry.dtype = json->String();
    if (seen == &has_shape) ReadShape(json, &entry.shape);
    if (seen == &has_offsets) ReadOffsets(json, &entry);
  }
  if (!has_dtype || !has_shape || !has_offsets) {
    json->Fail("expected dtype, shape and data_offsets");
  }
  return entry;
}

// Why the entry cannot be right for a data section of `data_bytes`; empty when it can.
std::string Complaint(const TensorEntry& entry, uint64_t data_bytes) {
  const uint64_t element_bytes = DtypeBytes(entry.dtype);
  if (element_bytes == 0) return "dtype: unknown '" + entry.dtype + "'";
  if (entry.begin > entry.end || entry.end > data_bytes) {
    return "data_offsets: [" + std::to_string(entry.begin) + ", " + std::to_string(entry.end) +
           "] are outside the file's " + std::to_string(data_bytes) + " bytes of data";
  }
  // Dimensions are multiplied without the zeros among them: an empty tensor is no way round the
  // limit, on which readers rely that compute strides or allocate.
  uint64_t elements = 1;
  bool empty = false;
  for (const int64_t dim : entry.shape) {
    empty |= dim == 0;
    if (dim != 0 && __builtin_mul_overflow(elements, static_cast<uint64_t>(dim), &elements)) {
      return "shape: too many elements";
    }
  }
  if (elements > kMaxElements) return "shape: too many elements";
  const uint64_t bytes = empty ? 0 : elements * element_bytes;
  if (bytes != entry.end - entry.begin) {
    return "shape: needs " + std::to_string(bytes) + " bytes, data_offsets give " +
           std::to_string(entry.end - entry.begin);
  }
  return "";
}

float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = half >> 10 & 0x1F;
  const uint32_t mantissa = half & 0x3FF;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000 | mantissa << 13);
  if (exponent == 0) {
    // Zero or subnormal: mantissa * 2^-24 is exact in float32.
    const float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

// Elements may lie at odd addresses: they are copied, never cast.
template <typename Widen>
void WidenHalves(const uint8_t* bytes, int64_t count, float* out, Widen&& widen) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, bytes + 2 * i, sizeof(half));
    out[i] = widen(half);
  }
}

}  // namespace

int64_t TensorEntry::num_elements() const {
  int64_t count = 1;
  for (const int64_t dim : shape) count *= dim;
  return count;
}

Expected<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  // Not blocking: the name may be a pipe's.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return Error(ErrorKind::kNotFound, path + ": " + std::strerror(errno));
  struct stat info;
  const bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  const uint64_t bytes = regular ? static_cast<uint64_t>(info.st_size) : 0;
  void* map = MAP_FAILED;
  if (bytes >= 8) map = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  close(fd);
  if (!regular) return Error(ErrorKind::kInvalidAdapter, path + ": not a regular file");
  if (map == MAP_FAILED) {
    return Error(ErrorKind::kInvalidAdapter,
                 path + ": not a valid safetensors file: expected at least 8 bytes, got " +
                     std::to_string(bytes));
  }
  std::unique_ptr<SafetensorsFile> file(
      new SafetensorsFile(path, static_cast<const uint8_t*>(map), bytes));
  const Status parsed = file->Parse();
  if (!parsed.ok()) return parsed.error();
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  munmap(const_cast<uint8_t*>(map_), file_bytes_);
}

Error SafetensorsFile::Invalid(const std::string& why) const {
  return Error(ErrorKind::kInvalidAdapter, path_ + ": not a valid safetensors file: " + why);
}

Error SafetensorsFile::InvalidTensor(const std::string& name, const std::string& why) const {
  return Invalid("tensor '" + name + "': " + why).With("tensor", name);
}

Status SafetensorsFile::Parse() {
  uint64_t header_bytes = 0;
  for (int i = 0; i < 8; ++i) header_bytes |= static_cast<uint64_t>(map_[i]) << (8 * i);
  if (header_bytes > file_bytes_ - 8) {
    return Invalid("the header claims " + std::to_string(header_bytes) + " bytes, the file has " +
                   std::to_string(file_bytes_ - 8) + " after the length");
  }
  if (header_bytes > kMaxHeaderBytes) {
    return Invalid("the header claims " + std::to_string(header_bytes) + " bytes, at most " +
                   std::to_string(kMaxHeaderBytes) + " are allowed");
  }
  data_begin_ = 8 + header_bytes;

  const std::string_view header(reinterpret_cast<const char*>(map_) + 8, header_bytes);
  if (header.empty() || header[0] != '{') return Invalid("header: expected '{' at byte 0");
  JsonReader json(header);
  bool has_metadata = false;
  std::string name;
  json.BeginObject();
  while (json.NextKey(&name)) {
    if (name != "__metadata__") {
      if (!entries_.emplace(name, ReadEntry(&json)).second) json.Fail("the name occurs twice");
      if (!json.ok()) return InvalidTensor(name, json.error());
      continue;
    }
    if (std::exchange(has_metadata, true)) json.Fail("__metadata__ occurs twice");
    std::string key;
    json.BeginObject();
    while (json.NextKey(&key)) {
      if (!metadata_.emplace(key, json.String()).second) json.Fail("'" + key + "' occurs twice");
    }
    if (!json.ok()) return Invalid("header: __metadata__: " + json.error());
  }
  json.End();
  if (!json.ok()) return Invalid("header: " + json.error());
  return CheckEntries(file_bytes_ - data_begin_);
}

Status SafetensorsFile::CheckEntries(uint64_t data_bytes) {
  for (const auto& [name, entry] : entries_) {
    const std::string complaint = Complaint(entry, data_bytes);
    if (!complaint.empty()) return InvalidTensor(name, complaint);
    names_.push_back(name);
  }
  std::sort(names_.begin(), names_.end(), [this](const std::string& x, const std::string& y) {
    const TensorEntry &a = entries_.at(x), &b = entries_.at(y);
    return std::tie(a.begin, a.end, x) < std::tie(b.begin, b.end, y);
  });
  uint64_t at = 0;
  for (const std::string& name : names_) {
    const TensorEntry& entry = entries_.at(name);
    if (entry.begin != at) {
      return InvalidTensor(name, "data_offsets: begin at byte " + std::to_string(entry.begin) +
                                     ", expected " + std::to_string(at) +
                                     ": tensors must tile the data");
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    return Invalid("the tensors end at byte " + std::to_string(at) + " of " +
                   std::to_string(data_bytes) + " bytes of data");
  }
  return Status();
}

const TensorEntry* SafetensorsFile::Find(const std::string& name) const {
  const auto it = entries_.find(name);
  return it == entries_.end() ? nullptr : &it->second;
}

const uint8_t* SafetensorsFile::Data(const TensorEntry& entry) const {
  return map_ + data_begin_ + entry.begin;
}

Status SafetensorsFile::ReadFloat32(const std::string& name, float* out) const {
  const TensorEntry* entry = Find(name);
  if (entry == nullptr) {
    return Error(ErrorKind::kNotFound, path_ + ": no tensor '" + name + "'").With("tensor", name);
  }
  const uint8_t* bytes = Data(*entry);
  if (entry->dtype == "F32") {
    std::memcpy(out, bytes, entry->end - entry->begin);
  } else if (entry->dtype == "BF16") {
    WidenHalves(bytes, entry->num_elements(), out, [](uint16_t half) {
      return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
    });
  } else if (entry->dtype == "F16") {
    WidenHalves(bytes, entry->num_elements(), out, HalfToFloat);
  } else {
    return Error(ErrorKind::kInvalidAdapter, path_ + ": tensor '" + name + "': dtype: is " +
                                                 entry->dtype + ", expected F32, BF16 or F16")
        .With("tensor", name);
  }
  return Status();
}

}  // namespace lorafleet
