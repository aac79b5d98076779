// The pager's Python face. Messages are Python objects of farpool.memory.pager.messages, so that Python code (debug mode, an
// executor on a virtual clock) takes them as they are.
#include <memory>
#include <string>
#include <variant>

#include "bindings/bound_pager.hpp"
#include "pager/simulated_program.hpp"

using namespace farpool::pager;
using farpool::fail_value;

namespace {

// Python classes that are imported once and live as long as the interpreter.
struct Names {
    nb::object transfer, move, piece, too_large, no_room, transfer_failed;

    static const Names& get() {
        // No initialiser of a static: an import may release the interpreter lock, and a thread that then waited for the
        // initialiser while it holds the lock would never wake up. Two threads may both import; one of them wins.
        static const Names* names = nullptr;
        if (names == nullptr) {
            auto made = std::make_unique<Names>();
            const nb::module_ messages = nb::module_::import_("farpool.memory.pager.messages");
            made->transfer = messages.attr("Transfer");
            made->move = messages.attr("Move");
            made->piece = messages.attr("Piece");
            made->too_large = messages.attr("TooLargeError");
            made->no_room = messages.attr("NoRoomError");
            made->transfer_failed = messages.attr("TransferFailedError");
            if (names == nullptr) {
                names = made.release();
            }
        }
        return *names;
    }
};

Failure failure_of(nb::handle error) {
    std::shared_ptr<PyObject> exception(error.inc_ref().ptr(), [](PyObject* object) {
        if (Py_IsInitialized()) {
            const nb::gil_scoped_acquire lock;
            Py_DECREF(object);
        }
    });
    return std::make_shared<const TransferFailure>(
        TransferFailure{{farpool::ErrorKind::python, "a transfer failed", {}, 0, std::move(exception)}, -1, -1});
}

nb::tuple to_python(const Piece& piece) {
    return nb::borrow<nb::tuple>(Names::get().piece(piece.tier, piece.offset, piece.place, piece.nbytes));
}

template <typename Item, typename Convert>
nb::tuple to_tuple(const std::vector<Item>& items, Convert convert) {
    nb::list list;
    for (const Item& item : items) {
        list.append(convert(item));
    }
    return nb::tuple(list);
}

const Run& to_run(nb::handle object) {
    const Run* run = nullptr;
    if (!nb::try_cast<const Run*>(object, run) || run == nullptr) {
        throw nb::type_error("Pager: an access consists of Runs");
    }
    return *run;
}

std::vector<Run> to_runs(nb::handle runs) {
    std::vector<Run> converted;
    for (const nb::handle run : nb::iter(runs)) {
        converted.push_back(to_run(run));
    }
    return converted;
}

std::string to_string(const Run& run) {
    static constexpr const char* modes[] = {"READ", "WRITE", "OVERWRITE"};
    return "Run(first=" + std::to_string(run.first) + ", count=" + std::to_string(run.count) +
           ", mode=" + modes[static_cast<int>(run.mode)] + ", table=" + std::to_string(run.table) + ")";
}

PyType_Slot pager_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(BoundPager::traverse)}, {0, nullptr}};

// Shows the garbage collector the error of a refused access, whose traceback has frames that refer to the access. If several
// accesses share the one reference, none of them may show it.
int traverse_access(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (nb::inst_ready(self)) {
        const auto* failure = std::get_if<Failure>(&nb::inst_ptr<Access>(self)->refusal);
        if (failure != nullptr && failure->use_count() == 1 && (*failure)->error.exception.use_count() == 1) {
            Py_VISIT((*failure)->error.exception.get());
        }
    }
    return 0;
}

int clear_access(PyObject* self) {
    if (nb::inst_ready(self)) {
        nb::inst_ptr<Access>(self)->refusal = std::monostate{};
    }
    return 0;
}

PyType_Slot access_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_access)},
                              {Py_tp_clear, reinterpret_cast<void*>(clear_access)},
                              {0, nullptr}};

}  // namespace

nb::object to_python(const Transfer& transfer) {
    const Names& names = Names::get();
    return names.transfer(transfer.id, transfer.kind, transfer.block,
                          to_tuple(transfer.pieces, [](const Piece& piece) { return to_python(piece); }),
                          to_tuple(transfer.after, [](TransferId id) { return nb::int_(id); }), transfer.demand,
                          transfer.last_use);
}

nb::object to_python(const Command& command) {
    if (const auto* move = std::get_if<Move>(&command)) {
        return Names::get().move(move->source, move->target, move->nbytes, move->last_use);
    }
    return to_python(*std::get<std::shared_ptr<const Transfer>>(command));
}

nb::object to_python(const Refusal& refusal) {
    const Names& names = Names::get();
    if (const auto* too_large = std::get_if<TooLarge>(&refusal)) {
        return names.too_large(too_large->needed);
    }
    if (const auto* no_room = std::get_if<NoRoom>(&refusal)) {
        return names.no_room(no_room->block, no_room->nbytes);
    }
    if (const auto* failure = std::get_if<Failure>(&refusal)) {
        nb::object error = nb::steal(farpool::to_python((*failure)->error));
        return (*failure)->tier < 0 ? error : names.transfer_failed(error, (*failure)->tier, (*failure)->block);
    }
    return nb::none();
}

void raise_refusal(const Refusal& refusal) {
    const nb::object error = to_python(refusal);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    throw nb::python_error();
}

void bind_pager(nb::module_& m) {
    nb::enum_<Mode>(m, "Mode", nb::is_arithmetic(), "Access mode: read, change or overwrite the bytes.")
        .value("READ", Mode::read)
        .value("WRITE", Mode::write, "Reads and changes them, or changes only some.")
        .value("OVERWRITE", Mode::overwrite,
               "Writes each byte without looking at the old ones, which therefore need not be fetched.");
    nb::enum_<Kind>(m, "Kind", nb::is_arithmetic(), "Direction of a transfer.")
        .value("FETCH", Kind::fetch)
        .value("WRITE_BACK", Kind::write_back);
    nb::enum_<State>(m, "State", nb::is_arithmetic(), "State of a block: absent, in the arena, or on its way.")
        .value("FREE", State::free, "The number is not in use.")
        .value("ABSENT", State::absent)
        .value("FETCHING", State::fetching)
        .value("RESIDENT", State::resident)
        .value("WRITING_BACK", State::writing_back,
               "Leaving: its arena range may already be promised to another block, which waits for the write.");

    nb::class_<Run>(m, "Run", "Consecutive blocks of one storage, wanted contiguous in the arena.")
        .def(
            "__init__",
            [](Run* self, BlockId first, std::int32_t count, Mode mode, BlockId table) {
                new (self) Run{first, count, mode, table};
            },
            nb::arg("first"), nb::arg("count"), nb::arg("mode"), nb::arg("table") = -1)
        .def_ro("first", &Run::first)
        .def_ro("count", &Run::count)
        .def_ro("mode", &Run::mode)
        .def_ro("table", &Run::table, R"(First block of the table, for a run of rows that are picked by data; -1 for any other.

Such an access says nothing about the rows of the next pass, so the tape only notes the table.)")
        .def("__eq__", [](const Run& self,
                          nb::handle other) { return nb::isinstance<Run>(other) && self == nb::cast<const Run&>(other); })
        .def("__hash__",
             [](const Run& self) {
                 return nb::hash(nb::make_tuple(self.first, self.count, static_cast<int>(self.mode), self.table));
             })
        .def("__repr__", [](const Run& self) { return to_string(self); });

    nb::class_<Counters>(m, "PagerCounters", "Counters of a pager's work so far.")
        .def_ro("accesses", &Counters::accesses, "Runs accessed.")
        .def_ro("hits", &Counters::hits, "Runs found whole and in place.")
        .def_ro("row_accesses", &Counters::row_accesses, "Accesses to blocks of tables whose rows are picked by data.")
        .def_ro("row_hits", &Counters::row_hits, "Accesses among `row_accesses` that found their block in place.")
        .def_ro("late", &Counters::late, "Runs whose transfer was under way when they were accessed.")
        .def_ro("demand_fetches", &Counters::demand_fetches)
        .def_ro("prefetches", &Counters::prefetches)
        .def_ro("prefetches_used", &Counters::prefetches_used)
        .def_ro("prefetches_wasted", &Counters::prefetches_wasted,
                "Blocks prefetched that left, or were overwritten, before they were accessed.")
        .def_ro("evictions", &Counters::evictions)
        .def_ro("write_backs", &Counters::write_backs)
        .def_ro("moves", &Counters::moves)
        .def_ro("moved_bytes", &Counters::moved_bytes);

    nb::class_<Block>(m, "Block", "A copy of one row of a pager's table of blocks.")
        .def_ro("size", &Block::size)
        .def_ro("place", &Block::place, "Offset in the arena; -1 unless fetching, resident or writing back.")
        .def_ro("copy", &Block::copy, "Offset of the copy in its tier, valid while the block is not dirty.")
        .def_ro("next_use", &Block::next_use, "Key for eviction: the block with the highest key is evicted first.")
        .def_ro("last_use", &Block::last_use, "Position on the tape of the latest access.")
        .def_prop_ro("pins", [](const Block& self) { return self.pins; })
        .def_ro("name", &Block::name, "Name of the block on the tape: its ordinal of birth among the blocks that live.")
        .def_ro("tier", &Block::tier, "Tier of the copy below; -1 without one.")
        .def_prop_ro("state", [](const Block& self) { return self.state; })
        .def_prop_ro("dirty", [](const Block& self) { return self.dirty; })
        .def_prop_ro(
            "prefetched", [](const Block& self) { return self.prefetched; },
            "True if it was fetched ahead and has not been accessed since.");

    nb::class_<Access>(m, "PagerAccess", "One operation's request for its operands, and the pager's answer.",
                       nb::is_weak_referenceable(), nb::type_slots(access_slots))
        .def_ro("granted", &Access::granted)
        .def_ro("ordinal", &Access::ordinal, "Place of the access in the order of requests; rows of one table may share it.")
        .def_ro("last_use", &Access::last_use,
                "Ordinal of the last access that may have used the ranges that were claimed for this one; -1 for none.")
        .def_prop_ro(
            "places", [](const Access& self) { return to_tuple(self.places, [](std::int64_t p) { return nb::int_(p); }); },
            nb::sig("def places(self) -> tuple[int, ...]"), "Arena offset of each run; valid while granted.")
        .def_prop_ro(
            "runs", [](const Access& self) { return to_tuple(self.runs, [](const Run& run) { return nb::cast(run); }); },
            nb::sig("def runs(self) -> tuple[Run, ...]"))
        .def_prop_ro(
            "error", [](const Access& self) { return to_python(self.refusal); },
            nb::sig("def error(self) -> BaseException | None"),
            "Error for which it will not be granted, with nothing pinned; None without one.")
        .def(
            "waits_for", [](const Access& self, BlockId block) { return contains(self.blocks, block); }, nb::arg("block"),
            "Return True if it waits for the block, or waited for it before it was granted.");

    nb::class_<BoundPager>(m, "Pager",
                           R"(Decides which block is where, and when it moves. Deterministic: no clock, no file, no thread.

The caller passes what `take_commands` returns to a queue, in order, and reports each transfer's end with
`completed` or `failed`, then calls `proceed`. It holds one lock around the pager.

Parameters
----------
capacity : int
    Bytes of the arena.
spaces : sequence of Space or None
    The lower tiers from fast to slow; None stands for a read-only source, which blocks only come from.
classes : tuple of str
    Names that a block's class may have.
alignment : int
    Of blocks in the arena, in bytes; each block of a storage but the last must be a multiple of it.
history : int
    Accesses that the tape remembers; a loop longer than this is not predicted.
prefetch : bool
    True to fetch along the tape ahead of the accesses.
late : bool
    True if the program computes on a device, whose times are reported later, by `ran`.)",
                           nb::type_slots(pager_slots))
        .def(nb::init<std::int64_t, nb::handle, nb::tuple, std::int64_t, std::int64_t, bool, bool>(), nb::arg("capacity"),
             nb::arg("spaces"), nb::arg("classes") = nb::make_tuple("bytes"), nb::kw_only(), nb::arg("alignment") = 64,
             nb::arg("history") = std::int64_t{1} << 18, nb::arg("prefetch") = true, nb::arg("late") = false,
             nb::sig("def __init__(self, capacity: int, spaces: collections.abc.Sequence[typing.Any], classes: tuple[str, ...] "
                     "= ('bytes',), *, alignment: int = 64, history: int = 262144, prefetch: bool = True, late: bool = False) "
                     "-> None"))
        .def(
            "add_source", [](BoundPager& self) { return self->add_source(); },
            "Make known another read-only source; returns its index among the tiers.")
        .def(
            "create",
            [](BoundPager& self, const std::vector<std::int64_t>& sizes, nb::handle cls) {
                return self->create(sizes, self.class_number(cls));
            },
            nb::arg("sizes"), nb::arg("cls") = "bytes",
            nb::sig("def create(self, sizes: collections.abc.Sequence[int], cls: str = 'bytes') -> int"),
            "Make consecutive blocks of these sizes in bytes. They have no content until they are written.")
        .def(
            "adopt",
            [](BoundPager& self, BlockId block, std::int32_t tier, std::int64_t offset, std::int64_t place,
               std::int64_t nbytes) { self->adopt(block, {tier, offset, place, nbytes}); },
            nb::arg("block"), nb::arg("source"), nb::arg("offset"), nb::arg("place"), nb::arg("nbytes"),
            "Note that a source has a part of this absent block's clean copy; `place` is relative to the block.")
        .def(
            "note_copy",
            [](BoundPager& self, BlockId block, std::int32_t tier, std::int64_t offset) {
                self->note_copy(block, tier, offset);
            },
            nb::arg("block"), nb::arg("tier"), nb::arg("offset"),
            "Note that a tier has the bytes of this absent block, which has no content yet, at an offset that was reserved "
            "there.")
        .def(
            "can_adopt", [](BoundPager& self, BlockId block) { return self->can_adopt(block); }, nb::arg("block"),
            "Return True if the block is absent and its content, if any, is a source's.")
        .def(
            "retire", [](BoundPager& self, BlockId first, std::int32_t count) { self->retire(first, count); }, nb::arg("first"),
            nb::arg("count"),
            "Note that the program has dropped the blocks of one `create`; then call `forget` until it returns True.")
        .def(
            "forget", [](BoundPager& self, BlockId first, std::int32_t count) { return self->forget(first, count); },
            nb::arg("first"), nb::arg("count"),
            "Free retired blocks; False (and nothing done) while they are moved, pinned or waited for.")
        .def(
            "request",
            [](BoundPager& self, nb::handle runs, double now) {
                return refusing([&] { return self->request(to_runs(runs), now); });
            },
            nb::arg("runs"), nb::arg("now") = 0.0,
            nb::sig("def request(self, runs: collections.abc.Iterable[Run], now: float = 0.0) -> PagerAccess"),
            R"(Request runs, which must not overlap. They are granted at once or later.

Parameters
----------
now : float
    Seconds on a clock that does not go back. Unless times are reported late, the time between a grant and the next
    request counts as the program's computing; without computing nothing is prefetched, because that would gain
    nothing.

Raises
------
TooLargeError
    They do not fit into the arena together; nothing was changed.)")
        .def(
            "release", [](BoundPager& self, Access& access, bool go_on) { self->release(access, go_on); }, nb::arg("access"),
            nb::kw_only(), nb::arg("go_on") = true,
            "End an access, whose operation is done. Without `go_on` no other access is served and nothing changes its place.")
        .def(
            "ran",
            [](BoundPager& self, std::int64_t ordinal, double start, double end) {
                const farpool::Ran ran{ordinal, start, end};
                self->ran({&ran, 1});
            },
            nb::arg("ordinal"), nb::arg("start"), nb::arg("end"),
            R"(Report when a device computed what an access was for: from `start` to `end`, on the clock of `request`.

For a pager whose times come late, in the order of the ends.

Parameters
----------
ordinal : int
    Of the access.

Raises
------
ValueError
    There was no such access, it ends before it begins, or times are not reported late.)")
        .def_prop_ro(
            "late", [](BoundPager& self) { return self->late(); },
            "True if the program computes on a device, whose times `ran` reports.")
        .def(
            "abandon", [](BoundPager& self, const std::shared_ptr<Access>& access) { self->abandon(access); },
            nb::arg("access"), "Withdraw a waiting access, or release it if it has been granted. Transfers under way continue.")
        .def(
            "take_commands",
            [](BoundPager& self) {
                nb::list commands;
                for (const Command& command : self->take_commands()) {
                    commands.append(to_python(command));
                }
                return commands;
            },
            nb::sig("def take_commands(self) -> list[typing.Any]"),
            "Return the commands to start now, in this order; a move must be made before the next command is started.")
        .def(
            "take_raised", [](BoundPager& self) { return self->take_raised(); },
            "Return the ids of transfers started as prefetches for which an access waits now.")
        .def(
            "completed",
            [](BoundPager& self, TransferId transfer, double start, double end) { self->completed(transfer, start, end); },
            nb::arg("transfer"), nb::arg("start") = 0.0, nb::arg("end") = 0.0,
            "Report that a transfer has ended well; it was on its link from `start` to `end`, on the clock of `request`.")
        .def(
            "failed",
            [](BoundPager& self, TransferId transfer, nb::handle error) { self->failed(transfer, failure_of(error)); },
            nb::arg("transfer"), nb::arg("error"), nb::sig("def failed(self, transfer: int, error: BaseException) -> None"),
            "Report that a transfer has failed. Transfers ordered after it are undone; do not report their ends.")
        .def(
            "proceed", [](BoundPager& self, double now) { self->proceed(now); }, nb::arg("now") = 0.0,
            "Grant the accesses that can be granted now, after completions were reported.")
        .def(
            "resize", [](BoundPager& self, std::int64_t capacity) { return refusing([&] { return self->resize(capacity); }); },
            nb::arg("capacity"),
            R"(Change the arena's bytes. False while blocks still occupy bytes beyond; then call again after completions.

Raises
------
NoRoomError
    No lower tier takes a block that has to be evicted; the capacity is as it was. Or the error of the tier that refused it.)")
        .def(
            "demote", [](BoundPager& self, BlockId first, std::int32_t count) { return self->demote(first, count); },
            nb::arg("first"), nb::arg("count"),
            "Evict consecutive blocks before their turn; False if some stay, because they are in use or no tier has room.")
        .def(
            "block",
            [](BoundPager& self, BlockId block) {
                self->require_blocks(block, 1);
                return self->residency()[block];
            },
            nb::arg("block"), "Return the present state of one block.")
        .def(
            "class_of",
            [](BoundPager& self, BlockId block) {
                self->require_blocks(block, 1);
                return self.class_name(self->residency()[block].cls);
            },
            nb::arg("block"), nb::sig("def class_of(self, block: int) -> str"))
        .def(
            "blocks", [](BoundPager& self) { return self->residency().blocks().used(); }, "Blocks in use, in order.")
        .def(
            "resident", [](BoundPager& self) { return self->residency().arena().owners(); },
            "Blocks that own a range of the arena, in order of place.")
        .def(
            "place_of",
            [](BoundPager& self, const Run& run) {
                self->require_blocks(run.first, run.count);
                return self->residency().place_of(run);
            },
            nb::arg("run"), "Arena offset of a run that is resident and contiguous, else -1.")
        .def(
            "run_bytes",
            [](BoundPager& self, const Run& run) {
                self->require_blocks(run.first, run.count);
                return self->residency().run_bytes(run);
            },
            nb::arg("run"), "Arena bytes that a run occupies.")
        .def(
            "transfer",
            [](BoundPager& self, TransferId id) -> nb::object {
                const std::shared_ptr<const Transfer> found = self->residency().transfers().find(id);
                return found == nullptr ? nb::none() : to_python(*found);
            },
            nb::arg("id"), nb::sig("def transfer(self, id: int) -> typing.Any"),
            "The transfer with this id, if it is under way.")
        .def(
            "transfers",
            [](BoundPager& self) {
                nb::list transfers;
                for (const auto& [id, transfer] : self->residency().transfers().under_way()) {
                    transfers.append(to_python(*transfer));
                }
                return transfers;
            },
            nb::sig("def transfers(self) -> list[typing.Any]"),
            "The transfers under way, in the order in which they were started.")
        .def(
            "evict_for_test",
            [](BoundPager& self, BlockId block) {
                self->require_blocks(block, 1);
                return self->residency().try_evict(block);
            },
            nb::arg("block"),
            "Evict a resident block although its room is not needed, even a pinned one; False if no tier takes it.")
        .def_prop_ro(
            "under_way", [](BoundPager& self) { return self->residency().transfers().under_way().size(); },
            "Number of transfers under way.")
        .def_prop_ro(
            "capacity", [](BoundPager& self) { return self->residency().arena().capacity(); }, "Bytes of the arena.")
        .def_prop_ro(
            "used", [](BoundPager& self) { return self->residency().arena().used(); }, "Bytes of the arena that blocks own.")
        .def(
            "rounded", [](BoundPager& self, std::int64_t nbytes) { return self->residency().arena().rounded(nbytes); },
            nb::arg("nbytes"), "Arena bytes that a block of `nbytes` bytes takes.")
        .def_prop_ro(
            "ahead_bytes", [](BoundPager& self) { return self->residency().ahead_bytes(); },
            "Bytes prefetched, or on their way, that have not been accessed yet.")
        .def_prop_ro(
            "tape_bytes", [](BoundPager& self) { return self->tape().allocated_bytes(); },
            "Bytes of memory that the tape holds.")
        .def_prop_ro(
            "table_bytes", [](BoundPager& self) { return self->allocated_bytes(); },
            "Bytes of memory that the pager holds to know its blocks, in addition to the tape.")
        .def_prop_ro(
            "divergences", [](BoundPager& self) { return self->tape().divergences(); },
            "Number of times that the program did something else than the tape predicted.")
        .def_prop_ro(
            "rows_by_frequency", [](BoundPager& self) { return self->residency().rows_by_frequency(); },
            "True if rows of tables are kept by how often they are used, False if by how recently.")
        .def_prop_ro(
            "row_counts",
            [](BoundPager& self) {
                nb::dict counts;
                for (const auto& [table, rows] : self->row_counts()) {
                    counts[nb::cast(table)] = nb::make_tuple(rows.accesses, rows.hits);
                }
                return counts;
            },
            nb::sig("def row_counts(self) -> dict[int, tuple[int, int]]"),
            "Accesses to blocks of each table whose rows are picked by data, and hits, by the table's first block.")
        .def_prop_ro("counters", [](BoundPager& self) { return self->counters(); });

    nb::class_<SimulatedProgram>(m, "SimulatedProgram", R"(A pager under a program on simulated hardware, to measure the pager.

One tier behind a link in virtual time, no bytes. Made of a number of ``blocks`` and a ``history``, the number of accesses
that the tape remembers, it computes on the host, and a quarter of the blocks are in the arena.)")
        .def(nb::init<std::int64_t, std::int64_t>(), nb::arg("blocks"), nb::arg("history"))
        .def(
            "__init__",
            [](SimulatedProgram* self, std::int64_t capacity, const std::vector<std::int64_t>& storages,
               std::int64_t block_bytes, std::int64_t history, double seconds_per_byte, double access_seconds,
               double transfer_seconds) {
                new (self) SimulatedProgram(capacity, storages, block_bytes, history,
                                            {seconds_per_byte, access_seconds, transfer_seconds, true});
            },
            nb::kw_only(), nb::arg("capacity"), nb::arg("storages"), nb::arg("block_bytes"), nb::arg("history"),
            nb::arg("seconds_per_byte"), nb::arg("access_seconds"), nb::arg("transfer_seconds"),
            R"(Make a program whose thread runs ahead of a device, on which it computes.

The arena has ``capacity`` bytes, and each storage so many blocks of ``block_bytes``. A byte takes ``seconds_per_byte`` on
the link, each way, and the thread needs the other seconds for each access and for each transfer that it starts.)")
        .def("access", nb::overload_cast<std::vector<Run>, double>(&SimulatedProgram::access), nb::arg("runs"),
             nb::arg("seconds"), "Make an access, for which the device computes this long.")
        .def_prop_ro("finished", &SimulatedProgram::finished, "Virtual time at which everything begun so far has ended.")
        .def_prop_ro(
            "moved", [](const SimulatedProgram& self) { return nb::make_tuple(self.moved()[0], self.moved()[1]); },
            nb::sig("def moved(self) -> tuple[int, int]"), "Bytes fetched and written back so far.")
        .def("fill", &SimulatedProgram::fill, "Write each block.")
        .def("loop", &SimulatedProgram::loop, nb::arg("accesses"),
             "Read this many blocks one after the other in a loop, from the place where the last call stopped.")
        .def("shuffled", &SimulatedProgram::shuffled, nb::arg("accesses"), "Read this many blocks picked at random.");
}
