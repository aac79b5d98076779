// TLS 1.3 with certificates on both sides (OpenSSL), over non-blocking sockets. Built without OpenSSL, tls_missing.cpp takes
// the place of tls.cpp: there is no TLS then, and making a context fails with an error that says what to install.
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

// One side's certificate and trusted authorities. Immutable, so that sessions keep the context that they began with when
// another one takes its place.
class TlsContext {
public:
    // Makes a context from PEM texts: the certificate (followed by those between it and its authority), its private key, and
    // the trusted authorities. Throws PortFailure (value) that says what is wrong.
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

// A TLS session, for one thread at a time. Calls return as those of Stream; EACCES where one side does not trust the other,
// EPROTO where the bytes received are not valid TLS, EPROTONOSUPPORT where they are not TLS at all. After an error other than
// EAGAIN nothing more can be sent.
class TlsSession {
public:
    explicit TlsSession(ssl_st* ssl) noexcept : ssl_(ssl) {}
    ~TlsSession();
    TlsSession(const TlsSession&) = delete;
    TlsSession& operator=(const TlsSession&) = delete;

    ssl_st* ssl() const noexcept { return ssl_; }
    // True if another record follows the one being written at once, so that the kernel may send both in one packet.
    bool more_follows() const noexcept { return more_follows_; }
    // Goes on with the handshake; 0 once it is over. Each side then knows the other, but the client not yet if it is trusted.
    int handshake();
    ssize_t receive(iovec* parts, std::size_t count);
    ssize_t send(iovec* parts, std::size_t count);

    bool pending() const noexcept { return more_; }
    bool receiving_sends() const noexcept { return sends_; }
    bool holds_input() const noexcept;
    const std::string& trouble() const noexcept { return trouble_; }

    // The common name of the other side's certificate; empty where it has none or several.
    std::string peer_name() const;
    // True if the kernel encrypts what is sent, or decrypts what is received (kTLS).
    bool kernel_sends() const noexcept;
    bool kernel_receives() const noexcept;

private:
    static constexpr std::size_t record_nbytes = 16384;

    ssize_t fail(int result);

    ssl_st* ssl_;
    bool more_ = true;    // decrypted bytes may be here: first, any that came with the handshake
    bool sends_ = false;  // a receive waits until pending bytes can be sent
    bool more_follows_ = false;
    std::string trouble_;
    std::array<char, record_nbytes> gathered_;
};

}  // namespace farpool
