// SPDX-License-Identifier: Apache-2.0
#include "lorafleet/parallel.h"

#include <algorithm>

extern "C" {
// TVM's thread pool (tvm/runtime/c_backend_api.h), resolved when libtvm_runtime is in the process.
struct TVMParallelGroupEnv {
  void* sync_handle;
  int32_t num_task;
};
typedef int (*FTVMParallelLambda)(int task_id, TVMParallelGroupEnv* penv, void* cdata);
__attribute__((weak)) int TVMBackendParallelLaunch(FTVMParallelLambda flambda, void* cdata,
                                                   int num_task);
}

namespace lorafleet {
namespace {

struct Launch {
  int64_t count;
  int64_t grain;
  void (*body)(void*, int64_t, int64_t);
  void* context;
};

int RunTask(int task_id, TVMParallelGroupEnv* env, void* data) {
  const Launch& launch = *static_cast<Launch*>(data);
  const int64_t grains = (launch.count + launch.grain - 1) / launch.grain;
  const int64_t begin = grains * task_id / env->num_task * launch.grain;
  const int64_t end =
      std::min(grains * (task_id + 1) / env->num_task * launch.grain, launch.count);
  if (begin < end) launch.body(launch.context, begin, end);
  return 0;
}

}  // namespace

void ParallelRanges(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t),
                    void* context) {
  if (count <= 0) return;
  if (count <= grain || TVMBackendParallelLaunch == nullptr) {
    body(context, 0, count);
    return;
  }
  Launch launch{count, grain, body, context};
  TVMBackendParallelLaunch(RunTask, &launch, 0);
}

}  // namespace lorafleet
