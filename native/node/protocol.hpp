// The operations of docs/wire.md, for the requests of one connection: what the node does when a frame has arrived.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "node/client.hpp"
#include "node/input.hpp"
#include "node/leases.hpp"
#include "node/replies.hpp"
#include "node/services.hpp"
#include "wire/looked_up.hpp"

namespace farpool {

class Protocol final : public FrameHandler {
public:
    // `passes_files`: the connection can receive files, as a publish area needs it.
    Protocol(const Client& client, Input& input, Replies& replies, Services& services, bool passes_files)
        : client_(client), input_(input), replies_(replies), services_(services), passes_files_(passes_files) {}

    void begin_frame() override;
    void extend_payload() override;
    void finish_frame() override;
    bool is_busy() const noexcept override { return commit_.has_value() || lookup_.has_value(); }
    // Continues a request that takes several turns.
    void go_on();

    // True if a put into these objects has memory for a part of its bytes, and the others have not arrived.
    bool has_announced_put(const Catalogue& objects) const noexcept {
        return put_ && &client_.objects == &objects && input_.lacks_room();
    }
    void give_up_put();
    // Drops the rest of a write to an extent, and refuses reads whose replies have not begun, if the session may not make them
    // any more: the pool lease has a later epoch now, may not be written any more, or has ended.
    void fence();
    // True while a write is being received into a lease that has ended.
    bool keeps_ended_lease() const noexcept { return written_lease_ != nullptr && written_lease_->over; }
    // Ends what the connection has begun, when it is closed.
    void close();

private:
    // A put or a commit in progress, by the offset of the extent.
    struct Put {
        std::uint64_t extent;
        std::uint64_t serial;
    };
    // A commit whose payload is being checked.
    struct Commit {
        std::uint64_t checked = 0;  // bytes
        std::uint32_t crc = 0;
    };
    // A lookup; each turn looks up some of its keys.
    struct Lookup {
        std::uint32_t count;
        bool visits;          // the objects count as used
        std::uint32_t epoch;  // of the tenant when the first keys were looked up
        LookedUp answer;
        std::uint32_t number = 0;  // of the next key
        std::size_t at = 0;        // in the request's meta
    };

    void reply(Status status, std::uint64_t serial = 0, std::string meta = {}) {
        replies_.add(input_.header(), input_.begun(), status, serial, std::move(meta));
    }
    // The client knows a later epoch than the catalogue, so for it every object here is outdated.
    bool is_behind() const { return input_.header().epoch > client_.objects.epoch(); }
    // True if the client has this right; otherwise replies.
    bool may(std::uint32_t right);
    // The key at the end of the request. Empty after a refusal: the client has not this right, or there is no such key.
    std::string_view key_or_refuse(std::uint32_t right, std::size_t offset = 0, const char* expected = "a key");
    // The object of a key. Empty after a refusal: there is no object, or the key is empty.
    std::optional<Found> found_or_refuse(std::string_view key, bool visit);
    const Sessions::Preparation* preparation_or_refuse();
    // True if the node takes no new objects now and the key has none yet.
    bool is_turned_away(std::string_view key) {
        return !services_.admission.takes_new() && client_.objects.find(key, false).status != Status::done;
    }
    // True if programs may change the objects of the node now; otherwise replies.
    bool may_change();

    void answer();
    void begin_put();
    void finish_put();
    void abort_put();
    void publish(std::uint64_t extent, std::uint64_t serial, std::uint32_t crc);
    // The lease of the request, if the session may use it so now.
    LeaseAccess lease_for(std::uint32_t right) const;
    void begin_write();
    void fence_write();
    void finish_write();
    void answer_get();
    void answer_stat();
    void answer_drop();
    void answer_demote();
    void answer_touch();
    void answer_retain();
    void answer_end_session();
    void answer_lookup();
    void go_on_with_lookup();
    void answer_rotate();
    void rotate(std::uint32_t epoch);
    void answer_pin();
    void answer_unpin();
    void answer_prepare();
    void answer_commit();
    void go_on_with_commit();
    void answer_abort();
    void answer_area();
    void answer_read();

    const Client& client_;
    Input& input_;
    Replies& replies_;
    Services& services_;
    const bool passes_files_;
    std::optional<Put> put_;
    std::shared_ptr<Lease> written_lease_;  // of a write that is being received
    Clock::time_point written_at_{};        // when the write was admitted
    std::optional<Commit> commit_;
    std::optional<Lookup> lookup_;
};

}  // namespace farpool
