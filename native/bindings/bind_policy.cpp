// Policies, traces and the simulation of a cache.
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "policy/policies.hpp"
#include "policy/prefix_eviction.hpp"
#include "policy/simulation.hpp"
#include "policy/trace.hpp"

using namespace farpool::policy;
using farpool::fail_value;

namespace {

// A policy with its name, for messages.
struct Named {
    std::string name;
    std::unique_ptr<Policy> policy;
};

void check_capacity(std::uint64_t capacity) {
    if (capacity == 0) {
        fail_value("capacity is 0, expected 1 or more");
    }
}

std::string_view text_of(const BufferView& view) {
    return {static_cast<const char*>(view->buf), static_cast<std::size_t>(view->len)};
}

Trace read(const nb::object& bytes, Trace (*reader)(std::string_view)) {
    const BufferView view(bytes, PyBUF_C_CONTIGUOUS);
    nb::gil_scoped_release release;
    return reader(text_of(view));
}

Trace make_trace(const std::vector<std::uint64_t>& ids, const std::vector<std::uint64_t>& sizes) {
    if (ids.size() != sizes.size()) {
        fail_value("a trace needs as many sizes as objects, got " + std::to_string(ids.size()) + " objects and " +
                   std::to_string(sizes.size()) + " sizes");
    }
    Trace trace;
    for (std::size_t at = 0; at < ids.size(); ++at) {
        trace.add(ids[at], sizes[at], never);
    }
    trace.find_next_uses();
    return trace;
}

}  // namespace

void bind_policy(nb::module_& m) {
    using Released = nb::call_guard<nb::gil_scoped_release>;
    m.def(
        "policy_names",
        [] {
            nb::list found;
            for (const std::string_view name : names()) {
                found.append(nb::str(name.data(), name.size()));
            }
            return nb::tuple(found);
        },
        nb::sig("def policy_names() -> tuple[str, ...]"), "Names of all policies, in the order in which tables show them.");
    nb::class_<Named>(
        m, "Policy",
        R"(Chooses which object of a cache makes room for the next one. The caller keeps the objects and counts the bytes.

Objects have slots (small numbers, given by the caller) and keys. After a miss: `victim` and `remove` while there is no
room, then `insert`. Deterministic. ValueError for a slot that is not in, or is in already; nothing has changed then.)")
        .def(
            "__init__",
            [](Named* self, std::string name, std::uint64_t capacity) {
                check_capacity(capacity);
                auto policy = make(name, capacity);
                new (self) Named{std::move(name), std::move(policy)};
            },
            nb::arg("name"), nb::arg("capacity"),
            "Make the policy with this name, one of `policy_names` or ``node``, for a cache of this capacity.")
        .def(
            "touch", [](Named& self, Slot slot, std::int64_t next_use) { self.policy->touch(slot, next_use); }, nb::arg("slot"),
            nb::arg("next_use") = never,
            "Note that the object is used again; `next_use` is the time of its next use, for ``belady``.")
        .def(
            "insert",
            [](Named& self, Slot slot, std::uint64_t key, std::uint64_t size, std::int64_t next_use, double cost) {
                self.policy->insert(slot, {key, size, next_use, cost});
            },
            nb::arg("slot"), nb::arg("key"), nb::arg("size") = 1, nb::arg("next_use") = never, nb::arg("cost") = 1.0,
            "Note that the object was inserted; `cost` of fetching it, for ``gdsf`` and ``node``.")
        .def(
            "victim",
            [](Named& self, std::uint64_t key, std::uint64_t size, const nb::set& in_use) {
                const auto is_in_use = [&](Slot slot) { return in_use.contains(slot); };
                const Slot slot = self.policy->victim({key, size}, is_in_use);
                if (slot == no_slot) {
                    throw nb::index_error(("policy " + self.name + " has nothing that may leave").c_str());
                }
                return slot;
            },
            nb::arg("key"), nb::arg("size") = 1, nb::arg("in_use") = nb::set(),
            nb::sig("def victim(self, key: int, size: int = 1, in_use: set[int] = set()) -> int"),
            "Return the slot to evict next so that `key` can come in, none of `in_use`; it stays in. IndexError if none may "
            "go.")
        .def(
            "remove",
            [](Named& self, Slot slot, bool evicted) {
                self.policy->remove(slot, evicted ? Leaving::evicted : Leaving::deleted);
            },
            nb::arg("slot"), nb::kw_only(), nb::arg("evicted"),
            "Note that the object has left: evicted, so that it may be remembered, or deleted.")
        .def("__contains__", [](const Named& self, Slot slot) { return self.policy->contains(slot); })
        .def("__len__", [](const Named& self) { return self.policy->size(); });

    nb::class_<Trace>(m, "RequestTrace",
                      "Requests for objects, in order, with sizes and next uses. Requests of 0 bytes are left out and counted.")
        .def(
            "__init__",
            [](Trace* self, const std::vector<std::uint64_t>& ids, const std::vector<std::uint64_t>& sizes) {
                new (self) Trace(make_trace(ids, sizes));
            },
            nb::arg("ids"), nb::arg("sizes"))
        .def_static(
            "oracle_general", [](const nb::object& data) { return read(data, read_oracle_general); }, nb::arg("data"),
            R"(Read libCacheSim's oracleGeneral format: records of 24 bytes. ValueError, with the record's number, if the bytes
cannot be that.)")
        .def_static(
            "csv", [](const nb::object& data) { return read(data, read_csv); }, nb::arg("data"),
            R"(Read lines of ``time,object,size``, or of columns that a header names. ValueError, with the line's number, for
anything else.)")
        .def("__len__", &Trace::size)
        .def_prop_ro(
            "left_out", [](const Trace& self) { return self.left_out; }, "Requests of 0 bytes.")
        .def("objects", &Trace::objects, Released(), "Number of different objects.")
        .def("footprint", &Trace::footprint, Released(), "Bytes of all different objects.");

    nb::class_<Simulation>(m, "CacheSimulation",
                           "A cache under a policy that serves the requests of a trace. It counts all runs so far.")
        .def(
            "__init__",
            [](Simulation* self, const std::string& policy, std::uint64_t capacity) {
                check_capacity(capacity);
                new (self) Simulation(make(policy, capacity), capacity);
            },
            nb::arg("policy"), nb::arg("capacity"))
        .def("run", &Simulation::run, nb::arg("trace"), nb::arg("first"), nb::arg("last"), Released(),
             "Serve the requests from `first` to before `last`, without the interpreter lock.")
        .def_prop_ro("requests", [](const Simulation& self) { return self.counts().requests; })
        .def_prop_ro("misses", [](const Simulation& self) { return self.counts().misses; })
        .def_prop_ro("bytes", [](const Simulation& self) { return self.counts().bytes; })
        .def_prop_ro("bytes_missed", [](const Simulation& self) { return self.counts().bytes_missed; });

    m.def(
        "online_policy_names",
        [] {
            nb::list found;
            for (const std::string_view name : online_policies) {
                found.append(nb::str(name.data(), name.size()));
            }
            return nb::tuple(found);
        },
        nb::sig("def online_policy_names() -> tuple[str, ...]"),
        "Return the names of the policies among which `PrefixEviction` chooses; it begins with the first.");
    nb::class_<TenantCounts>(
        m, "TenantCounts",
        "Use of a cache by one tenant: its blocks, hits with the costs that they saved, insertions and evictions.")
        .def_ro("blocks", &TenantCounts::blocks)
        .def_ro("nbytes", &TenantCounts::nbytes)
        .def_ro("hits", &TenantCounts::hits)
        .def_ro("hit_nbytes", &TenantCounts::hit_nbytes)
        .def_ro("saved", &TenantCounts::saved)
        .def_ro("inserted", &TenantCounts::inserted)
        .def_ro("refused", &TenantCounts::refused)
        .def_ro("evicted", &TenantCounts::evicted);
    nb::class_<PrefixEviction>(
        m, "PrefixEviction",
        "Chooses the blocks of prefixes that leave a cache, and the policy to choose by. Deterministic; moves no bytes.")
        .def(
            "__init__",
            [](PrefixEviction* self, std::uint64_t capacity, const std::string& policy) {
                check_capacity(capacity);
                new (self) PrefixEviction(capacity, policy);
            },
            nb::arg("capacity"), nb::arg("policy") = "",
            "Make it for a cache of that many bytes; with a policy's name, that one is used and no shadows are run.")
        .def(
            "insert",
            [](PrefixEviction& self, std::uint64_t id, std::uint64_t parent, std::uint64_t size, double cost,
               std::uint32_t tenant) {
                std::vector<Evicted> evicted;
                const bool admitted = self.insert(id, parent, size, cost, tenant, evicted);
                nb::list ids;
                for (const Evicted& block : evicted) {
                    ids.append(block.id);
                }
                return nb::make_tuple(admitted, ids);
            },
            nb::arg("id"), nb::arg("parent"), nb::arg("size"), nb::arg("cost"), nb::arg("tenant") = 0,
            nb::sig(
                "def insert(self, id: int, parent: int, size: int, cost: float, tenant: int = 0) -> tuple[bool, list[int]]"),
            "Bring a block in; return True if it was admitted, and the ids that had to leave. `parent` is 0 for the first.")
        .def("touch", &PrefixEviction::touch, nb::arg("id"), "Note a hit; False if the block is not in.")
        .def("remove", &PrefixEviction::remove, nb::arg("id"), "Take a block out; False if it is not in.")
        .def("pin", &PrefixEviction::pin, nb::arg("id"), "Hold a block and those before it; False if it is not in.")
        .def("unpin", &PrefixEviction::unpin, nb::arg("id"), "Take one pin away; False if the block is not in.")
        .def("__contains__", &PrefixEviction::contains)
        .def("__len__", &PrefixEviction::size)
        .def_prop_ro("capacity", &PrefixEviction::capacity)
        .def_prop_ro("used", &PrefixEviction::used)
        .def_prop_ro("policy", [](const PrefixEviction& self) { return self.policy(); })
        .def_prop_ro("switches", &PrefixEviction::switches)
        .def_prop_ro("sampled", &PrefixEviction::sampled, "One block in so many is in the sample of the shadows.")
        .def(
            "use_policy", [](PrefixEviction& self, const std::string& name) { self.use_policy(name); }, nb::arg("name"),
            "Go on with another policy and the blocks as they are.")
        .def("tenants", [](const PrefixEviction& self) { return self.tenants(); })
        .def(
            "shadows",
            [](const PrefixEviction& self) {
                nb::list counts;
                for (const ShadowCounts& shadow : self.shadows()) {
                    counts.append(nb::make_tuple(shadow.policy, shadow.hits, shadow.saved));
                }
                return counts;
            },
            nb::sig("def shadows(self) -> list[tuple[str, int, float]]"),
            "Return the policy, hits and saved seconds of each shadow cache.");
}
