// A team of threads that share out the chunks of one loop at a time.
//
// Each thread owns a run of chunks and steals from the others when its own are done. The caller waits until all chunks
// are done, not until all threads have arrived: a thread that lost its core for a while holds up the chunk it has, and
// nothing else. Idle threads spin for some microseconds and then block, so that they never keep a core from others.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace suimon {

class Pool {
 public:
  // `threads` includes the calling one.
  explicit Pool(int threads);
  ~Pool();

  int threads() const { return int(workers_.size()) + 1; }

  // Call body(chunk, thread) once for each chunk in [0, chunks), in any order, and return when all calls have returned.
  // One caller at a time. The memory that bodies wrote is visible to the caller.
  template <class Body>
  void run(int64_t chunks, const Body& body) {
    if (chunks <= 1 || workers_.empty()) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) body(chunk, 0);
      return;
    }
    share([](const void* context, int64_t chunk, int thread) { (*static_cast<const Body*>(context))(chunk, thread); },
          &body, chunks);
  }

 private:
  using Call = void (*)(const void*, int64_t, int);

  // One thread's run of chunks: job number (24 bits), end (20) and next (20) in one word, so that a chunk is claimed
  // only from the job whose end was read, however late the claiming thread is.
  struct alignas(64) Run {
    std::atomic<uint64_t> word{0};
  };

  void share(Call call, const void* context, int64_t chunks);
  void work(uint64_t job, int thread);
  bool claim(Run& run, uint64_t job, int64_t& chunk);
  void serve(int thread);

  std::unique_ptr<Run[]> runs_;
  std::vector<std::thread> workers_;
  Call call_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<int32_t> left_{0};
  std::atomic<bool> ending_{false};
};

}  // namespace suimon
