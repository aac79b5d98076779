#include "core/replaceable_port.hpp"

#include <algorithm>
#include <utility>

namespace farpool {

// A transfer under way. Notes at its end which chunks it has written: a copy that began before would lack these bytes.
class ReplaceablePort::Inside {
public:
    Inside(ReplaceablePort& port, Direction direction) : port_(port), direction_(direction) {
        std::unique_lock lock(port_.mutex_);
        if (port_.keeps_out(direction)) {
            ++port_.waiting_;
            port_.changed_.wait(lock, [&] { return !port_.keeps_out(direction); });
            --port_.waiting_;
            port_.changed_.notify_all();
        }
        ++port_.inside_[static_cast<int>(direction)];
    }
    ~Inside() {
        const std::lock_guard lock(port_.mutex_);
        port_.note_written(first_, end_);
        --port_.inside_[static_cast<int>(direction_)];
        if (port_.closed_ != Closed::nothing) {
            port_.changed_.notify_all();
        }
    }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

    Port& inner() const noexcept { return *port_.inner_; }
    Direction direction() const noexcept { return direction_; }

    // Called before the bytes are moved, so that a write that fails is noted, too.
    void add(std::uint64_t offset, std::size_t nbytes) noexcept {
        if (direction_ == Direction::write && nbytes > 0) {
            first_ = std::min<std::uint64_t>(first_, offset / port_.chunk_);
            end_ = std::max<std::uint64_t>(end_, (offset + nbytes - 1) / port_.chunk_ + 1);
        }
    }

private:
    ReplaceablePort& port_;
    const Direction direction_;
    std::size_t first_ = static_cast<std::size_t>(-1);  // all chunks from here ...
    std::size_t end_ = 0;                               // ... to here may have been written
};

// Keeps transfers out while it lives, and waits at first until those under way have ended.
class ReplaceablePort::Gate {
public:
    Gate(ReplaceablePort& port, Closed closed) : port_(port) {
        std::unique_lock lock(port_.mutex_);
        // The transfers that the last gate kept out go first, or many gates in a row would keep them out for all that time.
        port_.changed_.wait(lock, [&] { return port_.waiting_ == 0; });
        port_.closed_ = closed;
        port_.changed_.wait(lock, [&] { return port_.inside_[1] == 0 && (closed == Closed::writes || port_.inside_[0] == 0); });
    }
    ~Gate() {
        const std::lock_guard lock(port_.mutex_);
        port_.closed_ = Closed::nothing;
        port_.changed_.notify_all();
    }
    Gate(const Gate&) = delete;
    Gate& operator=(const Gate&) = delete;

private:
    ReplaceablePort& port_;
};

// A transfer of several pieces. It is inside from its beginning to its end, so all its pieces meet the same inner port.
class ReplaceablePort::Guarded final : public Transfer {
public:
    Guarded(ReplaceablePort& port, Direction direction) : inside_(port, direction), inner_(inside_.inner().begin(direction)) {}

    // False if the inner port can only move one piece per call, and waits for more than memory.
    bool may_begin() const noexcept { return inner_ != nullptr || inside_.inner().copies(); }
    void start(const Piece& piece) override {
        inside_.add(piece.offset, piece.nbytes);
        if (inner_ != nullptr) {
            inner_->start(piece);
        } else {
            inside_.inner().move(inside_.direction(), piece);
        }
    }
    void finish(const Piece& piece) override {
        if (inner_ != nullptr) {
            inner_->finish(piece);
        }
    }
    bool may_retry() const noexcept override { return inner_ != nullptr && inner_->may_retry(); }
    void abandon() override {
        if (inner_ != nullptr) {
            inner_->abandon();
        }
    }

private:
    Inside inside_;  // before `inner_`, so that it ends after it
    const std::unique_ptr<Transfer> inner_;
};

ReplaceablePort::ReplaceablePort(std::string name, Port& inner, std::uint64_t nbytes, std::size_t chunk)
    : name_(std::move(name)), nbytes_(nbytes), chunk_(chunk), serves_faults_(inner.serves_faults()), inner_(&inner) {
    if (chunk == 0) {
        fail_value(name_ + ": chunks have 0 bytes, expected 1 or more");
    }
    written_.resize((nbytes + chunk - 1) / chunk);
    lacking_.resize(written_.size());
}

void ReplaceablePort::read(std::uint64_t offset, void* into, std::size_t nbytes) {
    const Inside inside(*this, Direction::read);
    inside.inner().read(offset, into, nbytes);
}

void ReplaceablePort::write(std::uint64_t offset, const void* from, std::size_t nbytes) {
    Inside inside(*this, Direction::write);
    inside.add(offset, nbytes);
    inside.inner().write(offset, from, nbytes);
}

std::unique_ptr<Transfer> ReplaceablePort::begin(Direction direction) {
    auto guarded = std::make_unique<Guarded>(*this, direction);
    return guarded->may_begin() ? std::move(guarded) : nullptr;
}

unsigned ReplaceablePort::concurrency() const noexcept {
    const std::lock_guard lock(mutex_);
    return inner_->concurrency();
}

void ReplaceablePort::set_target(Port& target, bool same_bytes) {
    copied_.resize(chunk_);
    read_back_.resize(chunk_);
    target_ = &target;
    same_bytes_ = same_bytes;
    const std::lock_guard lock(mutex_);
    lacking_ = written_;
    relapsed_ = 0;
}

bool ReplaceablePort::copy_chunks() {
    const Gate gate(*this, Closed::writes);
    std::size_t more;
    {
        const std::lock_guard lock(mutex_);
        more = std::exchange(relapsed_, 0);
    }
    const bool copied = copy_first_lacking();
    while (more > 0 && copy_first_lacking()) {
        --more;
    }
    return copied;
}

void ReplaceablePort::replace(Port* instead) {
    {
        const Gate gate(*this, Closed::all);
        while (copy_first_lacking()) {
        }
        const std::lock_guard lock(mutex_);
        inner_ = instead == nullptr ? target_ : instead;
    }
    drop_target();
}

void ReplaceablePort::drop_target() {
    target_ = nullptr;
    copied_ = {};
    read_back_ = {};
}

void ReplaceablePort::note_written(std::size_t first, std::size_t end) noexcept {
    for (std::size_t chunk = first; chunk < std::min(end, written_.size()); ++chunk) {
        relapsed_ += lacking_[chunk] ? 0 : 1;
        written_[chunk] = true;
        lacking_[chunk] = true;
    }
}

// No write is under way.
bool ReplaceablePort::copy_first_lacking() {
    if (target_ == nullptr) {
        fail_value(name_ + ": no port was set to replace the present one; call set_target() first");
    }
    if (same_bytes_) {
        return false;
    }
    std::size_t chunk;
    {
        const std::lock_guard lock(mutex_);
        chunk = static_cast<std::size_t>(std::find(lacking_.begin(), lacking_.end(), true) - lacking_.begin());
    }
    if (chunk == lacking_.size()) {
        return false;
    }
    const std::uint64_t offset = chunk * std::uint64_t{chunk_};
    const std::size_t nbytes = std::min<std::uint64_t>(chunk_, nbytes_ - offset);
    inner_->read(offset, copied_.data(), nbytes);
    target_->write(offset, copied_.data(), nbytes);
    target_->read(offset, read_back_.data(), nbytes);
    if (!std::equal(copied_.begin(), copied_.begin() + static_cast<std::ptrdiff_t>(nbytes), read_back_.begin())) {
        fail_checksum(name_, "the " + std::to_string(nbytes) + " bytes that were copied to offset " + std::to_string(offset) +
                                 " of another port are not the same when they are read back");
    }
    const std::lock_guard lock(mutex_);
    lacking_[chunk] = false;
    return true;
}

}  // namespace farpool
