#include "bindings/python_port.hpp"

#include <Python.h>

#include "bindings/interpreter_exit.hpp"
#include "bindings/python_error.hpp"

namespace farpool {

namespace {

// Runs `tier.method(Extent(offset, nbytes), view)`; a new reference, or null with an exception set.
PyObject* call_tier(PyObject* tier, PyObject* extent_type, const char* method, std::uint64_t offset, std::size_t nbytes,
                    PyObject* view) {
    PyObject* extent =
        PyObject_CallFunction(extent_type, "Kn", static_cast<unsigned long long>(offset), static_cast<Py_ssize_t>(nbytes));
    if (extent == nullptr) {
        return nullptr;
    }
    PyObject* result = PyObject_CallMethod(tier, method, "OO", extent, view);
    Py_DECREF(extent);
    return result;
}

// True if Python code still has a view of the memory that it made from this one. Such a view cannot be revoked.
bool is_kept(PyObject* view) {
    const auto* memory_view = reinterpret_cast<PyMemoryViewObject*>(view);
    return memory_view->exports > 0 || memory_view->mbuf->exports > 1;
}

}  // namespace

void PythonPort::transfer(const char* method, std::uint64_t offset, void* memory, std::size_t nbytes, int access) const {
    bool ok = false;
    PortError* error = nullptr;  // no owner here: nothing may be destroyed by a forced unwind without the lock
    survive_interpreter_exit([&] {
        const PyGILState_STATE state = PyGILState_Ensure();
        PyObject* view = PyMemoryView_FromMemory(static_cast<char*>(memory), static_cast<Py_ssize_t>(nbytes), access);
        PyObject* result = view == nullptr ? nullptr : call_tier(tier_, extent_type_, method, offset, nbytes, view);
        if (result == nullptr) {
            error = new PortError(take_python_error());
        }
        Py_XDECREF(result);
        if (view != nullptr) {
            if (error == nullptr && is_kept(view)) {
                error = new PortError{ErrorKind::tier,
                                      std::string(Py_TYPE(tier_)->tp_name) + "." + method +
                                          ": the tier kept its buffer beyond the transfer; copy the bytes instead",
                                      {},
                                      0,
                                      {}};
            }
            // A tier that kept the view gets a ValueError from it from now on, not a wild read.
            PyObject* released = PyObject_CallMethod(view, "release", nullptr);
            if (released == nullptr) {
                PyErr_Clear();  // an error is there already: its traceback, or the tier, holds the buffer
            }
            Py_XDECREF(released);
            Py_DECREF(view);
        }
        ok = error == nullptr;
        PyGILState_Release(state);
    });
    if (!ok) {
        PortError failure = std::move(*error);
        delete error;
        throw PortFailure(std::move(failure));
    }
}

void PythonPort::read(std::uint64_t offset, void* into, std::size_t nbytes) {
    transfer("read_into", offset, into, nbytes, PyBUF_WRITE);
}

void PythonPort::write(std::uint64_t offset, const void* from, std::size_t nbytes) {
    transfer("write_from", offset, const_cast<void*>(from), nbytes, PyBUF_READ);
}

}  // namespace farpool
