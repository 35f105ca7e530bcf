// Threads that take chunks of work, phase by phase.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <sched.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

inline uint64_t next_serial() {
    static std::atomic<uint64_t> next{0};
    return next.fetch_add(1, std::memory_order_relaxed);
}

// Work in phases. run(argument, number, phase, chunk), where number is that of the task.
struct Task {
    void (*run)(const void *argument, uint64_t number, int phase, int chunk);
    const void *argument;
    // Of all tasks of the process and of those it was forked from: threads keep what they computed by it.
    const uint64_t serial = next_serial();
    int n_phases;
    std::vector<int> n_chunks;
};

// The chunks of one phase.
struct Counter {
    // Number of the task (32 bits), number of chunks (16), next chunk (16): a thread that comes late, after
    // the task has ended, takes nothing.
    std::atomic<uint64_t> next{0};
    std::atomic<int> done{0};
};

class Pool {
  public:
    const int process;  // that it was made in
    explicit Pool(int process) : process(process) {}

    void run(Task &task, int n_threads) {
        std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        const int most = *std::max_element(task.n_chunks.begin(), task.n_chunks.end());
        // Alone, too, while another thread of the program uses the pool.
        if (!lock.owns_lock() || n_threads <= 1 || task.n_phases > MOST_PHASES || most > MOST_CHUNKS) {
            for (int phase = 0; phase < task.n_phases; ++phase)
                for (int c = 0; c < task.n_chunks[phase]; ++c) task.run(task.argument, task.serial, phase, c);
            return;
        }
        while (int(n_workers_) < n_threads - 1) {
            try {
                std::thread(&Pool::work, this, n_workers_ + 1, number_.load()).detach();
            } catch (const std::system_error &) {
                // The system allows no more threads: those that there are do the work.
                break;
            }
            ++n_workers_;
        }
        n_active_.store(n_threads - 1, std::memory_order_relaxed);
        const uint32_t number = number_.load(std::memory_order_relaxed) + 2;
        task_ = &task;
        for (int phase = 0; phase < task.n_phases; ++phase) {
            counters_[phase].done.store(0, std::memory_order_relaxed);
            counters_[phase].next.store(uint64_t(number) << 32 | uint64_t(task.n_chunks[phase]) << 16,
                                        std::memory_order_release);
        }
        n_phases_.store(task.n_phases, std::memory_order_relaxed);
        // Sequentially consistent, so that a worker that goes to sleep is seen here or sees the number.
        number_.store(number);
        if (n_sleeping_.load()) number_.notify_all();
        take_part(number);
    }

  private:
    static constexpr int MOST_PHASES = 1024, MOST_CHUNKS = 0xffff;
    static constexpr int SPINS = 4000, SPINS_BEFORE_SLEEP = 20000;

    void take_part(uint32_t number) {
        const int n_phases = n_phases_.load(std::memory_order_relaxed);
        for (int phase = 0; phase < n_phases; ++phase) {
            Counter &counter = counters_[phase];
            uint64_t next = counter.next.load(std::memory_order_acquire);
            int n_chunks;
            for (;;) {
                if (uint32_t(next >> 32) != number) return;
                n_chunks = int(next >> 16 & 0xffff);
                const int chunk = int(next & 0xffff);
                if (chunk >= n_chunks) break;
                if (counter.next.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) {
                    task_->run(task_->argument, task_->serial, phase, chunk);
                    counter.done.fetch_add(1, std::memory_order_release);
                    next = counter.next.load(std::memory_order_acquire);
                }
            }
            for (int spins = 0; counter.done.load(std::memory_order_acquire) != n_chunks; ++spins) {
                if (uint32_t(counter.next.load(std::memory_order_acquire) >> 32) != number) return;
                if (spins < SPINS) relax();
                else sched_yield();
            }
        }
    }

    void work(int index, uint32_t seen) {
        for (;;) {
            uint32_t number = number_.load(std::memory_order_acquire);
            for (int spins = 0; number == seen && spins < SPINS_BEFORE_SLEEP; ++spins) {
                relax();
                number = number_.load(std::memory_order_acquire);
            }
            if (number == seen) {
                n_sleeping_.fetch_add(1);
                number_.wait(seen);
                n_sleeping_.fetch_sub(1);
                continue;
            }
            seen = number;
            if (index <= n_active_.load(std::memory_order_relaxed)) take_part(number);
        }
    }

    std::mutex mutex_;
    std::atomic<uint32_t> number_{0};
    std::atomic<int> n_phases_{0}, n_active_{0}, n_sleeping_{0};
    int n_workers_ = 0;
    const Task *task_ = nullptr;
    Counter counters_[MOST_PHASES];
};

// Never destroyed, as its threads run until the process ends. A forked process has none of them, and makes
// a pool of its own, without a lock that another thread might have held at the fork.
Pool &pool() {
    static std::atomic<Pool *> current{nullptr};
    const int process = int(getpid());
    Pool *found = current.load(std::memory_order_acquire);
    while (!found || found->process != process) {
        Pool *made = new Pool(process);
        if (current.compare_exchange_strong(found, made)) return *made;
        delete made;
    }
    return *found;
}

}  // namespace
