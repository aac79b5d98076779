// Keeps a node alive when a client has cut a segment file off that the node has mapped.
//
// Who may write a file may shorten it, and a look at what is gone ends a process by SIGBUS. In a thread that has a guard, a page of
// zeros takes the place of the missing one: what was there is damaged, as if it had been overwritten.
#pragma once

namespace farpool {

class BusGuard {
public:
    BusGuard() noexcept;
    ~BusGuard();
    BusGuard(const BusGuard&) = delete;
    BusGuard& operator=(const BusGuard&) = delete;
};

}  // namespace farpool
