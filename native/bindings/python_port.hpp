// The native end of a tier that is written in Python.
#pragma once

#include "core/port.hpp"

namespace farpool {

class PythonPort : public Port {
public:
    // Needs the interpreter lock. The owner keeps both objects alive: they are borrowed.
    PythonPort(PyObject* tier, PyObject* extent_type) : tier_(tier), extent_type_(extent_type) {}
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override;
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override;

private:
    void transfer(const char* method, std::uint64_t offset, void* memory, std::size_t nbytes, int access) const;

    PyObject* tier_;
    PyObject* extent_type_;
};

}  // namespace farpool
