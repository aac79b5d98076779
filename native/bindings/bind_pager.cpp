// The pager's Python face. Messages are Python objects of farpool.pager.messages, so that executors written in Python (on a
// virtual clock, on a device, checking) take them as they are.
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
        // No initialiser of a static: an import may let go of the interpreter lock, and a thread that then waited for the
        // initialiser with the lock in hand would wait for ever. Two threads may both import; one of them wins.
        static const Names* names = nullptr;
        if (names == nullptr) {
            auto made = std::make_unique<Names>();
            const nb::module_ messages = nb::module_::import_("farpool.pager.messages");
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

Failure hold(nb::handle error) {
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

nb::object to_python(const Command& command) {
    if (const auto* move = std::get_if<Move>(&command)) {
        return Names::get().move(move->source, move->target, move->nbytes, move->last_use);
    }
    return ::to_python(*std::get<std::shared_ptr<const Transfer>>(command));
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
    nb::enum_<Mode>(m, "Mode", nb::is_arithmetic(), "What an access does with the bytes.")
        .value("READ", Mode::read)
        .value("WRITE", Mode::write, "Reads and changes them, or changes only some.")
        .value("OVERWRITE", Mode::overwrite,
               "Writes each byte without looking at the old ones, which therefore need not be fetched.");
    nb::enum_<Kind>(m, "Kind", nb::is_arithmetic(), "Direction of a transfer.")
        .value("FETCH", Kind::fetch)
        .value("WRITE_BACK", Kind::write_back);
    nb::enum_<State>(m, "State", nb::is_arithmetic(), "Where a block stands.")
        .value("FREE", State::free)
        .value("ABSENT", State::absent)
        .value("FETCHING", State::fetching)
        .value("RESIDENT", State::resident)
        .value("WRITING_BACK", State::writing_back);

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
        .def_ro("table", &Run::table)
        .def("__eq__", [](const Run& self,
                          nb::handle other) { return nb::isinstance<Run>(other) && self == nb::cast<const Run&>(other); })
        .def("__hash__",
             [](const Run& self) {
                 return nb::hash(nb::make_tuple(self.first, self.count, static_cast<int>(self.mode), self.table));
             })
        .def("__repr__", [](const Run& self) { return to_string(self); });

    nb::class_<Counters>(m, "PagerCounters", "What a pager has done so far.")
        .def_ro("accesses", &Counters::accesses)
        .def_ro("hits", &Counters::hits)
        .def_ro("row_accesses", &Counters::row_accesses)
        .def_ro("row_hits", &Counters::row_hits)
        .def_ro("late", &Counters::late)
        .def_ro("demand_fetches", &Counters::demand_fetches)
        .def_ro("prefetches", &Counters::prefetches)
        .def_ro("prefetches_used", &Counters::prefetches_used)
        .def_ro("prefetches_wasted", &Counters::prefetches_wasted)
        .def_ro("evictions", &Counters::evictions)
        .def_ro("write_backs", &Counters::write_backs)
        .def_ro("moves", &Counters::moves)
        .def_ro("moved_bytes", &Counters::moved_bytes);

    nb::class_<Block>(m, "Block", "One row of a pager's table of blocks, as it was when it was asked for.")
        .def_ro("size", &Block::size)
        .def_ro("place", &Block::place)
        .def_ro("copy", &Block::copy)
        .def_ro("next_use", &Block::next_use)
        .def_ro("last_use", &Block::last_use)
        .def_prop_ro("pins", [](const Block& self) { return self.pins; })
        .def_ro("name", &Block::name)
        .def_ro("tier", &Block::tier)
        .def_prop_ro("state", [](const Block& self) { return self.state; })
        .def_prop_ro("dirty", [](const Block& self) { return self.dirty; })
        .def_prop_ro("prefetched", [](const Block& self) { return self.prefetched; });

    nb::class_<Access>(m, "PagerAccess", "One operation's wish for its operands, and the answer.", nb::is_weak_referenceable(),
                       nb::type_slots(access_slots))
        .def_ro("granted", &Access::granted)
        .def_ro("ordinal", &Access::ordinal)
        .def_ro("last_use", &Access::last_use)
        .def_prop_ro("places",
                     [](const Access& self) { return to_tuple(self.places, [](std::int64_t p) { return nb::int_(p); }); })
        .def_prop_ro("runs",
                     [](const Access& self) { return to_tuple(self.runs, [](const Run& run) { return nb::cast(run); }); })
        .def_prop_ro("error", [](const Access& self) { return to_python(self.refusal); })
        .def("waits_for", [](const Access& self, BlockId block) { return contains(self.blocks, block); }, nb::arg("block"));

    nb::class_<BoundPager>(m, "Pager", "Decides which block is where, and when it moves.", nb::type_slots(pager_slots))
        .def(nb::init<std::int64_t, nb::handle, nb::tuple, std::int64_t, std::int64_t, bool, bool>(), nb::arg("capacity"),
             nb::arg("spaces"), nb::arg("classes") = nb::make_tuple("bytes"), nb::kw_only(), nb::arg("alignment") = 64,
             nb::arg("history") = std::int64_t{1} << 18, nb::arg("prefetch") = true, nb::arg("late") = false)
        .def("add_source", [](BoundPager& self) { return self->add_source(); })
        .def(
            "create",
            [](BoundPager& self, const std::vector<std::int64_t>& sizes, nb::handle cls) {
                return self->create(sizes, self.class_number(cls));
            },
            nb::arg("sizes"), nb::arg("cls") = "bytes")
        .def(
            "adopt",
            [](BoundPager& self, BlockId block, std::int32_t tier, std::int64_t offset, std::int64_t place,
               std::int64_t nbytes) { self->adopt(block, {tier, offset, place, nbytes}); },
            nb::arg("block"), nb::arg("source"), nb::arg("offset"), nb::arg("place"), nb::arg("nbytes"))
        .def(
            "can_adopt", [](BoundPager& self, BlockId block) { return self->can_adopt(block); }, nb::arg("block"))
        .def(
            "retire", [](BoundPager& self, BlockId first, std::int32_t count) { self->retire(first, count); }, nb::arg("first"),
            nb::arg("count"))
        .def(
            "forget", [](BoundPager& self, BlockId first, std::int32_t count) { return self->forget(first, count); },
            nb::arg("first"), nb::arg("count"))
        .def(
            "request",
            [](BoundPager& self, nb::handle runs, double now) {
                return refusing([&] { return self->request(to_runs(runs), now); });
            },
            nb::arg("runs"), nb::arg("now") = 0.0)
        .def(
            "release", [](BoundPager& self, Access& access, bool go_on) { self->release(access, go_on); }, nb::arg("access"),
            nb::kw_only(), nb::arg("go_on") = true)
        .def(
            "ran", [](BoundPager& self, std::int64_t ordinal, double start, double end) { self->ran(ordinal, start, end); },
            nb::arg("ordinal"), nb::arg("start"), nb::arg("end"))
        .def(
            "abandon", [](BoundPager& self, const std::shared_ptr<Access>& access) { self->abandon(access); },
            nb::arg("access"))
        .def("take_commands",
             [](BoundPager& self) {
                 nb::list commands;
                 for (const Command& command : self->take_commands()) {
                     commands.append(to_python(command));
                 }
                 return commands;
             })
        .def("take_raised", [](BoundPager& self) { return self->take_raised(); })
        .def(
            "completed",
            [](BoundPager& self, TransferId transfer, double start, double end) { self->completed(transfer, start, end); },
            nb::arg("transfer"), nb::arg("start") = 0.0, nb::arg("end") = 0.0)
        .def(
            "failed", [](BoundPager& self, TransferId transfer, nb::handle error) { self->failed(transfer, hold(error)); },
            nb::arg("transfer"), nb::arg("error"))
        .def(
            "proceed", [](BoundPager& self, double now) { self->proceed(now); }, nb::arg("now") = 0.0)
        .def(
            "resize", [](BoundPager& self, std::int64_t capacity) { return refusing([&] { return self->resize(capacity); }); },
            nb::arg("capacity"))
        .def(
            "demote", [](BoundPager& self, BlockId first, std::int32_t count) { return self->demote(first, count); },
            nb::arg("first"), nb::arg("count"))
        .def(
            "block",
            [](BoundPager& self, BlockId block) {
                self->require_blocks(block, 1);
                return self->residency().blocks[block];
            },
            nb::arg("block"))
        .def(
            "class_of",
            [](BoundPager& self, BlockId block) {
                self->require_blocks(block, 1);
                return self.class_name(self->residency().blocks[block].cls);
            },
            nb::arg("block"))
        .def("blocks", [](BoundPager& self) { return self->residency().blocks.used(); })
        .def("resident", [](BoundPager& self) { return self->residency().arena.owners(); })
        .def(
            "place_of",
            [](BoundPager& self, const Run& run) {
                self->require_blocks(run.first, run.count);
                return self->residency().place_of(run);
            },
            nb::arg("run"))
        .def(
            "run_bytes",
            [](BoundPager& self, const Run& run) {
                self->require_blocks(run.first, run.count);
                return self->residency().run_bytes(run);
            },
            nb::arg("run"))
        .def(
            "transfer",
            [](BoundPager& self, TransferId id) -> nb::object {
                const auto& transfers = self->residency().transfers;
                const auto found = transfers.find(id);
                return found == transfers.end() ? nb::none() : to_python(*found->second);
            },
            nb::arg("id"))
        .def("transfers",
             [](BoundPager& self) {
                 nb::list transfers;
                 for (const auto& [id, transfer] : self->residency().transfers) {
                     transfers.append(to_python(*transfer));
                 }
                 return transfers;
             })
        .def(
            "evict_for_test",
            [](BoundPager& self, BlockId block) {
                self->require_blocks(block, 1);
                return self->residency().try_evict(block);
            },
            nb::arg("block"))
        .def_prop_ro("under_way", [](BoundPager& self) { return self->residency().transfers.size(); })
        .def_prop_ro("capacity", [](BoundPager& self) { return self->residency().arena.capacity(); })
        .def_prop_ro("used", [](BoundPager& self) { return self->residency().arena.used(); })
        .def(
            "rounded", [](BoundPager& self, std::int64_t nbytes) { return self->residency().arena.rounded(nbytes); },
            nb::arg("nbytes"))
        .def_prop_ro("ahead_bytes", [](BoundPager& self) { return self->residency().ahead_bytes; })
        .def_prop_ro("tape_bytes", [](BoundPager& self) { return self->tape().held_bytes(); })
        .def_prop_ro("table_bytes", [](BoundPager& self) { return self->held_bytes(); })
        .def_prop_ro("divergences", [](BoundPager& self) { return self->tape().divergences(); })
        .def_prop_ro("rows_by_frequency", [](BoundPager& self) { return self->residency().rows.by_frequency(); })
        .def_prop_ro("row_counts",
                     [](BoundPager& self) {
                         nb::dict counts;
                         for (const auto& [table, rows] : self->row_counts()) {
                             counts[nb::cast(table)] = nb::make_tuple(rows.accesses, rows.hits);
                         }
                         return counts;
                     })
        .def_prop_ro("counters", [](BoundPager& self) { return self->residency().counters; });

    nb::class_<SimulatedProgram>(m, "SimulatedProgram", "A pager under a program on simulated hardware, to measure it.")
        .def(nb::init<std::int64_t, std::int64_t>(), nb::arg("blocks"), nb::arg("history"))
        .def("fill", &SimulatedProgram::fill)
        .def("loop", &SimulatedProgram::loop, nb::arg("accesses"))
        .def("shuffled", &SimulatedProgram::shuffled, nb::arg("accesses"));
}
