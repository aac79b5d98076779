// What was published, and what a node may therefore answer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace farpool::fuzz {

// A tenant's objects as its publishers know them. Only what was offered may be found, and nothing older than what was
// confirmed before the question was asked.
class Book {
public:
    struct Object {
        std::uint32_t crc;
        std::uint64_t nbytes;
    };

    void offer(const std::string& key, std::uint64_t generation, Object object) {
        offered_[key].insert_or_assign(generation, object);
    }
    void offer_deletion(const std::string& key, std::uint64_t generation) { deletions_[key].insert(generation); }
    void confirm(const std::string& key, std::uint64_t generation) {
        std::uint64_t& newest = confirmed_[key];
        newest = std::max(newest, generation);
    }
    std::uint64_t confirmed(const std::string& key) const {
        const auto found = confirmed_.find(key);
        return found == confirmed_.end() ? 0 : found->second;
    }
    const Object* find(const std::string& key, std::uint64_t generation) const {
        const auto found = offered_.find(key);
        if (found == offered_.end()) {
            return nullptr;
        }
        const auto object = found->second.find(generation);
        return object == found->second.end() ? nullptr : &object->second;
    }
    bool was_deleted(const std::string& key, std::uint64_t generation) const {
        const auto found = deletions_.find(key);
        return found != deletions_.end() && found->second.contains(generation);
    }

private:
    std::map<std::string, std::map<std::uint64_t, Object>> offered_;
    std::map<std::string, std::set<std::uint64_t>> deletions_;
    std::map<std::string, std::uint64_t> confirmed_;
};

}  // namespace farpool::fuzz
