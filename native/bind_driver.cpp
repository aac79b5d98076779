// The driver's Python face: accesses asked for, waited for and released in one call each.
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "bound_pager.hpp"
#include "clock.hpp"
#include "pager/driver.hpp"
#include "pager/uses.hpp"

using farpool::pager::Driver;
using farpool::pager::Ended;
using farpool::pager::Kind;
using farpool::pager::Layout;
using farpool::pager::Mode;
using farpool::pager::Runs;
using farpool::pager::Use;
using farpool::pager::Wait;

namespace {

// A use, and the storage as Python knows it.
struct BoundUse {
    nb::object storage;
    Use use;

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

PyType_Slot use_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(BoundUse::traverse)},
                           {Py_tp_clear, reinterpret_cast<void*>(BoundUse::clear)},
                           {0, nullptr}};

// Operands in the arena, pinned until they are released; and what its owner notes of them.
struct Grant {
    std::shared_ptr<farpool::pager::Access> access;  // null where all uses are empty
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

PyType_Slot grant_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(Grant::traverse)},
                             {Py_tp_clear, reinterpret_cast<void*>(Grant::clear)},
                             {0, nullptr}};

// Lets go of the interpreter's lock while a thread blocks, and looks for signals.
class InterpreterPause : public farpool::pager::Pause {
public:
    void run(const std::function<void()>& block) override {
        const nb::gil_scoped_release release;
        block();
    }
    bool interrupted() override { return PyErr_CheckSignals() != 0; }
};

// Under the interpreter's lock, as all that starts transfers or notes their ends.
void keep(PyObject* owner, bool hold) {
    if (hold) {
        Py_INCREF(owner);
    } else {
        Py_DECREF(owner);
    }
}

std::vector<Use> to_uses(nb::handle uses) {
    std::vector<Use> converted;
    for (const nb::handle item : nb::iter(uses)) {
        converted.push_back(nb::cast<const BoundUse&>(item).use);
    }
    return converted;
}

class BoundDriver {
public:
    BoundDriver(nb::handle_t<BoundPager> pager, nb::object queue, std::uintptr_t arena, nb::list ports, nb::object waited)
        : pager_(nb::borrow(pager)),
          queue_(std::move(queue)),
          ports_(std::move(ports)),
          waited_(std::move(waited)),
          driver_(nb::inst_ptr<BoundPager>(pager)->shared(), queue_core(queue_), arena, keep) {}

    Driver& operator*() { return driver_; }
    Driver* operator->() { return &driver_; }

    // The pool appends to the list when it gets another source.
    Driver& with_ports() {
        while (known_ < nb::len(ports_)) {
            const nb::object port = ports_[known_++];
            driver_.add_port(nb::cast<farpool::Port*>(port), port.ptr());
        }
        return driver_;
    }

    void enter() { driver_.lock(pause_).release(); }

    // Waits, with the lock given up, until something has changed or so many seconds have passed.
    void wait(double seconds) {
        with_ports().wait(seconds, pause_);
        if (pause_.interrupted()) {
            throw nb::python_error();
        }
    }

    // None where the caller has to look after something first, and where the driver is closed.
    nb::object acquire(nb::handle uses, nb::handle op, bool rows, double timeout, bool careful) {
        const std::vector<Use> wanted = to_uses(uses);
        if (!careful && (attention_.load() || std::ranges::any_of(wanted, [](const Use& use) { return use.storage->loose; }))) {
            return nb::none();
        }
        Runs runs = farpool::pager::runs_of(wanted, rows);
        std::shared_ptr<farpool::pager::Access> access;
        double waited = 0.0;
        if (!runs.runs.empty()) {
            auto held = driver_.lock(pause_);
            if (driver_.closed()) {  // since the caller looked
                return nb::none();
            }
            access = refusing([&] { return with_ports().request(std::move(runs.runs)); });
            if (!access->granted) {
                waited = await(held, access, op, timeout);
            }
        }
        PyObject* offsets = PyTuple_New(static_cast<Py_ssize_t>(runs.places.size()));
        for (std::size_t index = 0; index < runs.places.size(); ++index) {
            const auto [run, inside] = runs.places[index];
            const std::int64_t offset = run < 0 ? 0 : access->places[static_cast<std::size_t>(run)] + inside;
            PyTuple_SET_ITEM(offsets, static_cast<Py_ssize_t>(index), PyLong_FromLongLong(offset));
        }
        return nb::cast(Grant{std::move(access), nb::steal<nb::tuple>(offsets), waited});
    }

    void release(Grant& grant) {
        if (grant.access != nullptr) {
            const auto held = driver_.lock(pause_);
            driver_.release(*grant.access);
        }
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
        }
        return 0;
    }

private:
    double await(std::unique_lock<std::mutex>& held, const std::shared_ptr<farpool::pager::Access>& access, nb::handle op,
               double timeout) {
        const double start = farpool::monotonic_seconds();
        const auto [block, tier] = driver_.awaited(*access);
        Wait outcome;
        try {
            outcome = driver_.await(held, *access, start + timeout, pause_);
        } catch (...) {  // of a tier's bookkeeping: nobody is left to wait
            driver_.abandon(access);
            throw;
        }
        if (outcome == Wait::refused) {
            raise_refusal(access->refusal);
        }
        if (outcome != Wait::granted) {
            driver_.abandon(access);
            held.unlock();
            if (outcome == Wait::interrupted) {
                throw nb::python_error();
            }
            waited_(op, start, -1.0, block, tier);  // raises what this means
            throw std::logic_error("Driver: an access was given up without an error");
        }
        const double seconds = farpool::monotonic_seconds() - start;
        held.unlock();
        try {
            waited_(op, start, seconds, block, tier);
        } catch (...) {
            held = driver_.lock(pause_);
            driver_.release(*access);
            throw;
        }
        held = driver_.lock(pause_);
        return seconds;
    }

    InterpreterPause pause_;
    nb::object pager_;
    nb::object queue_;
    nb::list ports_;
    std::size_t known_ = 0;  // ports that the driver knows
    nb::object waited_;
    Driver driver_;
    std::atomic<bool> attention_ = false;
};

PyType_Slot driver_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(BoundDriver::traverse)}, {0, nullptr}};

}  // namespace

void bind_driver(nb::module_& m) {
    nb::class_<Layout>(m, "Layout", "Where a storage lies in its blocks.")
        .def(
            "__init__",
            [](Layout* self, farpool::pager::BlockId first, std::int32_t count, std::int64_t offset, std::int64_t block_bytes,
               std::int64_t nbytes, bool shared) { new (self) Layout{first, count, offset, block_bytes, nbytes, shared}; },
            nb::arg("first"), nb::arg("count"), nb::arg("offset"), nb::arg("block_bytes"), nb::arg("nbytes"), nb::arg("shared"))
        .def_ro("first", &Layout::first)
        .def_ro("count", &Layout::count)
        .def_ro("offset", &Layout::offset)
        .def_ro("block_bytes", &Layout::block_bytes)
        .def_ro("nbytes", &Layout::nbytes)
        .def_ro("shared", &Layout::shared)
        .def_rw("loose", &Layout::loose)
        .def("swap", [](Layout& self, Layout& other) { std::swap(self, other); }, nb::arg("other"));

    nb::class_<BoundUse>(m, "Use", "Bytes of a storage, and what is done with them.", nb::type_slots(use_slots))
        .def(
            "__init__",
            [](BoundUse* self, nb::object storage, std::int64_t start, std::int64_t stop, Mode mode) {
                auto layout = nb::cast<std::shared_ptr<const Layout>>(storage.attr("layout"));
                new (self) BoundUse{std::move(storage), {std::move(layout), start, stop, mode}};
            },
            nb::arg("storage"), nb::arg("start"), nb::arg("stop"), nb::arg("mode"))
        .def_ro("storage", &BoundUse::storage)
        .def_prop_ro("start", [](const BoundUse& self) { return self.use.start; })
        .def_prop_ro("stop", [](const BoundUse& self) { return self.use.stop; })
        .def_prop_ro("mode", [](const BoundUse& self) { return self.use.mode; });

    m.def(
        "runs_of",
        [](nb::handle uses, bool rows) {
            const Runs joined = farpool::pager::runs_of(to_uses(uses), rows);
            nb::list runs;
            for (const farpool::pager::Run& run : joined.runs) {
                runs.append(run);
            }
            nb::list places;
            for (const auto& [run, offset] : joined.places) {
                places.append(nb::make_tuple(run, offset));
            }
            return nb::make_tuple(runs, places);
        },
        nb::arg("uses"), nb::kw_only(), nb::arg("rows") = false);

    nb::class_<Grant>(m, "Grant", "Operands in the arena, pinned until they are released.", nb::type_slots(grant_slots))
        .def(
            "__init__",
            [](Grant* self, nb::tuple offsets, std::shared_ptr<farpool::pager::Access> access, double waited) {
                new (self) Grant{std::move(access), std::move(offsets), waited};
            },
            nb::arg("offsets"), nb::arg("access").none(), nb::arg("waited") = 0.0)
        .def_rw("note", &Grant::note)
        .def_ro("offsets", &Grant::offsets)
        .def_ro("waited", &Grant::waited)
        .def_prop_ro("access", [](const Grant& self) { return self.access; });

    nb::class_<BoundDriver>(m, "Driver", "A pager, the queue that runs its transfers, and one lock around them.",
                            nb::type_slots(driver_slots))
        .def(nb::init<nb::handle_t<BoundPager>, nb::object, std::uintptr_t, nb::list, nb::object>(), nb::arg("pager"), nb::arg("queue"),
             nb::arg("address"), nb::arg("ports"), nb::arg("waited"))
        .def("__enter__", &BoundDriver::enter)
        .def("__exit__", [](BoundDriver& self, nb::args) { self->unlock(); })
        .def("wait", &BoundDriver::wait, nb::arg("timeout"))
        .def("notify_all", [](BoundDriver& self) { self->nudge(); })
        .def("acquire", &BoundDriver::acquire, nb::arg("uses"), nb::arg("op"), nb::arg("rows"), nb::arg("timeout"),
             nb::arg("careful"))
        .def("release", &BoundDriver::release, nb::arg("grant"))
        .def("start", [](BoundDriver& self) { self.with_ports().start(); })
        .def("note_ends", [](BoundDriver& self) { return self.with_ports().note_ends(); })
        .def("close",
             [](BoundDriver& self) {
                 self.attention() = true;
                 self->close();
             })
        .def_prop_rw(
            "attention", [](BoundDriver& self) { return self.attention().load(); },
            [](BoundDriver& self, bool wanted) { self.attention() = wanted; })
        .def_prop_ro("granted", [](BoundDriver& self) { return self->granted(); })
        .def_prop_ro("peak", [](BoundDriver& self) { return self->peak(); })
        .def("listen", [](BoundDriver& self, bool wanted) { self->listen(wanted); }, nb::arg("wanted"))
        .def("take_ended",
             [](BoundDriver& self) {
                 nb::list ended;
                 for (const Ended& end : self->take_ended()) {
                     ended.append(nb::make_tuple(to_python(*end.transfer), end.start, end.end, end.used));
                 }
                 return ended;
             })
        .def("forget_parent",
             [](BoundDriver& self) {
                 self.attention() = true;
                 self->forget_parent();
             })
        .def("links", [](BoundDriver& self) {
            nb::list links;
            for (const auto& [link, total] : self->links()) {
                links.append(nb::make_tuple(link.first, link.second, total.transfers, total.nbytes, total.seconds));
            }
            return links;
        });
}
