// Sockets between processes of one host.
#pragma once

namespace farpool {

// Bounds what a TCP connection over loopback has sent and the other side has not received. There is no round trip to bridge,
// and what stays in the cache of a core between the two copies is moved half as fast again as what has to come from memory.
// Leaves every other socket as it is.
void bound_loopback_sending(int fd) noexcept;

}  // namespace farpool
