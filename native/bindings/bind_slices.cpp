#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "bindings/slices.hpp"
#include "core/error.hpp"

Rows::Rows(const nb::list& memories, const std::vector<std::size_t>& row_nbytes) {
    if (memories.size() != row_nbytes.size() || memories.size() == 0) {
        farpool::fail_value(std::to_string(memories.size()) + " buffers and " + std::to_string(row_nbytes.size()) +
                            " sizes of their rows: expected as many, and at least one");
    }
    rows_ = std::numeric_limits<std::size_t>::max();
    for (std::size_t number = 0; number < memories.size(); ++number) {
        nb::object whole = nb::steal(PyMemoryView_FromObject(memories[number].ptr()));
        if (!whole.is_valid()) {
            throw nb::python_error();
        }
        const Memory& own = memories_.emplace_back(whole.attr("cast")("B"), row_nbytes[number]);
        if (own.row_nbytes == 0) {
            farpool::fail_value("rows of buffer " + std::to_string(number) + " have 0 bytes, expected at least 1");
        }
        rows_ = std::min(rows_, static_cast<std::size_t>(own.view->len) / own.row_nbytes);
        readonly_ = readonly_ || own.view->readonly != 0;
    }
}

nb::object Rows::view(std::size_t number, std::size_t start, std::size_t stop) const {
    const Memory& own = memories_[number];
    return own.bytes[nb::slice(nb::int_(start * own.row_nbytes), nb::int_(stop * own.row_nbytes), nb::none())];
}

Slices::Slices(std::shared_ptr<const Rows> rows, std::size_t start, std::size_t stop)
    : rows_(std::move(rows)), start_(start), stop_(stop) {
    if (start > stop || stop > rows_->rows()) {
        farpool::fail_value("rows " + std::to_string(start) + " to " + std::to_string(stop) + " of " +
                            std::to_string(rows_->rows()) + " do not exist");
    }
    parts_.reserve(rows_->size());
    for (std::size_t number = 0; number < rows_->size(); ++number) {
        parts_.push_back(rows_->slice(number, start, stop));
        nbytes_ += parts_.back().iov_len;
    }
}

nb::list Slices::views() const {
    nb::list views;
    for (std::size_t number = 0; number < parts_.size(); ++number) {
        views.append(rows_->view(number, start_, stop_));
    }
    return views;
}

namespace {

// Slices of `size` rows that follow each other, None for a slice of which a row does not exist; `start` may be negative.
nb::list blocks(const std::shared_ptr<Rows>& self, std::int64_t start, std::int64_t count, std::int64_t size) {
    const auto rows = static_cast<std::int64_t>(self->rows());
    nb::list found;
    for (std::int64_t number = 0; number < count; ++number, start += size) {
        if (start < 0 || start > rows - size) {
            found.append(nb::none());
        } else {
            found.append(Slices(self, static_cast<std::size_t>(start), static_cast<std::size_t>(start + size)));
        }
    }
    return found;
}

// Bytes of one part of a target; empty unless it is a memoryview or Slices, writable and contiguous.
std::optional<std::size_t> part_nbytes(nb::handle part) {
    if (nb::isinstance<Slices>(part) && nb::inst_ready(part)) {
        const auto& slices = *nb::inst_ptr<Slices>(part);
        return slices.readonly() ? std::nullopt : std::optional(slices.nbytes());
    }
    Py_buffer view{};
    if (PyMemoryView_Check(part.ptr()) == 0) {
        return std::nullopt;
    }
    if (PyObject_GetBuffer(part.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) != 0) {
        PyErr_Clear();
        return std::nullopt;
    }
    const auto nbytes = static_cast<std::size_t>(view.len);
    PyBuffer_Release(&view);
    return nbytes;
}

std::optional<std::size_t> target_nbytes(nb::handle target) {
    if (PyTuple_Check(target.ptr()) == 0) {
        return PyMemoryView_Check(target.ptr()) != 0 ? part_nbytes(target) : std::nullopt;
    }
    std::size_t total = 0;
    for (const nb::handle part : nb::borrow<nb::tuple>(target)) {
        const auto nbytes = part_nbytes(part);
        if (!nbytes) {
            return std::nullopt;
        }
        total += *nbytes;
    }
    return total;
}

// Bytes of each target; empty if Python has to look at one of them.
std::optional<nb::list> target_sizes(const nb::list& targets) {
    nb::list sizes;
    for (const nb::handle one : targets) {
        const auto nbytes = target_nbytes(one);
        if (!nbytes) {
            return std::nullopt;
        }
        sizes.append(*nbytes);
    }
    return sizes;
}

}  // namespace

void bind_slices(nb::module_& m) {
    nb::class_<Rows>(
        m, "Rows",
        R"(Buffers in which each row, such as one token, has a fixed number of bytes; `len` is of the rows that all of them have.

Keeps the buffers. ValueError if there are not as many sizes as buffers, or none; BufferError if a buffer is not contiguous.)")
        .def(nb::init<const nb::list&, const std::vector<std::size_t>&>(), nb::arg("memories"), nb::arg("row_nbytes"),
             nb::sig("def __init__(self, memories: collections.abc.Sequence[typing.Any], row_nbytes: "
                     "collections.abc.Sequence[int]) -> None"))
        .def("__len__", &Rows::rows)
        .def(
            "blocks", blocks, nb::arg("start"), nb::arg("count"), nb::arg("size"),
            nb::sig("def blocks(self, start: int, count: int, size: int) -> list[Slices | None]"),
            R"(Take `count` slices of `size` rows each that follow each other from row `start` on, which may be negative; None for
a slice of which a row does not exist.)");
    nb::class_<Slices>(m, "Slices", "The same rows of several buffers, one buffer after the other, as one payload.")
        .def_prop_ro("nbytes", &Slices::nbytes)
        .def_prop_ro("readonly", &Slices::readonly)
        .def("views", &Slices::views, nb::sig("def views(self) -> list[memoryview]"),
             "Return them as memory of Python, one for each buffer.");
    m.def(
        "target_sizes", target_sizes, nb::arg("targets"),
        nb::sig("def target_sizes(targets: list[typing.Any]) -> list[int] | None"),
        R"(Return the bytes of each target: a memoryview, or a tuple of those and `Slices`, all writable and contiguous; None where
one of them is something else, which `farpool.cluster.store.arguments` converts or refuses.)");
}
