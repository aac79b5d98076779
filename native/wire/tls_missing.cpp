// Replacement of tls.cpp for builds without OpenSSL.
#include <cerrno>

#include "core/error.hpp"
#include "wire/tls.hpp"

namespace farpool {

bool tls_available() noexcept { return false; }

TlsContext::TlsContext(const std::string&, const std::string&, const std::string&) {
    fail_value(
        "this farpool was built without TLS, as OpenSSL was not there; on Debian or Ubuntu: sudo apt-get install "
        "libssl-dev, then build farpool again");
}

TlsContext::~TlsContext() = default;

std::unique_ptr<TlsSession> TlsContext::connect(int, const std::string&) const { return nullptr; }

std::unique_ptr<TlsSession> TlsContext::accept(int) const { return nullptr; }

TlsSession::~TlsSession() = default;

int TlsSession::handshake() { return static_cast<int>(fail(0)); }

ssize_t TlsSession::receive(iovec*, std::size_t) { return fail(0); }

ssize_t TlsSession::send(iovec*, std::size_t) { return fail(0); }

bool TlsSession::has_input() const noexcept { return false; }

std::string TlsSession::peer_name() const { return {}; }

bool TlsSession::kernel_sends() const noexcept { return false; }

bool TlsSession::kernel_receives() const noexcept { return false; }

ssize_t TlsSession::fail(int) {
    errno = ENOTSUP;
    return -1;
}

}  // namespace farpool
