// The pager as Python objects own it, and the declarations that the files that bind it share.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "pager/pager.hpp"

// A tier's bookkeeping that is implemented by a Python object.
class PythonSpace : public farpool::pager::Space {
public:
    PythonSpace(nb::object space, nb::tuple classes) : space_(std::move(space)), classes_(std::move(classes)) {}
    // Number of calls of all spaces so far, during which other threads may run. Guarded by the interpreter lock.
    static inline std::uint64_t calls = 0;

    std::int64_t reserve(std::int64_t nbytes, int cls) override {
        ++calls;
        const nb::object offset = space_.attr("reserve")(nbytes, classes_[cls]);
        return offset.is_none() ? farpool::pager::nowhere : nb::cast<std::int64_t>(offset);
    }
    void free(std::int64_t offset, std::int64_t nbytes, int cls) override {
        ++calls;
        space_.attr("free")(offset, nbytes, classes_[cls]);
    }
    nb::handle object() const { return space_; }

private:
    nb::object space_;
    nb::tuple classes_;
};

// A pager together with the names of its block classes, as the Python binding needs them.
class BoundPager {
public:
    BoundPager(std::int64_t capacity, nb::handle spaces, nb::tuple classes, std::int64_t alignment, std::int64_t history,
               bool prefetch, bool late)
        : classes_(std::move(classes)),
          pager_(std::make_shared<farpool::pager::Pager>(capacity, bind(spaces), static_cast<int>(nb::len(classes_)), alignment,
                                                         history, prefetch, late)) {}

    int class_number(nb::handle name) const {
        const Py_ssize_t index = PySequence_Index(classes_.ptr(), name.ptr());
        if (index < 0) {
            throw nb::python_error();
        }
        return static_cast<int>(index);
    }
    nb::object class_name(int cls) const { return classes_[cls]; }
    farpool::pager::Pager* operator->() { return pager_.get(); }
    const std::shared_ptr<farpool::pager::Pager>& shared() const { return pager_; }

    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        if (nb::inst_ready(self)) {
            BoundPager& bound = *nb::inst_ptr<BoundPager>(self);
            for (const auto& space : bound->residency().spaces()) {
                if (space != nullptr) {
                    Py_VISIT(static_cast<const PythonSpace&>(*space).object().ptr());
                }
            }
        }
        return 0;
    }

private:
    std::vector<std::shared_ptr<farpool::pager::Space>> bind(nb::handle spaces) const {
        std::vector<std::shared_ptr<farpool::pager::Space>> bound;
        for (const nb::handle space : nb::iter(spaces)) {
            bound.push_back(space.is_none() ? nullptr : std::make_shared<PythonSpace>(nb::borrow(space), classes_));
        }
        return bound;
    }

    nb::tuple classes_;
    std::shared_ptr<farpool::pager::Pager> pager_;
};

nb::object to_python(const farpool::pager::Transfer& transfer);
nb::object to_python(const farpool::pager::Command& command);
// The Python exception for a refusal; None if there is no refusal.
nb::object to_python(const farpool::pager::Refusal& refusal);
[[noreturn]] void raise_refusal(const farpool::pager::Refusal& refusal);

// Runs a call of the pager and turns a Refused into a Python exception.
template <typename Call>
auto refusing(Call call) {
    try {
        return call();
    } catch (const farpool::pager::Refused& refused) {
        raise_refusal(refused.why);
    }
}
