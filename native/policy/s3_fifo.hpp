// S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023): new objects pass through a small queue,
// and most are evicted from there soon. Objects that are used twice in the queue, or that return while they are remembered,
// enter the main queue, which works like CLOCK with a counter up to 3.
//
// Details on which counts depend: the small queue is a tenth of the capacity, the ghosts are as many bytes as the main queue.
// Until the first eviction, an object that finds the small queue full enters the main queue. An object starts in the main queue
// with no uses. Marks of other processes show that an object was used, not how often: then one use is enough to move from the
// small queue to the main one.
#pragma once

#include <optional>

#include "policy/ghost_list.hpp"
#include "policy/marks.hpp"
#include "policy/slot_list.hpp"

namespace farpool::policy {

class S3Fifo final : public Policy {
public:
    explicit S3Fifo(std::uint64_t capacity, Marks marks = {});

private:
    struct Object {
        std::uint64_t key;
        std::uint64_t size;
        bool in_main;
    };

    void on_touch(Slot slot, std::int64_t next_use) override;
    void on_insert(Slot slot, const Item& item) override;
    Slot on_victim(const Item& incoming, const InUse& in_use) override;
    void on_remove(Slot slot, Leaving why) override;
    bool returns(std::uint64_t key);
    Slot victim_of_small(const InUse& in_use);
    Slot victim_of_main(const InUse& in_use);
    void enter(Slot slot, bool main);

    std::uint64_t small_capacity_;
    std::uint64_t main_capacity_;
    std::uint64_t ghost_capacity_;
    std::uint8_t uses_for_main_;
    Marks marks_;
    Links links_;
    SlotList small_{links_};
    SlotList main_{links_};
    GhostList ghosts_;
    std::vector<Object> objects_;
    std::uint64_t small_nbytes_ = 0;
    std::uint64_t main_nbytes_ = 0;
    bool has_evicted_ = false;
    std::optional<std::uint64_t> returning_;  // the key that was a ghost until room was made for it
};

}  // namespace farpool::policy
