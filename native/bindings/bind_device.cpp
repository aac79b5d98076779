// Devices with memory of their own, and what works on them.
#include "bindings/bindings.hpp"
#include "bindings/interpreter_exit.hpp"
#include "device/device.hpp"
#include "device/page_locks.hpp"

using farpool::Port;
using farpool::ReleasedLock;
using farpool::device::Device;
using farpool::device::PageLocks;
using farpool::device::HostPart;
using farpool::device::SpaceLocks;

namespace {

void bind_page_locks(nb::module_& m) {
    nb::class_<SpaceLocks>(m, "SpaceLocks", "How much of a tier's memory is page-locked.")
        .def_ro("name", &SpaceLocks::name)
        .def_ro("nbytes", &SpaceLocks::nbytes)
        .def_ro("locked", &SpaceLocks::locked, "Bytes from the start of the memory that are page-locked.")
        .def_ro("refused", &SpaceLocks::refused, "Why the rest will not be locked; empty as long as nothing was refused.");

    nb::class_<PageLocks>(m, "PageLocks",
                          R"(Page-locks the memory of tiers for a device, in a native thread of its own.

The thread locks chunks of ``chunk`` bytes, a multiple of the page size, from the start of each tier's memory up to the last
byte that a transfer has asked for. It refuses a chunk that would raise what all objects of this process have locked above
``most`` bytes. What a device or this limit has refused is not tried again.)")
        .def(nb::init<std::shared_ptr<Device>, std::size_t, std::size_t>(), nb::arg("device"), nb::arg("chunk"),
             nb::arg("most"))
        .def("add", &PageLocks::add, nb::arg("port"), nb::arg("address"), nb::arg("nbytes"), nb::arg("name"),
             nb::keep_alive<1, 2>(),
             R"(Declare that the offsets of a port are ``nbytes`` bytes of memory from this address on, a page boundary.

The port must do nothing but copy these bytes, and the memory must stay mapped until `close` has returned True. Raises
ValueError if the range cannot be locked, and PoolClosedError after `close`.)")
        .def(
            "parts",
            [](PageLocks& self, Port* port, std::uint64_t offset, std::size_t nbytes) -> nb::object {
                std::vector<HostPart> parts;
                if (!self.parts(port, offset, nbytes, parts)) {
                    return nb::none();
                }
                nb::list listed;
                for (const HostPart& part : parts) {
                    listed.append(nb::make_tuple(part.address, part.nbytes));
                }
                return listed;
            },
            nb::arg("port"), nb::arg("offset"), nb::arg("nbytes"),
            nb::sig("def parts(self, port: Port, offset: int, nbytes: int) -> list[tuple[int, int]] | None"),
            R"(Return address and bytes of the parts of a range of a port, each inside one locked chunk.

If any byte of the range is not locked yet, this returns None and asks the thread to lock the memory up to the last of them.
It also returns None for a port that was not added.)")
        .def("close", &PageLocks::close, nb::arg("timeout"), nb::call_guard<ReleasedLock>(),
             R"(Stop the thread and unlock everything; no copy may be under way.

Returns False, and unlocks nothing, if the device still locks a chunk after ``timeout`` seconds.)")
        .def("totals", &PageLocks::totals, "Return what is locked of each memory, in the order in which they were added.")
        .def_static("locked_in_process", &PageLocks::locked_in_process, "Bytes that all objects of this process have locked.");
}

}  // namespace

void bind_device(nb::module_& m) {
    nb::class_<Device>(m, "Device", "A device with memory of its own, which runs copies on streams.");
    bind_page_locks(m);
}
