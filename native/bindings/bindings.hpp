// Declarations shared by the binding files.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string_view>

#include "bindings/python_error.hpp"

namespace nb = nanobind;

void bind_memory(nb::module_& m);
void bind_allocator(nb::module_& m);
void bind_ports(nb::module_& m);
void bind_queue(nb::module_& m);
void bind_node(nb::module_& m);
void bind_stream(nb::module_& m);
void bind_slices(nb::module_& m);
void bind_kv(nb::module_& m);
void bind_wire(nb::module_& m);
void bind_ranking(nb::module_& m);
void bind_pager(nb::module_& m);
void bind_policy(nb::module_& m);
void bind_driver(nb::module_& m);
void bind_calls(nb::module_& m);
void bind_footprint(nb::module_& m);
void bind_device(nb::module_& m);
void bind_region(nb::module_& m);

namespace farpool {
class TransferQueue;
class Stream;
}  // namespace farpool
// The native queue behind a Python queue.
std::shared_ptr<farpool::TransferQueue> transfer_queue(nb::handle queue);

// Takes over a connected socket, given as a descriptor (int) or as a Python Stream, which is left without one.
farpool::Stream taken_stream(nb::handle stream);

// The bytes of one key of a list. The list keeps them alive.
inline std::string_view key_at(const nb::list& keys, std::size_t number) {
    PyObject* const key = PyList_GET_ITEM(keys.ptr(), static_cast<Py_ssize_t>(number));
    if (PyBytes_Check(key) == 0) {
        farpool::fail_value("key " + std::to_string(number) + " of a list of keys is not bytes");
    }
    return {PyBytes_AS_STRING(key), static_cast<std::size_t>(PyBytes_GET_SIZE(key))};
}

// RAII view of the bytes of a Python object with the buffer protocol, valid while it lives.
class BufferView {
public:
    BufferView(nb::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
            throw nb::python_error();
        }
    }
    ~BufferView() { PyBuffer_Release(&view_); }
    BufferView(const BufferView&) = delete;
    BufferView& operator=(const BufferView&) = delete;
    const Py_buffer& operator*() const { return view_; }
    const Py_buffer* operator->() const { return &view_; }

private:
    Py_buffer view_{};
};

// Runs `call`, without the interpreter lock if the work is `large` enough to be worth releasing it.
template <typename Call>
void without_lock_if(bool large, Call call) {
    if (large) {
        nb::gil_scoped_release release;
        call();
    } else {
        call();
    }
}

constexpr std::size_t large_bytes = std::size_t{64} << 10;
