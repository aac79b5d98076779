// A thread that returns memory to the system: for gigabytes that takes seconds, and the node's loop goes on meanwhile.
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

    // Takes a share in the ownership of `memory` and releases it on the thread; at once where no thread can be started.
    void let_go(std::shared_ptr<const void> memory);
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
