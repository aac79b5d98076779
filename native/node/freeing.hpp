// Memory that is given back to the system by a thread of its own: for gigabytes that takes seconds, and the loop goes on meanwhile.
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

    // Takes part in owning it, and lets it go soon. Where no thread can be started, at once.
    void let_go(std::shared_ptr<const void> memory);
    // Waits until everything has been let go, and ends the thread.
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
