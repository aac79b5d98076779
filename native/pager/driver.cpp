#include "pager/driver.hpp"

#include <algorithm>
#include <exception>
#include <new>

#include "core/clock.hpp"

namespace farpool::pager {

namespace {

constexpr std::int64_t write_back_priority = 0;
constexpr std::int64_t prefetch_priority = 1;
constexpr std::int64_t demand_priority = urgent_priority;
constexpr int ran_after = 256;  // releases after which a device's times are taken; a queue keeps some thousands of them
constexpr std::size_t ran_kept = 65536;  // for a caller that listens and does not take them
constexpr double slice = 0.1;            // seconds that a wait may leave a signal unanswered

// Keeps the first error until the driver's own work is complete.
class Kept {
public:
    template <typename Call>
    void run(Call call) {
        try {
            call();
        } catch (...) {
            error_ = error_ ? error_ : std::current_exception();
        }
    }
    void raise() const {
        if (error_) {
            std::rethrow_exception(error_);
        }
    }

private:
    std::exception_ptr error_;
};

}  // namespace

std::unique_lock<std::mutex> Driver::lock(Pause& pause) {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
        pause.run([&] { lock.lock(); });
    }
    return lock;
}

void Driver::check_queue() const {
    if (queue_->broken()) {
        throw PortFailure(*queue_->trouble());
    }
}

void Driver::start(bool waits) {
    commands_.clear();
    batch_.clear();  // entries that an error has left
    pager_->take_commands(commands_);
    if (closed_ || queue_->broken()) {
        return;  // no access will use what the pager still wants to have done
    }
    if (observer_ != nullptr && !commands_.empty()) {
        announce();
    }
    Kept kept;
    std::size_t count = 0;
    for (const Command& command : commands_) {
        const auto* transfer = std::get_if<std::shared_ptr<const Transfer>>(&command);
        count += transfer != nullptr ? (*transfer)->pieces.size() : 0;
    }
    pieces_.clear();
    pieces_.reserve(count);  // the batch points into this vector
    for (const Command& command : commands_) {
        if (const auto* move = std::get_if<Move>(&command)) {
            submit(false);  // entries before it need not wait for it
            queue_->move(arena_ + static_cast<std::uintptr_t>(move->target), arena_ + static_cast<std::uintptr_t>(move->source),
                         static_cast<std::size_t>(move->nbytes), move->last_use);
            if (observer_ != nullptr) {
                kept.run([&] { observer_->moved(static_cast<std::size_t>(&command - commands_.data())); });
            }
        } else {
            add(*std::get<std::shared_ptr<const Transfer>>(command));
        }
    }
    submit(waits);
    for (const TransferId raised : pager_->take_raised()) {
        queue_->reprioritize(raised, demand_priority);
    }
    kept.raise();
}

// Tells the observer of the commands. If it throws, their transfers fail, because nothing starts them.
void Driver::announce() {
    try {
        observer_->starting(commands_);
    } catch (...) {
        for (const Command& command : commands_) {
            if (const auto* transfer = std::get_if<std::shared_ptr<const Transfer>>(&command)) {
                pager_->failed(
                    (*transfer)->id,
                    std::make_shared<const TransferFailure>(TransferFailure{
                        {ErrorKind::tier, "debug mode did not let a transfer start", {}, 0, nullptr}, -1, (*transfer)->block}));
            }
        }
        throw;
    }
}

void Driver::move(std::int64_t source, std::int64_t target, std::int64_t nbytes) {
    const Command command = Move{source, target, nbytes, pager_->tape().now()};
    if (observer_ != nullptr) {
        observer_->starting({&command, 1});
    }
    queue_->move(arena_ + static_cast<std::uintptr_t>(target), arena_ + static_cast<std::uintptr_t>(source),
                 static_cast<std::size_t>(nbytes), pager_->tape().now());
    if (observer_ != nullptr) {
        observer_->moved(0);
    }
}

void Driver::add(const Transfer& transfer) {
    const std::size_t first = pieces_.size();
    for (const Piece& piece : transfer.pieces) {
        pieces_.push_back({static_cast<std::uint64_t>(piece.offset), arena_ + static_cast<std::uintptr_t>(piece.place),
                           static_cast<std::size_t>(piece.nbytes)});
    }
    const auto [port, owner] = transfer.pieces.empty() ? std::pair<Port*, PyObject*>{}
                                                       : ports_.at(static_cast<std::size_t>(transfer.pieces.front().tier));
    const bool fetch = transfer.kind == Kind::fetch;
    batch_.push_back({.id = transfer.id,
                      .port = port,
                      .direction = fetch ? Direction::read : Direction::write,
                      .pieces = {pieces_.data() + first, transfer.pieces.size()},
                      .after = transfer.after,
                      .priority = !fetch            ? write_back_priority
                                  : transfer.demand ? demand_priority
                                                    : prefetch_priority,
                      .keepalive = keep_ == nullptr ? nullptr : owner,
                      .last_use = transfer.last_use});
}

void Driver::submit(bool waits) {
    if (batch_.empty() && !left_) {
        return;
    }
    for (const Submission& submission : batch_) {
        if (submission.keepalive != nullptr) {
            keep_(submission.keepalive, true);
        }
    }
    left_ = waits;
    try {
        queue_->submit(batch_, waits);
    } catch (...) {
        for (const Submission& submission : std::exchange(batch_, {})) {
            if (submission.keepalive != nullptr) {
                keep_(submission.keepalive, false);
            }
        }
        throw;
    }
    batch_.clear();
}

// Notes when a device has computed.
void Driver::note_ran() {
    since_ran_ = 0;
    const std::vector<Ran> new_ones = queue_->take_ran();
    if (new_ones.empty()) {
        return;
    }
    pager_->ran(new_ones);
    for (const Ran& ran : new_ones) {
        device_times_.computed(ran.start, ran.end);
        if (listening_ && ran_.size() < ran_kept) {
            ran_.push_back(ran);
        }
    }
}

bool Driver::note_ends() {
    note_ran();
    std::vector<Result> results = queue_->poll();
    for (const Result& result : results) {
        if (result.keepalive != nullptr) {
            keep_(result.keepalive, false);
        }
    }
    Kept kept;
    if (observer_ != nullptr) {
        for (const Result& result : results) {
            kept.run([&] { observer_->ended(result.id, result.cancelled || result.error); });
        }
    }
    for (Result& result : results) {
        const std::shared_ptr<const Transfer> transfer = pager_->residency().transfers().find(result.id);
        if (transfer == nullptr || result.cancelled) {
            continue;
        }
        if (result.error) {
            const std::int32_t tier = transfer->pieces.empty() ? -1 : transfer->pieces.front().tier;
            pager_->failed(result.id, std::make_shared<const TransferFailure>(
                                          TransferFailure{std::move(*result.error), tier, transfer->block}));
        } else {
            pager_->completed(result.id, result.start, result.end);
            account(transfer, result.start, result.end);
        }
    }
    if (!results.empty()) {
        pager_->proceed(monotonic_seconds());
        start();
        nudge();
    }
    kept.raise();
    return !results.empty();
}

void Driver::account(const std::shared_ptr<const Transfer>& transfer, double start, double end) {
    std::int64_t nbytes = 0;
    for (const Piece& piece : transfer->pieces) {
        nbytes += piece.nbytes;
    }
    if (nbytes == 0) {
        return;
    }
    LinkTotal& link = links_[{transfer->pieces.front().tier, transfer->kind}];
    ++link.transfers;
    link.nbytes += nbytes;
    link.seconds += end - start;
    if (pager_->late()) {
        device_times_.transferred(transfer->kind == Kind::fetch, start, end);
    }
    if (listening_) {
        ended_.push_back({transfer, start, end, pager_->residency().arena().used()});
    }
}

std::shared_ptr<Access> Driver::request(std::vector<Run> runs, ProgramStream stream) {
    check_queue();
    queue_->begin_use(stream);
    if (!pager_->residency().transfers().empty()) {
        note_ends();
    }
    const bool others = !pager_->waiting().empty();
    std::shared_ptr<Access> access = pager_->request(std::move(runs), monotonic_seconds());
    access->stream = stream;
    try {
        // The caller goes on to wait for an access that is neither granted nor refused.
        start(!access->granted && std::holds_alternative<std::monostate>(access->refusal));
    } catch (...) {  // the caller gets no access to wait for
        pager_->abandon(access);
        throw;
    }
    if (others) {
        nudge();
    }
    if (access->granted) {
        grant(*access);
    }
    return access;
}

// Counts an access that the pager has granted, and orders its work on a device. If the device refuses, the access is released.
void Driver::grant(Access& access) {
    try {
        queue_->order_use(access.stream, access.last_use);
    } catch (...) {
        pager_->release(access, true);
        start();  // the release may have granted and queued something
        nudge();
        throw;
    }
    ++granted_;
    peak_ = std::max(peak_, pager_->residency().arena().used());
}

void Driver::wait(double seconds, Pause& pause) {
    const TransferQueue::Seen seen = queue_->seen();
    if (note_ends()) {
        return;
    }
    ++waiting_;
    pause.run([&] {
        mutex_.unlock();
        queue_->wait_past(seen, 1, std::min(seconds, slice));
        mutex_.lock();
    });
    --waiting_;
}

Wait Driver::await(std::unique_lock<std::mutex>& lock, Access& access, double deadline, Pause& pause) {
    const double began = monotonic_seconds();
    for (;;) {
        if (closed_) {  // also if the access was granted since then: that was not counted, so the arena may have been freed
            return Wait::closed;
        }
        check_queue();
        if (access.granted) {
            if (pager_->late()) {
                device_times_.waited(began, monotonic_seconds());
            }
            grant(access);
            return Wait::granted;
        }
        if (!std::holds_alternative<std::monostate>(access.refusal)) {
            return Wait::refused;
        }
        const double remaining = deadline - monotonic_seconds();
        if (remaining <= 0) {
            return Wait::timed_out;
        }
        // A transfer that ends after this line ends the wait below, also if another thread notes it first.
        const TransferQueue::Seen seen = queue_->seen();
        if (note_ends()) {
            continue;
        }
        const std::uint64_t results = pager_->results_until_ready(access);
        pause.run([&] {
            lock.unlock();
            queue_->wait_past(seen, results, std::min(remaining, slice));
            lock.lock();
        });
        if (pause.interrupted()) {
            return Wait::interrupted;
        }
    }
}

std::pair<BlockId, std::int32_t> Driver::awaited(const Access& access) const {
    std::pair<BlockId, std::int32_t> found{-1, -1};
    for (const auto& [id, transfer] : pager_->residency().transfers().under_way()) {
        if (transfer->pieces.empty()) {
            continue;
        }
        const bool own = contains(access.blocks, transfer->block);
        if (own || found.first < 0) {
            found = {transfer->block, transfer->pieces.front().tier};
        }
        if (own) {
            break;
        }
    }
    return found;
}

void Driver::check_grant(const std::shared_ptr<Access>& access, const std::function<void()>& check) {
    try {
        check();
        // The check may have filled the operands, and the operation's work must come after that.
        queue_->order_use(access->stream, access->last_use);
    } catch (...) {
        --granted_;
        abandon(access);
        throw;
    }
}

void Driver::release(Access& access) {
    if (closed_) {
        --granted_;
        nudge();
        return;
    }
    // Read before the release, which may grant waiting accesses and so take them out of the line.
    const bool others = waiting_ > 0 || !pager_->waiting().empty();
    Kept kept;  // neither a lost device nor an observer may leave operands pinned
    kept.run([&] { queue_->end_use(access.stream, access.ordinal); });  // before the pager gives the ranges to others
    if (observer_ != nullptr) {
        kept.run([&] { observer_->released(access); });
    }
    pager_->release(access, true);
    --granted_;
    if (!pager_->residency().transfers().empty()) {
        note_ends();
    } else if (++since_ran_ >= ran_after) {
        note_ran();
    }
    start();
    if (others) {
        nudge();
    }
    kept.raise();
    if (observer_ != nullptr) {
        observer_->raise_findings();
    }
}

void Driver::abandon(const std::shared_ptr<Access>& access) {
    if (closed_) {
        return;
    }
    pager_->abandon(access);
    start();
    nudge();
}

void Driver::forget_parent() {
    new (&mutex_) std::mutex;
    closed_ = true;
}

void Driver::close() {
    closed_ = true;
    nudge();
}

}  // namespace farpool::pager
