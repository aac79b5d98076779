#include "wire/object_reader.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <system_error>
#include <utility>

#include "core/clock.hpp"
#include "core/crc32c.hpp"
#include "core/error.hpp"
#include "core/helped.hpp"
#include "wire/frame.hpp"

namespace farpool {

namespace {

// Limit on the steps along a chain, which has two or three slots: a chain that the node is changing may lead anywhere.
constexpr unsigned longest_chain = 1024;
constexpr std::int64_t looking_period_ms = 10;

const char* kind_name(SegmentKind kind) {
    return kind == SegmentKind::index ? "index" : kind == SegmentKind::objects ? "data" : "visited";
}

Mapping map_segment(int fd, SegmentKind kind, const std::string& node, bool writable) {
    const std::string what = std::string("the ") + kind_name(kind) + " file of its objects ";
    struct stat status{};
    if (fstat(fd, &status) != 0) {
        const int code = errno;
        fail_node(ErrorKind::node, node, what + "cannot be opened: " + std::strerror(code), code);
    }
    const auto nbytes = static_cast<std::uint64_t>(status.st_size);
    if (nbytes < segment_header_nbytes) {
        fail_node(ErrorKind::protocol, node, what + "is not a segment file");
    }
    try {
        Mapping mapping(fd, nbytes, writable);
        if (const char* fault = segment_fault(*mapping.at<SegmentHeader>(0), nbytes, kind); fault != nullptr) {
            fail_node(ErrorKind::protocol, node, what + fault);
        }
        return mapping;
    } catch (const std::system_error& error) {
        fail_node(ErrorKind::node, node, what + "cannot be mapped: " + error.code().message(), error.code().value());
    }
}

}  // namespace

ObjectReader::ObjectReader(int index_fd, int data_fd, int visited_fd, std::string node, int lifeline,
                           std::shared_ptr<TenantEpoch> epoch)
    : node_(std::move(node)),
      index_(map_segment(index_fd, SegmentKind::index, node_, false)),
      data_(map_segment(data_fd, SegmentKind::objects, node_, false)),
      visited_(map_segment(visited_fd, SegmentKind::visited, node_, true)),
      epoch_(std::move(epoch)) {
    seed_ = header().hash_seed;
    slot_limit_ = header().slot_limit;
    buckets_at_ = header().buckets_at;
    slots_at_ = header().slots_at;
    const std::uint64_t nbytes = index_.nbytes();
    if (std::memcmp(header().id, data_.at<SegmentHeader>(0)->id, sizeof header().id) != 0 ||
        std::memcmp(header().id, visited_.at<SegmentHeader>(0)->id, sizeof header().id) != 0) {
        fail_node(ErrorKind::protocol, node_, "the files of its objects do not belong together");
    }
    if (buckets_at_ > nbytes || buckets_at_ % sizeof(std::uint32_t) != 0 || slots_at_ > nbytes || slots_at_ % 8 != 0 ||
        slot_limit_ > (nbytes - slots_at_) / sizeof(IndexSlot)) {
        fail_node(ErrorKind::protocol, node_, "the index of its objects names places outside of its files");
    }
    if (!std::has_single_bit(visited_.nbytes() - segment_header_nbytes)) {
        fail_node(ErrorKind::protocol, node_, "the marks of visits are not as many as a power of two");
    }
    visited_mask_ = visited_.nbytes() - segment_header_nbytes - 1;
    if (lifeline >= 0) {
        lifeline_ = fcntl(lifeline, F_DUPFD_CLOEXEC, 0);
    }
}

ObjectReader::~ObjectReader() {
    if (lifeline_ >= 0) {
        close(lifeline_);
    }
}

// True while the node runs. The system call costs as much as a small read, so it is made only from time to time; no node starts
// within that time.
bool ObjectReader::node_lives() const noexcept {
    if (lifeline_ < 0) {
        return true;
    }
    constexpr std::int64_t never_again = std::numeric_limits<std::int64_t>::max();
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    const std::int64_t now = std::int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1000000;
    const std::int64_t looked = looked_at_.load(std::memory_order_relaxed);
    if (looked == never_again || now - looked < looking_period_ms) {
        return looked != never_again;
    }
    pollfd asked{lifeline_, POLLRDHUP, 0};
    const bool dead = poll(&asked, 1, 0) > 0;
    looked_at_.store(dead ? never_again : now, std::memory_order_relaxed);
    return !dead;
}

// True if the node does not know the tenant's epoch yet, for example because it is stopped, or if its epoch word is damaged.
bool ObjectReader::outdated() const noexcept {
    if (epoch_ == nullptr) {
        return false;
    }
    const std::optional<std::uint32_t> here = epoch_in(header().epoch.load(std::memory_order_acquire));
    if (!here || *here < epoch_->get()) {
        return true;
    }
    epoch_->meet(*here);
    return false;
}

void ObjectReader::fail_damaged(std::string_view key, const char* what) const {
    fail_checksum(node_, std::string("the ") + what + " of the object with the key of " + std::to_string(key.size()) +
                             " bytes is damaged in the node's memory; drop the object and put it again");
}

bool ObjectReader::stands(const IndexSlot& slot, std::uint64_t serial) const noexcept {
    // Orders the earlier loads before the load of the serial, which would otherwise be compared too early.
    std::atomic_thread_fence(std::memory_order_acquire);
    return slot.serial.load(std::memory_order_relaxed) == serial && !retired();
}

std::optional<ObjectReader::Found> ObjectReader::find(std::string_view key) const {
    if (!in_service()) {
        return std::nullopt;
    }
    auto found = probe(key, true);
    return found && (found->shelved || surprises(found->copies)) ? std::nullopt : found;
}

// True, once only, if the number of copies differs from the expected one.
bool ObjectReader::surprises(std::uint8_t copies) const noexcept {
    int expected = expected_copies_.load(std::memory_order_relaxed);
    return expected >= 0 && expected != copies &&
           expected_copies_.compare_exchange_strong(expected, -1, std::memory_order_relaxed);
}

std::optional<std::uint64_t> ObjectReader::size_of(std::string_view key, bool visit) const {
    try {
        const auto found = probe(key, visit);
        return found ? std::optional<std::uint64_t>(found->nbytes) : std::nullopt;
    } catch (const PortFailure&) {  // damaged: the node deletes it when it is asked
        return std::nullopt;
    }
}

std::optional<ObjectReader::Found> ObjectReader::probe(std::string_view key, bool visit) const {
    const std::uint64_t hash = hash64(key.data(), key.size(), seed_);
    const std::uint64_t table = header().level_and_split.load(std::memory_order_acquire);
    const std::uint64_t first = header().first_serial.load(std::memory_order_acquire);
    if (table >> 32 > 31) {
        return std::nullopt;
    }
    const std::uint64_t bucket = bucket_of(hash, table);
    if (bucket >= (index_.nbytes() - buckets_at_) / sizeof(std::uint32_t)) {
        return std::nullopt;
    }
    auto next = index_.at<std::atomic<std::uint32_t>>(buckets_at_)[bucket].load(std::memory_order_acquire);
    for (unsigned step = 0; next != 0 && next <= slot_limit_ && step < longest_chain; ++step) {
        const std::uint64_t number = next - 1;
        const IndexSlot& slot = index_.at<IndexSlot>(slots_at_)[number];
        next = slot.next.load(std::memory_order_acquire);
        const std::uint64_t serial = slot.serial.load(std::memory_order_acquire);
        if (serial == 0 || serial < first || slot.hash.load(std::memory_order_relaxed) != hash) {
            continue;
        }
        const std::uint64_t offset = slot.offset.load(std::memory_order_relaxed);
        const std::uint64_t nbytes = std::uint64_t{slot.units.load(std::memory_order_relaxed)} * unit_nbytes;
        const std::uint64_t expiry = slot.expiry.load(std::memory_order_relaxed);
        if (offset % unit_nbytes != 0 || offset < segment_header_nbytes || offset > data_.nbytes() ||
            nbytes > data_.nbytes() - offset || nbytes < unit_nbytes) {
            return std::nullopt;  // the slot is changing: no such extent exists
        }
        const bool shelved = slot.blocks.load(std::memory_order_relaxed) != 0;
        // Copied first, because it may change between any two reads.
        struct {
            ObjectHeader header;
            std::byte key[largest_key];
        } seen;
        const std::byte* extent = data_.data() + offset;
        std::memcpy(&seen.header, extent, sizeof seen.header);
        const std::size_t key_nbytes = seen.header.key_nbytes;
        if (key_nbytes <= largest_key && sizeof seen.header + key_nbytes <= nbytes) {
            std::memcpy(seen.key, extent + sizeof seen.header, key_nbytes);
        }
        const bool whole = is_whole(seen.header, nbytes, !shelved) && seen.header.serial == serial;
        if (!stands(slot, serial)) {
            return std::nullopt;
        }
        if (!whole) {
            fail_damaged(key, "header");
        }
        if (key_of(seen.header) != key) {
            continue;
        }
        if (has_expired(expiry)) {
            return std::nullopt;
        }
        const std::atomic_ref visited(visited_.at<unsigned char>(segment_header_nbytes)[number & visited_mask_]);
        if (visit &&
            visited.load(std::memory_order_relaxed) == 0) {  // otherwise the cache line would move between cores for no reason
            visited.store(1, std::memory_order_relaxed);
        }
        return Found{
            &slot,  serial, extent + payload_at(key_nbytes), seen.header.nbytes, seen.header.payload_crc, seen.header.copies,
            shelved};
    }
    return std::nullopt;
}

bool ObjectReader::copy(const Found& found, Parts into) const {
    std::uint32_t crc = 0;
    std::size_t done = 0;
    for (const iovec& part : into) {
        const std::size_t step = std::min(part.iov_len, found.nbytes - done);
        crc = copy_crc32c(part.iov_base, found.payload + done, step, crc);
        done += step;
    }
    if (!stands(*found.slot, found.serial)) {
        return false;
    }
    if (crc != found.crc) {
        fail_checksum(node_, "the payload of " + std::to_string(found.nbytes) + " bytes of serial " +
                                 std::to_string(found.serial) +
                                 " is damaged in the node's memory; drop the object and put it again");
    }
    return true;
}

void ObjectReader::copy_one(Wanted& wanted, double deadline) const noexcept {
    if (monotonic_seconds() > deadline) {
        wanted.outcome = Wanted::Outcome::late;
        return;
    }
    try {
        const auto found = find(wanted.key);
        if (!found) {
            return;
        }
        wanted.nbytes = found->nbytes;
        if (found->nbytes > wanted.room) {
            wanted.outcome = Wanted::Outcome::too_small;
        } else if (copy(*found, wanted.into)) {
            wanted.outcome = Wanted::Outcome::copied;
        }
    } catch (
        const std::exception&) {  // damaged here: another copy may be whole, and the node deletes this one when it is asked
    }
}

void ObjectReader::copy_all(std::span<Wanted> wanted, double deadline) const noexcept {
    struct Work {
        const ObjectReader& reader;
        std::span<Wanted> wanted;
        double deadline;
        std::atomic<std::size_t> next = 0;

        void go_on() noexcept {
            for (std::size_t number = next.fetch_add(1); number < wanted.size(); number = next.fetch_add(1)) {
                reader.copy_one(wanted[number], deadline);
            }
        }
    } work{*this, wanted, deadline};
    std::size_t nbytes = 0;
    for (const Wanted& one : wanted) {
        nbytes += one.room;
    }
    Helped help([](void* self) noexcept { static_cast<Work*>(self)->go_on(); }, &work);
    if (wanted.size() > 1 && nbytes >= Helped::worth_it) {
        help.offer();
    }
    work.go_on();
    help.end();
}

const std::byte* ObjectReader::payload(std::uint64_t offset, std::uint64_t nbytes) const {
    if (offset < segment_header_nbytes || offset > data_.nbytes() || nbytes > data_.nbytes() - offset) {
        fail_value(node_ + ": offset " + std::to_string(offset) + " and " + std::to_string(nbytes) +
                   " bytes lie outside of the objects' file of " + std::to_string(data_.nbytes()) + " bytes");
    }
    return data_.data() + offset;
}

}  // namespace farpool
