// What was published, and what a node may therefore answer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

namespace farpool::fuzz {

// A tenant's objects as its publishers know them. Only what was offered under a key may be found there, one serial means one
// object for ever, and what was there when a drop was asked for is not found once that has been confirmed.
class Book {
public:
    using Object = std::pair<std::uint64_t, std::uint32_t>;  // bytes, CRC32C

    void offer(const std::string& key, Object object) { offered_[key].insert(object); }
    bool was_offered(const std::string& key, Object object) const {
        const auto found = offered_.find(key);
        return found != offered_.end() && found->second.contains(object);
    }
    bool has_size(const std::string& key, std::uint64_t nbytes) const {
        const auto found = offered_.find(key);
        return found != offered_.end() && std::any_of(found->second.begin(), found->second.end(),
                                                      [&](const Object& object) { return object.first == nbytes; });
    }
    // Remembers what a serial is; false where that is not what it was.
    bool agrees(const std::string& key, std::uint64_t serial, Object object) {
        const auto [known, is_new] = serials_.emplace(serial, Known{key, object, 0});
        if (is_new) {
            known->second.place = ++known_[key];
        }
        return known->second.key == key && known->second.object == object;
    }
    // How many objects of this key are known, and when a serial became known among them.
    std::uint64_t known(const std::string& key) const { return at(known_, key); }
    std::uint64_t place(std::uint64_t serial) const { return serials_.at(serial).place; }
    // The first so many have been dropped.
    void bury(const std::string& key, std::uint64_t count) {
        std::uint64_t& buried = buried_[key];
        buried = std::max(buried, count);
    }
    std::uint64_t buried(const std::string& key) const { return at(buried_, key); }

private:
    using Numbers = std::map<std::string, std::uint64_t>;
    struct Known {
        std::string key;
        Object object;
        std::uint64_t place;
    };

    static std::uint64_t at(const Numbers& numbers, const std::string& key) {
        const auto found = numbers.find(key);
        return found == numbers.end() ? 0 : found->second;
    }

    std::map<std::string, std::set<Object>> offered_;
    std::map<std::uint64_t, Known> serials_;
    Numbers known_;
    Numbers buried_;
};

}  // namespace farpool::fuzz
