#include "node/input.hpp"

#include <algorithm>
#include <cstring>

#include "core/crc32c.hpp"

namespace farpool {

namespace {

// Bytes that we receive and check at once: they are still in the processor's cache when we compute their checksum.
constexpr std::size_t direct_nbytes_max = 256 * 1024;
// Bytes that one connection may copy from a publish area in a turn. It is less than a turn allows, because the client sees only
// after each turn which part of the area is free again.
constexpr std::size_t area_turn_nbytes = 256 * 1024;
constexpr std::size_t area_step_nbytes = 64 * 1024;

}  // namespace

bool Input::may_copy() const noexcept { return copied_ < area_turn_nbytes; }

iovec Input::direct() const noexcept {
    if (stage_ != Stage::payload || room_ == 0 || is_in_area()) {
        return {nullptr, 0};
    }
    const std::uint64_t most = std::min(direct_nbytes_max, turn_.step_nbytes());
    return {into_, static_cast<std::size_t>(std::min<std::uint64_t>(room_, most))};
}

void Input::handle(FrameHandler& handler, std::size_t direct_nbytes, const std::byte* data, std::size_t nbytes,
                   Clock::time_point now) {
    received_ = now;
    progress_.moved(direct_nbytes + nbytes, deadlines_.at(now));
    if (direct_nbytes > 0) {
        crc_ = crc32c(into_, direct_nbytes, crc_);
        into_ += direct_nbytes;
        room_ -= direct_nbytes;
        left_ -= direct_nbytes;
        if (left_ == 0) {
            end_payload(handler);
        }
    }
    const std::size_t used = feed(handler, data, nbytes);
    if (used < nbytes && !fault_ && !ended_) {
        rest_.assign(data + used, data + nbytes);
    }
}

bool Input::handle_rest(FrameHandler& handler) {
    if (rest_.empty()) {
        return true;
    }
    rest_from_ += feed(handler, rest_.data() + rest_from_, rest_.size() - rest_from_);
    if (rest_from_ < rest_.size()) {
        return false;
    }
    rest_ = {};
    rest_from_ = 0;
    return true;
}

// Handles received bytes, and returns how many; the others wait for a later turn.
std::size_t Input::feed(FrameHandler& handler, const std::byte* data, std::size_t nbytes) {
    std::size_t done = 0;
    while (done < nbytes && !is_stopped(handler) && may_copy()) {
        const bool begins = have_ == 0 && (stage_ == Stage::header || (stage_ == Stage::payload && is_in_area()));
        if (begins && turn_.is_read_out()) {
            break;
        }
        done += feed_some(handler, data + done, nbytes - done);
        if (!fault_ && !ended_ && stage_ == Stage::meta && have_ == meta_.size()) {
            if (is_whole(header_, meta_.data())) {
                begin_frame(handler);
            } else {
                fail("a frame whose header and meta do not match their checksum");
            }
        }
    }
    return done;
}

// Copies bytes into a field; true when it is complete. `used` is the number of bytes.
bool Input::fill(void* field, std::size_t size, const std::byte* data, std::size_t nbytes, std::size_t& used) {
    used = std::min(nbytes, size - have_);
    std::memcpy(static_cast<std::byte*>(field) + have_, data, used);
    have_ += used;
    return have_ == size;
}

// Handles the next field of a frame, or the part of it that has arrived; returns its bytes.
std::size_t Input::feed_some(FrameHandler& handler, const std::byte* data, std::size_t nbytes) {
    std::size_t used = 0;
    if (stage_ == Stage::header) {
        if (have_ == 0) {
            progress_.begin();
        }
        if (fill(&header_, sizeof header_, data, nbytes, used)) {
            if (const char* fault = header_fault(header_)) {
                fail(fault);
                return used;
            }
            meta_.resize(header_.meta_nbytes);
            have_ = 0;
            stage_ = Stage::meta;
        }
    } else if (stage_ == Stage::meta) {
        fill(meta_.data(), meta_.size(), data, nbytes, used);
    } else if (stage_ == Stage::checksum) {
        if (fill(&header_.payload_crc, sizeof header_.payload_crc, data, nbytes, used)) {
            end_frame(handler);
        }
    } else if (is_in_area()) {
        if (fill(&part_, sizeof part_, data, nbytes, used)) {
            have_ = 0;
            take_part(handler);
        }
    } else {
        used = static_cast<std::size_t>(std::min<std::uint64_t>(nbytes, left_));
        take(handler, data, used);
    }
    return used;
}

void Input::begin_frame(FrameHandler& handler) {
    begun_ = received_;
    left_ = header_.payload_nbytes;
    into_ = nullptr;
    room_ = 0;
    crc_ = 0;
    refusal_ = {};
    reported_ = 0;
    if (is_in_area() && (op() != Op::put || !has_area())) {
        return fail("a payload in a publish area that the connection does not have, or that is not put");
    }
    handler.begin_frame();
    have_ = 0;
    if (ended_) {
        stage_ = Stage::header;
        return;
    }
    stage_ = Stage::payload;
    if (left_ == 0) {
        end_payload(handler);
    }
}

// Takes bytes of a payload, which has at least as many to come.
void Input::take(FrameHandler& handler, const std::byte* data, std::size_t nbytes) {
    while (nbytes > 0) {
        if (room_ == 0 && !is_refused()) {
            handler.extend_payload();
        }
        const auto step = static_cast<std::size_t>(std::min<std::uint64_t>(nbytes, room_ > 0 ? room_ : left_));
        if (room_ > 0) {
            crc_ = copy_crc32c(into_, data, step, crc_);
            into_ += step;
            room_ -= step;
        }
        left_ -= step;
        data += step;
        nbytes -= step;
    }
    if (left_ == 0) {
        end_payload(handler);
    }
}

// Copies the next bytes of a payload from the publish area. The client may change them at any time, so only the copy is
// checked.
void Input::take_part(FrameHandler& handler) {
    const auto [offset, nbytes] = part_;
    if (nbytes == 0 || nbytes > left_ || offset > area_.nbytes() || nbytes > area_.nbytes() - offset) {
        return fail("a part of a payload outside of the publish area or of the payload");
    }
    copying_ = part_;
    go_on(handler);
}

void Input::go_on(FrameHandler& handler) {
    while (copying_.nbytes > 0 && !turn_.is_read_out() && may_copy()) {
        const auto step = static_cast<std::uint32_t>(std::min<std::size_t>(copying_.nbytes, area_step_nbytes));
        const std::byte* const from = area_.data() + copying_.offset;
        copying_.offset += step;
        copying_.nbytes -= step;
        copied_ += step;
        turn_.receive(step);
        progress_.moved(step, deadlines_.now());
        take(handler, from, step);
    }
}

void Input::end_payload(FrameHandler& handler) {
    if ((header_.flags & checksum_follows) != 0) {
        stage_ = Stage::checksum;
        have_ = 0;
    } else {
        end_frame(handler);
    }
}

void Input::end_frame(FrameHandler& handler) {
    stage_ = Stage::header;
    have_ = 0;
    into_ = nullptr;
    turn_.spend(work::frame);
    handler.finish_frame();
}

std::optional<std::uint64_t> Input::progress_to_report() {
    // While the client waits for room in the area, it sends no more. We report whole parts to it.
    if (!is_copying() && stage_ == Stage::payload && is_in_area() && header_.payload_nbytes > area_.nbytes() &&
        arrived() > reported_) {
        reported_ = arrived();
        return reported_;
    }
    return std::nullopt;
}

}  // namespace farpool
