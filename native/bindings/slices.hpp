// Memory by rows, such as the keys of all heads by tokens, and slices of it that are sent and received as one.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"

// Buffers in which each row has a fixed number of bytes; holds them.
class Rows {
public:
    Rows(const nb::list& memories, const std::vector<std::size_t>& row_nbytes);
    Rows(const Rows&) = delete;
    Rows& operator=(const Rows&) = delete;

    std::size_t size() const { return memories_.size(); }
    // The rows that all buffers have.
    std::size_t rows() const { return rows_; }
    bool readonly() const { return readonly_; }
    iovec slice(std::size_t number, std::size_t start, std::size_t stop) const {
        const Memory& own = memories_[number];
        return {static_cast<std::byte*>(own.view->buf) + start * own.row_nbytes, (stop - start) * own.row_nbytes};
    }
    // The same as a memoryview, which keeps the buffer alive by itself.
    nb::object view(std::size_t number, std::size_t start, std::size_t stop) const;

private:
    struct Memory {
        Memory(nb::object given, std::size_t nbytes)
            : bytes(std::move(given)), view(bytes, PyBUF_C_CONTIGUOUS), row_nbytes(nbytes) {}
        nb::object bytes;  // a memoryview
        BufferView view;
        std::size_t row_nbytes;
    };
    std::deque<Memory> memories_;
    std::size_t rows_ = 0;
    bool readonly_ = false;
};

// The same rows of all buffers of a `Rows`, one buffer after the other.
class Slices {
public:
    Slices(std::shared_ptr<const Rows> rows, std::size_t start, std::size_t stop);

    const std::vector<iovec>& parts() const { return parts_; }
    std::size_t nbytes() const { return nbytes_; }
    bool readonly() const { return rows_->readonly(); }
    nb::list views() const;

private:
    std::shared_ptr<const Rows> rows_;
    std::size_t start_;
    std::size_t stop_;
    std::vector<iovec> parts_;
    std::size_t nbytes_ = 0;
};
