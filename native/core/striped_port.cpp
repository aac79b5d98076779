#include "core/striped_port.hpp"

#include <algorithm>
#include <exception>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

#include "core/signals_blocked.hpp"

namespace farpool {

namespace {

constexpr std::size_t pieces_under_way = 16;                            // started and not finished, for each port
constexpr std::size_t min_nbytes_for_threads = std::size_t{256} << 10;  // a smaller transfer ends before a thread has started

}  // namespace

// Moves the pieces of ports whose calls block, each port on a thread of its own. The destructor waits for the threads, because
// they use the caller's memory.
class StripedPort::Blocking {
public:
    Blocking(const StripedPort& striped, Direction direction, const std::vector<Part>& parts)
        : striped_(striped), direction_(direction), parts_(parts) {}
    ~Blocking() { join(); }
    Blocking(const Blocking&) = delete;
    Blocking& operator=(const Blocking&) = delete;

    void start(std::span<const std::size_t> ports) {
        failures_.resize(ports.size());
        for (std::size_t index = 0; index < ports.size(); ++index) {
            const std::size_t port = ports[index];
            std::exception_ptr& failure = failures_[index];
            try {
                const SignalsBlocked blocked;
                threads_.emplace_back([this, port, &failure] {
                    try {
                        move(port);
                    } catch (const std::exception&) {
                        failure = std::current_exception();
                    }
                });
            } catch (const std::system_error&) {  // no more threads can be started
                move(port);
            }
        }
    }

    // Waits for all threads, and throws the first failure.
    void finish() {
        join();
        for (const std::exception_ptr& failure : failures_) {
            if (failure) {
                std::rethrow_exception(failure);
            }
        }
    }

    void move(std::size_t port) const {
        for (const Part& part : parts_) {
            if (part.port == port) {
                striped_.move_part(direction_, part);
            }
        }
    }

private:
    void join() {
        for (std::thread& thread : threads_) {
            thread.join();
        }
        threads_.clear();
    }

    const StripedPort& striped_;
    const Direction direction_;
    const std::vector<Part>& parts_;
    std::vector<std::exception_ptr> failures_;
    std::vector<std::thread> threads_;
};

StripedPort::StripedPort(std::string name, std::vector<Port*> ports, std::uint64_t stripe, std::uint64_t share, bool placed)
    : name_(std::move(name)), ports_(std::move(ports)), stripe_(stripe), share_(share), placed_(placed) {
    if (ports_.empty() || stripe == 0 || share % stripe != 0) {
        fail_value(name_ + ": " + std::to_string(ports_.size()) + " ports, stripes of " + std::to_string(stripe) +
                   " bytes and " + std::to_string(share) + " bytes in each port, expected at least one port and whole stripes");
    }
}

unsigned StripedPort::concurrency() const noexcept {
    unsigned most = 1;
    for (const Port* port : ports_) {
        most = std::max(most, port->concurrency());
    }
    return most;
}

bool StripedPort::copies() const noexcept {
    return std::all_of(ports_.begin(), ports_.end(), [](const Port* port) { return port->copies(); });
}

bool StripedPort::serves_faults() const noexcept {
    return !placed_ && std::all_of(ports_.begin(), ports_.end(), [](const Port* port) { return port->serves_faults(); });
}

void StripedPort::place(std::uint64_t offset, std::vector<std::uint64_t> pieces) {
    const std::lock_guard lock(mutex_);
    places_.insert_or_assign(offset, std::move(pieces));
}

void StripedPort::forget(std::uint64_t offset) {
    const std::lock_guard lock(mutex_);
    places_.erase(offset);
}

void StripedPort::read(std::uint64_t offset, void* into, std::size_t nbytes) {
    transfer(Direction::read, offset, static_cast<std::byte*>(into), nbytes);
}

void StripedPort::write(std::uint64_t offset, const void* from, std::size_t nbytes) {
    transfer(Direction::write, offset, static_cast<std::byte*>(const_cast<void*>(from)), nbytes);
}

std::vector<StripedPort::Part> StripedPort::cut(std::uint64_t offset, std::byte* memory, std::size_t nbytes) const {
    const std::uint64_t capacity = share_ * ports_.size();
    if (offset > capacity || nbytes > capacity - offset) {
        fail_value(name_ + ": offset " + std::to_string(offset) + " and " + std::to_string(nbytes) + " bytes are outside of " +
                   std::to_string(capacity) + " bytes");
    }
    const std::uint64_t begin = offset;
    std::vector<Part> parts;
    parts.reserve(nbytes / stripe_ + 2);
    while (nbytes > 0) {
        const std::uint64_t stripe = offset / stripe_;
        const std::uint64_t inside = offset % stripe_;
        const std::size_t step = std::min<std::uint64_t>(nbytes, stripe_ - inside);
        const Piece piece{stripe / ports_.size() * stripe_ + inside, reinterpret_cast<std::uintptr_t>(memory), step};
        parts.push_back({stripe % ports_.size(), piece});
        offset += step;
        memory += step;
        nbytes -= step;
    }
    if (placed_) {
        set_places(begin, parts);
    }
    return parts;
}

void StripedPort::set_places(std::uint64_t offset, std::vector<Part>& parts) const {
    const std::lock_guard lock(mutex_);
    const auto found = places_.find(offset);
    if (found == places_.end() || found->second.size() != parts.size()) {
        fail_value(name_ + ": there is no extent of " + std::to_string(parts.size()) + " pieces at offset " +
                   std::to_string(offset) + "; transfer a whole extent");
    }
    for (std::size_t index = 0; index < parts.size(); ++index) {
        parts[index].piece.offset = found->second[index];
    }
}

void StripedPort::transfer(Direction direction, std::uint64_t offset, std::byte* memory, std::size_t nbytes) {
    const std::vector<Part> parts = cut(offset, memory, nbytes);
    if (parts.size() == 1) {
        move_part(direction, parts.front());
        return;
    }
    Begun begun(ports_.size());
    if (ports_.size() == 1 && !placed_ && (begun.front() = ports_.front()->begin(direction)) == nullptr) {
        ports_.front()->move(direction,
                             {offset, reinterpret_cast<std::uintptr_t>(memory), nbytes});  // nothing to take turns with
        return;
    }
    std::vector<bool> seen(ports_.size());
    std::vector<std::size_t> blocking;  // ports that can only be called, and then do more than copy
    for (const Part& part : parts) {
        if (seen[part.port]) {
            continue;
        }
        seen[part.port] = true;
        if (begun[part.port] == nullptr) {
            begun[part.port] = ports_[part.port]->begin(direction);
        }
        if (begun[part.port] == nullptr && !ports_[part.port]->copies()) {
            blocking.push_back(part.port);
        }
    }
    Blocking others(*this, direction, parts);
    // The first one needs no other thread; none of them does if the transfer is small.
    const std::size_t here = nbytes < min_nbytes_for_threads ? blocking.size() : std::min<std::size_t>(blocking.size(), 1);
    others.start(std::span(blocking).subspan(here));
    for (unsigned attempt = 1;; ++attempt) {
        try {
            exchange(direction, parts, begun);
            break;
        } catch (const PortFailure& failure) {
            const auto may_retry = [](const auto& one) { return one != nullptr && one->may_retry(); };
            if (attempt > 1 || failure.error().kind != ErrorKind::node || !std::any_of(begun.begin(), begun.end(), may_retry)) {
                throw;
            }
            // Moving the same bytes twice does no harm. But replies to the first attempt must not be taken for later ones.
            for (const auto& one : begun) {
                if (one != nullptr) {
                    one->abandon();
                }
            }
        }
    }
    for (const std::size_t port : std::span(blocking).first(here)) {
        others.move(port);
    }
    others.finish();
}

// Moves the pieces of all ports that begin transfers or copy.
void StripedPort::exchange(Direction direction, const std::vector<Part>& parts, const Begun& begun) const {
    std::vector<const Part*> waiting;
    waiting.reserve(parts.size());
    for (const Part& part : parts) {
        if (begun[part.port] != nullptr) {
            waiting.push_back(&part);
        }
    }
    const auto transfers = std::count_if(begun.begin(), begun.end(), [](const auto& one) { return one != nullptr; });
    const std::size_t most = pieces_under_way * static_cast<std::size_t>(transfers);
    std::size_t started = 0;
    const auto start_more = [&](std::size_t finished) {
        for (; started < waiting.size() && started - finished < most; ++started) {
            begun[waiting[started]->port]->start(waiting[started]->piece);
        }
    };
    start_more(0);
    for (const Part& part : parts) {  // copy while the other ports work
        if (begun[part.port] == nullptr && ports_[part.port]->copies()) {
            move_part(direction, part);
        }
    }
    for (std::size_t finished = 0; finished < waiting.size(); ++finished) {
        start_more(finished);
        begun[waiting[finished]->port]->finish(waiting[finished]->piece);
    }
}

void StripedPort::move_part(Direction direction, const Part& part) const {
    try {
        ports_[part.port]->move(direction, part.piece);
    } catch (const PortFailure& failure) {
        const ErrorKind kind = failure.error().kind;
        if (!placed_ || (kind != ErrorKind::tier && kind != ErrorKind::checksum)) {
            throw;
        }
        PortError error = failure.error();  // two inner tiers may have the same name, so say which one it is
        error.message = name_ + ": inner tier " + std::to_string(part.port + 1) + " of " + std::to_string(ports_.size()) +
                        ": " + error.message;
        error.tier = name_;
        throw PortFailure(std::move(error));
    }
}

}  // namespace farpool
