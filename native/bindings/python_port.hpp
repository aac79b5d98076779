// A port that calls a tier written in Python.
#pragma once

#include "core/port.hpp"

namespace farpool {

class PythonPort : public Port {
public:
    // Borrows both objects, which the owner keeps alive. Needs the interpreter lock.
    PythonPort(PyObject* tier, PyObject* extent_type) : tier_(tier), extent_type_(extent_type) {}
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override;
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override;
    bool serves_faults() const noexcept override { return false; }

private:
    void transfer(const char* method, std::uint64_t offset, void* memory, std::size_t nbytes, int access) const;

    PyObject* tier_;
    PyObject* extent_type_;
};

}  // namespace farpool
