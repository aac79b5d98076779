// A reply on its way to a client. The memory of its payload is held until it has been sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "node/catalogue/entries.hpp"
#include "node/catalogue/medium.hpp"
#include "node/files.hpp"
#include "node/leases.hpp"
#include "node/loop_time.hpp"
#include "wire/frame.hpp"

namespace farpool {

struct Reply {
    FrameHeader header;
    std::string meta;
    const std::byte* payload = nullptr;
    std::uint64_t sent = 0;             // bytes
    std::uint64_t retained_object = 0;  // offset, 0 for none
    std::shared_ptr<Lease> retained_lease{};
    std::shared_ptr<AlignedBuffer> buffer{};  // has the payload if it was read from the lower medium
    std::uint64_t ticket = 0;                 // not 0: this reply is not ready, and the replies after it wait
    std::uint64_t fetched = 0;                // bytes that count as fetched until the reply has been sent
    std::uint64_t unsent = 0;                 // bytes that count as unsent until then
    Clock::time_point begun{};                // when the header of the request had arrived
    File file{};                              // attached to the first byte

    std::uint64_t nbytes() const noexcept { return sizeof header + meta.size() + header.payload_nbytes; }
    bool is_ready() const noexcept { return ticket == 0; }
    bool is_sent() const noexcept { return sent == nbytes(); }

    void set_meta(std::string text) {
        meta = std::move(text);
        seal_meta();
    }
    void seal_meta() { seal(header, meta.data(), static_cast<std::uint32_t>(meta.size())); }
    void describe(const Found& found) {
        header.serial = found.serial;
        header.payload_nbytes = found.nbytes;
        header.payload_crc = found.crc;
    }
    // Sends a range of a lease, which stays while the reply does.
    void send_lease(std::shared_ptr<Lease> lease, std::uint64_t offset, std::uint64_t nbytes) {
        header.payload_nbytes = nbytes;
        seal_meta();
        payload = lease->segment.data() + offset;
        retained_lease = std::move(lease);
    }
    // Turns the reply into a refusal.
    void refuse(Status status, std::string text = {}) {
        header.status = static_cast<std::uint16_t>(status);
        header.serial = 0;
        header.payload_nbytes = 0;
        header.payload_crc = 0;
        set_meta(std::move(text));
    }
};

}  // namespace farpool
