// Operands in the arena, pinned by the native driver or by the pool's Python code.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "bindings/footprint.hpp"

// Bytes of a copy that is worth releasing the interpreter lock.
constexpr std::int64_t worth_unlocking = 64 << 10;

// Operands pinned in the arena, natively or by the pool's Python code, while this lives.
class Pinned {
public:
    Pinned(Footprint& any, Granted granted) : driver_(any.native), owner_(any.driver), granted_(std::move(granted)) {}
    Pinned(Footprint& any, nb::object grant) : owner_(any.pool), grant_(std::move(grant)), offsets_(grant_.attr("offsets")) {}
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;
    ~Pinned() {
        try {
            release();
        } catch (...) {  // an error is on its way already
        }
    }
    std::int64_t offset(std::size_t operand) const {
        return driver_ != nullptr ? granted_.offset(operand) : nb::cast<std::int64_t>(offsets_[operand]);
    }
    // True if other threads may have run Python code since the operands were requested.
    bool paused() const { return driver_ == nullptr || granted_.paused; }
    void release() {
        if (std::exchange(released_, true)) {
            return;
        }
        if (driver_ == nullptr) {
            owner_.attr("release")(grant_);
        } else if (granted_.access != nullptr) {
            driver_->release(*granted_.access);
        }
    }

private:
    BoundDriver* driver_ = nullptr;
    nb::object owner_;
    Granted granted_{};
    nb::object grant_;
    nb::object offsets_;
    bool released_ = false;
};

// Pins operands, and knows the errors with which the pager refuses them.
class Pinning {
public:
    void bind(nb::handle hooks) {
        refusals_ = hooks.attr("refusals");
        budget_error_ = hooks.attr("budget_error");
    }

    // Brings bytes of storages of one pool, of which `any` is a footprint, into the arena. `bound_uses`: the same uses as
    // objects. Null if they do not fit together and (`retried`) Python code handles that.
    template <typename BoundUses>
    std::unique_ptr<Pinned> pin(Footprint& any, std::span<const farpool::pager::Use> uses, BoundUses bound_uses,
                                const nb::object& name, bool rows, bool retried) const {
        try {
            std::optional<Granted> granted;
            if (any.native != nullptr) {
                granted = any.native->acquire(uses, name, rows, false);
            }
            if (granted) {
                return std::make_unique<Pinned>(any, std::move(*granted));
            }
            return std::make_unique<Pinned>(any, any.pool.attr("acquire")(bound_uses(), name, nb::arg("rows") = rows));
        } catch (nb::python_error& error) {
            nb::object refusal = nb::borrow(error.value());
            if (error.matches(refusals_)) {  // a refusal by the pager: the pool makes the error for the user
                refusal = any.pool.attr("refusal")(refusal, bound_uses(), name);
            }
            if (retried && nb::isinstance(refusal, budget_error_)) {
                return nullptr;
            }
            if (refusal.is(error.value())) {
                throw;
            }
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(refusal.ptr())), refusal.ptr());
        }
        throw nb::python_error();  // not above: as its context, the error caught there would keep all frames on the way
    }

private:
    nb::object refusals_, budget_error_;
};
