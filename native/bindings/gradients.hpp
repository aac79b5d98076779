// Gradients of leaves, moved into the pool.
#pragma once

#include <array>

#include "bindings/pinned.hpp"
#include "bindings/torch_face.hpp"

class Gradients {
public:
    // Replaces the plain gradient of a leaf by a paged copy. `copy(paged, gradient, name)` copies one that spans blocks. False,
    // with no change, if Python has to do it or the gradient must stay plain.
    bool page(const Torch& torch, const Pinning& pinning, nb::handle leaf, const nb::object& name,
              const nb::object& copy) const;

private:
    nb::object grad_name_ = interned("grad");
    nb::object device_name_ = interned("device");
    nb::object trained_name_ = interned("requires_grad");
    nb::object is_contiguous_name_ = interned("is_contiguous");
    nb::object dtype_name_ = interned("dtype");
    nb::object size_name_ = interned("size");
    nb::object stride_name_ = interned("stride");
    std::array<nb::object, 2> other_names_ = {interned("is_nested"), interned("is_quantized")};
    nb::object zero_ = nb::steal(PyLong_FromLong(0));
};
