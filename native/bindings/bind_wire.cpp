// The client's side of the wire: connections, objects in shared memory, the order of nodes for a key.
#include <algorithm>
#include <numeric>
#include <optional>
#include <string_view>

#include "bindings.hpp"
#include "interpreter_exit.hpp"
#include "wire/connection.hpp"
#include "wire/hash.hpp"
#include "wire/object_reader.hpp"
#include "wire/remote_port.hpp"

using farpool::Connection;
using farpool::ObjectReader;
using farpool::Op;
using farpool::Port;
using farpool::RemotePort;
using farpool::ReplyHead;

namespace {

struct Reply {
    int status;
    std::uint64_t generation;
    nb::bytes meta;
    nb::object payload;
    std::size_t nbytes;
};

std::string_view text(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// Lets a signal's handler run, and ends what waits if it raises (KeyboardInterrupt).
void check_signals() {
    const nb::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() != 0) {
        throw farpool::PortFailure(farpool::take_python_error());
    }
}

nb::bytes new_bytes(std::size_t nbytes) {
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes));
    if (made == nullptr) {
        throw nb::python_error();
    }
    return nb::steal<nb::bytes>(made);
}

void* contents(const nb::bytes& bytes) { return PyBytes_AS_STRING(bytes.ptr()); }

// Holds what the caller gave while the request goes out.
class Outgoing {
public:
    Outgoing(int op, const nb::bytes& meta, std::uint64_t generation, std::uint64_t lease, nb::handle payload)
        : request_{static_cast<Op>(op), text(meta), generation, lease, nullptr, 0} {
        if (!payload.is_none()) {
            view_.emplace(payload, PyBUF_C_CONTIGUOUS);
            request_.payload = (*view_)->buf;
            request_.nbytes = static_cast<std::size_t>((*view_)->len);
        }
    }
    const farpool::Request& operator*() const { return request_; }

private:
    farpool::Request request_;
    std::optional<BufferView> view_;
};

// Where the caller wants the payload, if it has a place for it.
class Incoming {
public:
    explicit Incoming(nb::handle into) {
        if (!into.is_none()) {
            view_.emplace(into, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE);
        }
    }
    bool given() const { return view_.has_value(); }
    void* data() const { return (*view_)->buf; }
    std::size_t room() const { return static_cast<std::size_t>((*view_)->len); }

private:
    std::optional<BufferView> view_;
};

Reply finish(Connection& self, const ReplyHead& head, bool taken, double deadline) {
    Reply reply{head.status, head.generation, nb::bytes(head.meta.data(), head.meta.size()), nb::none(), head.nbytes};
    if (!taken && head.nbytes > 0) {
        nb::bytes payload;
        try {
            payload = new_bytes(head.nbytes);
        } catch (...) {
            self.give_up();  // its bytes have nowhere to go
            throw;
        }
        without_lock_if(!self.payload_is_here(), [&] { self.receive_payload(contents(payload), deadline); });
        reply.payload = std::move(payload);
    }
    return reply;
}

// The header, and the payload where the caller has a buffer for it. Without the interpreter lock.
ReplyHead receive_without_lock(Connection& self, double deadline, const Incoming& incoming) {
    ReplyHead head = self.receive_head(deadline);
    if (incoming.given()) {
        if (head.nbytes > incoming.room()) {
            self.drop_payload(deadline);
            farpool::fail_value(self.node() + ": the payload has " + std::to_string(head.nbytes) +
                                " bytes, the buffer " + std::to_string(incoming.room()) + "; give a larger one");
        }
        self.receive_payload(incoming.data(), deadline);
    }
    return head;
}

Reply receive(Connection& self, double deadline, nb::handle into) {
    const Incoming incoming(into);
    ReplyHead head;
    {
        const nb::gil_scoped_release release;
        head = receive_without_lock(self, deadline, incoming);
    }
    return finish(self, head, incoming.given(), deadline);
}

void send(Connection& self, int op, const nb::bytes& meta, double deadline, std::uint64_t generation, std::uint64_t lease,
          nb::handle payload) {
    const Outgoing outgoing(op, meta, generation, lease, payload);
    const nb::gil_scoped_release release;
    self.send(*outgoing, deadline);
}

Reply exchange(Connection& self, int op, const nb::bytes& meta, double deadline, std::uint64_t generation,
               std::uint64_t lease, nb::handle payload, nb::handle into) {
    const Outgoing outgoing(op, meta, generation, lease, payload);
    const Incoming incoming(into);
    ReplyHead head;
    {
        const nb::gil_scoped_release release;
        self.send(*outgoing, deadline);
        head = receive_without_lock(self, deadline, incoming);
    }
    return finish(self, head, incoming.given(), deadline);
}

nb::object get(const ObjectReader& self, const nb::bytes& key) {
    const auto found = self.find(text(key));
    if (!found) {
        return nb::none();
    }
    nb::bytes payload = new_bytes(found->nbytes);
    bool copied = false;
    without_lock_if(found->nbytes > large_bytes, [&] { copied = self.copy(*found, contents(payload)); });
    return copied ? nb::object(nb::make_tuple(std::move(payload), found->generation)) : nb::none();
}

nb::object get_into(const ObjectReader& self, const nb::bytes& key, nb::handle into) {
    const BufferView view(into, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE);
    const auto found = self.find(text(key));
    if (!found) {
        return nb::none();
    }
    const auto room = static_cast<std::size_t>(view->len);
    if (found->nbytes > room) {
        farpool::fail_value("the object has " + std::to_string(found->nbytes) + " bytes, the buffer " +
                            std::to_string(room) + "; give a larger one");
    }
    bool copied = false;
    without_lock_if(found->nbytes > large_bytes, [&] { copied = self.copy(*found, view->buf); });
    return copied ? nb::object(nb::make_tuple(found->nbytes, found->generation)) : nb::none();
}

// The whole data file, read-only; slices of it keep the reader, and so the mapping, alive.
int get_reader_buffer(PyObject* self, Py_buffer* view, int flags) {
    const farpool::Mapping& data = nb::inst_ptr<ObjectReader>(self)->data();
    return PyBuffer_FillInfo(view, self, data.data(), static_cast<Py_ssize_t>(data.nbytes()), 1, flags);
}

PyType_Slot reader_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_reader_buffer)}, {0, nullptr}};

nb::object view(nb::handle_t<ObjectReader> self, std::uint64_t offset, std::uint64_t nbytes) {
    nb::inst_ptr<ObjectReader>(self)->payload(offset, nbytes);
    nb::object whole = nb::steal(PyMemoryView_FromObject(self.ptr()));
    if (!whole.is_valid()) {
        throw nb::python_error();
    }
    return whole[nb::slice(nb::int_(offset), nb::int_(offset + nbytes), nb::none())];
}

// The Python end of a farpool::RemoteEnd: keeps alive what that one points to.
class End {
public:
    End(std::string node, std::uint64_t lease, std::uint64_t nbytes, nb::handle memory, nb::object dial, std::uint32_t tenant,
        std::uint8_t credential, double spin)
        : dial_(std::move(dial)), native_{std::move(node), lease, nbytes, nullptr, {}, {tenant, credential, spin, check_signals}} {
        if (!memory.is_none()) {
            view_.emplace(memory, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE);
            const auto room = static_cast<std::uint64_t>((*view_)->len);
            if (room < farpool::segment_header_nbytes || room - farpool::segment_header_nbytes < nbytes) {
                farpool::fail_value("RemoteEnd: memory has " + std::to_string(room) + " bytes, expected a header of " +
                                    std::to_string(farpool::segment_header_nbytes) + " and a lease of " +
                                    std::to_string(nbytes));
            }
            native_.memory = static_cast<std::byte*>((*view_)->buf);
        }
        native_.dial = [callable = dial_.ptr()] { return call_dial(callable); };
    }
    const farpool::RemoteEnd& native() const { return native_; }

private:
    // Without the interpreter lock, on any thread; takes it for this call.
    static int call_dial(PyObject* dial) {
        int fd = -1;
        farpool::PortError* error = nullptr;  // no owner: nothing may be destroyed by a forced unwind without the lock
        farpool::survive_interpreter_exit([&] {
            const PyGILState_STATE state = PyGILState_Ensure();
            PyObject* result = PyObject_CallNoArgs(dial);
            if (result != nullptr) {
                fd = static_cast<int>(PyLong_AsLong(result));
                Py_DECREF(result);
            }
            if (PyErr_Occurred() != nullptr) {
                error = new farpool::PortError(farpool::take_python_error());
            }
            PyGILState_Release(state);
        });
        if (error != nullptr) {
            farpool::PortError failure = std::move(*error);
            delete error;
            throw farpool::PortFailure(std::move(failure));
        }
        return fd;
    }

    nb::object dial_;
    farpool::RemoteEnd native_;
    std::optional<BufferView> view_;
};

// The ends that it stands on.
struct HeldRemotePort final : RemotePort {
    HeldRemotePort(std::string name, nb::list ends, std::uint64_t stripe, double timeout)
        : RemotePort(std::move(name), natives(ends), stripe, timeout), held(std::move(ends)) {}

    static std::vector<farpool::RemoteEnd> natives(const nb::list& ends) {
        std::vector<farpool::RemoteEnd> found;
        for (nb::handle end : ends) {
            found.push_back(nb::cast<const End&>(end).native());
        }
        return found;
    }

    nb::list held;
};

std::vector<std::size_t> rank(const nb::bytes& key, const std::vector<std::uint64_t>& seeds) {
    std::vector<std::uint64_t> weights(seeds.size());
    std::transform(seeds.begin(), seeds.end(), weights.begin(),
                   [&](std::uint64_t seed) { return farpool::hash64(key.c_str(), key.size(), seed); });
    std::vector<std::size_t> order(seeds.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return weights[a] > weights[b]; });
    return order;
}

}  // namespace

void bind_wire(nb::module_& m) {
    nb::class_<Reply>(m, "Reply", "What a node answered.")
        .def_ro("status", &Reply::status)
        .def_ro("generation", &Reply::generation)
        .def_ro("meta", &Reply::meta)
        .def_ro("payload", &Reply::payload)
        .def_ro("nbytes", &Reply::nbytes);

    nb::class_<Connection>(m, "Connection", "The client's end of an authenticated stream; owns the descriptor.")
        .def(
            "__init__",
            [](Connection* self, int fd, std::string node, std::uint32_t tenant, std::uint8_t credential, double spin) {
                new (self) Connection(fd, std::move(node), {tenant, credential, spin, check_signals});
            },
            nb::arg("fd"), nb::arg("node"), nb::kw_only(), nb::arg("tenant"), nb::arg("credential"), nb::arg("spin"))
        .def_prop_ro("broken", &Connection::broken)
        .def_prop_ro("unanswered", &Connection::unanswered)
        .def("stale", &Connection::stale)
        .def("send", send, nb::arg("op"), nb::arg("meta"), nb::arg("deadline"), nb::kw_only(), nb::arg("generation") = 0,
             nb::arg("lease") = 0, nb::arg("payload") = nb::none())
        .def("receive", receive, nb::arg("deadline"), nb::arg("into") = nb::none())
        .def("exchange", exchange, nb::arg("op"), nb::arg("meta"), nb::arg("deadline"), nb::kw_only(),
             nb::arg("generation") = 0, nb::arg("lease") = 0, nb::arg("payload") = nb::none(), nb::arg("into") = nb::none())
        // Both hold the interpreter's lock all the time, so that neither meets a descriptor that the other has closed.
        .def("shut_down", &Connection::shut_down)
        .def("close", &Connection::close);

    nb::class_<ObjectReader>(m, "ObjectReader", nb::type_slots(reader_slots), "A tenant's objects in shared memory.")
        .def(nb::init<int, int, int, std::string, bool, int>(), nb::arg("index_fd"), nb::arg("data_fd"), nb::arg("visited_fd"),
             nb::arg("node"), nb::kw_only(), nb::arg("writable"), nb::arg("lifeline") = -1)
        .def("get", get, nb::arg("key"))
        .def("get_into", get_into, nb::arg("key"), nb::arg("into"))
        .def("view", view, nb::arg("offset"), nb::arg("nbytes"))
        .def(
            "write",
            [](ObjectReader& self, std::uint64_t offset, nb::handle payload) {
                const BufferView view(payload, PyBUF_C_CONTIGUOUS);
                const auto nbytes = static_cast<std::size_t>(view->len);
                std::uint32_t crc = 0;
                without_lock_if(nbytes > large_bytes, [&] { crc = self.write(offset, view->buf, nbytes); });
                return crc;
            },
            nb::arg("offset"), nb::arg("payload"));

    nb::class_<End>(m, "RemoteEnd", "A lease, and how it is reached.")
        .def(nb::init<std::string, std::uint64_t, std::uint64_t, nb::handle, nb::object, std::uint32_t, std::uint8_t, double>(),
             nb::arg("node"), nb::arg("lease"), nb::arg("nbytes"), nb::kw_only(), nb::arg("memory").none(), nb::arg("dial"),
             nb::arg("tenant"), nb::arg("credential"), nb::arg("spin"));

    nb::class_<HeldRemotePort, Port>(m, "RemotePort", "Reads and writes a tier's space that is striped over nodes.")
        .def(
            "__init__",
            [](HeldRemotePort* self, std::string name, nb::object ends, std::uint64_t stripe, double timeout) {
                new (self) HeldRemotePort(std::move(name), nb::list(ends), stripe, timeout);
            },
            nb::arg("name"), nb::arg("ends"), nb::kw_only(), nb::arg("stripe"), nb::arg("timeout"));

    m.def("rank", rank, nb::arg("key"), nb::arg("seeds"));
}
