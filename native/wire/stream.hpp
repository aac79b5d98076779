// A connected socket that never lets wait, plain or with TLS over it: what both ends of the wire read from and write to.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <string>

namespace farpool {

class TlsSession;

// Calls answer as those of a socket do with MSG_DONTWAIT: the bytes that were moved, 0 where the other side has ended the stream,
// or -1 with the reason in errno, EAGAIN where nothing can be moved now. A plain stream adds nothing to the system call.
class Stream {
public:
    Stream() noexcept;
    // Owns the descriptor. With TLS it has to be non-blocking.
    explicit Stream(int fd) noexcept;
    Stream(int fd, std::unique_ptr<TlsSession> tls);
    Stream(Stream&& other) noexcept;
    Stream& operator=(Stream&& other) noexcept;
    ~Stream();

    int fd() const noexcept { return fd_; }
    TlsSession* tls() const noexcept { return tls_.get(); }

    ssize_t receive(void* into, std::size_t nbytes);
    // Fills the parts in their order.
    ssize_t receive(iovec* parts, std::size_t count);
    // After EAGAIN, what is sent next begins with the same bytes and has at least as many: they may be encrypted already.
    ssize_t send(iovec* parts, std::size_t count);

    // Whether files can be passed: over a UNIX socket without TLS.
    bool passes_files() const noexcept;
    // As above; the first byte brings another descriptor of the file with it.
    ssize_t send_with_file(iovec* parts, std::size_t count, int file);
    // As above; a file that came with these bytes is in `file`, the caller's, which is left alone where none did.
    ssize_t receive_with_file(void* into, std::size_t nbytes, int& file);

    // Whether bytes may be here that have left the socket, so that waiting for the socket could be for nothing.
    bool pending() const noexcept;
    // Whether a call to `receive` that said EAGAIN waits for the socket to take bytes, not to have some.
    bool receiving_sends() const noexcept;
    // Whether there is anything to read, of whatever kind; reads nothing.
    bool has_input() const noexcept;
    // What went wrong, for a call that failed with this errno.
    std::string trouble(int code) const;
    // Idempotent.
    void close() noexcept;

private:
    int fd_ = -1;
    std::unique_ptr<TlsSession> tls_;
};

}  // namespace farpool
