#include "node/bus_guard.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

namespace farpool {

namespace {

thread_local unsigned guards = 0;
std::once_flag installed;
std::uintptr_t page_nbytes;
struct sigaction before;

// Guards `ranges`. The signal handler may lock it: an access that fails is in a thread that has a guard, and that thread then
// holds neither this mutex nor a mutex of the allocator.
std::mutex mutex;
struct Range {
    std::uintptr_t end;
    bool cut;
};
using Ranges = std::map<std::uintptr_t, Range>;  // by their begin
Ranges& ranges = *new Ranges;                    // for threads that outlive the program's last line

// Marks the range that contains the page as cut and returns its end; the end of the page if no range contains it.
std::uintptr_t cut_at(std::uintptr_t page) {
    const auto above = ranges.upper_bound(page);
    if (above == ranges.begin() || std::prev(above)->second.end <= page) {
        return page + page_nbytes;
    }
    Range& range = std::prev(above)->second;
    range.cut = true;
    return range.end;
}

// Maps zeros in place of everything from the page on, because a truncated file ends somewhere before it. Page by page, a
// process would reach its limit of mappings.
bool replace_from(std::uintptr_t page) {
    const std::lock_guard lock(mutex);
    void* const place = reinterpret_cast<void*>(page);
    return mmap(place, cut_at(page) - page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
                0) == place;
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
    const int saved = errno;
    if (guards > 0 && info->si_code == BUS_ADRERR) {
        const auto page = reinterpret_cast<std::uintptr_t>(info->si_addr) / page_nbytes * page_nbytes;
        if (replace_from(page)) {
            errno = saved;
            return;
        }
    }
    if ((before.sa_flags & SA_SIGINFO) != 0) {
        before.sa_sigaction(signal, info, context);
    } else {
        sigaction(signal, &before, nullptr);  // the thread repeats the access, and then the handler before this one runs
    }
    errno = saved;
}

void install() {
    page_nbytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    struct sigaction action{};
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

GuardedRange::GuardedRange(const void* begin, std::size_t nbytes) : begin_(reinterpret_cast<std::uintptr_t>(begin)) {
    const std::lock_guard lock(mutex);
    ranges[begin_] = {begin_ + nbytes, false};
}

GuardedRange::GuardedRange(GuardedRange&& other) noexcept : begin_(std::exchange(other.begin_, 0)) {}

GuardedRange& GuardedRange::operator=(GuardedRange&& other) noexcept {
    std::swap(begin_, other.begin_);
    return *this;
}

bool GuardedRange::was_cut() const {
    const std::lock_guard lock(mutex);
    const auto found = ranges.find(begin_);
    return found != ranges.end() && found->second.cut;
}

GuardedRange::~GuardedRange() {
    if (begin_ != 0) {
        const std::lock_guard lock(mutex);
        ranges.erase(begin_);
    }
}

}  // namespace farpool
