// Conversion of errors between native code and Python exceptions.
#pragma once

#include "core/error.hpp"

namespace farpool {

// The Python exception for an error, of a farpool or builtin class; a new reference. Needs the interpreter lock.
PyObject* to_python(const PortError& error);

// Takes the pending Python exception as an error. Needs the interpreter lock; the result may be dropped without it.
PortError take_python_error();

}  // namespace farpool
