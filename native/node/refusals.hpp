// Errors by which a node refuses what a program asks through the node's control.
#pragma once

#include <stdexcept>

namespace farpool {

// A session, an access key or a tenant already holds as much as it may; the text says which limit was reached.
struct Busy : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// The node takes nothing new, because it drains or can only be read.
struct Full : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// A ticket or an order is of an earlier epoch, or does not fit the extents that are here.
struct Lapsed : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// The session belongs to another access key or tenant.
struct Denied : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace farpool
