// Errors on their way from native code to Python, and back.
#pragma once

#include "core/error.hpp"

namespace farpool {

// The farpool (or builtin) exception object; a new reference. Needs the interpreter lock.
PyObject* to_python(const PortError& error);

// Takes the pending Python exception. Needs the interpreter lock; the result may be dropped without it.
PortError take_python_error();

}  // namespace farpool
