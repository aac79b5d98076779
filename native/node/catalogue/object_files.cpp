#include "node/catalogue/object_files.hpp"

#include <charconv>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "node/budget.hpp"

namespace farpool {

namespace {

// Fault of the files of an earlier start, for a node that lends `lent` bytes; null if they can be adopted.
const char* fault_of(const Index& index, const Segment& data, std::uint64_t lent) {
    const SegmentHeader& header = index.segment().header();
    if (!index.epoch()) {
        return "the tenant's epoch is damaged in their index";
    }
    if (std::memcmp(header.id, data.header().id, sizeof header.id) != 0) {
        return "their files do not belong together";
    }
    SegmentHeader expected{};
    Index::lay_out(expected, data.nbytes());
    // The node may have had a lower medium then or not.
    const bool alike = (data.nbytes() == 3 * lent || data.nbytes() == 3 * lent + Budget::moving_bytes_max) &&
                       index.segment().nbytes() == expected.capacity && header.slot_limit == expected.slot_limit;
    return alike ? nullptr : "it lent another amount of memory";
}

}  // namespace

ObjectPaths object_paths(const std::string& folder, std::uint32_t tenant) {
    const std::string stem = folder + "/objects-" + std::to_string(tenant);
    return {stem + ".index", stem + ".data"};
}

std::optional<std::uint32_t> tenant_of_file(const std::string& file_name) {
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

void lay_out_data(SegmentHeader& header, const SegmentHeader& index, std::uint64_t capacity) {
    std::memcpy(header.id, index.id, sizeof header.id);
    header.tenant = index.tenant;
    header.kind = static_cast<std::uint32_t>(SegmentKind::objects);
    header.capacity = capacity;
}

ObjectFiles open_object_files(const ObjectPaths& paths, std::uint32_t tenant, std::uint64_t lent, std::uint64_t places,
                              bool fresh, std::string& note) {
    constexpr const char* forgotten = "the objects of an earlier start are forgotten: ";
    std::uint32_t epoch = 0;
    ObjectFiles files;
    try {
        // Programs that have an old index mapped see from now on that it is retired, whatever we do with it.
        files.index = std::make_unique<Index>(open_segment(paths.index, SegmentKind::index));
        files.data = open_segment(paths.data, SegmentKind::objects);
        const bool is_theirs = files.index->segment().header().tenant == tenant;
        epoch = is_theirs ? files.index->epoch().value_or(0) : 0;  // kept even if the objects are not
        const char* const fault = fault_of(*files.index, files.data, lent);
        if (!fresh && fault == nullptr && is_theirs) {
            return files;
        }
        if (!fresh) {
            note = std::string(forgotten) + (fault == nullptr ? "it lent another amount of memory" : fault);
        }
    } catch (const std::system_error& error) {
        if (error.code() != std::errc::no_such_file_or_directory) {
            throw;  // files that we cannot open now may be whole
        }  // no earlier start
    } catch (const std::runtime_error& error) {
        note = std::string(forgotten) + error.what();
    }
    files = {};
    if (fresh) {
        remove_file(paths.data);
        remove_file(paths.index);
    }
    SegmentHeader index{};
    const std::uint64_t words[2] = {random_word(), random_word()};
    std::memcpy(index.id, words, sizeof index.id);
    index.tenant = tenant;
    Index::lay_out(index, places);
    const auto make = fresh ? make_nameless_segment : make_segment;
    SegmentHeader data{};
    lay_out_data(data, index, places);
    files.data = make(paths.data, data);
    files.index = std::make_unique<Index>(make(paths.index, index));
    files.index->begin_epoch(epoch, 0);
    return files;
}

}  // namespace farpool
