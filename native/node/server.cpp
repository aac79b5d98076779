#include "node/server.hpp"

#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

#include "core/signals_blocked.hpp"
#include "node/bus_guard.hpp"
#include "node/catalogue/nvme.hpp"

namespace farpool {

namespace {

constexpr std::size_t listed_slices = 32;       // in one call of list_some()
constexpr std::size_t evicted_per_tick = 1024;  // objects above their tenants' bursts: about a millisecond's work

// The server's mutex and a bus guard together: exclusive state, and no client can end the process by truncating a file.
class Guard {
public:
    explicit Guard(std::mutex& mutex) : lock_(mutex) {}

private:
    const std::lock_guard<std::mutex> lock_;
    const BusGuard guard_;
};

// Throws an error of the system for an action on a node that has stopped.
[[noreturn]] void fail_as_stopped(const char* action) { throw std::system_error(ESHUTDOWN, std::generic_category(), action); }

}  // namespace

Server::Server(Settings settings)
    : owner_(getpid()),
      settings_(std::move(settings)),
      budget_(
          settings_.capacity, settings_.shares,
          settings_.ephemeral ? Budget::SystemLeft() : [this] { return left_in(settings_.folder); }),
      deadlines_(settings_.stall, settings_.grace),
      quotas_(budget_),
      tenants_(settings_.folder, settings_.ephemeral, budget_,
               settings_.shelf.empty() ? nullptr
                                       : std::make_unique<Nvme>(settings_.shelf, settings_.shelf_capacity, settings_.ephemeral,
                                                                [this] { alarm_.wake(); }),
               events_),
      lending_(settings_.folder, settings_.ephemeral, budget_, quotas_, events_),
      sessions_(budget_, quotas_, tenants_, lending_, deadlines_, events_),
      claiming_(lending_, sessions_, events_),
      fetches_(events_, settings_.shelf, [this](const Fetch& fetch, bool ok) { loop_.deliver(fetch, ok); }),
      services_{budget_,    admission_,
                deadlines_, sessions_,
                fetches_,   unsent_,
                tallies_,   events_,
                turn_,      [this](const Catalogue& objects) { return loop_.give_up_a_put(objects); }},
      loop_(services_, alarm_) {
    const BusGuard guard;
    for (const auto& lease : lending_.adopt()) {
        sessions_.adopt(*lease);
    }
    tenants_.adopt();
}

Server::~Server() {
    if (!ours()) {  // their destructors would wait for threads that are not in this process
        static_cast<void>(new std::thread(std::move(thread_)));
        tenants_.abandon();
        lending_.abandon();
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
    alarm_.wake();
    if (thread_.joinable()) {
        thread_.join();
    }
    lending_.finish();
    const Guard guard(mutex_);
    if (stopped_) {
        return;
    }
    stopped_ = true;
    loop_.close_all();
    tenants_.close();
    lending_.remove_files();
}

void Server::run() {
    const Clock::duration spin = seconds(settings_.spin);
    Clock::time_point spin_until{};
    while (!stopping_) {
        const bool spinning = Clock::now() < spin_until;
        if (step(spinning ? 0 : 1000)) {
            spin_until = Clock::now() + spin;
        } else if (spinning) {
            sched_yield();  // the program that is about to send a request may need this core
        }
    }
}

bool Server::step(int milliseconds) {
    const bool worked = loop_.wait(milliseconds);
    if (!worked && milliseconds == 0 && !ticks_.is_due(Clock::now())) {
        return false;
    }
    const Guard guard(mutex_);
    const Clock::time_point begun = Clock::now();
    if (deadlines_.begin_round(begun)) {
        ticks_.postpone(begun);
    }
    if (loop_.note_events(begun)) {
        for (const auto& then : tenants_.finished()) {
            events_.guard(0, then);  // each by itself, because each releases what it holds
        }
    }
    loop_.serve();
    if (ticks_.is_due(begun)) {
        events_.guard(0, [this] { tick(); });
        ticks_.end(Clock::now());
    }
    loop_.end_round();
    return worked;
}

void Server::tick() {
    loop_.close_slow();
    lending_.check();
    sessions_.tidy();
    tenants_.tidy();
    budget_.evict_above_bursts(evicted_per_tick);
    lending_.extents().forget(Clock::now(), since_1970());
}

void Server::adopt(Stream stream, std::uint64_t session, std::uint32_t tenant, std::uint32_t rights, std::string_view key,
                   bool latency) {
    const Guard guard(mutex_);
    const Quotas::Owner owner = sessions_.bind(session, tenant, key);
    if (stopped_) {
        fail_as_stopped("taking a connection over");
    }
    loop_.add(std::move(stream),
              {0, 0, session, tenant, rights, std::string(key), owner, tenants_.of(tenant), unsent_.of(owner), latency});
    sessions_.connect(session, false);
}

void Server::expect_tenants(std::set<std::uint32_t> tenants) {
    const Guard guard(mutex_);
    budget_.expect(std::move(tenants));
}

void Server::set_memory(Budget::Allowances allowances, bool evicts) {
    for (const auto& [tenant, allowance] : allowances) {
        if (allowance.burst > 0 && allowance.burst < allowance.guaranteed) {
            throw std::invalid_argument("tenant " + std::to_string(tenant) + " has a burst of " +
                                        std::to_string(allowance.burst) + " bytes, expected at least its guarantee of " +
                                        std::to_string(allowance.guaranteed) + ", or 0 for no limit");
        }
    }
    const Guard guard(mutex_);
    budget_.allow(std::move(allowances), evicts);
}

Budget::Allowances Server::memory() {
    const Guard guard(mutex_);
    return budget_.allowances();
}

void Server::expect_keys(const std::map<std::string, ExpectedKey>& keys) {
    const Guard guard(mutex_);
    sessions_.expect_keys(keys);
}

void Server::set_bandwidth(const std::map<std::uint32_t, Bandwidth>& tenants) {
    const Guard guard(mutex_);
    loop_.turns().set_bandwidth(tenants, Clock::now());
    alarm_.wake();  // a tenant that waits may have its turn earlier
}

std::map<std::uint32_t, Bandwidth> Server::bandwidth() {
    const Guard guard(mutex_);
    return loop_.turns().bandwidth();
}

double Server::seconds_above_cap(std::uint32_t tenant) {
    const Guard guard(mutex_);
    const Clock::time_point now = Clock::now();
    return std::chrono::duration<double>(loop_.turns().below_cap_at(tenant, now) - now).count();
}

void Server::end_key(std::string_view key) {
    const Guard guard(mutex_);
    loop_.close_key(key);
}

void Server::connect(std::uint64_t session, std::uint32_t tenant, std::string_view key) {
    const Guard guard(mutex_);
    sessions_.bind(session, tenant, key);
    sessions_.connect(session, true);
    loop_.turns().charge_tenant(tenant, Work{0, 0, work::handshake}, Clock::now());
}

void Server::disconnect(std::uint64_t session) {
    const Guard guard(mutex_);
    sessions_.disconnect(session);
}

std::uint64_t Server::lend(std::uint64_t session, std::uint32_t tenant, std::uint64_t nbytes) {
    Quotas::Owner owner;
    {
        const Guard guard(mutex_);
        owner = sessions_.open(session, tenant);
        if (stopped_ || !admission_.takes_new() || !lending_.charge(session, owner, nbytes)) {
            return 0;
        }
    }
    std::shared_ptr<Lease> lease;
    try {
        // Backing a lease with memory takes long, so we do it without the lock. If the system has less memory than the node
        // lends, we evict objects for the lease, as for new objects.
        lease = lending_.make(session, owner, nbytes, [&](std::uint64_t lacking) {
            const Guard guard(mutex_);
            return !stopped_ && budget_.return_backing(tenant, lacking);
        });
    } catch (...) {
        const Guard guard(mutex_);
        lending_.uncharge(owner, nbytes);
        throw;
    }
    const Guard guard(mutex_);
    if (stopped_) {  // no one would remove the lease, or receive its id
        lending_.end(*lease);
        return 0;
    }
    sessions_.add_lease(lease);
    return lease->id;
}

bool Server::release(std::uint64_t session, std::uint64_t lease) {
    std::shared_ptr<Lease> found;  // freed after the lock is released: for gigabytes that takes seconds
    const Guard guard(mutex_);
    found = sessions_.lease(session, lease);
    if (found == nullptr) {
        return sessions_.release_claim(session, lease);  // the extent stays
    }
    lending_.end(*found);
    return true;
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> Server::leases(std::uint64_t session) {
    const Guard guard(mutex_);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> found;
    for (const auto& lease : lending_.of(session)) {
        if (sessions_.lease(session, lease->id) != nullptr) {
            found.emplace_back(lease->id, lease->nbytes);
        }
    }
    for (const auto& extent : sessions_.claimed(session)) {
        found.emplace_back(extent->id, extent->nbytes);
    }
    return found;
}

std::string Server::lease_path(std::uint64_t session, std::uint64_t lease) {
    const Guard guard(mutex_);
    const std::shared_ptr<Lease> found = sessions_.lease_or_extent(session, lease);
    return found == nullptr ? std::string() : found->segment.path;
}

int Server::lease_file(std::uint64_t session, std::uint64_t lease) {
    const Guard guard(mutex_);
    LeaseAccess access = sessions_.access(session, lease, rights::write, Clock::now());
    const bool writes = access.lease != nullptr;
    if (access.status == Status::denied) {
        access = sessions_.access(session, lease, rights::read, Clock::now());
    }
    if (access.status == Status::denied) {
        throw Denied(access.text);
    }
    if (access.status == Status::lapsed) {
        throw Lapsed(access.text);
    }
    if (access.lease == nullptr) {
        return -1;
    }
    const File& file = access.lease->segment.file;
    return writes ? file.duplicate() : file.read_only();
}

std::vector<Claiming::Claimed> Server::claim(std::uint64_t session, std::uint32_t tenant, Ticket ticket) {
    std::optional<Claiming::Draft> draft;
    {
        const Guard guard(mutex_);
        if (stopped_) {
            fail_as_stopped("claiming extents");
        }
        draft = claiming_.begin(session, tenant, std::move(ticket), Clock::now());
        if (draft->makes_extents() && !admission_.takes_new()) {
            claiming_.drop(*draft);
            throw Full(admission_.refusal());
        }
    }
    try {
        claiming_.make(*draft, [&](std::uint64_t lacking) {
            const Guard guard(mutex_);
            return !stopped_ && budget_.return_backing(tenant, lacking);
        });
        const Guard guard(mutex_);
        if (stopped_) {
            fail_as_stopped("claiming extents");
        }
        auto claimed = claiming_.finish(*draft, Clock::now());
        loop_.fence();
        return claimed;
    } catch (...) {
        const Guard guard(mutex_);
        claiming_.drop(*draft);
        throw;
    }
}

std::vector<std::uint32_t> Server::order(const Claiming::Order& order) {
    const Guard guard(mutex_);
    if (stopped_) {
        fail_as_stopped("carrying an order out");
    }
    auto ended = claiming_.carry_out(order, Clock::now());
    loop_.fence();
    return ended;
}

std::vector<Claiming::Holding> Server::holdings() {
    const Guard guard(mutex_);
    return claiming_.holdings(Clock::now());
}

std::optional<Claiming::Ended> Server::end_holding(std::uint64_t lease, const std::string& reason) {
    const Guard guard(mutex_);
    auto ended = claiming_.end(lease, reason);
    loop_.fence();
    return ended;
}

ObjectPaths Server::objects_paths(std::uint32_t tenant) {
    const Guard guard(mutex_);
    return tenants_.of(tenant).paths();
}

std::pair<int, int> Server::objects_files(std::uint32_t tenant, bool writable) {
    const Guard guard(mutex_);
    return tenants_.of(tenant).open_files(writable);
}

int Server::objects_visited(std::uint64_t session, std::uint32_t tenant) {
    const Guard guard(mutex_);
    return sessions_.open_visits(session, tenant);
}

void Server::expose(std::uint64_t session, std::uint32_t tenant) {
    const Guard guard(mutex_);
    sessions_.expose(session, tenant);
}

// Works in slices, and sleeps after each for as long as it took, so that listing leaves most of the time to others. The caller
// repeats the call for a whole walk, and serves others between two calls.
std::vector<Listed> Server::list_some(std::uint32_t tenant, std::uint64_t& place, std::string_view after,
                                      std::string_view prefix, std::size_t limit) {
    std::vector<Listed> found;
    for (std::size_t slice = 0; slice < listed_slices; ++slice) {
        const Clock::time_point before = Clock::now();
        {
            const Guard guard(mutex_);
            const Catalogue& objects = tenants_.of(tenant);
            place = place == 0 ? objects.place_of(after) : place;
            const std::size_t before_slice = found.size();
            objects.list(place, after, prefix, limit, found);
            const std::uint64_t units = work::listed_slice + work::listed * (found.size() - before_slice);
            loop_.turns().charge_tenant(tenant, Work{0, 0, units}, Clock::now());
        }
        if (place == 0 || found.size() >= limit) {
            break;
        }
        std::this_thread::sleep_for(Clock::now() - before);
    }
    return found;
}

Server::Changes Server::changes(std::uint32_t tenant, std::uint64_t life, std::uint64_t since, std::size_t limit) {
    const Guard guard(mutex_);
    Journal& journal = tenants_.of(tenant).journal();
    if (!journal.is_on()) {
        const std::uint64_t nbytes = Journal::nbytes_for(budget_.limit());
        if (!budget_.may_fix(tenant, nbytes) || !budget_.make_room(tenant, nbytes) ||
            !budget_.make_backing_room(tenant, nbytes)) {
            throw Busy("the tenant's share has no room for a journal of changes, which takes " + std::to_string(nbytes) +
                       " bytes");
        }
        journal.begin(nbytes);
        budget_.lend(tenant, nbytes);
    }
    if (life != journal.life() || since < journal.first() || since > journal.end()) {
        return {true, journal.life(), journal.end()};
    }
    Changes found{false, journal.life(), since};
    for (; found.next < journal.end() && found.changes.size() < limit; ++found.next) {
        found.changes.push_back(journal.at(found.next));
    }
    found.left = journal.end() - found.next;
    loop_.turns().charge_tenant(tenant, Work{0, 0, work::frame + work::listed * found.changes.size()}, Clock::now());
    return found;
}

void Server::set_state(NodeState state) {
    const Guard guard(mutex_);
    admission_.order(state);
}

void Server::follow_record(bool draining) {
    const Guard guard(mutex_);
    admission_.follow_record(draining);
}

Admission Server::admission() {
    const Guard guard(mutex_);
    return admission_;
}

std::vector<ListedPin> Server::pins(std::optional<std::uint32_t> tenant, const PinId& after, std::size_t limit) {
    const Guard guard(mutex_);
    return sessions_.pins(tenant, after, limit);
}

std::optional<ListedPin> Server::end_pin(const PinId& id, std::uint64_t serial, std::string_view reason) {
    const Guard guard(mutex_);
    return sessions_.end_pin(id, serial, reason);
}

Server::Stats Server::stats() {
    const Guard guard(mutex_);
    Stats stats;
    static_cast<Counts&>(stats) = tallies_.counts();
    stats.capacity = budget_.limit();
    stats.used = budget_.used();
    stats.lent = lending_.lent();
    stats.backed = budget_.taken();
    stats.state = static_cast<std::uint64_t>(admission_.state());
    stats.connections = loop_.size();
    stats.sessions = sessions_.size();
    const auto leases = lending_.all();
    const auto extents = lending_.extents().all();
    stats.leases = leases.size() + extents.size();
    if (const Medium* const lower = tenants_.lower(); lower != nullptr) {
        stats.shelf_capacity = lower->capacity();
        stats.shelf_used = lower->used();
        stats.leaving = budget_.moving();
        stats.shelf_written = lower->written();
    }
    for (const auto& [tenant, objects] : tenants_.all()) {
        const Catalogue::Counts& counts = objects->counts();
        stats.objects += objects->size();
        stats.object_bytes += counts.payload_bytes;
        stats.gets += counts.gets;
        stats.hits += counts.hits;
        stats.evictions += counts.evictions;
        stats.expired += counts.expired;
        stats.shelved += counts.shelved;
        stats.demotions += counts.demotions;
        stats.retained += counts.retained;
        stats.retained_bytes += counts.retained_bytes;
        stats.retained_evictions += counts.retained_evictions;
        stats.promotions += counts.promotions;
        stats.adopted += counts.adopted;
        stats.index_bytes += objects->overhead_nbytes();
        stats.taken += objects->taken();
    }
    for (const auto& lease : leases) {
        stats.taken += lease->segment.file.taken();
    }
    for (const auto& extent : extents) {
        stats.taken += extent->segment.file.taken();
    }
    for (const auto& [tenant, taken] : loop_.areas_taken()) {
        stats.taken += taken;
    }
    return stats;
}

std::map<std::uint32_t, Server::TenantStats> Server::tenants() {
    const Guard guard(mutex_);
    const Clock::time_point now = Clock::now();
    std::map<std::uint32_t, TenantStats> found;
    for (const auto& [tenant, objects] : tenants_.all()) {
        const std::uint64_t use = budget_.use(tenant);
        const std::uint64_t lent = use - objects->used();
        const std::uint64_t backed = objects->backed() + objects->tables() + lent;
        found.emplace(tenant, TenantStats{objects->size(), use, backed, objects->taken(), lent, budget_.share(tenant),
                                          objects->visits().sessions(), budget_.allowance(tenant), objects->counts(),
                                          quotas_.of_tenant(tenant), loop_.turns().usage(tenant, now)});
    }
    for (const auto& lease : lending_.all()) {
        if (const auto holder = found.find(lease->tenant); holder != found.end()) {
            holder->second.taken += lease->segment.file.taken();
        }
    }
    for (const auto& extent : lending_.extents().all()) {
        if (const auto holder = found.find(extent->tenant); holder != found.end()) {
            holder->second.taken += extent->segment.file.taken();
        }
    }
    for (const auto& [tenant, taken] : loop_.areas_taken()) {
        found.at(tenant).taken += taken;
    }
    return found;
}

std::map<std::string, Server::KeyStats> Server::keys() {
    const Guard guard(mutex_);
    return sessions_.keys();
}

std::vector<Server::Event> Server::events() {
    const Guard guard(mutex_);
    return events_.take();
}

std::map<std::uint8_t, Latencies> Server::latencies() {
    const Guard guard(mutex_);
    return tallies_.latencies();
}

std::map<std::uint32_t, Tallies::Refusals> Server::refusals() {
    const Guard guard(mutex_);
    return tallies_.refusals();
}

}  // namespace farpool
