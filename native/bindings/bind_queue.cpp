// The queue's Python face: it owns the references that entries hold, and ends live queues before the interpreter does.
#include <algorithm>
#include <cmath>
#include <memory>
#include <tuple>

#include "bindings/bound_queue.hpp"
#include "core/port.hpp"
#include "core/queue.hpp"

using farpool::Direction;
using farpool::Piece;
using farpool::Port;
using farpool::QueueCore;

namespace {

struct Completion {
    std::int64_t id;
    nb::object error;
    bool cancelled;
    double start;
    double end;
};

int traverse_completion(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (nb::inst_ready(self)) {
        Py_VISIT(nb::inst_ptr<Completion>(self)->error.ptr());
    }
    return 0;
}

int clear_completion(PyObject* self) {
    if (nb::inst_ready(self)) {
        nb::inst_ptr<Completion>(self)->error = nb::none();
    }
    return 0;
}

PyType_Slot completion_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_completion)},
                                  {Py_tp_clear, reinterpret_cast<void*>(clear_completion)},
                                  {0, nullptr}};

constexpr double exit_seconds = 5.0;
constexpr double signal_seconds = 0.1;  // longest time for which a wait leaves Ctrl-C unanswered

std::vector<BoundQueue*> live_queues;  // the interpreter lock guards it

void drop(std::vector<farpool::Result> results) {
    for (const farpool::Result& result : results) {
        Py_XDECREF(result.keepalive);
    }
}

class Queue : public BoundQueue {
public:
    Queue() : BoundQueue(std::make_shared<QueueCore>()) {}
    ~Queue() override { end(); }

    void submit(std::int64_t id, nb::handle port, int direction,
                const std::vector<std::tuple<std::uint64_t, std::uintptr_t, std::size_t>>& pieces,
                const std::vector<std::int64_t>& after, std::int64_t priority) {
        require_ours();
        if (direction != static_cast<int>(Direction::read) && direction != static_cast<int>(Direction::write)) {
            farpool::fail_value("Queue.submit: direction must be Queue.READ or Queue.WRITE, got " + std::to_string(direction));
        }
        Port* target = nullptr;
        if (!port.is_none() && !nb::try_cast<Port*>(port, target)) {
            throw nb::type_error("Queue.submit: port must be a Port or None");
        }
        std::vector<Piece> copied;
        copied.reserve(pieces.size());
        for (const auto& [offset, address, nbytes] : pieces) {
            copied.push_back({offset, address, nbytes});
        }
        farpool::Submission submission{.id = id,
                                       .port = target,
                                       .direction = static_cast<Direction>(direction),
                                       .pieces = copied,
                                       .after = after,
                                       .priority = priority,
                                       .keepalive = port.ptr()};
        transfers()->submit({&submission, 1});
        // The lock is held since the submission, so no thread can have released this reference before it is taken.
        port.inc_ref();
    }

    void reprioritize(std::int64_t id, std::int64_t priority) {
        require_ours();
        transfers()->reprioritize(id, priority);
    }

    nb::list poll() {
        require_ours();
        std::vector<farpool::Result> results = transfers()->poll();
        nb::list completions;
        for (farpool::Result& result : results) {
            nb::object error = result.error ? nb::steal(farpool::to_python(*result.error)) : nb::none();
            completions.append(Completion{result.id, std::move(error), result.cancelled, result.start, result.end});
        }
        drop(std::move(results));
        return completions;
    }

    bool wait(double timeout) {
        require_ours();
        if (std::isnan(timeout)) {
            farpool::fail_value("Queue.wait: timeout must be a number of seconds, got nan");
        }
        for (;;) {
            const double slice = std::min(timeout, signal_seconds);
            bool ready = false;
            {
                nb::gil_scoped_release release;
                ready = transfers()->wait(slice);
            }
            if (ready || timeout <= slice || closed()) {
                return ready;
            }
            if (PyErr_CheckSignals() != 0) {
                throw nb::python_error();
            }
            timeout -= slice;
        }
    }
};

void close_live_queues() {
    const std::vector<BoundQueue*> queues = live_queues;  // closing lets other threads run, which may end queues
    for (BoundQueue* queue : queues) {
        if (std::find(live_queues.begin(), live_queues.end(), queue) != live_queues.end()) {
            queue->close(exit_seconds);
        }
    }
}

}  // namespace

BoundQueue::BoundQueue(std::shared_ptr<farpool::TransferQueue> queue) : queue_(std::move(queue)) {
    live_queues.push_back(this);
}

bool BoundQueue::close(double seconds) {
    if (!queue_->ours()) {
        return true;
    }
    closed_ = true;
    nb::gil_scoped_release release;
    return queue_->close(std::isnan(seconds) ? 0.0 : seconds);
}

void BoundQueue::require_ours() const {
    if (!queue_->ours()) {
        farpool::fail_closed("this transfer queue belongs to the parent process: a forked child must make its own");
    }
}

void BoundQueue::end() {
    std::erase(live_queues, this);
    if (!queue_->ours()) {
        // The parent process's threads do not exist here, and its locks may never be released.
        new std::shared_ptr<farpool::TransferQueue>(std::move(queue_));
        return;
    }
    const bool ended = close(exit_seconds);
    drop(queue_->poll());
    if (!ended) {
        new std::shared_ptr<farpool::TransferQueue>(std::move(queue_));  // with the memory that a transfer still uses
    }
}

std::shared_ptr<farpool::TransferQueue> transfer_queue(nb::handle queue) {
    return nb::cast<const BoundQueue&>(queue).transfers();
}

void bind_queue(nb::module_& m) {
    nb::class_<BoundQueue>(m, "TransferQueue", "Runs the transfers of a pool, between tiers and host memory or a device.")
        .def_prop_ro("pending", &BoundQueue::pending, "Number of transfers whose end has not been reported.")
        .def_prop_ro(
            "trouble",
            [](const BoundQueue& self) {
                const std::optional<farpool::PortError> trouble = self.transfers()->trouble();
                return trouble ? nb::steal(farpool::to_python(*trouble)) : nb::none();
            },
            nb::sig("def trouble(self) -> Exception | None"),
            "The error that keeps the queue from finding out if transfers have ended; None if there is none.")
        .def("close", &BoundQueue::close, nb::arg("timeout"),
             R"(Let running transfers end, drop the rest, and join the threads. May be called again.

Returns False if a transfer still runs after ``timeout`` seconds. The memory that it uses must then be left alone.)");

    nb::class_<Completion>(
        m, "Completion", nb::type_slots(completion_slots),
        R"(One finished entry of the queue. `error` is None, or the exception. `start`/`end` are seconds on the monotonic clock
(CLOCK_MONOTONIC, the one of time.monotonic) of the copying itself.)")
        .def_ro("id", &Completion::id)
        .def_ro("error", &Completion::error, nb::sig("def error(self) -> BaseException | None"))
        .def_ro("cancelled", &Completion::cancelled)
        .def_ro("start", &Completion::start)
        .def_ro("end", &Completion::end);

    auto queue =
        nb::class_<Queue, BoundQueue>(m, "Queue", R"(Ordered queue of transfers, worked off by native threads.

Each (port, direction) is a lane with threads of its own, created when they are needed: one, or four for a file that is
only read, or read and written directly, so that several transfers are under way. Within a lane the ready entry with the
highest priority runs first, in order of submission among equals. An entry is ready when all entries in `after` have
completed; ids in `after` that are unknown or completed already count as completed. If one of them failed, the entry
completes as cancelled, and so on through its own dependents; an entry that failed or was cancelled counts as failed until
poll() has returned it, so that the caller cannot build on a failure that it has not seen yet.)")
            .def(nb::init<>())
            .def(
                "submit", &Queue::submit, nb::arg("id"), nb::arg("port").none(), nb::arg("direction"), nb::arg("pieces"),
                nb::arg("after") = nb::make_tuple(), nb::arg("priority") = 0,
                nb::sig(
                    "def submit(self, id: int, port: Port | None, direction: int, pieces: collections.abc.Sequence[tuple[int, "
                    "int, int]], after: collections.abc.Sequence[int] = (), priority: int = 0) -> None"),
                R"(Enqueue. `pieces` are ``(offset in the port, memory address, nbytes)``; no piece (or port None) is a barrier that
completes once `after` has. ValueError if `id` is pending; PoolClosedError after close or in a forked child.)")
            .def("reprioritize", &Queue::reprioritize, nb::arg("id"), nb::arg("priority"),
                 "Raise or lower an entry that has not started, and (when raising) all that it waits for.")
            .def("poll", &Queue::poll, nb::sig("def poll(self) -> list[Completion]"),
                 "Return the entries that finished since the last call, in the order they finished. Never blocks.")
            .def("wait", &Queue::wait, nb::arg("timeout"),
                 "Block (without the interpreter lock) until poll() has something to return or `timeout` seconds passed.");
    queue.attr("READ") = static_cast<int>(Direction::read);
    queue.attr("WRITE") = static_cast<int>(Direction::write);

    nb::module_::import_("atexit").attr("register")(nb::cpp_function(close_live_queues));
}
