// Errors as plain data, so that native threads can carry them without the interpreter lock.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <utility>

// PyObject as Python.h declares it: the core carries references to Python objects without using them.
struct _object;
using PyObject = _object;

namespace farpool {

enum class ErrorKind {
    tier,          // farpool.errors.TierError
    checksum,      // farpool.errors.ChecksumError
    closed,        // farpool.errors.PoolClosedError
    value,         // ValueError
    node,          // farpool.errors.NodeError; `tier` is the node
    node_timeout,  // farpool.errors.NodeTimeoutError
    protocol,      // farpool.errors.ProtocolError
    denied,        // farpool.errors.AccessDeniedError
    lease_lost,    // farpool.errors.LeaseLostError
    ticket,        // farpool.errors.TicketError
    unsupported,   // farpool.errors.UnsupportedError
    python,        // an exception object that a tier written in Python raised
};

struct PortError {
    ErrorKind kind = ErrorKind::tier;
    std::string message;
    std::string tier;
    int code = 0;  // errno, 0 if there is none
    std::shared_ptr<PyObject> exception;
};

class PortFailure : public std::exception {
public:
    explicit PortFailure(PortError error) : error_(std::move(error)) {}
    const char* what() const noexcept override { return error_.message.c_str(); }
    const PortError& error() const noexcept { return error_; }

private:
    PortError error_;
};

// The error that is being handled, with `before` before its text if it is no PortFailure. Without memory for its text, the
// error is "out of memory".
PortError handled_error(const char* tier, const char* before = "") noexcept;
// A copy of an error; without memory for its text, "out of memory".
PortError copy_of(const PortError& error) noexcept;
[[noreturn]] void fail_value(std::string message);
[[noreturn]] void fail_closed(std::string message);
[[noreturn]] void fail_tier(const std::string& tier, const std::string& message, int code = 0);
[[noreturn]] void fail_checksum(const std::string& tier, const std::string& message);
[[noreturn]] void fail_node(ErrorKind kind, const std::string& node, const std::string& message, int code = 0);

}  // namespace farpool
