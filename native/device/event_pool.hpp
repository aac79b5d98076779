// Events to use again: a device makes them slowly, and there are as many as were ever needed at the same time. They end with
// the pool or before, whether they were given back or not.
#pragma once

#include <memory>
#include <mutex>
#include <ranges>
#include <utility>
#include <vector>

#include "core/room.hpp"
#include "device/device.hpp"

namespace farpool::device {

class EventPool {
public:
    explicit EventPool(std::shared_ptr<Device> device) : device_(std::move(device)) {}
    EventPool(const EventPool&) = delete;
    EventPool& operator=(const EventPool&) = delete;
    ~EventPool() { end(); }

    Event take() {
        const std::lock_guard lock(mutex_);
        if (!spare_.empty()) {
            const Event event = spare_.back();
            spare_.pop_back();
            return event;
        }
        make_room(made_, made_.size() + 1);
        make_room(spare_, made_.size() + 1);  // so that `give` needs no memory
        made_.push_back(device_->make_event());
        return made_.back();
    }
    // Ends all events, also those that were not given back.
    void end() noexcept {
        const std::lock_guard lock(mutex_);
        for (const Event event : made_) {
            device_->end_event(event);
        }
        made_.clear();
        spare_.clear();
    }
    // Gives an event back, which may be recorded again at once: waits that are queued already stay with its earlier record.
    void give(Event event) noexcept { give_all(std::views::single(event)); }
    template <std::ranges::input_range Events>
    void give_all(Events&& events) noexcept {
        const std::lock_guard lock(mutex_);
        for (const Event event : events) {
            spare_.push_back(event);
        }
    }

private:
    std::shared_ptr<Device> device_;
    std::mutex mutex_;
    std::vector<Event> made_;
    std::vector<Event> spare_;
};

}  // namespace farpool::device
