// Ports: each holds the object it stands on, and shows it to the garbage collector (a tier may hold its own port).
#include "bindings/bindings.hpp"
#include "bindings/interpreter_exit.hpp"
#include "bindings/python_port.hpp"
#include "core/copies_port.hpp"
#include "core/file_port.hpp"
#include "core/memory_port.hpp"
#include "core/replaceable_port.hpp"
#include "core/striped_port.hpp"
#include "core/throttled_port.hpp"
#include "core/verified_port.hpp"

using farpool::CopiesPort;
using farpool::FilePort;
using farpool::Memory;
using farpool::MemoryPort;
using farpool::Port;
using farpool::PythonPort;
using farpool::ReleasedLock;
using farpool::ReplaceablePort;
using farpool::StripedPort;
using farpool::ThrottledPort;
using farpool::VerifiedPort;

namespace {

template <typename Base>
struct Referring final : Base {
    template <typename... Args>
    explicit Referring(nb::object what, Args&&... args) : Base(std::forward<Args>(args)...), reference(std::move(what)) {}
    nb::object reference;
    nb::object next;  // what will be referred to instead, if it is known already
};

template <typename Base>
int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (nb::inst_ready(self)) {
        Py_VISIT(nb::inst_ptr<Referring<Base>>(self)->reference.ptr());
        Py_VISIT(nb::inst_ptr<Referring<Base>>(self)->next.ptr());
    }
    return 0;
}

template <typename Base>
int clear(PyObject* self) {
    if (nb::inst_ready(self)) {
        nb::inst_ptr<Referring<Base>>(self)->reference.reset();
        nb::inst_ptr<Referring<Base>>(self)->next.reset();
    }
    return 0;
}

template <typename Base>
PyType_Slot referring_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse<Base>)},
                                 {Py_tp_clear, reinterpret_cast<void*>(clear<Base>)},
                                 {0, nullptr}};

}  // namespace

void bind_ports(nb::module_& m) {
    nb::class_<Port>(m, "Port", "The native end of a tier: blocking reads and writes that do not hold the interpreter lock.")
        .def(
            "read",
            [](Port& self, std::uint64_t offset, std::uintptr_t address, std::size_t nbytes) {
                self.read(offset, reinterpret_cast<void*>(address), nbytes);
            },
            nb::arg("offset"), nb::arg("address"), nb::arg("nbytes"), nb::call_guard<ReleasedLock>(),
            "Read into memory; blocks, without the interpreter lock. Raises what the tier raises.")
        .def(
            "write",
            [](Port& self, std::uint64_t offset, std::uintptr_t address, std::size_t nbytes) {
                self.write(offset, reinterpret_cast<const void*>(address), nbytes);
            },
            nb::arg("offset"), nb::arg("address"), nb::arg("nbytes"), nb::call_guard<ReleasedLock>())
        .def_prop_ro("serves_faults", &Port::serves_faults,
                     "True if the port moves any part of the written bytes, and never waits for the interpreter lock.");

    nb::class_<Referring<MemoryPort>, Port>(m, "MemoryPort", nb::type_slots(referring_slots<MemoryPort>),
                                            "Reads and writes a Memory.")
        .def(
            "__init__",
            [](Referring<MemoryPort>* self, nb::handle_t<Memory> memory) {
                new (self) Referring<MemoryPort>(nb::borrow(memory), *nb::inst_ptr<Memory>(memory));
            },
            nb::arg("memory"));

    nb::class_<FilePort, Port>(m, "FilePort", R"(Positioned reads and writes on a file descriptor (not owned).

With ``direct`` the descriptor was opened O_DIRECT: aligned pieces go straight to and from the caller's memory,
through io_uring (several requests of up to 512 KiB in flight) where the kernel has it, else through pread/pwrite; unaligned
memory and the tail of a length that is no multiple of `alignment` go through an aligned bounce buffer.
Short reads (a truncated file) raise TierError. With ``read_only`` writes raise TierError, and so do reads once the
file's size or time of modification has changed since construction.)")
        .def(
            "__init__",
            [](FilePort* self, int fd, std::string name, bool direct, std::size_t alignment, std::uint64_t base, bool ring,
               bool read_only) { new (self) FilePort(fd, std::move(name), {direct, alignment, base, ring, read_only}); },
            nb::arg("fd"), nb::arg("name"), nb::kw_only(), nb::arg("direct"), nb::arg("alignment") = 4096, nb::arg("base") = 0,
            nb::arg("ring") = true, nb::arg("read_only") = false)
        .def_prop_ro("uses_ring", &FilePort::uses_ring);

    nb::class_<Referring<PythonPort>, Port>(
        m, "PythonPort", nb::type_slots(referring_slots<PythonPort>),
        R"(Port over a Python tier: calls ``tier.read_into(Extent(offset, nbytes), view)``, with the interpreter lock for that call
only.)")
        .def(
            "__init__",
            [](Referring<PythonPort>* self, nb::object tier) {
                nb::object extent = nb::module_::import_("farpool.abc.tier").attr("Extent");
                PyObject* tier_pointer = tier.ptr();
                PyObject* extent_pointer = extent.ptr();
                new (self) Referring<PythonPort>(nb::make_tuple(tier, extent), tier_pointer, extent_pointer);
            },
            nb::arg("tier"));

    nb::class_<Referring<VerifiedPort>, Port>(
        m, "VerifiedPort", nb::type_slots(referring_slots<VerifiedPort>),
        R"(Port over another that keeps the CRC32C of each extent at its write and compares it at its read; ChecksumError names tier
and offset.)")
        .def(
            "__init__",
            [](Referring<VerifiedPort>* self, nb::handle_t<Port> inner, std::string name) {
                new (self) Referring<VerifiedPort>(nb::borrow(inner), *nb::inst_ptr<Port>(inner), std::move(name));
            },
            nb::arg("inner"), nb::arg("name"))
        .def("forget", &VerifiedPort::forget, nb::arg("offset"), "Forget the checksum of an extent that was freed.")
        .def_prop_ro(
            "inner", [](const Referring<VerifiedPort>& self) { return self.reference; }, nb::sig("def inner(self) -> Port"),
            "The port below.")
        .def_prop_ro("tracked", &VerifiedPort::tracked, "Number of extents with a checksum.");

    nb::class_<Referring<ThrottledPort>, Port>(
        m, "ThrottledPort", nb::type_slots(referring_slots<ThrottledPort>),
        R"(Port over another, slowed down to a link of these rates (bytes per second, ``inf`` for no limit) and latency (seconds).
With `shared` both directions are on one link. The rates are above 0.)")
        .def(
            "__init__",
            [](Referring<ThrottledPort>* self, nb::handle_t<Port> inner, double read_rate, double write_rate, double latency,
               bool shared) {
                new (self) Referring<ThrottledPort>(nb::borrow(inner), *nb::inst_ptr<Port>(inner), read_rate, write_rate,
                                                    latency, shared);
            },
            nb::arg("inner"), nb::kw_only(), nb::arg("read_rate"), nb::arg("write_rate"), nb::arg("latency"), nb::arg("shared"))
        .def("lift", &ThrottledPort::lift, nb::call_guard<nb::gil_scoped_release>(),
             "Stop throttling, and end the transfers that are held back.");

    nb::class_<Referring<StripedPort>, Port>(
        m, "StripedPort", nb::type_slots(referring_slots<StripedPort>),
        R"(Port over several ports, which hold stripes of `stripe` bytes in turn and work at the same time.

Each port has `share` bytes, a multiple of `stripe`. Without `placed` its stripes follow one another from offset 0. With
`placed` each extent is told by `place`, and a transfer moves a whole extent; errors name the inner tier.)")
        .def(
            "__init__",
            [](Referring<StripedPort>* self, std::string name, nb::object ports, std::uint64_t stripe, std::uint64_t share,
               bool placed) {
                const nb::tuple inner_ports(ports);
                std::vector<Port*> inner;
                for (const nb::handle port : inner_ports) {
                    inner.push_back(&nb::cast<Port&>(port));
                }
                new (self) Referring<StripedPort>(inner_ports, std::move(name), std::move(inner), stripe, share, placed);
            },
            nb::arg("name"), nb::arg("ports"), nb::kw_only(), nb::arg("stripe"), nb::arg("share"), nb::arg("placed") = false,
            nb::sig("def __init__(self, name: str, ports: collections.abc.Sequence[Port], *, stripe: int, share: int, placed: "
                    "bool = False) -> None"))
        .def("place", &StripedPort::place, nb::arg("offset"), nb::arg("pieces"),
             nb::sig("def place(self, offset: int, pieces: collections.abc.Sequence[int]) -> None"),
             "Set the offsets, in their ports, of the pieces of the extent at `offset`.")
        .def("forget", &StripedPort::forget, nb::arg("offset"), "Forget the pieces of an extent that was freed.");

    nb::class_<Referring<CopiesPort>, Port>(
        m, "CopiesPort", nb::type_slots(referring_slots<CopiesPort>),
        R"(Port over several ports that hold the same bytes. A write goes to all of them, a read to one.

A copy that fails while another one serves is out of use, and stays so. After somebody has written all bytes to it, or to
another port, make a new object with the present one as `before`, and the index of that copy as `fresh`.)")
        .def(
            "__init__",
            [](Referring<CopiesPort>* self, std::string name, nb::object ports, const nb::object& before, std::size_t fresh) {
                const nb::tuple inner_ports(ports);
                std::vector<Port*> inner;
                for (const nb::handle port : inner_ports) {
                    inner.push_back(&nb::cast<Port&>(port));
                }
                if (before.is_none()) {
                    new (self) Referring<CopiesPort>(inner_ports, std::move(name), inner);
                } else {
                    new (self) Referring<CopiesPort>(inner_ports, std::move(name), inner,
                                                     nb::cast<Referring<CopiesPort>&>(before), fresh);
                }
            },
            nb::arg("name"), nb::arg("ports"), nb::kw_only(), nb::arg("before") = nb::none(), nb::arg("fresh") = 0,
            nb::sig("def __init__(self, name: str, ports: collections.abc.Sequence[Port], *, before: CopiesPort | None = None, "
                    "fresh: int = 0) -> None"))
        .def_prop_ro(
            "faults",
            [](const Referring<CopiesPort>& self) {
                std::vector<std::string> found;
                for (const auto& fault : self.faults()) {
                    const bool is_python = fault && fault->exception != nullptr;
                    found.push_back(!fault      ? std::string()
                                    : is_python ? std::string(nb::str(nb::handle(fault->exception.get())).c_str())
                                                : fault->message);
                }
                return found;
            },
            nb::sig("def faults(self) -> list[str]"), "For each copy, why it is out of use; empty for one in use.")
        .def("take_out", &CopiesPort::take_out, nb::arg("index"), nb::arg("why"),
             "Take a copy out of use. Returns False if it is the only one in use.");

    nb::class_<Referring<ReplaceablePort>, Port>(
        m, "ReplaceablePort", nb::type_slots(referring_slots<ReplaceablePort>),
        R"(Port over another, the inner port, which can be replaced while transfers use it.

The inner port has `nbytes` bytes, which are copied in chunks of `chunk` bytes. To replace it, call `set_target`, then
`copy_chunks` until it returns False, and `replace`. Until then the inner port serves all transfers, and `drop_target` gives the
replacement up. Only one thread at a time may call these four.)")
        .def(
            "__init__",
            [](Referring<ReplaceablePort>* self, std::string name, nb::handle_t<Port> inner, std::uint64_t nbytes,
               std::size_t chunk) {
                new (self)
                    Referring<ReplaceablePort>(nb::borrow(inner), std::move(name), *nb::inst_ptr<Port>(inner), nbytes, chunk);
            },
            nb::arg("name"), nb::arg("inner"), nb::kw_only(), nb::arg("nbytes"), nb::arg("chunk"))
        .def(
            "set_target",
            [](Referring<ReplaceablePort>& self, nb::handle_t<Port> target, bool same_bytes) {
                self.set_target(*nb::inst_ptr<Port>(target), same_bytes);
                self.next = nb::borrow(target);
            },
            nb::arg("target"), nb::kw_only(), nb::arg("same_bytes") = false,
            "Set the port that will replace the inner one. With `same_bytes` it reaches the same memory: nothing is copied.")
        .def("copy_chunks", &ReplaceablePort::copy_chunks, nb::call_guard<ReleasedLock>(),
             "Copy a chunk that the target lacks, and one more for each that was written since the last call. Reads them back "
             "and "
             "compares. Returns False if the target lacked nothing.")
        .def(
            "replace",
            [](Referring<ReplaceablePort>& self, const nb::object& instead) {
                Port* port = instead.is_none() ? nullptr : &nb::cast<Port&>(instead);
                {
                    const ReleasedLock released;
                    self.replace(port);
                }
                self.reference = port == nullptr ? std::move(self.next) : instead;
                self.next.reset();
            },
            nb::arg("instead") = nb::none(), nb::sig("def replace(self, instead: Port | None = None) -> None"),
            "Stop all transfers, copy what the target lacks, and put it in the place of the inner port; or put `instead` "
            "there, "
            "whose bytes include the target's.")
        .def(
            "drop_target",
            [](Referring<ReplaceablePort>& self) {
                self.drop_target();
                self.next.reset();
            },
            "Give the replacement up.");
}
