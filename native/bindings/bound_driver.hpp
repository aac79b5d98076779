// The driver as Python objects own it: one call each to request, await and release an access.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "bindings/bound_pager.hpp"
#include "bindings/python_observer.hpp"
#include "core/clock.hpp"
#include "pager/driver.hpp"
#include "pager/uses.hpp"

// A native use together with the Python storage that it belongs to.
struct BoundUse {
    nb::object storage;
    farpool::pager::Use use;

    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        if (nb::inst_ready(self)) {
            Py_VISIT(nb::inst_ptr<BoundUse>(self)->storage.ptr());
        }
        return 0;
    }
    static int clear(PyObject* self) {
        if (nb::inst_ready(self)) {
            nb::inst_ptr<BoundUse>(self)->storage = nb::none();
        }
        return 0;
    }
};

// Operands in the arena, pinned until they are released.
struct Granted {
    std::shared_ptr<farpool::pager::Access> access;  // null if all uses are empty
    std::vector<farpool::pager::Placed> places;
    double waited;  // seconds
    bool paused;    // true if other threads may have run Python code during the wait

    // Offset of a use's first byte in the arena.
    std::int64_t offset(std::size_t use) const {
        const auto [run, inside] = places[use];
        return run < 0 ? 0 : access->places[static_cast<std::size_t>(run)] + inside;
    }
};

// A Granted as a Python object, with a note that its owner may attach.
struct Grant {
    std::shared_ptr<farpool::pager::Access> access;
    nb::tuple offsets;
    double waited;  // seconds
    nb::object note = nb::none();

    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        if (nb::inst_ready(self)) {
            Py_VISIT(nb::inst_ptr<Grant>(self)->offsets.ptr());
            Py_VISIT(nb::inst_ptr<Grant>(self)->note.ptr());
        }
        return 0;
    }
    static int clear(PyObject* self) {
        if (nb::inst_ready(self)) {
            nb::inst_ptr<Grant>(self)->note = nb::none();
        }
        return 0;
    }
};

// Takes or releases the reference to a port's owner for the queue. Needs the interpreter lock, which every caller that starts
// transfers or notes their ends holds.
inline void keep_object(PyObject* owner, bool take) {
    if (take) {
        Py_INCREF(owner);
    } else {
        Py_DECREF(owner);
    }
}

// Releases the interpreter lock while a thread blocks, and checks for signals.
class InterpreterPause : public farpool::pager::Pause {
public:
    void run(const std::function<void()>& block) override {
        ++pauses;
        const nb::gil_scoped_release release;
        block();
    }
    bool interrupted() override { return PyErr_CheckSignals() != 0; }

    std::uint64_t pauses = 0;  // under the interpreter's lock
};

class BoundDriver {
public:
    // `timeout`: seconds that an access waits for its operands. `waited`: Python callable that is told of each wait. `watch`:
    // debug mode's observer, or None. `stream`: tells a device's stream on which the calling thread queues work now; None on
    // the host.
    BoundDriver(nb::handle_t<BoundPager> pager, nb::object queue, std::uintptr_t arena, nb::list ports, double timeout,
                nb::object waited, nb::object watch, nb::object stream)
        : pager_(nb::borrow(pager)),
          queue_(std::move(queue)),
          ports_(std::move(ports)),
          timeout_(timeout),
          waited_(std::move(waited)),
          stream_(std::move(stream)),
          observer_(watch.is_none() ? nullptr : std::make_unique<PythonObserver>(std::move(watch))),
          driver_(nb::inst_ptr<BoundPager>(pager)->shared(), transfer_queue(queue_), arena, keep_object, observer_.get()),
          attention_(observer_ != nullptr) {}

    farpool::pager::Driver* operator->() { return &driver_; }

    // The driver, after making known to it the ports that the pool has appended to its list since the last call.
    farpool::pager::Driver& with_ports() {
        while (known_ < nb::len(ports_)) {
            const nb::object port = ports_[known_++];
            driver_.add_port(nb::cast<farpool::Port*>(port), port.ptr());
        }
        return driver_;
    }

    void enter() { driver_.lock(pause_).release(); }

    // Waits, with the lock released, until something has changed or `seconds` have passed.
    void wait(double seconds) {
        with_ports().wait(seconds, pause_);
        if (pause_.interrupted()) {
            throw nb::python_error();
        }
    }

    // Brings operands into the arena and pins them. Empty if Python code has to act first (`attention`, loose storages) or
    // the driver is closed. `bound_uses`: the uses as a Python sequence, for debug mode, which is always `careful`.
    std::optional<Granted> acquire(std::span<const farpool::pager::Use> uses, nb::handle op, bool rows, bool careful,
                                   nb::handle bound_uses = nb::handle()) {
        if (!careful && (attention_.load() || std::ranges::any_of(uses, [](const auto& use) { return use.storage->loose; }))) {
            return std::nullopt;
        }
        farpool::pager::Runs runs = farpool::pager::runs_of(uses, rows);
        Granted granted{nullptr, std::move(runs.places), 0.0, false};
        const std::uint64_t pauses = pause_.pauses + PythonSpace::calls;
        if (!runs.runs.empty()) {
            auto lock = driver_.lock(pause_);
            if (driver_.closed()) {  // since the caller looked
                return std::nullopt;
            }
            granted.access = refusing([&] { return with_ports().request(std::move(runs.runs), stream()); });
            if (!granted.access->granted) {
                granted.waited = await(lock, granted.access, op);
            }
            if (observer_ != nullptr) {
                driver_.check_grant(granted.access, [&] { observer_->granted(granted.access, bound_uses, op); });
            }
            granted.paused = pause_.pauses + PythonSpace::calls != pauses;
        }
        return granted;
    }

    void release(farpool::pager::Access& access) {
        const auto lock = driver_.lock(pause_);
        driver_.release(access);
    }

    std::atomic<bool>& attention() { return attention_; }

    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        if (nb::inst_ready(self)) {
            const BoundDriver& bound = *nb::inst_ptr<BoundDriver>(self);
            Py_VISIT(bound.pager_.ptr());
            Py_VISIT(bound.queue_.ptr());
            Py_VISIT(bound.ports_.ptr());
            Py_VISIT(bound.waited_.ptr());
            Py_VISIT(bound.stream_.ptr());
            if (bound.observer_ != nullptr) {
                Py_VISIT(bound.observer_->object().ptr());
            }
        }
        return 0;
    }

private:
    farpool::ProgramStream stream() const { return stream_.is_none() ? 0 : nb::cast<farpool::ProgramStream>(stream_()); }

    double await(std::unique_lock<std::mutex>& lock, const std::shared_ptr<farpool::pager::Access>& access, nb::handle op) {
        const double start = farpool::monotonic_seconds();
        const auto [block, tier] = driver_.awaited(*access);
        farpool::pager::Wait outcome;
        try {
            outcome = driver_.await(lock, *access, start + timeout_, pause_);
        } catch (...) {  // an error of a tier's bookkeeping: this thread waits no longer
            driver_.abandon(access);
            throw;
        }
        if (outcome == farpool::pager::Wait::refused) {
            raise_refusal(access->refusal);
        }
        if (outcome == farpool::pager::Wait::interrupted) {
            const nb::python_error interrupt;  // takes the error out of the interpreter: `abandon` may run Python code
            driver_.abandon(access);
            lock.unlock();
            throw interrupt;
        }
        if (outcome != farpool::pager::Wait::granted) {
            driver_.abandon(access);
            lock.unlock();
            waited_(op, start, -1.0, block, tier);  // raises what this means
            throw std::logic_error("Driver: an access was given up without an error");
        }
        const double seconds = farpool::monotonic_seconds() - start;
        lock.unlock();
        try {
            waited_(op, start, seconds, block, tier);
        } catch (...) {
            lock = driver_.lock(pause_);
            driver_.release(*access);
            throw;
        }
        lock = driver_.lock(pause_);
        return seconds;
    }

    InterpreterPause pause_;
    nb::object pager_;
    nb::object queue_;
    nb::list ports_;
    std::size_t known_ = 0;  // ports that the driver knows
    double timeout_;
    nb::object waited_;
    nb::object stream_;
    std::unique_ptr<PythonObserver> observer_;  // null without debug mode
    farpool::pager::Driver driver_;
    std::atomic<bool> attention_;
};
