// Threads of a decode step. `step.cpp` includes this file.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// Threads that compute parts of a loop with the one that calls; between tokens they sleep.
class Threads {
 public:
  explicit Threads(int64_t wanted) {
    try {
      for (int64_t rank = 1; rank < wanted; rank++) others.emplace_back([=] { work(rank); });
    } catch (...) {  // the fewer do it, too
    }
  }
  ~Threads() {
    tell(ends);
    for (auto& thread : others) thread.join();
  }
  int64_t count() const { return 1 + others.size(); }

  // While a token is read, the others wait for parts without sleeping.
  struct Token {
    Threads& threads;
    explicit Token(Threads& threads) : threads(threads) {
      if (!threads.others.empty()) threads.tell(threads.reads);
    }
    ~Token() { threads.reads = false; }
  };

  // Calls work(from, to, rank) for ranges that make up 0 to n - 1, none smaller than `least`. Throws
  // std::bad_alloc, the only error there may be, once no range is worked on any more.
  template <class Work>
  void split(int64_t n, int64_t least, const Work& work) {
    run(n, least, &work, [](const void* with, int64_t from, int64_t to, int64_t rank) {
      (*(const Work*)with)(from, to, rank);
    });
  }

 private:
  using Call = void (*)(const void*, int64_t, int64_t, int64_t);

  // Not inlined, nor are others that are called in many places: code takes time to be compiled.
  __attribute__((noinline)) void run(int64_t n, int64_t least, const void* with, Call call) {
    const int64_t parts = std::max<int64_t>(1, std::min(n / least, 4 * count()));
    if (parts == 1 || others.empty()) return call(with, 0, n, 0);
    this->n = n, this->parts = parts, this->with = with, this->call = call;
    unfinished.store(parts, std::memory_order_relaxed);
    tickets.store(++number << 32 | parts, std::memory_order_release);
    take_parts(0);
    for (int spins = 0; unfinished.load(std::memory_order_acquire); spins++) rest(spins);
    if (lacks_memory.exchange(false)) throw std::bad_alloc();
  }

  // What the parts are is read only while one of them is not finished, so it doesn't change.
  bool take_parts(int64_t rank) {
    bool took = false;
    uint64_t ticket = tickets.load(std::memory_order_acquire);
    while (const uint32_t left = ticket) {
      if (!tickets.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acquire)) continue;
      const int64_t at = parts - left;
      try {
        call(with, n * at / parts, n * (at + 1) / parts, rank);
      } catch (const std::bad_alloc&) {
        lacks_memory = true;
      }
      unfinished.fetch_sub(1, std::memory_order_release);
      took = true, ticket = tickets.load(std::memory_order_acquire);
    }
    return took;
  }

  static void rest(int spins) {
    if (spins % 2048 == 2047) return std::this_thread::yield();  // to who shares this processor
#ifdef __ARM_NEON
    __asm__ volatile("yield");
#else
    _mm_pause();
#endif
  }

  void work(int64_t rank) {
    while (!ends) {
      for (int spins = 0; reads.load(std::memory_order_acquire); spins++)
        if (take_parts(rank)) spins = 0;
        else rest(spins);
      std::unique_lock<std::mutex> lock(mutex);
      // `wait` would need a newer C++ library than some interpreters have loaded
      wake.wait_for(lock, std::chrono::hours(1), [&] { return reads || ends; });
    }
  }

  void tell(std::atomic<bool>& what) {
    { std::lock_guard<std::mutex> lock(mutex); what = true; }
    wake.notify_all();
  }

  std::atomic<uint64_t> tickets{0};  // the run's number, and in 32 bits how many parts are left
  std::atomic<int64_t> unfinished{0};
  int64_t n = 0, parts = 0;
  const void* with = nullptr;
  Call call = nullptr;
  uint64_t number = 0;
  std::atomic<bool> reads{false}, ends{false}, lacks_memory{false};
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::thread> others;  // the last member: they use the others
};

}  // namespace
