// The door between TVM FFI and the library: the only file that names tvm-ffi.
//
// Every argument is checked here, by named dims across all arguments, before memory is touched; what
// lies behind takes raw arrays. lorafleet::Error crosses as an FFI error of kind "lorafleet.<Kind>".
// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lorafleet/adapter_pool.h"
#include "lorafleet/error.h"
#include "lorafleet/kernels.h"
#include "lorafleet/ops.h"
#include "lorafleet/paged_kv.h"
#include "lorafleet/safetensors.h"

namespace lorafleet {
namespace {

namespace ffi = tvm::ffi;
namespace refl = tvm::ffi::reflection;

// Runs `body` and turns our errors into FFI errors that Python maps back by name.
template <typename Body>
auto Guard(Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    throw ffi::Error(std::string("lorafleet.") + ErrorKindName(error.kind()), error.what(), "");
  } catch (const std::bad_alloc&) {
    throw ffi::Error("lorafleet.Exhausted", "the native library is out of memory", "");
  }
}

// Checks shapes against named dims: the first use of a name fixes its size.
class Shapes {
 public:
  explicit Shapes(const char* op) : op_(op) {}

  template <typename T>
  T* Take(const ffi::TensorView& tensor, const char* name, std::vector<int64_t*> dims) const {
    CheckTensor(tensor, name, dims.size());
    for (size_t i = 0; i < dims.size(); ++i) Match(tensor.size(i), name, i, dims[i]);
    return Data<T>(tensor, name);
  }

  // A matrix given with any number of leading dims: all but the last are rows.
  float* Rows(const ffi::TensorView& tensor, const char* name, int64_t* rows, int64_t* columns) {
    if (tensor.ndim() < 1) Fail(name, "expected at least one dimension");
    CheckTensor(tensor, name, tensor.ndim());
    int64_t count = 1;
    for (int32_t i = 0; i + 1 < tensor.ndim(); ++i) count *= tensor.size(i);
    Match(count, name, 0, rows);
    Match(tensor.size(-1), name, tensor.ndim() - 1, columns);
    return Data<float>(tensor, name);
  }

  // A matrix whose columns may be split over trailing dims, (rows..., heads, head_dim): only the
  // number of elements for each row counts.
  float* Flat(const ffi::TensorView& tensor, const char* name, int64_t rows, int64_t columns) {
    CheckTensor(tensor, name, tensor.ndim());
    int64_t numel = tensor.numel();
    const int64_t expected = rows * columns;
    if (numel != expected) {
      Fail(name, "expected " + std::to_string(rows) + " x " + std::to_string(columns) +
                     " elements, got " + std::to_string(numel));
    }
    return Data<float>(tensor, name);
  }

  [[noreturn]] void Fail(const char* name, const std::string& what) const {
    throw Error(ErrorKind::kInvalidInput, std::string(op_) + ": " + name + ": " + what);
  }

 private:
  void CheckTensor(const ffi::TensorView& tensor, const char* name, size_t ndim) const {
    if (static_cast<size_t>(tensor.ndim()) != ndim) {
      Fail(name, "expected " + std::to_string(ndim) + " dimensions, got " +
                     std::to_string(tensor.ndim()));
    }
    if (tensor.device().device_type != kDLCPU) Fail(name, "expected a CPU tensor");
    if (!tensor.IsContiguous()) Fail(name, "expected a contiguous tensor");
  }

  void Match(int64_t size, const char* name, size_t axis, int64_t* dim) const {
    if (*dim == kUnknown) *dim = size;
    if (*dim != size) {
      Fail(name, "dimension " + std::to_string(axis) + " is " + std::to_string(size) +
                     ", expected " + std::to_string(*dim));
    }
  }

  template <typename T>
  T* Data(const ffi::TensorView& tensor, const char* name) const {
    const DLDataType dtype = tensor.dtype();
    const uint8_t code = std::is_same_v<std::remove_const_t<T>, float> ? kDLFloat : kDLInt;
    if (dtype.code != code || dtype.bits != 32 || dtype.lanes != 1) {
      Fail(name, code == kDLFloat ? "expected float32" : "expected int32");
    }
    return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
  }

  const char* op_;

 public:
  static constexpr int64_t kUnknown = -1;
};

void LinearOp(ffi::TensorView x, ffi::TensorView w, ffi::TensorView y) {
  Guard([&] {
    Shapes shapes("linear");
    int64_t t = Shapes::kUnknown, k = Shapes::kUnknown, n = Shapes::kUnknown;
    const float* xs = shapes.Rows(x, "x", &t, &k);
    const float* ws = shapes.Take<float>(w, "w", {&n, &k});
    Linear(xs, ws, shapes.Rows(y, "y", &t, &n), t, k, n);
  });
}

void RmsNormOp(ffi::TensorView x, ffi::TensorView w, double eps, ffi::TensorView y) {
  Guard([&] {
    Shapes shapes("rms_norm");
    int64_t t = Shapes::kUnknown, k = Shapes::kUnknown;
    const float* xs = shapes.Rows(x, "x", &t, &k);
    const float* ws = shapes.Take<float>(w, "w", {&k});
    RmsNorm(xs, ws, shapes.Rows(y, "y", &t, &k), t, k, static_cast<float>(eps));
  });
}

void SiluMulOp(ffi::TensorView gate_up, ffi::TensorView y) {
  Guard([&] {
    Shapes shapes("silu_mul");
    int64_t t = Shapes::kUnknown, f = Shapes::kUnknown;
    float* ys = shapes.Rows(y, "y", &t, &f);
    int64_t two_f = 2 * f;
    SiluMul(shapes.Rows(gate_up, "gate_up", &t, &two_f), ys, t, f);
  });
}

// Ascending, from 0 to `end`.
void CheckBounds(const Shapes& shapes, const char* name, const int32_t* starts, int64_t count,
                 int64_t end) {
  if (starts[0] != 0 || starts[count] != end) {
    shapes.Fail(name, "expected to run from 0 to " + std::to_string(end));
  }
  for (int64_t i = 0; i < count; ++i) {
    if (starts[i] > starts[i + 1]) shapes.Fail(name, "expected ascending values");
  }
}

// In place: the result is y itself, as call_inplace_packed wants it.
ffi::Tensor LoraAddOp(ffi::Tensor y, ffi::TensorView x, ffi::TensorView a, ffi::TensorView b,
               ffi::TensorView used, ffi::TensorView segment_starts, ffi::TensorView page_starts,
               ffi::TensorView page_ids, ffi::TensorView page_scales, ffi::Shape part_ends) {
  Guard([&] {
    Shapes shapes("lora_add");
    constexpr int64_t kUnknown = Shapes::kUnknown;
    int64_t t = kUnknown, k = kUnknown, n = kUnknown, pages = kUnknown, parts = kUnknown,
            rows = kUnknown, bounds = kUnknown, refs = kUnknown;
    float* ys = shapes.Rows(y, "y", &t, &n);
    const float* xs = shapes.Rows(x, "x", &t, &k);
    SitePages site{};
    site.a = shapes.Take<float>(a, "a", {&pages, &parts, &rows, &k});
    site.b = shapes.Take<float>(b, "b", {&pages, &rows, &n});
    site.used = shapes.Take<int32_t>(used, "used", {&pages, &parts});
    AdapterPlan plan{};
    plan.segment_starts = shapes.Take<int32_t>(segment_starts, "segment_starts", {&bounds});
    plan.page_starts = shapes.Take<int32_t>(page_starts, "page_starts", {&bounds});
    plan.page_ids = shapes.Take<int32_t>(page_ids, "page_ids", {&refs});
    plan.page_scales = shapes.Take<float>(page_scales, "page_scales", {&refs});
    plan.num_segments = bounds - 1;
    if (plan.num_segments < 1) shapes.Fail("segment_starts", "expected at least one segment");
    CheckBounds(shapes, "segment_starts", plan.segment_starts, plan.num_segments, t);
    // References beyond the last segment's are padding.
    const int64_t num_refs = plan.page_starts[plan.num_segments];
    if (num_refs < 0 || num_refs > refs) shapes.Fail("page_starts", "ends beyond page_ids");
    CheckBounds(shapes, "page_starts", plan.page_starts, plan.num_segments, num_refs);
    for (int64_t i = 0; i < num_refs; ++i) {
      if (plan.page_ids[i] < 0 || plan.page_ids[i] >= pages) {
        shapes.Fail("page_ids", std::to_string(plan.page_ids[i]) + " is outside [0, " +
                                    std::to_string(pages) + ")");
      }
    }
    if (static_cast<int64_t>(part_ends.size()) != parts || part_ends.back() != n) {
      shapes.Fail("part_ends", "expected one end for each part, the last of them out_features");
    }
    site.part_ends = part_ends.data();
    site.num_parts = parts;
    site.page_rows = rows;
    site.in_features = k;
    site.out_features = n;
    LoraAdd(ys, xs, site, plan);
  });
  return y;
}

class PagedKvCacheObj : public ffi::Object {
 public:
  PagedKvCacheObj(const KvShape& shape, std::vector<float> inv_freq)
      : cache(shape, std::move(inv_freq)) {}

  PagedKvCache cache;

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("lorafleet.PagedKVCache", PagedKvCacheObj, ffi::Object);
};

class PagedKvCacheRef : public ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(PagedKvCacheRef, ffi::ObjectRef, PagedKvCacheObj);
};

PagedKvCacheRef KvCacheCreate(int64_t num_layers, int64_t num_blocks, int64_t block_size,
                              int64_t num_qo_heads, int64_t num_kv_heads, int64_t head_dim,
                              ffi::TensorView rope_inv_freq) {
  return Guard([&] {
    Shapes shapes("kv_cache_create");
    int64_t half = head_dim / 2;
    const float* freq = shapes.Take<float>(rope_inv_freq, "rope_inv_freq", {&half});
    if (block_size != kBlockSize) {
      shapes.Fail("block_size", "expected " + std::to_string(kBlockSize));
    }
    return PagedKvCacheRef(ffi::make_object<PagedKvCacheObj>(
        KvShape{num_layers, num_blocks, num_qo_heads, num_kv_heads, head_dim},
        std::vector<float>(freq, freq + half)));
  });
}

void KvCacheBeginForward(PagedKvCacheRef kv, ffi::TensorView query_starts,
                         ffi::TensorView context_lens, ffi::TensorView block_table) {
  Guard([&] {
    Shapes shapes("kv_cache_begin_forward");
    int64_t sequences = Shapes::kUnknown, width = Shapes::kUnknown;
    const int32_t* lens = shapes.Take<int32_t>(context_lens, "context_lens", {&sequences});
    int64_t bounds = sequences + 1;
    const int32_t* starts = shapes.Take<int32_t>(query_starts, "query_starts", {&bounds});
    const int32_t* table = shapes.Take<int32_t>(block_table, "block_table", {&sequences, &width});
    kv.get()->cache.BeginForward(starts, lens, table, sequences, width);
  });
}

void AttentionWithFusedQkv(PagedKvCacheRef kv, int64_t layer_id, double sm_scale,
                           ffi::TensorView qkv, ffi::TensorView out) {
  Guard([&] {
    PagedKvCache& cache = kv.get()->cache;
    const KvShape& shape = cache.shape();
    Shapes shapes("attention_with_fused_qkv");
    const float* in =
        shapes.Flat(qkv, "qkv", cache.num_tokens(),
                    (shape.num_qo_heads + 2 * shape.num_kv_heads) * shape.head_dim);
    float* result =
        shapes.Flat(out, "out", cache.num_tokens(), shape.num_qo_heads * shape.head_dim);
    cache.Attention(layer_id, static_cast<float>(sm_scale), in, result);
  });
}

// Zeroed memory that the system hands out page by page, as it is first written.
struct LazyZeros {
  void AllocData(DLTensor* tensor) {
    const size_t bytes = ffi::GetDataSize(*tensor);
    tensor->data = mmap(nullptr, bytes == 0 ? 1 : bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (tensor->data == MAP_FAILED) {
      throw Error(ErrorKind::kExhausted,
                  "adapter pool: cannot reserve " + std::to_string(bytes) + " bytes");
    }
  }
  void FreeData(DLTensor* tensor) {
    const size_t bytes = ffi::GetDataSize(*tensor);
    munmap(tensor->data, bytes == 0 ? 1 : bytes);
  }
};

class AdapterPoolObj : public ffi::Object {
 public:
  std::unique_ptr<AdapterPool> pool;
  ffi::Array<ffi::Tensor> tensors;

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("lorafleet.AdapterPool", AdapterPoolObj, ffi::Object);
};

class AdapterPoolRef : public ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(AdapterPoolRef, ffi::ObjectRef, AdapterPoolObj);
};

AdapterPoolRef PoolCreate(ffi::Array<ffi::Shape> sites, int64_t num_pages, int64_t page_rows) {
  return Guard([&] {
    if (num_pages < 1 || page_rows < 1) {
      throw Error(ErrorKind::kInvalidInput, "adapter pool: num_pages and page_rows must be positive");
    }
    auto object = ffi::make_object<AdapterPoolObj>();
    std::vector<PoolSite> shapes;
    std::vector<PoolStorage> storage;
    const DLDevice cpu{kDLCPU, 0};
    const DLDataType f32{kDLFloat, 32, 1}, i32{kDLInt, 32, 1};
    // A site is (in_features, end of part 0, end of part 1, ...).
    for (const ffi::Shape& site : sites) {
      if (site.size() < 2) {
        throw Error(ErrorKind::kInvalidInput, "adapter pool: a site needs at least one part");
      }
      PoolSite shape{site[0], {site.begin() + 1, site.end()}};
      const int64_t parts = static_cast<int64_t>(shape.part_ends.size());
      const int64_t out = shape.part_ends.back();
      auto make = [&](std::vector<int64_t> dims, DLDataType dtype) {
        object->tensors.push_back(
            ffi::Tensor::FromNDAlloc(LazyZeros(), ffi::Shape(std::move(dims)), dtype, cpu));
        return object->tensors.back().data_ptr();
      };
      PoolStorage arrays{};
      arrays.a = static_cast<float*>(make({num_pages, parts, page_rows, shape.in_features}, f32));
      arrays.b = static_cast<float*>(make({num_pages, page_rows, out}, f32));
      arrays.used = static_cast<int32_t*>(make({num_pages, parts}, i32));
      storage.push_back(arrays);
      shapes.push_back(std::move(shape));
    }
    object->pool = std::make_unique<AdapterPool>(std::move(shapes), std::move(storage), num_pages,
                                                 page_rows);
    return AdapterPoolRef(std::move(object));
  });
}

ffi::Array<ffi::String> Strings(const std::vector<std::string>& names) {
  ffi::Array<ffi::String> out;
  for (const std::string& name : names) out.push_back(name);
  return out;
}

void PoolWrite(AdapterPoolRef ref, ffi::String version, int64_t site, int64_t part,
               ffi::TensorView a, ffi::TensorView b_t) {
  Guard([&] {
    AdapterPool& pool = *ref.get()->pool;
    Shapes shapes("adapter pool: write");
    if (site < 0 || site >= static_cast<int64_t>(pool.sites().size())) {
      shapes.Fail("site", "no such site");
    }
    const PoolSite& shape = pool.sites()[site];
    if (part < 0 || part >= static_cast<int64_t>(shape.part_ends.size())) {
      shapes.Fail("part", "no such part");
    }
    int64_t rank = Shapes::kUnknown, in = shape.in_features;
    int64_t width = shape.part_ends[part] - (part == 0 ? 0 : shape.part_ends[part - 1]);
    const float* as = shapes.Take<float>(a, "a", {&rank, &in});
    const float* bs = shapes.Take<float>(b_t, "b_t", {&rank, &width});
    pool.Write(version, site, part, as, bs, rank);
  });
}

class SafetensorsFileObj : public ffi::Object {
 public:
  explicit SafetensorsFileObj(const std::string& path) : file(path) {}
  SafetensorsFile file;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("lorafleet.SafetensorsFile", SafetensorsFileObj, ffi::Object);
};

class SafetensorsRef : public ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(SafetensorsRef, ffi::ObjectRef, SafetensorsFileObj);
};

// A view of mapped bytes that keeps the file alive.
struct MappedBytes {
  SafetensorsRef file;
  const uint8_t* data;
  void AllocData(DLTensor* tensor) { tensor->data = const_cast<uint8_t*>(data); }
  void FreeData(DLTensor*) {}
};

TVM_FFI_STATIC_INIT_BLOCK() {
  refl::ObjectDef<PagedKvCacheObj>();
  refl::ObjectDef<AdapterPoolObj>();
  refl::ObjectDef<SafetensorsFileObj>();
  refl::GlobalDef()
      .def("lorafleet.kernels_name", [] { return ffi::String(kernels().name); })
      .def("lorafleet.linear", LinearOp)
      .def("lorafleet.rms_norm", RmsNormOp)
      .def("lorafleet.silu_mul", SiluMulOp)
      .def("lorafleet.lora_add", LoraAddOp)
      .def("lorafleet.kv_cache_create", KvCacheCreate)
      .def("lorafleet.kv_cache_begin_forward", KvCacheBeginForward)
      .def("lorafleet.kv_cache_bytes", [](PagedKvCacheRef kv) { return kv.get()->cache.bytes(); })
      .def("lorafleet.attention_with_fused_qkv", AttentionWithFusedQkv)
      .def("lorafleet.pool_create", PoolCreate)
      .def("lorafleet.pool_tensors", [](AdapterPoolRef pool) { return pool.get()->tensors; })
      .def("lorafleet.pool_reserve",
           [](AdapterPoolRef pool, ffi::String version, int64_t num_pages) {
             return Guard([&] { return Strings(pool.get()->pool->Reserve(version, num_pages)); });
           })
      .def("lorafleet.pool_write", PoolWrite)
      .def("lorafleet.pool_commit",
           [](AdapterPoolRef pool, ffi::String version) {
             Guard([&] { pool.get()->pool->Commit(version); });
           })
      .def("lorafleet.pool_abort",
           [](AdapterPoolRef pool, ffi::String version) {
             Guard([&] { pool.get()->pool->Abort(version); });
           })
      .def("lorafleet.pool_pin",
           [](AdapterPoolRef pool, ffi::String version) -> ffi::Optional<ffi::Shape> {
             std::vector<int32_t> pages;
             if (!pool.get()->pool->Pin(version, &pages)) return std::nullopt;
             return ffi::Shape(std::vector<int64_t>(pages.begin(), pages.end()));
           })
      .def("lorafleet.pool_unpin",
           [](AdapterPoolRef pool, ffi::String version) {
             Guard([&] { pool.get()->pool->Unpin(version); });
           })
      .def("lorafleet.pool_evict",
           [](AdapterPoolRef pool, ffi::String version) {
             return pool.get()->pool->Evict(version);
           })
      .def("lorafleet.pool_residents",
           [](AdapterPoolRef pool) { return Strings(pool.get()->pool->Residents()); })
      .def("lorafleet.pool_loading",
           [](AdapterPoolRef pool) { return Strings(pool.get()->pool->Loading()); })
      .def("lorafleet.pool_free_pages",
           [](AdapterPoolRef pool) { return pool.get()->pool->free_pages(); })
      .def("lorafleet.pool_check",
           [](AdapterPoolRef pool) { Guard([&] { pool.get()->pool->Check(); }); })
      .def("lorafleet.safetensors_open",
           [](ffi::String path) {
             return Guard(
                 [&] { return SafetensorsRef(ffi::make_object<SafetensorsFileObj>(path)); });
           })
      .def("lorafleet.safetensors_names",
           [](SafetensorsRef file) { return Strings(file.get()->file.names()); })
      .def("lorafleet.safetensors_metadata",
           [](SafetensorsRef file) {
             ffi::Map<ffi::String, ffi::String> out;
             for (const auto& [key, value] : file.get()->file.metadata()) out.Set(key, value);
             return out;
           })
      .def("lorafleet.safetensors_dtype",
           [](SafetensorsRef file, ffi::String name) {
             return Guard([&] { return ffi::String(file.get()->file.entry(name).dtype); });
           })
      .def("lorafleet.safetensors_shape",
           [](SafetensorsRef file, ffi::String name) {
             return Guard([&] { return ffi::Shape(file.get()->file.entry(name).shape); });
           })
      .def("lorafleet.safetensors_raw",
           [](SafetensorsRef file, ffi::String name) {
             return Guard([&] {
               const TensorEntry& entry = file.get()->file.entry(name);
               return ffi::Tensor::FromNDAlloc(
                   MappedBytes{file, file.get()->file.data(name)},
                   ffi::Shape({static_cast<int64_t>(entry.end - entry.begin)}),
                   DLDataType{kDLUInt, 8, 1}, DLDevice{kDLCPU, 0});
             });
           })
      .def("lorafleet.safetensors_read_f32",
           [](SafetensorsRef file, ffi::String name, ffi::TensorView out) {
             Guard([&] {
               Shapes shapes("safetensors_read_f32");
               const TensorEntry& entry = file.get()->file.entry(name);
               int64_t numel = 1;
               for (const int64_t dim : entry.shape) numel *= dim;
               file.get()->file.ReadFloat32(name, shapes.Flat(out, "out", numel, 1));
             });
           });
}

}  // namespace
}  // namespace lorafleet
