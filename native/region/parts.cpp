#include "region/parts.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

namespace farpool::region {

namespace {

Settings checked(Settings settings) {
    if (sysconf(_SC_PAGESIZE) != static_cast<long>(page_nbytes)) {
        throw PortFailure({ErrorKind::unsupported,
                           "Region: this system has pages of " + std::to_string(sysconf(_SC_PAGESIZE)) +
                               " bytes; regions need pages of 4096 bytes",
                           {},
                           0,
                           {}});
    }
    return settings;
}

int new_event() {
    const int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event < 0) {
        fail_tier("fast", "Region: the kernel makes no event: " + reason(errno), errno);
    }
    return event;
}

}  // namespace

Parts::Parts(Settings what)
    : settings(checked(std::move(what))),
      mapping(settings.most),
      zeros(settings.longest),
      nudged(new_event()),
      pages(settings.budget, settings.policy),
      streams(settings.longest) {}

Parts::~Parts() { close(nudged); }

void Parts::nudge() const noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t wrote = write(nudged, &one, sizeof one);
}

}  // namespace farpool::region
