// Safe calls of Python from native threads while the interpreter may be ending.
#pragma once

#include <Python.h>
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

// Lets other threads have the interpreter lock while it lives, as nb::gil_scoped_release does. For calls of daemon threads: the
// interpreter may end during the call.
class ReleasedLock {
public:
    ReleasedLock() : state_(PyEval_SaveThread()) {}
    ~ReleasedLock() {
        survive_interpreter_exit([this] { PyEval_RestoreThread(state_); });
    }
    ReleasedLock(const ReleasedLock&) = delete;
    ReleasedLock& operator=(const ReleasedLock&) = delete;

private:
    PyThreadState* const state_;
};

// Has the interpreter lock while it lives, as nb::gil_scoped_acquire does, for the same calls.
class TakenLock {
public:
    TakenLock() : state_(survive_interpreter_exit([] { return PyGILState_Ensure(); })) {}
    ~TakenLock() { PyGILState_Release(state_); }
    TakenLock(const TakenLock&) = delete;
    TakenLock& operator=(const TakenLock&) = delete;

private:
    const PyGILState_STATE state_;
};

}  // namespace farpool
