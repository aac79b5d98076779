// For threads that farpool starts: signals belong to the main thread, and a handler must not run anywhere else.
#pragma once

#include <pthread.h>

#include <csignal>

namespace farpool {

// While it lives, the calling thread takes no signals; threads that it starts meanwhile never do. But for those of a thread's own
// faults: where they are blocked the process ends, also if a handler (such as a node's, for files that were cut off) would mend it.
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
