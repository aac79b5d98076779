// The driver's Python face.
#include "bindings/bound_driver.hpp"

using farpool::pager::Ended;
using farpool::pager::Kind;
using farpool::pager::Layout;
using farpool::pager::Mode;
using farpool::pager::Runs;
using farpool::pager::Use;

namespace {

PyType_Slot use_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(BoundUse::traverse)},
                           {Py_tp_clear, reinterpret_cast<void*>(BoundUse::clear)},
                           {0, nullptr}};

PyType_Slot grant_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(Grant::traverse)},
                             {Py_tp_clear, reinterpret_cast<void*>(Grant::clear)},
                             {0, nullptr}};

std::vector<Use> to_uses(nb::handle uses) {
    std::vector<Use> converted;
    for (const nb::handle item : nb::iter(uses)) {
        converted.push_back(nb::cast<const BoundUse&>(item).use);
    }
    return converted;
}

nb::object acquire(BoundDriver& driver, nb::handle uses, nb::handle op, bool rows, bool careful) {
    const std::vector<Use> wanted = to_uses(uses);
    std::optional<Granted> granted = driver.acquire(wanted, op, rows, careful, uses);
    if (!granted) {
        return nb::none();
    }
    PyObject* offsets = PyTuple_New(static_cast<Py_ssize_t>(wanted.size()));
    for (std::size_t index = 0; index < wanted.size(); ++index) {
        PyTuple_SET_ITEM(offsets, static_cast<Py_ssize_t>(index), PyLong_FromLongLong(granted->offset(index)));
    }
    return nb::cast(Grant{std::move(granted->access), nb::steal<nb::tuple>(offsets), granted->waited});
}

PyType_Slot driver_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(BoundDriver::traverse)}, {0, nullptr}};

}  // namespace

void bind_driver(nb::module_& m) {
    nb::class_<Layout>(m, "Layout", "Position of a storage in its blocks.")
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
        .def(
            "swap", [](Layout& self, Layout& other) { std::swap(self, other); }, nb::arg("other"),
            "Exchange two storages' places.");

    nb::class_<BoundUse>(
        m, "Use", "Bytes ``[start, stop)`` of a storage, and the mode of access to them. Immutable, so it may be used again.",
        nb::type_slots(use_slots))
        .def(
            "__init__",
            [](BoundUse* self, nb::object storage, std::int64_t start, std::int64_t stop, Mode mode) {
                auto layout = nb::cast<std::shared_ptr<const Layout>>(storage.attr("layout"));
                new (self) BoundUse{std::move(storage), {std::move(layout), start, stop, mode}};
            },
            nb::arg("storage"), nb::arg("start"), nb::arg("stop"), nb::arg("mode"),
            nb::sig("def __init__(self, storage: typing.Any, start: int, stop: int, mode: Mode) -> None"))
        .def_ro("storage", &BoundUse::storage, nb::sig("def storage(self) -> typing.Any"))
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
        nb::arg("uses"), nb::kw_only(), nb::arg("rows") = false,
        nb::sig("def runs_of(uses: collections.abc.Iterable[Use], *, rows: bool = False) -> tuple[list[Run], list[tuple[int, "
                "int]]]"),
        R"(Runs of blocks that cover the uses, and for each use its run and its offset in that run, in bytes.

Uses that share blocks share a run, so that aliases stay aliases. An empty use has run -1.

Parameters
----------
rows : bool
    The uses are rows picked by data.)");

    nb::class_<Grant>(m, "Grant", "Operands in the arena, pinned until they are released.", nb::type_slots(grant_slots))
        .def(
            "__init__",
            [](Grant* self, nb::tuple offsets, std::shared_ptr<farpool::pager::Access> access, double waited) {
                new (self) Grant{std::move(access), std::move(offsets), waited};
            },
            nb::arg("offsets"), nb::arg("access").none(), nb::arg("waited") = 0.0,
            nb::sig("def __init__(self, offsets: tuple[int, ...], access: PagerAccess | None, waited: float = 0.0) -> None"))
        .def_rw("note", &Grant::note, "Free for a note of the grant's owner; None at first.")
        .def_ro("offsets", &Grant::offsets, nb::sig("def offsets(self) -> tuple[int, ...]"),
                "Offset of each use's first byte, in bytes from the arena's start.")
        .def_ro("waited", &Grant::waited, "Seconds that the call waited for the operands; 0 if they were resident.")
        .def_prop_ro(
            "access", [](const Grant& self) { return self.access; }, nb::sig("def access(self) -> PagerAccess | None"),
            "The pager's access behind the grant; None if all uses are empty.");

    nb::class_<BoundDriver>(m, "Driver",
                            R"(A pager, the queue that runs its transfers, and the pool's lock around them.

A pool asks its driver for the operands of an operation. The driver returns their places in the arena, after waiting for the
transfers that bring them in. ``with driver:`` holds the lock. Callers of all methods except `acquire` and `release` hold it.

Parameters
----------
queue : TransferQueue
    Runs the transfers, between host memory or a device and the tiers.
address : int
    Where the arena begins in memory.
ports : list of Port
    The tiers' native ends, indexed as the pager indexes tiers; may grow.
timeout : float
    Seconds that an access waits for its operands.
waited : callable
    Called without the lock after each wait with ``(op, start, seconds, block, tier)``: operation `op` waited `seconds` from
    time `start` on for the transfer of `block` from or to `tier`. If the wait was given up, `seconds` is negative, and the
    call raises the error. `block` and `tier` are -1 if `op` waited because other threads held its operands.
watch : Watch, optional
    Debug mode's observer (`farpool.memory.debug.Watch`). Called under the lock: ``starting(commands)`` before commands are
    started, ``moved(move)`` after each move among them, ``ended(transfer, failed)`` before the pager learns of the end of a
    transfer, ``granted(access, uses, op)`` when operands are pinned, ``released(access)`` before the pager learns of a release,
    and ``raise_findings()`` when the release is complete. If ``starting`` raises, none of the commands is started; if
    ``granted`` raises, the access is given up.
stream : callable, optional
    Returns the device's stream on which the calling thread queues work now. None if operations compute on the host.)",
                            nb::type_slots(driver_slots))
        .def(nb::init<nb::handle_t<BoundPager>, nb::object, std::uintptr_t, nb::list, double, nb::object, nb::object,
                      nb::object>(),
             nb::arg("pager"), nb::arg("queue"), nb::arg("address"), nb::arg("ports"), nb::arg("timeout"), nb::arg("waited"),
             nb::arg("watch") = nb::none(), nb::arg("stream") = nb::none(),
             nb::sig("def __init__(self, pager: Pager, queue: TransferQueue, address: int, ports: list[Port], timeout: float, "
                     "waited: "
                     "collections.abc.Callable[[str, float, float, int, int], None], watch: typing.Any = None, stream: "
                     "collections.abc.Callable[[], int] | None = None) -> None"))
        .def("__enter__", &BoundDriver::enter)
        .def(
            "__exit__", [](BoundDriver& self, nb::args) { self->unlock(); },
            nb::sig("def __exit__(self, *error: object) -> None"))
        .def("wait", &BoundDriver::wait, nb::arg("timeout"),
             "Release the lock, wait at most `timeout` seconds until another thread changes something, and lock again.")
        .def(
            "notify_all", [](BoundDriver& self) { self->nudge(); },
            "Wake the waiting threads, so that they check again if they can continue.")
        .def("acquire", acquire, nb::arg("uses"), nb::arg("op"), nb::arg("rows"), nb::arg("careful"),
             nb::sig(
                 "def acquire(self, uses: collections.abc.Sequence[Use], op: str, rows: bool, careful: bool) -> Grant | None"),
             R"(Bring operands into the arena and pin them. Called without the lock.

Parameters
----------
rows : bool
    The uses are rows picked by data.
careful : bool
    True if the caller has done the work that `attention` asks for, and has packed the storages. If this is False and any of
    this is still to be done, the call does nothing and returns None. It also does so if the driver is closed.

Raises
------
TooLargeError
    The operands do not fit into the arena together.
NoRoomError, TransferFailedError
    The operands cannot be brought in.)")
        .def(
            "release",
            [](BoundDriver& self, Grant& grant) {
                if (grant.access != nullptr) {
                    self.release(*grant.access);
                }
            },
            nb::arg("grant"), "Unpin the operands of an operation; called without the lock.")
        .def(
            "start", [](BoundDriver& self) { self.with_ports().start(); },
            "Start the moves and transfers that the pager has queued.")
        .def(
            "move",
            [](BoundDriver& self, std::int64_t source, std::int64_t target, std::int64_t nbytes) {
                self->move(source, target, nbytes);
            },
            nb::arg("source"), nb::arg("target"), nb::arg("nbytes"),
            "Copy bytes inside the arena, between ranges that an access holds; on a device, after all accesses so far.")
        .def(
            "note_ends", [](BoundDriver& self) { return self.with_ports().note_ends(); },
            "Report ended transfers to the pager; return False if no transfer has ended.")
        .def(
            "close",
            [](BoundDriver& self) {
                self.attention() = true;
                self->close();
            },
            "Close the driver: it grants no more accesses, and waiting threads give up.")
        .def_prop_rw(
            "attention", [](BoundDriver& self) { return self.attention().load(); },
            [](BoundDriver& self, bool wanted) { self.attention() = wanted; },
            R"(If True, a call of `acquire` without `careful` returns None. Its caller then frees dropped storages, prepares to
record or check the access if that is wanted, and calls `acquire` with `careful`.)")
        .def_prop_ro(
            "granted", [](BoundDriver& self) { return self->granted(); }, "Number of accesses that have not been released.")
        .def_prop_ro(
            "peak", [](BoundDriver& self) { return self->peak(); },
            "The most bytes of the arena that were ever in use at the same time.")
        .def(
            "listen", [](BoundDriver& self, bool wanted) { self->listen(wanted); }, nb::arg("wanted"),
            "Start or stop collecting what `take_ended` and `take_ran` return.")
        .def(
            "take_ended",
            [](BoundDriver& self) {
                nb::list ended;
                for (const Ended& end : self->take_ended()) {
                    ended.append(nb::make_tuple(to_python(*end.transfer), end.start, end.end, end.used));
                }
                return ended;
            },
            nb::sig("def take_ended(self) -> list[tuple[typing.Any, float, float, int]]"),
            R"(Return the transfers that have succeeded since the last call: each transfer, the times of its start and end, and
the bytes of the arena in use at its end.)")
        .def(
            "take_ran",
            [](BoundDriver& self) {
                nb::list ran;
                for (const farpool::Ran& one : self->take_ran()) {
                    ran.append(nb::make_tuple(one.ordinal, one.start, one.end));
                }
                return ran;
            },
            nb::sig("def take_ran(self) -> list[tuple[int, float, float]]"),
            "Return when a device computed, as far as it has told since the last call: an access's ordinal, start and end.")
        .def(
            "device_times",
            [](BoundDriver& self) {
                const farpool::pager::DeviceTimes& times = self->device_times();
                return nb::make_tuple(times.seconds(), times.computing(), times.waiting(), times.fetching(), times.writing());
            },
            nb::sig("def device_times(self) -> tuple[float, float, float, float, float]"),
            R"(Return what a device did, in seconds: the whole time from its first work to its last, and of that the time in which
it computed, in which it did not because an operation waited for bytes, in which bytes were fetched, and in which bytes were
written back. All 0 if operations compute on the host.)")
        .def(
            "forget_parent",
            [](BoundDriver& self) {
                self.attention() = true;
                self->forget_parent();
            },
            "Close the driver in the child of a fork, and replace the lock, which a thread of the parent may hold.")
        .def(
            "links",
            [](BoundDriver& self) {
                nb::list links;
                for (const auto& [link, total] : self->links()) {
                    links.append(nb::make_tuple(link.first, link.second, total.transfers, total.nbytes, total.seconds));
                }
                return links;
            },
            nb::sig("def links(self) -> list[tuple[int, Kind, int, int, float]]"),
            "Return, for each tier and direction, the tuple (tier, direction, number of transfers, bytes, seconds).");
}
