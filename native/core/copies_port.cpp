#include "core/copies_port.hpp"

#include <algorithm>

namespace farpool {

namespace {

constexpr std::uint64_t turn_nbytes = std::uint64_t{1} << 20;  // reads of neighbouring ranges of this size use different copies

// A mistake of the caller, which another copy would repeat.
bool is_callers(const PortError& error) noexcept { return error.kind == ErrorKind::value || error.kind == ErrorKind::closed; }

}  // namespace

CopiesPort::CopiesPort(std::string name, const std::vector<Port*>& ports)
    : name_(std::move(name)), mutex_(std::make_shared<std::mutex>()) {
    if (ports.empty()) {
        fail_value(name_ + ": there is no port, expected one for each copy");
    }
    for (Port* port : ports) {
        copies_.push_back(std::make_shared<Copy>(Copy{port, std::nullopt}));
    }
}

CopiesPort::CopiesPort(std::string name, const std::vector<Port*>& ports, const CopiesPort& before, std::size_t fresh)
    : name_(std::move(name)), mutex_(before.mutex_), copies_(before.copies_) {
    if (ports.size() != copies_.size() || fresh >= copies_.size()) {
        fail_value(name_ + ": " + std::to_string(ports.size()) + " ports, the one at " + std::to_string(fresh) +
                   " fresh, expected " + std::to_string(copies_.size()) + " as before");
    }
    copies_[fresh] = std::make_shared<Copy>(Copy{ports[fresh], std::nullopt});
}

void CopiesPort::read(std::uint64_t offset, void* into, std::size_t nbytes) {
    std::vector<std::size_t> order = in_use();
    const auto nearer =
        std::stable_partition(order.begin(), order.end(), [this](std::size_t index) { return copies_[index]->port->copies(); });
    if (nearer == order.begin()) {
        std::rotate(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(offset / turn_nbytes % order.size()),
                    order.end());
    }
    Failed failed;
    for (const std::size_t index : order) {
        try {
            copies_[index]->port->read(offset, into, nbytes);
        } catch (const PortFailure& failure) {
            if (is_callers(failure.error())) {
                throw;
            }
            failed.emplace_back(index, failure.error());
            continue;
        }
        settle({index}, failed);
        return;
    }
    throw PortFailure(failed.front().second);
}

void CopiesPort::write(std::uint64_t offset, const void* from, std::size_t nbytes) {
    std::vector<std::size_t> served;
    Failed failed;
    for (const std::size_t index : in_use()) {
        try {
            copies_[index]->port->write(offset, from, nbytes);
            served.push_back(index);
        } catch (const PortFailure& failure) {
            if (is_callers(failure.error())) {
                throw;
            }
            failed.emplace_back(index, failure.error());
        }
    }
    if (!settle(served, failed)) {
        PortError error;
        error.tier = name_;
        error.message = name_ + ": other transfers have failed at the copies that took these bytes; write them again";
        throw PortFailure(failed.empty() ? std::move(error) : failed.front().second);
    }
}

unsigned CopiesPort::concurrency() const noexcept {
    unsigned most = 1;
    for (const auto& copy : copies_) {
        most = std::max(most, copy->port->concurrency());
    }
    return most;
}

bool CopiesPort::copies() const noexcept {
    return std::all_of(copies_.begin(), copies_.end(), [](const auto& copy) { return copy->port->copies(); });
}

bool CopiesPort::serves_faults() const noexcept {
    return std::all_of(copies_.begin(), copies_.end(), [](const auto& copy) { return copy->port->serves_faults(); });
}

std::vector<std::optional<PortError>> CopiesPort::faults() const {
    const std::lock_guard lock(*mutex_);
    std::vector<std::optional<PortError>> found;
    for (const auto& copy : copies_) {
        found.push_back(copy->fault);
    }
    return found;
}

bool CopiesPort::take_out(std::size_t index, std::string why) {
    const std::lock_guard lock(*mutex_);
    const bool has_other =
        std::any_of(copies_.begin(), copies_.end(), [&](const auto& copy) { return copy != copies_[index] && !copy->fault; });
    if (has_other && !copies_[index]->fault) {
        copies_[index]->fault = PortError{ErrorKind::tier, std::move(why), name_, 0, nullptr};
    }
    return has_other;
}

std::vector<std::size_t> CopiesPort::in_use() const {
    const std::lock_guard lock(*mutex_);
    std::vector<std::size_t> found;
    for (std::size_t index = 0; index < copies_.size(); ++index) {
        if (!copies_[index]->fault) {
            found.push_back(index);
        }
    }
    return found;
}

// Takes the copies that failed out of use. False, and nothing is changed, if no copy that served is in use any more: another
// transfer, which only the failed copies have served, has taken it out.
bool CopiesPort::settle(const std::vector<std::size_t>& served, const Failed& failed) {
    const std::lock_guard lock(*mutex_);
    const auto is_in_use = [this](std::size_t index) { return !copies_[index]->fault; };
    if (std::none_of(served.begin(), served.end(), is_in_use)) {
        return false;
    }
    for (const auto& [index, error] : failed) {
        if (is_in_use(index)) {
            copies_[index]->fault = error;
        }
    }
    return true;
}

}  // namespace farpool
