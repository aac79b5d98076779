#include "bindings/gradients.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>

using farpool::pager::Mode;
using farpool::pager::Use;

bool Gradients::page(const Torch& torch, const Pinning& pinning, nb::handle leaf, const nb::object& name,
                     const nb::object& copy) const {
    const nb::object grad = attribute(leaf, grad_name_);
    const nb::object parent = torch.footprint_of(leaf.ptr());
    if (!torch.is_plain_type(grad.ptr()) || !parent.is_valid()) {
        return false;
    }
    Footprint& like = *nb::inst_ptr<Footprint>(parent);
    if (like.native == nullptr || !torch.is_strided(grad) || !attribute(grad, device_name_).equal(like.device) ||
        attribute(grad, trained_name_).ptr() != Py_False || call_method(grad, is_contiguous_name_).ptr() != Py_True) {
        return false;
    }
    if (!torch.has_values(grad) ||
        std::ranges::any_of(other_names_, [&](const nb::object& kind) { return attribute(grad, kind).ptr() != Py_False; })) {
        return false;
    }
    const nb::object dtype = attribute(grad, dtype_name_);
    const nb::tuple size(call_method(grad, size_name_));
    const auto itemsize = nb::cast<std::int64_t>(dtype.attr("itemsize"));
    std::int64_t row = itemsize;
    for (std::size_t dim = 1; dim < size.size(); ++dim) {
        row *= nb::cast<std::int64_t>(size[dim]);
    }
    const std::int64_t nbytes = size.size() == 0 ? row : row * nb::cast<std::int64_t>(size[0]);
    if (nbytes == 0) {
        return false;
    }
    const nb::object storage =
        like.pool.attr("allocate")(nbytes, nb::arg("cls") = "gradient", nb::arg("row_bytes") = size.size() < 2 ? 0 : row,
                                   nb::arg("name") = like.storage.attr("gradient_name"));
    const nb::object stride = call_method(grad, stride_name_);
    const nb::object made =
        call(torch.footprint_type(), {storage.ptr(), like.arena.ptr(), dtype.ptr(), size.ptr(), stride.ptr(), zero_.ptr()});
    const nb::object paged = torch.wrap(made, false);
    Footprint& it = *nb::inst_ptr<Footprint>(made);
    if (it.layout->count > 1) {
        call(copy, {paged.ptr(), grad.ptr(), name.ptr()});
    } else {
        const Use use{it.layout, 0, nbytes, Mode::overwrite};
        const auto bound_use = [&] {
            nb::list bound;
            bound.append(BoundUse{it.storage, use});
            return bound;
        };
        const std::unique_ptr<Pinned> pinned = pinning.pin(it, std::span(&use, 1), bound_use, name, false, false);
        const std::uintptr_t from = torch.address_of(grad);
        without_lock_if(nbytes >= worth_unlocking, [&] {
            std::memcpy(reinterpret_cast<void*>(it.arena_start + static_cast<std::uintptr_t>(pinned->offset(0))),
                        reinterpret_cast<const void*>(from), static_cast<std::size_t>(nbytes));
        });
        pinned->release();
    }
    if (PyObject_SetAttr(leaf.ptr(), grad_name_.ptr(), paged.ptr()) != 0) {
        throw nb::python_error();
    }
    return true;
}
