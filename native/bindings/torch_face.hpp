// The objects of torch that the hot path of operations uses, and the questions that it asks about tensors.
//
// Tensors are known here as Python objects only: the core is built without torch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "bindings/footprint.hpp"

class Torch {
public:
    void bind(nb::handle torch, nb::type_object paged, nb::type_object footprint) {
        const nb::object core = torch.attr("_C");
        plain_type_ = torch.attr("Tensor");
        strided_ = torch.attr("strided");
        requires_grad_ = plain_type_.attr("requires_grad");
        make_wrapper_ = plain_type_.attr("_make_wrapper_subclass");
        set_memory_ = core.attr("TensorBase").attr("set_");
        part_of_memory_ = core.attr("StorageBase").attr("__getitem__");
        refuse_address_ = core.attr("_set_throw_on_mutable_data_ptr");
        set_conj_ = core.attr("_set_conj");
        set_neg_ = core.attr("_set_neg");
        modes_ = core.attr("_len_torch_dispatch_stack");
        infers_ = torch.attr("is_inference_mode_enabled");
        is_excluded_ = core.attr("_dispatch_tls_is_dispatch_key_excluded");
        set_excluded_ = core.attr("_dispatch_tls_set_dispatch_key_excluded");
        const nb::object keys = core.attr("DispatchKey");
        lazy_ = {keys.attr("Conjugate"), keys.attr("Negative"), keys.attr("ZeroTensor")};
        views_ = keys.attr("ADInplaceOrView");
        composing_ = {lazy_[0], lazy_[1], lazy_[2], keys.attr("PythonTLSSnapshot")};
        composite_ = keys.attr("CompositeImplicitAutograd");
        inference_ = core.attr("_InferenceMode");
        paged_ = std::move(paged);
        footprint_type_ = std::move(footprint);
    }

    bool is_paged(PyObject* object) const { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == paged_.ptr(); }
    bool is_of_other_layout(PyObject* object) const { return is_plain_type(object) && !is_strided(object); }
    bool is_plain_type(PyObject* object) const { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == plain_type_.ptr(); }

    bool all_paged(nb::handle types) const {
        const nb::object items = nb::steal(PySequence_Fast(types.ptr(), "types"));
        if (!items.is_valid()) {
            throw nb::python_error();
        }
        PyObject** item = PySequence_Fast_ITEMS(items.ptr());
        return std::all_of(item, item + PySequence_Fast_GET_SIZE(items.ptr()),
                           [&](PyObject* type) { return type == paged_.ptr(); });
    }

    bool no_modes() const { return PyLong_AsLong(call(modes_, {}).ptr()) == 0; }

    // Null if another thread has just taken the tensor out of its pool.
    nb::object footprint_of(PyObject* tensor) const {
        PyObject* footprint = PyObject_GetAttr(tensor, footprint_name_.ptr());
        if (footprint == nullptr) {
            PyErr_Clear();
        }
        return nb::steal(footprint);
    }

    const nb::object& footprint_type() const { return footprint_type_; }
    bool is_strided(nb::handle tensor) const { return attribute(tensor, layout_name_).is(strided_); }
    bool infers() const { return call(infers_, {}).ptr() == Py_True; }
    std::uintptr_t address_of(nb::handle tensor) const { return nb::cast<std::uintptr_t>(call_method(tensor, address_name_)); }

    // True if a plain tensor's values are real numbers that lie in memory.
    bool is_real(PyObject* tensor) const {
        return call_method(tensor, is_complex_name_).ptr() == Py_False && has_values(tensor);
    }

    // True if a plain tensor's memory holds its values, with no lazy operation pending.
    bool has_values(nb::handle tensor) const {
        return std::ranges::all_of(lazy_names_,
                                   [&](const nb::object& is_lazy) { return call_method(tensor, is_lazy).ptr() == Py_False; });
    }

    // True if a result is a plain tensor whose bytes lie outside the arena of a footprint's pool.
    bool is_plain(nb::handle result, const Footprint& any) const {
        if (!is_plain_type(result.ptr()) || !is_strided(result)) {
            return false;
        }
        const std::uintptr_t address = address_of(result);
        if (address != 0) {
            return address < any.arena_start || address >= any.arena_stop;
        }
        return !nb::cast<bool>(any.arena.attr("aliases")(result));  // empty
    }

    // Makes a paged tensor over the bytes of a footprint.
    nb::object wrap(nb::handle footprint, bool requires_grad) const {
        const Footprint& it = *nb::inst_ptr<Footprint>(footprint);
        std::optional<Recording> recording;
        if (infers()) {
            // An inference tensor can be no view of a tensor made outside inference mode, and it never stops being one.
            recording.emplace(*this);
        }
        const nb::object offset = nb::steal(PyLong_FromLongLong(it.offset));
        const std::array<PyObject*, 7> arguments = {paged_.ptr(),
                                                    it.size.ptr(),
                                                    it.stride.ptr(),
                                                    offset.ptr(),
                                                    it.dtype.ptr(),
                                                    it.device.ptr(),
                                                    requires_grad ? Py_True : Py_False};
        PyObject* made = PyObject_Vectorcall(make_wrapper_.ptr(), arguments.data(), 2, wrapper_names_.ptr());
        if (made == nullptr) {
            throw nb::python_error();
        }
        nb::object tensor = nb::steal(made);
        // Native code that asks for an address gets an error instead of a null pointer.
        call(refuse_address_, {made});
        if (it.conj) {
            call(set_conj_, {made, Py_True});
        }
        if (it.neg) {
            call(set_neg_, {made, Py_True});
        }
        if (PyObject_SetAttr(made, footprint_name_.ptr(), footprint.ptr()) != 0) {
            throw nb::python_error();
        }
        return tensor;
    }

    // The real tensor over the arena that stands for a paged one whose first byte is at `place`; the cached one if it has that
    // place.
    nb::object real_of(nb::handle tensor, const nb::object& footprint, std::int64_t place) const {
        const nb::object requires_grad = nb::steal(
            Py_TYPE(requires_grad_.ptr())
                ->tp_descr_get(requires_grad_.ptr(), tensor.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()))));
        if (!requires_grad.is_valid()) {
            throw nb::python_error();
        }
        Footprint& it = *nb::inst_ptr<Footprint>(footprint);
        const bool trained = requires_grad.ptr() == Py_True;
        if (it.has_real(place, trained)) {
            return it.real;
        }
        // Made under inference mode it could not be used outside.
        if (it.conj || it.neg || infers()) {
            return footprint.attr("real_at")(place, requires_grad);
        }
        const nb::object start = nb::steal(PyLong_FromLongLong(place));
        const nb::object stop = nb::steal(PyLong_FromLongLong(place + it.stop - it.start));
        const nb::object range = nb::steal(PySlice_New(start.ptr(), stop.ptr(), nullptr));
        const nb::object memory = call(part_of_memory_, {attribute(it.arena, memory_name_).ptr(), range.ptr()});
        const nb::object empty =
            call(attribute(call(attribute(it.arena, typed_name_), {it.dtype.ptr()}), new_empty_name_), {zero_.ptr()});
        nb::object real = call(set_memory_, {empty.ptr(), memory.ptr(), zero_.ptr(), it.size.ptr(), it.stride.ptr()});
        if (trained) {  // some kernels look at it, to compute what backward will need
            call_method(real, train_name_);
        }
        it.keep_real(place, trained, real);
        return real;
    }

    // Keys of torch's dispatcher, for `Included`.
    std::span<const nb::object> lazy_keys() const { return lazy_; }
    std::span<const nb::object> composing_keys() const { return composing_; }
    std::span<const nb::object> view_keys() const { return std::span(&views_, 1); }
    const nb::object& composite_key() const { return composite_; }

    // Includes dispatch keys again while it lives: torch excludes them while an operation is handled in Python.
    class Included {
    public:
        Included(const Torch& torch, std::span<const nb::object> keys) : torch_(torch) {
            // All or none of them are left out.
            keys_ = call(torch.is_excluded_, {keys[0].ptr()}).ptr() == Py_True ? keys : std::span<const nb::object>{};
            exclude(Py_False);
        }
        Included(const Included&) = delete;
        Included& operator=(const Included&) = delete;
        ~Included() { exclude(Py_True); }

    private:
        void exclude(PyObject* wanted) const {
            for (const nb::object& key : keys_) {
                call(torch_.set_excluded_, {key.ptr(), wanted});
            }
        }
        const Torch& torch_;
        std::span<const nb::object> keys_;
    };

private:
    // Suspends inference mode while it lives.
    class Recording {
    public:
        explicit Recording(const Torch& torch) : mode_(call(torch.inference_, {Py_False})) { mode_.attr("__enter__")(); }
        Recording(const Recording&) = delete;
        Recording& operator=(const Recording&) = delete;
        ~Recording() { mode_.attr("__exit__")(nb::none(), nb::none(), nb::none()); }

    private:
        nb::object mode_;
    };

    nb::object plain_type_, paged_, footprint_type_, strided_, requires_grad_;
    nb::object set_memory_, part_of_memory_, make_wrapper_, refuse_address_, set_conj_, set_neg_, modes_, infers_, is_excluded_,
        set_excluded_;
    std::array<nb::object, 3> lazy_;
    std::array<nb::object, 4> composing_;  // keys that are open while an operator is decomposed: lazy ones and our rules'
    nb::object views_, composite_, inference_;
    nb::object wrapper_names_ = nb::make_tuple("strides", "storage_offset", "dtype", "device", "requires_grad");
    nb::object footprint_name_ = interned("_footprint");
    nb::object layout_name_ = interned("layout");
    nb::object address_name_ = interned("data_ptr");
    nb::object is_complex_name_ = interned("is_complex");
    nb::object memory_name_ = interned("storage");
    nb::object typed_name_ = interned("typed");
    nb::object new_empty_name_ = interned("new_empty");
    nb::object train_name_ = interned("requires_grad_");
    std::array<nb::object, 3> lazy_names_ = {interned("is_conj"), interned("is_neg"), interned("_is_zerotensor")};
    nb::object zero_ = nb::steal(PyLong_FromLong(0));
};
