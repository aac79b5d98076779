#include "node/protocol.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <system_error>
#include <utility>
#include <vector>

#include "core/crc32c.hpp"
#include "node/packed.hpp"

namespace farpool {

namespace {

// The key at the end of meta; empty if it is not a valid key.
std::string_view key_after(const std::vector<std::byte>& meta, std::size_t offset) {
    if (meta.size() <= offset || meta.size() - offset > largest_key) {
        return {};
    }
    return {reinterpret_cast<const char*>(meta.data()) + offset, meta.size() - offset};
}

// Size of a publish area: a small part of the node's capacity, and small enough for a processor's cache.
std::uint64_t area_nbytes(std::uint64_t capacity) {
    return std::clamp(std::bit_floor(capacity / 64), std::uint64_t{4} << 10, std::uint64_t{1} << 20);
}

// Meta of the reply to a publish that failed: the object that the key has already, or why there can be none.
std::string unfinished(const Found& found) {
    return found.status == Status::present ? packed(found.nbytes, found.crc, std::uint32_t{0}, found.head)
           : found.status == Status::busy  ? Sessions::beyond_share
                                           : "";
}

// Text for a range outside of a lease.
std::string beyond_lease(const Lease& lease) {
    return "expected a range inside the lease of " + std::to_string(lease.nbytes) + " bytes";
}

// The keys of a lookup follow its flags and their number.
constexpr std::size_t first_key_at = 2 * sizeof(std::uint32_t);
constexpr const char* expected_keys =
    "expected flags 0 or 1, a count, and as many keys of 1 to 256 bytes, each behind its length";

}  // namespace

void Protocol::begin_frame() {
    if (input_.left() > services_.budget.limit()) {
        reply(Status::too_large);
        return input_.end();  // reading past so many bytes would take as long as serving them
    }
    const FrameHeader& header = input_.header();
    const bool admitted = header.tenant == 0 || header.tenant == client_.tenant;
    // A client that may publish may begin an epoch with any request, because it could also delete every object.
    if (admitted && is_behind() && client_.may(rights::publish)) {
        rotate(header.epoch);
    }
    if (!admitted) {
        input_.refuse(Status::denied);
    } else if (input_.op() == Op::put) {
        begin_put();
    } else if (input_.op() == Op::write) {
        begin_write();
    } else if (input_.left() > 0) {
        input_.refuse(Status::bad_request, 0, "expected no payload with this operation");
    }
}

void Protocol::finish_frame() {
    if (input_.is_refused()) {
        Input::Refusal refusal = input_.take_refusal();
        reply(refusal.status, refusal.serial, std::move(refusal.meta));
    } else {
        answer();
    }
}

void Protocol::go_on() {
    if (commit_) {
        go_on_with_commit();
    } else if (lookup_) {
        go_on_with_lookup();
    }
}

void Protocol::close() {
    abort_put();
    services_.sessions.give_back(std::exchange(written_lease_, nullptr));
}

bool Protocol::may(std::uint32_t right) {
    if (!client_.may(right)) {
        reply(Status::denied);
    }
    return client_.may(right);
}

bool Protocol::may_change() {
    const bool allowed = services_.admission.allows_changes();
    if (!allowed) {
        reply(Status::denied, 0, Admission::unchangeable);
    }
    return allowed;
}

std::string_view Protocol::key_or_refuse(std::uint32_t right, std::size_t offset, const char* expected) {
    if (!may(right)) {
        return {};
    }
    const std::string_view key = key_after(input_.meta(), offset);
    if (key.empty()) {
        reply(Status::bad_request, 0, std::string("expected ") + expected + " of 1 to 256 bytes");
    }
    return key;
}

std::optional<Found> Protocol::found_or_refuse(std::string_view key, bool visit) {
    if (key.empty()) {
        return std::nullopt;
    }
    // A client that knows a later epoch, and may not announce it, sees every object here as outdated.
    Found found = is_behind() ? Found{} : client_.objects.find(key, visit);
    if (found.status != Status::done) {
        reply(found.status);
        return std::nullopt;
    }
    return found;
}

void Protocol::answer() {
    switch (input_.op()) {
        case Op::get:
            return answer_get();
        case Op::stat:
            return answer_stat();
        case Op::put:
            return finish_put();
        case Op::drop:
            return answer_drop();
        case Op::touch:
            return answer_touch();
        case Op::retain:
            return answer_retain();
        case Op::end_session:
            return answer_end_session();
        case Op::pin:
            return answer_pin();
        case Op::unpin:
            return answer_unpin();
        case Op::prepare:
            return answer_prepare();
        case Op::commit:
            return answer_commit();
        case Op::abort:
            return answer_abort();
        case Op::area:
            return answer_area();
        case Op::demote:
            return answer_demote();
        case Op::lookup:
            return answer_lookup();
        case Op::rotate:
            return answer_rotate();
        case Op::read:
            return answer_read();
        case Op::write:
            return finish_write();
        case Op::ping:
            return reply(Status::done);
        default:
            return reply(Status::bad_request, 0, "an operation that this node does not know");
    }
}

void Protocol::begin_put() {
    if (!client_.may(rights::publish)) {
        input_.refuse(Status::denied);
    } else if (key_after(input_.meta(), sizeof(ObjectHead)).empty()) {
        input_.refuse(Status::bad_request, 0, "expected what the object is, and a key of 1 to 256 bytes");
    }
}

// Takes memory for the next slice of a put, and evicts other objects for it, when its bytes arrive and not when a header
// announces them.
void Protocol::extend_payload() {
    Catalogue& objects = client_.objects;
    std::byte* place = nullptr;
    if (!put_) {
        if (is_turned_away(key_after(input_.meta(), sizeof(ObjectHead)))) {
            return input_.refuse(Status::full, 0, services_.admission.refusal());
        }
        const std::uint64_t nbytes = input_.header().payload_nbytes;
        const auto prepare = [&] {
            return objects.prepare(key_after(input_.meta(), sizeof(ObjectHead)), nbytes,
                                   number_at<ObjectHead>(input_.meta(), 0), Catalogue::Arrival::in_slices);
        };
        Found prepared = prepare();
        // We give up another put only if this one can continue then.
        while (prepared.status == Status::full && !objects.may_announce(nbytes) && services_.give_up_a_put(objects)) {
            prepared = prepare();
        }
        if (prepared.status != Status::done) {
            return input_.refuse(prepared.status, prepared.serial, unfinished(prepared));
        }
        put_ = Put{prepared.offset, prepared.serial};
        place = objects.at(prepared.payload);
    } else if (const Status status = objects.extend(put_->extent); status != Status::done) {
        abort_put();
        return input_.refuse(status, 0, status == Status::busy ? Sessions::beyond_share : "");
    }
    const std::uint64_t room = objects.writable(put_->extent) - input_.arrived();
    input_.receive_into(place, room);
    services_.turn.spend(work::backed_byte * room);
}

void Protocol::finish_put() {
    if (!put_) {  // a payload of 0 bytes
        extend_payload();
        if (input_.is_refused()) {
            return finish_frame();
        }
    }
    if (input_.crc() != input_.header().payload_crc) {
        abort_put();
        services_.tallies.add_checksum_error();
        return reply(Status::checksum);
    }
    const Put put = *std::exchange(put_, std::nullopt);
    publish(put.extent, put.serial, input_.crc());
}

void Protocol::abort_put() {
    if (put_) {
        client_.objects.abort(put_->extent, put_->serial);
        put_.reset();
    }
}

void Protocol::give_up_put() {
    abort_put();
    input_.refuse(Status::full);
}

void Protocol::publish(std::uint64_t extent, std::uint64_t serial, std::uint32_t crc) {
    services_.turn.spend(work::publish);
    const Found found = client_.objects.commit(extent, serial, crc);
    if (found.status == Status::done) {
        services_.tallies.add_put();
        client_.objects.count_put();
    }
    reply(found.status, found.serial, unfinished(found));
}

void Protocol::answer_get() {
    const std::string_view key = key_or_refuse(rights::read);
    if (!key.empty()) {
        client_.objects.count_get();
    }
    const std::optional<Found> found = found_or_refuse(key, true);
    if (!found) {
        return;
    }
    client_.objects.count_hit();
    reply(Status::done, found->serial, packed(found->head));
    if (found->view == nullptr) {
        return replies_.fetch(*found, key, 0);
    }
    replies_.send_object(found->visited ? client_.objects.copy_to_ram(*found) : *found, key);
}

void Protocol::answer_stat() {
    if (const auto found = found_or_refuse(key_or_refuse(rights::read), false)) {
        reply(Status::done, found->serial, packed(found->nbytes, found->crc, found->pins, found->head));
    }
}

void Protocol::answer_drop() {
    const std::string_view key = key_or_refuse(rights::publish);
    if (key.empty() || !may_change()) {
        return;
    }
    const Status status = client_.objects.remove(key);
    if (status == Status::done) {
        services_.tallies.add_drop();
    }
    reply(status);
}

void Protocol::answer_demote() {
    const std::string_view key = key_or_refuse(rights::publish);
    if (key.empty() || !may_change()) {
        return;
    }
    if (const auto found = found_or_refuse(key, false)) {
        reply(client_.objects.demote(*found));
    }
}

void Protocol::answer_touch() {
    constexpr std::size_t fixed = 2 * sizeof(std::uint64_t);
    const std::string_view key = key_or_refuse(rights::publish, fixed, "a time to live, what to do with it, and a key");
    if (key.empty() || !may_change()) {
        return;
    }
    const auto keep = number_at<std::uint64_t>(input_.meta(), sizeof(std::uint64_t));
    if (keep > static_cast<std::uint64_t>(Keep::let_go)) {
        return reply(Status::bad_request, 0, "expected 0 (as it is), 1 (keep) or 2 (let go) behind the time to live");
    }
    const Touched touched =
        client_.objects.touch(key, number_at<std::uint64_t>(input_.meta(), 0), static_cast<Keep>(keep), input_.header().serial);
    reply(touched.status, touched.mark, touched.status == Status::busy ? Sessions::beyond_share : "");
}

void Protocol::answer_retain() {
    constexpr std::size_t fixed = 3 * sizeof(std::uint64_t);
    const std::string_view key = key_or_refuse(rights::publish, fixed, "a session, a priority, its time, and a key");
    if (key.empty() || !may_change()) {
        return;
    }
    const auto word = number_at<std::uint64_t>(input_.meta(), sizeof(std::uint64_t));
    const std::uint64_t priority = word & ~retain_raises;
    if (priority > Retention::priority_max) {
        return reply(Status::bad_request, 0, "expected a priority from 0 to 7, and perhaps 256, behind the session");
    }
    const Retained retained{static_cast<std::uint8_t>(priority), number_at<std::uint64_t>(input_.meta(), 0),
                            end_of(number_at<std::uint64_t>(input_.meta(), 2 * sizeof(std::uint64_t)))};
    const bool raises = (word & retain_raises) != 0;
    reply(is_behind() ? Status::missing : client_.objects.retain(key, retained, raises));
}

void Protocol::answer_end_session() {
    if (!may(rights::publish) || !may_change()) {
        return;
    }
    if (input_.meta().size() != sizeof(std::uint64_t)) {
        return reply(Status::bad_request, 0, "expected a session");
    }
    const std::size_t objects = client_.objects.end_session(number_at<std::uint64_t>(input_.meta(), 0));
    services_.turn.spend(work::key * objects);
    reply(Status::done, 0, packed(std::uint64_t{objects}));
}

void Protocol::answer_lookup() {
    if (!may(rights::read)) {
        return;
    }
    const std::vector<std::byte>& meta = input_.meta();
    const std::uint32_t flags = meta.size() < first_key_at ? 2 : number_at<std::uint32_t>(meta, 0);
    const std::uint32_t count = meta.size() < first_key_at ? 0 : number_at<std::uint32_t>(meta, sizeof flags);
    if (flags > 1 || LookedUp::nbytes(count) > largest_meta) {
        return reply(Status::bad_request, 0, flags > 1 ? expected_keys : "expected fewer keys: the answer would be too long");
    }
    lookup_.emplace(Lookup{count, flags == 1, client_.objects.epoch(), LookedUp(count), 0, first_key_at});
    go_on_with_lookup();
}

// Looks up as many of the next keys as the turn has room for, and answers after the last key.
void Protocol::go_on_with_lookup() {
    Lookup& lookup = *lookup_;
    if (lookup.epoch != client_.objects.epoch()) {  // the objects that we found so far are outdated
        lookup = Lookup{lookup.count, lookup.visits, client_.objects.epoch(), LookedUp(lookup.count), 0, first_key_at};
    }
    const std::vector<std::byte>& meta = input_.meta();
    for (; lookup.number < lookup.count; ++lookup.number) {
        if (services_.turn.is_read_out()) {
            return;
        }
        std::uint16_t length = 0;
        if (meta.size() - lookup.at >= sizeof length) {
            length = number_at<std::uint16_t>(meta, lookup.at);
            lookup.at += sizeof length;
        }
        if (length == 0 || length > largest_key || length > meta.size() - lookup.at) {
            lookup_.reset();
            return reply(Status::bad_request, 0, expected_keys);
        }
        services_.turn.spend(work::key);
        const std::string_view key(reinterpret_cast<const char*>(meta.data()) + lookup.at, length);
        const Found found = client_.objects.find(key, lookup.visits);
        const bool is_there = found.status == Status::done && !is_behind();
        client_.objects.count_lookup(is_there);
        if (is_there) {
            lookup.answer.add(lookup.number, found.nbytes);
        }
        lookup.at += length;
    }
    const bool whole = lookup.at == meta.size();
    std::string answer = std::move(lookup.answer.meta);
    lookup_.reset();
    if (!whole) {
        return reply(Status::bad_request, 0, expected_keys);
    }
    reply(Status::done, 0, std::move(answer));
}

void Protocol::rotate(std::uint32_t epoch) {
    client_.objects.rotate(epoch);
    if (const std::uint64_t gone = client_.objects.begun().objects; gone > 0) {
        services_.events.note("rotated", client_.session,
                              "tenant " + std::to_string(client_.tenant) + " is in epoch " + std::to_string(epoch) + ": " +
                                  std::to_string(gone) + " objects can no longer be read");
    }
}

void Protocol::answer_rotate() {
    if (!client_.may(rights::publish) || !client_.may(rights::admin)) {
        return reply(Status::denied, 0, "an access key needs the rights 'publish' and 'admin' to rotate its tenant");
    }
    if (input_.meta().size() != sizeof(std::uint32_t)) {
        return reply(Status::bad_request, 0, "expected an epoch");
    }
    const auto epoch = number_at<std::uint32_t>(input_.meta(), 0);
    if (epoch > client_.objects.epoch()) {
        rotate(epoch);
    }
    // Another program may have announced this epoch a moment ago.
    const Rotated gone = epoch == client_.objects.epoch() ? client_.objects.begun() : Rotated{};
    reply(Status::done, 0, packed(client_.objects.epoch(), std::uint32_t{0}, gone.objects, gone.nbytes));
}

void Protocol::answer_pin() {
    constexpr std::size_t fixed = sizeof(std::uint64_t);
    const std::string_view key = key_or_refuse(rights::read, fixed, "a time to live and a key");
    const std::optional<Found> found = found_or_refuse(key, true);
    if (!found) {
        return;
    }
    const auto ttl_ms = number_at<std::uint64_t>(input_.meta(), 0);
    reply(Status::done, found->serial);
    if (found->view == nullptr) {
        return replies_.fetch(*found, key, ttl_ms);
    }
    const Found in_ram = client_.objects.copy_to_ram(*found);
    if (!in_ram.is_mapped_by_readers) {
        return replies_.last().refuse(Status::full);
    }
    replies_.send_pin(in_ram, ttl_ms);
}

void Protocol::answer_unpin() {
    const std::vector<std::byte>& meta = input_.meta();
    const bool numbered = meta.size() == 2 * sizeof(std::uint64_t);
    if (!numbered && meta.size() != sizeof(std::uint64_t)) {
        return reply(Status::bad_request, 0, "expected the offset of a pinned payload, and the pin's number or nothing");
    }
    const std::uint64_t number = numbered ? number_at<std::uint64_t>(meta, sizeof(std::uint64_t)) : 0;
    const bool known = services_.sessions.unpin(client_, number_at<std::uint64_t>(meta, 0), input_.header().serial, number);
    reply(known ? Status::done : Status::unknown);
}

void Protocol::answer_prepare() {
    constexpr std::size_t fixed = sizeof(std::uint64_t) + sizeof(ObjectHead);
    const std::string_view key = key_or_refuse(rights::publish, fixed, "a length, what the object is, and a key");
    if (key.empty()) {
        return;
    }
    Sessions& sessions = services_.sessions;
    if (!sessions.is_exposed(client_)) {  // it could not write there, and a place takes its memory at once
        return reply(Status::denied, 0,
                     "places are prepared for programs that write them over a one-sided fabric, to which the objects were "
                     "exposed; put instead");
    }
    if (is_turned_away(key)) {
        return reply(Status::full, 0, services_.admission.refusal());
    }
    const auto nbytes = number_at<std::uint64_t>(input_.meta(), 0);
    if (std::string refusal = sessions.preparation_refusal(client_, nbytes); !refusal.empty()) {
        return reply(Status::busy, 0, std::move(refusal));
    }
    const Found prepared = client_.objects.prepare(key, nbytes, number_at<ObjectHead>(input_.meta(), sizeof(std::uint64_t)));
    if (prepared.status != Status::done) {
        return reply(prepared.status, prepared.serial, unfinished(prepared));
    }
    sessions.add_preparation(client_, prepared, nbytes);
    reply(Status::done, prepared.serial, packed(prepared.payload));
}

// The session's preparation at the place in the request; null after a refusal, because none has that serial.
const Sessions::Preparation* Protocol::preparation_or_refuse() {
    const auto* const found =
        services_.sessions.preparation(client_, number_at<std::uint64_t>(input_.meta(), 0), input_.header().serial);
    if (found == nullptr) {
        reply(Status::unknown);
    }
    return found;
}

void Protocol::answer_commit() {
    if (input_.meta().size() != 2 * sizeof(std::uint64_t)) {
        return reply(Status::bad_request, 0, "expected an offset and a checksum");
    }
    commit_.emplace();
    go_on_with_commit();
}

// Checks the payload of a commit, a part in each turn, and publishes the payload if it is what the client says.
void Protocol::go_on_with_commit() {
    const Sessions::Preparation* const preparation = preparation_or_refuse();  // another connection may have ended it
    if (preparation == nullptr) {
        return commit_.reset();
    }
    const auto payload = number_at<std::uint64_t>(input_.meta(), 0);
    const std::uint64_t nbytes = client_.objects.writable(preparation->extent);
    while (commit_->checked < nbytes) {
        if (services_.turn.is_read_out()) {
            return;
        }
        const std::uint64_t step = std::min<std::uint64_t>(nbytes - commit_->checked, services_.turn.step_nbytes());
        commit_->crc = crc32c(client_.objects.at(payload + commit_->checked), step, commit_->crc);
        commit_->checked += step;
        services_.turn.spend(step);
    }
    const std::uint32_t crc = commit_->crc;
    commit_.reset();
    const bool whole = crc == number_at<std::uint32_t>(input_.meta(), sizeof(std::uint64_t));
    if (whole) {
        publish(preparation->extent, preparation->serial, crc);
    }
    services_.sessions.end_preparation(client_, payload);
    if (!whole) {
        services_.tallies.add_checksum_error();
        reply(Status::checksum);
    }
}

void Protocol::answer_abort() {
    if (input_.meta().size() != sizeof(std::uint64_t)) {
        return reply(Status::bad_request, 0, "expected the offset of a prepared payload");
    }
    if (preparation_or_refuse() != nullptr) {
        services_.sessions.end_preparation(client_, number_at<std::uint64_t>(input_.meta(), 0));
        reply(Status::done);
    }
}

// Gives the connection a publish area: memory of its own, into which it writes payloads and which the node only reads.
void Protocol::answer_area() {
    if (!may(rights::publish)) {
        return;
    }
    if (!passes_files_ || input_.has_area()) {
        return reply(Status::bad_request, 0, "expected a connection over the node's UNIX socket that has no publish area yet");
    }
    SegmentHeader settings{};
    settings.kind = static_cast<std::uint32_t>(SegmentKind::area);
    settings.capacity = area_nbytes(services_.budget.limit());
    settings.session = client_.session;
    settings.tenant = client_.tenant;
    const std::uint64_t nbytes = segment_header_nbytes + settings.capacity;
    if (std::string refusal = services_.sessions.charge_area(client_, nbytes); !refusal.empty()) {
        return reply(Status::busy, 0, std::move(refusal));
    }
    Segment area;
    File passed;
    try {
        area = make_nameless_segment("farpool-publish-area", settings);
        if (!back(area, 0, nbytes)) {
            services_.sessions.uncharge_area(client_, nbytes);
            return reply(Status::full);
        }
        Mapping read_only(area.file.fd(), nbytes, false);
        area.guarded = GuardedRange(read_only.data(), nbytes);
        area.memory = std::move(read_only);
        passed = File(area.file.duplicate());
    } catch (const std::system_error& error) {  // out of descriptors: the connection puts without an area
        services_.sessions.uncharge_area(client_, nbytes);
        return reply(Status::full, 0, error.code().message());
    } catch (...) {  // the connection ends, and would release only an area that it has
        services_.sessions.uncharge_area(client_, nbytes);
        throw;
    }
    input_.set_area(std::move(area));
    reply(Status::done);
    replies_.last().file = std::move(passed);
}

void Protocol::begin_write() {
    if (!client_.may(rights::write)) {
        return input_.refuse(Status::denied);
    }
    if (input_.meta().size() != sizeof(std::uint64_t)) {
        return input_.refuse(Status::bad_request, 0, "expected an offset");
    }
    LeaseAccess access = lease_for(rights::write);
    if (access.lease == nullptr) {
        return input_.refuse(access.status, 0, std::move(access.text));
    }
    std::shared_ptr<Lease> lease = std::move(access.lease);
    const auto offset = number_at<std::uint64_t>(input_.meta(), 0);
    if (offset > lease->nbytes || input_.left() > lease->nbytes - offset) {
        return input_.refuse(Status::bad_request, 0, beyond_lease(*lease));
    }
    input_.receive_into(lease->segment.data() + offset, input_.left());
    written_lease_ = std::move(lease);
    written_at_ = Clock::now();
}

LeaseAccess Protocol::lease_for(std::uint32_t right) const {
    // The real time, because a ticket expires even while the node stands still.
    return services_.sessions.access(client_.session, input_.header().lease, right, Clock::now());
}

void Protocol::fence() {
    fence_write();
    replies_.fence_reads();
}

void Protocol::fence_write() {
    if (written_lease_ == nullptr || written_lease_->session != 0) {  // only extents belong to no session
        return;
    }
    // A write that began in time may end after the ticket has expired. Only an epoch, or an order, stops it.
    LeaseAccess access = services_.sessions.access(client_.session, written_lease_->id, rights::write, written_at_);
    if (access.lease == nullptr) {
        services_.sessions.give_back(std::exchange(written_lease_, nullptr));
        input_.refuse(access.status, 0, std::move(access.text));
    }
}

void Protocol::finish_write() {
    services_.sessions.give_back(std::exchange(written_lease_, nullptr));
    const bool whole = input_.crc() == input_.header().payload_crc;
    if (!whole) {
        services_.tallies.add_checksum_error();
    }
    reply(whole ? Status::done : Status::checksum);
}

void Protocol::answer_read() {
    if (!may(rights::write)) {
        return;
    }
    if (input_.meta().size() != 2 * sizeof(std::uint64_t)) {
        return reply(Status::bad_request, 0, "expected an offset and a length");
    }
    LeaseAccess access = lease_for(rights::read);
    if (access.lease == nullptr) {
        return reply(access.status, 0, std::move(access.text));
    }
    std::shared_ptr<Lease> lease = std::move(access.lease);
    const auto offset = number_at<std::uint64_t>(input_.meta(), 0);
    const auto nbytes = number_at<std::uint64_t>(input_.meta(), sizeof(std::uint64_t));
    if (offset > lease->nbytes || nbytes > lease->nbytes - offset) {
        return reply(Status::bad_request, 0, beyond_lease(*lease));
    }
    reply(Status::done);
    replies_.last().send_lease(std::move(lease), offset, nbytes);
}

}  // namespace farpool
