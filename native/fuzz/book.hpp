// A record of the published objects, against which the replies of a node are checked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

namespace farpool::fuzz {

// A tenant's objects as its publishers know them. Rules: a key holds only objects that were offered under it; a serial always
// means the same object; an object that was there when a drop was requested is not found once the drop is confirmed; no two
// keeps or let-goes give the same mark.
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
    // Records the object of a serial; false if the serial was seen before with another object.
    bool agrees(const std::string& key, std::uint64_t serial, Object object) {
        const auto [known, is_new] = serials_.emplace(serial, Known{key, object, 0});
        if (is_new) {
            known->second.place = ++known_[key];
        }
        return known->second.key == key && known->second.object == object;
    }
    // Records the mark that a keep or let-go has given; false if it was given before.
    bool is_new_mark(std::uint64_t mark) { return marks_.insert(mark).second; }
    // Number of known objects of a key, and the place of a serial among its key's serials, from 1.
    std::uint64_t known(const std::string& key) const { return at(known_, key); }
    std::uint64_t place(std::uint64_t serial) const { return serials_.at(serial).place; }
    // Notes that the first `count` known objects of a key have been dropped.
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
    std::set<std::uint64_t> marks_;
    Numbers known_;
    Numbers buried_;
};

}  // namespace farpool::fuzz
