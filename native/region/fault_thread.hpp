// The thread that answers the faults of a region.
//
// It never takes Python's interpreter lock, and it never uses memory of the region, because no thread would answer its own
// faults. All answers to faults come from it, or from the end of a transfer.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "region/parts.hpp"
#include "region/transfers.hpp"

namespace farpool::region {

class FaultThread {
public:
    FaultThread(Parts& parts, Transfers& transfers);
    ~FaultThread() { close(); }
    // Idempotent.
    void close() noexcept;

private:
    using Lock = std::unique_lock<std::mutex>;
    struct Parked {
        Fault fault;
        double since;
    };

    void listen();
    void answer(const Fault& fault, Lock& lock);
    void serve(Page page, const Fault& fault, Lock& lock);
    void demand(Page page, const Fault& fault, Lock& lock);
    // Maps a page that rests, and those behind it that the thread needs next.
    void use(Page page, const Fault& fault);
    // The program has come to a run that was loaded ahead.
    void use_ahead(Page page, const Fault& fault);
    void answer_mapped(Page page, const Fault& fault);
    void retry_parked(Lock& lock);
    // `loaded`: the pages had been loaded ahead.
    void look_ahead(std::uint32_t thread, Page page, Page count, bool loaded = false);

    Parts& parts_;
    Transfers& transfers_;
    const Staging incoming_;
    std::vector<Parked> parked_;  // faults that wait for room
    double next_retry_ = 0;
    std::atomic<bool> closing_ = false;
    std::thread thread_;
};

}  // namespace farpool::region
