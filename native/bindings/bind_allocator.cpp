// Extent allocation.
#include "bindings/bindings.hpp"
#include "core/extent_allocator.hpp"

using farpool::ExtentAllocator;

void bind_allocator(nb::module_& m) {
    nb::class_<ExtentAllocator>(
        m, "ExtentAllocator",
        R"(Allocator of ranges in ``[0, capacity)``: best fit, lowest offset among equals; deterministic. Logarithmic time.

Sizes are rounded up to `alignment`. Used for the arena, for each tier's space and for block numbers.)")
        .def(nb::init<std::int64_t, std::int64_t>(), nb::arg("capacity"), nb::arg("alignment") = 1)
        .def(
            "alloc", &ExtentAllocator::alloc, nb::arg("nbytes"), nb::arg("tag") = 0,
            R"(Take a new range; returns its offset, or -1 if no hole is large enough. The tag is the caller's and kept with the
range.)")
        .def("alloc_lowest", &ExtentAllocator::alloc_lowest, nb::arg("nbytes"),
             "Take a new range first fit: returns the lowest offset at which it fits, or -1.")
        .def("alloc_at", &ExtentAllocator::alloc_at, nb::arg("offset"), nb::arg("nbytes"), nb::arg("tag") = 0,
             "Take exactly this range; False (and nothing taken) if any byte of it is taken or outside.")
        .def("free", &ExtentAllocator::free, nb::arg("offset"),
             "Free the range that begins at `offset`; returns its (rounded) bytes. ValueError if none begins there.")
        .def("grow", &ExtentAllocator::grow, nb::arg("capacity"), "Raise the capacity.")
        .def("shrink", &ExtentAllocator::shrink, nb::arg("capacity"),
             "Lower the capacity; False (and nothing changed) if anything is allocated beyond it.")
        .def_prop_ro("capacity", &ExtentAllocator::capacity)
        .def_prop_ro("used", &ExtentAllocator::used)
        .def_prop_ro("largest_hole", &ExtentAllocator::largest_hole)
        .def("ranges", &ExtentAllocator::ranges, "The allocated ranges ``(offset, nbytes)`` in order of offset.")
        .def("tag", &ExtentAllocator::tag, nb::arg("offset"),
             "The tag of the range that begins at `offset`, None if none begins there.")
        .def("tags", &ExtentAllocator::tags, "The tags of the allocated ranges in order of offset.");
}
