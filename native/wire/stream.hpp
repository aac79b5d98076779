// A connected socket whose calls never block, plain or with TLS: both ends of the wire read from it and write to it.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <string>

namespace farpool {

class TlsSession;

// A non-blocking stream. Calls return like calls of a socket with MSG_DONTWAIT: bytes moved, 0 if the other side has ended the
// stream, or -1 and errno, EAGAIN if no bytes can be moved now. A plain stream adds nothing to the system call.
class Stream {
public:
    Stream() noexcept;
    // A stream that owns the descriptor, which must be non-blocking with TLS.
    explicit Stream(int fd) noexcept;
    Stream(int fd, std::unique_ptr<TlsSession> tls);
    Stream(Stream&& other) noexcept;
    Stream& operator=(Stream&& other) noexcept;
    ~Stream();

    int fd() const noexcept { return fd_; }
    TlsSession* tls() const noexcept { return tls_.get(); }

    ssize_t receive(void* into, std::size_t nbytes);
    // Receives into the parts in their order.
    ssize_t receive(iovec* parts, std::size_t count);
    // Sends the parts in their order. After EAGAIN, the next call must begin with the same bytes and have at least as many,
    // because they may be encrypted already.
    ssize_t send(iovec* parts, std::size_t count);

    // True if files can be passed: over a UNIX socket without TLS.
    bool passes_files() const noexcept;
    // send(), with a descriptor of the file attached to the first byte.
    ssize_t send_with_file(iovec* parts, std::size_t count, int file);
    // receive(), and stores a descriptor that came with the bytes in `file`, owned by the caller; else does not change `file`.
    ssize_t receive_with_file(void* into, std::size_t nbytes, int& file);

    // True if bytes may already have been read from the socket, so that no event of the socket may follow.
    bool pending() const noexcept;
    // True if a call to `receive` that returned EAGAIN waits for the socket to be writable, not readable.
    bool receiving_sends() const noexcept;
    // True if bytes of any kind can be read; reads nothing.
    bool has_input() const noexcept;
    // The text of the error in a call that failed with this errno.
    std::string trouble(int code) const;
    // Closes the stream. Idempotent.
    void close() noexcept;

private:
    int fd_ = -1;
    std::unique_ptr<TlsSession> tls_;
};

}  // namespace farpool
