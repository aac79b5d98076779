// The files of a tenant's objects: opening the files of an earlier start, or making new ones.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "node/catalogue/index.hpp"
#include "node/files.hpp"

namespace farpool {

struct ObjectPaths {
    std::string index, data;
};

struct ObjectFiles {
    std::unique_ptr<Index> index;  // retired until the catalogue is ready
    Segment data;
};

ObjectPaths object_paths(const std::string& folder, std::uint32_t tenant);
// The tenant whose index file has this name; empty if it is not the name of an index.
std::optional<std::uint32_t> tenant_of_file(const std::string& file_name);
// Opens the tenant's files. Files that do not belong together or do not fit a node that lends `lent` bytes are replaced by new
// ones with `places` bytes for objects, and `note` says why. `fresh`: removes all files, and stores the objects in anonymous
// memory, of which a killed node leaves nothing. Throws std::system_error.
ObjectFiles open_object_files(const ObjectPaths& paths, std::uint32_t tenant, std::uint64_t lent, std::uint64_t places,
                              bool fresh, std::string& note);
// Fills in the header of a data segment that belongs to an index.
void lay_out_data(SegmentHeader& header, const SegmentHeader& index, std::uint64_t capacity);

}  // namespace farpool
