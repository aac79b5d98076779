// Operations on paged tensors, as far as they need no Python: the hot path of every step.
//
// torch hands each operation that has a paged argument to `Calls::dispatch`. Most have a few, each of another storage of one
// pool, and ran before: their operands are pinned, real tensors over the arena (made before, if they lie where they lay) stand
// for them while the operator runs, and they are let go. Views only pair a geometry that was worked out before with a new
// tensor object. Whatever is not like that is handled in Python, by `farpool.tensors.dispatch`, which also tells this file
// which operators it may run.
//
// Tensors are known here as Python objects only: the core is built without torch.
#include <array>
#include <unordered_map>

#include "bound_driver.hpp"

using farpool::pager::Layout;
using farpool::pager::Mode;
using farpool::pager::Use;

namespace {

// What a paged tensor touches of its storage, and what was made of that before. Nothing of it changes but what it remembers.
struct Footprint {
    nb::object storage;
    nb::object pool;
    nb::object driver;
    BoundDriver* native;  // null where the driver is a Python object
    std::shared_ptr<const Layout> layout;
    nb::object arena;  // its views
    nb::object device;
    std::uintptr_t arena_start;
    std::uintptr_t arena_stop;
    nb::object dtype;
    nb::tuple size;
    nb::tuple stride;
    std::int64_t offset;  // in elements, from the storage's start
    bool conj;
    bool neg;
    std::int64_t start = 0;  // bytes of the storage that the elements touch
    std::int64_t stop = 0;
    nb::object reader = nb::none();
    nb::object writer = nb::none();
    // The real tensor made last, whether it requires a gradient, and where in the arena it lies.
    nb::object real = nb::none();
    bool trained = false;
    std::int64_t place = farpool::pager::nowhere;
    nb::dict views = nb::dict();

    Use use(bool write) const { return {layout, start, stop, write ? Mode::write : Mode::read}; }
    bool has_real(std::int64_t at, bool requires_grad) const {
        return place == at && trained == requires_grad && !real.is_none();
    }
    void forget_real() { real = nb::none(); }
    // The same bytes as an object that Python code passes on.
    const nb::object& bound_use(bool write) {
        nb::object& bound = write ? writer : reader;
        if (bound.is_none()) {
            bound = nb::cast(BoundUse{storage, use(write)});
        }
        return bound;
    }

    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        if (nb::inst_ready(self)) {
            const Footprint& it = *nb::inst_ptr<Footprint>(self);
            for (const nb::object* held : {&it.storage, &it.pool, &it.driver, &it.arena, &it.reader, &it.writer, &it.real,
                                           static_cast<const nb::object*>(&it.views)}) {
                Py_VISIT(held->ptr());
            }
        }
        return 0;
    }
    static int clear(PyObject* self) {
        if (nb::inst_ready(self)) {
            Footprint& it = *nb::inst_ptr<Footprint>(self);
            it.native = nullptr;
            for (nb::object* held : {&it.storage, &it.pool, &it.driver, &it.arena, &it.reader, &it.writer, &it.real}) {
                *held = nb::none();
            }
            it.views.clear();
        }
        return 0;
    }
};

PyType_Slot footprint_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(Footprint::traverse)},
                                 {Py_tp_clear, reinterpret_cast<void*>(Footprint::clear)},
                                 {0, nullptr}};

void make_footprint(Footprint* self, nb::object storage, nb::object arena, nb::object dtype, nb::handle size, nb::handle stride,
                    std::int64_t offset, bool conj, bool neg) {
    nb::object pool = storage.attr("pool");
    nb::object driver = nb::getattr(pool, "driver", nb::none());  // tests have other pools
    BoundDriver* native = nullptr;
    nb::try_cast(driver, native);
    auto layout = nb::cast<std::shared_ptr<const Layout>>(storage.attr("layout"));
    nb::object device = arena.attr("device");
    const auto arena_start = nb::cast<std::uintptr_t>(arena.attr("start"));
    const auto arena_stop = nb::cast<std::uintptr_t>(arena.attr("stop"));
    const auto itemsize = nb::cast<std::int64_t>(dtype.attr("itemsize"));
    new (self) Footprint{std::move(storage), std::move(pool),  std::move(driver), native,           std::move(layout),
                         std::move(arena),   std::move(device), arena_start,      arena_stop,       std::move(dtype),
                         nb::tuple(size),    nb::tuple(stride), offset,           conj,             neg};
    std::int64_t reach = 0;
    for (std::size_t dim = 0; dim < self->size.size(); ++dim) {
        const auto extent = nb::cast<std::int64_t>(self->size[dim]);
        if (extent == 0) {
            return;
        }
        reach += (extent - 1) * nb::cast<std::int64_t>(self->stride[dim]);
    }
    self->start = offset * itemsize;
    self->stop = (offset + reach + 1) * itemsize;
}

nb::object call(const nb::object& function, std::initializer_list<PyObject*> arguments) {
    PyObject* result = PyObject_Vectorcall(function.ptr(), std::data(arguments), std::size(arguments), nullptr);
    if (result == nullptr) {
        throw nb::python_error();
    }
    return nb::steal(result);
}

nb::object call_method(nb::handle object, const nb::object& name) {
    PyObject* result = PyObject_CallMethodNoArgs(object.ptr(), name.ptr());
    if (result == nullptr) {
        throw nb::python_error();
    }
    return nb::steal(result);
}

nb::object attribute(nb::handle object, const nb::object& name) {
    PyObject* result = PyObject_GetAttr(object.ptr(), name.ptr());
    if (result == nullptr) {
        throw nb::python_error();
    }
    return nb::steal(result);
}

class Calls {
public:
    // What an operator does that may be run here.
    enum class Kind : int {
        compute = 0,  // runs on real tensors
        view = 1,     // views its first argument; which part, the others say, which are no tensors
        alias = 2,    // another tensor over the same bytes
    };

    // `hooks`: what Python code does for this class; see `farpool.tensors.calls`.
    void bind(nb::handle torch, nb::type_object paged, nb::type_object footprint, nb::object hooks) {
        const nb::object core = torch.attr("_C");
        plain_type_ = torch.attr("Tensor");
        strided_ = torch.attr("strided");
        requires_grad_ = plain_type_.attr("requires_grad");
        make_wrapper_ = plain_type_.attr("_make_wrapper_subclass");
        refuse_address_ = core.attr("_set_throw_on_mutable_data_ptr");
        set_conj_ = core.attr("_set_conj");
        set_neg_ = core.attr("_set_neg");
        modes_ = core.attr("_len_torch_dispatch_stack");
        infers_ = torch.attr("is_inference_mode_enabled");
        is_excluded_ = core.attr("_dispatch_tls_is_dispatch_key_excluded");
        set_excluded_ = core.attr("_dispatch_tls_set_dispatch_key_excluded");
        const nb::object keys = core.attr("DispatchKey");
        lazy_ = {keys.attr("Conjugate"), keys.attr("Negative"), keys.attr("ZeroTensor")};
        paged_ = std::move(paged);
        footprint_type_ = std::move(footprint);
        dispatch_ = hooks.attr("dispatch");
        over_ = hooks.attr("over");
        wrap_results_ = hooks.attr("wrap_results");
        explain_ = hooks.attr("explain");
        refusals_ = hooks.attr("refusals");
        budget_error_ = hooks.attr("budget_error");
    }

    // From now on `dispatch` runs this operator, of which `call` is the callable inside. `writes`: bits of the positions of
    // arguments that it changes. `retried`: Python code knows what to do where the operands do not fit together.
    void learn(nb::object operation, nb::object call, nb::object name, Kind kind, std::uint64_t writes, bool retried) {
        PyObject* key = operation.ptr();
        known_.insert_or_assign(key, Known{std::move(operation), std::move(call), std::move(name), kind, writes, retried});
    }

    nb::object dispatch(nb::handle func, nb::handle types, nb::handle args, nb::handle kwargs) {
        if (const auto found = known_.find(func.ptr());
            found != known_.end() && !suspended_ && PyTuple_CheckExact(args.ptr()) && all_paged(types) && no_modes()) {
            const Known known = found->second;  // other threads may learn while this one computes
            nb::object result = known.kind == Kind::compute ? compute(known, func, args, kwargs) : view(known, args, kwargs);
            if (result.is_valid()) {
                return result;
            }
        }
        return call(dispatch_, {func.ptr(), types.ptr(), args.ptr(), kwargs.ptr()});
    }

    // A paged tensor that views what a footprint says.
    nb::object wrap(nb::handle footprint, bool requires_grad) {
        const Footprint& it = *nb::inst_ptr<Footprint>(footprint);
        const nb::object offset = nb::steal(PyLong_FromLongLong(it.offset));
        const std::array<PyObject*, 7> arguments = {paged_.ptr(),  it.size.ptr(),   it.stride.ptr(),
                                                    offset.ptr(),  it.dtype.ptr(),  it.device.ptr(),
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

    // Whether everything goes to Python: debug mode looks at each operation.
    void suspend() { suspended_ = true; }

private:
    struct Known {
        nb::object operation;
        nb::object call;
        nb::object name;
        Kind kind;
        std::uint64_t writes;
        bool retried;
    };
    struct Operand {
        Py_ssize_t position;
        nb::object tensor;
        nb::object footprint;
        bool write;
        nb::object real;

        Footprint& operator*() const { return *nb::inst_ptr<Footprint>(footprint); }
    };
    static constexpr std::size_t most_operands = 8;
    // The paged arguments of an operation.
    struct Operands {
        std::array<Operand, most_operands> items;
        std::size_t count = 0;

        auto begin() { return items.begin(); }
        auto end() { return items.begin() + static_cast<std::ptrdiff_t>(count); }
        Footprint& first() { return *items[0]; }
        nb::list bound_uses() {
            nb::list uses;
            for (const Operand& operand : *this) {
                uses.append((*operand).bound_use(operand.write));
            }
            return uses;
        }
    };

    // Operands pinned in the arena, natively or by the pool's Python code, until this goes.
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

    // Lets operations conjugate and negate lazily, as they do for plain tensors: while one is handled in Python torch has
    // switched that off, and whatever is computed would read the values of a conjugated tensor as if it were none.
    class LazyBits {
    public:
        explicit LazyBits(const Calls& calls) : calls_(calls) {
            excluded_ = ::call(calls.is_excluded_, {calls.lazy_[0].ptr()}).ptr() == Py_True;
            set(false);
        }
        LazyBits(const LazyBits&) = delete;
        LazyBits& operator=(const LazyBits&) = delete;
        ~LazyBits() { set(true); }

    private:
        void set(bool wanted) const {
            for (std::size_t index = 0; excluded_ && index < calls_.lazy_.size(); ++index) {
                ::call(calls_.set_excluded_, {calls_.lazy_[index].ptr(), wanted ? Py_True : Py_False});
            }
        }
        const Calls& calls_;
        bool excluded_ = false;
    };

    nb::object call(const nb::object& function, std::initializer_list<PyObject*> arguments) const {
        return ::call(function, arguments);
    }

    bool is_paged(PyObject* object) const { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == paged_.ptr(); }
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

    // Whether all are found that there are, few, and each of another storage of one pool.
    bool find(const Known& known, nb::handle args, nb::handle kwargs, Operands& operands) const {
        const Py_ssize_t length = PyTuple_GET_SIZE(args.ptr());
        for (Py_ssize_t position = 0; position < length; ++position) {
            PyObject* value = PyTuple_GET_ITEM(args.ptr(), position);
            if (!is_paged(value)) {
                continue;
            }
            nb::object footprint = footprint_of(value);
            if (!footprint.is_valid() || operands.count == most_operands) {
                return false;
            }
            const Footprint& it = *nb::inst_ptr<Footprint>(footprint);
            if (it.start == it.stop || (operands.count != 0 && !it.pool.is(operands.first().pool)) ||
                std::any_of(operands.begin(), operands.end(),
                            [&](const Operand& other) { return it.storage.is((*other).storage); })) {
                return false;
            }
            const bool write = position < 64 && (known.writes >> position & 1) != 0;
            operands.items[operands.count++] = {position, nb::borrow(value), std::move(footprint), write, {}};
        }
        if (kwargs.is_valid() && !kwargs.is_none()) {
            PyObject* name = nullptr;
            PyObject* value = nullptr;
            for (Py_ssize_t at = 0; PyDict_Next(kwargs.ptr(), &at, &name, &value) != 0;) {
                if (is_paged(value)) {
                    return false;
                }
            }
        }
        return operands.count != 0;
    }

    // Brings the operands into the arena. Nothing where they do not fit and Python code knows what to do then.
    std::unique_ptr<Pinned> pin(const Known& known, Operands& operands) const {
        Footprint& first = operands.first();
        try {
            std::optional<Granted> granted;
            if (first.native != nullptr) {
                std::array<Use, most_operands> uses;
                for (std::size_t index = 0; index < operands.count; ++index) {
                    uses[index] = (*operands.items[index]).use(operands.items[index].write);
                }
                granted = first.native->acquire({uses.data(), operands.count}, known.name, false, false);
            }
            if (granted) {
                return std::make_unique<Pinned>(first, std::move(*granted));
            }
            return std::make_unique<Pinned>(first, first.pool.attr("acquire")(operands.bound_uses(), known.name));
        } catch (nb::python_error& error) {
            nb::object refusal = nb::borrow(error.value());
            if (error.matches(refusals_)) {  // of the pager; the pool knows what it means
                refusal = first.pool.attr("refusal")(refusal, operands.bound_uses(), known.name);
            }
            if (known.retried && nb::isinstance(refusal, budget_error_)) {
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
        Operands operands;
        if (!find(known, args, kwargs, operands)) {
            return {};
        }
        const std::unique_ptr<Pinned> pinned = pin(known, operands);
        if (pinned == nullptr) {
            return {};
        }
        nb::object result;
        try {
            result = run(known, args, kwargs, operands, *pinned);
        } catch (nb::python_error& error) {
            for (Operand& operand : operands) {
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
        const auto length = static_cast<std::size_t>(PyTuple_GET_SIZE(args.ptr()));
        std::array<PyObject*, 16> few;
        std::vector<PyObject*> many;
        PyObject** values = few.data();
        if (length > few.size()) {
            many.resize(length);
            values = many.data();
        }
        std::copy_n(&PyTuple_GET_ITEM(args.ptr(), 0), length, values);
        for (std::size_t index = 0; index < operands.count; ++index) {
            Operand& operand = operands.items[index];
            operand.real = real_of(operand, pinned.offset(index));
            values[operand.position] = operand.real.ptr();
        }
        nb::object result;
        {
            const LazyBits lazy(*this);
            result = nb::steal(PyObject_VectorcallDict(known.call.ptr(), values, length, kwargs.is_none() ? nullptr : kwargs.ptr()));
            if (!result.is_valid()) {
                throw nb::python_error();
            }
        }
        for (Operand& operand : operands) {
            // A real tensor whose geometry the operation has changed is not used again.
            if (operand.write && !(call_method(operand.real, size_name_).equal((*operand).size) &&
                                   call_method(operand.real, stride_name_).equal((*operand).stride))) {
                (*operand).forget_real();
            }
        }
        return seen_by_program(std::move(result), operands);
    }

    nb::object real_of(const Operand& operand, std::int64_t place) const {
        const nb::object requires_grad = nb::steal(Py_TYPE(requires_grad_.ptr())->tp_descr_get(
            requires_grad_.ptr(), operand.tensor.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(operand.tensor.ptr()))));
        if (!requires_grad.is_valid()) {
            throw nb::python_error();
        }
        if ((*operand).has_real(place, requires_grad.ptr() == Py_True)) {
            return (*operand).real;
        }
        return operand.footprint.attr("real_at")(place, requires_grad);
    }

    // No plain tensor that the program gets aliases the arena.
    nb::object seen_by_program(nb::object result, Operands& operands) const {
        const Footprint& first = operands.first();
        if (is_plain(result, first)) {
            return result;
        }
        for (const Operand& operand : operands) {
            if (result.is(operand.real)) {
                return operand.tensor;
            }
        }
        if (PyTuple_CheckExact(result.ptr())) {
            PyObject** item = &PyTuple_GET_ITEM(result.ptr(), 0);
            if (std::all_of(item, item + PyTuple_GET_SIZE(result.ptr()), [&](PyObject* one) { return is_plain(one, first); })) {
                return result;
            }
        }
        nb::list pairs;
        for (const Operand& operand : operands) {
            pairs.append(nb::make_tuple(operand.tensor, operand.real));
        }
        return wrap_results_(pairs, result);
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
        if (length == 0 || !is_paged(PyTuple_GET_ITEM(args.ptr(), 0)) || (!kwargs.is_none() && PyDict_GET_SIZE(kwargs.ptr()) != 0)) {
            return {};
        }
        const nb::object source = footprint_of(PyTuple_GET_ITEM(args.ptr(), 0));
        if (!source.is_valid()) {
            return {};
        }
        const Footprint& it = *nb::inst_ptr<Footprint>(source);
        if (known.kind == Kind::alias) {
            return wrapped(source);
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
            return wrapped(kept);
        }
        nb::list views;
        for (const nb::handle one : nb::iter(kept)) {
            views.append(wrapped(one));
        }
        return views;
    }

    nb::object wrapped(nb::handle footprint) const {
        // As an inference tensor it could be no view of a tensor that was made outside; see `over`.
        return call(infers_, {}).ptr() == Py_True ? over_(footprint) : const_cast<Calls*>(this)->wrap(footprint, false);
    }

    // What identifies a view of one tensor: the operator, with the numbers that it is given.
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
    nb::object make_wrapper_, refuse_address_, set_conj_, set_neg_, modes_, infers_, is_excluded_, set_excluded_;
    std::array<nb::object, 3> lazy_;
    nb::object dispatch_, over_, wrap_results_, explain_, refusals_, budget_error_;
    nb::object wrapper_names_ = nb::make_tuple("strides", "storage_offset", "dtype", "device", "requires_grad");
    nb::object footprint_name_ = nb::steal(PyUnicode_InternFromString("_footprint"));
    nb::object size_name_ = nb::steal(PyUnicode_InternFromString("size"));
    nb::object stride_name_ = nb::steal(PyUnicode_InternFromString("stride"));
    nb::object layout_name_ = nb::steal(PyUnicode_InternFromString("layout"));
    nb::object address_name_ = nb::steal(PyUnicode_InternFromString("data_ptr"));
    nb::object closed_name_ = nb::steal(PyUnicode_InternFromString("closed"));
};

}  // namespace

void bind_calls(nb::module_& m) {
    nb::class_<Footprint>(m, "Footprint", "A geometry over a storage.", nb::type_slots(footprint_slots), nb::is_weak_referenceable())
        .def("__init__", make_footprint, nb::arg("storage"), nb::arg("arena"), nb::arg("dtype"), nb::arg("size"), nb::arg("stride"),
             nb::arg("offset"), nb::kw_only(), nb::arg("conj") = false, nb::arg("neg") = false)
        .def_ro("storage", &Footprint::storage)
        .def_ro("arena", &Footprint::arena)
        .def_ro("dtype", &Footprint::dtype)
        .def_ro("size", &Footprint::size)
        .def_ro("stride", &Footprint::stride)
        .def_ro("offset", &Footprint::offset)
        .def_ro("conj", &Footprint::conj)
        .def_ro("neg", &Footprint::neg)
        .def_ro("start", &Footprint::start)
        .def_ro("stop", &Footprint::stop)
        .def_ro("views", &Footprint::views)
        .def("reader", [](Footprint& self) { return self.bound_use(false); })
        .def("writer", [](Footprint& self) { return self.bound_use(true); })
        .def(
            "kept_real",
            [](Footprint& self, std::int64_t place, bool requires_grad) {
                return self.has_real(place, requires_grad) ? self.real : nb::none();
            },
            nb::arg("place"), nb::arg("requires_grad"))
        .def(
            "keep_real",
            [](Footprint& self, std::int64_t place, bool requires_grad, nb::object real) {
                self.place = place;
                self.trained = requires_grad;
                self.real = std::move(real);
            },
            nb::arg("place"), nb::arg("requires_grad"), nb::arg("real"))
        .def("forget_real", &Footprint::forget_real);

    nb::class_<Calls> calls(m, "Calls", "Runs operations on paged tensors.");
    nb::enum_<Calls::Kind>(calls, "Kind", "What an operator does.", nb::is_arithmetic())
        .value("COMPUTE", Calls::Kind::compute)
        .value("VIEW", Calls::Kind::view)
        .value("ALIAS", Calls::Kind::alias);
    calls.def(nb::init<>())
        .def("bind", &Calls::bind, nb::arg("torch"), nb::arg("paged"), nb::arg("footprint"), nb::arg("hooks"))
        .def("learn", &Calls::learn, nb::arg("operation"), nb::arg("call"), nb::arg("name"), nb::arg("kind"), nb::kw_only(),
             nb::arg("writes") = 0, nb::arg("retried") = false)
        .def("dispatch", &Calls::dispatch, nb::arg("func"), nb::arg("types"), nb::arg("args") = nb::tuple(),
             nb::arg("kwargs").none() = nb::none())
        .def("wrap", &Calls::wrap, nb::arg("footprint"), nb::arg("requires_grad"))
        .def("suspend", &Calls::suspend);
}
