// The client's side of the wire: connections and objects in shared memory.
#include <nanobind/stl/shared_ptr.h>

#include <cstring>
#include <deque>
#include <optional>
#include <string_view>

#include "bindings/bindings.hpp"
#include "bindings/interpreter_exit.hpp"
#include "bindings/slices.hpp"
#include "wire/answer_times.hpp"
#include "wire/connection.hpp"
#include "wire/exchange.hpp"
#include "wire/looked_up.hpp"
#include "wire/object_reader.hpp"
#include "wire/remote_port.hpp"
#include "wire/stream.hpp"

using farpool::AnswerTimes;
using farpool::Connection;
using farpool::ErrorKind;
using farpool::ObjectReader;

using farpool::Op;
using farpool::Port;
using farpool::RemotePort;
using farpool::ReplyHead;
using farpool::TenantEpoch;

namespace {

struct Reply {
    int status;
    std::uint64_t serial;
    nb::bytes meta;
    nb::object payload;
    std::size_t nbytes;
};

std::string_view text(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// Lets a signal's handler run, and ends what waits if it raises (KeyboardInterrupt).
void check_signals() {
    const farpool::TakenLock lock;
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

// RAII views of the memory of a buffer, or of a tuple of buffers and `Slices` one after the other. The caller keeps Slices
// alive.
class Pieces {
public:
    Pieces(nb::handle given, int flags) {
        if (PyTuple_Check(given.ptr()) == 0) {
            view_.emplace(given, flags);
            part_ = part_of(*view_);
            nbytes_ = part_.iov_len;
            return;
        }
        several_.emplace();
        for (const nb::handle one : nb::borrow<nb::tuple>(given)) {
            if (nb::isinstance<Slices>(one) && nb::inst_ready(one)) {
                const auto& slices = *nb::inst_ptr<Slices>(one);
                if (slices.readonly() && (flags & PyBUF_WRITABLE) != 0) {
                    farpool::fail_value("the buffer is read-only; give memory that can be written");
                }
                several_->parts.insert(several_->parts.end(), slices.parts().begin(), slices.parts().end());
                nbytes_ += slices.nbytes();
            } else {
                several_->parts.push_back(part_of(several_->views.emplace_back(one, flags)));
                nbytes_ += several_->parts.back().iov_len;
            }
        }
    }
    farpool::Parts parts() const { return several_ ? farpool::Parts(several_->parts) : farpool::Parts(&part_, 1); }
    std::size_t nbytes() const { return nbytes_; }

private:
    struct Several {
        std::deque<BufferView> views;
        std::vector<iovec> parts;
    };
    static iovec part_of(const BufferView& view) { return {view->buf, static_cast<std::size_t>(view->len)}; }

    // A single buffer, the usual case, needs no memory in addition to this object.
    std::optional<BufferView> view_;
    iovec part_{};
    std::optional<Several> several_;
    std::size_t nbytes_ = 0;
};

// The requests of a call, with the Python objects that its caller gave for them, which are kept alive until the call ends.
class Asks {
public:
    // Takes a list of tuples: connection, operation, meta, serial, payload or None, buffer for the reply's payload or None.
    explicit Asks(const nb::list& given) {
        asks_.reserve(given.size());
        targets_.reserve(given.size());
        for (const nb::handle one : given) {
            const nb::tuple fields = nb::cast<nb::tuple>(one);
            add(nb::cast<Connection&>(fields[0]), nb::cast<int>(fields[1]), nb::cast<nb::bytes>(fields[2]),
                nb::cast<std::uint64_t>(fields[3]), 0, fields[4], fields[5]);
        }
    }
    Asks(Connection& connection, int op, const nb::bytes& meta, std::uint64_t serial, std::uint64_t lease, nb::handle payload,
         nb::handle into) {
        add(connection, op, meta, serial, lease, payload, into);
    }

    void exchange(double deadline) {
        made_.resize(asks_.size());
        made_parts_.resize(asks_.size());
        const farpool::ReleasedLock release;
        farpool::exchange(asks_, [this](std::size_t ask, const ReplyHead& head) { return place(ask, head); }, deadline);
    }

    std::size_t size() const { return asks_.size(); }
    const std::optional<farpool::PortError>& error(std::size_t number) const { return asks_[number].error; }
    Reply reply(std::size_t number) {
        const ReplyHead& head = asks_[number].head;
        const bool allocated = made_[number] != nullptr;
        nb::object payload = allocated ? nb::steal<nb::object>(std::exchange(made_[number], nullptr)) : nb::none();
        return {head.status, head.serial, nb::bytes(head.meta.data(), head.meta.size()), std::move(payload), head.nbytes};
    }

    ~Asks() {
        for (PyObject* made : made_) {
            Py_XDECREF(made);
        }
    }
    Asks(const Asks&) = delete;
    Asks& operator=(const Asks&) = delete;

private:
    void add(Connection& connection, int op, const nb::bytes& meta, std::uint64_t serial, std::uint64_t lease,
             nb::handle payload, nb::handle into) {
        farpool::Request request{static_cast<Op>(op), text(meta), serial, lease, {}, 0};
        farpool::require_meta(connection.node(), request.meta.size());
        if (!payload.is_none()) {
            // Copies of one object follow each other: they are told to be of the same memory by having the same pieces.
            if (payload.ptr() != last_payload_) {
                pieces_.emplace_back(payload, PyBUF_C_CONTIGUOUS);
                last_payload_ = payload.ptr();
                last_pieces_ = &pieces_.back();
            }
            request.payload = last_pieces_->parts();
            request.nbytes = last_pieces_->nbytes();
        }
        targets_.push_back(into.is_none() ? nullptr : &pieces_.emplace_back(into, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE));
        asks_.push_back({&connection, request});
    }

    // Memory for the payload of a reply; called without the interpreter lock.
    farpool::Parts place(std::size_t number, const ReplyHead& head) {
        if (const Pieces* target = targets_[number]; target != nullptr) {
            if (head.nbytes > target->nbytes()) {
                farpool::fail_value(asks_[number].connection->node() + ": the payload has " + std::to_string(head.nbytes) +
                                    " bytes, the buffer " + std::to_string(target->nbytes()) + "; give a larger one");
            }
            return target->parts();
        }
        const farpool::TakenLock lock;
        PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(head.nbytes));
        if (made == nullptr) {
            throw farpool::PortFailure(farpool::take_python_error());
        }
        made_[number] = made;
        made_parts_[number] = {PyBytes_AS_STRING(made), head.nbytes};
        return {&made_parts_[number], 1};
    }

    std::vector<farpool::Ask> asks_;
    std::deque<Pieces> pieces_;
    const Pieces* last_pieces_ = nullptr;
    PyObject* last_payload_ = nullptr;
    std::vector<const Pieces*> targets_;
    std::vector<PyObject*> made_;
    std::vector<iovec> made_parts_;
};

// A request's reply, or the error that is in its place.
nb::object answer(Asks& asks, std::size_t number) {
    if (const auto& error = asks.error(number)) {
        return nb::steal<nb::object>(farpool::to_python(*error));
    }
    return nb::cast(asks.reply(number));
}

nb::list exchange(const nb::list& given, double deadline) {
    Asks asks(given);
    asks.exchange(deadline);
    nb::list answers;
    for (std::size_t number = 0; number < asks.size(); ++number) {
        answers.append(answer(asks, number));
    }
    return answers;
}

Reply exchange_one(Connection& self, int op, const nb::bytes& meta, double deadline, std::uint64_t serial, std::uint64_t lease,
                   nb::handle payload, nb::handle into) {
    Asks asks(self, op, meta, serial, lease, payload, into);
    asks.exchange(deadline);
    if (const auto& error = asks.error(0)) {
        throw farpool::PortFailure(*error);
    }
    return asks.reply(0);
}

// A program's connections to one node: idle ones, and lent ones, which end when the pool is closed. Guarded by the interpreter
// lock, with which it is called.
class ConnectionPool {
public:
    // Takes an idle connection; None where there is none.
    nb::object take() {
        while (!idle_.empty()) {
            nb::object found = std::move(idle_.back());
            idle_.pop_back();
            Connection& connection = nb::cast<Connection&>(found);
            if (!connection.stale()) {
                lent_.push_back(found);
                return found;
            }
            connection.close();
        }
        return nb::none();
    }

    // Counts a new connection among those that are lent.
    nb::object lend(nb::object connection) {
        auto& lent = nb::cast<Connection&>(connection);
        lent.measure(times_);
        if (closed_) {
            lent.shut_down();
        }
        lent_.push_back(connection);
        return connection;
    }

    // Takes a lent connection back, whatever state it is in.
    void give(const nb::object& lent) {
        put_back(lent);
        tell_if_late();
    }

    // Sends one request over an idle connection and returns its reply, or the error in its place; None, and sends nothing, if
    // there is no idle connection.
    nb::object ask(int op, const nb::bytes& meta, std::uint64_t serial, nb::handle payload, nb::handle into, double deadline) {
        const nb::object lent = take();
        if (lent.is_none()) {
            return nb::none();
        }
        nb::object answered = ask_over(lent, op, meta, serial, payload, into, deadline);
        tell_if_late();
        return answered;
    }

    std::shared_ptr<AnswerTimes> times() const { return times_; }
    void on_late(nb::object callback) { on_late_ = std::move(callback); }

    void close() {
        closed_ = true;
        for (const nb::object& one : idle_) {
            nb::cast<Connection&>(one).close();
        }
        idle_.clear();
        for (const nb::object& one : lent_) {
            nb::cast<Connection&>(one).shut_down();
        }
    }

private:
    struct Returned {
        ConnectionPool& pool;
        const nb::object& lent;
        ~Returned() { pool.put_back(lent); }
    };

    nb::object ask_over(const nb::object& lent, int op, const nb::bytes& meta, std::uint64_t serial, nb::handle payload,
                        nb::handle into, double deadline) {
        const Returned returned{*this, lent};
        Asks asks(nb::cast<Connection&>(lent), op, meta, serial, 0, payload, into);
        asks.exchange(deadline);
        return answer(asks, 0);
    }

    void put_back(const nb::object& lent) {
        std::erase_if(lent_, [&](const nb::object& one) { return one.is(lent); });
        Connection& connection = nb::cast<Connection&>(lent);
        if (closed_ || connection.broken() || connection.unanswered() > 0) {
            connection.close();
        } else {
            idle_.push_back(lent);
        }
    }

    void tell_if_late() {
        if (!times_->late() || closed_ || !on_late_.is_valid()) {
            return;
        }
        if (const double seconds = times_->take_late(); seconds > 0) {
            try {
                on_late_(seconds);
            } catch (nb::python_error& error) {
                if (!error.matches(PyExc_Exception)) {
                    throw;  // KeyboardInterrupt
                }
                error.discard_as_unraisable("ConnectionPool.on_late");  // the request itself has its answer
            }
        }
    }

    const std::shared_ptr<AnswerTimes> times_ = std::make_shared<AnswerTimes>();
    nb::object on_late_;
    std::vector<nb::object> idle_;
    std::vector<nb::object> lent_;
    bool closed_ = false;
};

nb::object get(const ObjectReader& self, const nb::bytes& key) {
    const auto found = self.find(text(key));
    if (!found) {
        return nb::none();
    }
    nb::bytes payload = new_bytes(found->nbytes);
    bool copied = false;
    const iovec whole{contents(payload), found->nbytes};
    without_lock_if(found->nbytes > large_bytes, [&] { copied = self.copy(*found, {&whole, 1}); });
    return copied ? nb::object(nb::make_tuple(std::move(payload), found->serial)) : nb::none();
}

nb::object get_into(const ObjectReader& self, const nb::bytes& key, nb::handle into) {
    const Pieces target(into, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE);
    const auto found = self.find(text(key));
    if (!found) {
        return nb::none();
    }
    if (found->nbytes > target.nbytes()) {
        farpool::fail_value("the object has " + std::to_string(found->nbytes) + " bytes, the buffer " +
                            std::to_string(target.nbytes()) + "; give a larger one");
    }
    bool copied = false;
    without_lock_if(found->nbytes > large_bytes, [&] { copied = self.copy(*found, target.parts()); });
    return copied ? nb::object(nb::make_tuple(found->nbytes, found->serial)) : nb::none();
}

// Copies the values of many keys into as many buffers. For each its size, None where the node has to be asked, or an error.
nb::list get_many_into(const ObjectReader& self, const nb::list& keys, const nb::list& into, double deadline) {
    if (keys.size() != into.size()) {
        farpool::fail_value(std::to_string(keys.size()) + " keys and " + std::to_string(into.size()) +
                            " buffers, expected as many");
    }
    using Wanted = ObjectReader::Wanted;
    std::deque<Pieces> targets;
    std::vector<Wanted> wanted;
    wanted.reserve(keys.size());
    for (std::size_t number = 0; number < keys.size(); ++number) {
        const Pieces& target = targets.emplace_back(into[number], PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE);
        wanted.push_back({key_at(keys, number), target.parts(), target.nbytes()});
    }
    {
        const nb::gil_scoped_release release;
        self.copy_all(wanted, deadline);
    }
    const auto error = [](ErrorKind kind, std::string text) {
        return nb::steal<nb::object>(farpool::to_python({kind, std::move(text), {}, 0, nullptr}));
    };
    nb::list outcomes;
    for (const Wanted& one : wanted) {
        switch (one.outcome) {
            case Wanted::Outcome::copied:
                outcomes.append(one.nbytes);
                break;
            case Wanted::Outcome::missing:
                outcomes.append(nb::none());
                break;
            case Wanted::Outcome::too_small:
                outcomes.append(error(ErrorKind::value, "the object has " + std::to_string(one.nbytes) + " bytes, the buffer " +
                                                            std::to_string(one.room) + "; give a larger one"));
                break;
            case Wanted::Outcome::late:
                outcomes.append(error(ErrorKind::node_timeout, "the time of this call was over before its turn came"));
                break;
        }
    }
    return outcomes;
}

// Returns the size of each key's value, None where it is missing, and the numbers of the missing keys.
nb::tuple lookup(const ObjectReader& self, const nb::list& keys, bool visit) {
    const bool serves = self.in_service();
    nb::list sizes;
    nb::list missing;
    for (std::size_t number = 0; number < keys.size(); ++number) {
        const std::string_view key = key_at(keys, number);
        if (const auto nbytes = serves ? self.size_of(key, visit) : std::nullopt) {
            sizes.append(*nbytes);
        } else {
            sizes.append(nb::none());
            missing.append(number);
        }
    }
    return nb::make_tuple(std::move(sizes), std::move(missing));
}

// Exports the whole data file as a read-only buffer; slices of it keep the reader, and so the mapping, alive.
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

// A farpool::RemoteEnd with the Python objects that it points to, which it keeps alive.
class End {
public:
    End(std::string node, std::uint64_t lease, std::uint64_t nbytes, nb::handle memory, nb::object dial, std::uint32_t tenant,
        std::uint8_t credential, double spin)
        : dial_(std::move(dial)),
          native_{std::move(node), lease, nbytes, nullptr, {}, {tenant, credential, spin, check_signals, false, nullptr}} {
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
    // Calls `dial`. Called without the interpreter lock, on any thread; takes the lock for this call.
    static farpool::Stream call_dial(PyObject* dial) {
        farpool::Stream stream;
        farpool::PortError* error = nullptr;  // no owner: nothing may be destroyed by a forced unwind without the lock
        farpool::survive_interpreter_exit([&] {
            const PyGILState_STATE state = PyGILState_Ensure();
            PyObject* result = PyObject_CallNoArgs(dial);
            if (result != nullptr) {
                try {
                    stream = taken_stream(result);
                } catch (nb::python_error& failure) {
                    failure.restore();
                } catch (const std::exception& failure) {
                    PyErr_SetString(PyExc_RuntimeError, failure.what());
                }
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
        return stream;
    }

    nb::object dial_;
    farpool::RemoteEnd native_;
    std::optional<BufferView> view_;
};

// A RemotePort with its end, which it keeps alive.
struct OwningRemotePort final : RemotePort {
    OwningRemotePort(std::string name, nb::object end, double timeout)
        : RemotePort(std::move(name), nb::cast<const End&>(end).native(), timeout), reference(std::move(end)) {}

    nb::object reference;
};

// Keys as bytes; empty where one of them is not a valid key.
std::optional<nb::list> as_keys(const nb::list& given) {
    nb::list keys;
    for (const nb::handle one : given) {
        nb::object key = nb::borrow(one);
        if (PyUnicode_Check(one.ptr()) != 0) {
            Py_ssize_t nbytes = 0;
            const char* const utf8 = PyUnicode_AsUTF8AndSize(one.ptr(), &nbytes);
            if (utf8 == nullptr) {
                PyErr_Clear();
                return std::nullopt;
            }
            key = nb::bytes(utf8, static_cast<std::size_t>(nbytes));
        }
        if (PyBytes_Check(key.ptr()) == 0 || PyBytes_GET_SIZE(key.ptr()) == 0 ||
            PyBytes_GET_SIZE(key.ptr()) > static_cast<Py_ssize_t>(farpool::largest_key)) {
            return std::nullopt;
        }
        keys.append(std::move(key));
    }
    return keys;
}

// The fewest lookup requests that hold the keys at these places: the arguments of each, with its places.
nb::list lookup_requests(const nb::list& keys, const nb::list& places, bool use) {
    constexpr std::size_t most_keys = 4096;  // the reply has 8 bytes for each, and some more
    constexpr std::size_t most_bytes = 60'000;
    nb::list requests;
    std::string page;
    std::size_t begin = 0;
    const auto end_page = [&](std::size_t end) {
        const std::uint32_t head[2] = {use ? 1u : 0u, static_cast<std::uint32_t>(end - begin)};
        std::memcpy(page.data(), head, sizeof head);
        nb::object own = nb::steal(PyList_GetSlice(places.ptr(), static_cast<Py_ssize_t>(begin), static_cast<Py_ssize_t>(end)));
        if (!own.is_valid()) {
            throw nb::python_error();
        }
        requests.append(nb::make_tuple(nb::bytes(page.data(), page.size()), std::move(own)));
        begin = end;
    };
    for (std::size_t number = 0; number < places.size(); ++number) {
        const std::string_view key = key_at(keys, nb::cast<std::size_t>(places[number]));
        if (number > begin && (number - begin == most_keys || page.size() + key.size() > most_bytes)) {
            end_page(number);
        }
        if (number == begin) {
            page.assign(2 * sizeof(std::uint32_t), '\0');
        }
        const auto nbytes = static_cast<std::uint16_t>(key.size());
        page.append(reinterpret_cast<const char*>(&nbytes), sizeof nbytes);
        page.append(key);
    }
    if (begin < places.size()) {
        end_page(places.size());
    }
    return requests;
}

// Enters the sizes from a node's answer to a lookup; returns the places that are still without a size.
nb::list looked_up(const nb::bytes& meta, const nb::list& places, nb::list& sizes, const std::string& node) {
    const farpool::LookupReply reply(text(meta), places.size());
    if (!reply.whole()) {
        farpool::fail_node(farpool::ErrorKind::protocol, node,
                           "the answer to a lookup of " + std::to_string(places.size()) + " keys is one to another request");
    }
    nb::list missing;
    for (std::size_t number = 0; number < places.size(); ++number) {
        if (const auto nbytes = reply.nbytes_of(number)) {
            sizes[nb::cast<std::size_t>(places[number])] = *nbytes;
        } else {
            missing.append(places[number]);
        }
    }
    return missing;
}

}  // namespace

void bind_wire(nb::module_& m) {
    nb::class_<Reply>(
        m, "Reply",
        R"(Answer of a node to a request. `payload` is None where there is none, or where it went into the caller's buffer; `nbytes`
is its length in each case.)")
        .def_ro("status", &Reply::status)
        .def_ro("serial", &Reply::serial)
        .def_ro("meta", &Reply::meta)
        .def_ro("payload", &Reply::payload, nb::sig("def payload(self) -> bytes | None"))
        .def_ro("nbytes", &Reply::nbytes);

    nb::class_<TenantEpoch>(m, "TenantEpoch", "The highest epoch of a tenant that a program knows; thread-safe.")
        .def(nb::init<>())
        .def_prop_ro("value", &TenantEpoch::get)
        .def("meet", &TenantEpoch::meet, nb::arg("value"), "Raise it to this value if that is higher.");

    nb::class_<Connection>(
        m, "Connection", R"(The client's end of an authenticated stream (docs/wire.md). Owns `fd`. Used by one thread at a time.

Deadlines are seconds of time.monotonic(). Waits spin for `spin` seconds before they block. Raises NodeTimeoutError at
the deadline, NodeError where the stream breaks, ProtocolError for a bad frame: the connection is then broken and of no
more use. ChecksumError (a payload that does not match its checksum) and ValueError (a payload larger than the buffer)
leave it usable.)")
        .def(
            "__init__",
            [](Connection* self, nb::object fd, std::string node, std::uint32_t tenant, std::uint8_t credential, double spin,
               bool area, std::shared_ptr<TenantEpoch> epoch) {
                new (self) Connection(taken_stream(fd), std::move(node),
                                      {tenant, credential, spin, check_signals, area, std::move(epoch)});
            },
            nb::arg("fd"), nb::arg("node"), nb::kw_only(), nb::arg("tenant"), nb::arg("credential"), nb::arg("spin"),
            nb::arg("area") = false, nb::arg("epoch").none() = nb::none(),
            nb::sig("def __init__(self, fd: int | Stream, node: str, *, tenant: int, credential: int, spin: float, area: bool "
                    "= False, epoch: TenantEpoch | None = None) -> None"),
            R"(Take a stream over. With an `epoch` each request tells it to the node, and each reply may raise it. With `area`, over
the UNIX socket of a node on this host, large payloads are put through memory that it passes.)")
        .def_prop_ro("broken", &Connection::broken)
        .def_prop_ro("unanswered", &Connection::unanswered)
        .def("stale", &Connection::stale,
             "Return True if an idle connection is of no more use, because the node has hung up or sent unrequested bytes.")
        .def("exchange", exchange_one, nb::arg("op"), nb::arg("meta"), nb::arg("deadline"), nb::kw_only(),
             nb::arg("serial") = 0, nb::arg("lease") = 0, nb::arg("payload") = nb::none(), nb::arg("into") = nb::none(),
             "Send a request and receive its reply.")
        // Both hold the interpreter's lock all the time, so that neither meets a descriptor that the other has closed.
        .def("shut_down", &Connection::shut_down, "Make what another thread waits for on this connection fail with NodeError.")
        .def("close", &Connection::close);

    nb::class_<AnswerTimes>(
        m, "AnswerTimes",
        "Times of a node's answers to small requests, and if it has been late for many answers in a row. Thread-safe.")
        .def(nb::init<>())
        .def("add", &AnswerTimes::add, nb::arg("seconds"), nb::arg("now"),
             "Add the time of an answer that came at `now`, by the monotonic clock.")
        .def_prop_ro("seconds", &AnswerTimes::seconds, "Smoothed seconds of an answer; 0.0 before the first.")
        .def_prop_ro("last", &AnswerTimes::last, "Seconds of the last answer.")
        .def(
            "take_late", &AnswerTimes::take_late,
            R"(If the node was late for many answers in a row, return the smallest smoothed time during them and begin to count again;
otherwise return 0.0.)");
    m.attr("LATE_ANSWER_S") = farpool::late_answer_seconds;
    m.attr("LATE_ANSWERS") = farpool::late_answers;

    nb::class_<ConnectionPool>(m, "ConnectionPool",
                               R"(Pool of a program's connections to one node: idle ones and lent ones.

It measures how long the node takes to answer over them.)")
        .def(nb::init<>())
        .def_prop_ro("times", &ConnectionPool::times, "Times of the node's answers.")
        .def(
            "on_late", &ConnectionPool::on_late, nb::arg("callback"),
            nb::sig("def on_late(self, callback: collections.abc.Callable[[float], object]) -> None"),
            R"(Call this after each request for which the node has been late for many answers in a row, with `AnswerTimes.take_late()`. The
callback must not refer to the pool, because the garbage collector does not see this reference.)")
        .def("take", &ConnectionPool::take, nb::sig("def take(self) -> Connection | None"),
             "Lend an idle connection; None if there is none.")
        .def("lend", &ConnectionPool::lend, nb::arg("connection"),
             nb::sig("def lend(self, connection: Connection) -> Connection"),
             "Count a new connection among those that are lent.")
        .def("give", &ConnectionPool::give, nb::arg("connection"), nb::sig("def give(self, connection: Connection) -> None"),
             "Take a connection back, whatever state it is in; a broken one is closed.")
        .def("ask", &ConnectionPool::ask, nb::arg("op"), nb::arg("meta"), nb::arg("serial"), nb::arg("payload").none(),
             nb::arg("into").none(), nb::arg("deadline"),
             nb::sig("def ask(self, op: int, meta: bytes, serial: int, payload: object | None, into: object | None, deadline: "
                     "float) -> Reply | Exception | None"),
             R"(Send one request over an idle connection and receive its reply, as `exchange`; None if no connection is
idle.)")
        .def("close", &ConnectionPool::close, "Close the idle connections, and make waits on the lent ones fail. Idempotent.");

    nb::class_<ObjectReader>(
        m, "ObjectReader", nb::type_slots(reader_slots),
        R"(A tenant's objects in shared memory (docs/segment-file.md). Maps the files; the descriptors stay the caller's.

Thread-safe. ChecksumError means that an object is damaged in the node's memory: no reading it again helps. Supports the
buffer protocol: the whole data file, read-only.)")
        .def(nb::init<int, int, int, std::string, int, std::shared_ptr<TenantEpoch>>(), nb::arg("index_fd"), nb::arg("data_fd"),
             nb::arg("visited_fd"), nb::arg("node"), nb::kw_only(), nb::arg("lifeline") = -1,
             nb::arg("epoch").none() = nb::none(),
             R"(Map the files. With a `lifeline`, a socket to the node, nothing is found any more once that has hung up. With an
`epoch` nothing is found as long as the node's is a lower one; where it is higher it raises `epoch`.)")
        .def(
            "get", get, nb::arg("key"), nb::sig("def get(self, key: bytes) -> tuple[bytes, int] | None"),
            R"(Return an object's payload and serial; None where the node has to be asked (not in memory, expired, changing right
now).)")
        .def("get_into", get_into, nb::arg("key"), nb::arg("into"),
             nb::sig("def get_into(self, key: bytes, into: object) -> tuple[int, int] | None"),
             R"(Read an object; its bytes and serial. ValueError if the buffer is too small; None as with `get`, and then the
buffer's contents are unspecified.)")
        .def(
            "get_many_into", get_many_into, nb::arg("keys"), nb::arg("into"), nb::arg("deadline"),
            nb::sig("def get_many_into(self, keys: list[bytes], into: list[typing.Any], deadline: float) -> list[int | "
                    "Exception | None]"),
            R"(Read many objects into buffers, with a second thread where that pays: bytes of each; None where the node has to be
asked (also for damaged ones), ValueError if its buffer is too small, NodeTimeoutError if its turn did not come before
the deadline, by the monotonic clock. The contents of buffers of the others are unspecified.)")
        .def("expect_copies", &ObjectReader::expect_copies, nb::arg("copies"),
             "Leave the first object met that was put with another number of copies to the node, whose reply says so.")
        .def(
            "lookup", lookup, nb::arg("keys"), nb::kw_only(), nb::arg("visit") = false,
            nb::sig("def lookup(self, keys: list[bytes], *, visit: bool = False) -> tuple[list[int | None], list[int]]"),
            R"(Look up keys: bytes of each value, None where it is not found, and the numbers of those: they may be there, ask the
node. With `visit` the others count as used.)")
        .def("view", view, nb::arg("offset"), nb::arg("nbytes"),
             nb::sig("def view(self, offset: int, nbytes: int) -> memoryview"),
             "Return a read-only view of a range of the data file, without a copy; it keeps the mapping alive.");

    nb::class_<End>(
        m, "RemoteEnd",
        R"(A lease on one node, and how it is reached: `memory` is its mapped file (header included), None where its bytes go over
connections. `dial` returns the descriptor of a new authenticated stream, which is then the caller's.)")
        .def(nb::init<std::string, std::uint64_t, std::uint64_t, nb::handle, nb::object, std::uint32_t, std::uint8_t, double>(),
             nb::arg("node"), nb::arg("lease"), nb::arg("nbytes"), nb::kw_only(), nb::arg("memory").none(), nb::arg("dial"),
             nb::arg("tenant"), nb::arg("credential"), nb::arg("spin"),
             nb::sig("def __init__(self, node: str, lease: int, nbytes: int, *, memory: object | None, dial: "
                     "collections.abc.Callable[[], int | Stream], tenant: int, credential: int, spin: float) -> None"));

    nb::class_<OwningRemotePort, Port>(m, "RemotePort",
                                       R"(Port over memory that one node has lent.

`timeout`: seconds that the node may take for a piece. Raises LeaseLostError, AccessDeniedError, NodeTimeoutError, NodeError,
ChecksumError. Keeps the end alive.)")
        .def(
            "__init__",
            [](OwningRemotePort* self, std::string name, nb::object end, double timeout) {
                new (self) OwningRemotePort(std::move(name), std::move(end), timeout);
            },
            nb::arg("name"), nb::arg("end"), nb::kw_only(), nb::arg("timeout"),
            nb::sig("def __init__(self, name: str, end: RemoteEnd, *, timeout: float) -> None"));

    m.attr("WINDOW") = farpool::window;
    m.attr("WINDOW_BYTES") = farpool::window_nbytes;
    m.def("exchange", exchange, nb::arg("asks"), nb::arg("deadline"),
          nb::sig("def exchange(asks: collections.abc.Sequence[tuple[Connection, int, bytes, int, object | None, object | "
                  "None]], deadline: float) -> list[Reply | Exception]"),
          R"(Send requests to several nodes at the same time and take all replies, in the order of the requests.

Each is a connection, operation, meta, serial, payload and buffer for the reply's payload; both may be tuples of buffers. At most `WINDOW` requests and
`WINDOW_BYTES` of payload are under way on a connection. One payload to several nodes (the same memory) goes out chunk by
chunk to all of them, with one checksum. In the place of a reply is the error of a connection that failed, or of a
payload that is damaged or larger than its buffer. A connection that has not answered by the deadline is broken.)");
    m.def("as_keys", as_keys, nb::arg("keys"), nb::sig("def as_keys(keys: list[str | bytes]) -> list[bytes] | None"),
          "Convert keys to bytes, text as UTF-8; None where one of them cannot be a key.");
    m.def(
        "lookup_requests", lookup_requests, nb::arg("keys"), nb::arg("places"), nb::arg("use"),
        nb::sig("def lookup_requests(keys: list[bytes], places: list[int], use: bool) -> list[tuple[bytes, list[int]]]"),
        R"(Pack lookups for the keys at these places (docs/wire.md), into as few requests as have room, each with its places; with
`use` each object that is found counts as used.)");
    m.def("looked_up", looked_up, nb::arg("meta"), nb::arg("places"), nb::arg("sizes"), nb::arg("node"),
          nb::sig("def looked_up(meta: bytes, places: list[int], sizes: list[int | None], node: str) -> list[int]"),
          R"(Enter a node's answer to one of `lookup_requests` into `sizes`; returns the places of keys that it does not have.

ProtocolError if it is no answer for so many keys.)");
}
