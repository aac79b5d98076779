// What a thread does between two looks at something that changes soon.
#pragma once

#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace farpool {

// `attempt` counts the looks from 1: now and then the core is given to others, as who is waited for may need this very one.
inline void relax(unsigned attempt) noexcept {
    constexpr unsigned spins_per_yield = 8;
    if (attempt % spins_per_yield == 0) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace farpool
