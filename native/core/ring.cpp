#include "core/ring.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#if __has_include(<linux/io_uring.h>) && defined(__NR_io_uring_setup)
#include <linux/io_uring.h>
#define FARPOOL_HAS_IO_URING 1
#endif

namespace farpool {

Ring::Mapping::~Mapping() {
    if (address != nullptr) {
        munmap(address, nbytes);
    }
}

Ring::~Ring() {
    if (fd_ >= 0) {
        ::close(fd_);
    }
}

std::unique_ptr<Ring> Ring::open() {
    std::unique_ptr<Ring> ring(new Ring());
    return ring->setup() ? std::move(ring) : nullptr;
}

#ifdef FARPOOL_HAS_IO_URING

namespace {

void* map_ring(int fd, std::size_t nbytes, std::uint64_t which) {
    void* address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(which));
    return address == MAP_FAILED ? nullptr : address;
}

unsigned* field(void* ring, std::uint32_t offset) { return reinterpret_cast<unsigned*>(static_cast<char*>(ring) + offset); }

}  // namespace

bool Ring::setup() {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
    if (fd_ < 0) {
        return false;
    }
    const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    submissions_.nbytes = sq_bytes;
    completions_.nbytes = cq_bytes;
    entries_.nbytes = params.sq_entries * sizeof(io_uring_sqe);
    submissions_.address = map_ring(fd_, sq_bytes, IORING_OFF_SQ_RING);
    completions_.address = map_ring(fd_, cq_bytes, IORING_OFF_CQ_RING);
    entries_.address = map_ring(fd_, entries_.nbytes, IORING_OFF_SQES);
    if (submissions_.address == nullptr || completions_.address == nullptr || entries_.address == nullptr) {
        return false;
    }
    sq_head_ = field(submissions_.address, params.sq_off.head);
    sq_tail_ = field(submissions_.address, params.sq_off.tail);
    sq_array_ = field(submissions_.address, params.sq_off.array);
    sq_mask_ = *field(submissions_.address, params.sq_off.ring_mask);
    cq_head_ = field(completions_.address, params.cq_off.head);
    cq_tail_ = field(completions_.address, params.cq_off.tail);
    cq_mask_ = *field(completions_.address, params.cq_off.ring_mask);
    cqes_ = static_cast<char*>(completions_.address) + params.cq_off.cqes;
    return true;
}

void Ring::push(bool write, int fd, void* address, unsigned nbytes, std::uint64_t offset, std::uint64_t tag) {
    const unsigned tail = *sq_tail_;  // only this thread moves it
    const unsigned slot = tail & sq_mask_;
    io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_.address)[slot];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = fd;
    entry.addr = reinterpret_cast<std::uintptr_t>(address);
    entry.len = nbytes;
    entry.off = offset;
    entry.user_data = tag;
    sq_array_[slot] = slot;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
}

int Ring::enter() {
    const unsigned waiting = *sq_tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
    const long done = syscall(__NR_io_uring_enter, fd_, waiting, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
    return done < 0 ? errno : 0;
}

bool Ring::pop(std::uint64_t& tag, int& result) {
    const unsigned head = *cq_head_;
    if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) {
        return false;
    }
    const io_uring_cqe& entry = static_cast<const io_uring_cqe*>(cqes_)[head & cq_mask_];
    tag = entry.user_data;
    result = entry.res;
    __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
    return true;
}

unsigned Ring::withdraw() {
    const unsigned head = __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
    const unsigned count = *sq_tail_ - head;
    __atomic_store_n(sq_tail_, head, __ATOMIC_RELEASE);
    return count;
}

#else

bool Ring::setup() { return false; }
void Ring::push(bool, int, void*, unsigned, std::uint64_t, std::uint64_t) {}
int Ring::enter() { return ENOSYS; }
bool Ring::pop(std::uint64_t&, int&) { return false; }
unsigned Ring::withdraw() { return 0; }

#endif

}  // namespace farpool
