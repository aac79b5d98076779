// Keeps signals away from the threads that farpool starts: handlers must run on the main thread only.
#pragma once

#include <pthread.h>

#include <csignal>

namespace farpool {

// Blocks signals in the calling thread until this object is destroyed, and in threads started before that for all their time.
// Signals of a thread's own faults stay unblocked: if they were blocked, they would end the process even if a handler (a
// node's, for truncated files) can deal with the fault.
class SignalsBlocked {
public:
    SignalsBlocked() noexcept {
        sigset_t all;
        sigfillset(&all);
        for (const int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) {
            sigdelset(&all, fault);
        }
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

private:
    sigset_t before_;
};

}  // namespace farpool
