#include "core/error.hpp"

namespace farpool {

void fail_value(std::string message) { throw PortFailure({ErrorKind::value, std::move(message), {}, 0, {}}); }

void fail_closed(std::string message) { throw PortFailure({ErrorKind::closed, std::move(message), {}, 0, {}}); }

void fail_tier(const std::string& tier, const std::string& message, int code) {
    throw PortFailure({ErrorKind::tier, tier + ": " + message, tier, code, {}});
}

void fail_checksum(const std::string& tier, const std::string& message) {
    throw PortFailure({ErrorKind::checksum, tier + ": " + message, tier, 0, {}});
}

void fail_node(ErrorKind kind, const std::string& node, const std::string& message, int code) {
    throw PortFailure({kind, node + ": " + message, node, code, {}});
}

}  // namespace farpool
