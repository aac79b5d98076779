// Operations on paged tensors that need no Python: the hot path of every step.
//
// torch passes each operation that has a paged argument to `Calls::dispatch`. The operands of most operations are in different
// storages of one pool: they are pinned, real tensors over the arena (cached ones, if the operands have not moved) replace them
// while the operator runs, and they are unpinned. Views only pair a geometry that was computed before with a new tensor object.
// All other operations are handled in Python, by `farpool.tensors.dispatch`, which also registers the operators that this file
// may run.
#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "bindings/gradients.hpp"
#include "bindings/pinned.hpp"
#include "bindings/row_copies.hpp"
#include "bindings/stretches.hpp"
#include "bindings/torch_face.hpp"

using farpool::pager::Use;

namespace {

class Calls {
public:
    // Kinds of operators that may run here.
    enum class Kind : int {
        compute = 0,            // runs on real tensors
        view = 1,               // a view of its first argument; the other arguments, which are no tensors, give the part
        alias = 2,              // another tensor over the same bytes
        composed = 3,           // made of other operators, which are dispatched in its place
        composed_of_views = 4,  // as `composed`, and torch itself marks the result as a view
    };

    // `hooks`: what Python code does for this class; see `farpool.tensors.calls`.
    void bind(nb::handle torch, nb::type_object paged, nb::type_object footprint, nb::object hooks) {
        torch_.bind(torch, std::move(paged), std::move(footprint));
        pinning_.bind(hooks);
        dispatch_ = hooks.attr("dispatch");
        wrap_results_ = hooks.attr("wrap_results");
        explain_ = hooks.attr("explain");
    }

    // Registers an operator to be run here, of which `call` is the callable inside. `writes`: bits of the positions of
    // arguments that it changes. `retried`: Python code handles operands that do not fit together. `ruled`:
    // Python code is asked first. `strided`: it is asked if an argument is a tensor of another layout.
    void learn(nb::object operation, nb::object call, nb::object name, Kind kind, std::uint64_t writes, bool retried,
               bool ruled, bool strided) {
        PyObject* key = operation.ptr();
        known_.insert_or_assign(
            key, Known{std::move(operation), std::move(call), std::move(name), kind, writes, retried, ruled, strided});
    }

    nb::object dispatch(nb::handle func, nb::handle types, nb::handle args, nb::handle kwargs) {
        if (const auto found = known_.find(func.ptr()); found != known_.end() && !found->second.ruled && !suspended_ &&
                                                        PyTuple_CheckExact(args.ptr()) && torch_.all_paged(types) &&
                                                        torch_.no_modes()) {
            const Known known = found->second;  // other threads may learn while this one computes
            nb::object result = run_known(known, func, args, kwargs);
            if (result.is_valid()) {
                return result;
            }
        }
        return call(dispatch_, {func.ptr(), types.ptr(), args.ptr(), kwargs.ptr()});
    }

    // Runs an operator on real tensors; NotImplemented if Python has to do it.
    nb::object compute_or_leave(nb::handle func, nb::handle args, nb::handle kwargs) const {
        const auto found = known_.find(func.ptr());
        if (found != known_.end() && found->second.kind == Kind::compute && !suspended_) {
            const Known known = found->second;
            nb::object result = compute(known, func, nb::tuple(args), kwargs);
            if (result.is_valid()) {
                return result;
            }
        }
        return nb::borrow(Py_NotImplemented);
    }

    nb::object wrap(nb::handle footprint, bool requires_grad) const { return torch_.wrap(footprint, requires_grad); }

    bool page_gradient(nb::handle leaf, const nb::object& name, const nb::object& copy) const {
        return !suspended_ && gradients_.page(torch_, pinning_, leaf, name, copy);
    }

    nb::list stretches(const nb::list& lists, std::size_t count, std::int64_t share, std::int64_t pinned) const {
        return ::stretches(torch_, lists, count, share, pinned);
    }

    bool copy_rows(nb::handle table, nb::object name, std::uintptr_t indices, std::size_t count, std::uintptr_t memory,
                   std::int64_t groups, bool write) const {
        return !suspended_ && ::copy_rows(pinning_, table, std::move(name), indices, count, memory, groups, write);
    }

    // Sends every operation to Python from now on: debug mode looks at each.
    void suspend() { suspended_ = true; }

private:
    struct Known {
        nb::object operation;
        nb::object call;
        nb::object name;
        Kind kind;
        std::uint64_t writes;
        bool retried;
        bool ruled;
        bool strided;
    };
    struct Operand {
        nb::object tensor;
        nb::object footprint;
        bool write;
        nb::object real;

        Footprint& operator*() const { return *nb::inst_ptr<Footprint>(footprint); }
    };
    // The paged arguments of an operation, also those in lists, in order.
    struct Operands {
        std::vector<Operand> items;

        Footprint& first() const { return *items.front(); }
        bool same_as(const Operands& other) const {
            return std::ranges::equal(items, other.items, [](const Operand& left, const Operand& right) {
                return left.tensor.is(right.tensor) && left.footprint.is(right.footprint);
            });
        }
        nb::list bound_uses() const {
            nb::list uses;
            for (const Operand& operand : items) {
                uses.append((*operand).bound_use(operand.write));
            }
            return uses;
        }
    };

    // Null if Python has to do it.
    nb::object run_known(const Known& known, nb::handle func, nb::handle args, nb::handle kwargs) const {
        switch (known.kind) {
            case Kind::compute:
                return compute(known, func, args, kwargs);
            case Kind::view:
            case Kind::alias:
                return view(known, args, kwargs);
            case Kind::composed:
            case Kind::composed_of_views:
                return decompose(known, args, kwargs);
        }
        return {};
    }

    // The paged arguments; empty unless there are any and each is of another storage of one pool.
    std::optional<Operands> find(const Known& known, nb::handle args, nb::handle kwargs) const {
        Operands operands;
        const auto add = [&](PyObject* tensor, bool write) {
            nb::object footprint = torch_.footprint_of(tensor);
            if (!footprint.is_valid()) {
                return false;
            }
            const Footprint& it = *nb::inst_ptr<Footprint>(footprint);
            if (it.start == it.stop || (!operands.items.empty() && !it.pool.is(operands.first().pool))) {
                return false;
            }
            operands.items.push_back({nb::borrow(tensor), std::move(footprint), write, {}});
            return true;
        };
        const Py_ssize_t length = PyTuple_GET_SIZE(args.ptr());
        for (Py_ssize_t position = 0; position < length; ++position) {
            const bool write = position < 64 && (known.writes >> position & 1) != 0;
            PyObject* given = PyTuple_GET_ITEM(args.ptr(), position);
            for (PyObject* value : tensors_in(given)) {
                if (torch_.is_paged(value) ? !add(value, write) : known.strided && torch_.is_of_other_layout(value)) {
                    return std::nullopt;
                }
            }
        }
        if (!kwargs.is_none()) {
            PyObject* name = nullptr;
            PyObject* given = nullptr;
            for (Py_ssize_t at = 0; PyDict_Next(kwargs.ptr(), &at, &name, &given) != 0;) {
                if (std::ranges::any_of(tensors_in(given), [&](PyObject* value) { return torch_.is_paged(value); })) {
                    return std::nullopt;
                }
            }
        }
        return operands.items.empty() || !all_differ(operands) ? std::nullopt : std::optional(std::move(operands));
    }

    // The tensors in an argument: the argument itself, or the items of a list.
    static std::span<PyObject*> tensors_in(PyObject*& value) {
        if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
            return {PySequence_Fast_ITEMS(value), static_cast<std::size_t>(PySequence_Fast_GET_SIZE(value))};
        }
        return {&value, 1};
    }

    static bool all_differ(const Operands& operands) {
        std::vector<PyObject*> storages;
        storages.reserve(operands.items.size());
        for (const Operand& operand : operands.items) {
            storages.push_back((*operand).storage.ptr());
        }
        std::ranges::sort(storages);
        return std::ranges::adjacent_find(storages) == storages.end();
    }

    // Null if Python has to do it.
    nb::object compute(const Known& known, nb::handle func, nb::handle args, nb::handle kwargs) const {
        std::optional<Operands> operands = find(known, args, kwargs);
        if (!operands) {
            return {};
        }
        std::vector<Use> uses;
        uses.reserve(operands->items.size());
        for (const Operand& operand : operands->items) {
            uses.push_back((*operand).use(operand.write));
        }
        const std::unique_ptr<Pinned> pinned =
            pinning_.pin(operands->first(), uses, [&] { return operands->bound_uses(); }, known.name, false, known.retried);
        if (pinned == nullptr) {
            return {};
        }
        if (pinned->paused()) {  // another thread may have moved a tensor into the pool or out of it during the wait
            if (const std::optional<Operands> still = find(known, args, kwargs); !still || !operands->same_as(*still)) {
                pinned->release();
                return {};
            }
        }
        nb::object result;
        try {
            result = run(known, args, kwargs, *operands, *pinned);
        } catch (nb::python_error& error) {
            for (Operand& operand : operands->items) {
                (*operand).forget_real();
                operand.real.reset();
            }
            pinned->release();
            if (error.matches(PyExc_RuntimeError)) {
                explain_(error.value(), func, args, kwargs);
            }
            throw;
        }
        pinned->release();
        return result;
    }

    nb::object run(const Known& known, nb::handle args, nb::handle kwargs, Operands& operands, const Pinned& pinned) const {
        for (std::size_t index = 0; index < operands.items.size(); ++index) {
            operands.items[index].real =
                torch_.real_of(operands.items[index].tensor, operands.items[index].footprint, pinned.offset(index));
        }
        const auto length = static_cast<std::size_t>(PyTuple_GET_SIZE(args.ptr()));
        std::vector<nb::object> values;
        values.reserve(length);
        auto next = operands.items.begin();
        for (std::size_t position = 0; position < length; ++position) {
            values.push_back(substituted(PyTuple_GET_ITEM(args.ptr(), position), next, operands.items.end()));
        }
        nb::object result;
        {
            // Lazy conjugation and negation: without them the values of a conjugated tensor would be read as if it were none.
            std::optional<Torch::Included> lazy;
            if (may_be_lazy(operands, args, kwargs)) {
                lazy.emplace(torch_, torch_.lazy_keys());
            }
            result = nb::steal(PyObject_VectorcallDict(known.call.ptr(), reinterpret_cast<PyObject**>(values.data()), length,
                                                       kwargs.is_none() ? nullptr : kwargs.ptr()));
            if (!result.is_valid()) {
                throw nb::python_error();
            }
        }
        for (const Operand& operand : operands.items) {
            if (operand.write) {
                (*operand).check_real(operand.real);
            }
        }
        return seen_by_program(std::move(result), operands);
    }

    // True if an argument may have lazy values, or a kernel may make a tensor that has. If all are real numbers in memory,
    // as in most calls, torch's dispatcher keeps its state, which saves eight calls.
    bool may_be_lazy(const Operands& operands, nb::handle args, nb::handle kwargs) const {
        const auto lazy = [&](PyObject* value) {
            const std::span<PyObject*> items = tensors_in(value);
            return !std::ranges::all_of(items, [&](PyObject* item) {
                return torch_.is_paged(item) || item == Py_None || PyLong_Check(item) || PyFloat_Check(item) ||
                       (torch_.is_plain_type(item) && torch_.is_real(item));
            });
        };
        PyObject** first = &PyTuple_GET_ITEM(args.ptr(), 0);
        if (std::ranges::any_of(operands.items, [](const Operand& operand) { return (*operand).lazy; }) ||
            std::any_of(first, first + PyTuple_GET_SIZE(args.ptr()), lazy)) {
            return true;
        }
        PyObject* name = nullptr;
        PyObject* given = nullptr;
        for (Py_ssize_t at = 0; !kwargs.is_none() && PyDict_Next(kwargs.ptr(), &at, &name, &given) != 0;) {
            if (lazy(given)) {
                return true;
            }
        }
        return false;
    }

    // An argument with real tensors in the places of the operands in it, of which `next` is the first and `end` follows the
    // last of all. Told by identity: what kind of tensor an object is may change in another thread.
    static nb::object substituted(PyObject* value, std::vector<Operand>::iterator& next, std::vector<Operand>::iterator end) {
        const auto is_next = [&](PyObject* item) { return next != end && next->tensor.ptr() == item; };
        if (is_next(value)) {
            return (next++)->real;
        }
        const std::span<PyObject*> items = tensors_in(value);
        if (items.data() == &value || std::ranges::none_of(items, is_next)) {
            return nb::borrow(value);
        }
        nb::list list;
        for (PyObject* item : items) {
            list.append(is_next(item) ? nb::handle((next++)->real) : nb::handle(item));
        }
        return list;
    }

    // Converts a result so that no plain tensor that the program gets aliases the arena.
    nb::object seen_by_program(nb::object result, const Operands& operands) const {
        const Footprint& first = operands.first();
        if (result.is_none() || torch_.is_plain(result, first)) {
            return result;
        }
        for (const Operand& operand : operands.items) {
            if (result.is(operand.real)) {
                return operand.tensor;
            }
        }
        PyObject* made = result.ptr();
        const std::span<PyObject*> items = tensors_in(made);
        if (items.data() != &made && std::ranges::all_of(items, [&](PyObject* one) { return torch_.is_plain(one, first); })) {
            return result;
        }
        nb::list pairs;
        for (const Operand& operand : operands.items) {
            pairs.append(nb::make_tuple(operand.tensor, operand.real));
        }
        return wrap_results_(pairs, first.arena, result);
    }

    nb::object view(const Known& known, nb::handle args, nb::handle kwargs) const {
        const Py_ssize_t length = PyTuple_GET_SIZE(args.ptr());
        if (length == 0 || !torch_.is_paged(PyTuple_GET_ITEM(args.ptr(), 0)) ||
            (!kwargs.is_none() && PyDict_GET_SIZE(kwargs.ptr()) != 0)) {
            return {};
        }
        const nb::object source = torch_.footprint_of(PyTuple_GET_ITEM(args.ptr(), 0));
        if (!source.is_valid()) {
            return {};
        }
        const Footprint& it = *nb::inst_ptr<Footprint>(source);
        if (known.kind == Kind::alias) {
            return torch_.wrap(source, false);
        }
        if (attribute(it.pool, closed_name_).ptr() != Py_False) {
            return {};
        }
        const nb::object key = view_key(known, args, length);
        PyObject* found = key.is_valid() ? PyDict_GetItemWithError(it.views.ptr(), key.ptr()) : nullptr;
        if (found == nullptr) {
            PyErr_Clear();  // an argument without a hash
            return {};
        }
        const nb::object kept = nb::borrow(found);
        if (reinterpret_cast<PyObject*>(Py_TYPE(found)) == torch_.footprint_type().ptr()) {
            return torch_.wrap(kept, false);
        }
        nb::list views;
        for (const nb::handle one : nb::iter(kept)) {
            views.append(torch_.wrap(one, false));
        }
        return views;
    }

    nb::object decompose(const Known& known, nb::handle args, nb::handle kwargs) const {
        const auto length = static_cast<std::size_t>(PyTuple_GET_SIZE(args.ptr()));
        std::vector<PyObject*> values = {torch_.composite_key().ptr()};
        values.insert(values.end(), &PyTuple_GET_ITEM(args.ptr(), 0), &PyTuple_GET_ITEM(args.ptr(), 0) + length);
        // The operators inside pass the rules that run before autograd, as they do when torch decomposes this one itself.
        const Torch::Included lazy_and_rules(torch_, torch_.composing_keys());
        std::optional<Torch::Included> marked;
        if (known.kind == Kind::composed && torch_.infers()) {
            // Views of a plain tensor are marked as views here too, and require a gradient if it does: the code that multiplies
            // matrices checks this and would otherwise choose another kernel, with other bits.
            marked.emplace(torch_, torch_.view_keys());
        }
        PyObject* result =
            PyObject_VectorcallDict(known.call.ptr(), values.data(), values.size(), kwargs.is_none() ? nullptr : kwargs.ptr());
        if (result == nullptr) {
            throw nb::python_error();
        }
        return nb::steal(result);
    }

    // Key that identifies a view of one tensor: the operator, with the numbers that it is given.
    static nb::object view_key(const Known& known, nb::handle args, Py_ssize_t length) {
        if (length == 1) {
            return known.call;
        }
        const nb::object key = nb::steal(PyTuple_New(length));
        PyTuple_SET_ITEM(key.ptr(), 0, Py_NewRef(known.call.ptr()));
        for (Py_ssize_t position = 1; position < length; ++position) {
            PyObject* value = PyTuple_GET_ITEM(args.ptr(), position);
            PyTuple_SET_ITEM(key.ptr(), position, PyList_CheckExact(value) ? PyList_AsTuple(value) : Py_NewRef(value));
        }
        return key;
    }

    std::unordered_map<PyObject*, Known> known_;
    bool suspended_ = false;
    Torch torch_;
    Pinning pinning_;
    Gradients gradients_;
    nb::object dispatch_, wrap_results_, explain_;
    nb::object closed_name_ = interned("closed");
};

}  // namespace

void bind_calls(nb::module_& m) {
    nb::class_<Calls> calls(m, "Calls", "Runs operations on paged tensors that need no Python; see `farpool.tensors.calls`.");
    nb::enum_<Calls::Kind>(calls, "Kind", "Kind of an operator, by which it is run.", nb::is_arithmetic())
        .value("COMPUTE", Calls::Kind::compute, "Runs on real tensors.")
        .value("VIEW", Calls::Kind::view,
               "Views a part of its first argument, which the other arguments give; none of these is a tensor.")
        .value("ALIAS", Calls::Kind::alias, "Another tensor over the same bytes.")
        .value("COMPOSED", Calls::Kind::composed, "Composed of other operators, which are dispatched in its place.")
        .value("COMPOSED_OF_VIEWS", Calls::Kind::composed_of_views,
               "Composed of other operators, and torch itself marks the result as a view.");
    calls.def(nb::init<>())
        .def("bind", &Calls::bind, nb::arg("torch"), nb::arg("paged"), nb::arg("footprint"), nb::arg("hooks"),
             "Set the types of tensors and footprints, and the Python functions for all other cases.")
        .def("learn", &Calls::learn, nb::arg("operation"), nb::arg("call"), nb::arg("name"), nb::arg("kind"), nb::kw_only(),
             nb::arg("writes") = 0, nb::arg("retried") = false, nb::arg("ruled") = false, nb::arg("strided") = false,
             nb::sig("def learn(self, operation: object, call: object, name: str, kind: farpool._native.Calls.Kind, *, writes: "
                     "int = 0, retried: bool = False, ruled: bool = False, strided: bool = False) -> None"),
             R"(Take over an operator: run it without Python from now on.

Parameters
----------
call : callable
    Calls the operator's kernels.
writes : int
    Bits of the positions of arguments that it changes.
retried : bool
    Leave it to Python if its operands do not fit into the fast tier together.
ruled : bool
    Leave it to Python, which may ask for it by `compute`.
strided : bool
    Leave it to Python if an argument is a tensor of another layout.)")
        .def("dispatch", &Calls::dispatch, nb::arg("func"), nb::arg("types"), nb::arg("args") = nb::tuple(),
             nb::arg("kwargs").none() = nb::none(),
             nb::sig("def dispatch(self, func: typing.Any, types: typing.Any, args: typing.Any = (), kwargs: typing.Any = "
                     "None) -> typing.Any"),
             "Run one operation of which at least one argument is paged.")
        .def("compute", &Calls::compute_or_leave, nb::arg("func"), nb::arg("args"), nb::arg("kwargs"),
             nb::sig("def compute(self, func: typing.Any, args: collections.abc.Sequence[typing.Any], kwargs: dict[str, "
                     "typing.Any]) -> typing.Any"),
             "Run an operation on real tensors; NotImplemented if Python has to do it.")
        .def("copy_rows", &Calls::copy_rows, nb::arg("table"), nb::arg("op"), nb::arg("indices"), nb::arg("count"),
             nb::arg("memory"), nb::arg("groups"), nb::arg("write"),
             nb::sig("def copy_rows(self, table: Footprint, op: str, indices: int, count: int, memory: int, groups: int, "
                     "write: bool) -> bool"),
             R"(Copy rows of a table, whose elements are contiguous, to or from plain memory, block by block.

Parameters
----------
indices : int
    Address of `count` row numbers of 64 bits; distinct if rows are written.
memory : int
    Address of the same number of rows.
groups : int
    Acquire blocks of at most one part in this many of the budget together.
write : bool
    Copy into the table.

Returns
-------
bool
    False, with nothing done, if Python has to do it: a number out of range, rows with gaps, debug mode, a device.)")
        .def("page_gradient", &Calls::page_gradient, nb::arg("leaf"), nb::arg("op"), nb::arg("copy"),
             nb::sig("def page_gradient(self, leaf: torch.Tensor, op: str, copy: collections.abc.Callable[[typing.Any, "
                     "torch.Tensor, str], object]) -> bool"),
             R"(Replace the plain gradient of a leaf by a paged copy.

Parameters
----------
copy : callable
    Copies one that spans blocks: paged tensor, gradient, operation.

Returns
-------
bool
    False if Python has to do it; then nothing was done.)")
        .def("stretches", &Calls::stretches, nb::arg("lists"), nb::arg("count"), nb::arg("share"), nb::arg("pinned"),
             nb::sig("def stretches(self, lists: list[collections.abc.Sequence[typing.Any]], count: int, share: int, pinned: "
                     "int) -> list[slice]"),
             R"(Cut lists of `count` items into stretches.

The tensors of one take at most one of `share` parts of the budget, and the blocks in which they lie at most one
of `pinned` parts; or it has one item of each list.)")
        .def("wrap", &Calls::wrap, nb::arg("footprint"), nb::arg("requires_grad"),
             nb::sig("def wrap(self, footprint: Footprint, requires_grad: bool) -> torch.Tensor"),
             "Return a paged tensor over the bytes of a footprint.")
        .def("suspend", &Calls::suspend, "Leave all operations to Python from now on.");
}
