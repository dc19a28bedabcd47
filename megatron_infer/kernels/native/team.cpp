// The threads of the kernels: each thread that calls them has a team of workers of its own.
//
// A region is cut into numbered parts, which the caller and its workers claim one after the other. The caller waits only
// for parts that were claimed: a worker whose core another program holds is not waited for, the caller does its part. An
// OpenMP region ends when every thread has come. Workers wait in turns of spinning and then sleep. How long they spin
// follows the machine: longer after each turn in which the core was theirs, briefly after one in which it was taken away.
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <atomic>
#include <new>

#include "common.h"

namespace mi {

constexpr int64_t kLeastSpin = 10 * 1000, kFirstSpin = 200 * 1000, kMostSpin = 1000 * 1000;  // ns
constexpr int64_t kTaken = 50 * 1000;  // ns between two readings of the clock that show that the core was taken away
constexpr int kMostThreads = 1024;
constexpr int kWindow = 1024;  // regions after which workers that none of them had a part for leave

static int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

// Returns whether arrived() became true within `budget` ns, which is set for the next time.
template <class Arrived>
static bool spin(int64_t& budget, Arrived&& arrived) {
    for (int i = 0; i < 64; ++i, relax())
        if (arrived()) return true;
    const int64_t begin = now_ns();
    for (int64_t last = begin;;) {
        for (int i = 0; i < 16; ++i, relax())
            if (arrived()) return true;
        const int64_t now = now_ns();
        if (now - last > kTaken) {
            budget = kLeastSpin;
            return arrived();
        }
        if (now - begin > budget) {
            budget = budget + budget / 4 < kMostSpin ? budget + budget / 4 : kMostSpin;
            return false;
        }
        last = now;
    }
}

static std::atomic<uint64_t> forks{0};  // in a process that was forked, teams of before have no workers

struct Part {
    int number = 0, count = 0;  // count 0: outside of any region
};
static thread_local Part part;

class Team {
  public:
    void run(void (*body)(void*), void* data, int parts) {
        resize(parts);
        body_ = body;
        data_ = data;
        done_.store(0, std::memory_order_relaxed);
        const uint64_t epoch = (state_.load(std::memory_order_relaxed) >> 32) + 1;
        state_.store(epoch << 32 | (uint64_t)parts << 16 | 1);  // the caller has claimed the first part
        if (asleep_.load() && asleep_.exchange(0)) {
            pthread_mutex_lock(&mutex_);
            pthread_cond_broadcast(&work_);
            pthread_mutex_unlock(&mutex_);
        }
        int number = 0;
        do run_part(number, parts);
        while (claim(&number, &parts));
        auto all_done = [&] { return done_.load() == parts; };
        int64_t budget = kLeastSpin * 5;
        if (spin(budget, all_done)) return;
        pthread_mutex_lock(&mutex_);
        caller_sleeps_.store(1);
        while (!all_done()) pthread_cond_wait(&finished_, &mutex_);
        caller_sleeps_.store(0);
        pthread_mutex_unlock(&mutex_);
    }

    // The caller has ended; the last of its workers frees the team.
    void end() {
        pthread_mutex_lock(&mutex_);
        ended_ = true;
        pthread_cond_broadcast(&work_);
        pthread_mutex_unlock(&mutex_);
        leave();
    }

    const uint64_t born = forks.load();

  private:
    // A worker for each part but the caller's. Those left over from regions of more parts would spin beside the others.
    void resize(int parts) {
        most_parts_ = parts > most_parts_ ? parts : most_parts_;
        while (workers_ < parts - 1 && add_worker()) {
        }
        if (++regions_ % kWindow) return;
        if (workers_ > most_parts_ - 1) {
            leaving_.fetch_add(workers_ - (most_parts_ - 1));
            workers_ = most_parts_ - 1;
        }
        most_parts_ = 0;
    }

    // Whether this worker is one of those that are to leave; any of them will do.
    bool is_left_over() {
        int leaving = leaving_.load(std::memory_order_relaxed);
        while (leaving > 0)
            if (leaving_.compare_exchange_weak(leaving, leaving - 1)) return true;
        return false;
    }

    bool add_worker() {
        // Signals are for the program's own threads: one that waits must be interrupted, not one of ours.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        users_.fetch_add(1);
        pthread_t thread;
        const bool made = !pthread_create(&thread, nullptr, [](void* team) -> void* {
            static_cast<Team*>(team)->work();
            return nullptr;
        }, this);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (!made) {
            users_.fetch_sub(1);
            return false;
        }
        pthread_detach(thread);
        ++workers_;
        return true;
    }

    void work() {
        int64_t budget = kFirstSpin;
        uint64_t seen = 0;
        auto called = [&] { return state_.load() >> 32 != seen; };
        for (;;) {
            if (!spin(budget, called)) {
                pthread_mutex_lock(&mutex_);
                // Set again before each wait: a caller that was held up may clear it for a region that is done here, and
                // then wake a worker that has nothing to do yet.
                while (asleep_.store(1), !called() && !ended_) pthread_cond_wait(&work_, &mutex_);
                const bool ended = ended_;
                pthread_mutex_unlock(&mutex_);
                if (ended) return leave();
            }
            if (is_left_over()) return leave();
            seen = state_.load(std::memory_order_acquire) >> 32;
            for (int number, parts; claim(&number, &parts);) run_part(number, parts);
        }
    }

    // The next part of the present region; it cannot end before that part is done.
    bool claim(int* number, int* parts) {
        uint64_t state = state_.load(std::memory_order_acquire);
        do {
            *number = (int)(state & 0xffff), *parts = (int)(state >> 16 & 0xffff);
            if (*number >= *parts) return false;
        } while (!state_.compare_exchange_weak(state, state + 1));
        return true;
    }

    void run_part(int number, int parts) {
        part = {number, parts};
        body_(data_);
        part = {};
        if (done_.fetch_add(1) + 1 < parts || !caller_sleeps_.load()) return;
        pthread_mutex_lock(&mutex_);
        pthread_cond_signal(&finished_);
        pthread_mutex_unlock(&mutex_);
    }

    void leave() {
        if (users_.fetch_sub(1) == 1) delete this;
    }

    alignas(64) std::atomic<uint64_t> state_{0};  // region << 32 | parts << 16 | next part
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> asleep_{0}, caller_sleeps_{0}, users_{1}, leaving_{0};
    void (*body_)(void*) = nullptr;
    void* data_ = nullptr;
    int workers_ = 0, most_parts_ = 0;  // most_parts_: of a region since the last multiple of kWindow
    unsigned regions_ = 0;
    bool ended_ = false;
    pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t work_ = PTHREAD_COND_INITIALIZER, finished_ = PTHREAD_COND_INITIALIZER;
};

struct OwnTeam {
    Team* team = nullptr;
    ~OwnTeam() {
        if (team && team->born == forks.load()) team->end();
    }
};
static thread_local OwnTeam own;

static void run_parallel(void (*body)(void*), void* data, unsigned parts, unsigned) {
    if (part.count) {  // inside a part: the other threads have work already
        const Part outer = part;
        part = {0, 1};
        body(data);
        part = outer;
        return;
    }
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    (void)registered;
    if (!own.team || own.team->born != forks.load()) own.team = new (std::nothrow) Team;
    if (!own.team) std::abort();
    own.team->run(body, data, parts < kMostThreads ? (int)parts : kMostThreads);
}

Runtime runtime = {run_parallel, [] { return part.number; }, [] { return part.count; }};

}  // namespace mi

using namespace mi;

extern "C" {

// The number of parts that a region of `threads` has.
int mi_count_threads(int threads) {
    int count = 0;
    auto arrive = [&](int, int) { __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED); };
    parallel(threads, arrive);
    return count;
}
}
