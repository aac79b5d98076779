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
constexpr std::size_t swept_slots = 20'000;
constexpr std::size_t largest_events = 10'000;
constexpr auto tick_period = std::chrono::seconds(1);

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

Server::Server(Settings settings)
    : owner_(getpid()),
      settings_(std::move(settings)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      alarm_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      budget_{settings_.capacity},
      leases_(settings_.folder),
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
        shelf_ = std::make_unique<Shelf>(settings_.shelf, settings_.shelf_capacity, settings_.ephemeral, [this] { wake(); });
    }
    const BusGuard guard;
    std::vector<std::string> notes;
    leases_.adopt(notes);
    for (const auto& lease : leases_.all()) {
        if (settings_.ephemeral) {
            leases_.remove(*lease);
        } else {
            lent_ += lease->nbytes();
            budget_.used += lease->nbytes();
            sessions_[lease->session].empty_since = Clock::now();
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
        const bool unfinished = name.ends_with(unfinished_suffix) && (name.starts_with("objects-") || name.starts_with("lease-"));
        const bool outdated = name.ends_with(".visited") && name.starts_with("objects-");  // an earlier farpool had a file for them
        if (unfinished || outdated) {
            remove_file(path.string());
        } else if (const auto tenant = Objects::tenant_of(name)) {
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
        shelf_->finish();  // what is on its way is adopted by the next start
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
    const int count = epoll_wait(epoll_.fd(), ready.data(), static_cast<int>(ready.size()), milliseconds);
    if (count == 0 && milliseconds == 0) {
        return false;
    }
    const Hold hold(mutex_);
    for (int event = 0; event < count; ++event) {
        const epoll_event& found = ready[static_cast<std::size_t>(event)];
        if (found.data.fd == alarm_.fd()) {
            std::uint64_t times = 0;
            static_cast<void>(!read(alarm_.fd(), &times, sizeof times));
            guarded([this] { finish_jobs(); });
            continue;
        }
        const auto known = peers_.find(found.data.fd);
        if (known == peers_.end()) {
            continue;
        }
        Peer& peer = *known->second;
        try {
            service(peer, found.events);
        } catch (const std::exception& error) {
            note("error", peer.session, error.what());
            close_peer(peer);
        }
    }
    reap();
    if (Clock::now() >= next_tick_) {
        guarded([this] { tick(); });
        next_tick_ = Clock::now() + tick_period;
    }
    return count > 0;
}

void Server::adopt(int fd, std::uint64_t session, std::uint32_t tenant, std::uint32_t rights) {
    File socket(fd);
    const Hold hold(mutex_);
    if (stopped_ || fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0) {
        errno = stopped_ ? ESHUTDOWN : errno;
        fail("taking a connection over");
    }
    bound_loopback_sending(fd);
    auto peer = std::make_unique<Peer>();
    peer->socket = std::move(socket);
    peer->serial = ++serials_;
    peer->session = session;
    peer->tenant = tenant;
    peer->rights = rights;
    peer->objects = &objects_of(tenant);
    peer->progress = Clock::now();
    peer->watched = EPOLLIN;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    peers_.insert_or_assign(fd, std::move(peer));
    if (epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) != 0) {
        peers_.erase(fd);
        fail("epoll_ctl");
    }
    ++sessions_[session].connections;
}

Objects& Server::objects_of(std::uint32_t tenant) {
    if (stopped_ && !objects_.contains(tenant)) {  // nobody would remove its files
        errno = ESHUTDOWN;
        fail("making files for a tenant");
    }
    std::unique_ptr<Objects>& objects = objects_[tenant];
    if (objects == nullptr) {
        std::string text;
        try {
            objects = std::make_unique<Objects>(settings_.folder, tenant, budget_, shelf_.get(), settings_.ephemeral, text);
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

Objects::Paths Server::objects_paths(std::uint32_t tenant) {
    const Hold hold(mutex_);
    return objects_of(tenant).paths();
}

int Server::objects_visited(std::uint32_t tenant) {
    const Hold hold(mutex_);
    return objects_of(tenant).visited().duplicate();
}

std::vector<Listed> Server::list(std::uint32_t tenant, std::string_view after, std::string_view prefix, std::size_t limit,
                                 bool tombstones) {
    std::vector<Listed> found;
    std::uint64_t place = 0;
    for (bool begun = false; found.size() < limit && (!begun || place != 0); begun = true) {
        {
            const Hold hold(mutex_);
            Objects& objects = objects_of(tenant);
            place = begun ? place : objects.place_of(after);
            objects.list(place, after, prefix, limit, tombstones, found);
        }
        std::this_thread::yield();  // the loop has its turn
    }
    return found;
}

Server::Stats Server::stats() {
    const Hold hold(mutex_);
    Stats stats;
    static_cast<Counts&>(stats) = counts_;
    stats.capacity = budget_.limit;
    stats.used = budget_.used;
    stats.lent = lent_;
    stats.connections = peers_.size();
    stats.sessions = sessions_.size();
    stats.leases = leases_.all().size();
    if (shelf_ != nullptr) {
        stats.shelf_capacity = shelf_->capacity();
        stats.shelf_used = shelf_->used();
    }
    for (const auto& [tenant, objects] : objects_) {
        const Objects::Counts& counts = objects->counts();
        stats.objects += objects->size() - counts.tombstones;
        stats.tombstones += counts.tombstones;
        stats.object_bytes += counts.payload_bytes;
        stats.evictions += counts.evictions;
        stats.expired += counts.expired;
        stats.shelved += counts.shelved;
        stats.demotions += counts.demotions;
        stats.promotions += counts.promotions;
        stats.adopted += counts.adopted;
        stats.index_bytes += objects->overhead();
    }
    return stats;
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

void Server::tick() {
    const Clock::time_point now = Clock::now();
    for (const auto& [fd, peer] : peers_) {
        if (!peer->dead && (peer->in_frame() || !peer->replies.empty()) && now - peer->progress > seconds(settings_.stall)) {
            note("stalled", peer->session, "a connection rested in the middle of a frame for too long and was closed");
            close_peer(*peer);
        }
    }
    reap();
    for (auto session = sessions_.begin(); session != sessions_.end();) {
        if (session->second.connections == 0 && now - session->second.empty_since > seconds(settings_.grace)) {
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
}

void Server::close_peer(Peer& peer) {
    if (peer.dead) {
        return;
    }
    peer.dead = true;
    closed_.push_back(peer.socket.fd());
    for (Reply& reply : peer.replies) {
        let_go(peer, reply);
    }
    peer.replies.clear();
    peer.waiting.clear();
    if (peer.prepared != 0) {
        peer.objects->abort(peer.prepared, peer.header.generation);
        peer.prepared = 0;
    }
    Session& session = sessions_[peer.session];
    for (auto& [place, preparing] : session.prepared) {
        if (preparing.serial == peer.serial) {
            preparing.left_alone = Clock::now();
        }
    }
    if (--session.connections == 0) {
        session.empty_since = Clock::now();
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
