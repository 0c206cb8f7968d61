// The door between TVM FFI and the library. This folder alone names tvm-ffi.
//
// Every argument is checked here before memory is touched; what lies behind takes raw arrays.
// Tensors are contiguous CPU tensors, float32 or int32. SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/arguments.h"
#include "lorafleet/adapter_pool.h"
#include "lorafleet/kernels.h"
#include "lorafleet/lora_add.h"
#include "lorafleet/ops.h"
#include "lorafleet/paged_kv.h"
#include "lorafleet/safetensors.h"

namespace lorafleet {
namespace {

namespace ffi = tvm::ffi;
namespace refl = tvm::ffi::reflection;

constexpr int64_t kUnknown = ShapeMatcher::kUnknown;
constexpr DLDevice kCpu{kDLCPU, 0};
constexpr DLDataType kFloat32{kDLFloat, 32, 1}, kInt32{kDLInt, 32, 1}, kUInt8{kDLUInt, 8, 1};

// Operators of compiled models. Dims: T tokens, K input features, N output features, F half of
// gate_up's columns, NP pages, Q parts, P page rows, S segments or sequences.

void LinearOp(ffi::TensorView x, ffi::TensorView w, ffi::TensorView y) {
  const ShapeMatcher match("linear");
  int64_t t = kUnknown, k = kUnknown, n = kUnknown;
  const float* xs = match.Rows(x, "x", &t, &k);
  const float* ws = match.Array<float>(w, "w", {&n, &k});
  Linear(xs, ws, match.Rows(y, "y", &t, &n), t, k, n);
}

void RmsNormOp(ffi::TensorView x, ffi::TensorView w, double eps, ffi::TensorView y) {
  const ShapeMatcher match("rms_norm");
  int64_t t = kUnknown, k = kUnknown;
  const float* xs = match.Rows(x, "x", &t, &k);
  const float* ws = match.Array<float>(w, "w", {&k});
  RmsNorm(xs, ws, match.Rows(y, "y", &t, &k), t, k, static_cast<float>(eps));
}

void SiluMulOp(ffi::TensorView gate_up, ffi::TensorView y) {
  const ShapeMatcher match("silu_mul");
  int64_t t = kUnknown, f = kUnknown;
  float* ys = match.Rows(y, "y", &t, &f);
  int64_t two_f = 2 * f;
  SiluMul(match.Rows(gate_up, "gate_up", &t, &two_f), ys, t, f);
}

void CheckPages(const ShapeMatcher& match, const SitePages& site, const AdapterPlan& plan,
                int64_t num_refs, int64_t num_pages) {
  for (int64_t i = 0; i < num_refs; ++i) {
    const int64_t page = plan.page_ids[i];
    if (page < 0 || page >= num_pages) {
      match.Fail("page_ids",
                 std::to_string(page) + " is outside [0, " + std::to_string(num_pages) + ")");
    }
    for (int64_t q = 0; q < site.num_parts; ++q) {
      const int32_t used = site.used[page * site.num_parts + q];
      if (used < kAffinePage || used > site.page_rows) {
        match.Fail("used", std::to_string(used) + " is outside [" + std::to_string(kAffinePage) +
                               ", " + std::to_string(site.page_rows) + "]");
      }
    }
  }
}

void CheckPartEnds(const ShapeMatcher& match, const ffi::Shape& ends, int64_t parts, int64_t out) {
  int64_t begin = 0;
  if (static_cast<int64_t>(ends.size()) != parts) match.Fail("part_ends", "expected one a part");
  for (const int64_t end : ends) {
    if (end < begin) match.Fail("part_ends", "expected ascending values");
    begin = end;
  }
  if (begin != out) match.Fail("part_ends", "expected to end at " + std::to_string(out));
}

// In place: the result is y itself, as call_inplace_packed wants it.
ffi::Tensor LoraAddOp(ffi::Tensor y, ffi::TensorView x, ffi::TensorView a, ffi::TensorView b,
                      ffi::TensorView used, ffi::TensorView segment_starts,
                      ffi::TensorView page_starts, ffi::TensorView page_ids,
                      ffi::TensorView page_scales, ffi::Shape part_ends) {
  const ShapeMatcher match("lora_add");
  int64_t t = kUnknown, k = kUnknown, n = kUnknown, pages = kUnknown, parts = kUnknown,
          rows = kUnknown, bounds = kUnknown, refs = kUnknown;
  float* ys = match.Rows(y, "y", &t, &n);
  const float* xs = match.Rows(x, "x", &t, &k);
  SitePages site{};
  site.a = match.Array<float>(a, "a", {&pages, &parts, &rows, &k});
  site.b = match.Array<float>(b, "b", {&pages, &rows, &n});
  site.used = match.Array<int32_t>(used, "used", {&pages, &parts});
  AdapterPlan plan{};
  plan.segment_starts = match.Array<int32_t>(segment_starts, "segment_starts", {&bounds});
  plan.page_starts = match.Array<int32_t>(page_starts, "page_starts", {&bounds});
  plan.page_ids = match.Array<int32_t>(page_ids, "page_ids", {&refs});
  plan.page_scales = match.Array<float>(page_scales, "page_scales", {&refs});
  plan.num_segments = bounds - 1;
  if (plan.num_segments < 1) match.Fail("segment_starts", "expected at least one segment");
  match.CheckBounds(plan.segment_starts, "segment_starts", plan.num_segments, t);
  // References beyond the last segment's are padding.
  const int64_t num_refs = plan.page_starts[plan.num_segments];
  if (num_refs < 0 || num_refs > refs) match.Fail("page_starts", "ends outside page_ids");
  match.CheckBounds(plan.page_starts, "page_starts", plan.num_segments, num_refs);
  CheckPartEnds(match, part_ends, parts, n);
  site.part_ends = part_ends.data();
  site.num_parts = parts;
  site.page_rows = rows;
  site.in_features = k;
  site.out_features = n;
  CheckPages(match, site, plan, num_refs, pages);
  LoraAdd(ys, xs, site, plan);
  return y;
}

class PagedKvCacheObj : public ffi::Object {
 public:
  explicit PagedKvCacheObj(std::unique_ptr<PagedKvCache> c) : cache(std::move(c)) {}
  std::unique_ptr<PagedKvCache> cache;

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("lorafleet.PagedKVCache", PagedKvCacheObj, ffi::Object);
};

class PagedKvCacheRef : public ffi::ObjectRef {
 public:
  explicit PagedKvCacheRef(ffi::ObjectPtr<PagedKvCacheObj> n) : ffi::ObjectRef(std::move(n)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(PagedKvCacheRef, ffi::ObjectRef, PagedKvCacheObj);
};

PagedKvCacheRef KvCacheCreate(int64_t num_layers, int64_t num_blocks, int64_t block_size,
                              int64_t num_qo_heads, int64_t num_kv_heads, int64_t head_dim,
                              ffi::TensorView rope_inv_freq) {
  const ShapeMatcher match("kv_cache_create");
  int64_t half = kUnknown;
  const float* freq = match.Array<float>(rope_inv_freq, "rope_inv_freq", {&half});
  if (block_size != kBlockSize) {
    match.Fail("block_size", "expected " + std::to_string(kBlockSize));
  }
  return PagedKvCacheRef(ffi::make_object<PagedKvCacheObj>(
      Take(PagedKvCache::Create({num_layers, num_blocks, num_qo_heads, num_kv_heads, head_dim},
                                std::vector<float>(freq, freq + half)))));
}

void KvCacheBeginForward(PagedKvCacheRef kv, ffi::TensorView query_starts,
                         ffi::TensorView context_lens, ffi::TensorView block_table) {
  const ShapeMatcher match("kv_cache_begin_forward");
  int64_t sequences = kUnknown, width = kUnknown;
  const int32_t* lens = match.Array<int32_t>(context_lens, "context_lens", {&sequences});
  int64_t bounds = sequences + 1;
  const int32_t* starts = match.Array<int32_t>(query_starts, "query_starts", {&bounds});
  const int32_t* table = match.Array<int32_t>(block_table, "block_table", {&sequences, &width});
  Check(kv->cache->BeginForward(starts, lens, table, sequences, width));
}

void AttentionWithFusedQkv(PagedKvCacheRef kv, int64_t layer_id, double sm_scale,
                           ffi::TensorView qkv, ffi::TensorView out) {
  const ShapeMatcher match("attention_with_fused_qkv");
  PagedKvCache& cache = *kv->cache;
  const KvShape& s = cache.shape();
  const float* in = match.Elements(qkv, "qkv", cache.num_tokens(),
                                   (s.num_qo_heads + 2 * s.num_kv_heads) * s.head_dim);
  float* result = match.Elements(out, "out", cache.num_tokens(), s.num_qo_heads * s.head_dim);
  Check(cache.Attention(layer_id, static_cast<float>(sm_scale), in, result));
}

// Zeroed memory that the system hands out page by page, as it is first written.
struct LazyZeros {
  explicit LazyZeros(size_t num_bytes) : bytes(num_bytes) {
    data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                -1, 0);
    if (data == MAP_FAILED) {
      Raise(Error(ErrorKind::kExhausted,
                  "adapter pool: cannot reserve " + std::to_string(bytes) + " bytes"));
    }
  }
  void AllocData(DLTensor* tensor) const { tensor->data = data; }
  void FreeData(DLTensor*) const { munmap(data, bytes); }

  void* data;
  size_t bytes;
};

class AdapterPoolObj : public ffi::Object {
 public:
  std::unique_ptr<AdapterPool> pool;
  ffi::Array<ffi::Tensor> tensors;  // for each site a, b, used

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("lorafleet.AdapterPool", AdapterPoolObj, ffi::Object);
};

class AdapterPoolRef : public ffi::ObjectRef {
 public:
  explicit AdapterPoolRef(ffi::ObjectPtr<AdapterPoolObj> n) : ffi::ObjectRef(std::move(n)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(AdapterPoolRef, ffi::ObjectRef, AdapterPoolObj);
};

// A site is (in_features, end of part 0, end of part 1, ...).
AdapterPoolRef PoolCreate(ffi::Array<ffi::Shape> sites, int64_t num_pages, int64_t page_rows) {
  std::vector<PoolSite> shapes;
  for (const ffi::Shape& site : sites) {
    if (site.size() == 0) Raise(Error(ErrorKind::kInvalidInput, "adapter pool: an empty site"));
    shapes.push_back({site[0], {site.begin() + 1, site.end()}});
  }
  Check(AdapterPool::CheckShape(shapes, num_pages, page_rows));
  auto object = ffi::make_object<AdapterPoolObj>();
  const auto make = [&](std::initializer_list<int64_t> dims, DLDataType dtype) {
    size_t bytes = 4;
    for (const int64_t dim : dims) bytes *= dim;
    object->tensors.push_back(
        ffi::Tensor::FromNDAlloc(LazyZeros(bytes), ffi::Shape(dims), dtype, kCpu));
    return object->tensors.back().data_ptr();
  };
  std::vector<PoolStorage> storage;
  for (const PoolSite& s : shapes) {
    void* a = make({num_pages, s.num_parts(), page_rows, s.in_features}, kFloat32);
    void* b = make({num_pages, page_rows, s.out_features()}, kFloat32);
    void* used = make({num_pages, s.num_parts()}, kInt32);
    storage.push_back(
        {static_cast<float*>(a), static_cast<float*>(b), static_cast<int32_t*>(used)});
  }
  object->pool =
      std::make_unique<AdapterPool>(std::move(shapes), std::move(storage), num_pages, page_rows);
  return AdapterPoolRef(std::move(object));
}

ffi::Array<ffi::String> Strings(const std::vector<std::string>& names) {
  ffi::Array<ffi::String> out;
  for (const std::string& name : names) out.push_back(name);
  return out;
}

void PoolWrite(AdapterPoolRef pool, ffi::String version, int64_t site, int64_t part,
               ffi::TensorView a, ffi::TensorView b_t) {
  const ShapeMatcher match("adapter pool: write");
  const std::vector<PoolSite>& sites = pool->pool->sites();
  if (site < 0 || site >= static_cast<int64_t>(sites.size())) match.Fail("site", "no such site");
  if (part < 0 || part >= sites[site].num_parts()) match.Fail("part", "no such part");
  int64_t rank = kUnknown, in = sites[site].in_features, width = sites[site].part_width(part);
  const float* as = match.Array<float>(a, "a", {&rank, &in});
  const float* bs = match.Array<float>(b_t, "b_t", {&rank, &width});
  Check(pool->pool->Write(version, site, part, as, bs, rank));
}

void PoolWriteAffine(AdapterPoolRef pool, ffi::String version, int64_t site, int64_t part,
                     ffi::TensorView gain, ffi::TensorView shift) {
  const ShapeMatcher match("adapter pool: write affine");
  const std::vector<PoolSite>& sites = pool->pool->sites();
  if (site < 0 || site >= static_cast<int64_t>(sites.size())) match.Fail("site", "no such site");
  if (part < 0 || part >= sites[site].num_parts()) match.Fail("part", "no such part");
  int64_t width = sites[site].part_width(part);
  const float* gains = match.Array<float>(gain, "gain", {&width});
  const float* shifts = match.Array<float>(shift, "shift", {&width});
  Check(pool->pool->WriteAffine(version, site, part, gains, shifts));
}

class SafetensorsFileObj : public ffi::Object {
 public:
  explicit SafetensorsFileObj(std::unique_ptr<SafetensorsFile> f) : file(std::move(f)) {}
  std::unique_ptr<SafetensorsFile> file;

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("lorafleet.SafetensorsFile", SafetensorsFileObj, ffi::Object);
};

class SafetensorsRef : public ffi::ObjectRef {
 public:
  explicit SafetensorsRef(ffi::ObjectPtr<SafetensorsFileObj> n) : ffi::ObjectRef(std::move(n)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(SafetensorsRef, ffi::ObjectRef, SafetensorsFileObj);
};

const TensorEntry& EntryOf(const SafetensorsFile& file, const std::string& name) {
  const TensorEntry* entry = file.Find(name);
  if (entry == nullptr) {
    Raise(Error(ErrorKind::kNotFound, file.path() + ": no tensor '" + name + "'")
              .With("tensor", name));
  }
  return *entry;
}

// A view of mapped bytes that keeps the file open.
struct MappedBytes {
  SafetensorsRef file;
  const uint8_t* data;
  void AllocData(DLTensor* tensor) const { tensor->data = const_cast<uint8_t*>(data); }
  void FreeData(DLTensor*) const {}
};

void SafetensorsReadFloat32(SafetensorsRef file, ffi::String name, ffi::TensorView out) {
  const ShapeMatcher match("safetensors_read_f32");
  Check(file->file->ReadFloat32(
      name, match.Elements(out, "out", EntryOf(*file->file, name).num_elements(), 1)));
}

void RegisterOperators() {
  refl::GlobalDef()
      .def("lorafleet.kernels_name", [] { return ffi::String(kernels().name); })
      .def("lorafleet.linear", LinearOp)
      .def("lorafleet.rms_norm", RmsNormOp)
      .def("lorafleet.silu_mul", SiluMulOp)
      .def("lorafleet.lora_add", LoraAddOp)
      .def("lorafleet.kv_cache_create", KvCacheCreate)
      .def("lorafleet.kv_cache_begin_forward", KvCacheBeginForward)
      .def("lorafleet.kv_cache_bytes", [](PagedKvCacheRef kv) { return kv->cache->bytes(); })
      .def("lorafleet.attention_with_fused_qkv", AttentionWithFusedQkv);
}

void RegisterPool() {
  refl::GlobalDef()
      .def("lorafleet.pool_create", PoolCreate)
      .def("lorafleet.pool_tensors", [](AdapterPoolRef pool) { return pool->tensors; })
      .def("lorafleet.pool_reserve",
           [](AdapterPoolRef pool, ffi::String version, int64_t num_pages) {
             return Strings(Take(pool->pool->Reserve(version, num_pages)));
           })
      .def("lorafleet.pool_write", PoolWrite)
      .def("lorafleet.pool_write_affine", PoolWriteAffine)
      .def("lorafleet.pool_commit",
           [](AdapterPoolRef pool, ffi::String version) { Check(pool->pool->Commit(version)); })
      .def("lorafleet.pool_abort",
           [](AdapterPoolRef pool, ffi::String version) { pool->pool->Abort(version); })
      .def("lorafleet.pool_pin",
           [](AdapterPoolRef pool, ffi::String version) -> ffi::Optional<ffi::Shape> {
             const auto pages = pool->pool->Pin(version);
             if (!pages) return std::nullopt;
             return ffi::Shape(std::vector<int64_t>(pages->begin(), pages->end()));
           })
      .def("lorafleet.pool_unpin",
           [](AdapterPoolRef pool, ffi::String version) { Check(pool->pool->Unpin(version)); })
      .def("lorafleet.pool_evict",
           [](AdapterPoolRef pool, ffi::String version) { return pool->pool->Evict(version); })
      .def("lorafleet.pool_residents",
           [](AdapterPoolRef pool) { return Strings(pool->pool->Residents()); })
      .def("lorafleet.pool_loading",
           [](AdapterPoolRef pool) { return Strings(pool->pool->Loading()); })
      .def("lorafleet.pool_free_pages",
           [](AdapterPoolRef pool) { return pool->pool->free_pages(); })
      .def("lorafleet.pool_check", [](AdapterPoolRef pool) { Check(pool->pool->Check()); });
}

void RegisterSafetensors() {
  refl::GlobalDef()
      .def("lorafleet.safetensors_open",
           [](ffi::String path) {
             return SafetensorsRef(
                 ffi::make_object<SafetensorsFileObj>(Take(SafetensorsFile::Open(path))));
           })
      .def("lorafleet.safetensors_names",
           [](SafetensorsRef file) { return Strings(file->file->names()); })
      .def("lorafleet.safetensors_metadata",
           [](SafetensorsRef file) {
             ffi::Map<ffi::String, ffi::String> out;
             for (const auto& [key, value] : file->file->metadata()) out.Set(key, value);
             return out;
           })
      .def("lorafleet.safetensors_dtype",
           [](SafetensorsRef file, ffi::String name) {
             return ffi::String(EntryOf(*file->file, name).dtype);
           })
      .def("lorafleet.safetensors_shape",
           [](SafetensorsRef file, ffi::String name) {
             return ffi::Shape(EntryOf(*file->file, name).shape);
           })
      .def("lorafleet.safetensors_raw",
           [](SafetensorsRef file, ffi::String name) {
             const TensorEntry& entry = EntryOf(*file->file, name);
             return ffi::Tensor::FromNDAlloc(
                 MappedBytes{file, file->file->Data(entry)},
                 ffi::Shape({static_cast<int64_t>(entry.end - entry.begin)}), kUInt8, kCpu);
           })
      .def("lorafleet.safetensors_read_f32", SafetensorsReadFloat32);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  refl::ObjectDef<PagedKvCacheObj>();
  refl::ObjectDef<AdapterPoolObj>();
  refl::ObjectDef<SafetensorsFileObj>();
  RegisterOperators();
  RegisterPool();
  RegisterSafetensors();
}

}  // namespace
}  // namespace lorafleet
