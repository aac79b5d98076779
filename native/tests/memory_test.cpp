// Memory in a forked child, in which the kernel has left out the parts that are page-locked for a device.
#include "core/memory.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "tests/testing.hpp"

using farpool::Memory;

TEST("a forked child keeps what it has mapped in the place of its parent's memory") {
    constexpr std::size_t nbytes = 1 << 20;
    auto* const memory = new Memory(nbytes);
    std::memset(memory->data(), 1, nbytes);
    CHECK(memory->ours());
    CHECK_EQUAL(madvise(memory->data(), nbytes, MADV_DONTFORK), 0);
    const pid_t child = fork();
    if (child == 0) {
        // What the child maps there is its own.
        void* const own = mmap(memory->data(), nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        if (own != memory->data() || memory->ours()) {
            _exit(1);
        }
        std::memset(own, 2, nbytes);
        memory->touch(0, nbytes);
        memory->discard(0, nbytes);
        delete memory;
        unsigned char present = 0;
        const bool mapped = mincore(own, 1, &present) == 0;  // fails if nothing is mapped there
        _exit(mapped && *static_cast<volatile char*>(own) == 2 ? 0 : 2);
    }
    int status = -1;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
    CHECK(memory->data()[nbytes - 1] == std::byte{1});
    void* const address = memory->data();
    delete memory;
    unsigned char present = 0;
    CHECK(mincore(address, 1, &present) != 0);
}

int main() { return farpool::testing::run(); }
