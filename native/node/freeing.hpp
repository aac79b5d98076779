// A thread that returns memory to the system. For gigabytes that takes seconds, in which the node's loop must not wait.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace farpool {

class Freeing {
public:
    Freeing() = default;
    ~Freeing();
    Freeing(const Freeing&) = delete;
    Freeing& operator=(const Freeing&) = delete;

    // Takes a share in the ownership of `memory` and releases it on the thread; at once if no thread can be started.
    void release(std::shared_ptr<const void> memory);
    // Waits until everything has been released, and ends the thread.
    void finish();

private:
    void work();

    std::mutex mutex_;
    std::condition_variable ready_;
    std::vector<std::shared_ptr<const void>> waiting_;
    bool closing_ = false;
    std::thread thread_;
};

}  // namespace farpool
