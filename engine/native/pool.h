// The threads that share a step's work.
//
// A step is some hundreds of short phases, each over before the next begins. A thread joins a phase only by taking a
// piece of it, so one that the system has put to sleep between two pieces is not waited for: beside other processes
// that use the cores, a step takes as long as the running threads need, where a barrier would wait for the sleeper.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace farthing {

class Pool {
public:
    explicit Pool(int threads) {
        for (int i = 1; i < threads; i++) helpers.emplace_back([this] { help(); });
    }

    ~Pool() {
        ending = true;
        open();
        for (std::thread& helper : helpers) helper.join();
    }

    int64_t size() const { return static_cast<int64_t>(helpers.size()) + 1; }

    // Helpers look for work between open and close, and sleep otherwise. For the thread that calls `run` only.
    void open() {
        awake.store(true, std::memory_order_release);
        awake.notify_all();
    }

    void close() { awake.store(false, std::memory_order_release); }

    // piece(0) … piece(count - 1), on any threads in any order; returns when all are done.
    template <class Piece>
    void run(int64_t count, const Piece& piece) {
        if (count < 2 || helpers.empty()) {
            for (int64_t i = 0; i < count; i++) piece(i);
            return;
        }
        call = [](const void* what, int64_t i) { (*static_cast<const Piece*>(what))(i); };
        argument = &piece;
        done.store(0, std::memory_order_relaxed);
        left.store(++phase << 32 | static_cast<uint64_t>(count), std::memory_order_release);
        while (take()) {
        }
        for (int spins = 0; done.load(std::memory_order_acquire) != count;) relax(spins);
    }

    // The same for 0 … count - 1 in runs of neighbours, a few for each thread.
    template <class Item>
    void each(int64_t count, const Item& item) {
        const int64_t runs = size() * 8, length = std::max<int64_t>(1, count / runs);
        run((count + length - 1) / length, [&](int64_t r) {
            for (int64_t i = r * length; i < count && i < (r + 1) * length; i++) item(i);
        });
    }

private:
    std::vector<std::thread> helpers;
    alignas(64) std::atomic<uint64_t> left{0};  // phase << 32 | pieces nobody has taken yet
    alignas(64) std::atomic<int64_t> done{0};
    alignas(64) std::atomic<bool> awake{false};
    std::atomic<bool> ending{false};
    void (*call)(const void*, int64_t) = nullptr;
    const void* argument = nullptr;
    uint64_t phase = 0;

    // Take a piece and do it; false if there is none. The phase of a taken piece cannot end before the piece is done,
    // so what `run` has set is still there.
    bool take() {
        uint64_t seen = left.load(std::memory_order_acquire);
        do {
            if (static_cast<uint32_t>(seen) == 0) return false;
        } while (!left.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire));
        call(argument, static_cast<int64_t>(static_cast<uint32_t>(seen)) - 1);
        done.fetch_add(1, std::memory_order_release);
        return true;
    }

    static void relax(int& spins) {
        if (++spins % 512)
            _mm_pause();
        else
            sched_yield();
    }

    void help() {
        while (true) {
            awake.wait(false, std::memory_order_acquire);
            if (ending) return;
            // A helper late to see `close` finds the pool open again when it ends.
            for (int spins = 0; awake.load(std::memory_order_relaxed) && !ending;) {
                if (take())
                    spins = 0;
                else
                    relax(spins);
            }
        }
    }
};

}  // namespace farthing
