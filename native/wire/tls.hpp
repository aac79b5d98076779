// TLS 1.3 with certificates on both sides (OpenSSL), over non-blocking sockets. A build without OpenSSL uses tls_missing.cpp in
// place of tls.cpp: there is no TLS then, and making a context fails with an error that says what to install.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>

struct ssl_st;
struct ssl_ctx_st;

namespace farpool {

bool tls_available() noexcept;

class TlsSession;

// One side's certificate and trusted authorities. Immutable, so that sessions keep their first context when another one
// replaces it.
class TlsContext {
public:
    // Makes a context from PEM texts: the certificate (followed by the certificates between it and its authority), its private
    // key, and the trusted authorities. Throws PortFailure (value) with the reason.
    TlsContext(const std::string& certificate, const std::string& key, const std::string& authority);
    ~TlsContext();
    TlsContext(const TlsContext&) = delete;
    TlsContext& operator=(const TlsContext&) = delete;

    // Begins a client's session on a connected socket, which the caller keeps. The node's certificate must be for `host`, a
    // name or an IP address.
    std::unique_ptr<TlsSession> connect(int fd, const std::string& host) const;
    std::unique_ptr<TlsSession> accept(int fd) const;

private:
    std::unique_ptr<TlsSession> begin(int fd) const;

    ssl_ctx_st* context_ = nullptr;
};

// A TLS session, for one thread at a time. Calls return like calls of Stream; EACCES if one side does not trust the other,
// EPROTO if the received bytes are not valid TLS, EPROTONOSUPPORT if they are not TLS at all. After an error other than EAGAIN
// no more bytes can be sent.
class TlsSession {
public:
    explicit TlsSession(ssl_st* ssl) noexcept : ssl_(ssl) {}
    ~TlsSession();
    TlsSession(const TlsSession&) = delete;
    TlsSession& operator=(const TlsSession&) = delete;

    ssl_st* ssl() const noexcept { return ssl_; }
    // True if another record follows the one being written at once, so that the kernel may send both in one packet.
    bool more_follows() const noexcept { return more_follows_; }
    // Continues the handshake; 0 once it is over. Then each side has verified the other, but the client does not know yet if
    // the node trusts it.
    int handshake();
    ssize_t receive(iovec* parts, std::size_t count);
    ssize_t send(iovec* parts, std::size_t count);

    bool pending() const noexcept { return more_; }
    bool receiving_sends() const noexcept { return sends_; }
    bool has_input() const noexcept;
    const std::string& trouble() const noexcept { return trouble_; }

    // The common name of the other side's certificate; empty if it has none or several.
    std::string peer_name() const;
    // True if the kernel encrypts sent bytes, or decrypts received bytes (kTLS).
    bool kernel_sends() const noexcept;
    bool kernel_receives() const noexcept;

private:
    static constexpr std::size_t record_nbytes = 16384;

    ssize_t fail(int result);

    ssl_st* ssl_;
    bool more_ = true;    // decrypted bytes may be available: at first, bytes that came with the handshake
    bool sends_ = false;  // a receive waits until pending bytes can be sent
    bool more_follows_ = false;
    std::string trouble_;
    std::array<char, record_nbytes> gathered_;
};

}  // namespace farpool
