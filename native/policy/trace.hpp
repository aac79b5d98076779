// Traces of requests, and the files that hold them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace farpool::policy {

struct Trace {
    std::vector<std::uint64_t> ids;
    std::vector<std::uint64_t> sizes;
    std::vector<std::int64_t> next_uses;  // a number that grows with time; `never` if there is none
    std::uint64_t left_out = 0;           // requests of 0 bytes, which no cache has to keep

    std::size_t size() const noexcept { return ids.size(); }
    void add(std::uint64_t id, std::uint64_t size, std::int64_t next_use);
    // Finds the next uses by going through the trace backwards.
    void find_next_uses();
    // Number of different objects, and the sum of their sizes in their first requests.
    std::uint64_t objects() const { return count().objects; }
    std::uint64_t footprint() const { return count().nbytes; }

private:
    struct Count {
        std::uint64_t objects = 0;
        std::uint64_t nbytes = 0;
    };
    Count count() const;
};

// Reads libCacheSim's oracleGeneral: records of 24 bytes, little-endian: u32 time, u64 object, u32 size, i64 number of the
// request that uses it next (-1: none; -2: not known). Throws if the bytes cannot be such records.
Trace read_oracle_general(std::string_view bytes);
// Reads lines of `time,object,size`, or with a header that names the columns (docs/policies.md). Throws with the line number.
Trace read_csv(std::string_view text);

}  // namespace farpool::policy
