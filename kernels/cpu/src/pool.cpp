#include "pool.h"

#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace suimon {

namespace {

constexpr int64_t MOST_CHUNKS = (int64_t(1) << 20) - 1;
constexpr uint64_t FIELD = (uint64_t(1) << 20) - 1;
constexpr uint64_t JOB = (uint64_t(1) << 24) - 1;
constexpr auto SPIN = std::chrono::microseconds(20);

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Until `value` is no longer `old`: by looking for a while, then by sleeping.
template <class Value>
void await_change(std::atomic<Value>& value, Value old) {
  const auto until = std::chrono::steady_clock::now() + SPIN;
  do {
    for (int i = 0; i < 32; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < until);
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

Pool::Pool(int threads) : runs_(new Run[threads < 1 ? 1 : threads]) {
  for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
}

Pool::~Pool() {
  ending_.store(true);
  job_.fetch_add(1);
  job_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::share(Call call, const void* context, int64_t chunks) {
  for (; chunks > MOST_CHUNKS; chunks -= MOST_CHUNKS) {  // more than a word can count: the last ones first
    const int64_t first = chunks - MOST_CHUNKS;
    run(MOST_CHUNKS, [=](int64_t chunk, int thread) { call(context, first + chunk, thread); });
  }
  call_ = call;
  context_ = context;
  left_.store(int32_t(chunks), std::memory_order_relaxed);
  const uint32_t number = job_.load(std::memory_order_relaxed) + 1;
  const uint64_t job = number & JOB;
  const int64_t count = threads();
  for (int64_t thread = 0; thread < count; ++thread) {
    const uint64_t begin = uint64_t(chunks * thread / count), end = uint64_t(chunks * (thread + 1) / count);
    runs_[thread].word.store(job << 40 | end << 20 | begin, std::memory_order_release);
  }
  job_.store(number, std::memory_order_release);
  job_.notify_all();
  work(job, 0);
  for (int32_t left = left_.load(std::memory_order_acquire); left != 0; left = left_.load(std::memory_order_acquire))
    await_change(left_, left);
}

bool Pool::claim(Run& run, uint64_t job, int64_t& chunk) {
  uint64_t word = run.word.load(std::memory_order_acquire);
  while (word >> 40 == job && (word & FIELD) < (word >> 20 & FIELD)) {
    if (run.word.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel)) {
      chunk = int64_t(word & FIELD);
      return true;
    }
  }
  return false;
}

void Pool::work(uint64_t job, int thread) {
  const int count = threads();
  for (int i = 0; i < count; ++i) {
    Run& run = runs_[(thread + i) % count];
    int64_t chunk;
    while (claim(run, job, chunk)) {
      // The job cannot end while a claimed chunk is not done, so call_ and context_ are this job's.
      call_(context_, chunk, thread);
      if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_all();
    }
  }
}

void Pool::serve(int thread) {
  uint32_t seen = 0;
  while (true) {
    await_change(job_, seen);
    seen = job_.load(std::memory_order_acquire);
    if (ending_.load()) return;
    work(seen & JOB, thread);
  }
}

}  // namespace suimon
