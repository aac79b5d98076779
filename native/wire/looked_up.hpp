// The reply to a lookup of many keys (docs/wire.md): which keys exist, how many before the first missing one, and their sizes.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

namespace farpool {

class LookedUp {
public:
    // Bytes of a reply for `count` keys.
    static constexpr std::uint64_t nbytes(std::uint64_t count) noexcept {
        return sizes_at(count) + count * sizeof(std::uint64_t);
    }

    explicit LookedUp(std::uint32_t count) : meta(nbytes(count), '\0'), sizes_at_(sizes_at(count)) {
        std::memcpy(meta.data(), &count, sizeof count);
    }

    // Enters the size of an existing key. Call in order of the keys' numbers; keys that are not entered are missing.
    void add(std::uint32_t number, std::uint64_t nbytes) noexcept {
        leading_ += leading_ == number ? 1 : 0;
        std::memcpy(meta.data() + sizeof number, &leading_, sizeof leading_);
        char& bits = meta[bitmap_at + number / 8];
        bits = static_cast<char>(static_cast<unsigned char>(bits) | 1u << number % 8);
        std::memcpy(meta.data() + sizes_at_ + std::uint64_t{number} * sizeof nbytes, &nbytes, sizeof nbytes);
    }

    std::string meta;

private:
    friend class LookupReply;
    static constexpr std::uint64_t bitmap_at = 2 * sizeof(std::uint32_t);
    static constexpr std::uint64_t sizes_at(std::uint64_t count) noexcept { return bitmap_at + (count + 63) / 64 * 8; }

    std::uint64_t sizes_at_;
    std::uint32_t leading_ = 0;
};

// The reply to a lookup of `count` keys as received from a node.
class LookupReply {
public:
    LookupReply(std::string_view meta, std::uint64_t count) noexcept : meta_(meta), count_(count) {}

    bool whole() const noexcept {
        std::uint32_t count = 0;
        return meta_.size() == LookedUp::nbytes(count_) && (std::memcpy(&count, meta_.data(), sizeof count), count == count_);
    }

    // Bytes of the value of the key with this number; empty if it is missing. Valid if the reply is whole().
    std::optional<std::uint64_t> nbytes_of(std::uint64_t number) const noexcept {
        if ((static_cast<unsigned char>(meta_[LookedUp::bitmap_at + number / 8]) >> number % 8 & 1u) == 0) {
            return std::nullopt;
        }
        std::uint64_t nbytes = 0;
        std::memcpy(&nbytes, meta_.data() + LookedUp::sizes_at(count_) + number * sizeof nbytes, sizeof nbytes);
        return nbytes;
    }

private:
    std::string_view meta_;
    std::uint64_t count_;
};

}  // namespace farpool
