// Adoption of a tenant's files from an earlier start, with the objects in them that are intact; new files where there are none.
#include <algorithm>
#include <charconv>
#include <new>
#include <optional>
#include <stdexcept>
#include <system_error>

#include "node/extent_head.hpp"
#include "node/objects.hpp"

namespace farpool {

Objects::Objects(const std::string& folder, std::uint32_t tenant, Budget& budget, Shelf* shelf, bool fresh, std::string& note)
    : tenant_(tenant), budget_(budget), shelf_(shelf) {
    const std::string stem = folder + "/objects-" + std::to_string(tenant);
    paths_ = {stem + ".index", stem + ".data"};
    // Places for present objects, for announced ones that have not come, and as many again, so that there are large ones among
    // the free. Objects that leave for the file need their place for a while longer.
    const std::uint64_t lent = budget.limit / unit_nbytes * unit_nbytes;
    open(lent, 3 * lent + (shelf == nullptr ? 0 : Budget::most_leaving), fresh, note);
    epoch_ = index_->epoch().value_or(0);
    first_serial_ = index_->first_serial();
    visits_ = std::make_unique<Visits>(index_->segment().header(), budget_.limit);  // those of an earlier start are not missed
    marks_ = visits_->marks();
    // One for each 8 KiB, so that what is remembered takes a hundredth of what is lent.
    const std::size_t remembered = std::clamp<std::size_t>(budget_.limit / 8192, 1024, policy::MarkedReuse::most_remembered);
    upper_ = std::make_unique<policy::MarkedReuse>(marks_, remembered);
    lower_ = std::make_unique<policy::MarkedReuse>(marks_, remembered);
    space_ = std::make_unique<FreeSpace>(static_cast<std::int64_t>(room() / unit_nbytes));
    do {
        if (!visits_->back(visits_->backed())) {
            throw std::bad_alloc();
        }
    } while (visits_->backed() < index_->slots_used());
    index_->adopt([this](std::uint32_t slot) { return adopt(slot); });
    charge_tables();
    if (index_->lent_out()) {
        leave_old_file(note);
    } else {
        forget_backing(true);
        trim();  // what the holes of an earlier start have kept
    }
    index_->set_shelf(shelf_ == nullptr ? 0 : shelf_->id());
    counts_.adopted = index_->size();
    // Objects that were on their way to the file when a node was killed go there now; none is dropped because the file is slow.
    while (budget_.used > budget_.limit && budget_.leaving < Budget::most_leaving && evict_one()) {
    }
    index_->set_retired(false);
    budget_.join(tenant_, *this);
}

Objects::~Objects() { budget_.leave(tenant_); }

// Moves the objects to a new data file. Programs of an earlier start may still read their pins or write their preparations in
// the old file; as they are not known, they keep it for as long as one of them has it mapped. The new file replaces the old one
// when all objects are there: a node that is killed meanwhile begins again.
void Objects::leave_old_file(std::string& note) {
    SegmentHeader header{};  // not the old file's: those programs can write it
    std::memcpy(header.id, index_->segment().header().id, sizeof header.id);
    header.tenant = tenant_;
    header.kind = static_cast<std::uint32_t>(SegmentKind::objects);
    header.capacity = room();
    std::optional<Segment> old;
    try {
        old = std::exchange(data_, draft_segment(paths_.data, header));
    } catch (const std::system_error& error) {
        if (!is_lack_of_memory(error.code().value())) {
            throw;
        }
        note = "the objects of an earlier start are forgotten: the file system has no memory for a file without programs in it";
        for (std::uint32_t slot = 0; slot < index_->slots_used(); ++slot) {
            if (index_->is_live(slot)) {
                take_out(slot);
            }
        }
        remove_file(paths_.data);
        data_ = {};  // frees its memory, unless a program has it mapped
        data_ = draft_segment(paths_.data, header);
    }
    forget_backing(false);
    for (std::uint32_t slot = 0; slot < index_->slots_used(); ++slot) {
        if (!index_->is_live(slot)) {
            continue;
        }
        const Index::Entry entry = index_->at(slot);
        if (back_extent(entry.offset, entry.units)) {
            std::memcpy(at(entry.offset), old->memory.data() + entry.offset, std::uint64_t{entry.units} * unit_nbytes);
        } else {
            take_out(slot);
        }
    }
    put_in_place(data_);
    index_->set_lent_out(false);
}

void Objects::open(std::uint64_t lent, std::uint64_t places, bool fresh, std::string& note) {
    std::uint32_t epoch = 0;
    try {
        // Tells programs that have an old index mapped that it is no longer served, whatever becomes of it.
        index_ = std::make_unique<Index>(open_segment(paths_.index, SegmentKind::index));
        data_ = open_segment(paths_.data, SegmentKind::objects);
        const SegmentHeader& header = index_->segment().header();
        const bool intact = index_->epoch().has_value();
        epoch = header.tenant == tenant_ ? index_->epoch().value_or(0) : 0;  // kept when the objects are not
        const bool together = std::memcmp(header.id, data_.header().id, sizeof header.id) == 0;
        SegmentHeader expected{};
        Index::lay_out(expected, data_.nbytes());
        // With and without an NVMe file.
        const bool alike = (data_.nbytes() == 3 * lent || data_.nbytes() == 3 * lent + Budget::most_leaving) &&
                           index_->segment().nbytes() == expected.capacity && header.slot_limit == expected.slot_limit;
        if (!fresh && together && alike && intact && header.tenant == tenant_) {
            return;
        }
        if (!fresh) {
            note = !intact    ? "the objects of an earlier start are forgotten: the tenant's epoch is damaged in their index"
                   : together ? "the objects of an earlier start are forgotten: it lent another amount of memory"
                              : "the objects of an earlier start are forgotten: their files do not belong together";
        }
    } catch (const std::system_error& error) {
        if (error.code() != std::errc::no_such_file_or_directory) {
            throw;  // what cannot be opened now may be whole
        }  // no earlier start
    } catch (const std::runtime_error& error) {
        note = std::string("the objects of an earlier start are forgotten: ") + error.what();
    }
    index_.reset();
    SegmentHeader header{};
    const std::uint64_t words[2] = {random_word(), random_word()};
    std::memcpy(header.id, words, sizeof header.id);
    header.tenant = tenant_;
    header.kind = static_cast<std::uint32_t>(SegmentKind::objects);
    header.capacity = places;
    if (fresh) {
        remove_file(paths_.data);
        remove_file(paths_.index);
    }
    const auto make = fresh ? make_nameless_segment : make_segment;
    data_ = make(paths_.data, header);
    Index::lay_out(header, places);
    index_ = std::make_unique<Index>(make(paths_.index, header));
    index_->begin_epoch(epoch, 0);
}

std::optional<std::uint32_t> Objects::tenant_of(const std::string& file_name) {
    constexpr std::string_view before = "objects-";
    constexpr std::string_view after = ".index";
    if (!file_name.starts_with(before) || !file_name.ends_with(after)) {
        return std::nullopt;
    }
    std::uint32_t tenant = 0;
    const char* last = file_name.data() + file_name.size() - after.size();
    const auto [end, error] = std::from_chars(file_name.data() + before.size(), last, tenant);
    return error == std::errc() && end == last ? std::optional(tenant) : std::nullopt;
}

std::pair<int, int> Objects::open_files(bool writable) const {
    File index(index_->segment().file.read_only());
    const int data = writable ? data_.file.duplicate() : data_.file.read_only();
    return {index.release(), data};
}

void Objects::remove_files() {
    index_->set_retired(true);
    remove_file(paths_.index);
    remove_file(paths_.data);
}

// True if a header from an earlier start is intact and its payload is where the slot says.
bool Objects::fits(const ObjectHeader& header, const Index::Entry& entry) const {
    const std::uint64_t nbytes = std::uint64_t{entry.units} * unit_nbytes;
    if (entry.blocks == 0) {
        return is_whole(header, nbytes) && units_for(header.key_nbytes, header.nbytes) == entry.units;
    }
    return shelf_ != nullptr && index_->shelf() == shelf_->id() && is_whole(header, nbytes, false) &&
           units_for(header.key_nbytes, 0) == entry.units && header.nbytes > 0 && header.nbytes <= shelf_->capacity() &&
           shelf_blocks(header.nbytes) == entry.blocks;
}

// Adopts the object in a slot of an earlier start; false if it is not intact. The index is trusted, as nobody else can write
// it; the data segment is not.
bool Objects::adopt(std::uint32_t slot) {
    const Index::Entry entry = index_->at(slot);
    const std::uint64_t end = segment_header_nbytes + room();
    if (entry.offset % unit_nbytes != 0 || entry.offset < segment_header_nbytes || entry.offset >= end || entry.units == 0 ||
        entry.units > (end - entry.offset) / unit_nbytes) {
        return false;
    }
    const Head head = copy_head(at(entry.offset), std::uint64_t{entry.units} * unit_nbytes);
    const ObjectHeader& header = head.header;
    if (entry.serial < first_serial_ || header.epoch != epoch_ || !fits(header, entry) || header.serial != entry.serial ||
        header.units != entry.units || header.slot != slot || index_->hash(key_of(header)) != entry.hash) {
        return false;
    }
    const std::uint32_t twin = slot_of(key_of(header), entry.hash);
    if (twin != Index::none) {  // killed while the object moved: it is here and there
        return false;
    }
    const auto first_unit = static_cast<std::int64_t>((entry.offset - segment_header_nbytes) / unit_nbytes);
    if (!space_->take(first_unit, entry.units)) {
        return false;
    }
    if (entry.blocks != 0 && !shelf_->take(entry.block, entry.blocks)) {
        space_->free(first_unit, entry.units);
        return false;
    }
    take(entry.units);
    indexed_units_ += entry.units;
    fixed_units_ += is_fixed(entry) ? entry.units : 0;
    firm_units_ += is_firm(entry) ? entry.units : 0;
    count(slot, header);
    enqueue(slot, entry);
    return true;
}

}  // namespace farpool
