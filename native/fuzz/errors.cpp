// What the client's end calls when something fails, without the interpreter that it is otherwise part of.
#include "core/error.hpp"

namespace farpool {

void fail_value(std::string message) { throw PortFailure({ErrorKind::value, std::move(message), {}, 0, nullptr}); }

void fail_closed(std::string message) { throw PortFailure({ErrorKind::closed, std::move(message), {}, 0, nullptr}); }

void fail_checksum(const std::string& tier, const std::string& message) {
    throw PortFailure({ErrorKind::checksum, message, tier, 0, nullptr});
}

void fail_node(ErrorKind kind, const std::string& node, const std::string& message, int code) {
    throw PortFailure({kind, message, node, code, nullptr});
}

}  // namespace farpool
