// Footprints: the geometry of a paged tensor for the hot path of operations, and helpers to call Python objects.
#pragma once

#include <initializer_list>
#include <memory>

#include "bindings/bound_driver.hpp"

inline nb::object call(const nb::object& function, std::initializer_list<PyObject*> arguments) {
    PyObject* result = PyObject_Vectorcall(function.ptr(), std::data(arguments), std::size(arguments), nullptr);
    if (result == nullptr) {
        throw nb::python_error();
    }
    return nb::steal(result);
}

inline nb::object call_method(nb::handle object, const nb::object& name) {
    PyObject* result = PyObject_CallMethodNoArgs(object.ptr(), name.ptr());
    if (result == nullptr) {
        throw nb::python_error();
    }
    return nb::steal(result);
}

inline nb::object interned(const char* name) { return nb::steal(PyUnicode_InternFromString(name)); }

inline nb::object attribute(nb::handle object, const nb::object& name) {
    PyObject* result = PyObject_GetAttr(object.ptr(), name.ptr());
    if (result == nullptr) {
        throw nb::python_error();
    }
    return nb::steal(result);
}

// The bytes that a paged tensor touches of its storage, with a cache of objects made from them. Immutable but for the cache.
struct Footprint {
    nb::object storage;
    nb::object pool;
    nb::object driver;
    BoundDriver* native;  // null if the driver is a Python object
    std::shared_ptr<const farpool::pager::Layout> layout;
    nb::object arena;  // farpool's ArenaViews
    nb::object device;
    std::uintptr_t arena_start;
    std::uintptr_t arena_stop;
    nb::object dtype;
    nb::tuple size;
    nb::tuple stride;
    std::int64_t offset;  // in elements, from the storage's start
    bool conj;
    bool neg;
    bool lazy;               // true if values may be conjugated or negated lazily: conj, neg, or a complex dtype
    std::int64_t start = 0;  // bytes of the storage that the elements touch
    std::int64_t stop = 0;
    nb::object reader = nb::none();
    nb::object writer = nb::none();
    // Cache of the latest real tensor: the tensor, its requires_grad, and its offset in the arena.
    nb::object real = nb::none();
    bool trained = false;
    std::int64_t place = farpool::pager::nowhere;
    nb::dict views = nb::dict();

    farpool::pager::Use use(bool write) const {
        return {layout, start, stop, write ? farpool::pager::Mode::write : farpool::pager::Mode::read};
    }
    bool has_real(std::int64_t at, bool requires_grad) const {
        return place == at && trained == requires_grad && !real.is_none();
    }
    void keep_real(std::int64_t at, bool requires_grad, nb::object made) {
        place = at;
        trained = requires_grad;
        real = std::move(made);
    }
    void forget_real() { real = nb::none(); }
    // Drops the cached real tensor if an operation has changed its size or strides.
    void check_real(nb::handle made) {
        static const nb::object size_name = interned("size");
        static const nb::object stride_name = interned("stride");
        if (!call_method(made, size_name).equal(size) || !call_method(made, stride_name).equal(stride)) {
            forget_real();
        }
    }
    // Bytes of a row along the first dimension; 0 if its elements are not contiguous.
    std::int64_t row_bytes() const {
        std::int64_t elements = 1;
        for (std::size_t dim = size.size(); dim-- > 1;) {
            const auto extent = nb::cast<std::int64_t>(size[dim]);
            if (extent != 1 && nb::cast<std::int64_t>(stride[dim]) != elements) {
                return 0;
            }
            elements *= extent;
        }
        const bool rows = size.size() != 0 && nb::cast<std::int64_t>(stride[0]) >= elements && !conj && !neg;
        return rows ? elements * nb::cast<std::int64_t>(dtype.attr("itemsize")) : 0;
    }
    // The use of these bytes as a Python object, made once for reading and once for writing.
    const nb::object& bound_use(bool write) {
        nb::object& bound = write ? writer : reader;
        if (bound.is_none()) {
            bound = nb::cast(BoundUse{storage, use(write)});
        }
        return bound;
    }

    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        if (nb::inst_ready(self)) {
            const Footprint& it = *nb::inst_ptr<Footprint>(self);
            for (const nb::object* reference : {&it.storage, &it.pool, &it.driver, &it.arena, &it.reader, &it.writer, &it.real,
                                                static_cast<const nb::object*>(&it.views)}) {
                Py_VISIT(reference->ptr());
            }
        }
        return 0;
    }
    static int clear(PyObject* self) {
        if (nb::inst_ready(self)) {
            Footprint& it = *nb::inst_ptr<Footprint>(self);
            it.native = nullptr;
            for (nb::object* reference : {&it.storage, &it.pool, &it.driver, &it.arena, &it.reader, &it.writer, &it.real}) {
                *reference = nb::none();
            }
            it.views.clear();
        }
        return 0;
    }
};
