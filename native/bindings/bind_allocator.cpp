// Extent allocation.
#include "bindings/bindings.hpp"
#include "core/extent_allocator.hpp"

using farpool::ExtentAllocator;

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
}
