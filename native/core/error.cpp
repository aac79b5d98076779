#include "core/error.hpp"

namespace farpool {

namespace {

// Short texts need no memory.
PortError out_of_memory() noexcept { return {ErrorKind::tier, "out of memory", {}, 0, {}}; }

}  // namespace

PortError handled_error(const char* tier, const char* before) noexcept {
    try {
        try {
            throw;
        } catch (const PortFailure& failure) {
            return failure.error();
        } catch (const std::exception& other) {
            return {ErrorKind::tier, std::string(before) + other.what(), tier, 0, {}};
        }
    } catch (...) {
        return out_of_memory();
    }
}

PortError copy_of(const PortError& error) noexcept {
    try {
        return error;
    } catch (const std::exception&) {
        return out_of_memory();
    }
}

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
