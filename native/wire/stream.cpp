#include "wire/stream.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "wire/tls.hpp"

namespace farpool {

Stream::Stream() noexcept = default;

Stream::Stream(int fd) noexcept : fd_(fd) {}

Stream::Stream(int fd, std::unique_ptr<TlsSession> tls) : fd_(fd), tls_(std::move(tls)) {}

Stream::Stream(Stream&& other) noexcept : fd_(std::exchange(other.fd_, -1)), tls_(std::move(other.tls_)) {}

Stream& Stream::operator=(Stream&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(tls_, other.tls_);
    return *this;
}

Stream::~Stream() { close(); }

void Stream::close() noexcept {
    tls_.reset();
    if (fd_ >= 0) {
        ::close(std::exchange(fd_, -1));
    }
}

ssize_t Stream::receive(void* into, std::size_t nbytes) {
    if (tls_ == nullptr) {
        return recv(fd_, into, nbytes, MSG_DONTWAIT);
    }
    iovec part{into, nbytes};
    return tls_->receive(&part, 1);
}

ssize_t Stream::receive(iovec* parts, std::size_t count) {
    if (tls_ != nullptr) {
        return tls_->receive(parts, count);
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    return recvmsg(fd_, &message, MSG_DONTWAIT);
}

ssize_t Stream::send(iovec* parts, std::size_t count) {
    if (tls_ != nullptr) {
        return tls_->send(parts, count);
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    return sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

bool Stream::passes_files() const noexcept {
    int domain = 0;
    socklen_t nbytes = sizeof domain;
    return tls_ == nullptr && getsockopt(fd_, SOL_SOCKET, SO_DOMAIN, &domain, &nbytes) == 0 && domain == AF_UNIX;
}

ssize_t Stream::send_with_file(iovec* parts, std::size_t count, int file) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof file)] = {};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const passed = CMSG_FIRSTHDR(&message);
    passed->cmsg_level = SOL_SOCKET;
    passed->cmsg_type = SCM_RIGHTS;
    passed->cmsg_len = CMSG_LEN(sizeof file);
    std::memcpy(CMSG_DATA(passed), &file, sizeof file);
    return sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t Stream::receive_with_file(void* into, std::size_t nbytes, int& file) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof file)] = {};
    iovec part{into, nbytes};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = CMSG_LEN(sizeof file);  // room for one: the system closes further descriptors
    const ssize_t got = recvmsg(fd_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    const cmsghdr* const passed = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
    if (passed != nullptr && passed->cmsg_level == SOL_SOCKET && passed->cmsg_type == SCM_RIGHTS) {
        if (file >= 0) {
            ::close(file);
        }
        std::memcpy(&file, CMSG_DATA(passed), sizeof file);
    }
    return got;
}

bool Stream::pending() const noexcept { return tls_ != nullptr && tls_->pending(); }

bool Stream::receiving_sends() const noexcept { return tls_ != nullptr && tls_->receiving_sends(); }

bool Stream::has_input() const noexcept {
    char byte = 0;
    return (tls_ != nullptr && tls_->has_input()) || recv(fd_, &byte, 1, MSG_DONTWAIT | MSG_PEEK) > 0;
}

std::string Stream::trouble(int code) const {
    return tls_ != nullptr && !tls_->trouble().empty() ? tls_->trouble() : std::strerror(code);
}

}  // namespace farpool
