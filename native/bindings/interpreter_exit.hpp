// Calling Python from native threads while the interpreter may be ending.
#pragma once

#include <cxxabi.h>
#include <unistd.h>

namespace farpool {

// Until Python 3.14, a thread that asks for the interpreter lock after the interpreter began to end is ended by
// pthread_exit, which unwinds through C++ frames and would terminate the process. It sleeps instead; the process ends.
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
