// Devices with memory of their own, and what works on them.
#include <algorithm>
#include <memory>
#include <optional>

#include "bindings/bindings.hpp"
#include "bindings/bound_queue.hpp"
#include "bindings/interpreter_exit.hpp"
#include "core/clock.hpp"
#include "device/cuda.hpp"
#include "device/device_queue.hpp"
#include "device/page_locks.hpp"

using farpool::Port;
using farpool::ReleasedLock;
using farpool::device::Cuda;
using farpool::device::Device;
using farpool::device::DeviceQueue;
using farpool::device::HostPart;
using farpool::device::PageLocks;
using farpool::device::SpaceLocks;

namespace {

void bind_page_locks(nb::module_& m) {
    nb::class_<SpaceLocks>(m, "SpaceLocks", "The memory of a tier, and its bytes that are page-locked.")
        .def_ro("name", &SpaceLocks::name)
        .def_ro("nbytes", &SpaceLocks::nbytes)
        .def_ro("locked", &SpaceLocks::locked, "Bytes from the start of the memory that are page-locked.")
        .def_ro("refused", &SpaceLocks::refused, "Why the rest will not be locked; empty as long as nothing was refused.");

    nb::class_<PageLocks>(m, "PageLocks",
                          R"(Page-locks the memory of tiers for a device, in a native thread of its own.

The thread locks chunks of ``chunk`` bytes, a multiple of the page size, from the start of each tier's memory up to the
last byte that a transfer has asked for. It refuses a chunk that would raise what all objects of this process have
locked above ``most`` bytes. What a device or this limit has refused is not tried again.)")
        .def(nb::init<std::shared_ptr<Device>, std::size_t, std::size_t>(), nb::arg("device"), nb::arg("chunk"),
             nb::arg("most"))
        .def("add", &PageLocks::add, nb::arg("port"), nb::arg("address"), nb::arg("nbytes"), nb::arg("name"),
             nb::keep_alive<1, 2>(),
             R"(Declare that the offsets of a port are ``nbytes`` bytes of memory from this address on, a page boundary.

The port must do nothing but copy these bytes, and the memory must stay mapped until `close` has returned True.
Raises ValueError if the range cannot be locked, and PoolClosedError after `close`.)")
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

If any byte of the range is not locked yet, this returns None and asks the thread to lock the memory up to the last of
them. It also returns None for a port that was not added.)")
        .def("close", &PageLocks::close, nb::arg("timeout"), nb::call_guard<ReleasedLock>(),
             R"(Stop the thread and unlock everything; no copy may be under way.

Returns False, and unlocks nothing, if the device still locks a chunk after ``timeout`` seconds.)")
        .def("totals", &PageLocks::totals, "Return what is locked of each memory, in the order in which they were added.")
        .def_static("locked_in_process", &PageLocks::locked_in_process, "Bytes that all objects of this process have locked.");
}

class BoundDeviceQueue : public BoundQueue {
public:
    BoundDeviceQueue(std::shared_ptr<Cuda> cuda, std::size_t staging, farpool::ProgramStream allocating, PageLocks* locks)
        : BoundQueue(made(*cuda, cuda, {.staging = staging, .allocating = allocating}, locks)),
          cuda_(std::move(cuda)),
          locks_(locks) {}
    std::size_t chunk() const { return device_queue().chunk(); }
    std::size_t bounce() const { return device_queue().bounce(); }
    ~BoundDeviceQueue() override {
        const bool ours = device_queue().ours();
        end();
        if (!ours) {
            return;  // a forked child must not call the driver
        }
        try {
            const Cuda::Entered entered(*cuda_);
            leave();
        } catch (const farpool::PortFailure&) {  // the device is lost, and gives nothing back
            leave();
        }
    }

    bool close(double seconds) override {
        std::optional<Cuda::Entered> entered;
        try {
            if (device_queue().ours()) {
                entered.emplace(*cuda_);
            }
        } catch (const farpool::PortFailure&) {  // the device is lost: the threads end all the same
        }
        const double deadline = farpool::monotonic_seconds() + seconds;
        if (!BoundQueue::close(seconds)) {
            return false;
        }
        const farpool::ReleasedLock released;
        return locks_ == nullptr || !device_queue().ours() ||
               locks_->close(std::max(0.0, deadline - farpool::monotonic_seconds()));
    }

    void fill(std::uintptr_t address, std::size_t nbytes, std::uint16_t value) {
        require_ours();
        device_queue().fill(address, nbytes, value);
    }
    std::vector<farpool::ProgramStream> streams() const { return device_queue().streams(); }

private:
    static std::shared_ptr<farpool::TransferQueue> made(Cuda& cuda, std::shared_ptr<Device> device, DeviceQueue::Config config,
                                                        PageLocks* locks) {
        const farpool::ReleasedLock released;  // page-locking takes a while
        const Cuda::Entered entered(cuda);
        auto queue = std::make_shared<DeviceQueue>(std::move(device), config, locks);
        queue->begin();
        return queue;
    }
    DeviceQueue& device_queue() const { return static_cast<DeviceQueue&>(*transfers()); }

    std::shared_ptr<Cuda> cuda_;
    PageLocks* locks_;
};

void bind_device_queue(nb::module_& m) {
    nb::class_<BoundDeviceQueue, BoundQueue>(m, "DeviceQueue",
                                             R"(Runs transfers between tiers and the memory of a CUDA device, on streams.

Parameters
----------
cuda : Cuda
    The device.
staging : int
    Bytes of page-locked host memory for transfers whose tier is not page-locked.
allocating : int
    The stream on which the arena was allocated. Earlier work on it may still use the same memory.
locks : PageLocks, optional
    What is page-locked of the tiers' memory. The queue unlocks everything at `close`.

Raises
------
TierError
    The device refuses the memory or the streams.)")
        .def(nb::init<std::shared_ptr<Cuda>, std::size_t, farpool::ProgramStream, PageLocks*>(), nb::arg("cuda"),
             nb::arg("staging"), nb::arg("allocating") = 0, nb::arg("locks") = nb::none(), nb::keep_alive<1, 5>())
        .def("fill", &BoundDeviceQueue::fill, nb::arg("address"), nb::arg("nbytes"), nb::arg("value"),
             R"(Fill device memory with a value of two bytes, after the program's earlier work and before its later work.

The address and the number of bytes must be even.)")
        .def_prop_ro("chunk", &BoundDeviceQueue::chunk,
                     "Bytes of the pieces, from its start, in which a block that is not page-locked is written and read.")
        .def_prop_ro("bounce", &BoundDeviceQueue::bounce,
                     "Bytes of device memory that the queue holds for moves between ranges that overlap; 0 after a successful "
                     "`close`.")
        .def("streams", &BoundDeviceQueue::streams,
             "All streams whose queued work may use the arena; after a successful `close` the program's streams.");
}

}  // namespace

void bind_device(nb::module_& m) {
    nb::class_<Device>(m, "Device", "A device with memory of its own, which runs copies on streams.");
    nb::class_<Cuda, Device>(m, "Cuda",
                             R"(A CUDA device, through its driver. It uses the context that torch uses, too.

Parameters
----------
index : int
    Number of the device, as this process counts them.
library : str
    The driver's library.

Raises
------
TierError
    There is no driver, it is too old, or it has no such device.)")
        .def(
            "__init__", [](Cuda* self, int index, const std::string& library) { new (self) Cuda(index, library); },
            nb::arg("index") = 0, nb::arg("library") = "libcuda.so.1");
    bind_page_locks(m);
    bind_device_queue(m);
}
