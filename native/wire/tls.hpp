// TLS 1.3 with certificates on both sides (OpenSSL), over sockets that never let wait. Built without OpenSSL, tls_missing.cpp
// takes the place of tls.cpp: there is no TLS then, and whoever asks for a context is told what to install.
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

// What one side shows, and whom it believes. Immutable, so that sessions go on with what they began with when another one takes
// its place.
class TlsContext {
public:
    // PEM: the certificate (with those between it and the authority behind it), its private key, and the authorities whose
    // certificates are believed. Throws PortFailure (value) that says what is wrong.
    TlsContext(const std::string& certificate, const std::string& key, const std::string& authority);
    ~TlsContext();
    TlsContext(const TlsContext&) = delete;
    TlsContext& operator=(const TlsContext&) = delete;

    // The session that begins on a connected socket, which the caller keeps. The node's certificate has to be of this host, a name
    // or an IP address.
    std::unique_ptr<TlsSession> connect(int fd, const std::string& host) const;
    std::unique_ptr<TlsSession> accept(int fd) const;

private:
    std::unique_ptr<TlsSession> begin(int fd) const;

    ssl_ctx_st* context_ = nullptr;
};

// Used by one thread at a time. Calls answer as those of Stream; EACCES where one side does not believe the other, EPROTO where
// what came is not TLS as it should be, EPROTONOSUPPORT where it is no TLS at all. After an error other than EAGAIN nothing more can be sent.
class TlsSession {
public:
    explicit TlsSession(ssl_st* ssl) noexcept : ssl_(ssl) {}
    ~TlsSession();
    TlsSession(const TlsSession&) = delete;
    TlsSession& operator=(const TlsSession&) = delete;

    ssl_st* ssl() const noexcept { return ssl_; }
    // Of the record that is being written: whether another one follows at once, so that the kernel may send both in one packet.
    bool more_follows() const noexcept { return more_follows_; }
    // 0 once the handshake is over. Each side knows then who the other is, but the client not yet if it is believed.
    int handshake();
    ssize_t receive(iovec* parts, std::size_t count);
    ssize_t send(iovec* parts, std::size_t count);

    bool pending() const noexcept { return more_; }
    bool receiving_sends() const noexcept { return sends_; }
    bool holds_input() const noexcept;
    const std::string& trouble() const noexcept { return trouble_; }

    // The common name of the other side's certificate; empty where it has none or several.
    std::string peer_name() const;
    // Whether the kernel encrypts what is sent, and decrypts what comes.
    bool kernel_sends() const noexcept;
    bool kernel_receives() const noexcept;

private:
    static constexpr std::size_t record_nbytes = 16384;

    ssize_t fail(int result);

    ssl_st* ssl_;
    bool more_ = true;    // whatever came with the handshake is here
    bool sends_ = false;  // what waits is to be sent first
    bool more_follows_ = false;
    std::string trouble_;
    std::array<char, record_nbytes> gathered_;
};

}  // namespace farpool
