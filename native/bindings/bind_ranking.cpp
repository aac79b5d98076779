// The order of a store's members for each key.
#include <algorithm>

#include "bindings/bindings.hpp"
#include "core/ranking.hpp"

namespace {

std::vector<std::uint64_t> part(const std::vector<std::uint64_t>& seeds, std::size_t begin, std::size_t end) {
    return {seeds.begin() + static_cast<std::ptrdiff_t>(begin), seeds.begin() + static_cast<std::ptrdiff_t>(end)};
}

std::vector<double> part(const std::vector<double>& weights, std::size_t begin, std::size_t end) {
    return {weights.begin() + static_cast<std::ptrdiff_t>(begin), weights.begin() + static_cast<std::ptrdiff_t>(end)};
}

std::string_view text(const nb::bytes& key) { return {key.c_str(), key.size()}; }

class MemberRanking {
public:
    MemberRanking(nb::tuple members, const std::vector<std::uint64_t>& seeds, const std::vector<double>& weights,
                  std::size_t takers, std::size_t copies, const std::vector<std::size_t>& slow)
        : members_(std::move(members)),
          takers_(checked(seeds, weights, takers), part(weights, 0, takers)),
          others_(part(seeds, takers, seeds.size()), part(weights, takers, weights.size())),
          copies_(copies) {
        if (!slow.empty()) {
            slow_.resize(members_.size());
            for (const std::size_t place : slow) {
                slow_.at(place) = true;
            }
        }
    }

    nb::object first(const nb::bytes& key) const {
        if (members_.size() == 0) {
            throw nb::value_error("there is no member to be the first");
        }
        return member(first_place(text(key)));
    }

    nb::list places(const nb::bytes& key) const {
        std::vector<std::size_t> order;
        append(order, takers_, 0, text(key));
        return listed(order);
    }

    nb::list order(const nb::bytes& key) const { return listed(order_of(text(key))); }

    nb::dict by_first(const nb::list& keys) const {
        const farpool::Ranking& ranking = takers_.size() > 0 ? takers_ : others_;
        nb::dict groups;
        if (ranking.size() == 1 && slow_.empty()) {
            groups[member(0)] = nb::steal(
                PyObject_CallFunction(reinterpret_cast<PyObject*>(&PyRange_Type), "n", static_cast<Py_ssize_t>(keys.size())));
        }
        if (ranking.size() == 0 || groups.size() > 0) {
            return groups;
        }
        std::vector<nb::list> numbers(members_.size());
        for (std::size_t number = 0; number < keys.size(); ++number) {
            numbers[first_place(key_at(keys, number))].append(number);
        }
        for (std::size_t place = 0; place < numbers.size(); ++place) {
            if (numbers[place].size() > 0) {
                groups[member(place)] = numbers[place];
            }
        }
        return groups;
    }

    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        if (nb::inst_ready(self)) {
            const auto* ranking = nb::inst_ptr<MemberRanking>(self);
            Py_VISIT(ranking->members_.ptr());
        }
        return 0;
    }

    static int clear(PyObject* self) {
        nb::inst_ptr<MemberRanking>(self)->members_.reset();
        return 0;
    }

private:
    std::vector<std::uint64_t> checked(const std::vector<std::uint64_t>& seeds, const std::vector<double>& weights,
                                       std::size_t takers) const {
        if (seeds.size() != members_.size() || weights.size() != members_.size() || takers > members_.size()) {
            throw nb::value_error("expected one seed and one weight for each member, and at most as many takers");
        }
        return part(seeds, 0, takers);
    }

    nb::object member(std::size_t place) const { return nb::borrow(PyTuple_GET_ITEM(members_.ptr(), place)); }

    // The member to read from first.
    std::size_t first_place(std::string_view key) const {
        const std::size_t place = takers_.size() > 0 ? takers_.first(key) : others_.first(key);
        return slow_.empty() || !slow_[place] ? place : order_of(key).front();
    }

    // All members, in the order in which to read from them. Slow ones come after the others that have a copy.
    std::vector<std::size_t> order_of(std::string_view key) const {
        std::vector<std::size_t> order;
        order.reserve(members_.size());
        append(order, takers_, 0, key);
        append(order, others_, takers_.size(), key);
        if (!slow_.empty()) {
            const auto with_copy = order.begin() + static_cast<std::ptrdiff_t>(std::min(copies_, order.size()));
            const auto is_prompt = [&](std::size_t place) { return !slow_[place]; };
            std::stable_partition(order.begin(), with_copy, is_prompt);
            std::stable_partition(with_copy, order.end(), is_prompt);
        }
        return order;
    }

    static void append(std::vector<std::size_t>& order, const farpool::Ranking& ranking, std::size_t from,
                       std::string_view key) {
        if (ranking.size() == 1) {
            order.push_back(from);
            return;
        }
        for (const std::size_t place : ranking.order(key)) {
            order.push_back(from + place);
        }
    }

    nb::list listed(const std::vector<std::size_t>& order) const {
        nb::list members;
        for (const std::size_t place : order) {
            members.append(member(place));
        }
        return members;
    }

    nb::tuple members_;
    farpool::Ranking takers_;
    farpool::Ranking others_;
    const std::size_t copies_;
    std::vector<bool> slow_;  // of each member; empty if none is slow
};

PyType_Slot ranking_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(MemberRanking::traverse)},
                               {Py_tp_clear, reinterpret_cast<void*>(MemberRanking::clear)},
                               {0, nullptr}};

}  // namespace

void bind_ranking(nb::module_& m) {
    nb::class_<MemberRanking>(m, "Ranking", nb::type_slots(ranking_slots),
                              R"(Rendezvous order of members for keys. Immutable.

The first `takers` of the members take new objects; the others only return the objects that they have, and rank behind.

An object is on the first `copies` members. Programs read from them in the order of their ranks, but last from the ones
whose indexes are in `slow`.)")
        .def(nb::init<nb::tuple, const std::vector<std::uint64_t>&, const std::vector<double>&, std::size_t, std::size_t,
                      const std::vector<std::size_t>&>(),
             nb::arg("members"), nb::arg("seeds"), nb::arg("weights"), nb::arg("takers"), nb::arg("copies") = 1,
             nb::arg("slow") = std::vector<std::size_t>(),
             nb::sig("def __init__(self, members: tuple[typing.Any, ...], seeds: collections.abc.Sequence[int], weights: "
                     "collections.abc.Sequence[float], takers: int, copies: int = 1, slow: collections.abc.Sequence[int] = "
                     "()) -> None"),
             "Rank members by the hash of key and seed. A member's share of the keys is proportional to its weight.")
        .def("first", &MemberRanking::first, nb::arg("key"), nb::sig("def first(self, key: bytes) -> typing.Any"),
             "Return the member to read from first; ValueError if there is none.")
        .def("order", &MemberRanking::order, nb::arg("key"), nb::sig("def order(self, key: bytes) -> list[typing.Any]"),
             "Return all members, in the order in which to read from them.")
        .def("places", &MemberRanking::places, nb::arg("key"), nb::sig("def places(self, key: bytes) -> list[typing.Any]"),
             "Return the members that take new objects, the highest rank for a key first.")
        .def("by_first", &MemberRanking::by_first, nb::arg("keys"),
             nb::sig("def by_first(self, keys: list[bytes]) -> dict[typing.Any, collections.abc.Sequence[int]]"),
             "Group keys by the member to read each from first; return the numbers of its keys for each member that has some.");
}
