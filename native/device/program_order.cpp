#include "device/program_order.hpp"

#include <algorithm>
#include <ranges>
#include <stdexcept>

#include "core/clock.hpp"
#include "core/error.hpp"
#include "core/room.hpp"

namespace farpool::device {

namespace {

// Events that are kept for each stream. The host seldom runs farther ahead of the device; if it does, every second event is
// given back, and copies wait for a later one.
constexpr std::size_t most_uses = 512;
constexpr std::size_t worth_retiring = 64;
constexpr std::size_t most_ran = 4096;          // times that are kept until `take_ran`
constexpr double brief_seconds = 50e-6;         // of accesses whose times are not asked for one by one
constexpr ProgramStream per_thread_stream = 2;  // CU_STREAM_PER_THREAD

}  // namespace

ProgramOrder::ProgramOrder(std::shared_ptr<Device> device, EventPool& events, DeviceClock& clock, ProgramStream allocating)
    : device_(std::move(device)), events_(events), clock_(clock), moved_(events.take()) {
    const auto stream = reinterpret_cast<Stream>(allocating);
    note_stream(stream, device_->stream_id(stream));
    if (!device_->capturing(stream)) {
        end(allocating, -1);
    }
}

// Call with the lock, except in the constructor.
void ProgramOrder::note_stream(Stream stream, std::uint64_t id) {
    Program* earlier = nullptr;  // with the same handle
    for (const auto& known : programs_) {
        if (known->stream == stream && !known->destroyed) {
            if (known->id == id) {
                return;
            }
            earlier = known.get();
        }
    }
    auto made = std::make_unique<Program>();
    made->stream = stream;
    made->id = id;
    made->uses.reserve(most_uses);
    make_room(programs_, programs_.size() + 1);
    if (earlier != nullptr) {
        earlier->destroyed = true;
    }
    programs_.push_back(std::move(made));
}

ProgramOrder::Program& ProgramOrder::program(Stream stream) {
    for (const auto& known : programs_) {
        if (known->stream == stream && !known->destroyed) {
            return *known;
        }
    }
    throw std::logic_error("ProgramOrder: an access on a stream was not begun");
}

void ProgramOrder::begin(ProgramStream stream) {
    if (stream == per_thread_stream) {
        throw PortFailure({ErrorKind::unsupported,
                           "the current stream is CUDA's per-thread default stream, which is another one on each thread: use a "
                           "stream of torch.cuda.Stream() for operations on paged tensors",
                           {},
                           0,
                           {}});
    }
    const Attached attached(*device_);
    if (device_->capturing(reinterpret_cast<Stream>(stream))) {
        throw PortFailure({ErrorKind::unsupported,
                           "a CUDA graph is being captured: an operation on paged tensors cannot be part of it, because its "
                           "operands are elsewhere when the graph is replayed; capture operations on plain tensors only",
                           {},
                           0,
                           {}});
    }
    const std::uint64_t id = device_->stream_id(reinterpret_cast<Stream>(stream));
    const std::lock_guard lock(mutex_);
    note_stream(reinterpret_cast<Stream>(stream), id);
}

void ProgramOrder::order(ProgramStream stream, std::int64_t last_use) {
    const std::lock_guard lock(mutex_);
    Program& own = program(reinterpret_cast<Stream>(stream));
    own.queued_at = monotonic_seconds();
    if (own.moves == moves_ && programs_.size() == 1) {
        return;  // nothing to wait for, so the device need not be asked: this is how most accesses end
    }
    const Attached attached(*device_);
    wait_for_moves(own.stream, own.moves);
    // The first access of a stream also follows the work that was queued where the arena was allocated.
    if (last_use >= 0 || !std::exchange(own.began, true)) {
        wait_for(own.stream, last_use, &own);
    }
}

bool ProgramOrder::end(ProgramStream stream, std::int64_t ordinal) {
    const Attached attached(*device_);
    const std::lock_guard lock(mutex_);
    Program& own = program(reinterpret_cast<Stream>(stream));
    if (own.uses.size() >= most_uses) {
        thin(own);
    }
    const Event event = events_.take();
    try {
        device_->record(event, own.stream);
    } catch (...) {
        events_.give(event);
        throw;
    }
    for (auto use = own.uses.rbegin(); use != own.uses.rend() && use->low > ordinal; ++use) {
        use->low = ordinal;
    }
    own.uses.push_back({ordinal, ordinal, own.queued_at, event});
    newest_ = std::max(newest_, ordinal);
    return own.uses.size() % worth_retiring == 0;
}

void ProgramOrder::thin(Program& program) {
    std::size_t kept = 0;
    for (std::size_t index = 0; index < program.uses.size(); ++index) {
        Use& use = program.uses[index];
        if (index % 2 == 0 && index + 1 < program.uses.size()) {
            Use& next = program.uses[index + 1];
            next.low = use.low;
            next.since = use.since;
            next.ordinal = std::max(next.ordinal, use.ordinal);
            events_.give(use.event);
        } else {
            program.uses[kept++] = use;
        }
    }
    program.uses.resize(kept);
    ++program.thinned;
}

// Makes a stream wait, for each of the program's streams but one, for the oldest event behind all accesses up to `last_use`.
void ProgramOrder::wait_for(Stream stream, std::int64_t last_use, const Program* except) {
    for (const auto& program : programs_) {
        if (program.get() == except) {
            continue;
        }
        const auto after = std::ranges::partition_point(program->uses, [&](const Use& use) { return use.low <= last_use; });
        if (after != program->uses.begin()) {
            device_->wait(stream, std::prev(after)->event);
        }
    }
}

void ProgramOrder::wait_for_moves(Stream stream, std::uint64_t& moves) {
    if (moves != moves_) {
        device_->wait(stream, moved_);
        moves = moves_;
    }
}

void ProgramOrder::follow(Stream stream, std::int64_t last_use, std::uint64_t& moves) {
    const std::lock_guard lock(mutex_);
    wait_for_moves(stream, moves);
    wait_for(stream, last_use, nullptr);
}

void ProgramOrder::follow_destroyed(Stream stream) {
    const std::lock_guard lock(mutex_);
    for (const auto& program : programs_) {
        if (program->destroyed && !program->uses.empty()) {
            device_->wait(stream, program->uses.back().event);
        }
    }
}

void ProgramOrder::moved(Stream stream) {
    const std::lock_guard lock(mutex_);
    device_->record(moved_, stream);
    ++moves_;
}

void ProgramOrder::retire() {
    const std::lock_guard alone(retiring_);
    for (std::size_t index = 0;; ++index) {
        std::unique_lock lock(mutex_);
        if (index >= programs_.size()) {
            std::erase_if(programs_, [](const auto& one) { return one->destroyed && one->uses.empty(); });
            return;
        }
        Program& program = *programs_[index];
        std::vector<Use> passed(program.uses.begin(), program.uses.end());
        const std::uint64_t thinned = program.thinned;
        lock.unlock();
        // Without the lock, so the program's threads go on. Events of a stream pass one after the other, most often all have.
        if (!passed.empty() && !device_->passed(passed.back().event)) {
            passed.erase(std::ranges::partition_point(passed, [&](const Use& use) { return device_->passed(use.event); }),
                         passed.end());
        }
        lock.lock();
        if (passed.empty() || program.thinned != thinned) {
            continue;  // an event that was given back tells of other work
        }
        std::vector<Ran> ran;
        ran.reserve(passed.size());
        make_room(ran_, std::min(most_ran, ran_.size() + passed.size()));
        program.uses.erase(program.uses.begin(), program.uses.begin() + static_cast<std::ptrdiff_t>(passed.size()));
        lock.unlock();
        take_times(program, passed, ran);
        lock.lock();
        const std::size_t room = most_ran - std::min(most_ran, ran_.size());
        ran_.insert(ran_.end(), ran.begin(), ran.begin() + static_cast<std::ptrdiff_t>(std::min(room, ran.size())));
    }
}

// Writes down when each of these uses ended. The last end is known, and nothing ended before `began`. We ask the device for few
// of the others: a question takes longer than a short access.
void ProgramOrder::note_ends(std::span<Use> uses, double began) {
    const double last = uses.back().ended;
    began = std::max(began, uses.front().since);
    if (last - began <= brief_seconds) {  // in equal parts
        const double each = (last - began) / static_cast<double>(uses.size());
        for (std::size_t index = 0; index + 1 < uses.size(); ++index) {
            uses[index].ended = std::min(last, began + each * static_cast<double>(index + 1));
        }
    } else if (uses.size() > 1) {
        const std::span<Use> first = uses.first(uses.size() / 2);
        first.back().ended = std::min(last, clock_.exchange_time(first.back().event));
        note_ends(first, began);
        note_ends(uses.subspan(first.size()), first.back().ended);
    }
}

// Appends when the device computed for these uses, which have passed, to `ran`, which has room for it. Gives their events back.
void ProgramOrder::take_times(Program& program, std::span<Use> uses, std::vector<Ran>& ran) {
    uses.back().ended = clock_.exchange_time(uses.back().event);
    note_ends(uses, program.ended_at);
    for (const Use& use : uses) {
        const double start = std::min(std::max(program.ended_at, use.since), use.ended);
        program.ended_at = std::max(program.ended_at, use.ended);
        if (use.ordinal >= 0) {
            ran.push_back({use.ordinal, start, use.ended});
        }
    }
    events_.give_all(std::views::transform(uses, &Use::event));
}

std::vector<Ran> ProgramOrder::take_ran() {
    std::vector<Ran> ran;
    {
        const std::lock_guard lock(mutex_);
        ran = std::exchange(ran_, {});
    }
    std::ranges::sort(ran, {}, &Ran::end);
    return ran;
}

std::vector<ProgramStream> ProgramOrder::streams() const {
    const std::lock_guard lock(mutex_);
    std::vector<ProgramStream> streams;
    for (const auto& program : programs_) {
        if (!program->destroyed) {
            streams.push_back(reinterpret_cast<ProgramStream>(program->stream));
        }
    }
    return streams;
}

std::int64_t ProgramOrder::newest() const {
    const std::lock_guard lock(mutex_);
    return newest_;
}

}  // namespace farpool::device
