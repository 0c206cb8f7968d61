// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/parallel.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>

extern "C" {
// TVM's thread pool (tvm/runtime/c_backend_api.h).
struct TVMParallelGroupEnv {
  void* sync_handle;
  int32_t num_task;
};
typedef int (*FTVMParallelLambda)(int task_id, TVMParallelGroupEnv* penv, void* cdata);
typedef int (*FTVMParallelLaunch)(FTVMParallelLambda flambda, void* cdata, int num_task);
__attribute__((weak)) int TVMBackendParallelLaunch(FTVMParallelLambda flambda, void* cdata,
                                                   int num_task);
}

namespace lorafleet {
namespace {

// TVM's launcher, or null while TVM is not in the process. The weak reference is resolved when this
// library is loaded; TVM may come later, so it is looked for until found.
FTVMParallelLaunch Launcher() {
  static std::atomic<FTVMParallelLaunch> found{TVMBackendParallelLaunch};
  FTVMParallelLaunch launch = found.load(std::memory_order_relaxed);
  if (launch == nullptr) {
    launch = reinterpret_cast<FTVMParallelLaunch>(dlsym(RTLD_DEFAULT, "TVMBackendParallelLaunch"));
    found.store(launch, std::memory_order_relaxed);
  }
  return launch;
}

struct Work {
  int64_t count;
  int64_t grain;
  void (*body)(void*, int64_t, int64_t);
  void* context;
  std::atomic<int64_t> next{0};
};

// Ranges for each thread: enough that a thread which was held up delays the others by little.
constexpr int64_t kRangesPerThread = 4;

int RunTask(int, TVMParallelGroupEnv* env, void* data) {
  Work& work = *static_cast<Work*>(data);
  const int64_t grains = (work.count + work.grain - 1) / work.grain;
  const int64_t ranges = kRangesPerThread * env->num_task;
  const int64_t length = (grains + ranges - 1) / ranges * work.grain;
  for (;;) {
    const int64_t begin = work.next.fetch_add(length, std::memory_order_relaxed);
    if (begin >= work.count) return 0;
    work.body(work.context, begin, std::min(begin + length, work.count));
  }
}

}  // namespace

void ParallelRanges(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t),
                    void* context) {
  if (count <= 0) return;
  const FTVMParallelLaunch launch = count > grain ? Launcher() : nullptr;
  if (launch == nullptr) {
    body(context, 0, count);
    return;
  }
  Work work{count, grain, body, context};
  launch(RunTask, &work, 0);
  // Nothing is left, unless the pool refused the launch.
  TVMParallelGroupEnv alone{nullptr, 1};
  RunTask(0, &alone, &work);
}

}  // namespace lorafleet
