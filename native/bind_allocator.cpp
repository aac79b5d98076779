// Extent allocation and the order of next uses.
#include "bindings.hpp"
#include "extent_allocator.hpp"
#include "next_use.hpp"

using farpool::ExtentAllocator;
using farpool::NextUse;

void bind_allocator(nb::module_& m) {
    nb::class_<ExtentAllocator>(m, "ExtentAllocator",
                                "Offsets in [0, capacity): best fit, lowest offset among equals; deterministic.")
        .def(nb::init<std::int64_t, std::int64_t>(), nb::arg("capacity"), nb::arg("alignment") = 1)
        .def("alloc", &ExtentAllocator::alloc, nb::arg("nbytes"), nb::arg("tag") = 0)
        .def("alloc_lowest", &ExtentAllocator::alloc_lowest, nb::arg("nbytes"))
        .def("alloc_at", &ExtentAllocator::alloc_at, nb::arg("offset"), nb::arg("nbytes"), nb::arg("tag") = 0)
        .def("free", &ExtentAllocator::free, nb::arg("offset"))
        .def("grow", &ExtentAllocator::grow, nb::arg("capacity"))
        .def("shrink", &ExtentAllocator::shrink, nb::arg("capacity"))
        .def_prop_ro("capacity", &ExtentAllocator::capacity)
        .def_prop_ro("used", &ExtentAllocator::used)
        .def_prop_ro("largest_hole", &ExtentAllocator::largest_hole)
        .def("ranges", &ExtentAllocator::ranges)
        .def("tag", &ExtentAllocator::tag, nb::arg("offset"))
        .def("tags", &ExtentAllocator::tags);

    nb::class_<NextUse>(m, "NextUse", "Belady over known next uses: the victim is the block used farthest in the future.")
        .def(nb::init<>())
        .def("insert", &NextUse::insert, nb::arg("block"), nb::arg("next_use"))
        .def("remove", &NextUse::remove, nb::arg("block"))
        .def("victim", [](const NextUse& self) { return self.size() == 0 ? std::int64_t{-1} : self.victim(); })
        .def("victim_next_use", &NextUse::victim_next_use)
        .def("__len__", &NextUse::size)
        .def("__contains__", &NextUse::contains);
}
