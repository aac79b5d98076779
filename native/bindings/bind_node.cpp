// NodeServer: the data loop of a node, for the Python that controls it.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "node/server.hpp"

using farpool::Listed;
using farpool::Server;

namespace {

nb::bytes as_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

const char* name_of(farpool::Change change) {
    constexpr const char* names[] = {"stored", "kept", "let_go", "dropped", "expired", "evicted", "damaged", "outdated"};
    return names[static_cast<std::size_t>(change) - 1];
}

constexpr const char* state_names[] = {"active", "draining", "read-only"};

const char* name_of(farpool::NodeState state) { return state_names[static_cast<std::size_t>(state)]; }

farpool::NodeState state_of(const std::string& name) {
    for (const auto state : {farpool::NodeState::active, farpool::NodeState::draining, farpool::NodeState::read_only}) {
        if (name == name_of(state)) {
            return state;
        }
    }
    throw nb::value_error(("state is '" + name + "', expected active, draining or read-only").c_str());
}

nb::dict as_dict(const Server::Changes& changes) {
    nb::list found;
    for (const farpool::Changed& one : changes.changes) {
        found.append(nb::make_tuple(name_of(one.change), one.serial, nb::bytes(one.key.data(), one.key.size()), one.nbytes,
                                    farpool::left_until(one.expiry), one.copies));
    }
    nb::dict made;
    made["lost"] = changes.lost;
    made["life"] = changes.life;
    made["next"] = changes.next;
    made["left"] = changes.left;
    made["changes"] = found;
    return made;
}

nb::tuple as_tuple(const farpool::ListedPin& pin) {
    const auto& [tenant, session, offset, number] = pin.id;
    const nb::object left = pin.left_ms ? nb::object(nb::int_(*pin.left_ms)) : nb::object(nb::none());
    return nb::make_tuple(tenant, session, offset, number, pin.serial, pin.owner, nb::bytes(pin.key.data(), pin.key.size()),
                          pin.nbytes, left, pin.ended);
}

std::string_view as_view(const nb::bytes& data) { return {data.c_str(), data.size()}; }

nb::dict as_dict(const Server::Stats& stats) {
    nb::dict made;
    made["state"] = stats.state;
    made["capacity"] = stats.capacity;
    made["used"] = stats.used;
    made["backed"] = stats.backed;
    made["taken"] = stats.taken;
    made["lent"] = stats.lent;
    made["leases"] = stats.leases;
    made["objects"] = stats.objects;
    made["object_bytes"] = stats.object_bytes;
    made["index_bytes"] = stats.index_bytes;
    made["nvme_capacity"] = stats.shelf_capacity;
    made["nvme_used"] = stats.shelf_used;
    made["nvme_leaving"] = stats.leaving;
    made["nvme_written"] = stats.shelf_written;
    made["nvme_objects"] = stats.shelved;
    made["retained_objects"] = stats.retained;
    made["retained_bytes"] = stats.retained_bytes;
    made["retained_evictions"] = stats.retained_evictions;
    made["demotions"] = stats.demotions;
    made["promotions"] = stats.promotions;
    made["connections"] = stats.connections;
    made["sessions"] = stats.sessions;
    made["gets"] = stats.gets;
    made["hits"] = stats.hits;
    made["puts"] = stats.puts;
    made["drops"] = stats.drops;
    made["evictions"] = stats.evictions;
    made["expired"] = stats.expired;
    made["adopted"] = stats.adopted;
    made["bytes_in"] = stats.bytes_in;
    made["bytes_out"] = stats.bytes_out;
    made["checksum_errors"] = stats.checksum_errors;
    made["bad_frames"] = stats.bad_frames;
    return made;
}

void add_charges(nb::dict& made, const farpool::Quotas::Charges& charges) {
    made["pins"] = charges.pins;
    made["preparations"] = charges.preparations;
    made["leases"] = charges.leases;
    made["connections"] = charges.connections;
}

farpool::Claiming::Action action_of(const std::string& name) {
    using Action = farpool::Claiming::Action;
    return name == "end"         ? Action::end
           : name == "raise"     ? Action::raise
           : name == "read_only" ? Action::read_only
                                 : throw nb::value_error("expected the action end, raise or read_only");
}

[[noreturn]] void fail_lease(const std::string& message) { throw nb::key_error(message.c_str()); }

[[noreturn]] void fail_as(const char* error, const std::string& message) {
    PyErr_SetString(nb::module_::import_("farpool.errors").attr(error).ptr(), message.c_str());
    throw nb::python_error();
}

// Runs a call without the interpreter lock; exceptions of the server become the Python errors of the same names.
template <typename Work>
auto refusing(Work work) {
    std::string denied;
    std::string busy;
    std::string lapsed;
    std::string full;
    {
        nb::gil_scoped_release release;
        try {
            return work();
        } catch (const Server::Denied& error) {
            denied = error.what();
        } catch (const Server::Busy& error) {
            busy = error.what();
        } catch (const Server::Lapsed& error) {
            lapsed = error.what();
        } catch (const Server::Full& error) {
            full = error.what();
        }
    }
    if (!full.empty()) {
        fail_as("NodeFullError", full);
    }
    if (!lapsed.empty()) {
        fail_as("TicketError", lapsed);
    }
    denied.empty() ? fail_as("QuotaExceededError", busy) : fail_as("AccessDeniedError", denied);
}

}  // namespace

void bind_node(nb::module_& m) {
    using Released = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Server>(
        m, "NodeServer",
        R"(The data loop of a node (docs/wire.md) and what it lends: segment files in a folder (docs/segment-file.md).

Methods may be called from any thread. OSError where the system refuses a file or memory.)")
        .def(
            "__init__",
            [](Server* self, std::string directory, std::uint64_t capacity, bool ephemeral, double grace, double stall,
               double spin, std::string nvme, std::uint64_t nvme_capacity, farpool::Budget::Shares shares) {
                nb::gil_scoped_release release;
                new (self) Server({std::move(directory), capacity, ephemeral, grace, stall, spin, std::move(nvme),
                                   nvme_capacity, std::move(shares)});
            },
            nb::arg("directory"), nb::arg("capacity"), nb::kw_only(), nb::arg("ephemeral") = false, nb::arg("grace") = 10.0,
            nb::arg("stall") = 30.0, nb::arg("spin") = 50e-6, nb::arg("nvme") = "", nb::arg("nvme_capacity") = 0,
            nb::arg("shares") = farpool::Budget::Shares(),
            "Adopt what an earlier start left in the folder, unless `ephemeral`. `shares` are bytes guaranteed to tenants.")
        .def("start", &Server::start, Released())
        .def("stop", &Server::stop, Released(),
             "Close all connections and end the loop. The segments stay unless ephemeral. Idempotent.")
        .def("step", &Server::step, nb::arg("milliseconds"), Released(),
             R"(Serve the connections once, waiting at most so long for an event; return False if there was nothing to do. For a
program that runs the loop itself, without `start`.)")
        .def_static(
            "simulate_time",
            [](double seconds) { farpool::Clock::simulate(farpool::Clock::time_point(farpool::seconds(seconds))); },
            nb::arg("seconds"),
            R"(Set the time that all servers have in calls from this thread, in seconds above 0; 0 gives them the system's time
again. The threads of servers that were started keep the system's time.)")
        .def(
            "adopt",
            [](Server& self, nb::object fd, std::uint64_t session, std::uint32_t tenant, std::uint32_t rights,
               const std::string& key, bool latency) {
                farpool::Stream stream = taken_stream(fd);
                refusing([&] { self.adopt(std::move(stream), session, tenant, rights, key, latency); });
            },
            nb::arg("fd"), nb::arg("session"), nb::arg("tenant"), nb::arg("rights"), nb::arg("key"), nb::kw_only(),
            nb::arg("latency") = false,
            nb::sig("def adopt(self, fd: int | Stream, session: int, tenant: int, rights: int, key: str, *, "
                    "latency: bool = False) -> None"),
            R"(Serve an authenticated stream, which belongs to the server from now on. With `latency`, small requests of the
connection are served first. AccessDeniedError where the session is another tenant's or another access key's.)")
        .def("expect_tenants", &Server::expect_tenants, nb::arg("tenants"), Released(),
             "Set the tenants that may come: what a tenant holds unevictable leaves room for the shares of the others.")
        .def(
            "set_memory",
            [](Server& self, const std::map<std::uint32_t, std::tuple<std::uint64_t, std::uint64_t, std::int32_t>>& tenants,
               bool evicts) {
                farpool::Budget::Allowances allowances;
                for (const auto& [tenant, given] : tenants) {
                    const auto& [guaranteed, burst, priority] = given;
                    allowances.emplace(tenant, farpool::Budget::Allowance{guaranteed, burst, priority});
                }
                nb::gil_scoped_release release;
                self.set_memory(std::move(allowances), evicts);
            },
            nb::arg("tenants"), nb::arg("evicts") = true,
            R"(Replace what a policy gives each tenant of the memory: guaranteed bytes (0: its share without a policy), burst (the
most bytes that it may use; 0: no limit) and priority (borrowed bytes of the lowest are evicted first). Without `evicts`, a
tenant above a lowered burst keeps its objects until it stores others. ValueError if a burst is below its guarantee.)")
        .def(
            "memory",
            [](Server& self) {
                std::map<std::uint32_t, std::tuple<std::uint64_t, std::uint64_t, std::int32_t>> found;
                for (const auto& [tenant, given] : refusing([&] { return self.memory(); })) {
                    found.emplace(tenant, std::tuple(given.guaranteed, given.burst, given.priority));
                }
                return found;
            },
            "Return what `set_memory` was given last.")
        .def(
            "expect_keys",
            [](Server& self, const std::map<std::string, std::tuple<std::uint32_t, bool, std::uint64_t>>& keys) {
                std::map<std::string, Server::ExpectedKey> expected;
                for (const auto& [name, key] : keys) {
                    const auto& [tenant, has_memory, nbytes] = key;
                    expected.emplace(name, Server::ExpectedKey{tenant, {has_memory, nbytes}});
                }
                nb::gil_scoped_release release;
                self.expect_keys(expected);
            },
            nb::arg("keys"),
            R"(Set the access keys that may come: the tenant of each, True if it has a right with which it can hold something, and
the bytes that it may hold, 0 for the node's own limit.)")
        .def(
            "set_bandwidth",
            [](Server& self, const std::map<std::uint32_t, std::tuple<double, std::uint64_t, std::uint64_t>>& tenants) {
                std::map<std::uint32_t, farpool::Bandwidth> bandwidth;
                for (const auto& [tenant, one] : tenants) {
                    const auto& [share, guarantee, cap] = one;
                    bandwidth.emplace(tenant, farpool::Bandwidth{share, guarantee, cap});
                }
                nb::gil_scoped_release release;
                self.set_bandwidth(bandwidth);
            },
            nb::arg("tenants"),
            R"(Set the share, the guarantee and the cap of each tenant, from now on. A tenant that is not named has the share 1, no
guarantee and no cap. Guarantees and caps are bytes a second, and 0 for none. ValueError if a value cannot be used;
then nothing changes.)")
        .def(
            "bandwidth",
            [](Server& self) {
                std::map<std::uint32_t, std::tuple<double, std::uint64_t, std::uint64_t>> found;
                for (const auto& [tenant, one] : self.bandwidth()) {
                    found.emplace(tenant, std::tuple(one.share, one.guarantee, one.cap));
                }
                return found;
            },
            Released(), "Return what `set_bandwidth` has set.")
        .def("seconds_above_cap", &Server::seconds_above_cap, nb::arg("tenant"), Released(),
             "Return the seconds until a tenant is below its cap; 0 if it is.")
        .def(
            "end_key", [](Server& self, const std::string& key) { self.end_key(key); }, nb::arg("key"), Released(),
            "Close all connections that were opened with this access key.")
        .def(
            "connect",
            [](Server& self, std::uint64_t session, std::uint32_t tenant, const std::string& key) {
                refusing([&] { self.connect(session, tenant, key); });
            },
            nb::arg("session"), nb::arg("tenant"), nb::arg("key"),
            R"(Keep the session alive by one more connection, which the server does not serve itself. AccessDeniedError as for
`adopt`, QuotaExceededError where the key or its tenant has too many connections.)")
        .def("disconnect", &Server::disconnect, nb::arg("session"), Released())
        .def(
            "lend",
            [](Server& self, std::uint64_t session, std::uint32_t tenant, std::uint64_t nbytes) {
                const std::uint64_t lease = refusing([&] { return self.lend(session, tenant, nbytes); });
                if (lease == 0) {
                    const farpool::Admission admission = refusing([&] { return self.admission(); });
                    if (!admission.takes_new()) {
                        fail_as("NodeFullError", admission.refusal());
                    }
                    const Server::Stats stats = refusing([&] { return self.stats(); });
                    fail_as("NodeFullError", "the node cannot lend " + std::to_string(nbytes) + " bytes: it has " +
                                                 std::to_string(stats.capacity) + ", of which " + std::to_string(stats.lent) +
                                                 " are lent, and the rest may be pinned, kept or within other tenants' shares");
                }
                return lease;
            },
            nb::arg("session"), nb::arg("tenant"), nb::arg("nbytes"),
            R"(Lend memory; returns the new lease's number. NodeFullError where there is no room, QuotaExceededError where the
session or its tenant has too much.)")
        .def(
            "release",
            [](Server& self, std::uint64_t session, std::uint64_t lease) {
                bool found = false;
                {
                    nb::gil_scoped_release release;
                    found = self.release(session, lease);
                }
                if (!found) {
                    fail_lease("the session has no lease " + std::to_string(lease));
                }
            },
            nb::arg("session"), nb::arg("lease"), "End a lease. KeyError if the session has no such lease.")
        .def("leases", &Server::leases, nb::arg("session"), Released())
        .def(
            "lease_path",
            [](Server& self, std::uint64_t session, std::uint64_t lease) {
                std::string path;
                {
                    nb::gil_scoped_release release;
                    path = self.lease_path(session, lease);
                }
                if (path.empty()) {
                    fail_lease("the session has no lease " + std::to_string(lease));
                }
                return path;
            },
            nb::arg("session"), nb::arg("lease"),
            R"(Path of a lease's file; of an ephemeral node, the path that it would have. KeyError if the session has no such
lease.)")
        .def(
            "lease_file",
            [](Server& self, std::uint64_t session, std::uint64_t lease) {
                const int file = refusing([&] { return self.lease_file(session, lease); });
                if (file < 0) {
                    fail_lease("the session has no lease " + std::to_string(lease));
                }
                return file;
            },
            nb::arg("session"), nb::arg("lease"),
            "Return a descriptor of a lease's file, the caller's. KeyError if the session has no such lease.")
        .def(
            "claim",
            [](Server& self, std::uint64_t session, std::uint32_t tenant, const nb::bytes& lease, std::uint64_t epoch,
               std::uint32_t rights, double seconds, std::vector<std::pair<std::uint32_t, std::uint64_t>> extents, double age) {
                farpool::Ticket ticket{
                    farpool::PoolLease::from(as_view(lease)), epoch, rights, seconds, std::move(extents), age};
                nb::list claimed;
                for (const auto& one : refusing([&] { return self.claim(session, tenant, std::move(ticket)); })) {
                    claimed.append(nb::make_tuple(one.number, one.lease, one.nbytes, one.made));
                }
                return claimed;
            },
            nb::arg("session"), nb::arg("tenant"), nb::kw_only(), nb::arg("lease"), nb::arg("epoch"), nb::arg("rights"),
            nb::arg("seconds"), nb::arg("extents"), nb::arg("age") = 0.0,
            nb::sig("def claim(self, session: int, tenant: int, *, lease: bytes, epoch: int, rights: int, seconds: float, "
                    "extents: Sequence[tuple[int, int]], age: float = 0.0) -> list[tuple[int, int, int, bool]]"),
            R"(Let the session use the extents of a verified ticket for `seconds`, and make the missing ones. `extents` are pairs of
number and bytes; the ticket was issued `age` seconds ago. Returns number, lease at this node, bytes, and True if it was
made, of each. Either all are claimed or none. TicketError where the epoch is late or the extents are others;
QuotaExceededError as for `lend`; NodeFullError if the node drains; OSError where there is no room.)")
        .def(
            "order",
            [](Server& self, const nb::bytes& lease, std::uint64_t epoch, const std::string& action,
               std::vector<std::uint32_t> extents) {
                const farpool::Claiming::Order order{farpool::PoolLease::from(as_view(lease)), epoch, action_of(action),
                                                     std::move(extents)};
                return refusing([&] { return self.order(order); });
            },
            nb::arg("lease"), nb::arg("epoch"), nb::arg("action"), nb::arg("extents"),
            R"(Carry out a verified order: `action` is "end" (of these extents; of all, where there are none), "raise" or "read_only".
Returns the numbers of the extents that it has ended. TicketError where the epoch is late.)")
        .def(
            "holdings",
            [](Server& self) {
                nb::list found;
                for (const auto& one : refusing([&] { return self.holdings(); })) {
                    nb::dict made;
                    made["lease"] = one.lease;
                    made["bytes"] = one.nbytes;
                    made["session"] = one.session;
                    made["tenant"] = one.tenant;
                    made["key"] = one.key;
                    made["pool_lease"] = as_bytes(one.pool_lease);
                    made["extent"] = one.number;
                    made["epoch"] = one.epoch;
                    made["rights"] = one.rights;
                    made["seconds"] = one.seconds;
                    made["read_only"] = one.read_only;
                    made["path"] = one.path;
                    found.append(made);
                }
                return found;
            },
            nb::sig("def holdings(self) -> list[dict[str, typing.Any]]"),
            R"(All leases of sessions, and all extents with each claim of them. Session 0 stands for an extent that no session has
claimed; `pool_lease` is empty for a lease of a session.)")
        .def(
            "end_holding",
            [](Server& self, std::uint64_t lease, const std::string& reason) {
                const auto ended = refusing([&] { return self.end_holding(lease, reason); });
                if (!ended) {
                    fail_lease("the node has no lease " + std::to_string(lease));
                }
                return std::pair(ended->nbytes, ended->claims);
            },
            nb::arg("lease"), nb::arg("reason"),
            R"(End a lease of any session, or all claims of an extent, which itself stays. Returns the bytes freed and the claims
ended. KeyError if there is no such lease.)")
        .def("objects_files", &Server::objects_files, nb::arg("tenant"), nb::arg("writable"), Released(),
             "Return descriptors, the caller's, of the index, read-only, and the data, writable where that is wanted.")
        .def(
            "objects_paths",
            [](Server& self, std::uint32_t tenant) {
                farpool::ObjectPaths paths;
                {
                    nb::gil_scoped_release release;
                    paths = self.objects_paths(tenant);
                }
                return nb::make_tuple(paths.index, paths.data);
            },
            nb::arg("tenant"), nb::sig("def objects_paths(self, tenant: int) -> tuple[str, str]"),
            "Paths of the files of the index and the data; of an ephemeral node, the paths that they would have.")
        .def(
            "objects_visited",
            [](Server& self, std::uint64_t session, std::uint32_t tenant) {
                return refusing([&] { return self.objects_visited(session, tenant); });
            },
            nb::arg("session"), nb::arg("tenant"),
            R"(Return a descriptor, the caller's, of the session's own marks of visits, in anonymous memory. QuotaExceededError
where too many sessions of the tenant have some, or its share has no room for more.)")
        .def(
            "expose",
            [](Server& self, std::uint64_t session, std::uint32_t tenant) { refusing([&] { self.expose(session, tenant); }); },
            nb::arg("session"), nb::arg("tenant"),
            "Note that the session writes the data segment over a one-sided fabric: it may prepare places there.")
        .def(
            "list_some",
            [](Server& self, std::uint32_t tenant, std::uint64_t place, const nb::bytes& after, const nb::bytes& prefix,
               std::size_t limit) {
                const std::string_view from = as_view(after);
                const std::string_view with = as_view(prefix);
                nb::list found;
                for (const Listed& one : refusing([&] { return self.list_some(tenant, place, from, with, limit); })) {
                    found.append(
                        nb::make_tuple(as_bytes(one.key), one.serial, one.nbytes, one.ttl_ms, one.pins, one.copies, one.kept));
                }
                return nb::make_tuple(found, place);
            },
            nb::arg("tenant"), nb::arg("place"), nb::arg("after"), nb::arg("prefix"), nb::arg("limit"),
            nb::sig("def list_some(self, tenant: int, place: int, after: bytes, prefix: bytes, limit: int) -> "
                    "tuple[list[tuple[bytes, int, int, int, int, int, bool]], int]"),
            R"(List objects: key, serial, bytes, milliseconds to live (0: no end), pins, copies, and True if kept, of those behind
the key `after`: at least `limit`, or those that one turn has come to. With them the place where the walk goes on (at
first it is 0), 0 at the end.)")
        .def(
            "changes",
            [](Server& self, std::uint32_t tenant, std::uint64_t life, std::uint64_t since, std::size_t limit) {
                return as_dict(refusing([&] { return self.changes(tenant, life, since, limit); }));
            },
            nb::arg("tenant"), nb::arg("life"), nb::arg("since"), nb::arg("limit"),
            nb::sig("def changes(self, tenant: int, life: int, since: int, limit: int) -> dict[str, Any]"),
            R"(Return at most `limit` changes of a tenant's objects from the number `since` on, as the call `changes` does
(docs/wire.md). The first call begins the tenant's journal. QuotaExceededError if the tenant's share has no room for it.)")
        .def(
            "set_state",
            [](Server& self, const std::string& name) {
                const farpool::NodeState state = state_of(name);
                nb::gil_scoped_release release;
                self.set_state(state);
            },
            nb::arg("state"), R"(Set the state that an administrator wants: "active", "draining" or "read-only".)")
        .def("follow_record", &Server::follow_record, nb::arg("draining"), Released(),
             "Set whether the node's record in the registry says that it drains.")
        .def(
            "state",
            [](Server& self) {
                const farpool::Admission admission = refusing([&] { return self.admission(); });
                return nb::make_tuple(name_of(admission.state()), name_of(admission.ordered()));
            },
            nb::sig("def state(self) -> tuple[str, str]"),
            "Return the node's state, and the state that an administrator has set; the record may be stricter.")
        .def(
            "pins",
            [](Server& self, std::optional<std::uint32_t> tenant, const farpool::PinId& after, std::size_t limit) {
                nb::list found;
                for (const auto& pin : refusing([&] { return self.pins(tenant, after, limit); })) {
                    found.append(as_tuple(pin));
                }
                return found;
            },
            nb::arg("tenant").none(), nb::arg("after"), nb::arg("limit"),
            nb::sig("def pins(self, tenant: int | None, after: tuple[int, int, int, int], limit: int) -> "
                    "list[tuple[int, int, int, int, int, str, bytes, int, int | None, bool]]"),
            R"(List at most `limit` pins of a tenant, or of all tenants, that follow `after`: tenant, session, offset of the
payload, number, serial, name of the access key, key, bytes, milliseconds left (None: no end), and True if an
administrator ended it.)")
        .def(
            "end_pin",
            [](Server& self, const farpool::PinId& pin, std::uint64_t serial, const std::string& reason) {
                const auto found = refusing([&] { return self.end_pin(pin, serial, reason); });
                if (!found) {
                    throw nb::key_error("there is no such pin: it was released, or its session has ended");
                }
                return as_tuple(*found);
            },
            nb::arg("pin"), nb::arg("serial"), nb::arg("reason"),
            nb::sig("def end_pin(self, pin: tuple[int, int, int, int], serial: int, reason: str) -> "
                    "tuple[int, int, int, int, int, str, bytes, int, int | None, bool]"),
            R"(End the claim of a pin, and return the pin as it was before. Its memory stays until the program releases it, its
time is over or its session ends. KeyError if there is no such pin.)")
        .def(
            "stats",
            [](Server& self) {
                Server::Stats stats;
                {
                    nb::gil_scoped_release release;
                    stats = self.stats();
                }
                return as_dict(stats);
            },
            nb::sig("def stats(self) -> dict[str, int]"))
        .def(
            "tenants",
            [](Server& self) {
                nb::dict found;
                for (const auto& [tenant, stats] : refusing([&] { return self.tenants(); })) {
                    nb::dict made;
                    made["objects"] = stats.objects;
                    made["used"] = stats.used;
                    made["backed"] = stats.backed;
                    made["taken"] = stats.taken;
                    made["lent"] = stats.lent;
                    made["share"] = stats.share;
                    made["burst"] = stats.allowance.burst;
                    made["priority"] = stats.allowance.priority;
                    made["searches"] = stats.counts.searches;
                    made["gets"] = stats.counts.gets;
                    made["hits"] = stats.counts.hits;
                    made["lookups"] = stats.counts.lookups;
                    made["found"] = stats.counts.found;
                    made["puts"] = stats.counts.puts;
                    made["readers"] = stats.readers;
                    made["evictions"] = stats.counts.evictions;
                    made["evictions_of_damaged"] = stats.counts.damaged;
                    made["evictions_from_file"] = stats.counts.from_file;
                    made["expired"] = stats.counts.expired;
                    made["bytes_in"] = stats.usage.work.bytes_in;
                    made["bytes_out"] = stats.usage.work.bytes_out;
                    made["work"] = stats.usage.work.units();
                    made["throttled_us"] = std::chrono::duration_cast<std::chrono::microseconds>(stats.usage.throttled).count();
                    add_charges(made, stats.charges);
                    found[nb::int_(tenant)] = made;
                }
                return found;
            },
            nb::sig("def tenants(self) -> dict[int, dict[str, int]]"),
            R"(Counters by tenant: objects, and bytes that are used, backed by memory, taken by what the system says, lent and
guaranteed; pins, preparations, leases and connections; all evictions, evictions of damaged objects, and evictions
for want of room in the NVMe file; puts, gets and looked up keys of connections, and sessions that map the objects and read
them without a request; bytes moved in each direction, units of work, and microseconds for which the tenant
had work but was above its cap.)")
        .def(
            "refusals", [](Server& self) { return refusing([&] { return self.refusals(); }); },
            "Requests over data connections that were refused, by tenant and by status.")
        .def(
            "latencies",
            [](Server& self) {
                nb::dict found;
                for (const auto& [op, latencies] : refusing([&] { return self.latencies(); })) {
                    nb::list counts;
                    for (const std::uint64_t count : latencies.counts) {
                        counts.append(count);
                    }
                    found[nb::int_(op)] = nb::make_tuple(counts, static_cast<double>(latencies.sum_ns) / 1e9);
                }
                return found;
            },
            nb::sig("def latencies(self) -> dict[int, tuple[list[int], float]]"),
            R"(Times of replies by number of the operation: counts of the buckets that end at `latency_ends`, and of longer
times; their sum in seconds.)")
        .def_prop_ro_static(
            "latency_ends",
            [](nb::handle) {
                nb::list ends;
                for (std::size_t bucket = 0; bucket < farpool::Latencies::buckets; ++bucket) {
                    ends.append(farpool::Latencies::end_s(bucket));
                }
                return ends;
            },
            nb::sig("def latency_ends(arg: object, /) -> list[float]"), "Ends of the buckets of `latencies`, in seconds.")
        .def(
            "keys",
            [](Server& self) {
                nb::dict found;
                for (const auto& [name, stats] : refusing([&] { return self.keys(); })) {
                    nb::dict made;
                    made["tenant"] = stats.tenant;
                    made["held"] = stats.charges.nbytes;
                    add_charges(made, stats.charges);
                    found[name.c_str()] = made;
                }
                return found;
            },
            nb::sig("def keys(self) -> dict[str, dict[str, int]]"),
            R"(Counters by name of an access key that may come: its tenant, bytes held in leases, pins and unfinished publishes,
pins, preparations, leases and connections.)")
        .def(
            "events",
            [](Server& self) {
                std::vector<Server::Event> events;
                {
                    nb::gil_scoped_release release;
                    events = self.events();
                }
                nb::list found;
                for (const Server::Event& event : events) {
                    found.append(nb::make_tuple(event.kind, event.session, event.text));
                }
                return found;
            },
            nb::sig("def events(self) -> list[tuple[str, int, str]]"),
            "Return the events since the last call: kind, session and text of each.");
}
