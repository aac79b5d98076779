// What an earlier start has left: the files of a tenant opened or made, and the objects in them that are whole.
#include <charconv>
#include <new>
#include <stdexcept>
#include <system_error>

#include "node/extent_head.hpp"
#include "node/objects.hpp"

namespace farpool {

Objects::Objects(const std::string& folder, std::uint32_t tenant, Budget& budget, Shelf* shelf, bool fresh, std::string& note)
    : tenant_(tenant), budget_(budget), shelf_(shelf) {
    const std::string stem = folder + "/objects-" + std::to_string(tenant);
    paths_ = {stem + ".index", stem + ".data"};
    open(budget.limit / unit_nbytes * unit_nbytes, fresh, note);
    make_visited();
    marks_ = policy::Marks(visited_.memory.at<std::atomic<std::uint8_t>>(segment_header_nbytes));
    sieve_ = std::make_unique<policy::Sieve>(marks_);
    lower_ = std::make_unique<policy::Sieve>(marks_);
    space_ = std::make_unique<FreeSpace>(static_cast<std::int64_t>(capacity() / unit_nbytes));
    do {
        if (!back_visited(visited_backed_)) {
            throw std::bad_alloc();
        }
    } while (visited_backed_ < index_->slots_used());
    index_->adopt([this](std::uint32_t slot) { return adopt(slot); });
    if (index_->lent_out()) {
        leave_old_file();
    } else {
        forget_backing(true);
        trim();  // what the holes of an earlier start have kept
    }
    index_->set_shelf(shelf_ == nullptr ? 0 : shelf_->id());
    counts_.adopted = index_->size();
    while (budget_.used > budget_.limit && evict_one()) {
    }
    index_->set_retired(false);
}

Objects::~Objects() = default;

// Programs of an earlier start may still read what they pinned, or write what they prepared. Nobody here knows who they are, so
// they keep the old file, which lives as long as one of them has it mapped, and the objects move to a new one. That takes the old
// one's place when all are there: a node that is killed meanwhile begins again.
void Objects::leave_old_file() {
    SegmentHeader header{};  // not the old file's: those programs can write it
    std::memcpy(header.id, index_->segment().header().id, sizeof header.id);
    header.tenant = tenant_;
    header.kind = static_cast<std::uint32_t>(SegmentKind::objects);
    header.capacity = capacity();
    const Segment old = std::exchange(data_, draft_segment(paths_.data, header));
    forget_backing(false);
    for (std::uint32_t slot = 0; slot < index_->slots_used(); ++slot) {
        if (!index_->is_live(slot)) {
            continue;
        }
        const Index::Entry entry = index_->at(slot);
        if (back_extent(entry.offset, entry.units)) {
            std::memcpy(at(entry.offset), old.memory.data() + entry.offset, std::uint64_t{entry.units} * unit_nbytes);
        } else {
            drop_knowledge(slot);
        }
    }
    put_in_place(data_);
    index_->set_lent_out(false);
}

void Objects::open(std::uint64_t capacity, bool fresh, std::string& note) {
    try {
        // Whoever has an old index mapped learns that it is no longer served, whatever becomes of it.
        index_ = std::make_unique<Index>(open_segment(paths_.index, SegmentKind::index));
        data_ = open_segment(paths_.data, SegmentKind::objects);
        const SegmentHeader& header = index_->segment().header();
        const bool together = std::memcmp(header.id, data_.header().id, sizeof header.id) == 0;
        SegmentHeader expected{};
        Index::lay_out(expected, capacity);
        const bool alike = data_.nbytes() == capacity && index_->segment().nbytes() == expected.capacity &&
                           header.slot_limit == expected.slot_limit;
        if (!fresh && together && alike && header.tenant == tenant_) {
            return;
        }
        if (!fresh) {
            note = together ? "the objects of an earlier start are forgotten: it lent another amount of memory"
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
    header.capacity = capacity;
    data_ = make_segment(paths_.data, header);
    Index::lay_out(header, capacity);
    index_ = std::make_unique<Index>(make_segment(paths_.index, header));
}

// The marks of an earlier start are not missed. Every reader may write them, so they lie where no reader can cut them off.
void Objects::make_visited() {
    const SegmentHeader& index = index_->segment().header();
    SegmentHeader header{};
    std::memcpy(header.id, index.id, sizeof header.id);
    header.tenant = tenant_;
    header.kind = static_cast<std::uint32_t>(SegmentKind::visited);
    header.capacity = index.slot_limit;
    visited_ = make_shared_segment("farpool-objects-" + std::to_string(tenant_) + "-visited", header);
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

void Objects::remove_files() {
    index_->set_retired(true);
    remove_file(paths_.index);
    remove_file(paths_.data);
}

// Whether a header that an earlier start has left is whole and its payload is where the slot says.
bool Objects::fits(const ObjectHeader& header, const Index::Entry& entry) const {
    const std::uint64_t nbytes = std::uint64_t{entry.units} * unit_nbytes;
    if (entry.blocks == 0) {
        return is_whole(header, nbytes) && units_for(header.key_nbytes, header.nbytes) == entry.units;
    }
    const bool written = (entry.blocks & unwritten) == 0;
    return shelf_ != nullptr && index_->shelf() == shelf_->id() && written && is_whole(header, nbytes, false) &&
           units_for(header.key_nbytes, 0) == entry.units && header.nbytes > 0 && header.nbytes <= shelf_->capacity() &&
           shelf_blocks(header.nbytes) == entry.blocks;
}

// Whether the slot of an earlier start holds an object that is whole. The index is trusted as nobody else can write it; the
// data segment is not.
bool Objects::adopt(std::uint32_t slot) {
    const Index::Entry entry = index_->at(slot);
    const std::uint64_t end = segment_header_nbytes + capacity();
    if (entry.offset % unit_nbytes != 0 || entry.offset < segment_header_nbytes || entry.offset >= end || entry.units == 0 ||
        entry.units > (end - entry.offset) / unit_nbytes) {
        return false;
    }
    const Head head = copy_head(at(entry.offset), std::uint64_t{entry.units} * unit_nbytes);
    const ObjectHeader& header = head.header;
    if (!fits(header, entry) || header.generation != entry.generation ||
        header.units != entry.units || header.slot != slot || index_->hash(key_of(header)) != entry.hash) {
        return false;
    }
    const std::uint32_t twin = slot_of(key_of(header), entry.hash);
    if (twin != Index::none) {  // killed between publishing a generation and removing the one before
        if (index_->at(twin).generation > entry.generation) {
            return false;
        }
        take_out(twin);
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
    count(slot, header);
    enqueue(slot, entry);
    return true;
}

}  // namespace farpool
