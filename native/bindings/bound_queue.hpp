// What the Python faces of all queues of transfers share: they release the references that entries hold, and end the queue
// before the interpreter ends.
#pragma once

#include <memory>
#include <vector>

#include "bindings/bindings.hpp"
#include "core/transfer_queue.hpp"

class BoundQueue {
public:
    explicit BoundQueue(std::shared_ptr<farpool::TransferQueue> queue);
    virtual ~BoundQueue() = default;
    BoundQueue(const BoundQueue&) = delete;
    BoundQueue& operator=(const BoundQueue&) = delete;

    const std::shared_ptr<farpool::TransferQueue>& transfers() const { return queue_; }
    std::size_t pending() const { return queue_->ours() ? queue_->pending() : 0; }
    // Without the interpreter lock while it waits.
    virtual bool close(double seconds);

protected:
    bool closed() const { return closed_; }
    void require_ours() const;
    // For the destructor of each face: closes the queue, or leaves it alone in a forked child.
    void end();
    // Gives the native queue up, which is closed.
    void leave() { queue_.reset(); }

private:
    std::shared_ptr<farpool::TransferQueue> queue_;
    bool closed_ = false;
};
