// The memory of a region: pages of a file in memory, and the range of addresses at which the program sees them.
//
// A page that is in the file and not mapped costs the program one short fault at its next use, by which we learn that the page
// is used.
//
// Pages come into the file through the program's range alone (`Userfault::copy`), which makes them one by one. A write to the
// file may make a huge page, where the system allows that for shared memory: its other pages would be in memory, uncounted and
// with zeros, before their bytes come.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farpool::region {

constexpr std::size_t page_nbytes = 4096;

using Page = std::uint32_t;  // its number in the region

class Mapping {
public:
    // Reserves addresses for `most` pages. Throws PortFailure if there are not as many.
    explicit Mapping(Page most);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    // Maps pages from `from` to `to`, which are not there yet, into the program's range.
    void grow(Page from, Page to);
    // Takes the pages from `to` to `from` away. Their addresses stay reserved.
    void shrink(Page from, Page to) noexcept;

    std::byte* at(Page page) const noexcept { return data_ + std::size_t{page} * page_nbytes; }
    Page page_of(std::uintptr_t address) const noexcept;
    Page most() const noexcept { return most_; }

    // The calls below take `count` pages from `first` on.

    // Copies from the file, mapped or not. Pages that are not mapped stay so.
    void save(Page first, Page count, std::byte* into) const;
    // Takes pages out of the program's range; the file keeps them.
    void unmap(Page first, Page count) const noexcept;
    // Gives pages back to the operating system, out of the program's range too.
    void punch(Page first, Page count) const noexcept;
    // Bytes of memory that the file has now.
    std::uint64_t backed() const noexcept;

private:
    Page most_;
    int fd_;
    std::byte* data_;
};

// Pages that read as zeros and take no memory.
class Zeros {
public:
    explicit Zeros(Page count);
    ~Zeros();
    Zeros(const Zeros&) = delete;
    Zeros& operator=(const Zeros&) = delete;
    const std::byte* data() const noexcept { return data_; }

private:
    std::size_t nbytes_;
    const std::byte* data_;
};

}  // namespace farpool::region
