// Stands in for TVM's thread pool, so that tests run the kernels' parallel paths without TVM.
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <thread>
#include <vector>

extern "C" {

struct TVMParallelGroupEnv {
  void* sync_handle;
  int32_t num_task;
};

int TVMBackendParallelLaunch(int (*body)(int, TVMParallelGroupEnv*, void*), void* data, int) {
  constexpr int kThreads = 3;
  TVMParallelGroupEnv env{nullptr, kThreads};
  std::vector<std::thread> threads;
  for (int i = 1; i < kThreads; ++i) threads.emplace_back([&, i] { body(i, &env, data); });
  body(0, &env, data);
  for (std::thread& thread : threads) thread.join();
  return 0;
}
}
