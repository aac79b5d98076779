// A port that simulates a slower medium: transfers end no earlier than over a link of a given rate and latency.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "core/port.hpp"

namespace farpool {

// A port behind a simulated link, which carries one transfer after another. A transfer occupies the link for bytes / rate
// and ends a latency later, so that latencies of transfers from several threads overlap, as they do on a real link.
class ThrottledPort : public Port {
public:
    // Rates in bytes per second (infinity for no limit), latency in seconds. With `shared` both directions use one link.
    ThrottledPort(Port& inner, double read_rate, double write_rate, double latency, bool shared)
        : inner_(inner), read_rate_(read_rate), write_rate_(write_rate), latency_(latency), shared_(shared) {}
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override;
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override;
    unsigned concurrency() const noexcept override { return inner_.concurrency(); }
    bool serves_faults() const noexcept override { return inner_.serves_faults(); }
    // Ends the throttling permanently; delayed transfers end at once.
    void lift();

private:
    using Clock = std::chrono::steady_clock;

    struct Link {
        Clock::time_point free{};   // when it has carried all reserved transfers
        Clock::time_point ended{};  // when the last transfer ended
        Clock::duration late{};     // by how much it ended too late, because its thread woke up late
    };

    struct Slot {
        Clock::time_point end;   // of the transfer
        Clock::duration credit;  // its beginning was dated back by this
    };

    Slot take_slot(Link& link, double rate, std::size_t nbytes);
    void delay(Link& link, const Slot& slot);

    Port& inner_;
    const double read_rate_;
    const double write_rate_;
    const double latency_;
    const bool shared_;
    std::mutex mutex_;
    std::condition_variable lifting_;
    bool lifted_ = false;
    Link read_link_;
    Link write_link_;
};

}  // namespace farpool
