#include "fuzz/world.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "fuzz/check.hpp"
#include "node/catalogue/index.hpp"

namespace farpool::fuzz {

namespace fs = std::filesystem;

namespace {

// Lists a tenant's objects in a whole walk, turn after turn.
std::vector<Listed> walked(Server& server, std::uint32_t tenant, std::string_view after, std::string_view prefix,
                           std::size_t limit) {
    std::uint64_t place = 0;
    std::vector<Listed> found = server.list_some(tenant, place, after, prefix, limit);
    while (place != 0 && found.size() < limit) {
        for (Listed& one : server.list_some(tenant, place, after, prefix, limit - found.size())) {
            found.push_back(std::move(one));
        }
    }
    return found;
}

constexpr int acts = 6000;
constexpr std::size_t most_clients = 10;
constexpr std::uint64_t absurd = std::uint64_t{1} << 40;  // a counter that fell below zero is beyond this

}  // namespace

World::World(std::string folder, std::uint64_t seed)
    : folder_(std::move(folder)),
      dice_(seed),
      capacity_((std::uint64_t{16} << 10) + dice_.below(dice_.one_in(4) ? 1 << 20 : 1 << 17)),
      with_shelf_(dice_.one_in(4)),
      with_rates_(dice_.one_in(4)),
      ephemeral_(dice_.one_in(8)) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    open_server();
}

World::~World() {
    clients_.clear();
    server_.reset();
    memory_.clear();
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
}

void World::open_server() {
    server_ = std::make_unique<Server>(Server::Settings{folder_, capacity_, ephemeral_, 0.0, 30.0, 0.0,
                                                        with_shelf_ ? folder_ + "/shelf" : std::string(), 4 * capacity_});
}

void World::run() {
    for (int act_number = 0; act_number < acts; ++act_number) {
        act();
    }
    finish();
}

void World::act() {
    if (clients_.size() < 2 || (clients_.size() < most_clients && dice_.one_in(40))) {
        return connect();
    }
    const std::size_t chosen = dice_.below(clients_.size());
    Client& client = *clients_[chosen];
    if (client.closed() || dice_.one_in(400)) {
        clients_.erase(clients_.begin() + static_cast<std::ptrdiff_t>(chosen));
        return;
    }
    switch (dice_.below(16)) {
        case 0:
        case 1:
        case 2:
        case 3:
        case 4:
        case 5:
        case 6:
            return request(client);
        case 7:
        case 8:
            return client.push(dice_.one_in(2) ? 1 << 20 : 1 + dice_.below(200));
        case 9:
        case 10:
            return client.pull(dice_.one_in(4) ? 1 + dice_.below(100) : 1 << 16);
        case 11:
            return dice_.one_in(10) ? look() : dice_.one_in(10) ? set_bandwidth() : scribble();
        case 12:
            return dice_.one_in(8) ? (client.lease == 0 ? lend(client) : release(client)) : request_on_lease(client);
        case 13:
            return dice_.one_in(150) ? restart() : static_cast<void>(server_->step(0));
        default:
            server_->step(0);
    }
}

void World::connect() {
    const std::uint32_t tenant = 1 + static_cast<std::uint32_t>(dice_.below(3));
    const std::uint32_t rights = dice_.one_in(6) ? static_cast<std::uint32_t>(dice_.below(16)) : 15;
    const std::uint64_t session = 10 * tenant + dice_.below(3);
    int theirs = -1;
    clients_.push_back(std::make_unique<Client>(theirs, session, tenant, rights, &books_[tenant], tenant != chaos));
    if (dice_.one_in(3)) {  // a narrow one, so that partial sends are the rule
        const int narrow = 4096;
        setsockopt(theirs, SOL_SOCKET, SO_SNDBUF, &narrow, sizeof narrow);
    }
    try {
        server_->adopt(Stream(theirs), session, tenant, rights, "key");
    } catch (const Server::Denied&) {
        // The node closed a connection that broke the protocol, and then a lease began the session again without a key.
        require(tenant == chaos, "a session was denied to its own key");
        clients_.pop_back();
        return;
    }
    server_->expose(session, tenant);
}

std::string World::key() {
    const std::uint64_t number = dice_.below(40);
    std::string made = "key-" + std::to_string(number);
    return number % 8 == 0 ? made + std::string(250 - number, 'k') : made;
}

std::string World::random_payload() {
    const std::uint64_t most = dice_.one_in(30) ? capacity_ : dice_.one_in(4) ? capacity_ / 8 : 2000;
    return dice_.bytes(dice_.one_in(10) ? 0 : dice_.below(most));
}

std::uint64_t World::ttl() { return !dice_.one_in(8) ? 0 : dice_.one_in(2) ? dice_.any() : dice_.below(50); }

Mapping& World::memory_of(std::uint32_t tenant) {
    auto found = memory_.find(tenant);
    if (found == memory_.end()) {
        const auto [index, data] = server_->objects_files(tenant, true);
        const File unused(index);
        const File file(data);
        struct stat status{};
        require(fstat(file.fd(), &status) == 0, "a file of objects that cannot be looked at");
        found = memory_.emplace(tenant, Mapping(file.fd(), static_cast<std::size_t>(status.st_size), true)).first;
    }
    return found->second;
}

// Makes a publisher write where it must not, and a reader mark anything.
void World::scribble() {
    const std::uint32_t tenant = 1 + static_cast<std::uint32_t>(dice_.below(3));
    if (tenant != chaos) {
        int visits = -1;
        try {
            visits = server_->objects_visited(1000 + tenant, tenant);
        } catch (const Server::Busy&) {
            return;
        }
        const File file(visits);
        require(ftruncate(file.fd(), static_cast<off_t>(dice_.below(1 << 20))) != 0, "the marks of visits were cut off");
        const std::string marks = dice_.bytes(64);
        static_cast<void>(!pwrite(file.fd(), marks.data(), marks.size(),
                                  static_cast<off_t>(segment_header_nbytes + dice_.below(capacity_ / unit_nbytes) / 2)));
        return;
    }
    Mapping& memory = memory_of(chaos);
    for (std::uint64_t times = dice_.below(8); times > 0; --times) {
        const std::uint64_t unit =
            dice_.one_in(8) ? 0 : segment_header_nbytes + dice_.below(capacity_ / unit_nbytes) * unit_nbytes;
        auto* header = memory.at<ObjectHeader>(unit);
        switch (dice_.below(6)) {
            case 0:
                header->key_nbytes = static_cast<std::uint16_t>(dice_.any());
                break;
            case 1:
                header->nbytes = dice_.any();
                break;
            case 2:
                header->copies = static_cast<std::uint8_t>(dice_.any());
                break;
            case 3:
                header->slot = static_cast<std::uint32_t>(dice_.below(200));
                break;
            case 4:
                header->units = static_cast<std::uint32_t>(dice_.any());
                break;
            default:
                dice_.flip(header, sizeof *header, 3);
        }
        if (header->key_nbytes <= largest_key && dice_.one_in(2) && unit + 320 < memory.nbytes()) {
            farpool::seal(*header, header + 1);
        }
    }
}

// Calls what the control side of a node calls: listings and statistics.
void World::look() {
    const std::uint32_t tenant = 1 + static_cast<std::uint32_t>(dice_.below(3));
    const std::string prefix = dice_.one_in(2) ? std::string() : std::string("key-1");
    std::map<std::string, int> seen;
    for (std::string after;;) {
        const auto listed = walked(*server_, tenant, after, prefix, 1 + dice_.below(20));
        for (const Listed& one : listed) {
            require(one.key.starts_with(prefix) && (tenant == chaos || ++seen[one.key] == 1), "a wrong listing");
        }
        if (listed.empty() || dice_.one_in(4)) {
            break;
        }
        after = listed.back().key;
    }
    const Server::Stats stats = server_->stats();
    require(stats.used <= stats.capacity, "more is in use than the node has");
    require(stats.objects < absurd && stats.object_bytes < absurd && stats.index_bytes < absurd && stats.shelved < absurd,
            "a counter fell below zero");
    std::uint64_t lent = 0;
    for (const auto& [lease, nbytes] : lent_) {
        lent += nbytes;
    }
    require(stats.lent <= lent, "more is lent than was asked for");
    server_->leases(10 + dice_.below(30));
    server_->events();
}

// Gives tenants random parts of the bandwidth, of which some cannot be kept.
void World::set_bandwidth() {
    const auto before = server_->bandwidth();
    std::map<std::uint32_t, Bandwidth> tenants;
    for (const std::uint32_t tenant : {1u, 2u, 3u, 4u}) {
        if (dice_.one_in(2)) {
            const std::uint64_t cap = !with_rates_ || dice_.one_in(2) ? 0 : dice_.below(std::uint64_t{64} << 20);
            const std::uint64_t guarantee =
                !with_rates_ || dice_.one_in(2) ? 0 : dice_.below(cap == 0 ? std::uint64_t{1} << 30 : cap + cap / 8);
            tenants[tenant] = {static_cast<double>(dice_.below(1000)) / 16, guarantee, cap};
        }
    }
    try {
        server_->set_bandwidth(tenants);
    } catch (const std::invalid_argument&) {
        require(server_->bandwidth() == before, "a refused bandwidth was set");
        return;
    }
    require(server_->bandwidth() == tenants, "a bandwidth was not set");
}

// Restarts the node after a clean stop, or after a kill: with the files as they are at this moment.
void World::restart() {
    const bool killed = dice_.one_in(2);
    const std::string copy = folder_ + ".copy";
    if (killed) {
        fs::copy(folder_, copy);
    }
    clients_.clear();
    memory_.clear();
    server_.reset();
    if (killed) {
        fs::remove_all(folder_);
        fs::rename(copy, folder_);
    }
    const bool damaged = dice_.one_in(3);
    if (damaged) {
        damage_files();
    }
    open_server();
    if (damaged || ephemeral_) {
        books_ = {};
        lent_.clear();
    }
    if (damaged) {  // nothing that is in there can be vouched for
        for (const std::uint32_t tenant : {1u, 2u, 3u}) {
            for (std::string after;;) {
                const auto listed = walked(*server_, tenant, after, {}, 50);
                if (listed.empty()) {
                    break;
                }
                after = listed.back().key;
            }
        }
        server_.reset();
        fs::remove_all(folder_);
        fs::create_directories(folder_);
        open_server();
    }
}

void World::damage_files() {
    std::vector<std::string> paths;
    for (const auto& entry : fs::directory_iterator(folder_)) {
        if (entry.path().filename() != "shelf") {
            paths.push_back(entry.path().string());
        }
    }
    std::sort(paths.begin(), paths.end());
    for (const std::string& path : paths) {
        if (dice_.one_in(2)) {
            continue;
        }
        if (dice_.one_in(4)) {
            fs::resize_file(path, dice_.below(fs::file_size(path) + 1));
            continue;
        }
        const File file(open(path.c_str(), O_RDWR | O_CLOEXEC));
        const std::uint64_t nbytes = fs::file_size(path);
        const Mapping memory(file.fd(), nbytes, true);
        if (path.ends_with(".index") && nbytes > segment_header_nbytes && dice_.one_in(2)) {  // the slots in use
            const std::uint64_t slots = std::min(memory.at<SegmentHeader>(0)->slots_at, nbytes - 1);
            dice_.flip(memory.data() + slots, std::min<std::uint64_t>(4000, nbytes - slots), 60);
            dice_.flip(memory.data() + 128, 24, dice_.below(3));
        } else {
            const std::uint64_t begin = dice_.one_in(2) ? 0 : std::min<std::uint64_t>(nbytes, segment_header_nbytes);
            dice_.flip(memory.data() + begin, nbytes - begin, 200);
        }
    }
}

void World::settle() {
    server_->set_bandwidth({});  // otherwise replies of capped tenants take seconds
    for (int round = 0; round < 4000; ++round) {
        bool busy = false;
        for (const auto& client : clients_) {
            client->push(1 << 20);
            client->pull(1 << 20);
            busy = busy || (client->honest && !client->idle());
        }
        if (!busy) {
            return;
        }
        server_->step(round < 1000 ? 0 : 1);
    }
    require(false, "a request was never answered");
}

// Drops all of a tenant's objects, also kept ones, which are never evicted.
void World::drop_all(std::uint32_t tenant) {
    int theirs = -1;
    clients_.push_back(std::make_unique<Client>(theirs, 100 + tenant, tenant, 15, &books_[tenant], false));
    server_->adopt(Stream(theirs), 100 + tenant, tenant, 15, "");
    for (auto listed = walked(*server_, tenant, {}, {}, 1000); !listed.empty();
         listed = walked(*server_, tenant, {}, {}, 1000)) {
        for (const Listed& one : listed) {
            clients_.back()->ask({make_header(Op::drop), one.key, {}}, {});
            clients_.back()->push(1 << 20);
            server_->step(1);
        }
    }
    clients_.pop_back();
}

// Ends everything that clients hold and drops all objects: bytes that are still in use then are a leak.
void World::finish() {
    settle();
    look();
    clients_.clear();
    for (int round = 0; round < 3000 && server_->stats().sessions > 0; ++round) {
        server_->step(1);
    }
    Server::Stats stats = server_->stats();
    require(stats.sessions == 0 && stats.connections == 0 && stats.leases == 0 && stats.lent == 0, "a session was not freed");
    drop_all(1);
    drop_all(2);
    std::uint64_t lease = 0;
    for (int round = 0; round < 2000 && lease == 0; ++round) {
        try {
            lease = server_->lend(1, chaos, capacity_);  // evicts the remaining objects
        } catch (const Server::Busy&) {
        }
        if (lease == 0) {
            server_->step(1);  // goes on with the writes to the file
        }
    }
    stats = server_->stats();
    require(lease != 0 && stats.used == capacity_, "memory is in use, but no object and no lease has it");
    require(stats.objects == 0 && stats.object_bytes == 0 && stats.shelved == 0, "objects were counted that are not there");
    require(server_->release(1, lease) && server_->stats().used == 0, "the budget does not add up");
    server_->stop();
}

}  // namespace farpool::fuzz
