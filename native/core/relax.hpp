// The pause of a spinning thread between two checks of a value that changes soon.
#pragma once

#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace farpool {

// Pauses once in a spin loop. `attempt` counts the checks from 1; every eighth yields the core, which the other thread may
// need.
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
