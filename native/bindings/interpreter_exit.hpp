// Safe calls of Python from native threads while the interpreter may be ending.
#pragma once

#include <cxxabi.h>
#include <unistd.h>

namespace farpool {

// Runs `call`, which takes the interpreter lock; a thread caught by the interpreter's end sleeps until the process ends.
// Until Python 3.14, such a thread is ended by pthread_exit, which unwinds through C++ frames and would end the process.
template <typename Call>
auto survive_interpreter_exit(Call call) {
    try {
        return call();
    } catch (abi::__forced_unwind&) {
        for (;;) {
            pause();
        }
    }
}

}  // namespace farpool
