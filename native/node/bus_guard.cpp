#include "node/bus_guard.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <mutex>

namespace farpool {

namespace {

thread_local unsigned guards = 0;
std::once_flag installed;
std::uintptr_t page_nbytes;
struct sigaction before;

void on_bus_error(int signal, siginfo_t* info, void* context) {
    const int saved = errno;
    if (guards > 0 && info->si_code == BUS_ADRERR) {
        const auto page = reinterpret_cast<std::uintptr_t>(info->si_addr) / page_nbytes * page_nbytes;
        void* const place = reinterpret_cast<void*>(page);
        if (mmap(place, page_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == place) {
            errno = saved;
            return;
        }
    }
    if ((before.sa_flags & SA_SIGINFO) != 0) {
        before.sa_sigaction(signal, info, context);
    } else {
        sigaction(signal, &before, nullptr);  // the access is tried again, and this time nothing stands in between
    }
    errno = saved;
}

void install() {
    page_nbytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before);
}

}  // namespace

BusGuard::BusGuard() noexcept {
    std::call_once(installed, install);
    ++guards;
}

BusGuard::~BusGuard() { --guards; }

}  // namespace farpool
