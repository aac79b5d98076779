// What the binding files share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python_error.hpp"

namespace nb = nanobind;

void bind_memory(nb::module_& m);
void bind_allocator(nb::module_& m);
void bind_ports(nb::module_& m);
void bind_queue(nb::module_& m);
void bind_node(nb::module_& m);
void bind_stream(nb::module_& m);
void bind_wire(nb::module_& m);
void bind_pager(nb::module_& m);
void bind_policy(nb::module_& m);
void bind_driver(nb::module_& m);
void bind_calls(nb::module_& m);
void bind_footprint(nb::module_& m);

namespace farpool {
class QueueCore;
class Stream;
}
// What is behind a Queue of Python's.
std::shared_ptr<farpool::QueueCore> queue_core(nb::handle queue);

// Takes over a connected socket: a descriptor as an int, or a Stream of Python's, which has none from now on.
farpool::Stream taken_stream(nb::handle stream);

// The bytes of an object that has the buffer protocol, for as long as this lives.
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

// Runs `call` without the interpreter lock if the work is long enough to be worth it.
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
