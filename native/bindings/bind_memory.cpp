// Memory, copies between addresses, checksums of buffers.
#include <nanobind/stl/optional.h>
#include <algorithm>
#include <cstring>
#include <list>
#include <new>
#include <optional>
#include <vector>

#include "bindings/bindings.hpp"
#include "core/crc32c.hpp"
#include "core/crc32c_folding.hpp"
#include "core/crc32c_many.hpp"
#include "core/memory.hpp"

using farpool::Folding;
using farpool::Memory;

namespace {

int get_memory_buffer(PyObject* self, Py_buffer* view, int flags) {
    const Memory* memory = nb::inst_ptr<Memory>(self);
    if (memory->data() == nullptr) {
        PyErr_SetString(PyExc_BufferError, "the memory was released");
        view->obj = nullptr;
        return -1;
    }
    return PyBuffer_FillInfo(view, self, memory->data(), static_cast<Py_ssize_t>(memory->nbytes()), 0, flags);
}

PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_memory_buffer)}, {0, nullptr}};

void make_memory(Memory* self, std::int64_t nbytes) {
    if (nbytes < 1) {
        farpool::fail_value("Memory: nbytes must be 1 or more, got " + std::to_string(nbytes));
    }
    try {
        new (self) Memory(static_cast<std::size_t>(nbytes));
    } catch (const std::bad_alloc&) {
        PyErr_Format(PyExc_MemoryError, "Memory: the operating system does not map %lld bytes", static_cast<long long>(nbytes));
        throw nb::python_error();
    }
}

nb::list crc32c_many(const nb::list& data) {
    std::list<BufferView> views;  // a view cannot be moved
    std::vector<farpool::Summed> buffers;
    std::size_t nbytes = 0;
    for (const nb::handle one : data) {
        const BufferView& view = views.emplace_back(one, PyBUF_C_CONTIGUOUS);
        buffers.push_back({static_cast<const std::byte*>(view->buf), static_cast<std::size_t>(view->len)});
        nbytes += buffers.back().nbytes;
    }
    without_lock_if(nbytes >= large_bytes, [&] { farpool::crc32c_many(buffers); });
    nb::list sums;
    for (const farpool::Summed& buffer : buffers) {
        sums.append(buffer.crc);
    }
    return sums;
}

}  // namespace

void bind_memory(nb::module_& m) {
    nb::class_<Memory>(
        m, "Memory", nb::type_slots(memory_slots),
        "Anonymous memory, aligned to 2 MiB, huge pages advised. Supports the buffer protocol (writable, format ``B``).")
        .def("__init__", make_memory, nb::arg("nbytes"))
        .def_prop_ro("address", [](const Memory& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
        .def_prop_ro("nbytes", &Memory::nbytes)
        .def(
            "touch",
            [](Memory& self, std::size_t offset, std::optional<std::size_t> nbytes) {
                self.touch(offset, nbytes.value_or(self.nbytes() - std::min(offset, self.nbytes())));
            },
            nb::arg("offset") = 0, nb::arg("nbytes") = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
            "Touch each page of the range, without the interpreter lock, so that the first use is not slowed by page faults.")
        .def(
            "discard",
            [](Memory& self, std::int64_t offset, std::int64_t nbytes) {
                if (offset < 0 || nbytes < 0) {
                    farpool::fail_value("Memory.discard: offset and nbytes must be 0 or more, got " + std::to_string(offset) +
                                        " and " + std::to_string(nbytes));
                }
                self.discard(static_cast<std::size_t>(offset), static_cast<std::size_t>(nbytes));
            },
            nb::arg("offset"), nb::arg("nbytes"), nb::call_guard<nb::gil_scoped_release>(),
            "Give the pages that lie wholly inside the range back to the operating system; they read as zero afterwards.")
        .def("release", &Memory::release,
             "Unmap the memory. The caller makes sure that it is not in use any more. Idempotent.");

    m.def(
        "crc32c",
        [](nb::handle data, std::uint32_t value) {
            const BufferView view(data, PyBUF_C_CONTIGUOUS);
            const auto nbytes = static_cast<std::size_t>(view->len);
            without_lock_if(nbytes >= large_bytes, [&] { value = farpool::crc32c(view->buf, nbytes, value); });
            return value;
        },
        nb::arg("data"), nb::arg("value") = 0,
        R"(CRC32C (Castagnoli) of a contiguous buffer, by hardware instructions if there are some; without the interpreter
lock.)");
    m.def(
        "crc32c_many", crc32c_many, nb::arg("data"), nb::sig("def crc32c_many(data: list[typing.Any]) -> list[int]"),
        R"(CRC32C of each of several contiguous buffers, also of a single one, by two threads if there is much to do; without the
interpreter lock.)");
    m.def(
        "crc32c_portable",
        [](nb::handle data, std::uint32_t value) {
            const BufferView view(data, PyBUF_C_CONTIGUOUS);
            return farpool::crc32c_portable(view->buf, static_cast<std::size_t>(view->len), value);
        },
        nb::arg("data"), nb::arg("value") = 0,
        "CRC32C by tables, to which `crc32c` falls back on a processor without the instructions.");
    nb::class_<Folding>(m, "Crc32cFolding",
                        "A variant of CRC32C by carry-less multiplication, for certain instructions of the processor.")
        .def_prop_ro("name", [](const Folding& self) { return std::string(self.name); });
    m.def(
        "crc32c_foldings",
        [] {
            nb::list found;
            for (const Folding& folding : farpool::foldings()) {
                found.append(nb::cast(&folding, nb::rv_policy::reference));
            }
            return found;
        },
        nb::sig("def crc32c_foldings() -> list[Crc32cFolding]"),
        "Return the foldings that this processor has instructions for, the fastest first; `crc32c` takes the first.");
    m.def(
        "crc32c_by",
        [](const Folding* folding, nb::handle data, std::uint32_t value) {
            const BufferView view(data, PyBUF_C_CONTIGUOUS);
            return farpool::crc32c_by(folding, view->buf, static_cast<std::size_t>(view->len), value);
        },
        nb::arg("folding").none(), nb::arg("data"), nb::arg("value") = 0, "CRC32C by the given folding; None for none.");
    m.def(
        "copy_crc32c_by",
        [](const Folding* folding, nb::handle destination, nb::handle source, std::uint32_t value) {
            const BufferView to(destination, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE);
            const BufferView from(source, PyBUF_C_CONTIGUOUS);
            if (to->len != from->len) {
                farpool::fail_value("copy_crc32c_by: destination and source must be of one size, got " +
                                    std::to_string(to->len) + " and " + std::to_string(from->len) + " bytes");
            }
            const auto nbytes = static_cast<std::size_t>(to->len);
            without_lock_if(nbytes >= large_bytes,
                            [&] { value = farpool::copy_crc32c_by(folding, to->buf, from->buf, nbytes, value); });
            return value;
        },
        nb::arg("folding").none(), nb::arg("destination"), nb::arg("source"), nb::arg("value") = 0,
        R"(Copy a buffer; returns the CRC32C of the very bytes that the destination has then. The buffers are of one size and do not
overlap.)");
    m.def(
        "buffer_address",
        [](nb::handle data, bool writable) {
            const BufferView view(data, writable ? PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE : PyBUF_C_CONTIGUOUS);
            return reinterpret_cast<std::uintptr_t>(view->buf);
        },
        nb::arg("data"), nb::arg("writable") = false,
        R"(Address of the first byte of a contiguous buffer; BufferError if it must be writable and is not. The caller keeps
the buffer alive.)");
    m.def(
        "memmove",
        [](std::uintptr_t destination, std::uintptr_t source, std::size_t nbytes) {
            without_lock_if(nbytes >= large_bytes, [&] {
                std::memmove(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), nbytes);
            });
        },
        nb::arg("destination"), nb::arg("source"), nb::arg("nbytes"),
        "Copy between addresses, which may overlap; without the interpreter lock for large copies.");
    m.def(
        "memset",
        [](std::uintptr_t address, int value, std::size_t nbytes) {
            without_lock_if(nbytes >= large_bytes, [&] { std::memset(reinterpret_cast<void*>(address), value, nbytes); });
        },
        nb::arg("address"), nb::arg("value"), nb::arg("nbytes"));
}
