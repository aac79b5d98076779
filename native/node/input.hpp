// The input of one connection: cuts the bytes that arrive into frames, and puts payloads where the protocol wants them.
//
// It knows frames, and neither sockets nor operations: the protocol is a FrameHandler.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "node/deadlines.hpp"
#include "node/files.hpp"
#include "node/turn.hpp"
#include "wire/frame.hpp"

namespace farpool {

class FrameHandler {
public:
    // Header and meta of a frame have arrived. Says by receive_into() or refuse() what becomes of the payload.
    virtual void begin_frame() = 0;
    // More bytes of a payload are here than there is room for: makes room with receive_into(), or refuses the payload.
    virtual void extend_payload() = 0;
    // The whole frame is here, unless its payload was refused.
    virtual void finish_frame() = 0;
    // True while a request takes several turns: bytes after it wait.
    virtual bool is_busy() const noexcept = 0;

protected:
    ~FrameHandler() = default;
};

class Input {
public:
    // A payload that is not stored: the reply once all of its bytes have arrived.
    struct Refusal {
        Status status = Status::done;
        std::uint64_t serial = 0;
        std::string meta{};
    };

    Input(const Deadlines& deadlines, Turn& turn) : turn_(turn), deadlines_(deadlines), progress_(deadlines) {}

    // The frame that is being received.
    const FrameHeader& header() const noexcept { return header_; }
    Op op() const noexcept { return static_cast<Op>(header_.op); }
    const std::vector<std::byte>& meta() const noexcept { return meta_; }
    Clock::time_point begun() const noexcept { return begun_; }  // when its header and meta had arrived
    std::uint64_t left() const noexcept { return left_; }        // bytes of payload that are still to come
    std::uint64_t arrived() const noexcept { return header_.payload_nbytes - left_; }
    std::uint32_t crc() const noexcept { return crc_; }  // of the payload
    bool is_refused() const noexcept { return refusal_.status != Status::done; }
    Refusal take_refusal() { return std::exchange(refusal_, {}); }
    // True if more bytes of the payload are announced than have room.
    bool lacks_room() const noexcept { return left_ > room_; }

    // Receives the next `nbytes` of the payload at a place; into the place that follows the bytes before, if it is null.
    void receive_into(std::byte* place, std::uint64_t nbytes) {
        into_ = place == nullptr ? into_ : place;
        room_ = nbytes;
    }
    // Drops the rest of the payload, and answers the request with a refusal.
    void refuse(Status status, std::uint64_t serial = 0, std::string meta = {}) {
        into_ = nullptr;
        room_ = 0;
        refusal_ = {status, serial, std::move(meta)};
    }
    // Reads no further frame: the connection closes when its replies have been sent.
    void end() noexcept { ended_ = true; }
    // Stops after a bad frame: we no longer know where the next frame begins.
    void fail(std::string what) { fault_ = std::move(what); }

    bool has_ended() const noexcept { return ended_; }
    const std::optional<std::string>& fault() const noexcept { return fault_; }
    // True if bytes that were received wait for a later turn.
    bool has_rest() const noexcept { return !rest_.empty(); }
    // True while a part of the publish area is being copied, which takes several turns.
    bool is_copying() const noexcept { return copying_.nbytes > 0; }
    bool is_in_frame() const noexcept { return stage_ != Stage::header || have_ > 0; }
    // True if the turn leaves bytes to copy from the publish area.
    bool may_copy() const noexcept;

    void begin_turn() noexcept { copied_ = 0; }
    // Continues with a part of the publish area that was not copied completely.
    void go_on(FrameHandler& handler);
    // Handles the bytes that waited; true if none wait any more.
    bool handle_rest(FrameHandler& handler);
    // The place for payload bytes that arrive next; of 0 bytes unless they can go there directly.
    iovec direct() const noexcept;
    // True if bytes after the direct ones belong to something else than this room.
    bool is_direct_last(std::size_t direct_nbytes) const noexcept { return direct_nbytes == 0 || direct_nbytes == room_; }
    // Handles bytes that have arrived: first those that went to the direct place, then `data`.
    void handle(FrameHandler& handler, std::size_t direct_nbytes, const std::byte* data, std::size_t nbytes,
                Clock::time_point now);
    // Bytes of the payload that were copied from the publish area, if the client has to know it now: its payload is larger than
    // the area, and it waits for room there.
    std::optional<std::uint64_t> progress_to_report();

    // The connection's publish area, into which the client writes payloads and which the node only reads.
    bool has_area() const noexcept { return area_.memory.data() != nullptr; }
    void set_area(Segment area) { area_ = std::move(area); }
    Segment take_area() { return std::exchange(area_, {}); }
    std::uint64_t area_taken() const noexcept { return area_.file.taken(); }

    Patience& progress() noexcept { return progress_; }
    const Patience& progress() const noexcept { return progress_; }

private:
    enum class Stage { header, meta, payload, checksum };

    bool is_stopped(const FrameHandler& handler) const noexcept {
        return ended_ || fault_ || handler.is_busy() || is_copying();
    }
    bool is_in_area() const noexcept { return (header_.flags & payload_in_area) != 0; }
    std::size_t feed(FrameHandler& handler, const std::byte* data, std::size_t nbytes);
    std::size_t feed_some(FrameHandler& handler, const std::byte* data, std::size_t nbytes);
    bool fill(void* field, std::size_t size, const std::byte* data, std::size_t nbytes, std::size_t& used);
    void begin_frame(FrameHandler& handler);
    void take(FrameHandler& handler, const std::byte* data, std::size_t nbytes);
    void take_part(FrameHandler& handler);
    void end_payload(FrameHandler& handler);
    void end_frame(FrameHandler& handler);

    Turn& turn_;
    const Deadlines& deadlines_;
    Patience progress_;  // of the client, within a frame
    Stage stage_ = Stage::header;
    std::size_t have_ = 0;  // bytes of the present field: header, meta, area part or checksum
    FrameHeader header_{};
    std::vector<std::byte> meta_;
    Clock::time_point received_{};  // when the last bytes arrived; one look at the clock serves all frames in them
    Clock::time_point begun_{};
    std::byte* into_ = nullptr;  // where the payload goes; null: it is dropped
    std::uint64_t room_ = 0;     // bytes that have memory there
    std::uint64_t left_ = 0;
    std::uint32_t crc_ = 0;
    Refusal refusal_;
    Segment area_;                 // not mapped if the connection has none
    AreaPart part_{};              // the part of the area that is being received
    AreaPart copying_{};           // the rest of a part, still to be copied
    std::uint64_t copied_ = 0;     // bytes from the area in this turn
    std::uint64_t reported_ = 0;   // bytes of the payload that the client knows to have been copied
    std::vector<std::byte> rest_;  // received bytes that wait for a later turn
    std::size_t rest_from_ = 0;    // index of the first byte that still waits
    bool ended_ = false;
    std::optional<std::string> fault_;
};

}  // namespace farpool
