// The memory of a region, as an object with the buffer protocol. It holds the ports that it reads from and writes to.
#include <algorithm>

#include "bindings/bindings.hpp"
#include "bindings/interpreter_exit.hpp"
#include "core/port.hpp"
#include "region/region.hpp"

using farpool::Port;
using farpool::ReleasedLock;
using farpool::region::Advice;
using farpool::region::Counters;
using farpool::region::Extent;
using farpool::region::Page;
using farpool::region::page_nbytes;
using farpool::region::Region;
using farpool::region::Settings;

namespace {

class RegionMemory {
public:
    explicit RegionMemory(Settings settings) : region_(std::make_unique<Region>(std::move(settings))) {}
    ~RegionMemory() {
        if (region_ && !region_->ours()) {
            (void)region_.release();  // its threads do not run in a forked child
        } else if (region_) {
            const ReleasedLock released;
            region_.reset();
        }
    }
    RegionMemory(const RegionMemory&) = delete;
    RegionMemory& operator=(const RegionMemory&) = delete;

    Region& open() const {
        if (!region_) {
            throw nb::value_error("the region is closed");
        }
        if (!region_->ours()) {
            throw nb::value_error("the region belongs to the parent process: a forked child has no access to it");
        }
        return *region_;
    }
    bool is_open() const { return region_ != nullptr; }

    void grow(std::size_t nbytes, const std::vector<std::tuple<nb::object, std::uint64_t, Page, std::string, bool>>& places) {
        const Call call(*this);
        std::vector<Extent> extents;
        for (const auto& [port, offset, count, tier, checked] : places) {
            extents.push_back({&nb::cast<Port&>(port), offset, count, tier, checked});
        }
        for (const auto& place : places) {
            ports.append(std::get<0>(place));
        }
        const auto pages = static_cast<Page>((nbytes + page_nbytes - 1) / page_nbytes);
        if (pages > call.region.pages()) {
            const ReleasedLock released;
            call.region.grow(pages, std::move(extents));
        }
        nbytes_ = nbytes;
    }
    Page shrink(std::size_t nbytes) {
        check_unused();
        const Call call(*this);
        nbytes_ = nbytes;
        const ReleasedLock released;
        return call.region.shrink(static_cast<Page>((nbytes + page_nbytes - 1) / page_nbytes));
    }
    void close() {
        open();
        check_unused();
        const std::unique_ptr<Region> ended = std::move(region_);
        {
            const ReleasedLock released;
            ended->close();
        }
        ports.clear();
    }

    std::size_t nbytes() const { return nbytes_; }

    // One use of the region without the interpreter lock, during which it is not closed.
    struct Call {
        explicit Call(RegionMemory& memory) : region(memory.open()), uses(memory.uses) { ++uses; }
        ~Call() { --uses; }
        Call(const Call&) = delete;
        Call& operator=(const Call&) = delete;

        Region& region;
        Py_ssize_t& uses;
    };

    nb::list ports;       // for the collector and the extents
    Py_ssize_t uses = 0;  // buffers that programs hold, and calls that run; the interpreter lock guards it

private:
    void check_unused() const {
        if (uses > 0) {
            PyErr_Format(PyExc_BufferError, "the region is in use by %zd buffers and calls", uses);
            throw nb::python_error();
        }
    }

    std::unique_ptr<Region> region_;
    std::size_t nbytes_ = 0;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    RegionMemory* memory = nb::inst_ptr<RegionMemory>(self);
    try {
        Region& region = memory->open();
        if (PyBuffer_FillInfo(view, self, region.data(), static_cast<Py_ssize_t>(memory->nbytes()), 0, flags) != 0) {
            return -1;
        }
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_BufferError, error.what());
        view->obj = nullptr;
        return -1;
    }
    ++memory->uses;
    return 0;
}

void release_buffer(PyObject* self, Py_buffer*) { --nb::inst_ptr<RegionMemory>(self)->uses; }

int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (nb::inst_ready(self)) {
        Py_VISIT(nb::inst_ptr<RegionMemory>(self)->ports.ptr());
    }
    return 0;
}

PyType_Slot region_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                              {Py_bf_releasebuffer, reinterpret_cast<void*>(release_buffer)},
                              {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                              {0, nullptr}};

nb::dict counters(const RegionMemory& self) {
    const Counters now = self.open().counters();
    nb::dict found;
    const std::pair<const char*, std::uint64_t> all[] = {
        {"faults", now.faults},
        {"reused", now.reused},
        {"write_faults", now.write_faults},
        {"demand_pages", now.demand_pages},
        {"ahead_pages", now.ahead_pages},
        {"ahead_used", now.ahead_used},
        {"ahead_wasted", now.ahead_wasted},
        {"evicted_pages", now.evicted_pages},
        {"saved_pages", now.saved_pages},
        {"read_bytes", now.read_bytes},
        {"written_bytes", now.written_bytes},
        {"waits_for_room", now.waits_for_room},
        {"lost_pages", now.lost_pages},
        {"resident_bytes", now.resident_pages * page_nbytes},
        {"peak_bytes", now.peak_pages * page_nbytes},
        {"backed_bytes", now.backed_bytes},
    };
    for (const auto& [name, value] : all) {
        found[name] = value;
    }
    return found;
}

// Calls a method of the region for a range of pages, without the interpreter lock.
template <auto Method, typename... More>
auto on_pages(RegionMemory& self, Page first, Page count, More... more) {
    const RegionMemory::Call call(self);
    const ReleasedLock released;
    return (call.region.*Method)(first, count, more...);
}

void advise(RegionMemory& self, Page first, Page count, int advice) {
    on_pages<&Region::advise>(self, first, count, static_cast<Advice>(std::clamp(advice, 0, 2)));
}

}  // namespace

void bind_region(nb::module_& m) {
    nb::class_<RegionMemory>(
        m, "RegionMemory", nb::type_slots(region_slots),
        R"(Memory whose pages are in lower tiers while the program does not use them. Supports the buffer protocol (writable,
format ``B``). Pages have 4096 bytes.)")
        .def(
            "__init__",
            [](RegionMemory* self, std::string name, Page most, Page budget, Page longest, unsigned workers, double timeout,
               std::string policy) {
                new (self) RegionMemory({.name = std::move(name),
                                         .most = most,
                                         .budget = budget,
                                         .longest = longest,
                                         .workers = workers,
                                         .timeout = timeout,
                                         .policy = std::move(policy)});
            },
            nb::arg("name"), nb::kw_only(), nb::arg("most"), nb::arg("budget"), nb::arg("longest"), nb::arg("workers"),
            nb::arg("timeout"), nb::arg("policy") = "sieve")
        .def("grow", &RegionMemory::grow, nb::arg("nbytes"), nb::arg("places"),
             nb::sig("def grow(self, nbytes: int, places: collections.abc.Sequence[tuple[Port, int, int, str, bool]]) -> None"),
             "Grow to `nbytes` bytes. Each place is room below: port, offset, pages, name of the tier, if its bytes are "
             "verified.")
        .def("shrink", &RegionMemory::shrink, nb::arg("nbytes"),
             "Shrink to `nbytes` bytes; return the number of pages for which there is still room below.")
        .def("save", on_pages<&Region::sync>, nb::arg("first"), nb::arg("count"),
             "Return when all bytes written before the call are below.")
        .def("set_reading", advise, nb::arg("first"), nb::arg("count"), nb::arg("advice"),
             "Set how the program reads pages: 0 normally, 1 on and on, 2 at random.")
        .def("will_need", on_pages<&Region::will_need>, nb::arg("first"), nb::arg("count"))
        .def("dont_need", on_pages<&Region::dont_need>, nb::arg("first"), nb::arg("count"))
        .def("pin", on_pages<&Region::pin>, nb::arg("first"), nb::arg("count"),
             "Load pages and keep them; return False if more than half of the budget would be pinned.")
        .def("unpin", on_pages<&Region::unpin>, nb::arg("first"), nb::arg("count"))
        .def("counters", counters, nb::sig("def counters(self) -> dict[str, int]"))
        .def("unmap", &RegionMemory::close, "Unmap the memory. BufferError if it is in use.")
        .def_prop_ro(
            "uses", [](const RegionMemory& self) { return self.uses; },
            "Number of buffers that programs hold, and of calls that run.")
        .def_prop_ro("is_open", &RegionMemory::is_open)
        .def_prop_ro("nbytes", &RegionMemory::nbytes);
}
