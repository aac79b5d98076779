#include "core/memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <new>

#include "core/error.hpp"

namespace farpool {

namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;

std::size_t page_size() {
    static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return size;
}

}  // namespace

Memory::Memory(std::size_t nbytes) : owner_(getpid()), nbytes_(nbytes) {
    const std::size_t page = page_size();
    mapped_ = (nbytes + page - 1) / page * page;
    const std::size_t span = mapped_ + huge_page;
    if (nbytes == 0 || span < nbytes) {
        throw std::bad_alloc();
    }
    void* raw = mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) {
        throw std::bad_alloc();
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(raw);
    const std::uintptr_t aligned = (begin + huge_page - 1) / huge_page * huge_page;
    if (aligned > begin) {
        munmap(raw, aligned - begin);
    }
    const std::size_t tail = begin + span - (aligned + mapped_);
    if (tail > 0) {
        munmap(reinterpret_cast<void*>(aligned + mapped_), tail);
    }
    data_ = reinterpret_cast<std::byte*>(aligned);
    madvise(data_, mapped_, MADV_HUGEPAGE);  // advice only: kernels without huge pages refuse it
}

Memory::~Memory() { release(); }

bool Memory::ours() const noexcept { return getpid() == owner_; }

void Memory::touch(std::size_t offset, std::size_t nbytes) {
    if (offset > nbytes_ || nbytes > nbytes_ - offset) {
        fail_value("Memory.touch: the range [" + std::to_string(offset) + ", " + std::to_string(offset + nbytes) +
                   ") is outside of the memory of " + std::to_string(nbytes_) + " bytes");
    }
    if (data_ == nullptr || nbytes == 0 || !ours()) {
        return;
    }
    const std::size_t first = offset / page_size() * page_size();
    const std::size_t end = (offset + nbytes + page_size() - 1) / page_size() * page_size();
#ifdef MADV_POPULATE_WRITE
    if (madvise(data_ + first, end - first, MADV_POPULATE_WRITE) == 0) {
        return;
    }
#endif
    for (std::size_t at = first; at < end; at += page_size()) {
        __atomic_fetch_or(reinterpret_cast<unsigned char*>(data_ + at), 0, __ATOMIC_RELAXED);  // keeps the byte
    }
}

void Memory::discard(std::size_t offset, std::size_t nbytes) {
    if (offset > nbytes_ || nbytes > nbytes_ - offset) {
        fail_value("Memory.discard: the range [" + std::to_string(offset) + ", " + std::to_string(offset + nbytes) +
                   ") is outside of the memory of " + std::to_string(nbytes_) + " bytes");
    }
    if (data_ == nullptr || !ours()) {
        return;
    }
    const std::size_t page = page_size();
    const std::size_t first = (offset + page - 1) / page * page;
    // The last page is only partly ours by length, but no other object uses the rest of it.
    const std::size_t end = offset + nbytes == nbytes_ ? mapped_ : (offset + nbytes) / page * page;
    if (first < end) {
        madvise(data_ + first, end - first, MADV_DONTNEED);
    }
}

void Memory::release() noexcept {
    if (data_ != nullptr && ours()) {
        munmap(data_, mapped_);
    }
    data_ = nullptr;
}

}  // namespace farpool
