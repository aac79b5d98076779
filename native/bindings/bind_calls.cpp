// Operations on paged tensors, as far as they need no Python: the hot path of every step.
//
// torch hands each operation that has a paged argument to `Calls::dispatch`. Most have theirs in different storages of one
// pool: their operands are pinned, real tensors over the arena (made before, if they lie where they lay) stand
// for them while the operator runs, and they are let go. Views only pair a geometry that was worked out before with a new
// tensor object. Whatever is not like that is handled in Python, by `farpool.tensors.dispatch`, which also tells this file
// which operators it may run.
//
// Tensors are known here as Python objects only: the core is built without torch.
#include <array>
#include <cstring>
#include <map>
#include <unordered_map>

#include "footprint.hpp"

using farpool::pager::Mode;
using farpool::pager::Use;

namespace {

class Calls {
public:
    // Kinds of operators that may be run here, by what they do.
    enum class Kind : int {
        compute = 0,            // runs on real tensors
        view = 1,               // a view of its first argument; the others, which are no tensors, say which part
        alias = 2,              // another tensor over the same bytes
        composed = 3,           // made of other operators, which are dispatched in its place
        composed_of_views = 4,  // as `composed`, and torch itself marks the result as a view
    };

    // `hooks`: what Python code does for this class; see `farpool.tensors.calls`.
    void bind(nb::handle torch, nb::type_object paged, nb::type_object footprint, nb::object hooks) {
        const nb::object core = torch.attr("_C");
        plain_type_ = torch.attr("Tensor");
        strided_ = torch.attr("strided");
        requires_grad_ = plain_type_.attr("requires_grad");
        make_wrapper_ = plain_type_.attr("_make_wrapper_subclass");
        set_memory_ = core.attr("TensorBase").attr("set_");
        part_of_memory_ = core.attr("StorageBase").attr("__getitem__");
        refuse_address_ = core.attr("_set_throw_on_mutable_data_ptr");
        set_conj_ = core.attr("_set_conj");
        set_neg_ = core.attr("_set_neg");
        modes_ = core.attr("_len_torch_dispatch_stack");
        infers_ = torch.attr("is_inference_mode_enabled");
        is_excluded_ = core.attr("_dispatch_tls_is_dispatch_key_excluded");
        set_excluded_ = core.attr("_dispatch_tls_set_dispatch_key_excluded");
        const nb::object keys = core.attr("DispatchKey");
        lazy_ = {keys.attr("Conjugate"), keys.attr("Negative"), keys.attr("ZeroTensor")};
        views_ = keys.attr("ADInplaceOrView");
        composing_ = {lazy_[0], lazy_[1], lazy_[2], keys.attr("PythonTLSSnapshot")};
        composite_ = keys.attr("CompositeImplicitAutograd");
        inference_ = core.attr("_InferenceMode");
        paged_ = std::move(paged);
        footprint_type_ = std::move(footprint);
        dispatch_ = hooks.attr("dispatch");
        wrap_results_ = hooks.attr("wrap_results");
        explain_ = hooks.attr("explain");
        refusals_ = hooks.attr("refusals");
        budget_error_ = hooks.attr("budget_error");
    }

    // Registers an operator to be run here, of which `call` is the callable inside. `writes`: bits of the positions of
    // arguments that it changes. `retried`: Python code knows what to do where the operands do not fit together. `ruled`:
    // Python code is asked first. `strided`: it is asked where an argument is a tensor of another layout.
    void learn(nb::object operation, nb::object call, nb::object name, Kind kind, std::uint64_t writes, bool retried,
               bool ruled, bool strided) {
        PyObject* key = operation.ptr();
        known_.insert_or_assign(
            key, Known{std::move(operation), std::move(call), std::move(name), kind, writes, retried, ruled, strided});
    }

    nb::object dispatch(nb::handle func, nb::handle types, nb::handle args, nb::handle kwargs) {
        if (const auto found = known_.find(func.ptr()); found != known_.end() && !found->second.ruled && !suspended_ &&
                                                        PyTuple_CheckExact(args.ptr()) && all_paged(types) && no_modes()) {
            const Known known = found->second;  // other threads may learn while this one computes
            nb::object result = run_known(known, func, args, kwargs);
            if (result.is_valid()) {
                return result;
            }
        }
        return call(dispatch_, {func.ptr(), types.ptr(), args.ptr(), kwargs.ptr()});
    }

    // Runs an operator on real tensors; NotImplemented where that takes Python.
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

    // Makes a paged tensor over the bytes of a footprint.
    nb::object wrap(nb::handle footprint, bool requires_grad) const {
        const Footprint& it = *nb::inst_ptr<Footprint>(footprint);
        std::optional<Recording> recording;
        if (call(infers_, {}).ptr() == Py_True) {
            // As an inference tensor it could be no view of a tensor that was made outside, and would stay one for ever.
            recording.emplace(*this);
        }
        const nb::object offset = nb::steal(PyLong_FromLongLong(it.offset));
        const std::array<PyObject*, 7> arguments = {paged_.ptr(),
                                                    it.size.ptr(),
                                                    it.stride.ptr(),
                                                    offset.ptr(),
                                                    it.dtype.ptr(),
                                                    it.device.ptr(),
                                                    requires_grad ? Py_True : Py_False};
        PyObject* made = PyObject_Vectorcall(make_wrapper_.ptr(), arguments.data(), 2, wrapper_names_.ptr());
        if (made == nullptr) {
            throw nb::python_error();
        }
        nb::object tensor = nb::steal(made);
        // Native code that asks for an address gets an error instead of a null pointer.
        call(refuse_address_, {made});
        if (it.conj) {
            call(set_conj_, {made, Py_True});
        }
        if (it.neg) {
            call(set_neg_, {made, Py_True});
        }
        if (PyObject_SetAttr(made, footprint_name_.ptr(), footprint.ptr()) != 0) {
            throw nb::python_error();
        }
        return tensor;
    }

    // Replaces the plain gradient of a leaf by a paged copy. `copy(paged, gradient, name)` copies one that spans blocks. False,
    // and does nothing, where it takes Python, or where the gradient is to stay plain.
    bool page_gradient(nb::handle leaf, const nb::object& name, const nb::object& copy) const {
        const nb::object grad = attribute(leaf, grad_name_);
        const nb::object parent = footprint_of(leaf.ptr());
        if (!is_plain_type(grad.ptr()) || !parent.is_valid()) {
            return false;
        }
        Footprint& like = *nb::inst_ptr<Footprint>(parent);
        if (suspended_ || like.native == nullptr || !attribute(grad, layout_name_).is(strided_) ||
            !attribute(grad, device_name_).equal(like.device) || attribute(grad, trained_name_).ptr() != Py_False ||
            call_method(grad, is_contiguous_name_).ptr() != Py_True) {
            return false;
        }
        if (!has_values(grad) || std::ranges::any_of(other_names_, [&](const nb::object& kind) {
                return attribute(grad, kind).ptr() != Py_False;
            })) {
            return false;
        }
        const nb::object dtype = attribute(grad, dtype_name_);
        const nb::tuple size(call_method(grad, size_name_));
        const auto itemsize = nb::cast<std::int64_t>(dtype.attr("itemsize"));
        std::int64_t row = itemsize;
        for (std::size_t dim = 1; dim < size.size(); ++dim) {
            row *= nb::cast<std::int64_t>(size[dim]);
        }
        const std::int64_t nbytes = size.size() == 0 ? row : row * nb::cast<std::int64_t>(size[0]);
        if (nbytes == 0) {
            return false;
        }
        const nb::object storage =
            like.pool.attr("allocate")(nbytes, nb::arg("cls") = "gradient", nb::arg("row_bytes") = size.size() < 2 ? 0 : row,
                                       nb::arg("name") = like.storage.attr("gradient_name"));
        const nb::object stride = call_method(grad, stride_name_);
        const nb::object made =
            call(footprint_type_, {storage.ptr(), like.arena.ptr(), dtype.ptr(), size.ptr(), stride.ptr(), zero_.ptr()});
        const nb::object paged = wrap(made, false);
        Footprint& it = *nb::inst_ptr<Footprint>(made);
        if (it.layout->count > 1) {
            call(copy, {paged.ptr(), grad.ptr(), name.ptr()});
        } else {
            const Use use{it.layout, 0, nbytes, Mode::overwrite};
            const auto bound_use = [&] {
                nb::list bound;
                bound.append(BoundUse{it.storage, use});
                return bound;
            };
            const std::unique_ptr<Pinned> pinned = pin(it, std::span(&use, 1), bound_use, name, false, false);
            const auto from = nb::cast<std::uintptr_t>(call_method(grad, address_name_));
            without_lock_if(nbytes >= worth_unlocking, [&] {
                std::memcpy(reinterpret_cast<void*>(it.arena_start + static_cast<std::uintptr_t>(pinned->offset(0))),
                            reinterpret_cast<const void*>(from), static_cast<std::size_t>(nbytes));
            });
            pinned->release();
        }
        if (PyObject_SetAttr(leaf.ptr(), grad_name_.ptr(), paged.ptr()) != 0) {
            throw nb::python_error();
        }
        return true;
    }

    // Cuts lists of `count` items into stretches. The tensors of one take at most one of `share` parts of the budget, and the
    // blocks in which they lie at most one of `pinned` parts; or it has one item of each list.
    nb::list stretches(const nb::list& lists, std::size_t count, std::int64_t share, std::int64_t pinned) const {
        nb::list cut;
        std::map<farpool::pager::BlockId, std::int64_t> blocks;  // of the stretch: bytes, by the first of each storage
        std::size_t start = 0;
        std::int64_t total = 0;
        std::int64_t room = 0;
        for (std::size_t index = 0; index < count; ++index) {
            std::map<farpool::pager::BlockId, std::int64_t> touched;
            std::int64_t nbytes = 0;
            std::int64_t fast = 0;
            for (const nb::handle list : lists) {
                const nb::object tensor = list[index];
                const nb::object footprint = is_paged(tensor.ptr()) ? footprint_of(tensor.ptr()) : nb::object();
                if (footprint.is_valid()) {
                    const Footprint& it = *nb::inst_ptr<Footprint>(footprint);
                    nbytes += it.stop - it.start;
                    touched.emplace(it.layout->first, it.layout->count * it.layout->block_bytes);
                    fast = nb::cast<std::int64_t>(it.pool.attr("fast"));
                }
            }
            if (touched.empty()) {
                continue;
            }
            const auto more = [&] {
                std::int64_t sum = 0;
                for (const auto& [first, bytes] : touched) {
                    sum += blocks.contains(first) ? 0 : bytes;
                }
                return sum;
            };
            if (index > start && (total + nbytes > fast / share || room + more() > fast / pinned)) {
                cut.append(nb::slice(nb::int_(start), nb::int_(index), nb::none()));
                start = index;
                total = room = 0;
                blocks.clear();
            }
            total += nbytes;
            room += more();
            blocks.merge(touched);
        }
        cut.append(nb::slice(nb::int_(start), nb::int_(count), nb::none()));
        return cut;
    }

    // Copies rows of a table, whose elements lie side by side, to plain memory or (`write`) from there: the row at
    // `indices[i]` and row i of `memory`. What is touched of a block is acquired at once, and blocks of at most one of
    // `groups` parts of the budget together. Where rows are written each is named once. False, and nothing is done, where
    // it takes Python.
    bool copy_rows(nb::handle table, nb::object name, std::uintptr_t indices, std::size_t count, std::uintptr_t memory,
                   std::int64_t groups, bool write) const {
        const nb::object held = nb::borrow(table);
        Footprint& it = *nb::inst_ptr<Footprint>(table);
        const std::int64_t row_bytes = it.row_bytes();
        if (suspended_ || it.native == nullptr || row_bytes == 0) {
            return false;
        }
        const auto* given = reinterpret_cast<const std::int64_t*>(indices);
        const auto rows = nb::cast<std::int64_t>(it.size[0]);
        std::vector<Row> order(count);
        for (std::size_t at = 0; at < count; ++at) {
            if (given[at] < 0 || given[at] >= rows) {
                return false;
            }
            order[at] = {given[at], at};
        }
        if (!std::ranges::is_sorted(order)) {
            std::ranges::sort(order);
        }
        const std::int64_t itemsize = nb::cast<std::int64_t>(it.dtype.attr("itemsize"));
        const std::int64_t step = nb::cast<std::int64_t>(it.stride[0]) * itemsize;
        std::vector<Use> uses;
        std::vector<std::size_t> ends;  // of the rows that lie in each use
        for (std::size_t first = 0, last = 0; first < count; first = last) {
            uses.clear();
            ends.clear();
            std::int64_t total = 0;
            const std::int64_t limit = nb::cast<std::int64_t>(it.pool.attr("fast")) / groups;  // it may change
            for (; last < count; ++last) {
                const std::int64_t start = it.start + order[last].index * step;
                const std::int64_t block_bytes = it.layout->block_bytes;
                if (!uses.empty() && start / block_bytes == uses.back().start / block_bytes) {
                    uses.back().stop = start + row_bytes;
                    ends.back() = last + 1;
                    continue;
                }
                const std::int64_t more = ((start + row_bytes - 1) / block_bytes - start / block_bytes + 1) * block_bytes;
                if (!uses.empty() && total + more > limit) {
                    break;
                }
                total += more;
                uses.push_back({it.layout, start, start + row_bytes, write ? Mode::write : Mode::read});
                ends.push_back(last + 1);
            }
            const auto bound_uses = [&] {
                nb::list bound;
                for (const Use& use : uses) {
                    bound.append(BoundUse{it.storage, use});
                }
                return bound;
            };
            std::unique_ptr<Pinned> pinned;
            try {
                pinned = pin(it, uses, bound_uses, name, true, false);
            } catch (nb::python_error& error) {
                if (write && first != 0) {
                    error.value().attr("add_note")(
                        nb::str("{} had changed {} rows already; do not simply try it again").attr("format")(name, first));
                }
                throw;
            }
            std::vector<std::uintptr_t> places;
            places.reserve(uses.size());
            for (std::size_t use = 0; use < uses.size(); ++use) {
                places.push_back(it.arena_start + static_cast<std::uintptr_t>(pinned->offset(use) - uses[use].start));
            }
            without_lock_if(static_cast<std::int64_t>(last - first) * row_bytes >= worth_unlocking, [&] {
                std::size_t use = 0;
                for (std::size_t at = first; at < last; ++at) {
                    use += at == ends[use] ? 1 : 0;
                    auto* row = reinterpret_cast<std::byte*>(places[use] +
                                                             static_cast<std::uintptr_t>(it.start + order[at].index * step));
                    auto* plain =
                        reinterpret_cast<std::byte*>(memory) + static_cast<std::int64_t>(order[at].position) * row_bytes;
                    std::memcpy(write ? row : plain, write ? plain : row, static_cast<std::size_t>(row_bytes));
                }
            });
            pinned->release();
        }
        return true;
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
    struct Row {
        std::int64_t index;
        std::size_t position;
        auto operator<=>(const Row&) const = default;
    };
    static constexpr std::int64_t worth_unlocking = 64 << 10;  // bytes
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

    // Operands pinned in the arena, natively or by the pool's Python code, while this lives.
    class Pinned {
    public:
        Pinned(Footprint& any, Granted granted) : driver_(any.native), owner_(any.driver), granted_(std::move(granted)) {}
        Pinned(Footprint& any, nb::object grant)
            : owner_(any.pool), grant_(std::move(grant)), offsets_(grant_.attr("offsets")) {}
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

    // Includes dispatch keys again while it lives: torch excludes them while an operation is handled in Python.
    class Included {
    public:
        Included(const Calls& calls, std::span<const nb::object> keys) : calls_(calls) {
            // All or none of them are left out.
            keys_ = call(calls.is_excluded_, {keys[0].ptr()}).ptr() == Py_True ? keys : std::span<const nb::object>{};
            exclude(Py_False);
        }
        Included(const Included&) = delete;
        Included& operator=(const Included&) = delete;
        ~Included() { exclude(Py_True); }

    private:
        void exclude(PyObject* wanted) const {
            for (const nb::object& key : keys_) {
                call(calls_.set_excluded_, {key.ptr(), wanted});
            }
        }
        const Calls& calls_;
        std::span<const nb::object> keys_;
    };

    // Suspends inference mode while it lives.
    class Recording {
    public:
        explicit Recording(const Calls& calls) : mode_(call(calls.inference_, {Py_False})) { mode_.attr("__enter__")(); }
        Recording(const Recording&) = delete;
        Recording& operator=(const Recording&) = delete;
        ~Recording() { mode_.attr("__exit__")(nb::none(), nb::none(), nb::none()); }

    private:
        nb::object mode_;
    };

    // Null where it is not done here.
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

    bool is_paged(PyObject* object) const { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == paged_.ptr(); }
    bool is_of_other_layout(PyObject* object) const {
        return is_plain_type(object) && !attribute(object, layout_name_).is(strided_);
    }
    bool is_plain_type(PyObject* object) const { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == plain_type_.ptr(); }

    bool all_paged(nb::handle types) const {
        const nb::object items = nb::steal(PySequence_Fast(types.ptr(), "types"));
        if (!items.is_valid()) {
            throw nb::python_error();
        }
        PyObject** item = PySequence_Fast_ITEMS(items.ptr());
        return std::all_of(item, item + PySequence_Fast_GET_SIZE(items.ptr()),
                           [&](PyObject* type) { return type == paged_.ptr(); });
    }

    bool no_modes() const { return PyLong_AsLong(call(modes_, {}).ptr()) == 0; }

    // Null where another thread has just taken the tensor out of its pool.
    nb::object footprint_of(PyObject* tensor) const {
        PyObject* footprint = PyObject_GetAttr(tensor, footprint_name_.ptr());
        if (footprint == nullptr) {
            PyErr_Clear();
        }
        return nb::steal(footprint);
    }

    // The paged arguments; empty unless there are any and each is of another storage of one pool.
    std::optional<Operands> find(const Known& known, nb::handle args, nb::handle kwargs) const {
        Operands operands;
        const auto add = [&](PyObject* tensor, bool write) {
            nb::object footprint = footprint_of(tensor);
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
                if (is_paged(value) ? !add(value, write) : known.strided && is_of_other_layout(value)) {
                    return std::nullopt;
                }
            }
        }
        if (!kwargs.is_none()) {
            PyObject* name = nullptr;
            PyObject* given = nullptr;
            for (Py_ssize_t at = 0; PyDict_Next(kwargs.ptr(), &at, &name, &given) != 0;) {
                if (std::ranges::any_of(tensors_in(given), [&](PyObject* value) { return is_paged(value); })) {
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

    // Brings bytes of storages of one pool, of which `any` is a footprint, into the arena. `bound_uses`: the same uses as
    // objects. Nothing where they do not fit together and (`retried`) Python code knows what to do then.
    template <typename BoundUses>
    std::unique_ptr<Pinned> pin(Footprint& any, std::span<const Use> uses, BoundUses bound_uses, const nb::object& name,
                                bool rows, bool retried) const {
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
            if (error.matches(refusals_)) {  // of the pager; the pool knows what it means
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

    // Null where it is not done here.
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
            pin(operands->first(), uses, [&] { return operands->bound_uses(); }, known.name, false, known.retried);
        if (pinned == nullptr) {
            return {};
        }
        if (pinned->paused()) {  // meanwhile another thread may have moved a tensor into the pool or out of it
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
            operands.items[index].real = real_of(operands.items[index], pinned.offset(index));
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
            std::optional<Included> lazy;
            if (may_be_lazy(operands, args, kwargs)) {
                lazy.emplace(*this, lazy_);
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

    // True if an argument may have lazy values, or a kernel may make a tensor that has. Where all are real numbers in memory,
    // as in most calls, torch's dispatcher is left as it is: that saves eight calls.
    bool may_be_lazy(const Operands& operands, nb::handle args, nb::handle kwargs) const {
        const auto lazy = [&](PyObject* value) {
            const std::span<PyObject*> items = tensors_in(value);
            return !std::ranges::all_of(items, [&](PyObject* item) {
                return is_paged(item) || item == Py_None || PyLong_Check(item) || PyFloat_Check(item) ||
                       (is_plain_type(item) && is_real(item));
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

    // True if a plain tensor's values are real numbers that lie in memory.
    bool is_real(PyObject* tensor) const {
        return call_method(tensor, is_complex_name_).ptr() == Py_False && has_values(tensor);
    }

    // True if a plain tensor's memory holds its values, with no lazy operation pending.
    bool has_values(nb::handle tensor) const {
        return std::ranges::all_of(lazy_names_,
                                   [&](const nb::object& is_lazy) { return call_method(tensor, is_lazy).ptr() == Py_False; });
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

    nb::object real_of(const Operand& operand, std::int64_t place) const {
        const nb::object requires_grad =
            nb::steal(Py_TYPE(requires_grad_.ptr())
                          ->tp_descr_get(requires_grad_.ptr(), operand.tensor.ptr(),
                                         reinterpret_cast<PyObject*>(Py_TYPE(operand.tensor.ptr()))));
        if (!requires_grad.is_valid()) {
            throw nb::python_error();
        }
        Footprint& it = *operand;
        const bool trained = requires_grad.ptr() == Py_True;
        if (it.has_real(place, trained)) {
            return it.real;
        }
        // Made under inference mode it could not be used outside.
        if (it.conj || it.neg || call(infers_, {}).ptr() == Py_True) {
            return operand.footprint.attr("real_at")(place, requires_grad);
        }
        const nb::object start = nb::steal(PyLong_FromLongLong(place));
        const nb::object stop = nb::steal(PyLong_FromLongLong(place + it.stop - it.start));
        const nb::object range = nb::steal(PySlice_New(start.ptr(), stop.ptr(), nullptr));
        const nb::object memory = call(part_of_memory_, {attribute(it.arena, memory_name_).ptr(), range.ptr()});
        const nb::object empty =
            call(attribute(call(attribute(it.arena, typed_name_), {it.dtype.ptr()}), new_empty_name_), {zero_.ptr()});
        nb::object real = call(set_memory_, {empty.ptr(), memory.ptr(), zero_.ptr(), it.size.ptr(), it.stride.ptr()});
        if (trained) {  // some kernels look at it, to compute what backward will need
            call_method(real, train_name_);
        }
        it.keep_real(place, trained, real);
        return real;
    }

    // Converts a result so that no plain tensor that the program gets aliases the arena.
    nb::object seen_by_program(nb::object result, const Operands& operands) const {
        const Footprint& first = operands.first();
        if (result.is_none() || is_plain(result, first)) {
            return result;
        }
        for (const Operand& operand : operands.items) {
            if (result.is(operand.real)) {
                return operand.tensor;
            }
        }
        PyObject* made = result.ptr();
        const std::span<PyObject*> items = tensors_in(made);
        if (items.data() != &made && std::ranges::all_of(items, [&](PyObject* one) { return is_plain(one, first); })) {
            return result;
        }
        nb::list pairs;
        for (const Operand& operand : operands.items) {
            pairs.append(nb::make_tuple(operand.tensor, operand.real));
        }
        return wrap_results_(pairs, first.arena, result);
    }

    bool is_plain(nb::handle result, const Footprint& any) const {
        if (!is_plain_type(result.ptr()) || !attribute(result, layout_name_).is(strided_)) {
            return false;
        }
        const auto address = nb::cast<std::uintptr_t>(call_method(result, address_name_));
        if (address != 0) {
            return address < any.arena_start || address >= any.arena_stop;
        }
        return !nb::cast<bool>(any.arena.attr("aliases")(result));  // empty
    }

    nb::object view(const Known& known, nb::handle args, nb::handle kwargs) const {
        const Py_ssize_t length = PyTuple_GET_SIZE(args.ptr());
        if (length == 0 || !is_paged(PyTuple_GET_ITEM(args.ptr(), 0)) ||
            (!kwargs.is_none() && PyDict_GET_SIZE(kwargs.ptr()) != 0)) {
            return {};
        }
        const nb::object source = footprint_of(PyTuple_GET_ITEM(args.ptr(), 0));
        if (!source.is_valid()) {
            return {};
        }
        const Footprint& it = *nb::inst_ptr<Footprint>(source);
        if (known.kind == Kind::alias) {
            return wrap(source, false);
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
        if (reinterpret_cast<PyObject*>(Py_TYPE(found)) == footprint_type_.ptr()) {
            return wrap(kept, false);
        }
        nb::list views;
        for (const nb::handle one : nb::iter(kept)) {
            views.append(wrap(one, false));
        }
        return views;
    }

    nb::object decompose(const Known& known, nb::handle args, nb::handle kwargs) const {
        const auto length = static_cast<std::size_t>(PyTuple_GET_SIZE(args.ptr()));
        std::vector<PyObject*> values = {composite_.ptr()};
        values.insert(values.end(), &PyTuple_GET_ITEM(args.ptr(), 0), &PyTuple_GET_ITEM(args.ptr(), 0) + length);
        // Run our rules before autograd for the operators inside, as when torch decomposes this operator itself.
        const Included lazy_and_rules(*this, composing_);
        std::optional<Included> marked;
        if (known.kind == Kind::composed && call(infers_, {}).ptr() == Py_True) {
            // A plain tensor's views are marked as views here, too, and require a gradient where it does. What multiplies
            // matrices looks at that and picks another kernel, with other bits.
            marked.emplace(*this, std::span(&views_, 1));
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
    nb::object plain_type_, paged_, footprint_type_, strided_, requires_grad_;
    nb::object set_memory_, part_of_memory_, make_wrapper_, refuse_address_, set_conj_, set_neg_, modes_, infers_, is_excluded_,
        set_excluded_;
    std::array<nb::object, 3> lazy_;
    std::array<nb::object, 4> composing_;  // keys to open while we decompose an operator: lazy keys and the key of our rules
    nb::object views_, composite_, inference_;
    nb::object dispatch_, wrap_results_, explain_, refusals_, budget_error_;
    nb::object wrapper_names_ = nb::make_tuple("strides", "storage_offset", "dtype", "device", "requires_grad");
    nb::object footprint_name_ = interned("_footprint");
    nb::object layout_name_ = interned("layout");
    nb::object address_name_ = interned("data_ptr");
    nb::object is_complex_name_ = interned("is_complex");
    nb::object grad_name_ = interned("grad");
    nb::object device_name_ = interned("device");
    nb::object trained_name_ = interned("requires_grad");
    nb::object is_contiguous_name_ = interned("is_contiguous");
    nb::object dtype_name_ = interned("dtype");
    nb::object size_name_ = interned("size");
    nb::object stride_name_ = interned("stride");
    nb::object memory_name_ = interned("storage");
    nb::object typed_name_ = interned("typed");
    nb::object new_empty_name_ = interned("new_empty");
    nb::object train_name_ = interned("requires_grad_");
    std::array<nb::object, 3> lazy_names_ = {interned("is_conj"), interned("is_neg"), interned("_is_zerotensor")};
    std::array<nb::object, 2> other_names_ = {interned("is_nested"), interned("is_quantized")};
    nb::object zero_ = nb::steal(PyLong_FromLong(0));
    nb::object closed_name_ = interned("closed");
};

}  // namespace

void bind_calls(nb::module_& m) {
    nb::class_<Calls> calls(m, "Calls", "Runs operations on paged tensors.");
    nb::enum_<Calls::Kind>(calls, "Kind", "What an operator does.", nb::is_arithmetic())
        .value("COMPUTE", Calls::Kind::compute)
        .value("VIEW", Calls::Kind::view)
        .value("ALIAS", Calls::Kind::alias)
        .value("COMPOSED", Calls::Kind::composed)
        .value("COMPOSED_OF_VIEWS", Calls::Kind::composed_of_views);
    calls.def(nb::init<>())
        .def("bind", &Calls::bind, nb::arg("torch"), nb::arg("paged"), nb::arg("footprint"), nb::arg("hooks"))
        .def("learn", &Calls::learn, nb::arg("operation"), nb::arg("call"), nb::arg("name"), nb::arg("kind"), nb::kw_only(),
             nb::arg("writes") = 0, nb::arg("retried") = false, nb::arg("ruled") = false, nb::arg("strided") = false)
        .def("dispatch", &Calls::dispatch, nb::arg("func"), nb::arg("types"), nb::arg("args") = nb::tuple(),
             nb::arg("kwargs").none() = nb::none())
        .def("compute", &Calls::compute_or_leave, nb::arg("func"), nb::arg("args"), nb::arg("kwargs"))
        .def("copy_rows", &Calls::copy_rows, nb::arg("table"), nb::arg("op"), nb::arg("indices"), nb::arg("count"),
             nb::arg("memory"), nb::arg("groups"), nb::arg("write"))
        .def("page_gradient", &Calls::page_gradient, nb::arg("leaf"), nb::arg("op"), nb::arg("copy"))
        .def("stretches", &Calls::stretches, nb::arg("lists"), nb::arg("count"), nb::arg("share"), nb::arg("pinned"))
        .def("wrap", &Calls::wrap, nb::arg("footprint"), nb::arg("requires_grad"))
        .def("suspend", &Calls::suspend);
}
