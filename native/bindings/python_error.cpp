#include "bindings/python_error.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace farpool {

namespace {

const char* class_name(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::checksum:
            return "ChecksumError";
        case ErrorKind::closed:
            return "PoolClosedError";
        case ErrorKind::node:
            return "NodeError";
        case ErrorKind::node_timeout:
            return "NodeTimeoutError";
        case ErrorKind::protocol:
            return "ProtocolError";
        case ErrorKind::denied:
            return "AccessDeniedError";
        case ErrorKind::lease_lost:
            return "LeaseLostError";
        case ErrorKind::ticket:
            return "TicketError";
        case ErrorKind::unsupported:
            return "UnsupportedError";
        default:
            return "TierError";
    }
}

bool is_of_node(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::node:
        case ErrorKind::node_timeout:
        case ErrorKind::protocol:
        case ErrorKind::denied:
        case ErrorKind::lease_lost:
        case ErrorKind::ticket:
            return true;
        default:
            return false;
    }
}

void drop_with_lock(PyObject* object) {
    if (object == nullptr || !Py_IsInitialized()) {
        return;
    }
    PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(object);
    PyGILState_Release(state);
}

}  // namespace

PyObject* to_python(const PortError& error) {
    if (error.kind == ErrorKind::python) {
        return Py_NewRef(error.exception.get());
    }
    if (error.kind == ErrorKind::value) {
        return nb::handle(PyExc_ValueError)(error.message).release().ptr();
    }
    nb::object type = nb::module_::import_("farpool.errors").attr(class_name(error.kind));
    if (error.kind == ErrorKind::closed || error.kind == ErrorKind::unsupported) {
        return type(error.message).release().ptr();
    }
    nb::object made = is_of_node(error.kind) ? type(error.message, nb::arg("node") = error.tier)
                                             : type(error.message, nb::arg("tier") = error.tier);
    if (error.code != 0) {
        made.attr("errno") = error.code;
    }
    return made.release().ptr();
}

PortError take_python_error() {
#if PY_VERSION_HEX >= 0x030C0000
    PyObject* value = PyErr_GetRaisedException();
#else
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != nullptr && value != nullptr) {
        PyException_SetTraceback(value, trace);
    }
    Py_XDECREF(type);
    Py_XDECREF(trace);
#endif
    PortError error;
    if (value == nullptr) {
        error.message = "a Python call failed without an exception";
        return error;
    }
    error.kind = ErrorKind::python;
    error.message = "a Python tier raised";
    error.exception = std::shared_ptr<PyObject>(value, drop_with_lock);
    return error;
}

}  // namespace farpool
