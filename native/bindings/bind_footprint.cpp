// The Python binding of Footprint.
#include "bindings/footprint.hpp"

using farpool::pager::Layout;

namespace {

PyType_Slot footprint_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(Footprint::traverse)},
                                 {Py_tp_clear, reinterpret_cast<void*>(Footprint::clear)},
                                 {0, nullptr}};

void make_footprint(Footprint* self, nb::object storage, nb::object arena, nb::object dtype, nb::handle size, nb::handle stride,
                    std::int64_t offset, bool conj, bool neg) {
    nb::object pool = storage.attr("pool");
    nb::object driver = nb::getattr(pool, "driver", nb::none());  // not every owner of storages has one
    BoundDriver* native = nullptr;
    nb::try_cast(driver, native);
    auto layout = nb::cast<std::shared_ptr<const Layout>>(storage.attr("layout"));
    nb::object device = arena.attr("device");
    const auto arena_start = nb::cast<std::uintptr_t>(arena.attr("start"));
    const auto arena_stop = nb::cast<std::uintptr_t>(arena.attr("stop"));
    const auto itemsize = nb::cast<std::int64_t>(dtype.attr("itemsize"));
    const bool lazy = conj || neg || nb::cast<bool>(dtype.attr("is_complex"));
    new (self) Footprint{std::move(storage),
                         std::move(pool),
                         std::move(driver),
                         native,
                         std::move(layout),
                         std::move(arena),
                         std::move(device),
                         arena_start,
                         arena_stop,
                         std::move(dtype),
                         nb::tuple(size),
                         nb::tuple(stride),
                         offset,
                         conj,
                         neg,
                         lazy};
    std::int64_t reach = 0;
    for (std::size_t dim = 0; dim < self->size.size(); ++dim) {
        const auto extent = nb::cast<std::int64_t>(self->size[dim]);
        if (extent == 0) {
            return;
        }
        reach += (extent - 1) * nb::cast<std::int64_t>(self->stride[dim]);
    }
    self->start = offset * itemsize;
    self->stop = (offset + reach + 1) * itemsize;
}

}  // namespace

void bind_footprint(nb::module_& m) {
    nb::class_<Footprint>(m, "Footprint", "Geometry of a tensor over a storage; see `farpool.tensors.footprint`.",
                          nb::type_slots(footprint_slots), nb::is_weak_referenceable())
        .def("__init__", make_footprint, nb::arg("storage"), nb::arg("arena"), nb::arg("dtype"), nb::arg("size"),
             nb::arg("stride"), nb::arg("offset"), nb::kw_only(), nb::arg("conj") = false, nb::arg("neg") = false,
             nb::sig("def __init__(self, storage: typing.Any, arena: typing.Any, dtype: torch.dtype, size: "
                     "collections.abc.Sequence[int], stride: collections.abc.Sequence[int], offset: int, *, conj: bool = "
                     "False, neg: bool = False) -> None"))
        .def_ro("storage", &Footprint::storage, nb::sig("def storage(self) -> typing.Any"))
        .def_ro("arena", &Footprint::arena, nb::sig("def arena(self) -> typing.Any"))
        .def_ro("dtype", &Footprint::dtype, nb::sig("def dtype(self) -> torch.dtype"))
        .def_ro("size", &Footprint::size, nb::sig("def size(self) -> tuple[int, ...]"))
        .def_ro("stride", &Footprint::stride, nb::sig("def stride(self) -> tuple[int, ...]"))
        .def_ro("offset", &Footprint::offset)
        .def_ro("conj", &Footprint::conj)
        .def_ro("neg", &Footprint::neg)
        .def_ro("start", &Footprint::start)
        .def_ro("stop", &Footprint::stop)
        .def_ro("views", &Footprint::views, nb::sig("def views(self) -> dict[typing.Any, typing.Any]"))
        .def(
            "reader", [](Footprint& self) { return self.bound_use(false); }, nb::sig("def reader(self) -> Use"),
            "Return the use that reads its bytes.")
        .def(
            "writer", [](Footprint& self) { return self.bound_use(true); }, nb::sig("def writer(self) -> Use"),
            "Return the use that writes its bytes.")
        .def(
            "kept_real",
            [](Footprint& self, std::int64_t place, bool requires_grad) {
                return self.has_real(place, requires_grad) ? self.real : nb::none();
            },
            nb::arg("place"), nb::arg("requires_grad"),
            nb::sig("def kept_real(self, place: int, requires_grad: bool) -> torch.Tensor | None"),
            "Return the real tensor that was kept, if it is at `place` in the arena.")
        .def("keep_real", &Footprint::keep_real, nb::arg("place"), nb::arg("requires_grad"), nb::arg("real"),
             nb::sig("def keep_real(self, place: int, requires_grad: bool, real: torch.Tensor) -> None"),
             "Keep a real tensor, to be used again.")
        .def("check_real", &Footprint::check_real, nb::arg("real"), nb::sig("def check_real(self, real: torch.Tensor) -> None"),
             "Drop a real tensor that was kept if an operation has changed its geometry.")
        .def("forget_real", &Footprint::forget_real,
             "Drop the real tensor that was kept, so that the next use makes a new one.");
}
