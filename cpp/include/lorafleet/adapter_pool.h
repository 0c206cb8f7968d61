// The pool of rank pages: where adapters live while requests use them.
//
// A rank page is P rank rows of A and of B at every site of the model. An adapter of rank r holds
// ceil(r / P) pages; no adapter is padded to the rank of another. One that rescales or shifts the
// outputs of layers (DoRA's magnitudes, biases) holds one more, its last: the affine page.
//
// Every version is in one of three states, and moves only along these arrows:
//
//     absent --Reserve--> LOADING --Commit--> RESIDENT --Evict or Reserve of another--> absent
//                            \------Abort------------------------------------------------^
//
// - LOADING versions own pages that nobody else may read; they are not evicted.
// - RESIDENT versions are never written. They are evicted only while unpinned, least recently
//   pinned first. `Pin` returns the page ids; they stay valid until the matching `Unpin`.
// - Pages are either in the free list or owned by exactly one version: Check() proves it.
// - A page's `used` counts are 0 when it leaves the free list; Write and WriteAffine alone set
// them.
//
// Thread-safe. Rows are copied outside the lock, so that pins never wait for a load; Commit and
// Abort wait for the copies of their version. The pages become visible to readers through Commit
// and Pin, which take the lock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "lorafleet/status.h"

namespace lorafleet {

struct PoolSite {
  int64_t in_features;
  std::vector<int64_t> part_ends;  // ascending; the last is out_features

  int64_t num_parts() const { return static_cast<int64_t>(part_ends.size()); }
  int64_t out_features() const { return part_ends.back(); }
  int64_t part_begin(int64_t part) const { return part == 0 ? 0 : part_ends[part - 1]; }
  int64_t part_width(int64_t part) const { return part_ends[part] - part_begin(part); }
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
  // Checks sizes, before storage for them is made.
  static Status CheckShape(const std::vector<PoolSite>& sites, int64_t num_pages,
                           int64_t page_rows);

  // REQUIRES: CheckShape is ok; one storage for each site, which outlives the pool.
  AdapterPool(std::vector<PoolSite> sites, std::vector<PoolStorage> storage, int64_t num_pages,
              int64_t page_rows);
  AdapterPool(const AdapterPool&) = delete;
  AdapterPool& operator=(const AdapterPool&) = delete;

  // absent -> LOADING with `num_pages` pages. Evicts as many unpinned RESIDENT versions as needed,
  // and returns their names. kExhausted, evicting nothing, when too much is pinned or loading;
  // kConflict when the version is not absent.
  Expected<std::vector<std::string>> Reserve(const std::string& version, int64_t num_pages);

  // Copies rank rows of one part of one site: `a` is (rank, K), `b_t` is (rank, part width).
  // kConflict unless LOADING; kInvalidInput when the site, part or rank does not fit.
  // REQUIRES: no other call writes the same (version, site, part) at the same time.
  Status Write(const std::string& version, int64_t site, int64_t part, const float* a,
               const float* b_t, int64_t rank);

  // Copies what one part of one site adds besides rank rows, y += gain * y + shift: each is (part
  // width). It goes into the version's last page, which must hold no rank rows of that part.
  // kConflict unless LOADING; kInvalidInput when site or part does not fit, or the page is taken.
  // REQUIRES: as Write, and no Write of the part at the same time.
  Status WriteAffine(const std::string& version, int64_t site, int64_t part, const float* gain,
                     const float* shift);

  // LOADING -> RESIDENT; the version becomes the most recently used. kConflict unless LOADING.
  Status Commit(const std::string& version);

  // LOADING -> absent. Nothing happens to a version that is not loading.
  void Abort(const std::string& version);

  // Pins a RESIDENT version and returns its page ids; nothing when it is not resident.
  std::optional<std::vector<int32_t>> Pin(const std::string& version);

  // kInternal when the version is not pinned: some pin was undone twice.
  Status Unpin(const std::string& version);

  // RESIDENT and unpinned -> absent; false when it is pinned, loading or absent.
  bool Evict(const std::string& version);

  // Names in the state: residents least recently used first, loading ones in alphabetical order.
  std::vector<std::string> Residents() const;
  std::vector<std::string> Loading() const;

  int64_t num_pages() const { return num_pages_; }
  int64_t page_rows() const { return page_rows_; }
  int64_t free_pages() const;
  const std::vector<PoolSite>& sites() const { return sites_; }

  // kInternal if a page is lost or owned twice, or a count or list is wrong.
  Status Check() const;

 private:
  struct Entry {
    bool resident = false;
    int64_t num_pins = 0;
    int64_t num_writers = 0;  // Write calls that copy now; only while LOADING
    std::vector<int32_t> pages;
    std::list<std::string>::iterator recency;  // in lru_, RESIDENT entries only
  };

  // All REQUIRE the lock.
  void Release(const std::string& version);
  Entry* FindLoading(const std::string& version);
  // The LOADING entry once nobody writes to it, or null.
  Entry* AwaitWriters(const std::string& version, std::unique_lock<std::mutex>* lock);

  Status CheckPart(int64_t site, int64_t part) const;
  // The pages of a LOADING version, which then has one more writer; LeaveWriting undoes that.
  Expected<std::vector<int32_t>> EnterWriting(const std::string& version);
  void LeaveWriting(const std::string& version);
  Status CopyRows(int64_t site, int64_t part, const std::vector<int32_t>& pages, const float* a,
                  const float* b_t, int64_t rank);
  Status CopyAffine(int64_t site, int64_t part, int32_t page, const float* gain,
                    const float* shift);

  const std::vector<PoolSite> sites_;
  const std::vector<PoolStorage> storage_;
  const int64_t num_pages_;
  const int64_t page_rows_;

  mutable std::mutex mutex_;
  std::condition_variable writer_left_;
  // All below are guarded by mutex_.
  std::unordered_map<std::string, Entry> entries_;
  std::list<std::string> lru_;  // RESIDENT versions, least recently used first
  std::vector<int32_t> free_;
};

}  // namespace lorafleet
