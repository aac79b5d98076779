// Connected sockets with TLS, for the Python that does the handshake and serves control connections.
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <vector>

#include "bindings/bindings.hpp"
#include "wire/stream.hpp"
#include "wire/tls.hpp"

using farpool::Stream;
using farpool::TlsContext;

namespace {

[[noreturn]] void raise_os_error(int code, const std::string& text) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(code, text).ptr());
    throw nb::python_error();
}

std::string text(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// Goes on with the handshake and returns the poll events that it waits for; 0 once it is over.
int handshake(Stream& self) {
    if (self.tls() == nullptr) {
        return 0;
    }
    int result = 0;
    int code = 0;
    {
        const nb::gil_scoped_release release;
        result = self.tls()->handshake();
        code = errno;
    }
    if (result == 0) {
        return 0;
    }
    if (code != EAGAIN && code != EINTR) {
        raise_os_error(code, self.trouble(code));
    }
    return self.receiving_sends() ? POLLOUT : POLLIN;
}

nb::object receive_some(Stream& self, std::size_t nbytes) {
    std::vector<char> into(nbytes);
    const ssize_t got = self.receive(into.data(), nbytes);
    const int code = errno;
    if (got >= 0) {
        return nb::bytes(into.data(), static_cast<std::size_t>(got));
    }
    if (code != EAGAIN && code != EINTR) {
        raise_os_error(code, self.trouble(code));
    }
    return nb::none();
}

std::size_t send_some(Stream& self, const nb::bytes& data, std::size_t begin) {
    if (begin > data.size()) {
        farpool::fail_value("begin is " + std::to_string(begin) + ", behind the end of " + std::to_string(data.size()) +
                            " bytes");
    }
    iovec part{const_cast<char*>(data.c_str()) + begin, data.size() - begin};
    const ssize_t sent = self.send(&part, 1);
    const int code = errno;
    if (sent < 0 && code != EAGAIN && code != EINTR) {
        raise_os_error(code, self.trouble(code));
    }
    return sent < 0 ? 0 : static_cast<std::size_t>(sent);
}

}  // namespace

Stream taken_stream(nb::handle stream) {
    if (nb::isinstance<Stream>(stream)) {
        return std::move(nb::cast<Stream&>(stream));
    }
    const long fd = PyLong_AsLong(stream.ptr());
    if (fd == -1 && PyErr_Occurred() != nullptr) {
        throw nb::python_error();
    }
    return Stream(static_cast<int>(fd));
}

void bind_stream(nb::module_& m) {
    nb::class_<Stream>(
        m, "Stream", R"(A connected, non-blocking socket, plain or with TLS. Owns the descriptor. Used by one thread at a time.

Raises OSError: PermissionError if one side does not accept the other's certificate, EPROTO if the received bytes are not valid
TLS. After another object has taken the stream over, this one has no descriptor.)")
        .def(nb::init<int>(), nb::arg("fd"))
        .def("fileno", &Stream::fd, "Return the descriptor; -1 once it was closed or taken over.")
        .def("handshake", handshake,
             "Continue the TLS handshake; returns 0 once it is complete, else the event to wait for, POLLIN or POLLOUT.")
        .def("receive", receive_some, nb::arg("nbytes"), nb::sig("def receive(self, nbytes: int) -> bytes | None"),
             "Receive at most `nbytes` bytes: empty at the end of the stream, None if no bytes are available now.")
        .def("send", send_some, nb::arg("data"), nb::arg("begin") = 0,
             R"(Send bytes from `begin` on; returns how many were sent. 0 if none can be sent now: then send the same bytes
again.)")
        .def_prop_ro("receiving_sends", &Stream::receiving_sends, "True if a `receive` without result waits for room to send.")
        .def_prop_ro(
            "peer_name", [](const Stream& self) { return self.tls() == nullptr ? std::string() : self.tls()->peer_name(); },
            "The common name of the other side's certificate; empty without one.")
        .def_prop_ro(
            "in_kernel",
            [](const Stream& self) {
                const bool is_tls = self.tls() != nullptr;
                return nb::make_tuple(is_tls && self.tls()->kernel_sends(), is_tls && self.tls()->kernel_receives());
            },
            nb::sig("def in_kernel(self) -> tuple[bool, bool]"),
            "Two flags: True if the kernel encrypts sent bytes, and True if it decrypts received bytes.")
        // Wakes threads that wait for the stream, on both sides.
        .def(
            "shut_down", [](const Stream& self, bool writing) { shutdown(self.fd(), writing ? SHUT_WR : SHUT_RDWR); },
            nb::kw_only(), nb::arg("writing") = false,
            "Shut down both directions, or only this side's sending; threads that wait at either end wake up.")
        .def("close", &Stream::close);

    nb::class_<TlsContext>(m, "TlsContext", R"(A certificate with its private key, and the trusted authorities; all in PEM.

Raises ValueError with the reason if they cannot be used.)")
        .def(
            "__init__",
            [](TlsContext* self, const nb::bytes& certificate, const nb::bytes& key, const nb::bytes& authority) {
                new (self) TlsContext(text(certificate), text(key), text(authority));
            },
            nb::arg("certificate"), nb::arg("key"), nb::arg("authority"))
        .def(
            "connect",
            [](const TlsContext& self, int fd, const std::string& host) { return Stream(fd, self.connect(fd, host)); },
            nb::arg("fd"), nb::arg("host"),
            "Make the client's end of TLS over a connected, non-blocking socket; the node's certificate has to be of this "
            "host.")
        .def(
            "accept", [](const TlsContext& self, int fd) { return Stream(fd, self.accept(fd)); }, nb::arg("fd"),
            "Make the node's end of TLS; the client has to show a certificate.");

    m.attr("tls_available") = farpool::tls_available();
}
