// The Python face of the native core: farpool._native.
#include <cerrno>
#include <system_error>

#include "bindings/bindings.hpp"

NB_MODULE(_native, m) {
    m.doc() = "The native core: aligned memory, extent allocation, tier ports, the transfer queue, the pager, checksums.";
    nb::set_leak_warnings(false);  // what lives until the interpreter ends is not a leak
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const farpool::PortFailure& failure) {
            PyObject* error = farpool::to_python(failure.error());
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
            Py_DECREF(error);
        } catch (const std::system_error& failure) {
            errno = failure.code().value();
            PyErr_SetFromErrnoWithFilename(PyExc_OSError, failure.what());
        }
    });
    bind_memory(m);
    bind_allocator(m);
    bind_ports(m);
    bind_queue(m);
    bind_node(m);
    bind_stream(m);
    bind_slices(m);
    bind_kv(m);
    bind_wire(m);
    bind_ranking(m);
    bind_pager(m);
    bind_driver(m);
    bind_footprint(m);
    bind_calls(m);
    bind_device(m);
    bind_policy(m);
    bind_region(m);
}
