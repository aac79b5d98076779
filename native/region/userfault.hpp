// Page faults that the kernel hands to this process (userfaultfd), and how they are answered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace farpool::region {

// One access that waits until its page is answered.
struct Fault {
    enum class Kind {
        missing,    // the page is not in memory
        unmapped,   // the page is in memory, and the program's mapping does not show it
        protected_  // the page is mapped, and a write to it is to be noticed
    };
    std::uintptr_t address;
    std::uint32_t thread;  // its number in the system
    Kind kind;
    bool write;
};

// A descriptor through which one thread receives faults of registered ranges of shared memory. All calls but `take` are safe
// from several threads.
class Userfault {
public:
    // Throws PortFailure that names the permission, if the kernel refuses it.
    Userfault();
    ~Userfault();
    Userfault(const Userfault&) = delete;
    Userfault& operator=(const Userfault&) = delete;

    void add(std::byte* begin, std::size_t nbytes);
    void remove(std::byte* begin, std::size_t nbytes) noexcept;

    // Receives faults without waiting; the part of `into` that was filled.
    std::span<Fault> take(std::span<Fault> into) const;
    // Waits for a fault, for `other` to become readable, or for `milliseconds`.
    void wait(int other, int milliseconds) const noexcept;

    // The next four calls begin at a page and take whole pages.

    // Puts a copy of the bytes where no page is, and wakes its threads unless `asleep`. With `protect` the first write is
    // noticed. False if a page was there already, whose threads are woken.
    bool copy(std::byte* begin, const std::byte* from, std::size_t nbytes, bool protect, bool asleep = false) const;
    // Maps pages that are in memory, and wakes their threads. False if writes to them will not be noticed although `protect`
    // asks for it (Linux before 6.4).
    bool map(std::byte* begin, std::size_t nbytes, bool protect) const;
    // Notices the next write to mapped pages, or lets writes through and wakes the threads that wait to write.
    void protect(std::byte* begin, std::size_t nbytes, bool on) const;
    // Wakes threads, which repeat their accesses.
    void wake(std::byte* begin, std::size_t nbytes) const noexcept;
    // Answers all accesses to a page with SIGBUS, now and later.
    void poison(std::byte* page) const noexcept;

private:
    int fd_;
    bool can_poison_;
};

// The text of an errno.
std::string reason(int code);

}  // namespace farpool::region
