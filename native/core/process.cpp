#include "core/process.hpp"

#include <pthread.h>

#include <atomic>

namespace farpool {

namespace {

std::atomic<std::uint32_t> counted = 0;
[[maybe_unused]] const int counting = pthread_atfork(nullptr, nullptr, [] { ++counted; });

}  // namespace

std::uint32_t forks() noexcept { return counted.load(std::memory_order_relaxed); }

}  // namespace farpool
