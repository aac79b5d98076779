#include "policy/trace.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstring>
#include <optional>
#include <string>

#include "policy/id_map.hpp"
#include "policy/policy.hpp"

namespace farpool::policy {

namespace {

constexpr std::size_t record_nbytes = 24;
constexpr std::size_t absent = ~std::size_t{0};

template <typename Number>
Number little_endian(const char* bytes) {
    std::uint64_t value = 0;
    for (std::size_t at = 0; at < sizeof(Number); ++at) {
        value |= std::uint64_t{static_cast<unsigned char>(bytes[at])} << (8 * at);
    }
    return static_cast<Number>(value);
}

std::string_view trimmed(std::string_view text) {
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) {
        text.remove_prefix(1);
    }
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) {
        text.remove_suffix(1);
    }
    return text;
}

void split(std::string_view line, std::vector<std::string_view>& fields) {
    fields.clear();
    for (std::size_t begin = 0;;) {
        const std::size_t comma = line.find(',', begin);
        fields.push_back(trimmed(line.substr(begin, comma == std::string_view::npos ? comma : comma - begin)));
        if (comma == std::string_view::npos) {
            return;
        }
        begin = comma + 1;
    }
}

template <typename Number>
std::optional<Number> number(std::string_view field) {
    Number value{};
    const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
    return error == std::errc() && end == field.data() + field.size() ? std::optional(value) : std::nullopt;
}

[[noreturn]] void fail_line(std::size_t line, const std::string& what) {
    fail_value("line " + std::to_string(line) + ": " + what);
}

struct Columns {
    std::size_t count = 3;
    std::size_t object = 1;
    std::size_t size = 2;
};

std::size_t find_column(const std::vector<std::string_view>& names, std::initializer_list<std::string_view> known) {
    std::size_t found = absent;
    for (std::size_t at = 0; at < names.size(); ++at) {
        std::string name(names[at]);
        std::ranges::transform(name, name.begin(),
                               [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
        if (std::ranges::find(known, name) != known.end()) {
            if (found != absent) {
                fail_line(1, "the header names " + std::string(*known.begin()) + " twice");
            }
            found = at;
        }
    }
    if (found == absent) {
        fail_line(1, "the header names no column '" + std::string(*known.begin()) + "'");
    }
    return found;
}

bool is_header(const std::vector<std::string_view>& fields) {
    return std::ranges::none_of(fields, [](std::string_view field) { return number<double>(field).has_value(); });
}

}  // namespace

void Trace::add(std::uint64_t id, std::uint64_t size, std::int64_t next_use) {
    if (size == 0) {
        ++left_out;
        return;
    }
    ids.push_back(id);
    sizes.push_back(size);
    next_uses.push_back(next_use);
}

void Trace::find_next_uses() {
    std::vector<std::int64_t> latest;
    IdMap numbers;
    for (std::size_t at = ids.size(); at-- > 0;) {
        std::uint32_t number = numbers.find(ids[at]);
        if (number == IdMap::none) {
            number = static_cast<std::uint32_t>(latest.size());
            numbers.insert(ids[at], number);
            latest.push_back(never);
        }
        next_uses[at] = latest[number];
        latest[number] = static_cast<std::int64_t>(at);
    }
}

Trace::Count Trace::count() const {
    Count count;
    IdMap seen;
    for (std::size_t at = 0; at < ids.size(); ++at) {
        if (seen.find(ids[at]) == IdMap::none) {
            seen.insert(ids[at], 0);
            count.objects += 1;
            count.nbytes += sizes[at];
        }
    }
    return count;
}

Trace read_oracle_general(std::string_view bytes) {
    if (bytes.size() % record_nbytes != 0) {
        fail_value("it has " + std::to_string(bytes.size()) + " bytes, which is no multiple of a record's 24");
    }
    Trace trace;
    bool known = true;
    for (std::size_t at = 0; at < bytes.size(); at += record_nbytes) {
        const char* record = bytes.data() + at;
        const auto next_use = little_endian<std::int64_t>(record + 16);
        if (next_use < -2) {
            fail_value("record " + std::to_string(at / record_nbytes + 1) + ": its next use is " + std::to_string(next_use) +
                       ", expected a request's number, -1 or -2");
        }
        known = known && next_use != -2;
        trace.add(little_endian<std::uint64_t>(record + 4), little_endian<std::uint32_t>(record + 12),
                  next_use == -1 ? never : next_use);
    }
    if (!known) {
        trace.find_next_uses();
    }
    return trace;
}

Trace read_csv(std::string_view text) {
    Trace trace;
    Columns columns;
    std::vector<std::string_view> fields;
    std::size_t line = 0;
    while (!text.empty()) {
        const std::size_t end = std::min(text.find('\n'), text.size());
        split(text.substr(0, end), fields);
        text.remove_prefix(std::min(end + 1, text.size()));
        ++line;
        if (line == 1 && is_header(fields)) {
            columns = {fields.size(), find_column(fields, {"object", "id", "key", "obj_id", "object_id"}),
                       find_column(fields, {"size", "nbytes", "obj_size", "object_size"})};
            continue;
        }
        if (fields.size() != columns.count) {
            fail_line(line, "it has " + std::to_string(fields.size()) + " fields, expected " + std::to_string(columns.count));
        }
        const auto id = number<std::uint64_t>(fields[columns.object]);
        const auto size = number<std::uint64_t>(fields[columns.size]);
        if (!id) {
            fail_line(line, "the object is '" + std::string(fields[columns.object]) + "', expected a whole number");
        }
        if (!size) {
            fail_line(line, "the size is '" + std::string(fields[columns.size]) + "', expected a number of bytes");
        }
        trace.add(*id, *size, never);
    }
    trace.find_next_uses();
    return trace;
}

}  // namespace farpool::policy
