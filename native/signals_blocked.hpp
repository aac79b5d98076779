// For threads that farpool starts: signals belong to the main thread, and a handler must not run anywhere else.
#pragma once

#include <pthread.h>

#include <csignal>

namespace farpool {

// While it lives, the calling thread takes no signals; threads that it starts meanwhile never do.
class SignalsBlocked {
public:
    SignalsBlocked() noexcept {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

private:
    sigset_t before_;
};

}  // namespace farpool
