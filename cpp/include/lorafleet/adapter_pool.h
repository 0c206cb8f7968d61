// The pool of rank pages: where adapters live while requests use them.
//
// A rank page is P rank rows of A and of B at every site of the model. An adapter of rank r holds
// ceil(r / P) pages; no adapter is padded to the rank of another.
//
// Every version is in one of three states, and moves only along these arrows:
//
//     absent --Reserve--> LOADING --Commit--> RESIDENT --Evict or Reserve of another--> absent
//                            \------Abort------------------------------------------------^
//
// - LOADING versions own pages that nobody else may read; only their loader writes them.
// - RESIDENT versions are never written. They are evicted only while unpinned, least recently
//   pinned first. `Pin` returns the page ids; they stay valid until the matching `Unpin`.
// - Pages are either in the free list or owned by exactly one version: Check() proves it.
//
// Thread-safe. Writing rows happens outside the lock: pages of a LOADING version have one writer
// for each (site, part), and become visible to readers through Commit, which takes the lock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace lorafleet {

struct PoolSite {
  int64_t in_features;
  std::vector<int64_t> part_ends;  // ascending; the last is out_features
};

// The arrays of one site, (num_pages, Q, P, K), (num_pages, P, N) and (num_pages, Q). Zero-filled;
// memory is taken as pages are first written. The pool does not own them.
struct PoolStorage {
  float* a;
  float* b;
  int32_t* used;
};

class AdapterPool {
 public:
  AdapterPool(std::vector<PoolSite> sites, std::vector<PoolStorage> storage, int64_t num_pages,
              int64_t page_rows);

  // absent -> LOADING with `num_pages` pages. Evicts as many unpinned RESIDENT versions as needed,
  // and returns their names. Throws kExhausted, evicting nothing, when too much is pinned or
  // loading; kConflict when the version is not absent.
  std::vector<std::string> Reserve(const std::string& version, int64_t num_pages);

  // Copies rank rows of one part of one site: `a` is (rank, K), `b_t` is (rank, part width).
  // REQUIRES: the version is LOADING and no other call writes the same (site, part).
  void Write(const std::string& version, int64_t site, int64_t part, const float* a,
             const float* b_t, int64_t rank);

  // LOADING -> RESIDENT; the version becomes the most recently used.
  void Commit(const std::string& version);

  // LOADING -> absent. Nothing happens to an absent version.
  void Abort(const std::string& version);

  // Pins a RESIDENT version and writes its page ids; false when it is not resident.
  bool Pin(const std::string& version, std::vector<int32_t>* page_ids);
  void Unpin(const std::string& version);

  // RESIDENT and unpinned -> absent; false when it is pinned, loading or absent.
  bool Evict(const std::string& version);

  // Names in the state, least recently used first.
  std::vector<std::string> Residents() const;
  std::vector<std::string> Loading() const;

  int64_t num_pages() const { return num_pages_; }
  int64_t page_rows() const { return page_rows_; }
  int64_t free_pages() const;
  const std::vector<PoolSite>& sites() const { return sites_; }

  // Throws kInternal if a page is lost, owned twice, or a count is wrong.
  void Check() const;

 private:
  struct Entry {
    bool resident = false;
    int64_t num_pins = 0;
    std::vector<int32_t> pages;
    std::list<std::string>::iterator recency;  // in lru_, RESIDENT entries only
  };

  // All REQUIRE the lock.
  void Release(const std::string& version);
  Entry& Loaded(const std::string& version);

  const std::vector<PoolSite> sites_;
  const std::vector<PoolStorage> storage_;
  const int64_t num_pages_;
  const int64_t page_rows_;

  mutable std::mutex mutex_;
  // All below are guarded by mutex_.
  std::unordered_map<std::string, Entry> entries_;
  std::list<std::string> lru_;  // RESIDENT versions, least recently used first
  std::vector<int32_t> free_;
};

}  // namespace lorafleet
