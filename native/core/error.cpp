#include "error.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace farpool {

namespace {

const char* class_name(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::checksum: return "ChecksumError";
        case ErrorKind::closed: return "PoolClosedError";
        case ErrorKind::node: return "NodeError";
        case ErrorKind::node_timeout: return "NodeTimeoutError";
        case ErrorKind::protocol: return "ProtocolError";
        case ErrorKind::denied: return "AccessDeniedError";
        case ErrorKind::lease_lost: return "LeaseLostError";
        default: return "TierError";
    }
}

bool is_of_node(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::node:
        case ErrorKind::node_timeout:
        case ErrorKind::protocol:
        case ErrorKind::denied:
        case ErrorKind::lease_lost: return true;
        default: return false;
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

PyObject* PortError::to_python() const {
    if (kind == ErrorKind::python) {
        return Py_NewRef(exception.get());
    }
    if (kind == ErrorKind::value) {
        return nb::handle(PyExc_ValueError)(message).release().ptr();
    }
    nb::object type = nb::module_::import_("farpool.errors").attr(class_name(kind));
    if (kind == ErrorKind::closed) {
        return type(message).release().ptr();
    }
    nb::object made = is_of_node(kind) ? type(message, nb::arg("node") = tier) : type(message, nb::arg("tier") = tier);
    if (code != 0) {
        made.attr("errno") = code;
    }
    return made.release().ptr();
}

void fail_value(std::string message) {
    throw PortFailure({ErrorKind::value, std::move(message), {}, 0, {}});
}

void fail_closed(std::string message) {
    throw PortFailure({ErrorKind::closed, std::move(message), {}, 0, {}});
}

void fail_tier(const std::string& tier, const std::string& message, int code) {
    throw PortFailure({ErrorKind::tier, tier + ": " + message, tier, code, {}});
}

void fail_checksum(const std::string& tier, const std::string& message) {
    throw PortFailure({ErrorKind::checksum, tier + ": " + message, tier, 0, {}});
}

void fail_node(ErrorKind kind, const std::string& node, const std::string& message, int code) {
    throw PortFailure({kind, node + ": " + message, node, code, {}});
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
