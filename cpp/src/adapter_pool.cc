// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/adapter_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "lorafleet/error.h"

namespace lorafleet {

AdapterPool::AdapterPool(std::vector<PoolSite> sites, std::vector<PoolStorage> storage,
                         int64_t num_pages, int64_t page_rows)
    : sites_(std::move(sites)),
      storage_(std::move(storage)),
      num_pages_(num_pages),
      page_rows_(page_rows) {
  // Lowest page first: a small working set touches little memory.
  for (int64_t page = num_pages; page-- > 0;) free_.push_back(static_cast<int32_t>(page));
}

std::vector<std::string> AdapterPool::Reserve(const std::string& version, int64_t num_pages) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.count(version)) {
    throw Error(ErrorKind::kConflict, "adapter pool: " + version + " is already loading or resident");
  }
  if (num_pages <= 0 || num_pages > num_pages_) {
    throw Error(ErrorKind::kExhausted, "adapter pool: " + version + " needs " +
                                           std::to_string(num_pages) + " rank pages, the pool has " +
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
    throw Error(ErrorKind::kExhausted,
                "adapter pool: " + version + " needs " + std::to_string(num_pages) +
                    " rank pages, only " + std::to_string(available) +
                    " are free or evictable; the rest is in use");
  }
  for (const std::string& victim : victims) Release(victim);

  Entry& entry = entries_[version];
  entry.pages.assign(free_.end() - num_pages, free_.end());
  std::reverse(entry.pages.begin(), entry.pages.end());
  free_.resize(free_.size() - num_pages);
  // A page's earlier owner may have used more parts than this one will write.
  for (const int32_t page : entry.pages) {
    for (size_t site = 0; site < sites_.size(); ++site) {
      const size_t parts = sites_[site].part_ends.size();
      std::memset(storage_[site].used + page * parts, 0, parts * sizeof(int32_t));
    }
  }
  return victims;
}

void AdapterPool::Write(const std::string& version, int64_t site, int64_t part, const float* a,
                        const float* b_t, int64_t rank) {
  std::vector<int32_t> pages;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    pages = Loaded(version).pages;
  }
  const PoolSite& shape = sites_.at(site);
  const int64_t num_parts = static_cast<int64_t>(shape.part_ends.size());
  const int64_t out_features = shape.part_ends.back();
  const int64_t begin = part == 0 ? 0 : shape.part_ends.at(part - 1);
  const int64_t width = shape.part_ends.at(part) - begin;
  if (rank < 0 || rank > static_cast<int64_t>(pages.size()) * page_rows_) {
    throw Error(ErrorKind::kInvalidInput,
                "adapter pool: rank " + std::to_string(rank) + " does not fit into " +
                    std::to_string(pages.size()) + " pages of " + std::to_string(page_rows_));
  }
  for (int64_t first = 0; first < rank; first += page_rows_) {
    const int64_t page = pages[first / page_rows_];
    const int64_t rows = std::min(page_rows_, rank - first);
    std::memcpy(
        storage_[site].a + ((page * num_parts + part) * page_rows_) * shape.in_features,
        a + first * shape.in_features, rows * shape.in_features * sizeof(float));
    float* b = storage_[site].b + page * page_rows_ * out_features + begin;
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(b + row * out_features, b_t + (first + row) * width, width * sizeof(float));
    }
    storage_[site].used[page * num_parts + part] = static_cast<int32_t>(rows);
  }
}

void AdapterPool::Commit(const std::string& version) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = Loaded(version);
  entry.resident = true;
  entry.recency = lru_.insert(lru_.end(), version);
}

void AdapterPool::Abort(const std::string& version) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(version);
  if (it != entries_.end() && !it->second.resident) Release(version);
}

bool AdapterPool::Pin(const std::string& version, std::vector<int32_t>* page_ids) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(version);
  if (it == entries_.end() || !it->second.resident) return false;
  Entry& entry = it->second;
  ++entry.num_pins;
  lru_.splice(lru_.end(), lru_, entry.recency);
  *page_ids = entry.pages;
  return true;
}

void AdapterPool::Unpin(const std::string& version) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(version);
  if (it == entries_.end() || it->second.num_pins == 0) {
    throw Error(ErrorKind::kInternal, "adapter pool: unpin of " + version + ", which is not pinned");
  }
  --it->second.num_pins;
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

void AdapterPool::Check() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> owners(num_pages_, 0);
  for (const int32_t page : free_) ++owners.at(page);
  size_t residents = 0;
  for (const auto& [name, entry] : entries_) {
    for (const int32_t page : entry.pages) ++owners.at(page);
    residents += entry.resident;
    if (!entry.resident && entry.num_pins != 0) {
      throw Error(ErrorKind::kInternal, "adapter pool: " + name + " is pinned while loading");
    }
    if (entry.resident && *entry.recency != name) {
      throw Error(ErrorKind::kInternal, "adapter pool: the recency list lost " + name);
    }
  }
  if (residents != lru_.size()) {
    throw Error(ErrorKind::kInternal, "adapter pool: the recency list has a stranger");
  }
  for (int64_t page = 0; page < num_pages_; ++page) {
    if (owners[page] != 1) {
      throw Error(ErrorKind::kInternal, "adapter pool: page " + std::to_string(page) + " has " +
                                            std::to_string(owners[page]) + " owners");
    }
  }
}

void AdapterPool::Release(const std::string& version) {
  const auto it = entries_.find(version);
  Entry& entry = it->second;
  if (entry.resident) lru_.erase(entry.recency);
  free_.insert(free_.end(), entry.pages.rbegin(), entry.pages.rend());
  entries_.erase(it);
}

AdapterPool::Entry& AdapterPool::Loaded(const std::string& version) {
  const auto it = entries_.find(version);
  if (it == entries_.end() || it->second.resident) {
    throw Error(ErrorKind::kConflict, "adapter pool: " + version + " is not loading");
  }
  return it->second;
}

}  // namespace lorafleet
