#include "node/server.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "core/signals_blocked.hpp"
#include "node/hold.hpp"
#include "wire/loopback.hpp"

namespace farpool {

namespace {

constexpr std::size_t scratch_nbytes = 64 * 1024;
// Units of work of a turn while only one access key has connections. Long turns move a little more.
constexpr std::uint64_t lone_turn = 2 * 1024 * 1024;
constexpr std::size_t swept_slots = 20'000;
constexpr std::uint64_t returned_nbytes = std::uint64_t{64} << 20;  // to the system in one tick, which takes milliseconds
constexpr std::size_t listed_slices = 32;                           // in one turn
constexpr std::size_t largest_events = 10'000;
constexpr auto tick_period = std::chrono::seconds(1);

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

Server::Server(Settings settings)
    : owner_(getpid()),
      settings_(std::move(settings)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      alarm_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      budget_(
          settings_.capacity, settings_.shares,
          settings_.ephemeral ? Budget::SystemLeft() : [this] { return left_in(settings_.folder); }),
      leases_(settings_.folder, settings_.ephemeral),
      scratch_(scratch_nbytes) {
    if (epoll_.fd() < 0 || alarm_.fd() < 0) {
        fail("epoll");
    }
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = alarm_.fd();
    if (epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, alarm_.fd(), &event) != 0) {
        fail("epoll_ctl");
    }
    next_tick_ = Clock::now() + tick_period;
    if (!settings_.shelf.empty()) {
        shelf_ = std::make_unique<Nvme>(settings_.shelf, settings_.shelf_capacity, settings_.ephemeral, [this] { wake(); });
    }
    const BusGuard guard;
    std::vector<std::string> notes;
    leases_.adopt(notes);
    for (const auto& lease : leases_.all()) {
        if (settings_.ephemeral) {
            leases_.remove(*lease);
        } else {
            lent_ += lease->nbytes;
            budget_.lend(lease->tenant, lease->nbytes);
            quotas_.lend({lease->tenant, lease->owner}, lease->nbytes);
            sessions_.try_emplace(lease->session, Session{lease->tenant, lease->owner}).first->second.empty_since = now();
        }
    }
    for (std::string& text : notes) {
        note("removed", 0, std::move(text));
    }
    std::vector<std::filesystem::path> found;
    for (const auto& entry : std::filesystem::directory_iterator(settings_.folder)) {
        found.push_back(entry.path());
    }
    for (const auto& path : found) {
        const std::string name = path.filename().string();
        const bool unfinished =
            name.ends_with(unfinished_suffix) && (name.starts_with("objects-") || name.starts_with("lease-"));
        const bool outdated =
            name.ends_with(".visited") && name.starts_with("objects-");  // an earlier farpool had a file for them
        if (unfinished || outdated) {
            remove_file(path.string());
        } else if (const auto tenant = tenant_of_file(name)) {
            objects_of(*tenant);
        }
    }
}

Server::~Server() {
    if (!ours()) {  // whoever destroys them waits for threads that are not in this process
        static_cast<void>(new std::thread(std::move(thread_)));
        static_cast<void>(shelf_.release());
        static_cast<void>(freeing_.release());
        return;
    }
    stop();
}

bool Server::ours() const noexcept { return getpid() == owner_; }

void Server::start() {
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { run(); });
}

void Server::stop() {
    if (!ours()) {
        return;
    }
    stopping_ = true;
    wake();
    if (thread_.joinable()) {
        thread_.join();
    }
    freeing_->finish();
    const Hold hold(mutex_);
    if (stopped_) {
        return;
    }
    stopped_ = true;
    for (const auto& [fd, peer] : peers_) {
        close_peer(*peer);
    }
    reap();
    if (shelf_ != nullptr) {
        shelf_->close();  // what is on its way is adopted by the next start
        finish_jobs();
    }
    for (const auto& [tenant, objects] : objects_) {
        objects->retire();
        if (settings_.ephemeral) {
            objects->remove_files();
        }
    }
    if (settings_.ephemeral) {
        for (const auto& lease : leases_.all()) {
            leases_.remove(*lease);
        }
    }
}

void Server::wake() {
    const std::uint64_t one = 1;
    static_cast<void>(!write(alarm_.fd(), &one, sizeof one));  // a full counter wakes as well
}

void Server::run() {
    const Clock::duration spin = seconds(settings_.spin);
    Clock::time_point spin_until{};
    while (!stopping_) {
        const bool spinning = Clock::now() < spin_until;
        if (step(spinning ? 0 : 1000)) {
            spin_until = Clock::now() + spin;
        } else if (spinning) {
            sched_yield();  // the program that is about to ask may need this very core
        }
    }
}

bool Server::step(int milliseconds) {
    std::array<epoll_event, 64> ready{};
    const int count = epoll_wait(epoll_.fd(), ready.data(), static_cast<int>(ready.size()), has_work_ ? 0 : milliseconds);
    if (count == 0 && milliseconds == 0 && !has_work_ && Clock::now() < next_tick_) {
        return false;
    }
    const Hold hold(mutex_);
    const Clock::time_point begun = Clock::now();
    if (time_.begin_round(begun) && !postponed_) {  // once for each tick, so that a node that is often late has ticks
        next_tick_ = begun + tick_period;
        postponed_ = true;
    }
    for (int event = 0; event < count; ++event) {
        const epoll_event& found = ready[static_cast<std::size_t>(event)];
        if (found.data.fd == alarm_.fd()) {
            std::uint64_t times = 0;
            static_cast<void>(!read(alarm_.fd(), &times, sizeof times));
            guarded([this] { finish_jobs(); });
            continue;
        }
        if (const auto known = peers_.find(found.data.fd); known != peers_.end()) {
            notice(*known->second, found.events);
        }
    }
    serve_turns();
    serve_those_in_line();
    reap();
    if (begun >= next_tick_) {
        guarded([this] { tick(); });
        next_tick_ = Clock::now() + tick_period;
        postponed_ = false;
    }
    const bool worked = count > 0 || has_work_;
    has_work_ = turns_.has_work() || room_in_lines_;
    return worked;
}

// Serves connections, for the work of one turn at most and of half a turn at least. Then the loop looks for events again, so
// that a new request waits for this one turn and not for all connections with work.
void Server::serve_turns() {
    for (std::uint64_t spent = 0; spent < Turns::quantum / 2;) {
        Turns::Flow* const next = turns_.next();
        if (next == nullptr) {
            return;
        }
        turn_ = Turn(turns_.is_shared() ? Turns::quantum : lone_turn);
        serve(*peers_.at(static_cast<int>(next->name())));
        const std::uint64_t units = std::max(turn_.spent(), work::call);  // each turn costs something, even if it did nothing
        turns_.charge(*next, units);
        spent += units;
    }
}

void Server::serve(Peer& peer) {
    try {
        service(peer);
    } catch (const std::exception& error) {
        note("error", peer.session, error.what());
        close_peer(peer);
    }
}

void Server::adopt(Stream stream, std::uint64_t session, std::uint32_t tenant, std::uint32_t rights, std::string_view key) {
    const int fd = stream.fd();
    const Hold hold(mutex_);
    Session& holder = bind(session, tenant, key);
    if (stopped_ || fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0) {
        errno = stopped_ ? ESHUTDOWN : errno;
        fail("taking a connection over");
    }
    bound_loopback_sending(fd);
    auto peer = std::make_unique<Peer>();
    peer->socket = std::move(stream);
    peer->number = ++numbers_;
    peer->session = session;
    peer->tenant = tenant;
    peer->rights = rights;
    peer->key = key;
    peer->objects = &objects_of(tenant);
    peer->unsent = &unsent_[{tenant, holder.owner}];
    peer->seat = turns_.join(tenant, holder.owner, static_cast<std::uint64_t>(fd));
    peer->watched = EPOLLIN | EPOLLRDHUP | EPOLLET;
    epoll_event event{};
    event.events = peer->watched;
    event.data.fd = fd;
    Peer& adopted = *peers_.insert_or_assign(fd, std::move(peer)).first->second;
    if (epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) != 0) {
        peers_.erase(fd);
        fail("epoll_ctl");
    }
    ++holder.connections;
    quotas_.connect(holder.charged());
    if (adopted.socket.pending()) {  // TLS has read it already, so epoll cannot tell
        queue(adopted);
        wake();
    }
}

void Server::expect_tenants(std::set<std::uint32_t> tenants) {
    const Hold hold(mutex_);
    budget_.expect(std::move(tenants));
}

void Server::end_key(std::string_view key) {
    const Hold hold(mutex_);
    for (const auto& [fd, peer] : peers_) {
        if (peer->key == key && !peer->dead) {
            note("ended", peer->session, "its access key is gone or was changed");
            close_peer(*peer);
        }
    }
    wake();  // the loop closes them
}

Catalogue& Server::objects_of(std::uint32_t tenant) {
    if (stopped_ && !objects_.contains(tenant)) {  // nobody would remove its files
        errno = ESHUTDOWN;
        fail("making files for a tenant");
    }
    std::unique_ptr<Catalogue>& objects = objects_[tenant];
    if (objects == nullptr) {
        std::string text;
        try {
            objects = std::make_unique<Catalogue>(settings_.folder, tenant, budget_, shelf_.get(), settings_.ephemeral, text);
        } catch (...) {
            objects_.erase(tenant);
            throw;
        }
        if (!text.empty()) {
            note("forgotten", 0, std::move(text));
        }
    }
    return *objects;
}

ObjectPaths Server::objects_paths(std::uint32_t tenant) {
    const Hold hold(mutex_);
    return objects_of(tenant).paths();
}

std::pair<int, int> Server::objects_files(std::uint32_t tenant, bool writable) {
    const Hold hold(mutex_);
    return objects_of(tenant).open_files(writable);
}

int Server::objects_visited(std::uint64_t session, std::uint32_t tenant) {
    const Hold hold(mutex_);
    session_of(session, tenant);
    Visits& visits = objects_of(tenant).visits();
    const std::uint64_t nbytes = visits.has(session) ? 0 : visits.session_nbytes();
    if (nbytes > 0 && (visits.sessions() >= Visits::sessions_max || !budget_.may_fix(tenant, nbytes) ||
                       !budget_.make_room(tenant, nbytes) || !budget_.make_backing_room(tenant, nbytes))) {
        throw Busy("at most " + std::to_string(Visits::sessions_max) +
                   " sessions of a tenant may map its objects, and each takes " + std::to_string(nbytes) +
                   " bytes of its share for marks of visits");
    }
    const int file = visits.open(session);
    budget_.lend(tenant, nbytes);
    return file;
}

void Server::expose(std::uint64_t session, std::uint32_t tenant) {
    const Hold hold(mutex_);
    session_of(session, tenant).exposed = true;
}

// Works in slices, and sleeps after each for as long as it has taken, so that listing leaves others most of the time. The
// caller repeats the call for a whole walk, and lets others have their turns in between.
std::vector<Listed> Server::list_some(std::uint32_t tenant, std::uint64_t& place, std::string_view after,
                                      std::string_view prefix, std::size_t limit) {
    std::vector<Listed> found;
    for (std::size_t slice = 0; slice < listed_slices; ++slice) {
        const Clock::time_point before = Clock::now();
        {
            const Hold hold(mutex_);
            Catalogue& objects = objects_of(tenant);
            place = place == 0 ? objects.place_of(after) : place;
            objects.list(place, after, prefix, limit, found);
        }
        if (place == 0 || found.size() >= limit) {
            break;
        }
        std::this_thread::sleep_for(Clock::now() - before);
    }
    return found;
}

Server::Stats Server::stats() {
    const Hold hold(mutex_);
    Stats stats;
    static_cast<Counts&>(stats) = counts_;
    stats.capacity = budget_.limit();
    stats.used = budget_.used();
    stats.lent = lent_;
    stats.backed = budget_.taken();
    stats.connections = peers_.size();
    stats.sessions = sessions_.size();
    stats.leases = leases_.all().size();
    if (shelf_ != nullptr) {
        stats.shelf_capacity = shelf_->capacity();
        stats.shelf_used = shelf_->used();
        stats.leaving = budget_.moving();
    }
    for (const auto& [tenant, objects] : objects_) {
        const Catalogue::Counts& counts = objects->counts();
        stats.objects += objects->size();
        stats.object_bytes += counts.payload_bytes;
        stats.gets += counts.gets;
        stats.hits += counts.hits;
        stats.evictions += counts.evictions;
        stats.expired += counts.expired;
        stats.shelved += counts.shelved;
        stats.demotions += counts.demotions;
        stats.promotions += counts.promotions;
        stats.adopted += counts.adopted;
        stats.index_bytes += objects->overhead_nbytes();
        stats.taken += objects->taken();
    }
    for (const auto& lease : leases_.all()) {
        stats.taken += lease->segment.file.taken();
    }
    for (const auto& [fd, peer] : peers_) {
        stats.taken += peer->area.file.taken();
    }
    return stats;
}

std::map<std::uint32_t, Server::TenantStats> Server::tenants() {
    const Hold hold(mutex_);
    std::map<std::uint32_t, TenantStats> found;
    for (const auto& [tenant, objects] : objects_) {
        const std::uint64_t use = budget_.use(tenant);
        const std::uint64_t lent = use - objects->used();
        const std::uint64_t backed = objects->backed() + objects->tables() + lent;
        found.emplace(tenant, TenantStats{objects->size(), use, backed, objects->taken(), lent, budget_.share(tenant),
                                          objects->counts(), quotas_.of_tenant(tenant)});
    }
    for (const auto& lease : leases_.all()) {
        if (const auto holder = found.find(lease->tenant); holder != found.end()) {
            holder->second.taken += lease->segment.file.taken();
        }
    }
    for (const auto& [fd, peer] : peers_) {
        found.at(peer->tenant).taken += peer->area.file.taken();
    }
    return found;
}

void Server::note(std::string kind, std::uint64_t session, std::string text) {
    if (events_.size() < largest_events) {
        events_.push_back({std::move(kind), session, std::move(text)});
    }
}

std::vector<Server::Event> Server::events() {
    const Hold hold(mutex_);
    return std::exchange(events_, {});
}

std::map<std::uint8_t, Latencies> Server::latencies() {
    const Hold hold(mutex_);
    return tallies_.latencies();
}

std::map<std::uint32_t, Tallies::Refusals> Server::refusals() {
    const Hold hold(mutex_);
    return tallies_.refusals();
}

void Server::tick() {
    const Clock::time_point judged = now();
    for (const auto& [fd, peer] : peers_) {
        const bool rests = peer->in_frame() && peer->listening && peer->sending.is_over(judged);
        const bool takes_nothing =
            !peer->replies.empty() && peer->replies.front().ticket == 0 && peer->receiving.is_over(judged);
        if (!peer->dead && (rests || takes_nothing)) {
            note("stalled", peer->session,
                 rests ? "a connection rested in the middle of a frame for too long and was closed"
                       : "a connection did not take its replies for too long and was closed");
            close_peer(*peer);
        }
    }
    reap();
    check_leases();
    end_pins();
    for (auto session = sessions_.begin(); session != sessions_.end();) {
        if (session->second.connections == 0 && judged - session->second.empty_since > seconds(settings_.grace)) {
            free_session(session->first, session->second);
            session = sessions_.erase(session);
        } else {
            abort_left_alone(session->second);
            ++session;
        }
    }
    for (const auto& [tenant, objects] : objects_) {
        objects->sweep(swept_slots);
    }
    bool has_looked = false;  // one tenant at a time, because requests wait for it
    for (const auto& [tenant, objects] : objects_) {
        has_looked = objects->return_idle(has_looked ? 0 : returned_nbytes) || has_looked;
    }
}

void Server::close_peer(Peer& peer) {
    if (peer.dead) {
        return;
    }
    peer.dead = true;
    turns_.rest(*peer.seat);
    closed_.push_back(peer.socket.fd());
    for (Reply& reply : peer.replies) {
        let_go(peer, reply);
    }
    peer.replies.clear();
    peer.waiting.clear();
    peer.held_back.clear();
    if (peer.prepared != 0) {
        peer.objects->abort(peer.prepared, peer.prepared_serial);
        peer.prepared = 0;
    }
    end_area(peer);
    Session& session = sessions_.at(peer.session);
    for (auto& [place, preparing] : session.prepared) {
        if (preparing.peer == peer.number) {
            preparing.left_alone = now();
        }
    }
    quotas_.disconnect(session.charged());
    if (--session.connections == 0) {
        session.empty_since = now();
    }
}

void Server::reap() {
    for (const int fd : closed_) {
        // Closing it is not enough: a process that forked off may have the socket, too.
        epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, fd, nullptr);
        peers_.erase(fd);
    }
    closed_.clear();
}

}  // namespace farpool
