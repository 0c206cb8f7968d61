// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/adapter_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "lorafleet/lora_add.h"

namespace lorafleet {
namespace {

Error PoolError(ErrorKind kind, const std::string& message) {
  return Error(kind, "adapter pool: " + message);
}

}  // namespace

Status AdapterPool::CheckShape(const std::vector<PoolSite>& sites, int64_t num_pages,
                               int64_t page_rows) {
  // Page ids are int32, and no array may have more bytes than 63 bits count.
  if (num_pages < 1 || num_pages > INT32_MAX || page_rows < 1 || page_rows > INT32_MAX) {
    return PoolError(ErrorKind::kInvalidInput, "num_pages and page_rows must be in [1, 2^31)");
  }
  for (size_t i = 0; i < sites.size(); ++i) {
    const PoolSite& site = sites[i];
    const std::string name = "site " + std::to_string(i);
    if (site.in_features < 1) {
      return PoolError(ErrorKind::kInvalidInput, name + ": in_features must be positive");
    }
    int64_t begin = 0;
    for (const int64_t end : site.part_ends) {
      if (end <= begin) {
        return PoolError(ErrorKind::kInvalidInput, name + ": part ends must ascend from above 0");
      }
      begin = end;
    }
    if (site.part_ends.empty()) {
      return PoolError(ErrorKind::kInvalidInput, name + ": expected at least one part");
    }
    int64_t bytes = sizeof(float);
    const int64_t widest = std::max(site.in_features, site.out_features());
    for (const int64_t dim : {num_pages, page_rows, site.num_parts(), widest}) {
      if (__builtin_mul_overflow(bytes, dim, &bytes)) {
        return PoolError(ErrorKind::kInvalidInput, name + ": too many elements");
      }
    }
  }
  return Status();
}

AdapterPool::AdapterPool(std::vector<PoolSite> sites, std::vector<PoolStorage> storage,
                         int64_t num_pages, int64_t page_rows)
    : sites_(std::move(sites)),
      storage_(std::move(storage)),
      num_pages_(num_pages),
      page_rows_(page_rows) {
  // Lowest page first: a small working set touches little memory.
  for (int64_t page = num_pages; page-- > 0;) free_.push_back(static_cast<int32_t>(page));
}

Expected<std::vector<std::string>> AdapterPool::Reserve(const std::string& version,
                                                        int64_t num_pages) {
  if (num_pages < 1) {
    return PoolError(ErrorKind::kInvalidInput, version + ": expected at least one rank page, got " +
                                                   std::to_string(num_pages));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.count(version)) {
    return PoolError(ErrorKind::kConflict, version + " is already loading or resident");
  }
  if (num_pages > num_pages_) {
    return PoolError(ErrorKind::kExhausted, version + " needs " + std::to_string(num_pages) +
                                                " rank pages, the pool has " +
                                                std::to_string(num_pages_));
  }
  // Choose all victims before the first is touched.
  std::vector<std::string> victims;
  int64_t available = static_cast<int64_t>(free_.size());
  for (auto it = lru_.begin(); available < num_pages && it != lru_.end(); ++it) {
    const Entry& entry = entries_.at(*it);
    if (entry.num_pins > 0) continue;
    victims.push_back(*it);
    available += static_cast<int64_t>(entry.pages.size());
  }
  if (available < num_pages) {
    return PoolError(ErrorKind::kExhausted, version + " needs " + std::to_string(num_pages) +
                                                " rank pages, only " + std::to_string(available) +
                                                " are free or evictable; the rest is in use");
  }
  for (const std::string& victim : victims) Release(victim);

  Entry& entry = entries_[version];
  entry.pages.assign(free_.rbegin(), free_.rbegin() + num_pages);
  free_.resize(free_.size() - num_pages);
  // A page's earlier owner may have used more parts than this one will write.
  for (const int32_t page : entry.pages) {
    for (size_t site = 0; site < sites_.size(); ++site) {
      const int64_t parts = sites_[site].num_parts();
      std::fill_n(storage_[site].used + page * parts, parts, 0);
    }
  }
  return victims;
}

Status AdapterPool::Write(const std::string& version, int64_t site, int64_t part, const float* a,
                          const float* b_t, int64_t rank) {
  if (Status status = CheckPart(site, part); !status.ok()) return status;
  const Expected<std::vector<int32_t>> pages = EnterWriting(version);
  if (!pages.ok()) return pages.error();
  Status status = CopyRows(site, part, pages.value(), a, b_t, rank);
  LeaveWriting(version);
  return status;
}

Status AdapterPool::WriteAffine(const std::string& version, int64_t site, int64_t part,
                                const float* gain, const float* shift) {
  if (Status status = CheckPart(site, part); !status.ok()) return status;
  const Expected<std::vector<int32_t>> pages = EnterWriting(version);
  if (!pages.ok()) return pages.error();
  Status status = CopyAffine(site, part, pages.value().back(), gain, shift);
  LeaveWriting(version);
  return status;
}

Status AdapterPool::CheckPart(int64_t site, int64_t part) const {
  if (site < 0 || site >= static_cast<int64_t>(sites_.size())) {
    return PoolError(ErrorKind::kInvalidInput, "no site " + std::to_string(site));
  }
  if (part < 0 || part >= sites_[site].num_parts()) {
    return PoolError(ErrorKind::kInvalidInput,
                     "site " + std::to_string(site) + " has no part " + std::to_string(part));
  }
  return Status();
}

Expected<std::vector<int32_t>> AdapterPool::EnterWriting(const std::string& version) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry* entry = FindLoading(version);
  if (entry == nullptr) return PoolError(ErrorKind::kConflict, version + " is not loading");
  ++entry->num_writers;
  return entry->pages;
}

void AdapterPool::LeaveWriting(const std::string& version) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --FindLoading(version)->num_writers;  // still there: Commit and Abort wait for us
  }
  writer_left_.notify_all();
}

Status AdapterPool::CopyRows(int64_t site, int64_t part, const std::vector<int32_t>& pages,
                             const float* a, const float* b_t, int64_t rank) {
  const PoolSite& shape = sites_[site];
  const int64_t out = shape.out_features(), width = shape.part_width(part);
  int32_t* const used = storage_[site].used + part;
  const int64_t parts = shape.num_parts();
  const bool has_affine = used[pages.back() * parts] == kAffinePage;
  const int64_t num_pages = static_cast<int64_t>(pages.size()) - has_affine;
  if (rank < 0 || rank > num_pages * page_rows_) {
    return PoolError(ErrorKind::kInvalidInput, "rank " + std::to_string(rank) +
                                                   " does not fit into " +
                                                   std::to_string(num_pages) + " pages of " +
                                                   std::to_string(page_rows_) + " rows");
  }
  for (int64_t i = 0; i < num_pages; ++i) {
    const int64_t first = i * page_rows_;
    const int64_t rows = std::clamp<int64_t>(rank - first, 0, page_rows_);
    used[pages[i] * parts] = static_cast<int32_t>(rows);
    if (rows == 0) continue;
    const int64_t slice = pages[i] * parts + part;
    std::memcpy(storage_[site].a + slice * page_rows_ * shape.in_features,
                a + first * shape.in_features, rows * shape.in_features * sizeof(float));
    float* b = storage_[site].b + pages[i] * page_rows_ * out + shape.part_begin(part);
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(b + row * out, b_t + (first + row) * width, width * sizeof(float));
    }
  }
  return Status();
}

Status AdapterPool::CopyAffine(int64_t site, int64_t part, int32_t page, const float* gain,
                               const float* shift) {
  const PoolSite& shape = sites_[site];
  int32_t* const used = storage_[site].used + page * shape.num_parts() + part;
  if (*used > 0 || page_rows_ < 2) {
    return PoolError(ErrorKind::kInvalidInput, "the last page has no room for an affine change");
  }
  const int64_t out = shape.out_features(), bytes = shape.part_width(part) * sizeof(float);
  float* b = storage_[site].b + page * page_rows_ * out + shape.part_begin(part);
  std::memcpy(b, gain, bytes);
  std::memcpy(b + out, shift, bytes);
  *used = kAffinePage;
  return Status();
}

Status AdapterPool::Commit(const std::string& version) {
  std::unique_lock<std::mutex> lock(mutex_);
  Entry* entry = AwaitWriters(version, &lock);
  if (entry == nullptr) return PoolError(ErrorKind::kConflict, version + " is not loading");
  entry->resident = true;
  entry->recency = lru_.insert(lru_.end(), version);
  return Status();
}

void AdapterPool::Abort(const std::string& version) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (AwaitWriters(version, &lock) != nullptr) Release(version);
}

std::optional<std::vector<int32_t>> AdapterPool::Pin(const std::string& version) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(version);
  if (it == entries_.end() || !it->second.resident) return std::nullopt;
  Entry& entry = it->second;
  ++entry.num_pins;
  lru_.splice(lru_.end(), lru_, entry.recency);
  return entry.pages;
}

Status AdapterPool::Unpin(const std::string& version) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(version);
  if (it == entries_.end() || it->second.num_pins == 0) {
    return PoolError(ErrorKind::kInternal, "unpin of " + version + ", which is not pinned");
  }
  --it->second.num_pins;
  return Status();
}

bool AdapterPool::Evict(const std::string& version) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(version);
  if (it == entries_.end() || !it->second.resident || it->second.num_pins > 0) return false;
  Release(version);
  return true;
}

std::vector<std::string> AdapterPool::Residents() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {lru_.begin(), lru_.end()};
}

std::vector<std::string> AdapterPool::Loading() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) {
    if (!entry.resident) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

int64_t AdapterPool::free_pages() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(free_.size());
}

Status AdapterPool::Check() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> owners(num_pages_, 0);
  for (const int32_t page : free_) ++owners.at(page);
  size_t residents = 0;
  for (const auto& [name, entry] : entries_) {
    for (const int32_t page : entry.pages) ++owners.at(page);
    residents += entry.resident;
    if (entry.pages.empty()) return PoolError(ErrorKind::kInternal, name + " owns no page");
    if (!entry.resident && entry.num_pins != 0) {
      return PoolError(ErrorKind::kInternal, name + " is pinned while loading");
    }
    if (entry.resident && entry.num_writers != 0) {
      return PoolError(ErrorKind::kInternal, name + " is written while resident");
    }
    if (entry.resident && *entry.recency != name) {
      return PoolError(ErrorKind::kInternal, "the recency list lost " + name);
    }
  }
  if (residents != lru_.size()) {
    return PoolError(ErrorKind::kInternal, "the recency list has a stranger");
  }
  for (int64_t page = 0; page < num_pages_; ++page) {
    if (owners[page] != 1) {
      return PoolError(ErrorKind::kInternal, "page " + std::to_string(page) + " has " +
                                                 std::to_string(owners[page]) + " owners");
    }
  }
  return Status();
}

void AdapterPool::Release(const std::string& version) {
  const auto it = entries_.find(version);
  Entry& entry = it->second;
  if (entry.resident) lru_.erase(entry.recency);
  free_.insert(free_.end(), entry.pages.rbegin(), entry.pages.rend());
  entries_.erase(it);
}

AdapterPool::Entry* AdapterPool::FindLoading(const std::string& version) {
  const auto it = entries_.find(version);
  return it == entries_.end() || it->second.resident ? nullptr : &it->second;
}

AdapterPool::Entry* AdapterPool::AwaitWriters(const std::string& version,
                                              std::unique_lock<std::mutex>* lock) {
  // Looked up afresh each time: another call may have ended the loading meanwhile.
  Entry* entry = FindLoading(version);
  while (entry != nullptr && entry->num_writers > 0) {
    writer_left_.wait(*lock);
    entry = FindLoading(version);
  }
  return entry;
}

}  // namespace lorafleet
