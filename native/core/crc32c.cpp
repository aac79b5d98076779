// The crc32 instruction takes three cycles but one can start each cycle, so three streams run side by side. Their results
// are joined by advancing a register over a known number of zero bytes, which is linear over GF(2) and so a table lookup
// a byte. If the processor can fold (crc32c_folding.cpp), this code only computes short buffers and remainders.
#include "core/crc32c.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/crc32c_folding.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define FARPOOL_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#if defined(__clang__)
#define FARPOOL_CRC_TARGET __attribute__((target("crc")))
#else
#define FARPOOL_CRC_TARGET __attribute__((target("+crc")))
#endif
#endif

namespace farpool {

namespace {

using Table = std::array<std::uint32_t, 256>;

constexpr std::array<Table, 8> make_byte_tables() {
    std::array<Table, 8> tables{};
    for (std::uint32_t value = 0; value < 256; ++value) {
        std::uint32_t crc = value;
        for (int bit = 0; bit < 8; ++bit) {
            crc = (crc & 1u) != 0 ? (crc >> 1) ^ crc32c_polynomial : crc >> 1;
        }
        tables[0][value] = crc;
    }
    for (std::size_t value = 0; value < 256; ++value) {
        for (std::size_t table = 1; table < 8; ++table) {
            const std::uint32_t before = tables[table - 1][value];
            tables[table][value] = (before >> 8) ^ tables[0][before & 0xffu];
        }
    }
    return tables;
}

constexpr std::array<Table, 8> byte_tables = make_byte_tables();

std::uint32_t advance_portable(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) noexcept {
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, data, 8);
        word ^= crc;
        crc = 0;
        for (std::size_t byte = 0; byte < 8; ++byte) {
            crc ^= byte_tables[7 - byte][(word >> (8 * byte)) & 0xffu];
        }
    }
    for (; nbytes > 0; ++data, --nbytes) {
        crc = (crc >> 8) ^ byte_tables[0][(crc ^ *data) & 0xffu];
    }
    return crc;
}

#if defined(FARPOOL_CRC_TARGET)

class ZeroBytes {
public:
    explicit ZeroBytes(std::size_t nbytes) {
        std::array<std::uint32_t, 32> basis{};
        for (std::size_t bit = 0; bit < 32; ++bit) {
            std::uint32_t crc = std::uint32_t{1} << bit;
            for (std::size_t n = 0; n < nbytes; ++n) {
                crc = (crc >> 8) ^ byte_tables[0][crc & 0xffu];
            }
            basis[bit] = crc;
        }
        for (std::size_t byte = 0; byte < 4; ++byte) {
            for (std::size_t value = 0; value < 256; ++value) {
                for (std::size_t bit = 0; bit < 8; ++bit) {
                    if ((value >> bit & 1u) != 0) {
                        tables_[byte][value] ^= basis[8 * byte + bit];
                    }
                }
            }
        }
    }

    std::uint32_t operator()(std::uint32_t crc) const noexcept {
        return tables_[0][crc & 0xffu] ^ tables_[1][crc >> 8 & 0xffu] ^ tables_[2][crc >> 16 & 0xffu] ^ tables_[3][crc >> 24];
    }

private:
    std::array<Table, 4> tables_{};
};

#if defined(__x86_64__)
FARPOOL_CRC_TARGET inline std::uint32_t step(std::uint32_t crc, std::uint64_t word) {
    return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
FARPOOL_CRC_TARGET inline std::uint32_t step(std::uint32_t crc, unsigned char byte) { return _mm_crc32_u8(crc, byte); }
bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#else
FARPOOL_CRC_TARGET inline std::uint32_t step(std::uint32_t crc, std::uint64_t word) { return __crc32cd(crc, word); }
FARPOOL_CRC_TARGET inline std::uint32_t step(std::uint32_t crc, unsigned char byte) { return __crc32cb(crc, byte); }
bool has_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

inline std::uint64_t load(const unsigned char* data) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, 8);
    return word;
}

FARPOOL_CRC_TARGET std::uint32_t advance_triples(std::uint32_t crc, const unsigned char*& data, std::size_t& nbytes,
                                                 std::size_t stream, const ZeroBytes& over_stream) noexcept {
    while (nbytes >= 3 * stream) {
        std::uint32_t second = 0;
        std::uint32_t third = 0;
        for (const unsigned char* end = data + stream; data < end; data += 8) {
            crc = step(crc, load(data));
            second = step(second, load(data + stream));
            third = step(third, load(data + 2 * stream));
        }
        crc = over_stream(crc) ^ second;
        crc = over_stream(crc) ^ third;
        data += 2 * stream;
        nbytes -= 3 * stream;
    }
    return crc;
}

FARPOOL_CRC_TARGET std::uint32_t advance_hardware(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) noexcept {
    constexpr std::size_t long_stream = 4096;
    constexpr std::size_t short_stream = 256;
    static const ZeroBytes over_long(long_stream);
    static const ZeroBytes over_short(short_stream);
    crc = advance_triples(crc, data, nbytes, long_stream, over_long);
    crc = advance_triples(crc, data, nbytes, short_stream, over_short);
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        crc = step(crc, load(data));
    }
    for (; nbytes > 0; ++data, --nbytes) {
        crc = step(crc, *data);
    }
    return crc;
}

#endif

// Bytes copied at once: few enough to be still in the cache when their checksum is computed.
constexpr std::size_t copy_chunk = 16384;

const Folding* fastest_folding() noexcept {
    static const Folding* const folding = foldings().empty() ? nullptr : &foldings().front();
    return folding;
}

std::size_t foldable_bytes(const Folding* folding, std::size_t nbytes) noexcept {
    return folding != nullptr && nbytes >= folding_least ? nbytes / folding_step * folding_step : 0;
}

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t nbytes, std::uint32_t value) noexcept {
    return ~advance_portable(~value, static_cast<const unsigned char*>(data), nbytes);
}

std::uint32_t crc32c_by(const Folding* folding, const void* data, std::size_t nbytes, std::uint32_t value) noexcept {
    const auto* bytes = static_cast<const unsigned char*>(data);
    if (const std::size_t foldable = foldable_bytes(folding, nbytes); foldable > 0) {
        value = ~folding->fold(~value, bytes, foldable);
        bytes += foldable;
        nbytes -= foldable;
    }
#if defined(FARPOOL_CRC_TARGET)
    static const bool hardware = has_instruction();
    if (hardware) {
        return ~advance_hardware(~value, bytes, nbytes);
    }
#endif
    return crc32c_portable(bytes, nbytes, value);
}

std::uint32_t copy_crc32c_by(const Folding* folding, void* to, const void* from, std::size_t nbytes,
                             std::uint32_t value) noexcept {
    auto* target = static_cast<unsigned char*>(to);
    const auto* source = static_cast<const unsigned char*>(from);
    std::size_t done = foldable_bytes(folding, nbytes);
    if (done > 0) {
        value = ~folding->fold_copy(~value, target, source, done);
    }
    while (done < nbytes) {
        const std::size_t chunk = std::min(nbytes - done, copy_chunk);
        std::memcpy(target + done, source + done, chunk);
        // Keeps the compiler from computing the checksum of `from` instead of `to`.
        asm volatile("" : : "r"(target) : "memory");
        value = crc32c_by(folding, target + done, chunk, value);
        done += chunk;
    }
    return value;
}

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t value) noexcept {
    return crc32c_by(fastest_folding(), data, nbytes, value);
}

std::uint32_t copy_crc32c(void* to, const void* from, std::size_t nbytes, std::uint32_t value) noexcept {
    return copy_crc32c_by(fastest_folding(), to, from, nbytes, value);
}

}  // namespace farpool
