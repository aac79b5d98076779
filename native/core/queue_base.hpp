// What the queues of transfers share: the results until they are polled, and the threads that wait for them.
#pragma once

#include <cstdint>
#include <mutex>

#include "core/results.hpp"

namespace farpool {

class QueueBase : public TransferQueue {
public:
    QueueBase();

    std::vector<Result> poll() override;
    bool wait(double seconds) override;
    Seen seen() const override;
    void wait_past(const Seen& seen, std::uint64_t results, double seconds) override;
    void nudge() override;
    bool ours() const noexcept override;

protected:
    // Throws if the queue was closed.
    void require_open() const;

    mutable std::mutex mutex_;
    Results results_;
    bool closing_ = false;

private:
    std::uint32_t owner_;  // forks up to the process that made the queue
};

}  // namespace farpool
